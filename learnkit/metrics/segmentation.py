"""Metrics of segmentation: predictions (B, C, H, W) with classes along `axis`, targets (B, H, W) of class numbers.

Pixels are counted over the whole data set, so that values do not depend on the batch size."""

from __future__ import annotations

from typing import Any

import torch  # noqa: F401  # the examples use it
from torch import Tensor
from typing_extensions import override

from learnkit.core.validation import check_choice
from learnkit.engine.denominator import IGNORED
from learnkit.metrics.averages import SumMetric, whole_set_metric
from learnkit.metrics.base import flatten_pair
from learnkit.metrics.counts import ClassCounts

__all__ = [
    'foreground_acc',
    'ForegroundAcc',
    'Dice',
    'DiceMulti',
    'JaccardCoeff',
    'JaccardCoeffMulti',
]


class ForegroundAcc(SumMetric):
    "Accuracy of all foreground pixels of the data set, the metric of `foreground_acc`; pixels of -100 do not count."

    def __init__(
        self,
        bkg_idx: int = 0,  # background class
        axis: int = 1,  # class dimension
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        super().__init__('foreground_acc', on)
        self.bkg_idx = bkg_idx
        self.axis = axis

    @override
    def sums(self, pred: Tensor, targ: Tensor) -> Any:
        check_choice('foreground_acc', pred, self.axis)
        best, targ = flatten_pair('foreground_acc', pred.argmax(dim=self.axis), targ)
        mask = (targ != self.bkg_idx) & (targ != IGNORED)
        return ((best == targ) & mask).sum(), mask.sum()

    @override
    def final(self, sums: Tensor) -> float:
        return float(sums[0] / sums[1])


@whole_set_metric(ForegroundAcc)
def foreground_acc(
    pred: Tensor,  # scores, classes along `axis`
    targ: Tensor,  # class numbers, (B, H, W) or (B, 1, H, W)
    bkg_idx: int = 0,  # background class
    axis: int = 1,  # class dimension
) -> Tensor:
    """Return the accuracy of the foreground pixels; NaN without foreground.

    >>> foreground_acc(torch.tensor([[[.9, .1, .1], [.1, .9, .9]]]), torch.tensor([[0, 1, 1]]))
    tensor(1.)
    """
    right, n = ForegroundAcc(bkg_idx, axis).sums(pred, targ)
    return right / n


class _PixelScore(ClassCounts):
    "Base class of scores of pixels; targets that are no class match nothing."

    needs_known = False
    classes = 'macro'  # the average over classes

    def __init__(
        self,
        axis: int = 1,  # class dimension
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        super().__init__(axis, average=self.classes, on=on)
        self._name = None  # the name of the class


class Dice(_PixelScore):
    """Dice coefficient of predicted and target mask, `2*|P & T|/(|P| + |T|)` of class 1 of 2; None if both are empty.

    Predictions have the scores of both classes along `axis`; pixels of -100 do not count. Raises `MetricError` for
    another number of classes.

    >>> Dice()(torch.tensor([[[.9, .1, .1], [.1, .9, .9]]]), torch.tensor([[1, 1, 1]]))
    0.8
    """

    kind = 'f1_score'
    classes = 'binary'
    instead = '{}Multi, or another `axis`'

    @override
    def final(self, sums: Tensor) -> Any:
        return super().final(sums) if sums[1:, 1].any() else None


class JaccardCoeff(Dice):
    """Intersection over union, `|P & T|/|P | T|`, of class 1 of 2; None if both are empty.

    >>> JaccardCoeff()(torch.tensor([[[.9, .1, .1, .1], [.1, .9, .9, .9]]]), torch.tensor([[1, 1, 1, 1]]))
    0.75
    """

    kind = 'jaccard_score'


class DiceMulti(_PixelScore):
    """Mean `Dice` over classes that occur in predictions or targets of the data set; NaN without such a class.

    >>> DiceMulti()(torch.eye(3).expand(1, 3, 3), torch.tensor([[0, 1, 1]]))
    0.5555555555555555
    """

    kind = 'f1_score'


class JaccardCoeffMulti(_PixelScore):
    """Mean `JaccardCoeff` (mean IoU) over classes that occur in the data set; NaN without such a class.

    >>> JaccardCoeffMulti()(torch.eye(3).expand(1, 3, 3), torch.tensor([[0, 1, 1]]))
    0.5
    """

    kind = 'jaccard_score'
