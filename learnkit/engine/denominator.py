# SPDX-License-Identifier: Apache-2.0
"""Denominators of mean losses: the number that a loss function divides the sum of its terms by.

The denominator is the number of samples, of elements of the targets, of targets that are not ignored, or the sum of
their class weights. It is the weight of a batch in the loss of an epoch, and in the gradients of microbatches,
accumulated batches and ranks. Only with these weights does the mean over batches equal the loss of all batches
together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import isclose, isnan, nan
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from learnkit.core.batch import count_samples, find_bs, size_func_of, slice_batch, tensors_in
from learnkit.core.errors import LossError, OptionError, did_you_mean
from learnkit.core.model import (
    bare_model,
    copy_buffers,
    name_of,
    preserved_attributes,
    restore_buffers,
    takes_batches,
)
from learnkit.core.random import preserved_generators, preserved_rng
from learnkit.core.validation import warn_user

if TYPE_CHECKING:
    from learnkit.learner import Learner

IGNORED = -100  # torch's default `ignore_index`
FEW = 256  # numbers that are counted faster in a list than by NumPy
LEAST_COMPARED = 4  # samples needed to distinguish weighted means from losses that compare samples
WEIGHT_FUNCS = ('tokens', 'samples')  # names that `Learner(weight_func=)` accepts
# losses of torch by what they divide by: functions, and the `forward` of modules
CLASS_LOSSES = [F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss.forward, nn.NLLLoss.forward]
if hasattr(nn, 'LinearCrossEntropyLoss'):  # torch 2.13
    CLASS_LOSSES.append(nn.LinearCrossEntropyLoss.forward)
# means over the elements, or over vectors of one length
ELEMENT_LOSSES = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.gaussian_nll_loss, F.kl_div,
    F.soft_margin_loss, F.multilabel_soft_margin_loss, F.hinge_embedding_loss,
    F.margin_ranking_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
    nn.MSELoss.forward, nn.L1Loss.forward, nn.SmoothL1Loss.forward, nn.HuberLoss.forward,
    nn.BCELoss.forward, nn.BCEWithLogitsLoss.forward, nn.PoissonNLLLoss.forward,
    nn.GaussianNLLLoss.forward, nn.KLDivLoss.forward, nn.SoftMarginLoss.forward,
    nn.MultiLabelSoftMarginLoss.forward, nn.HingeEmbeddingLoss.forward,
    nn.MarginRankingLoss.forward, nn.TripletMarginLoss.forward,
    nn.TripletMarginWithDistanceLoss.forward,
)  # fmt: skip
SAMPLE_LOSSES = (
    F.multi_margin_loss, F.multilabel_margin_loss, F.cosine_embedding_loss, F.ctc_loss,
    nn.MultiMarginLoss.forward, nn.MultiLabelMarginLoss.forward, nn.CosineEmbeddingLoss.forward,
    nn.CTCLoss.forward, nn.AdaptiveLogSoftmaxWithLoss.forward,
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
        index = getattr(self.options, 'ignore_index', None)
        return IGNORED if index is None else int(index)

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
        self.has_compared_first = (
            False  # the first batch of an evaluation was compared with its parts
        )
        self.has_compared = False  # the same for a batch, after one of another size
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
    if computes in SAMPLE_LOSSES:
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
        n = find_bs(xb, yb, size_func_of(learn))
        if isinstance(denominator, Unknown) and not learn.training:
            check_evaluation(learn, denominator, n)
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


def check_evaluation(
    learn: Learner,  # Learner with a batch of an evaluation
    denominator: Unknown,
    n: int,  # number of samples of the batch
) -> None:
    """Compare the first batch with its parts, and one more batch once sizes differ, each once per loss function.

    While all batches have one size, the mean of their losses is the only sensible value of a loss that compares
    samples with each other. Until then, only a weighted mean over samples causes a warning.
    """
    pred = vars(learn).get('pred')
    denominator.sizes.add(n)
    if n < 2 or denominator.has_warned:
        return
    if len(denominator.sizes) > 1:
        if not denominator.has_compared:
            denominator.has_compared = True
            check_is_mean(learn, pred)
    elif not denominator.has_compared_first and not learn.iter:
        denominator.has_compared_first = check_is_mean(learn, pred, only_weights=True)


def check_is_mean(
    learn: Learner,  # Learner with a batch
    pred: Any,  # predictions of the batch
    only_weights: bool = False,  # warn only about weighted means over samples
) -> bool:  # False if the loss has to be compared again, with other predictions
    """Compare the loss of a batch with the losses of two parts, if it is unknown what the loss averages over.

    Raises `LossError` for a sum over samples without an attribute `reduction = 'sum'`, and warns of any other loss
    that is not the mean of the losses of the parts, weighted by their numbers of samples.
    """
    weights = learn.parts.loss_weights
    denominator = weights.denominator(learn)
    is_given = learn.weight_func is not None or learn.loss_func is None or weights.is_sum(learn)
    if is_given or not isinstance(denominator, Unknown) or weights.averages_samples:
        return True
    whole, divisions = compare_parts(learn, pred)
    is_half = any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors_in(pred))
    tolerance = 1e-2 if is_half else 1e-4
    for (n_first, first), (n_second, second) in divisions:
        mean = (n_first * first + n_second * second) / (n_first + n_second)
        size = max(abs(first), abs(second))
        if isnan(whole) or isclose(whole, mean, rel_tol=tolerance, abs_tol=tolerance * size):
            continue
        is_sum = isclose(whole, first + second, rel_tol=1e-3)
        if only_weights:
            has_weights = not is_sum and is_weighted_mean(learn, pred)
            if not has_weights:
                return has_weights is not None
        if is_sum:
            raise LossError(
                f'{name_of(learn.loss_func)} adds up the losses of the samples, so that parts of a batch cannot be '
                "averaged. Return the mean, or set the attribute `reduction = 'sum'` of the loss function."
            )
        denominator.warn_of_ignored(learn.yb)
        denominator.warn(
            f'{denominator.name} is not a mean over samples: it is {whole:.6g} for a batch, and its parts '
            f'average to {mean:.6g}'
        )
        break
    return True


Part = tuple[int, float]  # number of samples and loss


def compare_parts(
    learn: Learner, pred: Any
) -> tuple[float, list[tuple[Part, Part]]]:  # loss of the batch, and the parts of each division
    "Compute the loss of the batch and of two parts, of which the first is a third, and then a single sample."
    preds, yb = _as_tuple(pred), learn.yb

    def compute(preds: tuple[Any, ...], yb: tuple[Any, ...]) -> float:
        return _compute_loss(learn.loss_func, _like(pred, preds), yb)

    with preserved_loss(learn):
        try:
            n = count_samples(learn)
            divisions = []
            for k in sorted({n // 3 or n // 2, 1} - {0, n}, reverse=True):
                parts = slice_batch(preds, yb, n, [slice(k), slice(k, n)])
                first, second = (compute(*part) for part in parts)
                divisions.append(((k, first), (n - k, second)))
            return compute(preds, yb), divisions
        except Exception:
            return nan, []  # the loop raises the error of the loss function


def is_weighted_mean(learn: Learner, pred: Any) -> bool | None:
    """Return True if the loss is a mean over samples whose weights depend on the targets; None if unknown.

    In such a loss, masked for instance, the effects of changed predictions of two parts of the batch add up, and other
    targets of the rest of the batch scale both alike. Neither is true for losses that compare samples with each other.
    A loss with a state or random numbers differs when it is computed again.
    """
    with preserved_loss(learn):
        try:
            n = count_samples(learn)
            if n < LEAST_COMPARED:
                return True  # losses that compare samples have larger batches
            found: list[bool] = []
            for start in range(0, n, -(-n // 6)):
                result = _compare_effects(learn, pred, n, start)
                found += [] if result is None else [result]
                if result is False or len(found) == 2:
                    break
        except Exception:
            return None
    return all(found) if found else None


def _compare_effects(
    learn: Learner,
    pred: Any,
    n: int,  # number of samples
    start: int,  # first sample of the first part
) -> bool | None:
    "Return `is_weighted_mean` by the effects of one change; None if the loss does not change enough."
    k = (n - n // 4 - 1) // 2
    rows = [*range(start, n), *range(start)]
    first, second, rest = rows[:k], rows[k : 2 * k], rows[2 * k :]

    def replace(samples: list[int]) -> list[int]:
        "Return the samples of the batch, with the last one of the rest instead of these."
        replaced = set(samples)
        return [rest[-1] if i in replaced else i for i in range(n)]

    orders = [replace(samples) for samples in ([], first, second, first + second)]
    preds = [part for part, _ in slice_batch(_as_tuple(pred), (), n, orders)]
    others = slice_batch(learn.yb, (), n, [replace(rest)])[0][0]

    def compute(yb: tuple[Any, ...]) -> tuple[float, list[float]]:
        "Return the loss, and the effects of the changed predictions."
        whole, *changed = (_compute_loss(learn.loss_func, _like(pred, p), yb) for p in preds)
        return whole, [loss - whole for loss in changed]

    whole, (a, b, both) = compute(learn.yb)
    noise = 1e-6 * abs(whole)
    least = min(abs(a), abs(b))
    if not least > 1e3 * noise:  # also if it is nan
        return None
    if not isclose(_compute_loss(learn.loss_func, pred, learn.yb), whole, rel_tol=1e-6):
        return False
    _, (other_a, other_b, _) = compute(others)
    adds_up = isclose(a + b, both, rel_tol=0, abs_tol=1e-3 * least + noise)
    scales = isclose(a * other_b, b * other_a, rel_tol=1e-2, abs_tol=noise * max(abs(a), abs(b)))
    return adds_up and scales


@contextmanager
def preserved_loss(learn: Learner) -> Iterator[None]:
    "Restore generators, and the buffers and attributes of the loss function, at the end of a context."
    loss_func = learn.loss_func
    buffers = copy_buffers(loss_func) if isinstance(loss_func, nn.Module) else []
    with preserved_attributes(loss_func), preserved_rng(), preserved_generators(loss_func):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')  # a part may be too small for the loss function
                yield
        finally:
            restore_buffers(buffers, skip_equal=True)


def _as_tuple(pred: Any) -> tuple[Any, ...]:
    return tuple(pred) if isinstance(pred, (tuple, list)) else (pred,)


def _like(pred: Any, preds: tuple[Any, ...]) -> Any:
    "Return predictions in the form in which the loss function gets them."
    return preds if isinstance(pred, (tuple, list)) else preds[0]


@torch.no_grad()
def _compute_loss(loss_func: Any, pred: Any, yb: tuple[Any, ...]) -> float:
    loss = loss_func(pred, *yb)
    if isinstance(loss, Mapping):
        loss = loss['loss'] if 'loss' in loss else sum(loss.values())
    return float(loss)


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
