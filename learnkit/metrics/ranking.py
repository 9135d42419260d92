"""Ranking scores with fastai's names, by torchmetrics, and scores of texts (`pip install torchmetrics`).

Predictions and targets are kept on their device until the value is read. Probabilities are ranked in float64, in which
few scores round to the same number. Constructors raise `MissingExtraError` without torchmetrics."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from learnkit.core.errors import MetricError
from learnkit.core.optional import import_library
from learnkit.core.validation import needs_class_indices
from learnkit.metrics.base import flatten_pair, widen
from learnkit.metrics.shapes import (
    check_average,
    check_two_classes,
    flatten_classes,
    flatten_labels,
)
from learnkit.metrics.whole_set import KeptMetric, WholeSet

__all__ = [
    'RocAuc',
    'RocAucBinary',
    'APScoreBinary',
    'RocAucMulti',
    'APScoreMulti',
    'SpearmanCorrCoef',
    'CorpusBLEUMetric',
]

Pair = tuple[Tensor, Tensor]


def _import_score(module: str, name: str) -> Any:
    "Import a function of torchmetrics; raise `MissingExtraError` if torchmetrics is not installed."
    with warnings.catch_warnings():  # the import may warn of optional packages
        warnings.simplefilter('ignore')
        return getattr(import_library(f'torchmetrics.functional.{module}', name), name)


class _AreaScore(KeptMetric):
    """Base class of averages over columns: the area under the ROC curve, or the average precision.

    A column needs a positive target; for an area, a negative target too. The score is NaN for other columns, which an
    average leaves out, and if no column is left."""

    def __init__(
        self, prepare: Any, average: str | None = 'macro', on: str | None = None, **options: Any
    ) -> None:
        self.is_area = self._name == 'roc_auc_score'
        kind = 'binary_auroc' if self.is_area else 'binary_average_precision'
        self.score = partial(_import_score('classification', kind), validate_args=False, **options)
        self.average = average
        super().__init__(WholeSet(self._average_columns, prepare), self._name, on)

    @override
    def _try(self, pred: Any, yb: tuple[Any, ...]) -> Any:
        metric = super()._try(pred, yb)
        metric.compute()  # also finds targets that are no class
        return metric

    def _average_columns(self, probs: Tensor, targs: Tensor) -> Tensor:
        if self.average == 'micro':
            probs, targs = probs.reshape(-1, 1), targs.reshape(-1, 1)
        counts = targs.sum(0)
        defined = (counts > 0) & ((counts < len(targs)) | (not self.is_area))
        scores = probs.new_full((len(counts),), torch.nan)
        for i in defined.nonzero()[:, 0].tolist():
            scores[i] = self.score(probs[:, i], targs[:, i].long())
        if self.average is None:
            return scores
        weights = counts if self.average == 'weighted' else torch.ones_like(counts)
        return (scores * weights)[defined].sum() / weights[defined].sum()


@needs_class_indices
def _rank_classes(name: str, axis: int, pred: Tensor, targ: Tensor) -> Pair:
    "Return the softmax of the scores, and whether each class is the target, both (N, C)."
    scores, targ = flatten_classes(name, pred, targ, axis)
    classes = torch.arange(scores.shape[1], device=targ.device)
    return widen(scores).softmax(1), targ[:, None] == classes


@needs_class_indices
def _rank_class(name: str, axis: int, label: int, pred: Tensor, targ: Tensor) -> Pair:
    "Return the softmax of class `label` of two, and whether the class is the target, both (N, 1)."
    check_two_classes(name, pred, axis, 'RocAuc, or RocAucMulti for labels')
    probs, targs = _rank_classes(name, axis, pred, targ)
    return probs[:, [label]], targs[:, [label]]


def _rank_labels(name: str, sigmoid: bool, pred: Tensor, targ: Tensor) -> Pair:
    "Return the scores of the labels, and the targets, both (N, L)."
    return flatten_labels(name, sigmoid, widen(pred), targ)[:2]


class RocAuc(_AreaScore):
    """Average area under the ROC curve of each class against the rest, by softmax.

    Classes that do not occur are excluded from the average; NaN if no class is left.

    >>> RocAuc()(torch.tensor([[3., 1., 0.], [1., 2., 0.], [0., 0., 1.]]), torch.tensor([0, 1, 2]))
    1.0
    """

    _name = 'roc_auc_score'

    def __init__(
        self,
        axis: int = -1,  # class dimension
        average: str | None = 'macro',  # 'macro', 'weighted' or None
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        check_average(average, ('macro', 'weighted'))
        super().__init__(partial(_rank_classes, 'RocAuc', axis), average, on)

    @override
    def _average_columns(self, probs: Tensor, targs: Tensor) -> Tensor:
        n_unknown = int((~targs.any(1)).sum())
        if n_unknown:
            raise MetricError(
                f'RocAuc: {n_unknown} targets are not class numbers, from 0 to {probs.shape[1] - 1}. Leave out what is '
                'not to count, in `before_batch`.'
            )
        return super()._average_columns(probs, targs)


class RocAucBinary(_AreaScore):
    """Area under the ROC curve of the second of two classes, by softmax; NaN if only one class occurs.

    >>> RocAucBinary()(torch.tensor([[0., 3.], [0., 1.], [0., 2.]]), torch.tensor([1, 0, 0]))
    1.0
    """

    _name = 'roc_auc_score'

    def __init__(
        self,
        axis: int = -1,  # class dimension
        max_fpr: float | None = None,  # maximum false positive rate; standardized (McClish, 1989)
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        super().__init__(partial(_rank_class, 'RocAucBinary', axis, 1), on=on, max_fpr=max_fpr)


class APScoreBinary(_AreaScore):
    """Average precision, `sum_n (R_n - R_{n-1})*P_n`, of one of two classes; NaN if the class does not occur.

    >>> round(APScoreBinary()(torch.tensor([[0., 3.], [0., 2.], [0., 1.]]), torch.tensor([1, 0, 1])), 4)
    0.8333
    """

    _name = 'average_precision_score'

    def __init__(
        self,
        axis: int = -1,  # class dimension
        pos_label: int = 1,  # positive class
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        super().__init__(partial(_rank_class, 'APScoreBinary', axis, pos_label), on=on)


class _LabelArea(_AreaScore):
    "Base class of ranking scores of labels."

    def __init__(
        self,
        sigmoid: bool = True,  # whether the predictions are logits
        average: str | None = 'macro',  # 'macro', 'micro', 'weighted' or None
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        check_average(average, ('macro', 'micro', 'weighted'))
        super().__init__(partial(_rank_labels, type(self).__name__, sigmoid), average, on)


class RocAucMulti(_LabelArea):
    """Average area under the ROC curve of each label; labels that never or always occur are excluded.

    >>> RocAucMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.5
    """

    _name = 'roc_auc_score'


class APScoreMulti(_LabelArea):
    """Mean of the labels' average precision; labels that do not occur are excluded (fastai counts them as 0).

    >>> APScoreMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.75
    """

    _name = 'average_precision_score'


class SpearmanCorrCoef(KeptMetric):
    """Spearman correlation, the Pearson correlation of ranks; NaN if either side is constant.

    >>> round(SpearmanCorrCoef()(torch.tensor([1., 2., 30.]), torch.tensor([1., 4., 5.])), 4)
    1.0
    """

    _name = 'spearmanr'

    def __init__(self, on: str | None = None) -> None:
        func = _import_score('regression', 'spearman_corrcoef')
        super().__init__(WholeSet(func, partial(_match_dtypes, 'SpearmanCorrCoef')), self._name, on)


def _match_dtypes(name: str, pred: Tensor, targ: Tensor) -> Pair:
    "Return predictions and targets of a regression in a common dtype, float32 or wider."
    pred, targ = flatten_pair(name, pred, targ)
    dtype = torch.promote_types(torch.promote_types(pred.dtype, targ.dtype), torch.float32)
    return pred.to(dtype), targ.to(dtype)


class CorpusBLEUMetric(KeptMetric):
    """BLEU-4 (Papineni et al., 2002) of the most likely tokens over the data set, without smoothing.

    Predictions are (B, T, C) with the tokens along `axis`, targets are (B, T) token numbers. fastai smooths sentences
    without a match.

    >>> CorpusBLEUMetric()(torch.eye(6)[None], torch.arange(6)[None])
    1.0
    """

    _name = 'corpus_bleu'

    def __init__(self, vocab_sz: int = 5000, axis: int = -1, on: str | None = None) -> None:
        score = partial(_score_sentences, _import_score('text', 'bleu_score'))
        super().__init__(WholeSet(score, partial(_end_sentences, axis)), self._name, on)


def _end_sentences(axis: int, pred: Tensor, targ: Tensor) -> Pair:
    "Return predicted and target tokens (N,), where -1 ends each sentence: batches may differ in length."
    tokens = pred.argmax(dim=axis)
    if tokens.dim() != 2 or tokens.shape != targ.shape:
        raise MetricError(
            f'CorpusBLEUMetric: predictions {list(pred.shape)} and targets {list(targ.shape)} are to '
            f'be (B, T, C), with the tokens along axis {axis}, and (B, T).'
        )
    end = tokens.new_full((len(tokens), 1), -1)
    pred, targ = (torch.cat([t, end.to(t)], 1).flatten() for t in (tokens, targ))
    return pred, targ


def _score_sentences(score: Any, pred: Tensor, targ: Tensor) -> Any:
    "Compute the score of sentences that end in -1."
    preds, targs = (' '.join(map(str, t.tolist())).split(' -1')[:-1] for t in (pred, targ))
    return score(preds, [[sentence] for sentence in targs])
