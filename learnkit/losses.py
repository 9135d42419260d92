# SPDX-License-Identifier: Apache-2.0
"""Loss functions with fastai's names: torch's losses of flattened predictions and targets, and further losses.

A Learner accepts any torch loss or function. The losses of this module also convert predictions: `activation` returns
probabilities, `decodes` returns predicted targets. Classes are along `axis`: (B, C), (B, T, C), or (B, C, H, W) with
`axis=1`. Targets are class numbers, or probabilities of the predictions' shape. `reduction` ('mean', 'sum' or 'none')
may be set at any time. Weights move with `.to(device)`.

Shapes that do not match raise `LossError`, also if torch would broadcast them. Invalid options raise `OptionError`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from fastcore.basics import noop
from torch import Tensor, nn
from typing_extensions import override

from learnkit.core.activation import Outputs, outputs_of
from learnkit.core.denominator import (
    ClassTargets,
    Denominator,
    Elements,
    Samples,
    Unknown,
    denominator_of,
)
from learnkit.core.errors import LossError, OptionError

__all__ = [
    'BaseLoss',
    'CrossEntropyLossFlat',
    'BCEWithLogitsLossFlat',
    'BCELossFlat',
    'MSELossFlat',
    'L1LossFlat',
    'LabelSmoothingCrossEntropy',
    'LabelSmoothingCrossEntropyFlat',
    'FocalLoss',
    'FocalLossFlat',
    'DiceLoss',
]


class BaseLoss(nn.Module):
    """Compute a torch loss of flattened predictions and targets.

    >>> BaseLoss(nn.SmoothL1Loss, is_2d=False)(torch.tensor([[1.], [2.]]), torch.tensor([1., 4.]))
    tensor(0.7500)
    """

    # whether targets may be class numbers, which MixUp cannot mix: MixUp mixes the losses of both targets
    y_int = False
    func: Any

    def __init__(
        self,
        loss_cls: Callable[..., Any],  # class of the loss, such as nn.CrossEntropyLoss
        *args: Any,  # positional arguments of the class
        axis: int = -1,  # class dimension
        flatten: bool = True,  # flatten; False: only move the class dimension to the end
        floatify: bool = False,  # convert targets to floats
        is_2d: bool = True,  # keep the class dimension: predictions (N, C), targets (N,)
        **kwargs: Any,  # keyword arguments of the class
    ) -> None:
        super().__init__()
        self.axis = axis
        self.flatten = flatten
        self.floatify = floatify
        self.is_2d = is_2d
        self.func = loss_cls(*args, **kwargs)
        _check_reduction(getattr(self.func, 'reduction', 'mean'))

    @property
    def reduction(self) -> str:
        "Reduction of the losses of a batch: 'mean', 'sum' or 'none'."
        return str(self.func.reduction)

    @reduction.setter
    def reduction(self, how: str) -> None:
        self.func.reduction = _check_reduction(how)

    def __getattr__(self, name: str) -> Any:
        "Return an option of the wrapped loss, such as `ignore_index`."
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith('_') or name == 'func':
                raise
            return getattr(self.func, name)

    def forward(self, inp: Tensor, targ: Tensor, **kwargs: Any) -> Any:
        self._check_fit(inp, targ)
        if targ.shape == inp.shape:
            targ = targ.movedim(self.axis, -1)
        inp = inp.movedim(self.axis, -1)
        if self.floatify:
            dtype = torch.promote_types(inp.dtype, torch.float32)
            inp, targ = inp.to(dtype), targ.to(dtype)
        elif not targ.is_floating_point():
            targ = targ.long()

        if not self.flatten:
            return self.func(inp, targ, **kwargs)
        n_classes = inp.shape[-1:] if self.is_2d else ()
        is_soft = targ.shape == inp.shape and targ.is_floating_point()
        targ = targ.reshape(-1, *n_classes) if is_soft else targ.reshape(-1)
        return self.func(inp.reshape(-1, *n_classes), targ, **kwargs)

    def loss_denominator(self) -> Denominator:
        "Return the denominator of the wrapped loss."
        denominator = denominator_of(self.func)
        if isinstance(denominator, ClassTargets):
            denominator.axis = self.axis
        return denominator

    def loss_outputs(self) -> Outputs:
        "Return the meaning of the predictions for the wrapped loss; without an activation, logits stay logits."
        outputs = outputs_of(self.func)
        has_activation = type(self).activation is not BaseLoss.activation
        return replace(
            outputs,
            activate=self.activation,
            decode=self.decodes,
            are_probabilities=outputs.are_probabilities
            and (has_activation or outputs.activate is noop),
        )

    def _check_fit(self, inp: Tensor, targ: Tensor) -> None:
        check_axis(self, inp)
        if not self.flatten:
            fits = inp.shape == targ.shape
        elif not self.is_2d:
            fits = inp.numel() == targ.numel()
        else:
            fits = _fits_classes(inp, targ, self.axis, self.y_int)
        if fits:
            return
        if self.is_2d:
            fix = _describe_fix(inp, self.axis)
        else:
            fix = f'pass targets of shape {list(inp.shape)}.'
        raise _make_shape_error(self, inp, targ, fix)

    def activation(self, x: Tensor) -> Tensor:
        "Return the predictions unchanged."
        return x

    def decodes(self, x: Tensor) -> Tensor:
        "Return the activated predictions unchanged."
        return x


class _ClassScores:
    "Predictions and activations of a loss whose predictions are scores of classes."

    axis: int  # class dimension

    def activation(self, x: Tensor) -> Tensor:
        "Return the softmax over the classes."
        return x.softmax(self.axis)

    def decodes(self, x: Tensor) -> Tensor:
        "Return the class with the highest score."
        return x.argmax(self.axis)

    def loss_outputs(self) -> Outputs:
        "Return `Outputs` for predictions that are scores of classes."
        activate, decode = self.activation, self.decodes
        return Outputs('classes', activate, decode, are_probabilities=True, contains='softmax')


class _ClassLoss(_ClassScores, BaseLoss):
    "Base class of losses of class numbers."

    y_int = True


class CrossEntropyLossFlat(_ClassLoss):
    """Cross-entropy, `-log softmax(x)[t]`: `nn.CrossEntropyLoss` with the classes along any axis.

    >>> CrossEntropyLossFlat(axis=1)(torch.zeros(2, 4, 8, 8), torch.zeros(2, 8, 8, dtype=torch.uint8))
    tensor(1.3863)
    """

    def __init__(
        self,
        weight: Tensor | None = None,  # class weights (C,)
        *,
        axis: int = -1,  # class dimension
        ignore_index: int = -100,  # target that is ignored
        reduction: str = 'mean',  # 'mean', 'sum' or 'none'
        label_smoothing: float = 0.0,  # fraction of the target spread evenly over all classes
    ) -> None:
        super().__init__(
            nn.CrossEntropyLoss,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            axis=axis,
        )


class BCEWithLogitsLossFlat(BaseLoss):
    """Binary cross-entropy of logits, `-t*log s - (1 - t)*log(1 - s)` with `s = sigmoid(x)`.

    Targets are converted to floats. With `weight` or `pos_weight`, which apply along the last dimension, nothing is
    flattened and the shapes have to be equal.

    >>> BCEWithLogitsLossFlat()(torch.zeros(3, 1), torch.tensor([0, 1, 1]))
    tensor(0.6931)
    """

    def __init__(
        self,
        weight: Tensor | None = None,  # weights of the elements
        *,
        axis: int = -1,  # label dimension, moved to the end for the weights
        floatify: bool = True,  # convert targets to floats
        thresh: float = 0.5,  # probability above which `decodes` predicts a label
        reduction: str = 'mean',  # 'mean', 'sum' or 'none'
        pos_weight: Tensor | None = None,  # weights of positive targets by label
    ) -> None:
        super().__init__(
            nn.BCEWithLogitsLoss,
            weight,
            reduction=reduction,
            pos_weight=pos_weight,
            axis=axis,
            floatify=floatify,
            is_2d=False,
            flatten=weight is None and pos_weight is None,
        )
        self.thresh = thresh

    @override
    def activation(self, x: Tensor) -> Tensor:
        "Return the sigmoid."
        return x.sigmoid()

    @override
    def decodes(self, x: Tensor) -> Tensor:
        "Return True for probabilities above `thresh`."
        return x > self.thresh


class BCELossFlat(BaseLoss):
    """Binary cross-entropy of probabilities, `-t*log x - (1 - t)*log(1 - x)`.

    >>> BCELossFlat()(torch.full((3, 1), .5), torch.tensor([0, 1, 1]))
    tensor(0.6931)
    """

    def __init__(
        self,
        weight: Tensor | None = None,  # weights of the elements, as in `BCEWithLogitsLossFlat`
        *,
        axis: int = -1,  # label dimension
        floatify: bool = True,  # convert targets to floats
        reduction: str = 'mean',  # 'mean', 'sum' or 'none'
    ) -> None:
        super().__init__(
            nn.BCELoss,
            weight,
            reduction=reduction,
            axis=axis,
            floatify=floatify,
            is_2d=False,
            flatten=weight is None,
        )


class MSELossFlat(BaseLoss):
    """Mean squared error; (B, 1) predictions match (B,) targets.

    >>> MSELossFlat()(torch.tensor([[1.], [2.]]), torch.tensor([1, 4]))
    tensor(2.)
    """

    def __init__(self, *, axis: int = -1, floatify: bool = True, reduction: str = 'mean') -> None:
        super().__init__(nn.MSELoss, reduction=reduction, axis=axis, floatify=floatify, is_2d=False)


class L1LossFlat(BaseLoss):
    """Mean absolute error; (B, 1) predictions match (B,) targets.

    >>> L1LossFlat()(torch.tensor([[1.], [2.]]), torch.tensor([1, 4]))
    tensor(1.)
    """

    def __init__(self, *, axis: int = -1, floatify: bool = True, reduction: str = 'mean') -> None:
        super().__init__(nn.L1Loss, reduction=reduction, axis=axis, floatify=floatify, is_2d=False)


class _UnflattenedLoss(_ClassScores, nn.Module):
    "Base class of losses of (B, C, ...) predictions and class numbers (B, ...), not flattened."

    y_int = True
    axis = 1

    def __init__(self, weight: Tensor | None, reduction: str) -> None:
        super().__init__()
        self.register_buffer('weight', weight, persistent=False)
        self.reduction = _check_reduction(reduction)

    def _convert_targets(self, inp: Tensor, targ: Tensor) -> Tensor:
        "Return class numbers as int64; raise `LossError` if the shapes do not match."
        if not (targ.shape == inp.shape and targ.is_floating_point()):
            if targ.shape != inp.shape[:1] + inp.shape[2:] or targ.is_floating_point():
                raise _make_shape_error(self, inp, targ, _describe_fix(inp, 1))
            targ = targ.long()
        return targ

    def loss_denominator(self) -> Denominator:
        "Return the denominator of the mean: the number of targets."
        return Elements(self)


class LabelSmoothingCrossEntropy(_UnflattenedLoss):
    """Cross-entropy with smoothed targets, `(1 - eps)*CE(x, t) + eps*mean_c(-log softmax(x)[c])`.

    From Szegedy et al., 2015. As in fastai, `weight` applies to the first term only. In torch's version,
    `CrossEntropyLossFlat(label_smoothing=...)`, `weight` applies to both terms. Takes (B, C, ...) predictions;
    `LabelSmoothingCrossEntropyFlat` takes classes along any axis.

    >>> LabelSmoothingCrossEntropy()(torch.tensor([[2., 0.]]), torch.tensor([0]))
    tensor(0.2269)
    """

    weight: Tensor | None

    def __init__(
        self,
        eps: float = 0.1,  # fraction of the target spread evenly over all classes
        weight: Tensor | None = None,  # class weights (C,)
        reduction: str = 'mean',  # 'mean', 'sum' or 'none'
    ) -> None:
        super().__init__(weight, reduction)
        self.eps = eps

    @override
    def loss_denominator(self) -> Denominator:
        "Return the denominator of the mean: the number of targets not ignored; unknown with class weights."
        return ClassTargets(self) if self.weight is None else Unknown('LabelSmoothingCrossEntropy')

    def forward(self, inp: Tensor, targ: Tensor) -> Tensor:
        targ = self._convert_targets(inp, targ)
        reduction = self.reduction
        if self.weight is None:
            return F.cross_entropy(inp, targ, reduction=reduction, label_smoothing=self.eps)
        hard = F.cross_entropy(inp, targ, self.weight, reduction=reduction)
        smooth = F.cross_entropy(inp, targ, reduction=reduction, label_smoothing=1.0)
        return (1 - self.eps) * hard + self.eps * smooth


class LabelSmoothingCrossEntropyFlat(_ClassLoss):
    """`LabelSmoothingCrossEntropy` with the classes along any axis.

    >>> LabelSmoothingCrossEntropyFlat()(torch.tensor([[[2., 0.]]]), torch.tensor([[0]]))
    tensor(0.2269)
    """

    def __init__(
        self,
        eps: float = 0.1,  # fraction of the target spread evenly over all classes
        weight: Tensor | None = None,  # class weights (C,)
        reduction: str = 'mean',  # 'mean', 'sum' or 'none'
        *,
        axis: int = -1,  # class dimension
    ) -> None:
        super().__init__(LabelSmoothingCrossEntropy, eps, weight, reduction, axis=axis)


class FocalLoss(_UnflattenedLoss):
    """Focal loss, `-w_t*(1 - p_t)**gamma*log p_t` with `p = softmax(x)` (Lin et al., 2017, equation 5).

    The mean is over samples. As in the paper, but not in fastai, `weight` is outside of the power. Takes (B, C, ...)
    predictions; `FocalLossFlat` takes classes along any axis.

    >>> FocalLoss(gamma=1.)(torch.zeros(1, 2), torch.tensor([0]))
    tensor(0.3466)
    """

    weight: Tensor | None

    def __init__(
        self,
        gamma: float = 2.0,  # focusing parameter; 0 is cross-entropy
        weight: Tensor | None = None,  # class weights (C,)
        reduction: str = 'mean',  # 'mean', 'sum' or 'none'
    ) -> None:
        super().__init__(weight, reduction)
        self.gamma = gamma

    def forward(self, inp: Tensor, targ: Tensor) -> Tensor:
        targ = self._convert_targets(inp, targ)
        ce = F.cross_entropy(inp, targ, reduction='none')
        miss = -torch.expm1(-ce)  # 1 - p_t
        miss = miss.clamp_min(torch.finfo(miss.dtype).tiny)  # a power below 1 has no gradient at 0
        if self.weight is not None:
            ce = F.cross_entropy(inp, targ, self.weight, reduction='none')
        return _reduce(miss**self.gamma * ce, self.reduction)


class FocalLossFlat(_ClassLoss):
    """`FocalLoss` with the classes along any axis.

    >>> FocalLossFlat(gamma=1., axis=1)(torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4, dtype=torch.long))
    tensor(0.3466)
    """

    def __init__(
        self,
        gamma: float = 2.0,  # focusing parameter; 0 is cross-entropy
        weight: Tensor | None = None,  # class weights (C,)
        reduction: str = 'mean',  # 'mean', 'sum' or 'none'
        *,
        axis: int = -1,  # class dimension
    ) -> None:
        super().__init__(FocalLoss, gamma, weight, reduction, axis=axis)


class DiceLoss(_ClassScores, nn.Module):
    """Dice loss of each sample and class, `1 - (2*sum(p*t) + smooth)/(sum(p + t) + smooth)` over the pixels.

    Targets (B, H, W) or (B, 1, H, W) are class numbers. A target outside of the classes, such as 255, matches no class.

    >>> DiceLoss(reduction='mean')(torch.tensor([[[9., -9.], [-9., 9.]]])*9, torch.tensor([[0, 1]]))
    tensor(0.)
    """

    def __init__(
        self,
        axis: int = 1,  # class dimension
        smooth: float = 1e-6,  # smoothing term that defines the loss of a class without pixels
        reduction: str = 'sum',  # over samples and classes: 'mean', 'sum' or 'none' (B, C)
        square_in_union: bool = False,  # `p*p` in the denominator (V-Net)
    ) -> None:
        super().__init__()
        self.axis = axis
        self.smooth = smooth
        self.square_in_union = square_in_union
        self.reduction = _check_reduction(reduction)

    def forward(self, pred: Tensor, targ: Tensor) -> Tensor:
        check_axis(self, pred)
        if not _fits_classes(pred, targ, self.axis, True) or targ.is_floating_point():
            raise _make_shape_error(self, pred, targ, _describe_fix(pred, self.axis))
        p = self.activation(pred).movedim(self.axis, 1)
        p = p.reshape(*p.shape[:2], -1)
        t = targ.reshape(len(p), 1, -1) == torch.arange(p.shape[1], device=p.device)[:, None]
        both = (p * t).sum(2)
        union = p * p if self.square_in_union else p
        total = (union + t).sum(2)
        return _reduce(1 - (2 * both + self.smooth) / (total + self.smooth), self.reduction)

    def loss_denominator(self) -> Denominator:
        "Return the denominator of the mean: the number of samples."
        return Samples()


def check_axis(loss: Any, inp: Tensor) -> None:
    "Raise `LossError` if the predictions do not have the class dimension."
    if -inp.ndim <= loss.axis < inp.ndim:
        return
    raise LossError(
        f'{type(loss).__name__}(axis={loss.axis}): predictions {_describe_shape(inp)} have no such axis.'
    )


def _fits_classes(inp: Tensor, targ: Tensor, axis: int, whole: bool) -> bool:
    "Return True for one class number per prediction (an int if `whole`), or probabilities of the same shape."
    if targ.shape == inp.shape and targ.is_floating_point():
        return True
    return targ.numel() * inp.shape[axis] == inp.numel() and not (
        whole and targ.is_floating_point()
    )


def _make_shape_error(loss: nn.Module, inp: Tensor, targ: Tensor, fix: str) -> LossError:
    "Return the error for shapes that do not match."
    shapes = f'predictions {_describe_shape(inp)} and targets {_describe_shape(targ)}'
    return LossError(f'{type(loss).__name__}: {shapes} do not fit: {fix}')


def _describe_fix(inp: Tensor, axis: int) -> str:
    "Describe the targets that match predictions."
    shape = list(inp.shape)
    n = shape.pop(axis)
    return (
        f'with {n} classes along axis {axis}, pass integer class numbers of shape {shape} (`targ.long()`, or '
        f'`targ.argmax({axis})` of one-hot targets), or probabilities of shape {list(inp.shape)} (`targ.float()`). '
        'Are the classes along another `axis`?'
    )


def _describe_shape(t: Tensor) -> str:
    return f'{list(t.shape)} {str(t.dtype).removeprefix("torch.")}'


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    if reduction == 'mean':
        return loss.mean()
    return loss.sum() if reduction == 'sum' else loss


def _check_reduction(how: str) -> str:
    if how in ('mean', 'sum', 'none'):
        return how
    raise OptionError(f"reduction={how!r}: use 'mean', 'sum' or 'none'.")
