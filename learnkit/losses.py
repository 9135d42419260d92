"""Loss functions by fastai's names: torch's on flattened predictions and targets, and some of their own.

Any torch loss, or function, works in a Learner as it is. These know besides how to turn predictions into what a person
reads: `activation` gives probabilities, `decodes` the targets they stand for. Classes are along `axis`: (B, C),
(B, T, C), or (B, C, H, W) with `axis=1`; targets are class numbers, or probabilities in the shape of the predictions.
`reduction` ('mean', 'sum' or 'none') may be set at any time, and weights move with `.to(device)`.

Shapes that do not fit raise `LossError`, where torch might broadcast them; bad options raise `OptionError`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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

    # whether targets may be class numbers, so that a mix of two targets is a mix of two losses
    y_int = False
    func: Any

    def __init__(
        self,
        loss_cls: Callable[..., Any],  # makes the loss: nn.CrossEntropyLoss
        *args: Any,  # its arguments
        axis: int = -1,  # where the classes are
        flatten: bool = True,  # whether to flatten; otherwise the classes only move to the end
        floatify: bool = False,  # whether targets become floats
        is_2d: bool = True,  # classes keep their dimension: predictions (N, C), targets (N,)
        **kwargs: Any,  # more arguments of the loss
    ) -> None:
        super().__init__()
        self.axis, self.flatten, self.floatify, self.is_2d = axis, flatten, floatify, is_2d
        self.func = loss_cls(*args, **kwargs)
        _check_reduction(getattr(self.func, 'reduction', 'mean'))

    @property
    def reduction(self) -> str:
        "How the losses of all samples become one: 'mean', 'sum' or 'none'."
        return str(self.func.reduction)

    @reduction.setter
    def reduction(self, how: str) -> None:
        self.func.reduction = _check_reduction(how)

    def forward(self, inp: Tensor, targ: Tensor, **kwargs: Any) -> Any:
        self._check_fit(inp, targ)
        if targ.shape == inp.shape:
            targ = targ.movedim(self.axis, -1)
        inp = inp.movedim(self.axis, -1)
        if self.floatify:
            targ = targ.to(torch.promote_types(inp.dtype, torch.float32))
        elif not targ.is_floating_point():
            targ = targ.long()

        if not self.flatten:
            return self.func(inp, targ, **kwargs)
        n_classes = inp.shape[-1:] if self.is_2d else ()
        is_soft = targ.shape == inp.shape and targ.is_floating_point()
        return self.func(
            inp.reshape(-1, *n_classes), targ.reshape(-1, *(n_classes if is_soft else ())), **kwargs
        )

    def loss_denominator(self) -> Denominator:
        "What the mean over a batch is of: that of the loss inside."
        inside = denominator_of(self.func)
        if isinstance(inside, ClassTargets):
            inside.axis = self.axis
        return inside

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
        wanted = (
            _wanted(inp, self.axis) if self.is_2d else f'give targets of shape {list(inp.shape)}.'
        )
        raise _misfit(self, inp, targ, wanted)

    def activation(self, x: Tensor) -> Tensor:
        "Turn predictions into what a person reads: as they are."
        return x

    def decodes(self, x: Tensor) -> Tensor:
        "Turn activated predictions into targets: as they are."
        return x

    def __repr__(self) -> str:
        options = {
            'axis': self.axis,
            **{k: getattr(self.func, k) for k in getattr(self.func, '__constants__', ())},
        }
        shown = [f'{k}={v!r}' for k, v in options.items()]
        return f'{type(self).__name__}({", ".join(shown + [f"{k} {_shape(w)}" for k, w in self.func.named_buffers()])})'


class _Classes(BaseLoss):
    "What losses of class numbers have in common."

    y_int = True

    def activation(self, x: Tensor) -> Tensor:
        "Softmax."
        return x.softmax(self.axis)

    def decodes(self, x: Tensor) -> Tensor:
        "The class that scores highest."
        return x.argmax(self.axis)


class CrossEntropyLossFlat(_Classes):
    """Cross-entropy, `-log softmax(x)[t]`: `nn.CrossEntropyLoss` with the classes along any axis.

    >>> CrossEntropyLossFlat(axis=1)(torch.zeros(2, 4, 8, 8), torch.zeros(2, 8, 8, dtype=torch.uint8))
    tensor(1.3863)
    """

    def __init__(
        self,
        weight: Tensor | None = None,  # what each class counts, (C,)
        *,
        axis: int = -1,  # where the classes are
        ignore_index: int = -100,  # a target that does not count
        reduction: str = 'mean',  # 'mean', 'sum' or 'none'
        label_smoothing: float = 0.0,  # the share of the target that goes to all classes alike
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

    Targets of any type become floats. With `weight` or `pos_weight`, which go along the last dimension, nothing is
    flattened and the shapes have to be the same.

    >>> BCEWithLogitsLossFlat()(torch.zeros(3, 1), torch.tensor([0, 1, 1]))
    tensor(0.6931)
    """

    def __init__(
        self,
        weight: Tensor | None = None,  # what each element counts
        *,
        axis: int = -1,  # where the labels are; they move to the end for the weights
        floatify: bool = True,  # whether targets become floats
        thresh: float = 0.5,  # the probability above which `decodes` predicts a label
        reduction: str = 'mean',  # 'mean', 'sum' or 'none'
        pos_weight: Tensor | None = None,  # what a positive target counts, by label
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

    def activation(self, x: Tensor) -> Tensor:
        "Sigmoid."
        return x.sigmoid()

    def decodes(self, x: Tensor) -> Tensor:
        "Whether the probability is above `thresh`."
        return x > self.thresh


class BCELossFlat(BaseLoss):
    """Binary cross-entropy of probabilities, `-t*log x - (1 - t)*log(1 - x)`.

    >>> BCELossFlat()(torch.full((3, 1), .5), torch.tensor([0, 1, 1]))
    tensor(0.6931)
    """

    def __init__(
        self,
        weight: Tensor | None = None,  # what each element counts; as in `BCEWithLogitsLossFlat`
        *,
        axis: int = -1,  # where the labels are
        floatify: bool = True,  # whether targets become floats
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
    """Mean squared error, where (B, 1) predictions fit (B,) targets.

    >>> MSELossFlat()(torch.tensor([[1.], [2.]]), torch.tensor([1, 4]))
    tensor(2.)
    """

    def __init__(self, *, axis: int = -1, floatify: bool = True, reduction: str = 'mean') -> None:
        super().__init__(nn.MSELoss, reduction=reduction, axis=axis, floatify=floatify, is_2d=False)


class L1LossFlat(BaseLoss):
    """Mean absolute error, where (B, 1) predictions fit (B,) targets.

    >>> L1LossFlat()(torch.tensor([[1.], [2.]]), torch.tensor([1, 4]))
    tensor(1.)
    """

    def __init__(self, *, axis: int = -1, floatify: bool = True, reduction: str = 'mean') -> None:
        super().__init__(nn.L1Loss, reduction=reduction, axis=axis, floatify=floatify, is_2d=False)


class _Plain(nn.Module):
    "A loss of its own, of (B, C, ...) predictions and class numbers (B, ...), not flattened."

    y_int, __constants__ = True, ['reduction']

    def __init__(self, weight: Tensor | None, reduction: str) -> None:
        super().__init__()
        self.register_buffer('weight', weight, persistent=False)
        self.reduction = _check_reduction(reduction)

    def _target(self, inp: Tensor, targ: Tensor) -> Tensor:
        "The targets in torch's type, when they fit."
        if not (targ.shape == inp.shape and targ.is_floating_point()):
            if targ.shape != inp.shape[:1] + inp.shape[2:] or targ.is_floating_point():
                raise _misfit(self, inp, targ, _wanted(inp, 1))
            targ = targ.long()
        return targ

    def loss_denominator(self) -> Denominator:
        "What the mean over a batch is of: all targets."
        return Elements()

    def activation(self, x: Tensor) -> Tensor:
        "Softmax."
        return x.softmax(1)

    def decodes(self, x: Tensor) -> Tensor:
        "The class that scores highest."
        return x.argmax(1)

    def extra_repr(self) -> str:
        return ', '.join(f'{k}={getattr(self, k)!r}' for k in self.__constants__)


class LabelSmoothingCrossEntropy(_Plain):
    """Cross-entropy with smoothed targets, `(1 - eps)*CE(x, t) + eps*mean_c(-log softmax(x)[c])`.

    From Szegedy et al., 2015. As in fastai `weight` is for the first part alone; in torch's own, which is
    `CrossEntropyLossFlat(label_smoothing=...)`, for both. Takes (B, C, ...) predictions;
    `LabelSmoothingCrossEntropyFlat` has the classes along any axis.

    >>> LabelSmoothingCrossEntropy()(torch.tensor([[2., 0.]]), torch.tensor([0]))
    tensor(0.2269)
    """

    __constants__ = ['eps', 'reduction']
    weight: Tensor | None

    def __init__(
        self,
        eps: float = 0.1,  # the share of the target that goes to all classes alike
        weight: Tensor | None = None,  # what each class counts, (C,)
        reduction: str = 'mean',  # 'mean', 'sum' or 'none'
    ) -> None:
        super().__init__(weight, reduction)
        if not 0 <= eps <= 1:
            raise OptionError(f'LabelSmoothingCrossEntropy: eps={eps!r} is a share, from 0 to 1.')
        self.eps = eps

    def loss_denominator(self) -> Denominator:
        "What the mean over a batch is of: the targets that count; with class weights there is no such number."
        if self.weight is None:
            return ClassTargets({'reduction': self.reduction})
        return Unknown(
            'LabelSmoothingCrossEntropy',
            'LabelSmoothingCrossEntropy(weight=) adds a mean by class weights '
            'and one over all targets; CrossEntropyLossFlat(weight, label_smoothing=) has one mean',
        )

    def forward(self, inp: Tensor, targ: Tensor) -> Tensor:
        targ, how = self._target(inp, targ), self.reduction
        if self.weight is None:
            return F.cross_entropy(inp, targ, reduction=how, label_smoothing=self.eps)
        hard = F.cross_entropy(inp, targ, self.weight, reduction=how)
        return (1 - self.eps) * hard + self.eps * F.cross_entropy(
            inp, targ, reduction=how, label_smoothing=1.0
        )


class LabelSmoothingCrossEntropyFlat(_Classes):
    """`LabelSmoothingCrossEntropy` with the classes along any axis.

    >>> LabelSmoothingCrossEntropyFlat()(torch.tensor([[[2., 0.]]]), torch.tensor([[0]]))
    tensor(0.2269)
    """

    def __init__(
        self,
        eps: float = 0.1,  # the share of the target that goes to all classes alike
        weight: Tensor | None = None,  # what each class counts, (C,)
        reduction: str = 'mean',  # 'mean', 'sum' or 'none'
        *,
        axis: int = -1,  # where the classes are
    ) -> None:
        super().__init__(LabelSmoothingCrossEntropy, eps, weight, reduction, axis=axis)


class FocalLoss(_Plain):
    """Focal loss, `-w_t*(1 - p_t)**gamma*log p_t` with `p = softmax(x)` (Lin et al., 2017, equation 5).

    The mean is over samples. As in the paper, and other than in fastai, `weight` is outside of the power. Takes
    (B, C, ...) predictions; `FocalLossFlat` has the classes along any axis.

    >>> FocalLoss(gamma=1.)(torch.zeros(1, 2), torch.tensor([0]))
    tensor(0.3466)
    """

    __constants__ = ['gamma', 'reduction']
    weight: Tensor | None

    def __init__(
        self,
        gamma: float = 2.0,  # how much less easy samples count; 0 is cross-entropy
        weight: Tensor | None = None,  # what each class counts, (C,)
        reduction: str = 'mean',  # 'mean', 'sum' or 'none'
    ) -> None:
        super().__init__(weight, reduction)
        if not gamma >= 0:
            raise OptionError(f'FocalLoss: gamma={gamma!r}: give 0 or more.')
        self.gamma = gamma

    def forward(self, inp: Tensor, targ: Tensor) -> Tensor:
        targ = self._target(inp, targ)
        ce = F.cross_entropy(inp, targ, reduction='none')
        miss = -torch.expm1(-ce)  # 1 - p_t
        miss = miss.clamp_min(torch.finfo(miss.dtype).tiny)  # a power below 1 has no slope at 0
        weighted = (
            ce if self.weight is None else F.cross_entropy(inp, targ, self.weight, reduction='none')
        )
        return _reduced(miss**self.gamma * weighted, self.reduction)


class FocalLossFlat(_Classes):
    """`FocalLoss` with the classes along any axis.

    >>> FocalLossFlat(gamma=1., axis=1)(torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4, dtype=torch.long))
    tensor(0.3466)
    """

    def __init__(
        self,
        gamma: float = 2.0,  # how much less easy samples count; 0 is cross-entropy
        weight: Tensor | None = None,  # what each class counts, (C,)
        reduction: str = 'mean',  # 'mean', 'sum' or 'none'
        *,
        axis: int = -1,  # where the classes are
    ) -> None:
        super().__init__(FocalLoss, gamma, weight, reduction, axis=axis)


class DiceLoss(nn.Module):
    """1 - Dice of each sample and class, `1 - (2*sum(p*t) + smooth)/(sum(p + t) + smooth)` over its pixels.

    Targets (B, H, W) or (B, 1, H, W) are class numbers; one that is no class, 255 for one, belongs to none.

    >>> DiceLoss(reduction='mean')(torch.tensor([[[9., -9.], [-9., 9.]]])*9, torch.tensor([[0, 1]]))
    tensor(0.)
    """

    def __init__(
        self,
        axis: int = 1,  # where the classes are
        smooth: float = 1e-6,  # keeps the share defined for a class without a pixel
        reduction: str = 'sum',  # over samples and classes: 'mean', 'sum' or 'none' (B, C)
        square_in_union: bool = False,  # `p*p` in the denominator (V-Net)
    ) -> None:
        super().__init__()
        self.axis, self.smooth, self.square_in_union = axis, smooth, square_in_union
        self.reduction = _check_reduction(reduction)

    def forward(self, pred: Tensor, targ: Tensor) -> Tensor:
        check_axis(self, pred)
        if not _fits_classes(pred, targ, self.axis, True) or targ.is_floating_point():
            raise _misfit(self, pred, targ, _wanted(pred, self.axis))
        p = self.activation(pred).movedim(self.axis, 1)
        p = p.reshape(*p.shape[:2], -1)
        t = targ.reshape(len(p), 1, -1) == torch.arange(p.shape[1], device=p.device)[:, None]
        both, total = (p * t).sum(2), ((p * p if self.square_in_union else p) + t).sum(2)
        return _reduced(1 - (2 * both + self.smooth) / (total + self.smooth), self.reduction)

    def loss_denominator(self) -> Denominator:
        "What the mean over a batch is of: samples."
        return Samples()

    def activation(self, x: Tensor) -> Tensor:
        "Softmax."
        return x.softmax(self.axis)

    def decodes(self, x: Tensor) -> Tensor:
        "The class that scores highest."
        return x.argmax(self.axis)

    def extra_repr(self) -> str:
        return f'axis={self.axis}, smooth={self.smooth}, reduction={self.reduction!r}'


def check_axis(loss: Any, inp: Tensor) -> None:
    "Raise `LossError` where the predictions do not have the axis of the classes."
    if -inp.ndim <= loss.axis < inp.ndim:
        return
    raise LossError(
        f'{type(loss).__name__}(axis={loss.axis}): predictions {_shape(inp)} have no such axis.'
    )


def _fits_classes(inp: Tensor, targ: Tensor, axis: int, whole: bool) -> bool:
    "Class numbers, one for each prediction, or probabilities in its shape."
    if targ.shape == inp.shape and targ.is_floating_point():
        return True
    return targ.numel() * inp.shape[axis] == inp.numel() and not (
        whole and targ.is_floating_point()
    )


def _misfit(loss: nn.Module, inp: Tensor, targ: Tensor, wanted: str) -> LossError:
    "The error for shapes that do not fit."
    what = f'{type(loss).__name__}: predictions {_shape(inp)} and targets {_shape(targ)}'
    return LossError(f'{what} do not fit: {wanted}')


def _wanted(inp: Tensor, axis: int) -> str:
    shape = list(inp.shape)
    n = shape.pop(axis)
    return (
        f'with {n} classes along axis {axis}, give whole class numbers of shape {shape} (`targ.long()`, or '
        f'`targ.argmax({axis})` of one-hot targets), or probabilities of shape {list(inp.shape)} (`targ.float()`). '
        'Are the classes along another `axis`?'
    )


def _shape(t: Tensor) -> str:
    return f'{list(t.shape)} {str(t.dtype).removeprefix("torch.")}'


def _reduced(loss: Tensor, how: str) -> Tensor:
    return loss.mean() if how == 'mean' else loss.sum() if how == 'sum' else loss


def _check_reduction(how: str) -> str:
    if how in ('mean', 'sum', 'none'):
        return how
    raise OptionError(f"reduction={how!r}: use 'mean', 'sum' or 'none'.")
