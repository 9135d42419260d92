# SPDX-License-Identifier: Apache-2.0
"""Shapes of predictions and targets of classes and labels."""

from __future__ import annotations

import torch
from torch import Tensor

from learnkit.core.errors import MetricError
from learnkit.core.validation import check_choice
from learnkit.metrics.base import flatten_pair

Prepared = tuple[Tensor, Tensor, int]  # predictions, targets, number of classes or labels


def flatten_classes(
    name: str,  # name of the metric, for the message
    pred: Tensor,  # scores, with the classes along `axis`
    targ: Tensor,  # class numbers, one for each prediction
    axis: int,  # dimension of the classes
) -> tuple[Tensor, Tensor]:
    """Reshape to scores (N, C) and targets (N,). Raises `MetricError` unless there is one target per prediction.

    >>> [list(t.shape) for t in flatten_classes('m', torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4), axis=1)]
    [[32, 3], [32]]
    """
    check_choice(name, pred, axis)
    scores = pred.movedim(axis, -1)
    _, targ = flatten_pair(name, scores[..., 0], targ)
    return scores.reshape(-1, scores.shape[-1]), targ


def check_two_classes(name: str, pred: Tensor, axis: int, instead: str) -> None:
    "Raise `MetricError` unless there are two classes."
    if pred.shape[axis] == 2:
        return
    raise MetricError(
        f'{name} is of two classes, but predictions {list(pred.shape)} have {pred.shape[axis]} along axis {axis}: use '
        f'{instead}.'
    )


def argmax_preds(name: str, axis: int, instead: str | None, pred: Tensor, targ: Tensor) -> Prepared:
    "Return the class with the highest score of each prediction; unless `instead` is None, require two classes."
    check_choice(name, pred, axis)
    if instead is not None:
        check_two_classes(name, pred, axis, instead)
    best, targ = flatten_pair(name, pred.argmax(dim=axis), targ)
    return best, targ, pred.shape[axis]


def flatten_labels(name: str, sigmoid: bool, pred: Tensor, targ: Tensor) -> Prepared:
    "Reshape predictions and targets to (N, L) for L labels; with `sigmoid`, apply the sigmoid."
    if pred.dim() < 2 or pred.shape[1] == 1:
        pred, targ = (t[:, None] for t in flatten_pair(name, pred, targ))
    if pred.shape != targ.shape:
        raise MetricError(
            f'{name}: {tuple(pred.shape)} labels do not fit targets of shape {tuple(targ.shape)}: pass 0 or 1 for each.'
        )
    n = pred.shape[1]
    pred, targ = (t.movedim(1, -1).reshape(-1, n) for t in (pred, targ))
    # of half precision in single precision
    pred = pred.to(torch.promote_types(pred.dtype, torch.float32))
    return pred.sigmoid() if sigmoid else pred, targ.long(), n


def mark_unknown(
    targ: Tensor,  # class numbers
    n: int,  # number of classes
) -> Tensor:
    """Replace targets outside of the classes by -1.

    >>> mark_unknown(torch.tensor([0, 2, -100, 255]), 3)
    tensor([ 0,  2, -1, -1])
    """
    return torch.where((targ >= 0) & (targ < n), targ, -1)
