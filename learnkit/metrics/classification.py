"""Scores of classes, labels and rankings by fastai's names, through torchmetrics (`pip install learnkit[metrics]`).

Single-label scores take the class that scores highest along `axis`, the others (`...Multi`) each label whose sigmoid
reaches `thresh`. Values are those of scikit-learn on the whole set. The history names them as fastai does, by
scikit-learn's functions (`f1_score`, `roc_auc_score`); a dict gives other names: `{'f1': F1Score(average='macro')}`.

`average` is 'binary' (of two classes, the score of class `pos_label`), 'macro' (the mean over the classes that occur),
'weighted' (by how often they do), 'micro' (over all samples or labels together) or None (a tensor, one value a class).
`labels` keeps only some classes, for 'macro' and None. Below, tp, fp, fn and tn are true and false positives and
negatives of a class. Each raises `MissingExtraError` when made without torchmetrics, and `MetricError` for an unknown
`average` and, before training, for predictions and targets that do not fit."""

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
    averaged,
    by_label,
    chance_of,
    check_average,
    computed,
    matthews,
    mean_recall,
    over_defined,
    softmax_probs,
    threshold_labels,
    values,
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


class _OfClasses(Score):
    "A score of each class, and their average."

    _kind, _shown = '', ''  # torchmetrics' name, and the column's
    _beta: float | None = None

    def __init__(
        self,
        axis: int = -1,  # where the classes are
        labels: Labels = None,  # only these classes
        pos_label: int = 1,  # the class that 'binary' scores
        average: str | None = 'binary',  # as above; 'binary' takes two classes
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        prepare = partial(argmax_preds, type(self).__name__, axis, average == 'binary')
        late = averaged(f'Multiclass{self._kind}', prepare, labels, average, pos_label, self._beta)
        super().__init__(late, self._shown, on)


class F1Score(_OfClasses):
    """The harmonic mean of precision and recall, `2*tp/(2*tp + fp + fn)`.

    >>> F1Score()(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 1, 1]))
    0.800000011920929
    """

    _kind, _shown = 'F1Score', 'f1_score'


class Precision(_OfClasses):
    """The share of predictions of a class that are right, `tp/(tp + fp)`.

    >>> Precision(average=None)(torch.eye(2)[[0, 0, 0, 1]], torch.tensor([0, 0, 1, 1]))
    tensor([0.6667, 1.0000])
    """

    _kind, _shown = 'Precision', 'precision_score'


class Recall(_OfClasses):
    """The share of a class that is found, `tp/(tp + fn)`.

    >>> Recall(pos_label=0)(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 1, 1]))
    0.5
    """

    _kind, _shown = 'Recall', 'recall_score'


class Jaccard(_OfClasses):
    """Intersection over union of predictions and targets of a class, `tp/(tp + fp + fn)`.

    >>> round(Jaccard(average='macro')(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 0, 1])), 4)
    0.3333
    """

    _kind, _shown = 'JaccardIndex', 'jaccard_score'


class FBeta(_OfClasses):
    """The F score in which recall counts `beta` times as much, `(1 + b*b)*tp/((1 + b*b)*tp + b*b*fn + fp)`.

    >>> round(FBeta(2)(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 0, 1])), 4)
    0.7143
    """

    _kind, _shown = 'FBetaScore', 'fbeta_score'

    def __init__(
        self,
        beta: float,  # how much recall counts; precision counts 1
        axis: int = -1,  # where the classes are
        labels: Labels = None,  # only these classes
        pos_label: int = 1,  # the class that 'binary' scores
        average: str | None = 'binary',  # as above; 'binary' takes two classes
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        self._beta = beta
        super().__init__(axis, labels, pos_label, average, on)


class HammingLoss(Score):
    """The share of samples whose class is not predicted; of single labels that is the error rate.

    >>> HammingLoss()(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 1, 1]))
    0.25
    """

    def __init__(self, axis: int = -1, on: str | None = None) -> None:
        prepare = partial(argmax_preds, 'HammingLoss', axis, False)
        super().__init__(
            LazyTorchMetric('MulticlassHammingDistance', prepare, computed, average='micro'),
            'hamming_loss',
            on,
        )


class BalancedAccuracy(Score):
    """The mean recall of the classes that occur.

    >>> BalancedAccuracy()(torch.eye(2)[[0, 0, 0, 1]], torch.tensor([0, 0, 1, 1]))
    0.75
    """

    def __init__(
        self,
        axis: int = -1,  # where the classes are
        adjusted: bool = False,  # scaled so that chance is 0 and the best still 1
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        prepare = partial(argmax_preds, 'BalancedAccuracy', axis, False)
        late = LazyTorchMetric('MulticlassConfusionMatrix', prepare, partial(mean_recall, adjusted))
        super().__init__(late, 'balanced_accuracy_score', on)


class CohenKappa(Score):
    """Agreement beyond chance, `(p_o - p_e)/(1 - p_e)` of observed and expected agreement; NaN with one class alone.

    >>> CohenKappa()(torch.eye(2)[[0, 0, 0, 1]], torch.tensor([0, 0, 1, 1]))
    0.5
    """

    def __init__(
        self,
        axis: int = -1,  # where the classes are
        weights: str | None = None,  # cost of a miss by d: None 1, 'linear' d, 'quadratic' d*d
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        if weights not in (None, 'linear', 'quadratic'):
            raise MetricError(
                f"CohenKappa: weights={weights!r}: use 'linear', 'quadratic' or None."
            )
        prepare = partial(argmax_preds, 'CohenKappa', axis, False)
        super().__init__(
            LazyTorchMetric('MulticlassCohenKappa', prepare, computed, weights=weights),
            'cohen_kappa_score',
            on,
        )


class MatthewsCorrCoef(Score):
    """The correlation of predicted and true classes (Gorodkin's, of any number of classes); 0 where it is not defined.

    >>> MatthewsCorrCoef()(torch.eye(2)[[0, 1]], torch.tensor([0, 1]))
    1.0
    """

    def __init__(self, axis: int = -1, on: str | None = None) -> None:
        late = LazyTorchMetric(
            'MulticlassConfusionMatrix',
            partial(argmax_preds, 'MatthewsCorrCoef', axis, False),
            matthews,
        )
        super().__init__(late, 'matthews_corrcoef', on)


class RocAuc(Score):
    """The area under the ROC curve of each class against the rest, by softmax, averaged.

    Classes that never occur are left out of the average; without any it is NaN.

    >>> RocAuc()(torch.tensor([[3., 1., 0.], [1., 2., 0.], [0., 0., 1.]]), torch.tensor([0, 1, 2]))
    1.0
    """

    def __init__(
        self,
        axis: int = -1,  # where the classes are
        average: str | None = 'macro',  # 'macro', 'weighted' or None
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        check_average(average, ('macro', 'weighted'))
        prepare, finish = (
            partial(softmax_probs, 'RocAuc', axis),
            partial(over_defined, average, True),
        )
        super().__init__(
            LazyTorchMetric('MulticlassAUROC', prepare, finish, average='none'), 'roc_auc_score', on
        )


class RocAucBinary(Score):
    """The area under the ROC curve of the second of two classes, by softmax; NaN when only one class occurs.

    >>> RocAucBinary()(torch.tensor([[0., 3.], [0., 1.], [0., 2.]]), torch.tensor([1, 0, 0]))
    1.0
    """

    def __init__(
        self,
        axis: int = -1,  # where the classes are
        max_fpr: float | None = None,  # maximum false positive rate; standardized (McClish, 1989)
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        prepare, finish = (
            partial(chance_of, 'RocAucBinary', axis, 1),
            partial(over_defined, 'macro', True),
        )
        super().__init__(
            LazyTorchMetric('BinaryAUROC', prepare, finish, max_fpr=max_fpr), 'roc_auc_score', on
        )


class APScoreBinary(Score):
    """Average precision, `sum_n (R_n - R_{n-1})*P_n`, of one of two classes; NaN when it never occurs.

    >>> round(APScoreBinary()(torch.tensor([[0., 3.], [0., 2.], [0., 1.]]), torch.tensor([1, 0, 1])), 4)
    0.8333
    """

    def __init__(
        self,
        axis: int = -1,  # where the classes are
        pos_label: int = 1,  # the class that is looked for
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        prepare, finish = (
            partial(chance_of, 'APScoreBinary', axis, pos_label),
            partial(over_defined, 'macro', False),
        )
        super().__init__(
            LazyTorchMetric('BinaryAveragePrecision', prepare, finish),
            'average_precision_score',
            on,
        )


# -- any number of labels for each sample ----------------------------------------------------------


class _OfLabels(Score):
    "A score of each label, and their average."

    _kind, _shown = '', ''
    _beta: float | None = None

    def __init__(
        self,
        thresh: float = 0.5,  # a label is predicted from this on
        sigmoid: bool = True,  # whether the predictions are logits
        labels: Labels = None,  # only these labels
        average: str | None = 'macro',  # as above
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        prepare = partial(threshold_labels, type(self).__name__, thresh, sigmoid)
        late = averaged(f'Multilabel{self._kind}', prepare, labels, average, beta=self._beta)
        super().__init__(late, self._shown, on)


class F1ScoreMulti(_OfLabels):
    """The harmonic mean of precision and recall of each label.

    >>> F1ScoreMulti(average='micro')(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.800000011920929
    """

    _kind, _shown = 'F1Score', 'f1_score'


class PrecisionMulti(_OfLabels):
    """The share of predictions of a label that are right.

    >>> PrecisionMulti(average=None)(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    tensor([0.5000, 1.0000])
    """

    _kind, _shown = 'Precision', 'precision_score'


class RecallMulti(_OfLabels):
    """The share of a label that is found.

    >>> RecallMulti(labels=[1])(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 1], [0, 1]]))
    0.5
    """

    _kind, _shown = 'Recall', 'recall_score'


class JaccardMulti(_OfLabels):
    """Intersection over union of predictions and targets of each label.

    >>> JaccardMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.75
    """

    _kind, _shown = 'JaccardIndex', 'jaccard_score'


class FBetaMulti(_OfLabels):
    """The F score of each label in which recall counts `beta` times as much.

    >>> FBetaMulti(2, average=None)(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    tensor([0.8333, 1.0000])
    """

    _kind, _shown = 'FBetaScore', 'fbeta_score'

    def __init__(
        self,
        beta: float,  # how much recall counts; precision counts 1
        thresh: float = 0.5,  # a label is predicted from this on
        sigmoid: bool = True,  # whether the predictions are logits
        labels: Labels = None,  # only these labels
        average: str | None = 'macro',  # as above
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        self._beta = beta
        super().__init__(thresh, sigmoid, labels, average, on)


class HammingLossMulti(Score):
    """The share of labels that are predicted wrong.

    >>> HammingLossMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.25
    """

    def __init__(self, thresh: float = 0.5, sigmoid: bool = True, on: str | None = None) -> None:
        prepare = partial(threshold_labels, 'HammingLossMulti', thresh, sigmoid)
        super().__init__(
            LazyTorchMetric('MultilabelHammingDistance', prepare, computed, average='micro'),
            'hamming_loss',
            on,
        )


class MatthewsCorrCoefMulti(Score):
    """The correlation of predicted and true labels, all labels together; 0 where it is not defined.

    >>> MatthewsCorrCoefMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [1, 1]]))
    1.0
    """

    def __init__(self, thresh: float = 0.5, sigmoid: bool = True, on: str | None = None) -> None:
        prepare = partial(threshold_labels, 'MatthewsCorrCoefMulti', thresh, sigmoid)
        super().__init__(
            LazyTorchMetric('MultilabelConfusionMatrix', prepare, matthews), 'matthews_corrcoef', on
        )


class _Ranking(Score):
    "A score of how each label ranks the samples."

    _kind, _shown, _needs_both = '', '', False

    def __init__(
        self,
        sigmoid: bool = True,  # whether the predictions are logits
        average: str | None = 'macro',  # as above
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        check_average(average)
        finish = (
            computed if average == 'micro' else partial(over_defined, average, self._needs_both)
        )
        late = LazyTorchMetric(
            f'Multilabel{self._kind}',
            partial(by_label, type(self).__name__, sigmoid),
            finish,
            average='micro' if average == 'micro' else 'none',
        )
        super().__init__(late, self._shown, on)


class RocAucMulti(_Ranking):
    """The area under the ROC curve of each label, averaged; a label that never or always occurs is left out.

    >>> RocAucMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.5
    """

    _kind, _shown, _needs_both = 'AUROC', 'roc_auc_score', True


class APScoreMulti(_Ranking):
    """Average precision of each label, averaged; a label that never occurs is left out (in fastai it counts as 0).

    >>> APScoreMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.75
    """

    _kind, _shown = 'AveragePrecision', 'average_precision_score'


# -- others ----------------------------------------------------------------------------------------


class SpearmanCorrCoef(Score):
    """Spearman's correlation: Pearson's of the ranks; NaN where either side is constant.

    >>> round(SpearmanCorrCoef()(torch.tensor([1., 2., 30.]), torch.tensor([1., 4., 5.])), 4)
    1.0
    """

    def __init__(self, on: str | None = None) -> None:
        super().__init__(
            LazyTorchMetric('SpearmanCorrCoef', partial(values, 'SpearmanCorrCoef'), computed),
            'spearmanr',
            on,
        )


class CorpusBLEUMetric(TorchMetric):
    """BLEU (Papineni et al., 2002) of the most likely tokens, of up to 4 in a row, over the whole set, unsmoothed.

    Predictions are (B, T, C) along `axis`, targets (B, T) of token numbers. fastai smooths sentences without a match.

    >>> metric, targ = CorpusBLEUMetric(), torch.arange(6)[None]
    >>> metric.metric.update(torch.eye(6)[None], targ)
    >>> metric.metric.compute()
    tensor(1.)
    """

    def __init__(self, vocab_sz: int = 5000, axis: int = -1, on: str | None = None) -> None:
        super().__init__(Bleu(axis), 'corpus_bleu', on)
