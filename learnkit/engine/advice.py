# SPDX-License-Identifier: Apache-2.0
"""Checks of the first batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from learnkit.core.validation import check_class_scores, check_pairing, warn_of_order
from learnkit.engine.loss_weights import check_is_mean

if TYPE_CHECKING:
    from learnkit.learner import Learner


class Advice:
    "Checks of predictions, targets and the loss function at the first loss of each pass."

    def __init__(self) -> None:
        self.is_watching = False  # True until the first loss of a pass is checked
        self._has_checked_loss = True  # False until a fit has checked the loss function
        self._checked: list[Any] | None = None  # loss function and sample shapes of the last check
        self.has_checked_size = False  # whether a warning about the number of samples was issued

    def begin_fit(self) -> None:
        "Check the loss function at the first loss of this fit."
        self._has_checked_loss = False
        self._checked = None

    def check_loss(self, learn: Learner, pred: Any) -> None:
        "Check the shapes at the first loss of a pass, and the loss function at the first loss of a fit."
        # a single prediction fits any shape, so that the next loss is checked too
        has_checked = not isinstance(pred, Tensor) or pred.numel() > 1
        shapes = [t.shape[1:] for t in (pred, *learn.yb) if isinstance(t, Tensor)]
        pairing = [id(learn.loss_func), *shapes]
        if pairing != self._checked:
            check_pairing(learn.loss_func, pred, learn.yb)
            self._checked = pairing if has_checked else None
        self.is_watching = not has_checked
        if self._has_checked_loss:
            return
        self._has_checked_loss = True
        check_class_scores(learn.loss_func, pred, learn.yb)
        warn_of_order(learn.loss_func)
        if learn.training and (learn.microbatch or learn.world.size > 1):
            check_is_mean(learn, pred)
