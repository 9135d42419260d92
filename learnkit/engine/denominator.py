"""Denominators of mean losses: the number that a loss function divides the sum of its terms by.

The denominator is the number of samples, of targets, of targets that are not ignored, or the sum of class weights.
It is the weight of a batch in the loss of an epoch, and in the gradients of microbatches, accumulated batches and
ranks. Only with these weights does the mean over batches equal the loss of all batches together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import isclose, isnan
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from learnkit.core.batch import find_bs, slice_batch, tensors_in
from learnkit.core.errors import LossError, OptionError, did_you_mean
from learnkit.core.learner_type import LearnerLike
from learnkit.core.model import copy_buffers, name_of, restore_buffers, takes_batches
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

Parts = tuple[tuple[int, float], ...]  # number of samples and loss of each part of a batch

MAX_LIST = 128  # up to this number of targets, counting in a list is faster than with NumPy
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
    nn.PoissonNLLLoss,
    nn.SoftMarginLoss,
    nn.KLDivLoss,
)
CLASS_FUNCTIONS = (F.cross_entropy, F.nll_loss)
ELEMENT_FUNCTIONS = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.poisson_nll_loss,
    F.soft_margin_loss,
    F.kl_div,
)
# a `functools.partial` with other keywords is not recognized
KEYWORDS = {
    'weight',
    'ignore_index',
    'reduction',
    'label_smoothing',
    'pos_weight',
    'beta',
    'delta',
    'log_input',
    'log_target',
    'full',
}


class Denominator:
    "Base class of the denominators of a batch's mean loss."

    def varies(self, yb: tuple[Any, ...]) -> bool:
        "Return True if batches of equal size may have different denominators."
        return False

    def count(self, yb: tuple[Any, ...]) -> Any:
        "Return the denominator, a number or a tensor on the device of the targets; None for the number of samples."
        return None

    def look(self, yb: tuple[Any, ...]) -> None:
        "Warn once if the denominator is unknown. The check synchronizes with the device of the targets."


class Samples(Denominator):
    "Denominator of a mean over the samples."


class Elements(Denominator):
    "Denominator of a mean over all elements of the targets; of another reduction, the number of samples."

    def __init__(
        self,
        options: nn.Module | Mapping[str, Any],  # `reduction`, read for each batch
    ) -> None:
        self.options = options

    @override
    def count(self, yb: tuple[Any, ...]) -> Any:
        reduction = read_options(self.options).get('reduction')
        if reduction in ('sum', 'batchmean') or not (yb and isinstance(yb[0], Tensor)):
            return None
        return yb[0].numel()


class Tokens(Denominator):
    "Denominator of a mean over the targets that are not `ignore_index`."

    def __init__(self, ignore_index: int = IGNORED) -> None:
        self.ignore_index = ignore_index

    @override
    def varies(self, yb: tuple[Any, ...]) -> bool:
        return has_class_numbers(yb)

    @override
    def count(self, yb: tuple[Any, ...]) -> Any:
        return count_targets(yb[0], self.ignore_index) if has_class_numbers(yb) else None


class ClassTargets(Denominator):
    "Denominator of cross-entropy: the number of targets that are not ignored, or the sum of their class weights."

    def __init__(
        self,
        options: nn.Module
        | Mapping[str, Any],  # `weight`, `ignore_index`, `reduction`, read for each batch
        axis: int = 1,  # class dimension of probabilities
    ) -> None:
        self.axis = axis
        self.options = options
        self.is_module = isinstance(options, nn.Module)

    @property
    def ignore_index(self) -> int:
        return int(read_options(self.options).get('ignore_index', IGNORED))

    @override
    def varies(self, yb: tuple[Any, ...]) -> bool:
        return (
            has_class_numbers(yb) and read_options(self.options).get('reduction', 'mean') == 'mean'
        )

    @override
    def count(self, yb: tuple[Any, ...]) -> Any:
        if not yb or not isinstance(yb[0], Tensor):
            return None
        targ = yb[0]
        values = read_options(self.options)
        reduction = values.get('reduction', 'mean')
        if reduction == 'sum':
            return None
        if targ.dtype.is_floating_point:  # class probabilities over `axis`
            axis = self.axis if -targ.ndim <= self.axis < targ.ndim else 0
            return targ.numel() // max(targ.shape[axis], 1) if targ.ndim else 1
        if reduction != 'mean':
            return targ.numel()
        # `_buffers` is ten times as fast as access by attribute
        tensors = values['_buffers'] if self.is_module else values
        weight = tensors.get('weight')
        ignore_index = values.get('ignore_index', IGNORED)
        if weight is None:
            return count_targets(targ, ignore_index)
        return sum_of_weights(targ, ignore_index, weight)


class ModelTargets(Tokens):
    "Denominator of the loss that Hugging Face models compute: the number of labels that are not -100."

    def __init__(
        self,
        is_shifted: bool,  # True if tokens predict the next token, so that the first label is unused
    ) -> None:
        super().__init__()
        self.is_shifted = is_shifted

    @override
    def count(self, yb: tuple[Any, ...]) -> Any:
        if self.is_shifted and has_class_numbers(yb) and yb[0].ndim > 1:
            yb = (yb[0][..., 1:],)
        return super().count(yb)


class Unknown(Denominator):
    "Unknown denominator: the number of samples is assumed, with a warning if a target is -100."

    def __init__(
        self,
        name: str,  # name of the loss function
        why: str = '',  # reason why the denominator is not the number of samples
    ) -> None:
        self.name = name
        self.why = why
        self.has_warned = False
        self._has_compared = False  # a batch of an evaluation was compared with its parts
        self._sizes: set[int] = set()  # numbers of samples of the batches of evaluations

    @override
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

    def compare(self, learn: LearnerLike, n: int) -> None:
        "Compare the loss of a batch of `n` samples with its parts, once, if batches of evaluations differ in size."
        self._sizes.add(n)
        if self._has_compared or len(self._sizes) == 1 or n == 1:
            return
        self._has_compared = True
        check_is_mean(learn, vars(learn).get('pred'))

    def warn_of_parts(self, yb: tuple[Any, ...], whole: float, parts: Parts) -> None:
        "Warn once that the loss of a batch is not the mean of the losses of its parts."
        self.look(yb)
        if self.has_warned:
            return
        self.has_warned = True
        n = sum(n for n, _ in parts)
        warn_user(
            f'{self.name} is not a mean over samples: it is {whole:.6g} for {n} samples, and its parts average to '
            f'{mean_of_parts(parts):.6g}. Microbatches, accumulated batches, processes and the batches of an '
            'evaluation are weighted by their number of samples, so that losses and gradients are not those of the '
            'whole. If the loss divides by another number, give that of a batch: Learner(weight_func=f), f(xb, yb); '
            'otherwise it cannot be split, and needs whole batches.'
        )


def denominator_of(loss_func: Any) -> Denominator:
    """Return the denominator of a loss function's mean.

    Losses of torch are recognized: modules, functions, and a `functools.partial` of a function with keywords. Any other
    loss may define a method `loss_denominator()`, which returns a `Denominator`.

    >>> denominator_of(nn.CrossEntropyLoss()).count((torch.tensor([[1, -100], [0, 2]]),))
    3
    >>> denominator_of(partial(F.cross_entropy, ignore_index=0)).count((torch.tensor([1, 0, 2]),))
    2
    >>> denominator_of(nn.MSELoss()).count((torch.zeros(3, 2),))
    6
    """
    loss_func = getattr(loss_func, '_orig_mod', loss_func)  # the module that torch.compile wraps
    make_denominator = getattr(loss_func, 'loss_denominator', None)
    if make_denominator is not None:
        return make_denominator()
    if isinstance(loss_func, CLASS_LOSSES) and has_forward_of(loss_func, CLASS_LOSSES):
        return ClassTargets(loss_func)
    if isinstance(loss_func, ELEMENT_LOSSES) and has_forward_of(loss_func, ELEMENT_LOSSES):
        return Elements(loss_func)
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
        return Elements(keywords)
    if type(loss_func).__module__.startswith('torch.nn'):
        return Samples()
    return Unknown(getattr(loss_func, '__name__', None) or type(loss_func).__name__)


def read_options(options: nn.Module | Mapping[str, Any]) -> Mapping[str, Any]:
    "Return the options of a loss: the attributes of a module, or keywords."
    return vars(options) if isinstance(options, nn.Module) else options


def has_forward_of(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> bool:
    "Return True if a module's `forward` is inherited from one of `classes` without a change."
    return any(type(module).forward is cls.forward for cls in classes)


def denominator_of_model(model: nn.Module) -> Denominator:
    "Return the denominator of a loss that the model computes."
    model = getattr(model, '_orig_mod', model)
    name = type(model).__name__
    if takes_batches(model):
        return Samples()  # Composer weights microbatches by their number of samples
    if type(model).forward.__module__.partition('.')[0] not in ('transformers', 'peft'):
        return Unknown(f'the own loss of {name}')
    is_decoder = not getattr(getattr(model, 'config', None), 'is_encoder_decoder', False)
    predicts_next = 'ForCausalLM' in name or name.endswith(
        ('LMHeadModel', 'ForConditionalGeneration')
    )
    return ModelTargets(is_shifted=is_decoder and predicts_next and not name.startswith('XLNet'))


class LossWeights:
    """Weights of batches in a mean of losses, so that the weighted mean over parts equals the loss of the whole.

    The weight of a batch is the denominator of the loss. `Learner(weight_func=...)` takes precedence. A copy or a
    pickled object finds the denominator again.
    """

    def __init__(self) -> None:
        # loss function, `weight_func` and class of the model that `_denominator` belongs to
        self._cache_key: tuple[Any, Any, Any] = None, None, None
        self._denominator: Denominator | None = None

    def is_sum(self, learn: LearnerLike) -> bool:
        "Return True if the loss is a sum over samples instead of a mean."
        keyword = getattr(learn.loss_func, 'keywords', {}).get('reduction')
        return bool(getattr(learn.loss_func, 'reduction', keyword) == 'sum')

    def are_samples(self, learn: LearnerLike) -> bool:
        "Return True if batches with the same number of samples have the same weight."
        if callable(learn.weight_func):
            return False
        return learn.callbacks.average_samples() or not self.denominator(learn).varies(learn.yb)

    def weigh_batch(self, learn: LearnerLike, xb: Any, yb: Any) -> Any:
        "Return the weight of a batch or part of a batch: a number, or a tensor on the device of the batch."
        weight = None
        denominator = self.denominator(learn)
        if callable(learn.weight_func):
            weight = learn.weight_func(xb, yb)
        elif not (learn.training and learn.callbacks.average_samples()):
            if not learn.iter:
                # only for the first batch, because it synchronizes with the device
                denominator.look(yb)
            weight = denominator.count(yb)
        if weight is not None:
            return weight
        n = find_bs(xb, yb, learn.size_func)
        if not learn.training and is_guess(denominator, learn):
            denominator.compare(learn, n)
        return n

    def denominator(self, learn: LearnerLike) -> Denominator:
        "Return the denominator of the loss, which is found once for each loss function."
        key = learn.loss_func, learn.weight_func, learn.model.__class__
        if self._denominator is None or key != self._cache_key:
            self._denominator = find_denominator(learn)
            self._cache_key = key
        return self._denominator

    def __reduce__(self) -> tuple[Any, ...]:
        return LossWeights, ()


def find_denominator(learn: LearnerLike) -> Denominator:
    "Return the denominator of a Learner's loss."
    if learn.weight_func == 'samples':
        return Samples()
    if learn.loss_func is None:
        denominator = denominator_of_model(learn.model)
    else:
        denominator = denominator_of(learn.loss_func)
    if learn.weight_func != 'tokens':
        return denominator
    return Tokens(denominator.ignore_index) if isinstance(denominator, ClassTargets) else Tokens()


def check_is_mean(
    learn: LearnerLike,  # Learner with a batch
    pred: Any,  # predictions of the batch
) -> None:
    """Compare the loss of a batch with the losses of its parts, if it is unknown what the loss averages over.

    Raises `LossError` for a sum over samples without an attribute `reduction = 'sum'`, and warns of any other loss
    that is not the mean of the losses of the parts, weighted by their numbers of samples.
    """
    denominator = learn.loss_weights.denominator(learn)
    if learn.callbacks.average_samples() or not is_guess(denominator, learn):
        return
    for whole, parts in compare_parts(learn, pred):
        if is_mean(whole, parts, pred):
            continue
        if isclose(whole, sum(loss for _, loss in parts), rel_tol=1e-3):
            raise LossError(
                f'{name_of(learn.loss_func)} adds up the losses of the samples, and does not say so: the parts of a '
                'batch (microbatches, accumulated batches, several processes) would be averaged. Return the mean, or '
                "set the attribute `reduction = 'sum'` of the loss function."
            )
        denominator.warn_of_parts(learn.yb, whole, parts)
        return


def is_guess(denominator: Denominator, learn: LearnerLike) -> TypeGuard[Unknown]:
    "Return True if the loss function is assumed to be a mean over samples."
    is_unknown = isinstance(denominator, Unknown) and learn.weight_func is None
    return is_unknown and learn.loss_func is not None and not learn.loss_weights.is_sum(learn)


def compare_parts(learn: LearnerLike, pred: Any) -> Iterator[tuple[float, Parts]]:
    "Yield the loss of the batch and of two parts, for two divisions; nothing if the batch cannot be divided."
    loss_func = learn.loss_func
    buffers = copy_buffers(loss_func) if isinstance(loss_func, nn.Module) else []
    preds = tuple(pred) if isinstance(pred, (tuple, list)) else (pred,)

    def compute(preds: tuple[Any, ...], yb: tuple[Any, ...]) -> float:
        with torch.no_grad(), preserved_rng():
            loss = loss_func(preds[0] if isinstance(pred, Tensor) else preds, *yb)
        if isinstance(loss, Mapping):
            loss = loss['loss'] if 'loss' in loss else sum(loss.values())
        return float(loss)

    try:
        n = find_bs(learn.xb, learn.yb, learn.size_func)
        # two divisions, because the parts of one may have equal denominators by chance
        for middle in sorted({n // 2, n // 3} - {0}, reverse=True):
            parts = slice_batch(preds, learn.yb, n, [slice(middle), slice(middle, n)])
            first, second = (compute(*part) for part in parts)
            yield compute(preds, learn.yb), ((middle, first), (n - middle, second))
    except Exception:
        return  # the loop raises the error of the loss function
    finally:
        restore_buffers(buffers, skip_equal=True)


def is_mean(whole: float, parts: Parts, pred: Any) -> bool:
    "Return True if a loss is the mean of the losses of its parts, up to rounding errors."
    mean = mean_of_parts(parts)
    is_half = any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors_in(pred))
    tolerance = 1e-2 if is_half else 1e-4
    size = max(abs(loss) for _, loss in parts)
    return isnan(whole) or isclose(whole, mean, rel_tol=tolerance, abs_tol=tolerance * size)


def mean_of_parts(parts: Parts) -> float:
    "Return the mean of losses weighted by their numbers of samples."
    return sum(n * loss for n, loss in parts) / sum(n for n, _ in parts)


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
    is_counted = targ != ignore_index
    dtype = torch.float32 if targ.device.type == 'mps' else torch.float64
    weights = weight.detach().to(targ.device, dtype)[torch.where(is_counted, targ, 0)]
    total = torch.where(is_counted, weights, 0).sum()
    return total.item() if total.is_cpu else total


def has_ignored(yb: tuple[Any, ...]) -> bool:
    "Return True if an integer target is -100. The check synchronizes with the device."
    numbers = [
        t for t in yb if isinstance(t, Tensor) and not t.is_floating_point() and t.dtype.is_signed
    ]
    return any(bool((t == IGNORED).any()) for t in numbers)
