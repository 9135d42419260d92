"""Ranking scores with fastai's names, by scikit-learn, and correlation of ranks and scores of texts, by torchmetrics.

Predictions and targets are kept on their device until the value is read. Probabilities are ranked in float64, in which
few scores round to the same number. Constructors raise `MissingExtraError` without the library
(`pip install learnkit-torch[metrics]`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from learnkit.core.errors import MetricError
from learnkit.core.optional import import_library
from learnkit.metrics.base import flatten_pair, widen
from learnkit.metrics.classification import SklearnScore
from learnkit.metrics.shapes import (
    check_average,
    check_two_classes,
    flatten_classes,
    flatten_labels,
    mark_unknown,
)
from learnkit.metrics.whole_set import KeptMetric, WholeSet

Pair = tuple[Tensor, Tensor]


class _AreaScore(SklearnScore):
    """Base class of averages over columns: the area under the ROC curve, or the average precision.

    A column needs a positive target; for an area, a negative target too. The score is NaN for other columns, which an
    average leaves out, and if no column is left."""

    def __init__(
        self, prepare: Any, average: str | None = 'macro', on: str | None = None, **options: Any
    ) -> None:
        super().__init__(prepare, on, **options)
        self.average = average

    @override
    def compute(self, pred: Any, targ: Any) -> Any:
        if self.average == 'micro':
            pred, targ = pred.reshape(-1, 1), targ.reshape(-1, 1)
        counts = targ.sum(0)
        defined = (counts > 0) & ((counts < len(targ)) | (self.score != 'roc_auc_score'))
        scores = np.full(len(counts), np.nan)
        for i in np.flatnonzero(defined):
            scores[i] = self.score_func(targ[:, i], pred[:, i])
        if self.average is None:
            return scores
        weights = counts if self.average == 'weighted' else np.ones_like(counts)
        return (scores * weights)[defined].sum() / weights[defined].sum()


def _rank_classes(name: str, axis: int, pred: Tensor, targ: Tensor) -> Pair:
    "Return the softmax of the scores, (N, C), and the targets, (N,)."
    scores, targ = flatten_classes(name, pred, targ, axis)
    return widen(scores).softmax(1), mark_unknown(targ, scores.shape[1])


def _rank_class(name: str, axis: int, label: int, pred: Tensor, targ: Tensor) -> Pair:
    "Return the softmax of class `label` of two, and whether the class is the target, both (N, 1)."
    check_two_classes(name, pred, axis, 'RocAuc, or RocAucMulti for labels')
    probs, targ = _rank_classes(name, axis, pred, targ)
    is_label = torch.where(targ < 0, targ, (targ == label).long())
    return probs[:, [label]], is_label[:, None]


def _rank_labels(name: str, sigmoid: bool, pred: Tensor, targ: Tensor) -> Pair:
    "Return the scores of the labels, and the targets, both (N, L)."
    probs, targ, _ = flatten_labels(name, sigmoid, widen(pred), targ)
    return probs, mark_unknown(targ, 2)


class RocAuc(_AreaScore):
    """Average area under the ROC curve of each class against the rest, by softmax.

    Classes that do not occur are excluded from the average; NaN if no class is left.

    >>> RocAuc()(torch.tensor([[3., 1., 0.], [1., 2., 0.], [0., 0., 1.]]), torch.tensor([0, 1, 2]))
    1.0
    """

    score = 'roc_auc_score'

    def __init__(
        self,
        axis: int = -1,  # class dimension
        average: str | None = 'macro',  # 'macro', 'weighted' or None
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        check_average(average, ('macro', 'weighted'))
        super().__init__(partial(_rank_classes, 'RocAuc', axis), average, on)

    @override
    def compute(self, pred: Any, targ: Any) -> Any:
        return super().compute(pred, targ[:, None] == np.arange(pred.shape[1]))


class RocAucBinary(_AreaScore):
    """Area under the ROC curve of the second of two classes, by softmax; NaN if only one class occurs.

    >>> RocAucBinary()(torch.tensor([[0., 3.], [0., 1.], [0., 2.]]), torch.tensor([1, 0, 0]))
    1.0
    """

    score = 'roc_auc_score'

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

    score = 'average_precision_score'

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

    score = 'roc_auc_score'


class APScoreMulti(_LabelArea):
    """Mean of the labels' average precision; labels that do not occur are excluded (fastai counts them as 0).

    >>> APScoreMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.75
    """

    score = 'average_precision_score'


class SpearmanCorrCoef(KeptMetric):
    """Spearman correlation, the Pearson correlation of ranks; NaN if either side is constant.

    >>> round(SpearmanCorrCoef()(torch.tensor([1., 2., 30.]), torch.tensor([1., 4., 5.])), 4)
    1.0
    """

    _name = 'spearmanr'

    def __init__(self, on: str | None = None) -> None:
        func = import_library('torchmetrics.functional', 'SpearmanCorrCoef').spearman_corrcoef
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
        bleu = import_library('torchmetrics.functional.text', 'CorpusBLEUMetric').bleu_score
        score = partial(_score_sentences, bleu)
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
