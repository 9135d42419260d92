# SPDX-License-Identifier: Apache-2.0
"""Callback that lowers the learning rates when a monitored value no longer improves."""

from __future__ import annotations

from numbers import Real

from typing_extensions import override

from learnkit.callbacks.nan_guard import print_line
from learnkit.callbacks.tracking import Comparison, Monitor, PatientTracker, TrackerCallback
from learnkit.core.errors import OptionError
from learnkit.core.time import Time


class ReduceLROnPlateau(PatientTracker):
    """Divide the learning rates by `factor` when the monitored value has not improved for `patience` epochs.

    The other arguments are as in `TrackerCallback`, and `patience` as in `EarlyStoppingCallback`. A
    schedule that sets the rate at every batch overrides this callback, with a warning.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(lr=0., cbs=ReduceLROnPlateau(patience=2, factor=2., min_lr=1e-4))
    >>> with learn.no_bar(): learn.fit(2, lr=0.)
    >>> learn.opt.hypers[-1]['lr']
    0.0
    """

    order = TrackerCallback.order + 2
    sets_lr = True
    factor: float
    min_lr: float

    def __init__(
        self,
        monitor: Monitor = 'valid_loss',
        comp: Comparison | None = None,
        min_delta: float = 0.0,  # least change that counts as an improvement
        patience: int | str | Time = 1,  # epochs without improvement, or a time: '10m', '500ba'
        factor: float = 10.0,  # divisor of the rates
        min_lr: float = 0.0,  # lower bound of the rates
        reset_on_fit: bool = True,  # whether each fit resets `best`
    ) -> None:
        super().__init__(monitor, comp, min_delta, patience, reset_on_fit)
        if not isinstance(factor, Real) or not factor > 1:
            raise OptionError(f'factor={factor!r} divides the rate: pass a number above 1.')
        self.factor = factor
        self.min_lr = min_lr

    @override
    def lose_patience(self) -> None:
        "Lower the rates, and restart the wait."
        opt = self.learn.opt
        before = opt.lrs
        opt.set_hypers(lr=[min(lr, max(lr / self.factor, self.min_lr)) for lr in before])
        self._restart_wait()
        lr = opt.lrs[-1]
        if lr < before[-1]:
            print_line(self, f'Epoch {self.learn.epoch}: reducing lr to {lr:.3g}')
