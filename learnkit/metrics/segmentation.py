"""Metrics of segmentation: predictions (B, C, H, W) with the classes along `axis`, targets (B, H, W) of class numbers.

Pixels are counted over the whole set, so that no value depends on how it was cut into batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from learnkit.core.errors import MetricError
from learnkit.core.validation import check_choice
from learnkit.metrics.averages import SumMetric, paired, whole_set_metric

__all__ = [
    'foreground_acc',
    'ForegroundAcc',
    'Dice',
    'DiceMulti',
    'JaccardCoeff',
    'JaccardCoeffMulti',
]


class ForegroundAcc(SumMetric):
    "The accuracy of all pixels of the set that are not background: what `foreground_acc` is as a metric."

    def __init__(
        self,
        bkg_idx: int = 0,  # the class of the background
        axis: int = 1,  # where the classes are
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        super().__init__('foreground_acc', on)
        self.bkg_idx, self.axis = bkg_idx, axis

    def sums(self, pred: Tensor, targ: Tensor) -> Any:
        check_choice('foreground_acc', pred, self.axis)
        best, targ = paired('foreground_acc', pred.argmax(dim=self.axis), targ)
        mask = targ != self.bkg_idx
        return ((best == targ) & mask).sum(), mask.sum()

    def final(self, sums: Tensor) -> float:
        return float(sums[0] / sums[1])


@whole_set_metric(ForegroundAcc)
def foreground_acc(
    pred: Tensor,  # scores, classes along `axis`
    targ: Tensor,  # class numbers, (B, H, W) or (B, 1, H, W)
    bkg_idx: int = 0,  # the class of the background
    axis: int = 1,  # where the classes are
) -> Tensor:
    """Return the accuracy of the pixels that are not background; NaN without any.

    >>> foreground_acc(torch.tensor([[[.9, .1, .1], [.1, .9, .9]]]), torch.tensor([[0, 1, 1]]))
    tensor(1.)
    """
    right, n = ForegroundAcc(bkg_idx, axis).sums(pred, targ)
    return right / n


class Dice(SumMetric):
    """The overlap of predicted and target mask, `2*|P & T|/(|P| + |T|)` for class 1 of 2; None when both are empty.

    Predictions have the two classes' scores along `axis`. Raises `MetricError` for another number of classes.

    >>> Dice()(torch.tensor([[[.9, .1, .1], [.1, .9, .9]]]), torch.tensor([[1, 1, 1]]))
    0.8
    """

    def __init__(
        self,
        axis: int = 1,  # where the classes are
        on: str | None = None,  # 'train', 'valid' or 'both'
    ) -> None:
        super().__init__(on=on)
        self.axis = axis

    def sums(self, pred: Tensor, targ: Tensor) -> Any:
        check_choice(self.name, pred, self.axis)
        if (n := pred.shape[self.axis]) != 2:
            raise MetricError(
                f'{type(self).__name__} is of two classes, but predictions {list(pred.shape)} have {n} '
                f'along axis {self.axis}: use {type(self).__name__}Multi, or another `axis`.'
            )
        p, t = (o == 1 for o in paired(self.name, pred.argmax(dim=self.axis), targ))
        return (p & t).sum(), p.sum() + t.sum()

    def final(self, sums: Tensor) -> Any:
        both, total = sums.tolist()
        return 2 * both / total if total else None


class JaccardCoeff(Dice):
    """The intersection over union, `|P & T|/|P | T|`, for class 1 of 2; None when both are empty.

    >>> JaccardCoeff()(torch.tensor([[[.9, .1, .1, .1], [.1, .9, .9, .9]]]), torch.tensor([[1, 1, 1, 1]]))
    0.75
    """

    def final(self, sums: Tensor) -> Any:
        both, total = sums.tolist()
        return both / (total - both) if total else None


class DiceMulti(Dice):
    """The mean of the classes' `Dice`, of those that occur in the set as a prediction or a target; NaN without any.

    >>> DiceMulti()(torch.eye(3).expand(1, 3, 3), torch.tensor([[0, 1, 1]]))
    0.5555555555555555
    """

    def sums(self, pred: Tensor, targ: Tensor) -> Any:
        check_choice(self.name, pred, self.axis)
        best, targ = paired(self.name, pred.argmax(dim=self.axis), targ)
        classes = torch.arange(pred.shape[self.axis], device=pred.device)[:, None]
        p, t = best == classes, targ == classes
        return torch.stack([(p & t).sum(1), p.sum(1) + t.sum(1)])

    def final(self, sums: Tensor) -> float:
        both, total = sums
        return float((2 * both / total)[total > 0].mean())


class JaccardCoeffMulti(DiceMulti):
    """The mean of the classes' `JaccardCoeff` (mean IoU), of those that occur in the set; NaN without any.

    >>> JaccardCoeffMulti()(torch.eye(3).expand(1, 3, 3), torch.tensor([[0, 1, 1]]))
    0.5
    """

    def final(self, sums: Tensor) -> float:
        both, total = sums
        return float((both / (total - both))[total > 0].mean())
