"""Torchmetrics objects created at the first batch, when the number of classes is known.

For `learnkit.metrics.classification`: conversion of predictions to metric inputs, and of metric states to values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from learnkit.core.errors import MetricError
from learnkit.core.optional import import_library
from learnkit.core.validation import check_choice, needs_class_indices
from learnkit.metrics.base import flatten_pair, widen
from learnkit.metrics.merge import interleave, merge_states
from learnkit.metrics.state import join_batches, restore_accumulated
from learnkit.metrics.whole_set import KeptMetric, KeptPairs

__all__ = [
    'LazyTorchMetric',
    'Score',
    'flatten_classes',
    'argmax_preds',
    'softmax_probs',
    'softmax_probs_of_class',
    'flatten_labels',
    'rank_labels',
    'threshold_labels',
    'match_dtypes',
    'compute_value',
    'average_defined',
    'compute_mean_recall',
    'compute_matthews',
    'make_score',
    'check_average',
    'Bleu',
]

GROUP = 2**20  # number of predicted values collected for one update
AVERAGES = ('macro', 'micro', 'weighted')

Prepared = tuple[Tensor, Tensor, int]  # predictions, targets, number of classes or labels
Prepare = Callable[[Tensor, Tensor], Prepared]
Finish = Callable[[Any], Any]  # function from the torchmetrics object to the value
Labels = Sequence[int] | None

compute_value = methodcaller('compute')  # function that returns the value of a torchmetrics object


def from_torchmetrics(module: str, name: str) -> Any:
    "Import an object of torchmetrics; raise `MissingExtraError` if torchmetrics is not installed."
    # imports of torchmetrics may warn of optional packages
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return getattr(import_library(f'torchmetrics.{module}', name), name)


class LazyTorchMetric(KeptPairs):
    """Wrapper that creates a torchmetrics object at the first batch, when the number of classes is known.

    Batches are passed on in large groups, because an update is slow on the host and waits for the GPU."""

    def __init__(
        self, kind: str, prepare: Prepare, finish: Finish = compute_value, **options: Any
    ) -> None:
        module = 'regression' if kind == 'SpearmanCorrCoef' else 'classification'
        self.make = from_torchmetrics(module, kind)
        self.options = options
        self.kind = kind
        self.prepare = prepare
        self.finish = finish
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.metric: Any = None
        self.n = 0  # number of classes or labels
        self.n_waiting = 0  # number of waiting predicted values

    def update(self, pred: Tensor, targ: Tensor) -> None:
        pred, targ, n = self.prepare(pred, targ)
        if self.n and n != self.n:
            raise MetricError(f'{self.kind}: there were {self.n} classes, now there are {n}.')
        self.keep(pred, targ)
        self.n = n
        self.n_waiting += pred.numel()
        if self.n_waiting >= GROUP:
            self.flush()

    def flush(self) -> None:
        "Update the torchmetrics object with the waiting batches."
        if not self.waiting:
            return
        pred, targ = join_batches(self.waiting)[0]
        self.waiting = []
        self.lengths = []
        self.n_waiting = 0
        self._check_range(targ)
        with _suppress_warnings():
            if self.metric is None:
                self.metric = self._make_metric()
            self.metric = self.metric.to(pred.device)
            if self.kind == 'SpearmanCorrCoef':
                self.metric.set_dtype(pred.dtype)  # which it converts predictions to
            self.metric.update(pred, targ)

    def _make_metric(self) -> Any:
        # states are merged by learnkit, because ranks may compute at different times
        options = {**self.options, 'sync_on_compute': False}
        if self.kind.startswith('Multiclass'):
            options |= {'num_classes': self.n, 'validate_args': False}
        if self.kind.startswith('Multilabel'):
            options |= {'num_labels': self.n, 'validate_args': False}
        return self.make(**options)

    def _check_range(self, targ: Tensor) -> None:
        "Raise `MetricError` for an invalid class number, which torchmetrics would count as another class."
        if targ.is_floating_point() or not targ.numel():
            return
        top = self.n if self.kind.startswith('Multiclass') else 2
        low, high = torch.stack(targ.aminmax()).tolist()
        if low < 0 or high >= top:
            raise MetricError(
                f'{self.kind}: targets go from {low} to {high}, but are to be from 0 to {top - 1}. Leave '
                'out what is not to count, in `before_batch` or a function of your own.'
            )

    def compute(self) -> Any:
        self.flush()
        with _suppress_warnings():
            return self.finish(self.metric)

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self.reset()
        self.n = sd['n']
        if 'metric/' in sd:
            with _suppress_warnings():
                self.metric = self._make_metric()
        restore_accumulated(self, sd)

    def merge(self, states: list[dict[str, Any]]) -> None:
        known = sorted({sd['n'] for sd in states if sd['n']})
        if len(known) > 1:
            raise MetricError(
                f'{self.kind}: {known[0]} classes in one process, {known[1]} in another.'
            )
        self.reset()
        self.n = known[0] if known else 0
        super().merge(states)
        self.n_waiting = sum(pred.numel() for pred, _ in self.waiting)
        metric_states = [sd['metric/'] for sd in states if 'metric/' in sd]
        if metric_states:
            with _suppress_warnings():
                self.metric = self._make_metric()
            merge_states(self.metric, metric_states)


@contextmanager
def _suppress_warnings() -> Iterator[None]:
    "Suppress torchmetrics' warnings of undefined scores, which learnkit's metrics document."
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', UserWarning)
        yield


class Score(KeptMetric):
    "Base class of scores computed by a `LazyTorchMetric`."

    def _try(self, pred: Any, yb: tuple[Any, ...]) -> None:
        self._compute_batch(pred, yb)


# -- from predictions to inputs of the metric ------------------------------------------------------


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


def _promote(t: Tensor) -> Tensor:
    "Convert half-precision and integer tensors to float32."
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _check_two_classes(name: str, n: int, axis: int, instead: str) -> None:
    "Raise `MetricError` unless there are two classes."
    if n == 2:
        return
    raise MetricError(
        f'{name} is of two classes, but predictions have {n} along axis {axis}: use {instead}, or a '
        'metric that ends in Multi where each label is predicted for itself.'
    )


@needs_class_indices
def argmax_preds(name: str, axis: int, two: bool, pred: Tensor, targ: Tensor) -> Prepared:
    "Return the class with the highest score of each prediction; with `two`, require two classes."
    check_choice(name, pred, axis)
    n = pred.shape[axis]
    if two:
        _check_two_classes(
            f"{name} with average='binary'", n, axis, "average='macro', 'micro', 'weighted' or None"
        )
    pred, targ = flatten_pair(name, pred.argmax(dim=axis), targ)
    return pred, targ.long(), n


@needs_class_indices
def softmax_probs(name: str, axis: int, pred: Tensor, targ: Tensor) -> Prepared:
    "Return the softmax of the scores (N, C), and targets (N,)."
    scores, targ = flatten_classes(name, pred, targ, axis)
    # in float64, because scores that round to one probability would have one rank
    return widen(scores).softmax(1), targ.long(), scores.shape[1]


@needs_class_indices
def softmax_probs_of_class(
    name: str, axis: int, label: int, pred: Tensor, targ: Tensor
) -> Prepared:
    "Return the softmax (N,) of the class `label` of two classes, and targets of 0 and 1."
    check_choice(name, pred, axis)
    _check_two_classes(name, pred.shape[axis], axis, 'RocAuc')
    probs, targ, n = softmax_probs(name, axis, pred, targ)
    return probs[:, label], (targ == label).long(), n


def rank_labels(name: str, sigmoid: bool, pred: Tensor, targ: Tensor) -> Prepared:
    "Return label scores in float64, in which few of them round to one probability, and targets, both (N, L)."
    return flatten_labels(name, sigmoid, widen(pred), targ)


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
    pred, targ = (t.movedim(1, -1).reshape(-1, n) for t in (_promote(pred), targ))
    return pred.sigmoid() if sigmoid else pred, targ.long(), n


def threshold_labels(
    name: str, thresh: float, sigmoid: bool, pred: Tensor, targ: Tensor
) -> Prepared:
    "Return 1 for each label whose prediction is at least `thresh`, else 0, shape (N, L)."
    pred, targ, n = flatten_labels(name, sigmoid, pred, targ)
    return (pred >= thresh).long(), targ, n


def match_dtypes(name: str, pred: Tensor, targ: Tensor) -> Prepared:
    "Return predictions and targets of a regression in a common dtype, float32 or wider."
    pred, targ = flatten_pair(name, pred, targ)
    dtype = torch.promote_types(torch.promote_types(pred.dtype, targ.dtype), torch.float32)
    return pred.to(dtype), targ.to(dtype), 1


# -- from the state of the metric to the value -----------------------------------------------------


def _select_scores(labels: Sequence[int], mean: bool, metric: Any) -> Any:
    "Return the scores of some classes, or their mean."
    scores = metric.compute()[list(labels)]
    return scores.mean() if mean else scores


def average_defined(average: str | None, needs_both: bool, metric: Any) -> Any:
    """Average the scores of the classes that occur; the score is NaN for other classes, and if no class occurs.

    With `needs_both`, a class must also be absent from some targets."""
    scores = metric.compute().reshape(-1)
    targ = torch.cat(list(metric.target))
    n = len(targ)
    n_scores = len(scores)
    if targ.dim() == 1 and n_scores > 1:
        targ = targ[:, None] == torch.arange(n_scores, device=targ.device)
    counts = targ.reshape(n, -1).sum(0)
    defined = (counts > 0) & ((counts < n) | (not needs_both))
    scores = torch.where(defined, scores, torch.nan)
    if average is None:
        return scores
    weights = (counts if average == 'weighted' else torch.ones_like(counts))[defined]
    return (scores[defined] * weights).sum() / weights.sum()


def compute_mean_recall(adjusted: bool, metric: Any) -> float:
    "Return the balanced accuracy of a confusion matrix: the mean recall over the classes that occur."
    matrix = metric.compute().double()
    counts = matrix.sum(1)
    recalls = (matrix.diag() / counts)[counts > 0]
    chance = 1 / len(recalls) if adjusted else 0.0
    if chance == 1:
        return float('nan')
    return float((recalls.mean() - chance) / (1 - chance))


def compute_matthews(metric: Any) -> float:
    "Return Matthews' correlation coefficient of a confusion matrix, 0 if it is undefined."
    matrix = metric.compute().double()
    if matrix.dim() == 3:
        matrix = matrix.sum(0)
    targ_counts = matrix.sum(1)
    pred_counts = matrix.sum(0)
    n_correct = matrix.trace()
    n = matrix.sum()
    targ_spread = n * n - targ_counts @ targ_counts
    pred_spread = n * n - pred_counts @ pred_counts
    spread = (targ_spread * pred_spread).sqrt()
    return float((n_correct * n - targ_counts @ pred_counts) / spread) if spread else 0.0


def make_score(
    kind: str,  # name of the torchmetrics class
    prepare: Prepare,  # function from predictions and targets to inputs of the metric
    labels: Labels,  # classes to score; None: all
    average: str | None,  # average over classes; None: a score for each class
    pos_label: int = 1,  # class that is scored with average='binary'
    beta: float | None = None,  # weight of recall in F scores
) -> LazyTorchMetric:
    "Create the metric of a score of each class, averaged over classes."
    check_average(average, ('binary', *AVERAGES) if kind.startswith('Multiclass') else AVERAGES)
    if beta is not None and not beta > 0:
        raise MetricError(f'beta={beta!r}: give a number above 0.')
    options: dict[str, Any] = {} if beta is None else {'beta': float(beta)}
    if average == 'binary':
        if pos_label not in (0, 1):
            raise MetricError(f"pos_label={pos_label!r}: with average='binary' it is 0 or 1.")
        labels = [pos_label]
    elif labels is None:
        return LazyTorchMetric(kind, prepare, average=average or 'none', **options)
    elif average in ('micro', 'weighted'):
        raise MetricError(
            f"labels={list(labels)} with average={average!r} is not supported: use 'macro' or None."
        )
    finish = partial(_select_scores, labels, average is not None)
    return LazyTorchMetric(kind, prepare, finish, average='none', **options)


def check_average(average: str | None, known: tuple[str, ...] = AVERAGES) -> None:
    "Raise `MetricError` for an unknown average."
    if average is None or average in known:
        return
    raise MetricError(
        f'average={average!r}: use one of {", ".join(map(repr, known))}, or None for a value per class.'
    )


class Bleu:
    "BLEU score of `CorpusBLEUMetric`; tokens are kept on their device until the score is read."

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.score = from_torchmetrics('functional.text', 'bleu_score')
        self.reset()

    def reset(self) -> None:
        self.preds: list[Tensor] = []
        self.targs: list[Tensor] = []

    def update(self, pred: Tensor, targ: Tensor) -> None:
        tokens = pred.argmax(dim=self.axis)
        if tokens.dim() != 2 or targ.dim() != 2 or len(tokens) != len(targ):
            raise MetricError(
                f'CorpusBLEUMetric: predictions {list(pred.shape)} and targets {list(targ.shape)} are to '
                f'be (B, T, C), with the tokens along axis {self.axis}, and (B, T).'
            )
        self.preds.append(tokens)
        self.targs.append(targ)

    def compute(self) -> Tensor:
        references = [[sentence] for sentence in _join_tokens(self.targs)]
        return self.score(_join_tokens(self.preds), references)

    def merge(self, states: list[dict[str, Any]]) -> None:
        self.preds = interleave(sd['preds'] for sd in states)
        self.targs = interleave(sd['targs'] for sd in states)


def _join_tokens(batches: list[Tensor]) -> list[str]:
    "Return the token numbers of each sequence, shape (B, T), as a string of words."
    return [' '.join(map(str, row)) for t in batches for row in t.tolist()]
