"""Torchmetrics objects created at the first batch, when the number of classes is known.

For `learnkit.metrics.classification`: conversion of predictions to metric inputs, and of metric states to values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from learnkit.core.batch import to_detach
from learnkit.core.errors import MetricError, MissingExtraError
from learnkit.core.validation import check_choice, needs_class_indices
from learnkit.metrics.averages import TorchMetric, paired
from learnkit.metrics.base import is_number
from learnkit.metrics.merge import in_turn, merge_states, merged_pairs
from learnkit.metrics.state import Pairs, accumulated, joined, restore_state

__all__ = [
    'LazyTorchMetric',
    'Score',
    'by_class',
    'argmax_preds',
    'softmax_probs',
    'chance_of',
    'by_label',
    'threshold_labels',
    'values',
    'computed',
    'over_defined',
    'mean_recall',
    'matthews',
    'averaged',
    'check_average',
    'Bleu',
]

GROUP = 2**20  # predicted numbers that wait for one update
AVERAGES = ('macro', 'micro', 'weighted')

Prepared = tuple[Tensor, Tensor, int]  # predictions, targets, how many classes or labels there are
Prepare = Callable[[Tensor, Tensor], Prepared]
Finish = Callable[[Any], Any]  # from the torchmetrics object to the value
Labels = Sequence[int] | None


def from_torchmetrics(module: str, name: str) -> Any:
    "Import an object of torchmetrics; raise `MissingExtraError` if torchmetrics is not installed."
    try:
        # imports of torchmetrics may warn of optional packages
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            return getattr(import_module(f'torchmetrics.{module}'), name)
    except ModuleNotFoundError as e:
        raise MissingExtraError(
            f'{name} comes from torchmetrics ({e}): `pip install learnkit[metrics]`.'
        ) from e


class LazyTorchMetric:
    """Wrapper that creates a torchmetrics object at the first batch, when the number of classes is known.

    Batches are passed on in large groups, because an update is slow on the host and waits for the GPU."""

    def __init__(self, kind: str, prepare: Prepare, finish: Finish, **options: Any) -> None:
        module = 'regression' if kind == 'SpearmanCorrCoef' else 'classification'
        self.make, self.options = from_torchmetrics(module, kind), options
        self.kind, self.prepare, self.finish = kind, prepare, finish
        self.reset()

    def reset(self) -> None:
        self.metric: Any = None
        self.waiting: Pairs = []
        self.lengths: list[tuple[int, int]] = []  # of the batches that wait
        self.n, self.n_waiting = 0, 0

    def update(self, pred: Tensor, targ: Tensor) -> None:
        pred, targ, n = self.prepare(pred, targ)
        if self.n and n != self.n:
            raise MetricError(f'{self.kind}: there were {self.n} classes, now there are {n}.')
        self.waiting.append((pred, targ))
        self.lengths.append((len(pred), len(targ)))
        self.n, self.n_waiting = n, self.n_waiting + pred.numel()
        if self.n_waiting >= GROUP:
            self.flush()

    def flush(self) -> None:
        "Update the torchmetrics object with the waiting batches."
        if not self.waiting:
            return
        pred, targ = joined(self.waiting)[0]
        self.waiting, self.lengths, self.n_waiting = [], [], 0
        self._check_range(targ)
        with _suppress_warnings():
            self.metric = (self._make_metric() if self.metric is None else self.metric).to(
                pred.device
            )
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

    def state_dict(self) -> dict[str, Any]:
        self.waiting = joined(self.waiting)  # two tensors are saved faster than two per batch
        return accumulated(self)

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self.reset()
        self.n = sd['n']
        if 'metric/' in sd:
            with _suppress_warnings():
                self.metric = self._make_metric()
        restore_state(self, sd)

    def merge(self, states: list[dict[str, Any]]) -> None:
        known = sorted({sd['n'] for sd in states if sd['n']})
        if len(known) > 1:
            raise MetricError(
                f'{self.kind}: {known[0]} classes in one process, {known[1]} in another.'
            )
        self.reset()
        self.n = known[0] if known else 0
        self.waiting, self.lengths = merged_pairs(states)
        self.n_waiting = sum(pred.numel() for pred, _ in self.waiting)
        if counted := [sd['metric/'] for sd in states if 'metric/' in sd]:
            with _suppress_warnings():
                self.metric = self._make_metric()
            merge_states(self.metric, counted)


@contextmanager
def _suppress_warnings() -> Iterator[None]:
    "Suppress torchmetrics' warnings of undefined scores, which learnkit's metrics document."
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', UserWarning)
        yield


class Score(TorchMetric):
    "Base class of scores computed by a `LazyTorchMetric`; a call returns the value of one batch."

    metric: LazyTorchMetric

    def __call__(self, pred: Tensor, *targs: Tensor) -> Any:
        value = self._compute_batch(pred, targs)
        return float(value) if is_number(value) else to_detach(value)

    def _try(self, pred: Any, yb: tuple[Any, ...]) -> None:
        self._compute_batch(pred, yb)

    def _compute_batch(self, pred: Any, yb: tuple[Any, ...]) -> Any:
        metric = LazyTorchMetric(
            self.metric.kind, self.metric.prepare, self.metric.finish, **self.metric.options
        )
        self._update(metric, pred, yb)
        return metric.compute()


# -- from predictions to inputs of the metric ------------------------------------------------------


def by_class(
    name: str,  # the metric's, for the message
    pred: Tensor,  # scores, classes along `axis`
    targ: Tensor,  # class numbers, one for each prediction
    axis: int,  # where the classes are
) -> tuple[Tensor, Tensor]:
    """Reshape to scores (N, C) and targets (N,). Raises `MetricError` unless there is one target per prediction.

    >>> [list(t.shape) for t in by_class('m', torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4), axis=1)]
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


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _check_two(name: str, n: int, axis: int, instead: str) -> None:
    if n == 2:
        return
    raise MetricError(
        f'{name} is of two classes, but predictions have {n} along axis {axis}: use {instead}, or a '
        'metric that ends in Multi where each label is predicted for itself.'
    )


@needs_class_indices
def argmax_preds(name: str, axis: int, two: bool, pred: Tensor, targ: Tensor) -> Prepared:
    "The class that scores highest."
    check_choice(name, pred, axis)
    n = pred.shape[axis]
    if two:
        _check_two(
            f"{name} with average='binary'", n, axis, "average='macro', 'micro', 'weighted' or None"
        )
    pred, targ = paired(name, pred.argmax(dim=axis), targ)
    return pred, targ.long(), n


@needs_class_indices
def softmax_probs(name: str, axis: int, pred: Tensor, targ: Tensor) -> Prepared:
    "The softmax."
    scores, targ = by_class(name, pred, targ, axis)
    return _wide(scores).softmax(1), targ.long(), scores.shape[1]


@needs_class_indices
def chance_of(name: str, axis: int, label: int, pred: Tensor, targ: Tensor) -> Prepared:
    "The softmax of one of two classes."
    check_choice(name, pred, axis)
    _check_two(name, pred.shape[axis], axis, 'RocAuc')
    both, targ, n = softmax_probs(name, axis, pred, targ)
    return both[:, label], (targ == label).long(), n


def by_label(name: str, sigmoid: bool, pred: Tensor, targ: Tensor) -> Prepared:
    "The sigmoid of each label, as (N, L)."
    if pred.dim() < 2 or pred.shape[1] == 1:
        pred, targ = (t[:, None] for t in paired(name, pred, targ))
    if pred.shape != targ.shape:
        raise MetricError(
            f'{name}: predictions of shape {tuple(pred.shape)} do not fit targets of shape '
            f'{tuple(targ.shape)}: give 0 or 1 for each label, shape (B, L).'
        )
    n = pred.shape[1]
    pred, targ = (t.movedim(1, -1).reshape(-1, n) for t in (_wide(pred), targ))
    return pred.sigmoid() if sigmoid else pred, targ.long(), n


def threshold_labels(
    name: str, thresh: float, sigmoid: bool, pred: Tensor, targ: Tensor
) -> Prepared:
    "Which labels are predicted."
    pred, targ, n = by_label(name, sigmoid, pred, targ)
    return (pred >= thresh).long(), targ, n


def values(name: str, pred: Tensor, targ: Tensor) -> Prepared:
    "Return predictions and targets of a regression, in a type that both fit in."
    pred, targ = paired(name, pred, targ)
    dtype = torch.promote_types(torch.promote_types(pred.dtype, targ.dtype), torch.float32)
    return pred.to(dtype), targ.to(dtype), 1


# -- from the state of the metric to the value -----------------------------------------------------


def computed(metric: Any) -> Any:
    return metric.compute()


def _one_of(label: int, metric: Any) -> Any:
    return metric.compute()[label]


def _some_of(labels: Sequence[int], mean: bool, metric: Any) -> Any:
    scores = metric.compute()[list(labels)]
    return scores.mean() if mean else scores


def over_defined(average: str | None, needs_both: bool, metric: Any) -> Any:
    "Average over the classes that occur (and, where `needs_both`, do not always); NaN for the others, and without any."
    scores, targ = metric.compute().reshape(-1), torch.cat(list(metric.target))
    n, n_scores = len(targ), len(scores)
    if targ.dim() == 1 and n_scores > 1:
        targ = targ[:, None] == torch.arange(n_scores, device=targ.device)
    counts = targ.reshape(n, -1).sum(0)
    defined = (counts > 0) & ((counts < n) | (not needs_both))
    scores = torch.where(defined, scores, torch.nan)
    if average is None:
        return scores
    weights = (counts if average == 'weighted' else torch.ones_like(counts))[defined]
    return (scores[defined] * weights).sum() / weights.sum()


def mean_recall(adjusted: bool, metric: Any) -> float:
    "Return the balanced accuracy of a confusion matrix: the mean recall over the classes that occur."
    matrix = metric.compute().double()
    counts = matrix.sum(1)
    recalls = (matrix.diag() / counts)[counts > 0]
    chance = 1 / len(recalls) if adjusted else 0.0
    return float((recalls.mean() - chance) / (1 - chance)) if chance != 1 else float('nan')


def matthews(metric: Any) -> float:
    "The correlation from a confusion matrix, 0 where it is not defined."
    matrix = metric.compute().double()
    if matrix.dim() == 3:
        matrix = matrix.sum(0)
    true, pred, right, n = matrix.sum(1), matrix.sum(0), matrix.trace(), matrix.sum()
    spread = ((n * n - true @ true) * (n * n - pred @ pred)).sqrt()
    return float((right * n - true @ pred) / spread) if spread else 0.0


def averaged(
    kind: str,  # torchmetrics' class
    prepare: Prepare,
    labels: Labels,  # None: all
    average: str | None,
    pos_label: int = 1,  # for 'binary'
    beta: float | None = None,  # for the F scores that have one
) -> LazyTorchMetric:
    "A score of each class, and their average."
    check_average(average, ('binary', *AVERAGES) if kind.startswith('Multiclass') else AVERAGES)
    if beta is not None and not beta > 0:
        raise MetricError(f'beta={beta!r}: give a number above 0.')
    options = {} if beta is None else {'beta': float(beta)}
    if average == 'binary':
        if pos_label not in (0, 1):
            raise MetricError(f"pos_label={pos_label!r}: with average='binary' it is 0 or 1.")
        return LazyTorchMetric(
            kind, prepare, partial(_one_of, pos_label), average='none', **options
        )
    if labels is None:
        return LazyTorchMetric(kind, prepare, computed, average=average or 'none', **options)
    if average in ('micro', 'weighted'):
        raise MetricError(
            f"labels={list(labels)} with average={average!r} is not supported: use 'macro' or None."
        )
    return LazyTorchMetric(
        kind, prepare, partial(_some_of, labels, average is not None), average='none', **options
    )


def check_average(average: str | None, known: tuple[str, ...] = AVERAGES) -> None:
    "Raise `MetricError` for an average that is not known."
    if average is None or average in known:
        return
    raise MetricError(
        f'average={average!r}: use one of {", ".join(map(repr, known))}, or None for a value per class.'
    )


class Bleu:
    "BLEU score of `CorpusBLEUMetric`; tokens are kept on their device until the score is read."

    def __init__(self, axis: int) -> None:
        self.axis, self.score = axis, from_torchmetrics('functional.text', 'bleu_score')
        self.reset()

    def reset(self) -> None:
        self.preds: list[Tensor] = []
        self.targs: list[Tensor] = []

    def update(self, pred: Tensor, targ: Tensor) -> None:
        argmax_preds = pred.argmax(dim=self.axis)
        if argmax_preds.dim() != 2 or targ.dim() != 2 or len(argmax_preds) != len(targ):
            raise MetricError(
                f'CorpusBLEUMetric: predictions {list(pred.shape)} and targets {list(targ.shape)} are to '
                f'be (B, T, C), with the tokens along axis {self.axis}, and (B, T).'
            )
        self.preds.append(argmax_preds)
        self.targs.append(targ)

    def compute(self) -> Tensor:
        preds, targs = (
            [' '.join(map(str, row)) for t in ts for row in t.tolist()]
            for ts in (self.preds, self.targs)
        )
        return self.score(preds, [[t] for t in targs])

    def merge(self, states: list[dict[str, Any]]) -> None:
        self.preds, self.targs = (in_turn(sd[name] for sd in states) for name in ('preds', 'targs'))
