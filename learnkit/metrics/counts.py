"""Counts of correct predictions, predictions and targets of each class, and the scores computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from learnkit.core.errors import MetricError
from learnkit.core.validation import check_choice, needs_class_indices
from learnkit.engine.denominator import IGNORED
from learnkit.metrics.averages import SumMetric
from learnkit.metrics.base import flatten_pair

__all__ = [
    'ClassCounts',
    'LabelCounts',
    'argmax_preds',
    'check_average',
    'check_two_classes',
    'count_classes',
    'flatten_classes',
    'flatten_labels',
]

AVERAGES = ('macro', 'micro', 'weighted')
Prepared = tuple[Tensor, Tensor, int]  # predictions, targets, number of classes or labels


class CountScore(SumMetric):
    """Base class of scores of each class, averaged over classes: correct predictions by a denominator for `kind`.

    The sums are counts for each class, shape (3, n + 1), as from `count_classes`. A ratio with denominator 0 is 0."""

    kind = ''  # name of the score in scikit-learn
    beta = 1.0  # weight of recall in F scores
    needs_known = True  # raise an error for targets that are no class

    def __init__(
        self,
        labels: Sequence[int] | None,  # classes to score; None: all
        average: str | None,  # average over classes; None: a score for each class
        on: str | None,
    ) -> None:
        if labels is not None and average in ('micro', 'weighted'):
            raise MetricError(
                f"labels={list(labels)} with average={average!r} is not supported: use 'macro' or None."
            )
        if not self.beta > 0:
            raise MetricError(f'beta={self.beta!r}: give a number above 0.')
        super().__init__(self.kind, on)
        self.labels = labels
        self.average = average

    @override
    def final(self, sums: Tensor) -> Any:
        hits, preds, targs = self.read_counts(sums)
        if self.average == 'micro':
            hits, preds, targs = (counts.sum(0, keepdim=True) for counts in (hits, preds, targs))
        scores = (hits / self.count_possible(hits, preds, targs)).nan_to_num(0)
        weights = targs if self.average == 'weighted' else self.occurs(preds + targs).double()
        if self.labels is not None:
            scores = scores[list(self.labels)]
            weights = torch.ones_like(scores)
        return scores.float() if self.average is None else float(scores @ weights / weights.sum())

    def count_possible(self, hits: Tensor, preds: Tensor, targs: Tensor) -> Tensor:
        "Return the denominator of the score."
        if self.kind == 'precision_score':
            return preds
        if self.kind == 'recall_score':
            return targs
        if self.kind == 'jaccard_score':
            return preds + targs - hits
        return (preds + self.beta**2 * targs) / (1 + self.beta**2)

    @override
    def _try(self, pred: Any, yb: tuple[Any, ...]) -> None:
        self(pred, *yb)  # also finds targets that are no class

    def occurs(self, counts: Tensor) -> Tensor:
        "Return whether a class is part of an average over classes."
        return counts > 0

    def read_counts(self, sums: Tensor) -> Tensor:
        "Return the counts of the classes; raise `MetricError` if there were targets that are no class."
        n_unknown = int(sums[-1, -1])
        if n_unknown and self.needs_known:
            raise MetricError(
                f'{self.name}: {n_unknown} targets are not class numbers, from 0 to the number of classes - 1 (of '
                'labels, 0 or 1). Leave out what is not to count, in `before_batch`.'
            )
        return sums[:, :-1]


class ClassCounts(CountScore):
    "Base class of scores of one class for each sample."

    instead = "average='macro', 'micro', 'weighted' or None, or {}Multi for labels"

    def __init__(
        self,
        axis: int = -1,  # class dimension
        labels: Sequence[int] | None = None,  # classes to include; None: all
        pos_label: int = 1,  # class scored by 'binary'
        average: str | None = 'binary',  # see the module docstring; 'binary' requires two classes
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        check_average(average, ('binary', *AVERAGES))
        if average == 'binary':
            if pos_label not in (0, 1):
                raise MetricError(f"pos_label={pos_label!r}: with average='binary' it is 0 or 1.")
            labels = [pos_label]
        super().__init__(labels, average, on)
        # its mark makes a Learner check the targets of its first batch
        instead = self.instead.format(type(self).__name__) if average == 'binary' else None
        self.prepare = partial(argmax_preds, type(self).__name__, axis, instead)

    @override
    def sums(self, pred: Tensor, targ: Tensor) -> Tensor:
        return count_classes(*self.prepare(pred, targ))


class LabelCounts(CountScore):
    "Base class of scores of any number of labels for each sample."

    def __init__(
        self,
        thresh: float = 0.5,  # probability from which a label is predicted
        sigmoid: bool = True,  # whether the predictions are logits
        labels: Sequence[int] | None = None,  # labels to include; None: all
        average: str | None = 'macro',  # see the module docstring
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        check_average(average)
        super().__init__(labels, average, on)
        self.thresh = thresh
        self.sigmoid = sigmoid

    @override
    def occurs(self, counts: Tensor) -> Tensor:
        return counts >= 0  # also a label that is never true or predicted

    def predict(self, pred: Tensor, targ: Tensor) -> tuple[Tensor, Tensor]:
        "Return predicted and true labels, shape (N, L)."
        pred, targ, _ = flatten_labels(type(self).__name__, self.sigmoid, pred, targ)
        return pred >= self.thresh, targ

    @override
    def sums(self, pred: Tensor, targ: Tensor) -> Tensor:
        chosen, targ = self.predict(pred, targ)
        true = targ == 1
        counts = torch.stack([(chosen & true).sum(0), chosen.sum(0), true.sum(0)])
        n_unknown = ((targ != 0) & (targ != 1)).sum()
        return torch.cat([counts, n_unknown.expand(3, 1)], 1)


# -- counts ----------------------------------------------------------------------------------------


def count_classes(
    best: Tensor,  # predicted classes (N,)
    targ: Tensor,  # class numbers (N,)
    n: int,  # number of classes
) -> Tensor:
    """Return the correct predictions, predictions and targets of each class, shape (3, n + 1).

    The last column counts targets that are no class. Predictions for targets of -100 do not count.

    >>> count_classes(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, -100]), 2).tolist()
    [[1, 1, 2], [1, 2, 1], [2, 1, 1]]
    """
    best = torch.where(targ == IGNORED, n, best)
    targ = torch.where((targ >= 0) & (targ < n), targ, n).long()
    hits = torch.where(best == targ, targ, n)
    rows = torch.stack([hits, best, targ])
    # unlike `bincount`, without waiting for a device
    return rows.new_zeros(3, n + 1).scatter_add_(1, rows, torch.ones_like(rows))


def check_average(average: str | None, known: tuple[str, ...] = AVERAGES) -> None:
    "Raise `MetricError` for an unknown average."
    if average is None or average in known:
        return
    raise MetricError(
        f'average={average!r}: use one of {", ".join(map(repr, known))}, or None for a value per class.'
    )


# -- from predictions to classes -------------------------------------------------------------------


def flatten_classes(
    name: str,  # name of the metric, for the message
    pred: Tensor,  # scores, with the classes along `axis`
    targ: Tensor,  # class numbers, one for each prediction
    axis: int,  # dimension of the classes
) -> tuple[Tensor, Tensor]:
    """Reshape to scores (N, C) and targets (N,). Raises `MetricError` unless there is one target per prediction.

    >>> [list(t.shape) for t in flatten_classes('m', torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4), axis=1)]
    [[32, 3], [32]]
    """
    check_choice(name, pred, axis)
    scores = pred.movedim(axis, -1)
    if targ.numel() * scores.shape[-1] == scores.numel():
        return scores.reshape(-1, scores.shape[-1]), targ.reshape(-1)
    raise MetricError(
        f'{name}: predictions of shape {tuple(pred.shape)}, with {scores.shape[-1]} classes along axis '
        f'{axis}, do not fit targets of shape {tuple(targ.shape)}: give one class number for each.'
    )


def check_two_classes(name: str, pred: Tensor, axis: int, instead: str) -> None:
    "Raise `MetricError` unless there are two classes."
    if pred.shape[axis] == 2:
        return
    raise MetricError(
        f'{name} is of two classes, but predictions {list(pred.shape)} have {pred.shape[axis]} along axis {axis}: use '
        f'{instead}.'
    )


@needs_class_indices
def argmax_preds(name: str, axis: int, instead: str | None, pred: Tensor, targ: Tensor) -> Prepared:
    "Return the class with the highest score of each prediction; unless `instead` is None, require two classes."
    check_choice(name, pred, axis)
    if instead is not None:
        check_two_classes(name, pred, axis, instead)
    best, targ = flatten_pair(name, pred.argmax(dim=axis), targ)
    return best, targ, pred.shape[axis]


def flatten_labels(name: str, sigmoid: bool, pred: Tensor, targ: Tensor) -> Prepared:
    "Reshape predictions and targets to (N, L) for L labels; with `sigmoid`, apply the sigmoid."
    if pred.dim() < 2 or pred.shape[1] == 1:
        pred, targ = (t[:, None] for t in flatten_pair(name, pred, targ))
    if pred.shape != targ.shape:
        raise MetricError(
            f'{name}: predictions of shape {tuple(pred.shape)} do not fit targets of shape '
            f'{tuple(targ.shape)}: give 0 or 1 for each label, shape (B, L).'
        )
    n = pred.shape[1]
    pred, targ = (t.movedim(1, -1).reshape(-1, n) for t in (pred, targ))
    # of half precision in single precision
    pred = pred.to(torch.promote_types(pred.dtype, torch.float32))
    return pred.sigmoid() if sigmoid else pred, targ.long(), n
