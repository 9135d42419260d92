# SPDX-License-Identifier: Apache-2.0
"""Metrics with fastai's names: functions of a batch, and classes for values that are not a mean over batches.

`metrics=[accuracy, Dice, F1Score(average='macro')]` takes functions, classes or instances. Each class takes
`on='train'`, `'valid'` or `'both'`; the default is the Recorder's setting. Values on a data set are exact for any batch
sizes and sequence lengths: in a list of metrics, these functions are averaged over targets, and `AvgMetric(f)` averages
a user's function over samples. No metric waits for the device at every batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from learnkit.core.denominator import IGNORED, count_targets
from learnkit.core.validation import check_choice
from learnkit.metrics.averages import AvgLoss, AvgMetric, SumMetric, whole_set_metric
from learnkit.metrics.base import flatten_pair, widen
from learnkit.metrics.classification import SklearnScore
from learnkit.metrics.shapes import flatten_classes
from learnkit.metrics.whole_set import KeptMetric

if TYPE_CHECKING:
    from learnkit.learner import Learner

F = TypeVar('F', bound=Callable[..., Tensor])


class ElementMean(AvgMetric):
    "Average over all targets of the data set, as the functions of this module do in a list of metrics."

    @override
    def _weight(self, learn: Learner) -> Any:
        "Return the number of targets that are not ignored, or the value of `weight_func`."
        if getattr(learn, 'weight_func', None) is not None:
            return super()._weight(learn)
        targ = learn.yb[0]
        return targ.numel() if targ.is_floating_point() else count_targets(targ, IGNORED)


def average_over_targets(func: F) -> F:
    "Mark a mean over the targets of a batch, which a list of metrics averages over the targets of the data set."

    def metric(**options: Any) -> ElementMean:
        return ElementMean(partial(func, **options) if options else func)

    return whole_set_metric(metric)(func)


# -- classes ---------------------------------------------------------------------------------------


def _share(
    right: Tensor,  # whether each target is right, (N,)
    targ: Tensor,  # class numbers (N,)
) -> Tensor:
    "Return the share of targets that are right, of those that are not ignored."
    counted = targ != IGNORED
    return (right & counted).sum() / counted.sum()


@average_over_targets
def accuracy(
    pred: Tensor,  # scores, classes along `axis`
    targ: Tensor,  # class numbers, of the shape of `pred` without `axis`
    axis: int = -1,  # class dimension; 1 for images (B, C, H, W)
) -> Tensor:
    """Return the fraction of targets whose class has the highest score; targets of -100 do not count.

    Raises `MetricError` unless there is one target per prediction, and for a single class.

    >>> accuracy(torch.tensor([[.1, .9], [.8, .2]]), torch.tensor([1, 1]))
    tensor(0.5000)
    """
    check_choice('accuracy', pred, axis)
    best, targ = flatten_pair('accuracy', pred.argmax(dim=axis), targ)
    return _share(best == targ, targ)


@average_over_targets
def error_rate(
    pred: Tensor,  # scores, classes along `axis`
    targ: Tensor,  # class numbers
    axis: int = -1,  # class dimension
) -> Tensor:
    """Return 1 - `accuracy`; targets of -100 do not count.

    >>> error_rate(torch.tensor([[.1, .9], [.8, .2], [.7, .3], [.6, .4]]), torch.tensor([1, 0, 0, 1]))
    tensor(0.2500)
    """
    return 1 - accuracy(pred, targ, axis=axis)


@average_over_targets
def top_k_accuracy(
    pred: Tensor,  # scores, classes along `axis`
    targ: Tensor,  # class numbers
    k: int = 5,  # number of top classes
    axis: int = -1,  # class dimension
) -> Tensor:
    """Return the fraction of targets whose class is among the `k` highest scores; targets of -100 do not count.

    Raises `MetricError` unless there is one target per prediction.

    >>> top_k_accuracy(torch.tensor([[.1, .2, .7], [.1, .2, .7]]), torch.tensor([1, 0]), k=2)
    tensor(0.5000)
    """
    scores, targ = flatten_classes('top_k_accuracy', pred, targ, axis)
    return _share((scores.topk(k)[1] == targ[:, None]).any(1), targ)


@average_over_targets
def accuracy_multi(
    pred: Tensor,  # scores of the labels
    targ: Tensor,  # 0 or 1 for each label, of the same shape
    thresh: float = 0.5,  # threshold above which a label is predicted
    sigmoid: bool = True,  # whether the scores are logits
) -> Tensor:
    """Return the fraction of labels predicted correctly, for samples with any number of labels.

    >>> accuracy_multi(torch.tensor([[2., -1.], [-3., -.5]]), torch.tensor([[1, 0], [0, 1]]))
    tensor(0.7500)
    """
    pred, targ = flatten_pair('accuracy_multi', pred, targ)
    if sigmoid:
        pred = pred.sigmoid()
    return ((pred > thresh) == targ.bool()).float().mean()


# -- regression ------------------------------------------------------------------------------------


@average_over_targets
def mse(pred: Tensor, targ: Tensor) -> Tensor:
    """Return the mean squared error. Raises `MetricError` for different sizes: nothing is broadcast.

    >>> mse(torch.tensor([1., 2.]), torch.tensor([[1.], [4.]]))
    tensor(2.)
    """
    pred, targ = flatten_pair('mse', pred, targ)
    return (pred - targ).square().mean()


@average_over_targets
def mae(pred: Tensor, targ: Tensor) -> Tensor:
    """Return the mean absolute error. Raises `MetricError` for different sizes: nothing is broadcast.

    >>> mae(torch.tensor([1., 2.]), torch.tensor([1., 4.]))
    tensor(1.)
    """
    pred, targ = flatten_pair('mae', pred, targ)
    return (pred - targ).abs().mean()


@average_over_targets
def msle(pred: Tensor, targ: Tensor) -> Tensor:
    """Return the mean squared error of `log(1 + x)`. Raises `MetricError` for different sizes.

    >>> msle(torch.tensor([0., 1.]), torch.tensor([0., 4.4366]))
    tensor(0.5000)
    """
    pred, targ = flatten_pair('msle', pred, targ)
    return (pred.log1p() - targ.log1p()).square().mean()


class _RootMean(ElementMean):
    "Root of a mean over the elements of the data set."

    @property
    @override
    def value(self) -> float | None:
        mean = super().value
        return None if mean is None else mean**0.5


class RMSE(_RootMean):
    "Root of the mean squared error of the data set; the metric of `rmse`."

    def __init__(self, on: str | None = None) -> None:
        super().__init__(mse, 'rmse', on)


@whole_set_metric(RMSE)
def rmse(pred: Tensor, targ: Tensor) -> Tensor:
    """Return the root of the mean squared error; as a metric, of the whole data set (`RMSE`).

    Raises `MetricError` for different sizes: nothing is broadcast.

    >>> rmse(torch.tensor([1., 2.]), torch.tensor([1., 2. + 2**0.5]))
    tensor(1.)
    """
    return mse(pred, targ).sqrt()


def _mean_squared_percentage(pred: Tensor, targ: Tensor) -> Tensor:
    pred, targ = flatten_pair('exp_rmspe', pred, targ)
    return torch.expm1(pred - targ).square().mean()


class ExpRMSPE(_RootMean):
    "Root mean square percentage error of exponentials over the data set; the metric of `exp_rmspe`."

    def __init__(self, on: str | None = None) -> None:
        super().__init__(_mean_squared_percentage, 'exp_rmspe', on)


@whole_set_metric(ExpRMSPE)
def exp_rmspe(pred: Tensor, targ: Tensor) -> Tensor:
    """Return `sqrt(mean(((exp(targ) - exp(pred))/exp(targ))**2))`; as a metric, of the data set (`ExpRMSPE`).

    >>> exp_rmspe(torch.tensor([1.5, 1.5]).log() + torch.tensor([0., 1.]), torch.tensor([0., 1.]))
    tensor(0.5000)
    """
    return _mean_squared_percentage(pred, targ).sqrt()


def flatten_numbers(name: str, pred: Tensor, targ: Tensor) -> tuple[Tensor, Tensor]:
    "Flatten predictions and targets of a regression, in float64."
    pred, targ = flatten_pair(name, pred, targ)
    return widen(pred), widen(targ)


class R2Score(SklearnScore):
    """Coefficient of determination, `1 - sum((t - p)**2)/sum((t - mean(t))**2)`; NaN for fewer than two samples.

    >>> R2Score()(torch.tensor([1., 2., 4.]), torch.tensor([1., 2., 3.]))
    0.5
    """

    score = 'r2_score'

    @override
    def prepare(self, pred: Tensor, targ: Tensor) -> tuple[Tensor, Tensor]:
        return flatten_numbers(self.name, pred, targ)


class ExplainedVariance(R2Score):
    """Explained variance, `1 - var(t - p)/var(t)`, which ignores a constant offset.

    >>> ExplainedVariance()(torch.tensor([2., 3., 4.]), torch.tensor([1., 2., 3.]))
    1.0
    """

    score = 'explained_variance_score'


class PearsonCorrCoef(KeptMetric):
    """Pearson correlation, `cov(p, t)/(std(p)*std(t))`; NaN if either is constant.

    >>> round(PearsonCorrCoef()(torch.tensor([1., 2., 3.]), torch.tensor([3., 2., 1.])), 6)
    -1.0
    """

    def __init__(self, on: str | None = None) -> None:
        super().__init__('pearsonr', on)

    @override
    def prepare(self, pred: Tensor, targ: Tensor) -> tuple[Tensor, Tensor]:
        return flatten_numbers(self.name, pred, targ)

    @override
    def final(self, pred: Tensor, targ: Tensor) -> Tensor:
        return correlate(pred, targ)


def correlate(x: Tensor, y: Tensor) -> Tensor:
    """Return the Pearson correlation of two vectors; NaN if either is constant, exactly 1 if both are equal.

    >>> correlate(torch.tensor([1., 2., 3.]), torch.tensor([1., 2., 3.]))
    tensor(1.)
    """
    is_constant = (x == x[:1]).all() | (y == y[:1]).all()
    x, y = (t - t.mean() for t in (x, y))
    x, y = (t / t.abs().max() for t in (x, y))  # squares neither overflow nor vanish
    ratio = (x * y).sum() / ((x * x).sum() * (y * y).sum()).sqrt()
    return torch.where(is_constant, nan, ratio.clamp(-1, 1))


# -- losses and probabilities ----------------------------------------------------------------------


class BrierScore(SumMetric):
    """Mean squared error of the softmax, `sum_c (p_c - [t == c])**2`, halved for two classes, as in scikit-learn.

    fastai's version uses the predicted class, which is an error rate; this version uses probabilities.

    >>> round(BrierScore()(torch.tensor([[.25, .75]]).log(), torch.tensor([1])), 4)
    0.0625
    """

    def __init__(
        self,
        axis: int = -1,  # class dimension
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        super().__init__('brier_score_loss', on)
        self.axis = axis

    @override
    def sums(self, pred: Tensor, targ: Tensor) -> tuple[Tensor, Any]:
        scores, targ = flatten_classes(self.name, pred, targ, self.axis)
        p = widen(scores).softmax(1)
        squares = (p * p).sum(1) - 2 * p.gather(1, targ.long()[:, None])[:, 0] + 1
        return squares.sum() / (2 if scores.shape[1] == 2 else 1), targ.numel()

    prepare = sums  # a Learner checks that its targets are classes


class BrierScoreMulti(SumMetric):
    """Mean squared error of the label probabilities.

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

    @override
    def sums(self, pred: Tensor, targ: Tensor) -> Any:
        p, t = map(widen, flatten_pair(self.name, pred, targ))
        if self.sigmoid:
            p = p.sigmoid()
        return (p - t).square().sum(), t.numel()


class Perplexity(AvgLoss):
    "Exponential of the mean loss, for language models trained with cross-entropy."

    _name = 'perplexity'

    @property
    @override
    def value(self) -> float | None:
        mean = super().value
        return None if mean is None else float(torch.tensor(mean, dtype=torch.float64).exp())


perplexity = Perplexity  # the class, so that each Learner makes its own instance
