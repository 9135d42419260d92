# SPDX-License-Identifier: Apache-2.0
"""Callback that stops a fit when a monitored value no longer improves."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from learnkit.callbacks.nan_guard import print_line
from learnkit.callbacks.tracking import PatientTracker, TrackerCallback
from learnkit.engine.stopper import Stopper


class EarlyStoppingCallback(PatientTracker, Stopper):
    """Stop the fit when the monitored value has not improved for `patience` epochs.

    The other arguments are as in `TrackerCallback`. The epoch ends as usual, with its checkpoints.

    `patience` as a number is fastai's: 2 stops at the second epoch in a row without improvement;
    epochs without a value do not count. As a string or `Time` it is Composer's: '2ep' stops when more
    than 2 epochs have passed, at the third, or at the next epoch with a value. A fit that has stopped
    and is resumed with more patience continues.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(lr=0., cbs=EarlyStoppingCallback(patience=2))
    >>> with learn.no_bar(): learn.fit(10)
    >>> len(learn.history)
    3
    """

    order = TrackerCallback.order + 3

    @override
    def before_fit(self) -> None:
        super().before_fit()
        self.has_stopped = False

    @override
    def is_over(self) -> bool:
        "Return True if the value has not improved for longer than `patience`."
        return self.has_lost_patience()

    @override
    def lose_patience(self) -> None:
        "Stop the fit."
        epoch = self.learn.epoch - (self.learn.time.ep - self._since.ep)
        since = f'since epoch {epoch}' if epoch >= 0 else 'in any epoch'
        print_line(self, f'No improvement {since}: early stopping')
        self.has_stopped = True
        self.learn.stop()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), 'stopped': self.has_stopped}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        super().load_state_dict(sd)
        self.has_stopped = sd['stopped']


EarlyStopping = EarlyStopper = EarlyStoppingCallback  # names in Composer, ksuit and others
