"""Metrics by fastai's names: functions of a batch, and classes where a mean over batches is not the value on the set.

`metrics=[accuracy, Dice, F1Score(average='macro')]`: give functions, classes or instances. Scores that come from
torchmetrics (`learnkit.metrics.classification`) can be imported here too, without it being installed. Each class takes
`on='train'`, `'valid'` or `'both'`, by default as the Recorder says. Each gives the exact value on the set,
whatever its batches, also of sequences whose length varies: in a list of metrics these functions count targets, where
`AvgMetric(f)` averages a function of your own over samples. None makes the host wait for a device at every batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from learnkit.core.errors import MetricError
from learnkit.core.validation import check_choice, needs_class_indices
from learnkit.metrics.averages import (
    AvgLoss,
    AvgMetric,
    SumMetric,
    TorchMetric,
    ValueMetric,
    as_metrics,
    check_column,
    dry_run,
    measures_batches,
    paired,
    whole_set_metric,
    widened,
)
from learnkit.metrics.base import AvgSmoothLoss, Mean, Metric
from learnkit.metrics.classification import (
    APScoreBinary,
    APScoreMulti,
    BalancedAccuracy,
    CohenKappa,
    CorpusBLEUMetric,
    F1Score,
    F1ScoreMulti,
    FBeta,
    FBetaMulti,
    HammingLoss,
    HammingLossMulti,
    Jaccard,
    JaccardMulti,
    MatthewsCorrCoef,
    MatthewsCorrCoefMulti,
    Precision,
    PrecisionMulti,
    Recall,
    RecallMulti,
    RocAuc,
    RocAucBinary,
    RocAucMulti,
    SpearmanCorrCoef,
)
from learnkit.metrics.segmentation import (
    Dice,
    DiceMulti,
    ForegroundAcc,
    JaccardCoeff,
    JaccardCoeffMulti,
    foreground_acc,
)
from learnkit.metrics.torchmetrics import by_class
from learnkit.metrics.whole_set import AccumMetric, LossMetric, LossMetrics, skm_to_fastai

F = TypeVar('F', bound=Callable[..., Tensor])

__all__ = [
    'Metric',
    'Mean',
    'AvgMetric',
    'AvgLoss',
    'AvgSmoothLoss',
    'ElementMean',
    'SumMetric',
    'ValueMetric',
    'TorchMetric',
    'as_metrics',
    'check_column',
    'dry_run',
    'measures_batches',
    'accuracy',
    'error_rate',
    'top_k_accuracy',
    'accuracy_multi',
    'foreground_acc',
    'ForegroundAcc',
    'mse',
    'rmse',
    'RMSE',
    'mae',
    'msle',
    'exp_rmspe',
    'ExpRMSPE',
    'R2Score',
    'ExplainedVariance',
    'PearsonCorrCoef',
    'BrierScore',
    'BrierScoreMulti',
    'Perplexity',
    'perplexity',
    'Dice',
    'DiceMulti',
    'JaccardCoeff',
    'JaccardCoeffMulti',
    'LossMetric',
    'LossMetrics',
    'APScoreBinary',
    'APScoreMulti',
    'BalancedAccuracy',
    'CohenKappa',
    'CorpusBLEUMetric',
    'F1Score',
    'F1ScoreMulti',
    'FBeta',
    'FBetaMulti',
    'HammingLoss',
    'HammingLossMulti',
    'Jaccard',
    'JaccardMulti',
    'MatthewsCorrCoef',
    'MatthewsCorrCoefMulti',
    'Precision',
    'PrecisionMulti',
    'Recall',
    'RecallMulti',
    'RocAuc',
    'RocAucBinary',
    'RocAucMulti',
    'SpearmanCorrCoef',
    'AccumMetric',
    'skm_to_fastai',
]


class ElementMean(AvgMetric):
    "Average over all targets of the set: what functions of this module are as metrics. `weight_func` weighs batches."

    def _weight(self, learn: Any) -> Any:
        "Count a batch by its targets: of sequences, it has more or less of them for its samples."
        return (
            learn.yb[0].numel()
            if getattr(learn, 'weight_func', None) is None
            else super()._weight(learn)
        )


def by_element(func: F) -> F:
    "Mark a mean over the targets of a batch: in a list of metrics it is the mean over those of the set."

    def metric(**options: Any) -> ElementMean:
        return ElementMean(partial(func, **options) if options else func)

    return whole_set_metric(metric)(func)


# -- classes ---------------------------------------------------------------------------------------


@by_element
@needs_class_indices
def accuracy(
    pred: Tensor,  # scores, classes along `axis`
    targ: Tensor,  # class numbers, of pred's shape without `axis`
    axis: int = -1,  # where the classes are; 1 for images (B, C, H, W)
) -> Tensor:
    """Return the share of targets whose class scores highest.

    Raises `MetricError` when there is not one target for each prediction, or one output alone.

    >>> accuracy(torch.tensor([[.1, .9], [.8, .2]]), torch.tensor([1, 1]))
    tensor(0.5000)
    """
    check_choice('accuracy', pred, axis)
    best, targ = paired('accuracy', pred.argmax(dim=axis), targ)
    return (best == targ).float().mean()


@by_element
@needs_class_indices
def error_rate(
    pred: Tensor,  # scores, classes along `axis`
    targ: Tensor,  # class numbers
    axis: int = -1,  # where the classes are
) -> Tensor:
    """Return 1 - `accuracy`.

    >>> error_rate(torch.tensor([[.1, .9], [.8, .2], [.7, .3], [.6, .4]]), torch.tensor([1, 0, 0, 1]))
    tensor(0.2500)
    """
    check_choice('error_rate', pred, axis)
    return 1 - accuracy(pred, targ, axis=axis)


@by_element
@needs_class_indices
def top_k_accuracy(
    pred: Tensor,  # scores, classes along `axis`
    targ: Tensor,  # class numbers
    k: int = 5,  # how many guesses there are
    axis: int = -1,  # where the classes are
) -> Tensor:
    """Return the share of targets whose class is among the `k` that score highest.

    Raises `MetricError` when there are fewer than `k` classes, or not one target for each prediction.

    >>> top_k_accuracy(torch.tensor([[.1, .2, .7], [.1, .2, .7]]), torch.tensor([1, 0]), k=2)
    tensor(0.5000)
    """
    scores, targ = by_class('top_k_accuracy', pred, targ, axis)
    n = scores.shape[1]
    if not 1 <= k <= n:
        raise MetricError(f'top_k_accuracy: k={k}, but there are {n} classes.')
    return (scores.topk(k)[1] == targ[:, None]).any(1).float().mean()


@by_element
def accuracy_multi(
    pred: Tensor,  # a score for each label
    targ: Tensor,  # 0 or 1 for each label
    thresh: float = 0.5,  # a label is predicted above this
    sigmoid: bool = True,  # whether the scores are logits
) -> Tensor:
    """Return the share of labels that are predicted right, of samples with any number of labels.

    >>> accuracy_multi(torch.tensor([[2., -1.], [-3., -.5]]), torch.tensor([[1, 0], [0, 1]]))
    tensor(0.7500)
    """
    pred, targ = paired('accuracy_multi', pred, targ)
    return (((pred.sigmoid() if sigmoid else pred) > thresh) == targ.bool()).float().mean()


# -- regression ------------------------------------------------------------------------------------


@by_element
def mse(pred: Tensor, targ: Tensor) -> Tensor:
    """Return the mean squared error. Raises `MetricError` when the sizes differ: nothing is broadcast.

    >>> mse(torch.tensor([1., 2.]), torch.tensor([[1.], [4.]]))
    tensor(2.)
    """
    pred, targ = paired('mse', pred, targ)
    return (pred - targ).square().mean()


@by_element
def mae(pred: Tensor, targ: Tensor) -> Tensor:
    """Return the mean absolute error. Raises `MetricError` when the sizes differ: nothing is broadcast.

    >>> mae(torch.tensor([1., 2.]), torch.tensor([1., 4.]))
    tensor(1.)
    """
    pred, targ = paired('mae', pred, targ)
    return (pred - targ).abs().mean()


@by_element
def msle(pred: Tensor, targ: Tensor) -> Tensor:
    """Return the mean squared error of `log(1 + x)`. Raises `MetricError` when the sizes differ.

    >>> msle(torch.tensor([0., 1.]), torch.tensor([0., 2*math.e - 1]))
    tensor(0.5000)
    """
    pred, targ = paired('msle', pred, targ)
    return (pred.log1p() - targ.log1p()).square().mean()


class RMSE(ElementMean):
    "The root of the mean squared error of the whole set: what `rmse` is as a metric."

    def __init__(self, on: str | None = None) -> None:
        super().__init__(mse, 'rmse', on)

    @property
    def value(self) -> float | None:
        mean = super().value
        return None if mean is None else mean**0.5


@whole_set_metric(RMSE)
def rmse(pred: Tensor, targ: Tensor) -> Tensor:
    """Return the root of the mean squared error; as a metric that of the whole set (`RMSE`), no mean over batches.

    Raises `MetricError` when the sizes differ: nothing is broadcast.

    >>> rmse(torch.tensor([1., 2.]), torch.tensor([1., 2. + 2**0.5]))
    tensor(1.)
    """
    return mse(pred, targ).sqrt()


def _squared_share(pred: Tensor, targ: Tensor) -> Tensor:
    pred, targ = paired('exp_rmspe', pred, targ)
    return torch.expm1(pred - targ).square().mean()


class ExpRMSPE(ElementMean):
    "The root mean square percentage error of the whole set's exponentials: what `exp_rmspe` is as a metric."

    def __init__(self, on: str | None = None) -> None:
        super().__init__(_squared_share, 'exp_rmspe', on)

    @property
    def value(self) -> float | None:
        mean = super().value
        return None if mean is None else mean**0.5


@whole_set_metric(ExpRMSPE)
def exp_rmspe(pred: Tensor, targ: Tensor) -> Tensor:
    """Return `sqrt(mean(((exp(targ) - exp(pred))/exp(targ))**2))`; as a metric that of the whole set (`ExpRMSPE`).

    >>> exp_rmspe(torch.tensor([0., 1.]) + math.log(1.5), torch.tensor([0., 1.]))
    tensor(0.5000)
    """
    return _squared_share(pred, targ).sqrt()


class _Regression(SumMetric):
    "Moments of targets, predictions and errors: n, and the sums of t, t*t, p, p*p, p*t, e and e*e."

    def __init__(self, on: str | None = None) -> None:
        super().__init__(self._name, on)

    def sums(self, pred: Tensor, targ: Tensor) -> Tensor:
        p, t = map(widened, paired(self.name, pred, targ))
        e = t - p
        return torch.stack([torch.ones_like(t), t, t * t, p, p * p, p * t, e, e * e]).sum(1)


def _spread(n: float, total: float, squares: float) -> float:
    "The sum of squares around the mean; what is left of rounding is 0."
    spread = squares - total * total / n
    return spread if spread > 1e-14 * squares else 0.0


def _explained(left: float, spread: float) -> float:
    "The share that is explained; 1 or 0 for targets that are all equal, as in scikit-learn."
    return 1 - left / spread if spread else float(left == 0)


class R2Score(_Regression):
    """The coefficient of determination, `1 - sum((t - p)**2)/sum((t - mean(t))**2)`; NaN for fewer than two samples.

    >>> R2Score()(torch.tensor([1., 2., 4.]), torch.tensor([1., 2., 3.]))
    0.5
    """

    _name = 'r2_score'

    def final(self, sums: Tensor) -> float:
        n, t, tt, *_, ee = sums.tolist()
        return _explained(ee, _spread(n, t, tt)) if n > 1 else math.nan


class ExplainedVariance(_Regression):
    """The share of the targets' variance that is explained, `1 - var(t - p)/var(t)`: a constant offset costs nothing.

    >>> ExplainedVariance()(torch.tensor([2., 3., 4.]), torch.tensor([1., 2., 3.]))
    1.0
    """

    _name = 'explained_variance_score'

    def final(self, sums: Tensor) -> float:
        n, t, tt, *_, e, ee = sums.tolist()
        return _explained(_spread(n, e, ee), _spread(n, t, tt)) if n else math.nan


class PearsonCorrCoef(_Regression):
    """Pearson's correlation, `cov(p, t)/(std(p)*std(t))`; NaN where either is constant.

    >>> round(PearsonCorrCoef()(torch.tensor([1., 2., 3.]), torch.tensor([3., 2., 1.])), 6)
    -1.0
    """

    _name = 'pearsonr'

    def final(self, sums: Tensor) -> float:
        n, t, tt, p, pp, pt, *_ = sums.tolist()
        spread = (_spread(n, t, tt) * _spread(n, p, pp)) ** 0.5 if n > 1 else 0.0
        return max(-1.0, min(1.0, (pt - p * t / n) / spread)) if spread else math.nan


# -- losses and probabilities ----------------------------------------------------------------------


class BrierScore(SumMetric):
    """The mean squared error of the softmax, `sum_c (p_c - [t == c])**2`; half of that for two classes.

    Both as in scikit-learn. fastai scores the class that was predicted, an error rate; here it is the probability.
    Raises `MetricError` when it is read and there were targets that are no class.

    >>> round(BrierScore()(torch.tensor([[.25, .75]]).log(), torch.tensor([1])), 4)
    0.0625
    """

    def __init__(
        self,
        axis: int = -1,  # where the classes are
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        super().__init__('brier_score_loss', on)
        self.axis = axis

    def sums(self, pred: Tensor, targ: Tensor) -> Any:
        scores, targ = by_class(self.name, pred, targ, self.axis)
        p, n_classes = widened(scores).softmax(1), scores.shape[1]
        # looked at with the value: no batch waits for a device
        known = targ.long().clamp(0, n_classes - 1)
        squares = (p * p).sum(1) - 2 * p.gather(1, known[:, None])[:, 0] + 1
        return squares.sum() / (2 if n_classes == 2 else 1), targ.numel(), (known != targ).sum()

    def final(self, sums: Tensor) -> float:
        total, n, n_unknown = sums.tolist()
        if not n_unknown:
            return total / n if n else math.nan
        raise MetricError(
            f'{self.name}: {n_unknown:.0f} of {n:.0f} targets are no class numbers, from 0 to the '
            'number of classes - 1. Leave out what is not to count, in `before_batch`.'
        )


class BrierScoreMulti(SumMetric):
    """The mean squared error of the probability of each label.

    >>> BrierScoreMulti(sigmoid=False)(torch.tensor([[.5, 1.]]), torch.tensor([[1, 1]]))
    0.125
    """

    def __init__(
        self,
        sigmoid: bool = True,  # whether the predictions are logits
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        super().__init__('brier_score_loss', on)
        self.sigmoid = sigmoid

    def sums(self, pred: Tensor, targ: Tensor) -> Any:
        p, t = map(widened, paired(self.name, pred, targ))
        return ((p.sigmoid() if self.sigmoid else p) - t).square().sum(), t.numel()

    def final(self, sums: Tensor) -> float:
        return float(sums[0] / sums[1])


class Perplexity(AvgLoss):
    "The exponential of the mean loss, of language models with cross-entropy: how many tokens it wavers between."

    @property
    def value(self) -> float | None:
        mean = super().value
        return None if mean is None else float(torch.tensor(mean, dtype=torch.float64).exp())

    @property
    def name(self) -> str:
        return 'perplexity'


perplexity = Perplexity  # a class: each Learner gets its own
