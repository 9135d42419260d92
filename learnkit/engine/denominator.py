# SPDX-License-Identifier: Apache-2.0
"""Denominators of mean losses: the number that a loss function divides the sum of its terms by.

The denominator is the number of samples, of elements of the targets, of targets that are not ignored, or the sum of
their class weights. It is the weight of a batch in the loss of an epoch, and in the gradients of microbatches,
accumulated batches and ranks. Only with these weights does the mean over batches equal the loss of all batches
together."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import isclose, isnan
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from learnkit.core.batch import find_bs, slice_batch, tensors_in
from learnkit.core.errors import LossError, OptionError, did_you_mean
from learnkit.core.model import (
    bare_model,
    copy_buffers,
    name_of,
    restore_buffers,
    takes_batches,
)
from learnkit.core.random import preserved_generators, preserved_rng
from learnkit.core.validation import warn_user

if TYPE_CHECKING:
    from learnkit.learner import Learner

IGNORED = -100  # torch's default `ignore_index`
FEW = 256  # numbers that are counted faster in a list than by NumPy
WEIGHT_FUNCS = ('tokens', 'samples')  # names that `Learner(weight_func=)` accepts
# functions, and the `forward` of modules
CLASS_LOSSES = (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
ELEMENT_LOSSES = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.soft_margin_loss, F.kl_div,
    nn.MSELoss.forward, nn.L1Loss.forward, nn.SmoothL1Loss.forward, nn.HuberLoss.forward,
    nn.BCELoss.forward, nn.BCEWithLogitsLoss.forward, nn.PoissonNLLLoss.forward,
    nn.SoftMarginLoss.forward, nn.KLDivLoss.forward,
)  # fmt: skip


class Denominator:
    "Base class of the denominators of a batch's mean loss."

    varies = False  # True if batches of equal size may have different denominators

    def count(self, yb: tuple[Any, ...]) -> Any:
        "Return the denominator, a number or a tensor on the device of the targets; None for the number of samples."
        return None


class Samples(Denominator):
    "Denominator of a mean over the samples."


class Elements(Denominator):
    "Denominator of a mean over all elements of the targets; of another reduction, the number of samples."

    def __init__(
        self,
        options: Any,  # module or namespace with `reduction`, read for each batch
    ) -> None:
        self.options = options

    @override
    def count(self, yb: tuple[Any, ...]) -> Any:
        reduction = getattr(self.options, 'reduction', 'mean')
        if reduction in ('sum', 'batchmean') or not (yb and isinstance(yb[0], Tensor)):
            return None
        return yb[0].numel()


class Tokens(Denominator):
    "Denominator of a mean over the targets that are not `ignore_index`."

    varies = True

    def __init__(
        self,
        ignore_index: int = IGNORED,
        is_shifted: bool = False,  # True if tokens predict the next token: the first label is unused
    ) -> None:
        self.ignore_index = ignore_index
        self.is_shifted = is_shifted

    @override
    def count(self, yb: tuple[Any, ...]) -> Any:
        if not (yb and isinstance(yb[0], Tensor)) or yb[0].is_floating_point():
            return None
        targ = yb[0][..., 1:] if self.is_shifted and yb[0].ndim > 1 else yb[0]
        return count_targets(targ, self.ignore_index)


class ClassTargets(Denominator):
    "Denominator of cross-entropy: the number of targets that are not ignored, or the sum of their class weights."

    varies = True

    def __init__(
        self,
        options: Any,  # module or namespace with `weight`, `ignore_index`, `reduction`, read for each batch
        axis: int = 1,  # class dimension of probabilities
    ) -> None:
        self.options = options
        self.axis = axis

    @property
    def ignore_index(self) -> int:
        return int(getattr(self.options, 'ignore_index', IGNORED))

    @override
    def count(self, yb: tuple[Any, ...]) -> Any:
        reduction = getattr(self.options, 'reduction', 'mean')
        if reduction == 'sum' or not (yb and isinstance(yb[0], Tensor)):
            return None
        targ = yb[0]
        if targ.is_floating_point():  # class probabilities over `axis`
            return targ.numel() // targ.shape[self.axis]
        if reduction == 'none':
            return targ.numel()
        weight = getattr(self.options, 'weight', None)
        if weight is None:
            return count_targets(targ, self.ignore_index)
        return sum_of_weights(targ, self.ignore_index, weight)


class Unknown(Denominator):
    "Unknown denominator: the number of samples is assumed, with a warning if that turns out wrong."

    def __init__(
        self,
        name: str,  # name of the loss function
    ) -> None:
        self.name = name
        self.has_warned = False
        self.has_compared = False  # a batch of an evaluation was compared with its parts
        self.sizes: set[int] = set()  # numbers of samples of the batches of evaluations

    def warn(self, why: str) -> None:
        "Warn once that the batches are not weighted as the loss would have it."
        if self.has_warned:
            return
        self.has_warned = True
        warn_user(
            f"{why}. Parts of batches are weighted by their samples: with weight_func='tokens' by the targets that "
            f"are not {IGNORED}, with weight_func=f by f(xb, yb); weight_func='samples' ends this warning."
        )

    def warn_of_ignored(self, yb: tuple[Any, ...]) -> None:
        "Warn if an integer target is -100. The check synchronizes with the device of the targets."
        tensors = [t for t in yb if isinstance(t, Tensor) and t.dtype.is_signed]
        if any(bool((t == IGNORED).any()) for t in tensors if not t.is_floating_point()):
            self.warn(f'There are targets of {IGNORED}, which {self.name} may leave out')


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
    loss_func = bare_model(loss_func)
    if hasattr(loss_func, 'loss_denominator'):
        denominator: Denominator = loss_func.loss_denominator()
        return denominator
    options = loss_func
    computes = getattr(type(loss_func), 'forward', loss_func)
    if isinstance(loss_func, partial) and not loss_func.args:
        options = SimpleNamespace(**loss_func.keywords)
        computes = loss_func.func
    if computes in CLASS_LOSSES:
        return ClassTargets(options)
    is_weighted = isinstance(options, SimpleNamespace) and hasattr(options, 'weight')
    if computes in ELEMENT_LOSSES and not is_weighted:
        return Elements(options)
    if type(loss_func).__module__.startswith('torch.nn'):
        return Samples()
    return Unknown(getattr(loss_func, '__name__', None) or type(loss_func).__name__)


def find_model_denominator(model: nn.Module) -> Denominator:
    "Return the denominator of a loss that the model computes."
    model = bare_model(model)
    name = type(model).__name__
    if takes_batches(model):
        return Samples()  # Composer weights microbatches by their number of samples
    if type(model).forward.__module__.partition('.')[0] not in ('transformers', 'peft'):
        return Unknown(f'the own loss of {name}')
    is_decoder = not getattr(getattr(model, 'config', None), 'is_encoder_decoder', False)
    predicts_next = name.endswith(('ForCausalLM', 'LMHeadModel', 'ForConditionalGeneration'))
    return Tokens(is_shifted=is_decoder and predicts_next)


class LossWeights:
    """Weights of batches in a mean of losses, so that the weighted mean over parts equals the loss of the whole.

    The weight of a batch is the denominator of the loss. `Learner(weight_func=...)` takes precedence.
    """

    def __init__(self) -> None:
        # loss function, `weight_func` and class of the model that `_denominator` belongs to
        self._key: tuple[Any, Any, Any] | None = None
        self._denominator: Denominator = Samples()
        # a callback makes the training loss a mean over samples, whatever the loss function returns
        self.averages_samples = False

    def is_sum(self, learn: Learner) -> bool:
        "Return True if the loss is a sum over samples instead of a mean."
        keyword = getattr(learn.loss_func, 'keywords', {}).get('reduction')
        return bool(getattr(learn.loss_func, 'reduction', keyword) == 'sum')

    def are_samples(self, learn: Learner) -> bool:
        "Return True if batches with the same number of samples have the same weight."
        if callable(learn.weight_func):
            return False
        return self.averages_samples or not self.denominator(learn).varies

    def weigh_batch(self, learn: Learner, xb: Any, yb: Any) -> Any:
        "Return the weight of a batch or part of a batch: a number, or a tensor on the device of the batch."
        if callable(learn.weight_func):
            return learn.weight_func(xb, yb)
        weight = denominator = None
        if not (learn.training and self.averages_samples):
            denominator = self.denominator(learn)
            if not learn.iter and isinstance(denominator, Unknown):
                denominator.warn_of_ignored(yb)
            weight = denominator.count(yb)
        if weight is not None:
            return weight
        n = find_bs(xb, yb, learn.size_func)
        if isinstance(denominator, Unknown) and not learn.training:
            denominator.sizes.add(n)
            if len(denominator.sizes) > 1 and n > 1 and not denominator.has_compared:
                denominator.has_compared = True
                check_is_mean(learn, vars(learn).get('pred'))
        return n

    def denominator(self, learn: Learner) -> Denominator:
        "Return the denominator of the loss, which is found once for each loss function."
        key = learn.loss_func, learn.weight_func, learn.model.__class__
        if key != self._key:
            self._denominator = find_denominator(learn)
            self._key = key
        return self._denominator


def find_denominator(learn: Learner) -> Denominator:
    "Return the denominator of a Learner's loss."
    if learn.weight_func == 'samples':
        return Samples()
    if learn.loss_func is None:
        denominator = find_model_denominator(learn.model)
    else:
        denominator = denominator_of(learn.loss_func)
    if learn.weight_func != 'tokens':
        return denominator
    return Tokens(getattr(denominator, 'ignore_index', IGNORED))


def check_is_mean(
    learn: Learner,  # Learner with a batch
    pred: Any,  # predictions of the batch
) -> None:
    """Compare the loss of a batch with the losses of two parts, if it is unknown what the loss averages over.

    Raises `LossError` for a sum over samples without an attribute `reduction = 'sum'`, and warns of any other loss
    that is not the mean of the losses of the parts, weighted by their numbers of samples.
    """
    weights = learn.parts.loss_weights
    denominator = weights.denominator(learn)
    is_given = learn.weight_func is not None or learn.loss_func is None or weights.is_sum(learn)
    if is_given or not isinstance(denominator, Unknown) or weights.averages_samples:
        return
    compared = compare_parts(learn, pred)
    if compared is None:
        return
    whole, (n_first, first), (n_second, second) = compared
    mean = (n_first * first + n_second * second) / (n_first + n_second)
    is_half = any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors_in(pred))
    tolerance = 1e-2 if is_half else 1e-4
    size = max(abs(first), abs(second))
    if isnan(whole) or isclose(whole, mean, rel_tol=tolerance, abs_tol=tolerance * size):
        return
    if isclose(whole, first + second, rel_tol=1e-3):
        raise LossError(
            f'{name_of(learn.loss_func)} adds up the losses of the samples, so that parts of a batch cannot be '
            "averaged. Return the mean, or set the attribute `reduction = 'sum'` of the loss function."
        )
    denominator.warn_of_ignored(learn.yb)
    denominator.warn(
        f'{denominator.name} is not a mean over samples: it is {whole:.6g} for a batch, and its parts average to '
        f'{mean:.6g}'
    )


def compare_parts(
    learn: Learner, pred: Any
) -> tuple[float, tuple[int, float], tuple[int, float]] | None:
    "Return the loss of the batch, and the sizes and losses of two parts; None if the batch cannot be divided."
    loss_func = learn.loss_func
    buffers = copy_buffers(loss_func) if isinstance(loss_func, nn.Module) else []
    preds = tuple(pred) if isinstance(pred, (tuple, list)) else (pred,)

    def compute(preds: tuple[Any, ...], yb: tuple[Any, ...]) -> float:
        with torch.no_grad(), preserved_rng(), preserved_generators(loss_func):
            loss = loss_func(preds[0] if isinstance(pred, Tensor) else preds, *yb)
        if isinstance(loss, Mapping):
            loss = loss['loss'] if 'loss' in loss else sum(loss.values())
        return float(loss)

    try:
        n = find_bs(learn.xb, learn.yb, learn.size_func)
        middle = n // 3 or n // 2
        if not middle:
            return None
        parts = slice_batch(preds, learn.yb, n, [slice(middle), slice(middle, n)])
        first, second = (compute(*part) for part in parts)
        return compute(preds, learn.yb), (middle, first), (n - middle, second)
    except Exception:
        return None  # the loop raises the error of the loss function
    finally:
        restore_buffers(buffers, skip_equal=True)


def check_weight_func(weight_func: Any) -> Any:
    "Return `weight_func`; raise `OptionError` unless it is None, a function, or one of `WEIGHT_FUNCS`."
    if weight_func is None or callable(weight_func) or weight_func in WEIGHT_FUNCS:
        return weight_func
    raise OptionError(
        f'weight_func={weight_func!r}: give {" or ".join(map(repr, WEIGHT_FUNCS))}, or a function f(xb, '
        f'yb) that returns what a batch weighs.{did_you_mean(str(weight_func), WEIGHT_FUNCS)}'
    )


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
    if targ.numel() <= FEW:
        numbers = targ.flatten().tolist()
        return len(numbers) - numbers.count(ignore_index)
    return int(np.count_nonzero(targ.numpy() != ignore_index))


def sum_of_weights(targ: Tensor, ignore_index: int, weight: Tensor) -> float | Tensor:
    "Return the sum of the class weights of the targets that are not `ignore_index`."
    targ = targ.detach().long()
    is_counted = targ != ignore_index
    dtype = torch.float32 if targ.device.type == 'mps' else torch.float64
    weights = weight.detach().to(targ.device, dtype)[torch.where(is_counted, targ, 0)]
    total = torch.where(is_counted, weights, 0).sum()
    return total.item() if total.is_cpu else total
