# SPDX-License-Identifier: Apache-2.0
"""Weights of batches in a mean of losses, and the check of a loss function of which the denominator is unknown."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isclose, isnan, nan
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from learnkit.core.batch import count_samples, find_bs, size_func_of, slice_batch, tensors_in
from learnkit.core.denominator import (
    IGNORED,
    Denominator,
    Samples,
    Tokens,
    Unknown,
    denominator_of,
    find_model_denominator,
)
from learnkit.core.errors import LossError
from learnkit.core.model import name_of
from learnkit.core.random import preserved_generators, preserved_rng
from learnkit.engine.snapshot import Snapshot

if TYPE_CHECKING:
    from learnkit.learner import Learner

LEAST_COMPARED = 4  # samples needed to distinguish weighted means from losses that compare samples


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
    mean = find_other_mean(pred, whole, divisions)
    if mean is None:
        return True
    is_sum = adds_up(learn, pred, whole, divisions)
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
    return True


Part = tuple[int, float]  # number of samples and loss
Divisions = list[tuple[Part, Part]]


def find_other_mean(
    pred: Any,
    whole: float,  # loss of the batch
    divisions: Divisions,  # return value of `compare_parts`
) -> float | None:
    "Return the first mean over parts that is not the loss of the batch, None if there is no such mean."
    is_half = any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors_in(pred))
    tolerance = 1e-2 if is_half else 1e-4
    for (n_first, first), (n_second, second) in divisions:
        mean = (n_first * first + n_second * second) / (n_first + n_second)
        size = max(abs(first), abs(second))
        is_close = isclose(whole, mean, rel_tol=tolerance, abs_tol=tolerance * size)
        if not is_close and not isnan(whole):
            return mean
    return None


def adds_up(learn: Learner, pred: Any, whole: float, divisions: Divisions) -> bool:
    """Return True if the losses of parts add up to the loss of the batch, and the batch twice has twice the loss.

    The former also holds for losses that compare samples, if these find nothing to compare in one of the parts.
    """
    sums = [first + second for (_, first), (_, second) in divisions]
    if not all(isclose(whole, total, rel_tol=1e-3) for total in sums):
        return False
    with preserved_loss(learn):
        try:
            n = count_samples(learn)
            [(preds, yb)] = slice_batch(_as_tuple(pred), learn.yb, n, [[*range(n), *range(n)]])
            twice = _compute_loss(learn.loss_func, _like(pred, preds), yb)
        except Exception:
            return False
    return isclose(twice, 2 * whole, rel_tol=1e-3)


def compare_parts(
    learn: Learner,
    pred: Any,
) -> tuple[float, Divisions]:  # loss of the batch, and the parts of each division
    """Compute the loss of the batch and of two parts, of which the first is a third, and then a single sample.

    A division is missing if the loss function fails for its parts. If both fail, two halves are compared: the loss may
    need two samples, or each class. The loss is NaN if it fails for the batch.
    """
    preds, yb = _as_tuple(pred), learn.yb

    def compute(preds: tuple[Any, ...], yb: tuple[Any, ...]) -> float:
        return _compute_loss(learn.loss_func, _like(pred, preds), yb)

    def divide(n: int, k: int) -> Divisions:
        "Return the parts of a division after `k` samples, if the loss function does not fail."
        parts = slice_batch(preds, yb, n, [slice(k), slice(k, n)])
        with suppress(Exception):
            first, second = (compute(*part) for part in parts)
            return [((k, first), (n - k, second))]
        return []

    with preserved_loss(learn):
        try:
            n = count_samples(learn)
            if n < 2:
                return nan, []
            sizes = sorted({n // 3 or 1, 1}, reverse=True)
            divisions = [part for k in sizes for part in divide(n, k)]
            return compute(preds, yb), divisions or divide(n, n // 2)
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
    "Restore at the end of a context what calls of the loss function can change, without its parameters."
    loss_func = learn.loss_func
    is_module = isinstance(loss_func, nn.Module)
    roots = [loss_func, getattr(loss_func, '__dict__', None)]
    parameters = loss_func.parameters() if is_module else ()
    snapshot = Snapshot(roots, excluded=parameters, skip_equal=True)
    with preserved_rng(), preserved_generators(loss_func):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')  # a part may be too small for the loss function
                yield
        finally:
            snapshot.undo()


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
