# SPDX-License-Identifier: Apache-2.0
"""Metrics of segmentation: predictions (B, C, H, W) with classes along `axis`, targets (B, H, W) of class numbers.

Pixels are counted over the whole data set, so that values do not depend on the batch size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from learnkit.core.denominator import IGNORED
from learnkit.core.validation import check_choice
from learnkit.metrics.averages import SumMetric, whole_set_metric
from learnkit.metrics.base import flatten_pair
from learnkit.metrics.shapes import argmax_preds


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


class _PixelScore(SumMetric):
    "Base class of scores of pixels, from their counts."

    is_dice = True
    instead: str | None = None

    def __init__(
        self,
        axis: int = 1,  # class dimension
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        super().__init__(None, on)
        self.axis = axis

    @override
    def sums(self, pred: Tensor, targ: Tensor) -> Tensor:
        """Return the correct predictions, predictions and targets of each class, shape (3, C).

        Predictions for targets of -100 do not count. Other targets outside of the classes match nothing."""
        best, targ, n = argmax_preds(type(self).__name__, self.axis, self.instead, pred, targ)
        best = torch.where(targ == IGNORED, n, best)
        targ = torch.where((targ >= 0) & (targ < n), targ, n).long()
        rows = torch.stack([torch.where(best == targ, targ, n), best, targ])
        # unlike `bincount`, without waiting for a device
        return rows.new_zeros(3, n + 1).scatter_add_(1, rows, torch.ones_like(rows))[:, :n]

    prepare = sums  # a Learner checks that its targets are classes

    @override
    def final(self, sums: Tensor) -> float | None:
        return float(self.score_classes(sums).nanmean())

    def score_classes(self, sums: Tensor) -> Tensor:
        "Return the score of each class; NaN if it does not occur."
        hits, preds, targs = sums
        return 2 * hits / (preds + targs) if self.is_dice else hits / (preds + targs - hits)


class Dice(_PixelScore):
    """Dice coefficient of predicted and target mask, `2*|P & T|/(|P| + |T|)` of class 1 of 2; None if both are empty.

    Predictions have the scores of both classes along `axis`; pixels of -100 do not count. Raises `MetricError` for
    another number of classes.

    >>> Dice()(torch.tensor([[[.9, .1, .1], [.1, .9, .9]]]), torch.tensor([[1, 1, 1]]))
    0.8
    """

    instead = 'DiceMulti, or another `axis`'

    @override
    def final(self, sums: Tensor) -> float | None:
        return float(self.score_classes(sums)[1]) if sums[1:, 1].any() else None


class JaccardCoeff(Dice):
    """Intersection over union, `|P & T|/|P | T|`, of class 1 of 2; None if both are empty.

    >>> JaccardCoeff()(torch.tensor([[[.9, .1, .1, .1], [.1, .9, .9, .9]]]), torch.tensor([[1, 1, 1, 1]]))
    0.75
    """

    is_dice = False
    instead = 'JaccardCoeffMulti, or another `axis`'


class DiceMulti(_PixelScore):
    """Mean `Dice` over classes that occur in predictions or targets of the data set; NaN without such a class.

    >>> DiceMulti()(torch.eye(3).expand(1, 3, 3), torch.tensor([[0, 1, 1]]))
    0.5555555555555555
    """


class JaccardCoeffMulti(_PixelScore):
    """Mean `JaccardCoeff` (mean IoU) over classes that occur in the data set; NaN without such a class.

    >>> JaccardCoeffMulti()(torch.eye(3).expand(1, 3, 3), torch.tensor([[0, 1, 1]]))
    0.5
    """

    is_dice = False
