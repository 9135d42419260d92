# SPDX-License-Identifier: Apache-2.0
"""Classification scores with fastai's names, computed by scikit-learn (`pip install scikit-learn`).

Single-label scores use the class with the highest score along `axis`. Multi-label scores (`...Multi`) predict each
label whose sigmoid is at least `thresh`. The predicted classes of a data set are kept on their device until the value
is read. Columns are named like scikit-learn's functions, as in fastai (`f1_score`). A dict sets other names:
`{'f1': F1Score(average='macro')}`.

`average` is 'binary' (the score of class `pos_label` of two), 'macro' (mean over the occurring classes), 'weighted'
(mean weighted by class frequency), 'micro' (over all samples or labels together) or None (a tensor with one value per
class, up to the highest that occurs). `labels` selects classes. In the formulas, tp, fp, fn and tn are the true and
false positives and negatives of a class. A ratio with denominator 0 is 0. Constructors raise `MissingExtraError`
without scikit-learn. Predictions and targets that do not match, and options that scikit-learn does not have, raise
`MetricError` before training."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from learnkit.core.errors import MetricError
from learnkit.core.optional import import_library
from learnkit.metrics.shapes import argmax_preds, flatten_labels, mark_unknown
from learnkit.metrics.whole_set import KeptMetric

Labels = Sequence[int] | None


class SklearnScore(KeptMetric):
    "Base class of scores of scikit-learn; `prepare` returns -1 for unknown targets, and `compute` gets arrays."

    score = ''  # function of scikit-learn, and name of the column

    def __init__(
        self,
        on: str | None = None,  # 'train', 'valid' or 'both'
        **options: Any,  # keyword arguments of the function
    ) -> None:
        module = import_library('sklearn.metrics', type(self).__name__)
        self.score_func = partial(getattr(module, self.score), **options)
        super().__init__(self.score, on)

    @override
    def try_batch(self, pred: Any, yb: tuple[Any, ...]) -> None:
        self(pred, *yb)  # finds options and targets that scikit-learn refuses

    @override
    def final(self, pred: Tensor, targ: Tensor) -> Any:
        n_unknown = 0 if targ.is_floating_point() else int((targ < 0).sum())
        if n_unknown:
            raise MetricError(
                f'{self.name}: {n_unknown} targets are not class numbers, from 0 to the number of classes - 1 (of '
                'labels, 0 or 1). Leave out what is not to count, in `before_batch`.'
            )
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # of classes without predictions or targets
            value = self.compute(pred.cpu().numpy(), targ.cpu().numpy())
        return torch.from_numpy(value).float() if isinstance(value, np.ndarray) else float(value)

    def compute(self, pred: Any, targ: Any) -> Any:
        "Return the score of the data set."
        return self.score_func(targ, pred)


# -- one class for each sample ---------------------------------------------------------------------


class _ClassScore(SklearnScore):
    "Base class of scores of all classes together."

    instead: str | None = None  # what to use if there are not two classes; None: any number

    def __init__(
        self,
        axis: int = -1,  # class dimension
        **options: Any,  # `on`, and further options of scikit-learn's function
    ) -> None:
        self.axis = axis
        super().__init__(**options)

    @override
    def prepare(self, pred: Tensor, targ: Tensor) -> tuple[Tensor, Tensor]:
        best, targ, n = argmax_preds(type(self).__name__, self.axis, self.instead, pred, targ)
        return best, mark_unknown(targ, n)


class _AverageScore(_ClassScore):
    "Base class of scores of each class, averaged over classes."

    def __init__(
        self,
        axis: int = -1,  # class dimension
        labels: Labels = None,  # classes to include; None: all
        pos_label: int = 1,  # class scored by 'binary'
        average: str | None = 'binary',  # see the module docstring; 'binary' requires two classes
        **options: Any,
    ) -> None:
        if average == 'binary':
            other = f'{type(self).__name__}Multi for labels'
            self.instead = f"average='macro', 'micro', 'weighted' or None, or {other}"
        super().__init__(axis, pos_label=pos_label, average=average, zero_division=0, **options)
        self.labels = labels
        self.average = average

    @override
    def compute(self, pred: Any, targ: Any) -> Any:
        labels = self.labels
        if labels is None and self.average is None:
            labels = range(max(pred.max(), targ.max()) + 1)  # also classes that do not occur
        return self.score_func(targ, pred, labels=labels)


class F1Score(_AverageScore):
    """Harmonic mean of precision and recall, `2*tp/(2*tp + fp + fn)`.

    >>> F1Score()(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 1, 1]))
    0.8
    """

    score = 'f1_score'


class Precision(_AverageScore):
    """Fraction of predictions of a class that are correct, `tp/(tp + fp)`.

    >>> Precision(average=None)(torch.eye(2)[[0, 0, 0, 1]], torch.tensor([0, 0, 1, 1]))
    tensor([0.6667, 1.0000])
    """

    score = 'precision_score'


class Recall(_AverageScore):
    """Fraction of the samples of a class that are predicted, `tp/(tp + fn)`.

    >>> Recall(pos_label=0)(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 1, 1]))
    0.5
    """

    score = 'recall_score'


class Jaccard(_AverageScore):
    """Intersection over union of predictions and targets of a class, `tp/(tp + fp + fn)`.

    >>> round(Jaccard(average='macro')(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 0, 1])), 4)
    0.3333
    """

    score = 'jaccard_score'


class _Beta(SklearnScore):
    "Base class of F scores with recall weighted by `beta`."

    score = 'fbeta_score'

    def __init__(
        self,
        beta: float,  # weight of recall relative to precision
        *args: Any,  # arguments of `F1Score`, or of `F1ScoreMulti`
        **options: Any,
    ) -> None:
        super().__init__(*args, beta=beta, **options)


class FBeta(_Beta, _AverageScore):
    """F score with recall weighted by `beta`, `(1 + b*b)*tp/((1 + b*b)*tp + b*b*fn + fp)`.

    >>> round(FBeta(2)(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 0, 1])), 4)
    0.7143
    """


class HammingLoss(_ClassScore):
    """Fraction of samples whose class is not predicted: the error rate.

    >>> HammingLoss()(torch.eye(2)[[0, 1, 1, 1]], torch.tensor([0, 0, 1, 1]))
    0.25
    """

    score = 'hamming_loss'


class MatthewsCorrCoef(_ClassScore):
    """Matthews correlation of predicted and true classes, generalized by Gorodkin; 0 if undefined.

    >>> MatthewsCorrCoef()(torch.eye(2)[[0, 1]], torch.tensor([0, 1]))
    1.0
    """

    score = 'matthews_corrcoef'


class BalancedAccuracy(_ClassScore):
    """Mean recall over the occurring classes; `adjusted=True` rescales it so that chance is 0 and the maximum is 1.

    >>> BalancedAccuracy()(torch.eye(2)[[0, 0, 0, 1]], torch.tensor([0, 0, 1, 1]))
    0.75
    """

    score = 'balanced_accuracy_score'


class CohenKappa(_ClassScore):
    """Agreement beyond chance, `(p_o - p_e)/(1 - p_e)` of observed and expected agreement; NaN for a single class.

    `weights` is the cost at distance d: None for 1, 'linear' for d, 'quadratic' for d*d.

    >>> CohenKappa()(torch.eye(2)[[0, 0, 0, 1]], torch.tensor([0, 0, 1, 1]))
    0.5
    """

    score = 'cohen_kappa_score'


# -- any number of labels for each sample ----------------------------------------------------------


class _LabelScore(SklearnScore):
    "Base class of scores of each label, averaged over labels."

    def __init__(
        self,
        thresh: float = 0.5,  # probability from which a label is predicted
        sigmoid: bool = True,  # whether the predictions are logits
        labels: Labels = None,  # labels to include; None: all
        average: str | None = 'macro',  # see the module docstring
        **options: Any,  # `on`, and further options of scikit-learn's function
    ) -> None:
        super().__init__(**options)
        self.thresh = thresh
        self.sigmoid = sigmoid
        self.labels = labels
        self.average = average

    @override
    def prepare(self, pred: Tensor, targ: Tensor) -> tuple[Tensor, Tensor]:
        probs, targ, _ = flatten_labels(type(self).__name__, self.sigmoid, pred, targ)
        return (probs >= self.thresh).long(), mark_unknown(targ, 2)

    @override
    def compute(self, pred: Any, targ: Any) -> Any:
        if pred.shape[1] == 1:  # which scikit-learn takes for two classes
            return self.score_func(targ[:, 0], pred[:, 0], zero_division=0)
        options = {'labels': self.labels, 'average': self.average, 'zero_division': 0}
        return self.score_func(targ, pred, **options)


class F1ScoreMulti(_LabelScore):
    """Harmonic mean of precision and recall of each label.

    >>> F1ScoreMulti(average='micro')(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.8
    """

    score = 'f1_score'


class PrecisionMulti(_LabelScore):
    """Fraction of predictions of a label that are correct.

    >>> PrecisionMulti(average=None)(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    tensor([0.5000, 1.0000])
    """

    score = 'precision_score'


class RecallMulti(_LabelScore):
    """Fraction of the occurrences of a label that are predicted.

    >>> RecallMulti(labels=[1])(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 1], [0, 1]]))
    0.5
    """

    score = 'recall_score'


class JaccardMulti(_LabelScore):
    """Intersection over union of predictions and targets of each label.

    >>> JaccardMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.75
    """

    score = 'jaccard_score'


class FBetaMulti(_Beta, _LabelScore):
    """F score of each label with recall weighted by `beta`.

    >>> FBetaMulti(2, average=None)(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    tensor([0.8333, 1.0000])
    """


class _AllLabels(_LabelScore):
    "Base class of scores of all labels together, which are two classes: without `labels` and `average`."

    @override
    def compute(self, pred: Any, targ: Any) -> Any:
        return self.score_func(targ.ravel(), pred.ravel())


class HammingLossMulti(_AllLabels):
    """Fraction of labels predicted incorrectly.

    >>> HammingLossMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [0, 1]]))
    0.25
    """

    score = 'hamming_loss'


class MatthewsCorrCoefMulti(_AllLabels):
    """Matthews correlation of predicted and true labels, all labels together; 0 if undefined.

    >>> MatthewsCorrCoefMulti()(torch.tensor([[2., -1.], [3., 1.]]), torch.tensor([[1, 0], [1, 1]]))
    1.0
    """

    score = 'matthews_corrcoef'
