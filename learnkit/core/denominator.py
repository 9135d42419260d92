"""Denominators of mean losses: the number of samples, of targets, of targets not ignored, or the sum of class weights.

Batches are weighted by the denominator in the loss of an epoch and in the gradients of microbatches, accumulated
batches and ranks. Only with these weights does the mean over batches equal the loss of all batches together."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import isclose
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit.core.batch import find_bs
from learnkit.core.errors import LossError, OptionError, did_you_mean
from learnkit.core.learner_type import LoopLike
from learnkit.core.model import name_of, takes_batches
from learnkit.core.random import preserved_rng
from learnkit.core.validation import warn_user

__all__ = [
    'ClassTargets',
    'Denominator',
    'Elements',
    'LossWeights',
    'ModelTargets',
    'Samples',
    'Tokens',
    'Unknown',
    'WEIGHT_FUNCS',
    'check_is_mean',
    'check_weight_func',
    'count_targets',
    'denominator_of',
    'denominator_of_model',
]

MAX_LIST = 128  # maximum number of targets for which counting in a list is fastest
IGNORED = -100  # torch's default `ignore_index`
WEIGHT_FUNCS = ('tokens', 'samples')  # names that `Learner(weight_func=)` accepts
CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
ELEMENT_LOSSES = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
)
CLASS_FUNCTIONS = (F.cross_entropy, F.nll_loss)
ELEMENT_FUNCTIONS = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)
KEYWORDS = {'weight', 'ignore_index', 'reduction', 'label_smoothing', 'pos_weight', 'beta', 'delta'}


class Denominator:
    "Base class of denominators of a batch's mean loss."

    def varies(self, yb: tuple[Any, ...]) -> bool:
        "Return True if batches of equal size may have different denominators."
        return False

    def count(self, yb: tuple[Any, ...]) -> Any:
        "Return the denominator, on the device of the targets; None for the number of samples."
        return None

    def look(self, yb: tuple[Any, ...]) -> None:
        "Warn once if the denominator is unknown; the check copies targets from their device."


class Samples(Denominator):
    "Average over the samples."


class Elements(Denominator):
    "Average over all elements of the targets."

    def count(self, yb: tuple[Any, ...]) -> Any:
        return yb[0].numel() if yb and isinstance(yb[0], Tensor) else None


class Tokens(Denominator):
    "Average over the targets that are not `ignore_index`."

    def __init__(self, ignore_index: int = IGNORED) -> None:
        self.ignore_index = ignore_index

    def varies(self, yb: tuple[Any, ...]) -> bool:
        return has_class_numbers(yb)

    def count(self, yb: tuple[Any, ...]) -> Any:
        return count_targets(yb[0], self.ignore_index) if has_class_numbers(yb) else None


class ClassTargets(Denominator):
    "Average like cross-entropy: over the class numbers that are not ignored, or by class weights."

    def __init__(
        self,
        options: nn.Module | Mapping[str, Any],  # `weight`, `ignore_index`, `reduction`; may change
        axis: int = 1,  # class dimension of probabilities
    ) -> None:
        self.axis = axis
        self.options, self.is_module = options, isinstance(options, nn.Module)

    def _values(self) -> Mapping[str, Any]:
        return vars(self.options) if self.is_module else self.options  # type: ignore[return-value]

    @property
    def ignore_index(self) -> int:
        return int(self._values().get('ignore_index', IGNORED))

    def varies(self, yb: tuple[Any, ...]) -> bool:
        return has_class_numbers(yb) and self._values().get('reduction', 'mean') == 'mean'

    def count(self, yb: tuple[Any, ...]) -> Any:
        if not yb or not isinstance(yb[0], Tensor):
            return None
        targ, values = yb[0], self._values()
        reduction = values.get('reduction', 'mean')
        if reduction == 'sum':
            return None
        if reduction != 'mean' or targ.dtype.is_floating_point:
            return self._count_rows(targ)
        # access by `_buffers` is ten times as fast as access by attribute
        tensors = values['_buffers'] if self.is_module else values
        weight, ignore_index = tensors.get('weight'), values.get('ignore_index', IGNORED)
        if weight is None:
            return count_targets(targ, ignore_index)
        return sum_of_weights(targ, ignore_index, weight)

    def _count_rows(self, targ: Tensor) -> int:
        "Return the number of targets given as probabilities, or of unreduced losses."
        if not targ.is_floating_point():
            return targ.numel()
        axis = self.axis if -targ.ndim <= self.axis < targ.ndim else 0
        return targ.numel() // max(targ.shape[axis], 1) if targ.ndim else 1


class ModelTargets(Denominator):
    "Average over the labels that are not -100, as Hugging Face models do for their own loss."

    def __init__(
        self,
        is_shifted: bool,  # whether tokens predict the next token: the first label is unused
    ) -> None:
        self.is_shifted = is_shifted

    def varies(self, yb: tuple[Any, ...]) -> bool:
        return has_class_numbers(yb)

    def count(self, yb: tuple[Any, ...]) -> Any:
        if not has_class_numbers(yb):
            return None
        labels = yb[0]
        if self.is_shifted and labels.ndim > 1:
            labels = labels[..., 1:]
        return count_targets(labels, IGNORED)


class Unknown(Denominator):
    "Unknown denominator: samples are assumed, with a warning if targets of -100 are present."

    def __init__(
        self,
        name: str,  # name of the loss function
        why: str = '',  # reason why the denominator is not the number of samples
    ) -> None:
        self.name = name
        self.why = why
        self.has_warned = False

    def look(self, yb: tuple[Any, ...]) -> None:
        if self.has_warned or not (self.why or has_ignored(yb)):
            return
        self.has_warned = True
        why = self.why or (
            f'there are targets of {IGNORED}, and it cannot be seen whether {self.name} leaves them out'
        )
        warn_user(
            f'{why[0].upper()}{why[1:]}. Batches are averaged by their number of samples, in losses of an epoch '
            'as in gradients of microbatches or accumulated batches. If the loss is a mean over the targets '
            f"that are not {IGNORED}, write Learner(weight_func='tokens'); for another mean, a function "
            "weight_func(xb, yb); for a mean over samples, weight_func='samples'."
        )


def denominator_of(loss_func: Any) -> Denominator:
    """Return the denominator of a loss function's mean.

    torch's losses are recognized as classes, as functions and as `functools.partial` with keywords. Any other loss
    may define a method `loss_denominator()`.

    >>> denominator_of(nn.CrossEntropyLoss()).count((torch.tensor([[1, -100], [0, 2]]),))
    3
    >>> denominator_of(partial(F.cross_entropy, ignore_index=0)).count((torch.tensor([1, 0, 2]),))
    2
    >>> denominator_of(nn.MSELoss()).count((torch.zeros(3, 2),))
    6
    """
    loss_func = getattr(loss_func, '_orig_mod', loss_func)  # the module that torch.compile wraps
    own = getattr(loss_func, 'loss_denominator', None)
    if own is not None:
        return own()
    if isinstance(loss_func, CLASS_LOSSES) and has_forward_of(loss_func, CLASS_LOSSES):
        return ClassTargets(loss_func)
    if isinstance(loss_func, ELEMENT_LOSSES) and has_forward_of(loss_func, ELEMENT_LOSSES):
        return Elements()
    func = loss_func
    keywords = {}
    if (
        isinstance(loss_func, partial)
        and not loss_func.args
        and set(loss_func.keywords) <= KEYWORDS
    ):
        func = loss_func.func
        keywords = loss_func.keywords
    if func in CLASS_FUNCTIONS:
        return ClassTargets(keywords)
    if func in ELEMENT_FUNCTIONS and keywords.get('weight') is None:
        return Elements()
    if type(loss_func).__module__.startswith('torch.nn'):
        return Samples()
    return Unknown(getattr(loss_func, '__name__', None) or type(loss_func).__name__)


def has_forward_of(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> bool:
    "Return True if a module has the unchanged `forward` of one of these classes."
    return any(type(module).forward is cls.forward for cls in classes)


def denominator_of_model(model: nn.Module) -> Denominator:
    "Return the denominator of a loss that the model computes itself."
    model = getattr(model, '_orig_mod', model)
    name = type(model).__name__
    if takes_batches(model):
        return Samples()  # as Composer weighs microbatches
    if type(model).forward.__module__.partition('.')[0] not in ('transformers', 'peft'):
        return Unknown(f'the own loss of {name}')
    is_decoder = not getattr(getattr(model, 'config', None), 'is_encoder_decoder', False)
    predicts_next = 'ForCausalLM' in name or name.endswith(
        ('LMHeadModel', 'ForConditionalGeneration')
    )
    return ModelTargets(is_shifted=is_decoder and predicts_next and not name.startswith('XLNet'))


class LossWeights:
    """What a batch weighs in a mean of losses, so that the parts of a batch add up to the whole.

    Most losses are means over samples; cross-entropy is one over the targets that are not ignored,
    by their class weights. `weight_func` takes precedence.
    """

    def __init__(self) -> None:
        # the loss, `weight_func` and class of the model that the denominator was found for
        self._asked: tuple[Any, Any, Any] = None, None, None
        self._denominator: Denominator | None = None

    def is_sum(self, learn: LoopLike) -> bool:
        "Return True if the loss adds up over samples, and is not their mean."
        of_partial = getattr(learn.loss_func, 'keywords', {}).get('reduction')
        return bool(getattr(learn.loss_func, 'reduction', of_partial) == 'sum')

    def are_samples(self, learn: LoopLike) -> bool:
        "Return True if batches with as many samples weigh the same."
        if callable(learn.weight_func):
            return False
        return learn.callbacks.average_samples() or not self.denominator(learn).varies(learn.yb)

    def weigh_batch(self, learn: LoopLike, xb: Any, yb: Any) -> Any:
        "Return the weight of a batch, or a part of one: a number, or a tensor on its device."
        weight = None
        if callable(learn.weight_func):
            weight = learn.weight_func(xb, yb)
        elif not (learn.training and learn.callbacks.average_samples()):
            denominator = self.denominator(learn)
            if not learn.iter:
                denominator.look(yb)  # once a pass: it may wait for the device
            weight = denominator.count(yb)
        return find_bs(xb, yb, learn.size_func) if weight is None else weight

    def denominator(self, learn: LoopLike) -> Denominator:
        "Return what the loss averages over, found once for a loss function."
        asked = learn.loss_func, learn.weight_func, learn.model.__class__
        if self._denominator is None or asked != self._asked:
            self._denominator = find_denominator(learn)
            self._asked = asked
        return self._denominator

    def __getstate__(self) -> dict[str, Any]:
        "Return nothing: a copy finds it again."
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        LossWeights.__init__(self)


def find_denominator(learn: LoopLike) -> Denominator:
    "Return what the loss of a Learner averages over."
    if learn.weight_func == 'samples':
        return Samples()
    if learn.loss_func is None:
        of_loss = denominator_of_model(learn.model)
    else:
        of_loss = denominator_of(learn.loss_func)
    if learn.weight_func != 'tokens':
        return of_loss
    return Tokens(of_loss.ignore_index) if isinstance(of_loss, ClassTargets) else Tokens()


def check_is_mean(
    learn: LoopLike,  # Learner with a batch
    pred: Any,  # predictions of the batch
) -> None:
    """Raise `LossError` if a loss function of unknown reduction adds up over samples, and parts would be averaged.

    The loss of the batch is compared with the losses of its halves. A function that says `reduction = 'sum'`, in an
    attribute, is added up.
    """
    loss_func = learn.loss_func
    weights = learn.loss_weights
    yb = learn.yb
    is_unknown = isinstance(weights.denominator(learn), Unknown) and learn.weight_func is None
    if loss_func is None or not is_unknown or weights.is_sum(learn):
        return
    if not all(isinstance(t, Tensor) and t.ndim and len(t) == len(pred) > 1 for t in (pred, *yb)):
        return
    half, n = len(pred) // 2, len(pred)
    parts = [slice(None), slice(half), slice(half, None)]
    try:
        with torch.no_grad():
            losses = []
            for part in parts:
                with preserved_rng():
                    losses.append(float(loss_func(pred[part], *(t[part] for t in yb))))
    except Exception:
        return  # the loss of the whole batch raises its own error
    whole, first, second = losses
    mean = (half * first + (n - half) * second) / n
    if not isclose(whole, first + second, rel_tol=1e-3) or isclose(whole, mean, rel_tol=1e-2):
        return
    raise LossError(
        f'{name_of(loss_func)} adds up the losses of the samples, and does not say so: the parts of a batch '
        '(microbatches, accumulated batches, several processes) would be averaged. Return the mean, or set the '
        "attribute `reduction = 'sum'` of the loss function."
    )


def check_weight_func(weight_func: Any) -> Any:
    "Return `weight_func`; raise `OptionError` unless it is None, a function, or one of `WEIGHT_FUNCS`."
    if weight_func is None or callable(weight_func) or weight_func in WEIGHT_FUNCS:
        return weight_func
    raise OptionError(
        f'weight_func={weight_func!r}: give {" or ".join(map(repr, WEIGHT_FUNCS))}, or a function f(xb, '
        f'yb) that returns what a batch weighs.{did_you_mean(str(weight_func), WEIGHT_FUNCS)}'
    )


def has_class_numbers(yb: tuple[Any, ...]) -> bool:
    "Return True if the first target is a tensor of whole numbers."
    return bool(yb) and isinstance(yb[0], Tensor) and not yb[0].dtype.is_floating_point


def count_targets(
    targ: Tensor,  # class numbers of any shape
    ignore_index: int,
) -> int | Tensor:  # int on the CPU, else a tensor on the device
    """Return the number of targets that are not `ignore_index`.

    >>> count_targets(torch.tensor([[1, -100], [0, 2]]), -100)
    3
    """
    if type(targ) is not Tensor or not targ.is_cpu:
        return (targ.long() != ignore_index).sum()
    n = targ.numel()
    if n <= MAX_LIST and targ.ndim == 1:
        return n - targ.tolist().count(ignore_index)
    return int(np.count_nonzero(targ.numpy() != ignore_index))


def sum_of_weights(targ: Tensor, ignore_index: int, weight: Tensor) -> float | Tensor:
    "Return the sum of the class weights of the targets that are not `ignore_index`."
    targ = targ.detach().long()
    counts = targ != ignore_index
    dtype = torch.float32 if targ.device.type == 'mps' else torch.float64
    own = weight.detach().to(targ.device, dtype)[torch.where(counts, targ, 0)]
    total = torch.where(counts, own, 0).sum()
    return total.item() if total.is_cpu else total


def has_ignored(yb: tuple[Any, ...]) -> bool:
    "Return True if an integer target is -100; the check waits for the device."
    numbers = [
        t for t in yb if isinstance(t, Tensor) and not t.is_floating_point() and t.dtype.is_signed
    ]
    return any(bool((t == IGNORED).any()) for t in numbers)
