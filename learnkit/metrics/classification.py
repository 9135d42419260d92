"""Classification and ranking scores with fastai's names, by torchmetrics (`pip install torchmetrics`).

Single-label scores use the class with the highest score along `axis`. Multi-label scores (`...Multi`) predict each
label whose sigmoid is at least `thresh`. Values equal scikit-learn's on the whole data set. Columns are named like
scikit-learn's functions, as in fastai (`f1_score`, `roc_auc_score`). A dict gives other names:
`{'f1': F1Score(average='macro')}`.

`average` is 'binary' (the score of class `pos_label` of two), 'macro' (mean over the occurring classes), 'weighted'
(mean weighted by class frequency), 'micro' (over all samples or labels together) or None (a tensor with one value per
class). `labels` selects classes for 'macro' and None. In the formulas, tp, fp, fn and tn are the true and false
positives and negatives of a class. Constructors raise `MissingExtraError` without torchmetrics, and `MetricError` for
an unknown `average`. Predictions and targets that do not match raise `MetricError` before training."""

from __future__ import annotations

from functools import partial

import torch  # noqa: F401  # the examples use it

from learnkit.core.errors import MetricError
from learnkit.metrics.averages import TorchMetric
from learnkit.metrics.torchmetrics import (
    Bleu,
    Labels,
    LazyTorchMetric,
    Score,
    argmax_preds,
    average_defined,
    check_average,
    compute_matthews,
    compute_mean_recall,
    make_score,
    match_dtypes,
    rank_labels,
    softmax_probs,
    softmax_probs_of_class,
    threshold_labels,
)

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
    'RocAuc',
    'RocAucBinary',
    'APScoreBinary',
    'F1ScoreMulti',
    'FBetaMulti',
    'PrecisionMulti',
    'RecallMulti',
    'JaccardMulti',
    'HammingLossMulti',
    'MatthewsCorrCoefMulti',
    'RocAucMulti',
    'APScoreMulti',
    'SpearmanCorrCoef',
    'CorpusBLEUMetric',
]


# -- one class for each sample ---------------------------------------------------------------------


class _ClassScore(Score):
    "Base class of averaged scores of classes."

    _kind = ''  # name in torchmetrics
    _beta: float | None = None

    def __init__(
        self,
        axis: int = -1,  # class dimension
        labels: Labels = None,  # classes to include; None: all
        pos_label: int = 1,  # class scored by 'binary'
        average: str | None = 'binary',  # see the module docstring; 'binary' requires two classes
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        prepare = partial(argmax_preds, type(self).__name__, axis, average == 'binary')
        metric = make_score(
            f'Multiclass{self._kind}', prepare, labels, average, pos_label, self._beta
        )
        super().__init__(metric, self._name, on)


class F1Score(_ClassScore):
    """Harmonic mean of precision and recall, `2*tp/(2*tp + fp + fn)`.

    >>> F1Score()(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 1, 1]))
    0.800000011920929
    """

    _kind = 'F1Score'
    _name = 'f1_score'


class Precision(_ClassScore):
    """Fraction of predictions of a class that are correct, `tp/(tp + fp)`.

    >>> Precision(average=None)(torch.eye(2)[[0, 0, 0, 1]], torch.tensor([0, 0, 1, 1]))
    tensor([0.6667, 1.0000])
    """

    _kind = 'Precision'
    _name = 'precision_score'


class Recall(_ClassScore):
    """Fraction of the samples of a class that are predicted, `tp/(tp + fn)`.

    >>> Recall(pos_label=0)(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 1, 1]))
    0.5
    """

    _kind = 'Recall'
    _name = 'recall_score'


class Jaccard(_ClassScore):
    """Intersection over union of predictions and targets of a class, `tp/(tp + fp + fn)`.

    >>> round(Jaccard(average='macro')(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 0, 1])), 4)
    0.3333
    """

    _kind = 'JaccardIndex'
    _name = 'jaccard_score'


class FBeta(_ClassScore):
    """F score with recall weighted by `beta`, `(1 + b*b)*tp/((1 + b*b)*tp + b*b*fn + fp)`.

    >>> round(FBeta(2)(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 0, 1])), 4)
    0.7143
    """

    _kind = 'FBetaScore'
    _name = 'fbeta_score'

    def __init__(
        self,
        beta: float,  # weight of recall relative to precision
        axis: int = -1,  # class dimension
        labels: Labels = None,  # classes to include; None: all
        pos_label: int = 1,  # class scored by 'binary'
        average: str | None = 'binary',  # see the module docstring; 'binary' requires two classes
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        self._beta = beta
        super().__init__(axis, labels, pos_label, average, on)


class HammingLoss(Score):
    """Fraction of samples whose class is not predicted: the error rate.

    >>> HammingLoss()(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 1, 1]))
    0.25
    """

    def __init__(self, axis: int = -1, on: str | None = None) -> None:
        prepare = partial(argmax_preds, 'HammingLoss', axis, False)
        metric = LazyTorchMetric('MulticlassHammingDistance', prepare, average='micro')
        super().__init__(metric, 'hamming_loss', on)


class BalancedAccuracy(Score):
    """Mean recall over the occurring classes.

    >>> BalancedAccuracy()(torch.eye(2)[[0, 0, 0, 1]], torch.tensor([0, 0, 1, 1]))
    0.75
    """

    def __init__(
        self,
        axis: int = -1,  # class dimension
        adjusted: bool = False,  # rescale so that chance is 0 and the maximum is 1
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        prepare = partial(argmax_preds, 'BalancedAccuracy', axis, False)
        finish = partial(compute_mean_recall, adjusted)
        metric = LazyTorchMetric('MulticlassConfusionMatrix', prepare, finish)
        super().__init__(metric, 'balanced_accuracy_score', on)


class CohenKappa(Score):
    """Agreement beyond chance, `(p_o - p_e)/(1 - p_e)` of observed and expected agreement; NaN for a single class.

    >>> CohenKappa()(torch.eye(2)[[0, 0, 0, 1]], torch.tensor([0, 0, 1, 1]))
    0.5
    """

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
        prepare = partial(argmax_preds, 'CohenKappa', axis, False)
        metric = LazyTorchMetric('MulticlassCohenKappa', prepare, weights=weights)
        super().__init__(metric, 'cohen_kappa_score', on)


class MatthewsCorrCoef(Score):
    """Matthews correlation of predicted and true classes, generalized by Gorodkin; 0 if undefined.

    >>> MatthewsCorrCoef()(torch.eye(2)[[0, 1]], torch.tensor([0, 1]))
    1.0
    """

    def __init__(self, axis: int = -1, on: str | None = None) -> None:
        prepare = partial(argmax_preds, 'MatthewsCorrCoef', axis, False)
        metric = LazyTorchMetric('MulticlassConfusionMatrix', prepare, compute_matthews)
        super().__init__(metric, 'matthews_corrcoef', on)


class RocAuc(Score):
    """Average area under the ROC curve of each class against the rest, by softmax.

    Classes that do not occur are excluded from the average; NaN if no class is left.

    >>> RocAuc()(torch.tensor([[3., 1., 0.], [1., 2., 0.], [0., 0., 1.]]), torch.tensor([0, 1, 2]))
    1.0
    """

    def __init__(
        self,
        axis: int = -1,  # class dimension
        average: str | None = 'macro',  # 'macro', 'weighted' or None
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        check_average(average, ('macro', 'weighted'))
        prepare = partial(softmax_probs, 'RocAuc', axis)
        finish = partial(average_defined, average, True)
        metric = LazyTorchMetric('MulticlassAUROC', prepare, finish, average='none')
        super().__init__(metric, 'roc_auc_score', on)


class RocAucBinary(Score):
    """Area under the ROC curve of the second of two classes, by softmax; NaN if only one class occurs.

    >>> RocAucBinary()(torch.tensor([[0., 3.], [0., 1.], [0., 2.]]), torch.tensor([1, 0, 0]))
    1.0
    """

    def __init__(
        self,
        axis: int = -1,  # class dimension
        max_fpr: float | None = None,  # maximum false positive rate; standardized (McClish, 1989)
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        prepare = partial(softmax_probs_of_class, 'RocAucBinary', axis, 1)
        finish = partial(average_defined, 'macro', True)
        metric = LazyTorchMetric('BinaryAUROC', prepare, finish, max_fpr=max_fpr)
        super().__init__(metric, 'roc_auc_score', on)


class APScoreBinary(Score):
    """Average precision, `sum_n (R_n - R_{n-1})*P_n`, of one of two classes; NaN if the class does not occur.

    >>> round(APScoreBinary()(torch.tensor([[0., 3.], [0., 2.], [0., 1.]]), torch.tensor([1, 0, 1])), 4)
    0.8333
    """

    def __init__(
        self,
        axis: int = -1,  # class dimension
        pos_label: int = 1,  # positive class
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        prepare = partial(softmax_probs_of_class, 'APScoreBinary', axis, pos_label)
        finish = partial(average_defined, 'macro', False)
        metric = LazyTorchMetric('BinaryAveragePrecision', prepare, finish)
        super().__init__(metric, 'average_precision_score', on)


# -- any number of labels for each sample ----------------------------------------------------------


class _LabelScore(Score):
    "Base class of averaged scores of labels."

    _kind = ''  # name in torchmetrics
    _beta: float | None = None

    def __init__(
        self,
        thresh: float = 0.5,  # probability from which a label is predicted
        sigmoid: bool = True,  # whether the predictions are logits
        labels: Labels = None,  # labels to include; None: all
        average: str | None = 'macro',  # see the module docstring
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        prepare = partial(threshold_labels, type(self).__name__, thresh, sigmoid)
        metric = make_score(f'Multilabel{self._kind}', prepare, labels, average, beta=self._beta)
        super().__init__(metric, self._name, on)


class F1ScoreMulti(_LabelScore):
    """Harmonic mean of precision and recall of each label.

    >>> F1ScoreMulti(average='micro')(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.800000011920929
    """

    _kind = 'F1Score'
    _name = 'f1_score'


class PrecisionMulti(_LabelScore):
    """Fraction of predictions of a label that are correct.

    >>> PrecisionMulti(average=None)(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    tensor([0.5000, 1.0000])
    """

    _kind = 'Precision'
    _name = 'precision_score'


class RecallMulti(_LabelScore):
    """Fraction of the occurrences of a label that are predicted.

    >>> RecallMulti(labels=[1])(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 1], [0, 1]]))
    0.5
    """

    _kind = 'Recall'
    _name = 'recall_score'


class JaccardMulti(_LabelScore):
    """Intersection over union of predictions and targets of each label.

    >>> JaccardMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.75
    """

    _kind = 'JaccardIndex'
    _name = 'jaccard_score'


class FBetaMulti(_LabelScore):
    """F score of each label with recall weighted by `beta`.

    >>> FBetaMulti(2, average=None)(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    tensor([0.8333, 1.0000])
    """

    _kind = 'FBetaScore'
    _name = 'fbeta_score'

    def __init__(
        self,
        beta: float,  # weight of recall relative to precision
        thresh: float = 0.5,  # probability from which a label is predicted
        sigmoid: bool = True,  # whether the predictions are logits
        labels: Labels = None,  # labels to include; None: all
        average: str | None = 'macro',  # see the module docstring
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        self._beta = beta
        super().__init__(thresh, sigmoid, labels, average, on)


class HammingLossMulti(Score):
    """Fraction of labels predicted incorrectly.

    >>> HammingLossMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.25
    """

    def __init__(self, thresh: float = 0.5, sigmoid: bool = True, on: str | None = None) -> None:
        prepare = partial(threshold_labels, 'HammingLossMulti', thresh, sigmoid)
        metric = LazyTorchMetric('MultilabelHammingDistance', prepare, average='micro')
        super().__init__(metric, 'hamming_loss', on)


class MatthewsCorrCoefMulti(Score):
    """Matthews correlation of predicted and true labels, all labels together; 0 if undefined.

    >>> MatthewsCorrCoefMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [1, 1]]))
    1.0
    """

    def __init__(self, thresh: float = 0.5, sigmoid: bool = True, on: str | None = None) -> None:
        prepare = partial(threshold_labels, 'MatthewsCorrCoefMulti', thresh, sigmoid)
        metric = LazyTorchMetric('MultilabelConfusionMatrix', prepare, compute_matthews)
        super().__init__(metric, 'matthews_corrcoef', on)


class _Ranking(Score):
    "Base class of averaged ranking scores of labels."

    _kind = ''  # name in torchmetrics
    _needs_both = False

    def __init__(
        self,
        sigmoid: bool = True,  # whether the predictions are logits
        average: str | None = 'macro',  # see the module docstring
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        check_average(average)
        kind = f'Multilabel{self._kind}'
        prepare = partial(rank_labels, type(self).__name__, sigmoid)
        if average == 'micro':
            metric = LazyTorchMetric(kind, prepare, average='micro')
        else:
            finish = partial(average_defined, average, self._needs_both)
            metric = LazyTorchMetric(kind, prepare, finish, average='none')
        super().__init__(metric, self._name, on)


class RocAucMulti(_Ranking):
    """Average area under the ROC curve of each label; labels that never or always occur are excluded.

    >>> RocAucMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.5
    """

    _kind = 'AUROC'
    _name = 'roc_auc_score'
    _needs_both = True


class APScoreMulti(_Ranking):
    """Mean of the labels' average precision; labels that do not occur are excluded (fastai counts them as 0).

    >>> APScoreMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.75
    """

    _kind = 'AveragePrecision'
    _name = 'average_precision_score'


# -- others ----------------------------------------------------------------------------------------


class SpearmanCorrCoef(Score):
    """Spearman correlation, the Pearson correlation of ranks; NaN if either side is constant.

    >>> round(SpearmanCorrCoef()(torch.tensor([1., 2., 30.]), torch.tensor([1., 4., 5.])), 4)
    1.0
    """

    def __init__(self, on: str | None = None) -> None:
        prepare = partial(match_dtypes, 'SpearmanCorrCoef')
        super().__init__(LazyTorchMetric('SpearmanCorrCoef', prepare), 'spearmanr', on)


class CorpusBLEUMetric(TorchMetric):
    """BLEU-4 (Papineni et al., 2002) of the most likely tokens over the data set, without smoothing.

    Predictions are (B, T, C) with the tokens along `axis`, targets are (B, T) token numbers. fastai smooths sentences
    without a match.

    >>> metric, targ = CorpusBLEUMetric(), torch.arange(6)[None]
    >>> metric.metric.update(torch.eye(6)[None], targ)
    >>> metric.metric.compute()
    tensor(1.)
    """

    def __init__(self, vocab_sz: int = 5000, axis: int = -1, on: str | None = None) -> None:
        super().__init__(Bleu(axis), 'corpus_bleu', on)
