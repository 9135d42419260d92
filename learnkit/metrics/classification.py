"""Classification scores with fastai's names, from counts of each class.

Single-label scores use the class with the highest score along `axis`. Multi-label scores (`...Multi`) predict each
label whose sigmoid is at least `thresh`. Values equal scikit-learn's on the whole data set. Columns are named like
scikit-learn's functions, as in fastai (`f1_score`, `roc_auc_score`). A dict gives other names:
`{'f1': F1Score(average='macro')}`.

`average` is 'binary' (the score of class `pos_label` of two), 'macro' (mean over the occurring classes), 'weighted'
(mean weighted by class frequency), 'micro' (over all samples or labels together) or None (a tensor with one value per
class). `labels` selects classes for 'macro' and None. In the formulas, tp, fp, fn and tn are the true and false
positives and negatives of a class. Constructors raise `MetricError` for an unknown `average`. Predictions and targets
that do not match raise `MetricError` before training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from learnkit.core.errors import MetricError
from learnkit.metrics.counts import ClassCounts, CountScore, LabelCounts, count_classes

__all__ = [
    'F1Score',
    'FBeta',
    'Precision',
    'Recall',
    'Jaccard',
    'HammingLoss',
    'BalancedAccuracy',
    'CohenKappa',
    'MatthewsCorrCoef',
    'F1ScoreMulti',
    'FBetaMulti',
    'PrecisionMulti',
    'RecallMulti',
    'JaccardMulti',
    'HammingLossMulti',
    'MatthewsCorrCoefMulti',
]

Labels = Sequence[int] | None


# -- one class for each sample ---------------------------------------------------------------------


class F1Score(ClassCounts):
    """Harmonic mean of precision and recall, `2*tp/(2*tp + fp + fn)`.

    >>> F1Score()(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 1, 1]))
    0.8
    """

    kind = 'f1_score'


class Precision(ClassCounts):
    """Fraction of predictions of a class that are correct, `tp/(tp + fp)`.

    >>> Precision(average=None)(torch.eye(2)[[0, 0, 0, 1]], torch.tensor([0, 0, 1, 1]))
    tensor([0.6667, 1.0000])
    """

    kind = 'precision_score'


class Recall(ClassCounts):
    """Fraction of the samples of a class that are predicted, `tp/(tp + fn)`.

    >>> Recall(pos_label=0)(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 1, 1]))
    0.5
    """

    kind = 'recall_score'


class Jaccard(ClassCounts):
    """Intersection over union of predictions and targets of a class, `tp/(tp + fp + fn)`.

    >>> round(Jaccard(average='macro')(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 0, 1])), 4)
    0.3333
    """

    kind = 'jaccard_score'


class FBeta(ClassCounts):
    """F score with recall weighted by `beta`, `(1 + b*b)*tp/((1 + b*b)*tp + b*b*fn + fp)`.

    >>> round(FBeta(2)(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 0, 1])), 4)
    0.7143
    """

    kind = 'fbeta_score'

    def __init__(
        self,
        beta: float,  # weight of recall relative to precision
        axis: int = -1,  # class dimension
        labels: Labels = None,  # classes to include; None: all
        pos_label: int = 1,  # class scored by 'binary'
        average: str | None = 'binary',  # see the module docstring; 'binary' requires two classes
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        self.beta = beta
        super().__init__(axis, labels, pos_label, average, on)


class _Hamming(CountScore):
    kind = 'hamming_loss'

    @override
    def final(self, sums: Tensor) -> float:
        hits, _, targs = self.read_counts(sums).sum(1)
        return float(1 - hits / targs)


class _Matthews(CountScore):
    kind = 'matthews_corrcoef'

    @override
    def final(self, sums: Tensor) -> float:
        hits, preds, targs = self.read_counts(sums)
        n = targs.sum()
        spread = ((n * n - targs @ targs) * (n * n - preds @ preds)).sqrt()
        return float((hits.sum() * n - targs @ preds) / spread) if spread else 0.0


class HammingLoss(_Hamming, ClassCounts):
    """Fraction of samples whose class is not predicted: the error rate.

    >>> HammingLoss()(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 1, 1]))
    0.25
    """

    def __init__(self, axis: int = -1, on: str | None = None) -> None:
        super().__init__(axis, average='macro', on=on)


class BalancedAccuracy(ClassCounts):
    """Mean recall over the occurring classes.

    >>> BalancedAccuracy()(torch.eye(2)[[0, 0, 0, 1]], torch.tensor([0, 0, 1, 1]))
    0.75
    """

    kind = 'balanced_accuracy_score'

    def __init__(
        self,
        axis: int = -1,  # class dimension
        adjusted: bool = False,  # rescale so that chance is 0 and the maximum is 1
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        super().__init__(axis, average='macro', on=on)
        self.adjusted = adjusted

    @override
    def final(self, sums: Tensor) -> float:
        hits, _, targs = self.read_counts(sums)
        recalls = (hits / targs)[targs > 0]
        chance = 1 / len(recalls) if self.adjusted else 0.0
        return float((recalls.mean() - chance) / (1 - chance)) if chance < 1 else float('nan')


class CohenKappa(ClassCounts):
    """Agreement beyond chance, `(p_o - p_e)/(1 - p_e)` of observed and expected agreement; NaN for a single class.

    >>> CohenKappa()(torch.eye(2)[[0, 0, 0, 1]], torch.tensor([0, 0, 1, 1]))
    0.5
    """

    kind = 'cohen_kappa_score'

    def __init__(
        self,
        axis: int = -1,  # class dimension
        weights: str | None = None,  # cost at distance d: None 1, 'linear' d, 'quadratic' d*d
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        if weights not in (None, 'linear', 'quadratic'):
            raise MetricError(
                f"CohenKappa: weights={weights!r}: use 'linear', 'quadratic' or None."
            )
        super().__init__(axis, average='macro', on=on)
        self.weights = weights

    @override
    def sums(self, pred: Tensor, targ: Tensor) -> Tensor:
        best, targ, n = self.prepare(pred, targ)
        counts = count_classes(best, targ, n)
        cost = self._weigh(best - targ).sum()
        return torch.cat([cost.expand(1, n + 1), counts])

    @override
    def final(self, sums: Tensor) -> float:
        _, preds, targs = self.read_counts(sums[1:])
        classes = torch.arange(len(targs))
        expected = preds @ self._weigh(classes[:, None] - classes).to(preds) @ targs / targs.sum()
        return float(1 - sums[0, 0] / expected)

    def _weigh(self, distances: Tensor) -> Tensor:
        "Return the cost of the distances between predicted and true classes."
        if self.weights is None:
            return distances != 0
        return distances.abs() if self.weights == 'linear' else distances.square()


class MatthewsCorrCoef(_Matthews, ClassCounts):
    """Matthews correlation of predicted and true classes, generalized by Gorodkin; 0 if undefined.

    >>> MatthewsCorrCoef()(torch.eye(2)[[0, 1]], torch.tensor([0, 1]))
    1.0
    """

    def __init__(self, axis: int = -1, on: str | None = None) -> None:
        super().__init__(axis, average='macro', on=on)


# -- any number of labels for each sample ----------------------------------------------------------


class F1ScoreMulti(LabelCounts):
    """Harmonic mean of precision and recall of each label.

    >>> F1ScoreMulti(average='micro')(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.8
    """

    kind = 'f1_score'


class PrecisionMulti(LabelCounts):
    """Fraction of predictions of a label that are correct.

    >>> PrecisionMulti(average=None)(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    tensor([0.5000, 1.0000])
    """

    kind = 'precision_score'


class RecallMulti(LabelCounts):
    """Fraction of the occurrences of a label that are predicted.

    >>> RecallMulti(labels=[1])(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 1], [0, 1]]))
    0.5
    """

    kind = 'recall_score'


class JaccardMulti(LabelCounts):
    """Intersection over union of predictions and targets of each label.

    >>> JaccardMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.75
    """

    kind = 'jaccard_score'


class FBetaMulti(LabelCounts):
    """F score of each label with recall weighted by `beta`.

    >>> FBetaMulti(2, average=None)(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    tensor([0.8333, 1.0000])
    """

    kind = 'fbeta_score'

    def __init__(
        self,
        beta: float,  # weight of recall relative to precision
        thresh: float = 0.5,  # probability from which a label is predicted
        sigmoid: bool = True,  # whether the predictions are logits
        labels: Labels = None,  # labels to include; None: all
        average: str | None = 'macro',  # see the module docstring
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        self.beta = beta
        super().__init__(thresh, sigmoid, labels, average, on)


class _AllLabels(LabelCounts):
    "Base class of scores of all labels together, which are two classes."

    def __init__(self, thresh: float = 0.5, sigmoid: bool = True, on: str | None = None) -> None:
        super().__init__(thresh, sigmoid, on=on)

    @override
    def sums(self, pred: Tensor, targ: Tensor) -> Any:
        chosen, targ = self.predict(pred, targ)
        return count_classes(chosen.flatten().long(), targ.flatten(), 2)


class HammingLossMulti(_Hamming, _AllLabels):
    """Fraction of labels predicted incorrectly.

    >>> HammingLossMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.25
    """


class MatthewsCorrCoefMulti(_Matthews, _AllLabels):
    """Matthews correlation of predicted and true labels, all labels together; 0 if undefined.

    >>> MatthewsCorrCoefMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [1, 1]]))
    1.0
    """
