# SPDX-License-Identifier: Apache-2.0
"""Callbacks that end a fit at a time or at a threshold."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from learnkit.callbacks.nan_guard import print_line
from learnkit.callbacks.recorder import epoch_row, records
from learnkit.callbacks.tracking import (
    Comparison,
    Monitor,
    TrackerCallback,
)
from learnkit.core.errors import CancelFitException
from learnkit.core.time import Time, as_time
from learnkit.core.watched import is_better
from learnkit.engine.counters import check_countable
from learnkit.engine.stopper import Stopper
from learnkit.metrics.direction import as_comparison


class FixedStopper(Stopper):
    """Stop after a total training time: `FixedStopper('20ep')`, `'1h'`, `'5000ba'`, `'0.5dur'`.

    The time is `learn.time`, over all fits and resumes. A fit that starts at or after the time
    trains nothing. A fit that reaches the time ends after that batch (that epoch for `ep`, that
    iteration for `iter`) with all its events and its last evaluation.

    Raises `TimeError` for an invalid time, and before training for a unit that the fit does not
    count.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(n_train=10, cbs=FixedStopper('25ba'))
    >>> with learn.no_bar(): learn.fit(2); learn.fit(5)
    >>> learn.time.ba, len(learn.history)
    (25, 3)
    """

    order = 63
    run_valid = False
    remove_on_find = True
    run_in = 'fit'
    at: Time

    def __init__(
        self,
        at: str | int | Time,  # time to stop at; an int counts epochs
    ) -> None:
        self.at = as_time(at, 'ep')

    def before_fit(self) -> None:
        "Cancel a fit that starts at or after the time."
        self.has_stopped = False
        check_countable(self.learn, self.at)
        if self.learn.resumed or not self.is_over():
            return  # a resumed fit has not loaded its time yet
        print_line(self, f'FixedStopper: {self.at} are over, and nothing is trained.')
        raise CancelFitException

    def after_batch(self) -> None:
        "Check the time."
        if self.is_over():
            self.has_stopped = True
            self.learn.run.stop(type(self).__name__)

    after_epoch = after_iteration = after_batch

    @override
    def is_over(self) -> bool:
        "Return True once the time has passed."
        return self.learn.time >= self.at

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return whether this callback has ended the fit."
        return {'stopped': self.has_stopped}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self.has_stopped = sd['stopped']


class ThresholdStopper(TrackerCallback, Stopper):
    """Stop the fit once a metric passes a threshold: `ThresholdStopper('accuracy', 0.97)`.

    The value is checked after every evaluation, also within an epoch, and at the end of each epoch
    for values known only then. The last value is in `value`. For one of several loaders, include
    its name: `ThresholdStopper('night/accuracy', 0.9)`. A value equal to the threshold does not
    stop the fit, nor does NaN.

    Raises `OptionError` for a metric without a known direction; `MetricError` before training for
    an unknown column. Checkpointed: `value`, and the state of the tracker.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(lr=0.02, cbs=ThresholdStopper('valid_loss', 1.))
    >>> with learn.no_bar(), learn.no_logging(): learn.fit(100)
    >>> len(learn.history) < 20, learn.threshold_stopper.value < 1.
    (True, True)
    """

    order = TrackerCallback.order + 3
    threshold: float
    value: float | None

    def __init__(
        self,
        monitor: Monitor,  # column of the history, or function of the learner
        threshold: float,  # value to stop at
        comp: Comparison | None = None,  # f(value, limit), 'less', 'greater', `MetricProperties`
    ) -> None:
        name = monitor if isinstance(monitor, str) else getattr(monitor, '__name__', '')
        super().__init__(monitor, as_comparison(comp, name))
        self.threshold = threshold
        self.value = None

    @override
    def before_fit(self) -> None:
        super().before_fit()
        self.has_stopped = False

    @override
    def is_over(self) -> bool:
        "Return True if the last value has passed the threshold."
        return is_better(self.value, self.threshold, self.comp)

    def after_eval(self) -> None:
        "Check the values of the evaluation."
        if callable(self.monitor):
            return
        self._check(records(self).measured.get(self.monitor))

    @override
    def after_epoch(self) -> None:
        "Check the row of the epoch."
        if self.learn.run.stopping:
            return
        row = epoch_row(self)
        if row is not None:
            self._check(self._get_value(row))

    def _check(self, measured: Any) -> None:
        value = self._as_number(measured)
        if value is None:
            return
        self.value = value
        self._compare(value)
        if not self.is_over():
            return
        self.has_stopped = True
        name = self.monitor if isinstance(self.monitor, str) else 'The monitored value'
        print_line(self, f'{name} is {value:.6g}, past {self.threshold:g}: stopping')
        self.learn.stop()

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the last value."
        return {**super().state_dict(), 'value': self.value, 'stopped': self.has_stopped}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the last value."
        super().load_state_dict(sd)
        self.value = sd['value']
        self.has_stopped = sd['stopped']
