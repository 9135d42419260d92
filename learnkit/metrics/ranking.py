# SPDX-License-Identifier: Apache-2.0
"""Ranking scores with fastai's names (by scikit-learn), rank correlation, and text scores (by torchmetrics).

Predictions and targets are kept on their device until the value is read. Probabilities are ranked in float64, in which
few scores round to the same number. Constructors raise `MissingExtraError` without the library
(`pip install learnkit-torch[metrics]`)."""

from __future__ import annotations

from math import nan
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from learnkit.core.errors import MetricError
from learnkit.core.optional import import_library
from learnkit.metrics.base import widen
from learnkit.metrics.classification import SklearnScore
from learnkit.metrics.functional import PearsonCorrCoef, correlate
from learnkit.metrics.shapes import check_two_classes, flatten_classes, flatten_labels, mark_unknown
from learnkit.metrics.whole_set import KeptMetric

Pair = tuple[Tensor, Tensor]


class _AreaScore(SklearnScore):
    """Base class of averages over columns: the area under the ROC curve, or the average precision.

    A column needs a positive target; for an area, a negative target too. The score is NaN for other columns, which an
    average leaves out, and if no column is left. A column with predictions that are not finite is NaN, and so is its
    average."""

    def __init__(self, average: str | None, multi_class: str = 'ovr', **options: Any) -> None:
        if average not in ('macro', 'micro', 'weighted', None):
            raise MetricError(f"average={average!r}: pass 'macro', 'micro', 'weighted', or None.")
        if multi_class not in ('ovr', 'raise'):
            raise MetricError(
                f"multi_class={multi_class!r}: a class is ranked against the rest, 'ovr'."
            )
        super().__init__(**options)
        self.average = average

    @override
    def compute(self, pred: Any, targ: Any) -> Any:
        if self.average == 'micro':
            pred, targ = pred.reshape(-1, 1), targ.reshape(-1, 1)
        counts = targ.sum(0)
        defined = (counts > 0) & ((counts < len(targ)) | (self.score != 'roc_auc_score'))
        scores = np.full(len(counts), np.nan)
        # after training has diverged, a column may have no ranks
        for i in np.flatnonzero(defined & np.isfinite(pred).all(0)):
            scores[i] = self.score_func(targ[:, i], pred[:, i])
        if self.average is None:
            return scores
        weights = counts[defined] if self.average == 'weighted' else np.ones(defined.sum())
        return (scores[defined] * weights).sum() / weights.sum()


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
        average: str | None = 'macro',  # 'macro', 'micro', 'weighted' or None
        **options: Any,  # `on`, and options of scikit-learn's function, such as `max_fpr`
    ) -> None:
        super().__init__(average, **options)
        self.axis = axis

    @override
    def prepare(self, pred: Tensor, targ: Tensor) -> Pair:
        "Return the softmax of the scores, (N, C), and the targets, (N,)."
        scores, targ = flatten_classes(type(self).__name__, pred, targ, self.axis)
        return widen(scores).softmax(1), mark_unknown(targ, scores.shape[1])

    @override
    def compute(self, pred: Any, targ: Any) -> Any:
        return super().compute(pred, targ[:, None] == np.arange(pred.shape[1]))


class RocAucBinary(RocAuc):
    """Area under the ROC curve of the second of two classes, by softmax; NaN if only one class occurs.

    >>> RocAucBinary()(torch.tensor([[0., 3.], [0., 1.], [0., 2.]]), torch.tensor([1, 0, 0]))
    1.0
    """

    pos_label = 1  # positive class

    @override
    def prepare(self, pred: Tensor, targ: Tensor) -> Pair:
        instead = 'RocAuc, or RocAucMulti for labels'
        check_two_classes(type(self).__name__, pred, self.axis, instead)
        return super().prepare(pred, targ)

    @override
    def compute(self, pred: Any, targ: Any) -> Any:
        scores = pred[:, self.pos_label, None]
        return _AreaScore.compute(self, scores, targ[:, None] == self.pos_label)


class APScoreBinary(RocAucBinary):
    """Average precision, `sum_n (R_n - R_{n-1})*P_n`, of one of two classes; NaN if the class does not occur.

    >>> round(APScoreBinary()(torch.tensor([[0., 3.], [0., 2.], [0., 1.]]), torch.tensor([1, 0, 1])), 4)
    0.8333
    """

    score = 'average_precision_score'

    def __init__(
        self,
        axis: int = -1,  # class dimension
        average: str | None = 'macro',  # of no effect, as in fastai
        pos_label: int = 1,  # positive class
        **options: Any,  # `on`
    ) -> None:
        super().__init__(axis, average, **options)
        self.pos_label = pos_label


class RocAucMulti(_AreaScore):
    """Average area under the ROC curve of each label; labels that never or always occur are excluded.

    >>> RocAucMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.5
    """

    score = 'roc_auc_score'

    def __init__(
        self,
        sigmoid: bool = True,  # whether the predictions are logits
        average: str | None = 'macro',  # 'macro', 'micro', 'weighted' or None
        **options: Any,  # `on`
    ) -> None:
        super().__init__(average, **options)
        self.sigmoid = sigmoid

    @override
    def prepare(self, pred: Tensor, targ: Tensor) -> Pair:
        "Return the scores of the labels, and the targets, both (N, L)."
        probs, targ, _ = flatten_labels(type(self).__name__, self.sigmoid, widen(pred), targ)
        return probs, mark_unknown(targ, 2)


class APScoreMulti(RocAucMulti):
    """Mean of the labels' average precision; labels that do not occur are excluded (fastai counts them as 0).

    >>> APScoreMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.75
    """

    score = 'average_precision_score'


class SpearmanCorrCoef(PearsonCorrCoef):
    """Spearman correlation, the Pearson correlation of ranks; NaN if either side is constant or contains NaN.

    Equal values share their mean rank, as in SciPy.

    >>> SpearmanCorrCoef()(torch.tensor([1., 2., 30.]), torch.tensor([1., 4., 5.]))
    1.0
    """

    def __init__(self, on: str | None = None) -> None:
        super().__init__(on)
        self._name = 'spearmanr'

    @override
    def final(self, pred: Tensor, targ: Tensor) -> Tensor:
        is_unknown = pred.isnan().any() | targ.isnan().any()
        return torch.where(is_unknown, nan, correlate(rank(pred), rank(targ)))


def rank(t: Tensor) -> Tensor:
    """Return the rank of each element, from 1; equal elements share their mean rank.

    >>> rank(torch.tensor([3., 1., 3., 2.]))
    tensor([3.5000, 1.0000, 3.5000, 2.0000])
    """
    _, group, counts = t.unique(return_inverse=True, return_counts=True)
    counts = counts.to(t.dtype)
    return (counts.cumsum(0) - (counts - 1) / 2)[group]


class CorpusBLEUMetric(KeptMetric):
    """BLEU-4 (Papineni et al., 2002) of the most likely tokens over the data set, without smoothing.

    Predictions are (B, T, C) with the tokens along `axis`, targets are (B, T) token numbers. fastai smooths sentences
    without a match.

    >>> CorpusBLEUMetric()(torch.eye(6)[None], torch.arange(6)[None])
    1.0
    """

    def __init__(self, vocab_sz: int = 5000, axis: int = -1, on: str | None = None) -> None:
        super().__init__('corpus_bleu', on)
        self.axis = axis
        self._score = import_library('torchmetrics.functional.text', 'CorpusBLEUMetric').bleu_score

    @override
    def prepare(self, pred: Tensor, targ: Tensor) -> Pair:
        "Return predicted and target tokens (N,), where -1 ends each sentence: batches may differ in length."
        tokens = pred.argmax(dim=self.axis)
        if tokens.shape != targ.shape:
            raise MetricError(
                f'CorpusBLEUMetric: predictions {list(pred.shape)} are to be (B, T, C), with the tokens along axis '
                f'{self.axis}, and targets {list(targ.shape)} (B, T).'
            )
        end = tokens.new_full((len(tokens), 1), -1)
        pred, targ = (torch.cat([t, end.to(t)], 1).flatten() for t in (tokens, targ))
        return pred, targ

    @override
    def final(self, pred: Tensor, targ: Tensor) -> Any:
        preds, targs = (' '.join(map(str, t.tolist())).split(' -1')[:-1] for t in (pred, targ))
        return self._score(preds, [[sentence] for sentence in targs])
