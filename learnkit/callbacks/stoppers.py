"""Callbacks that end a fit: at a time, or once a metric is good enough. Early stopping is here by its other names."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from learnkit.callbacks.nan_guard import say
from learnkit.callbacks.tracking import (
    Comparison,
    EarlyStoppingCallback,
    Monitor,
    TrackerCallback,
    check_counted,
)
from learnkit.core.errors import CancelFitException, OptionError
from learnkit.core.time import Time, as_time
from learnkit.engine.callback import Callback
from learnkit.metrics.direction import as_comparison

__all__ = ['EarlyStopper', 'EarlyStopping', 'FixedStopper', 'ThresholdStopper']

EarlyStopping = EarlyStopper = EarlyStoppingCallback  # what Composer, ksuit and others call it


class FixedStopper(Callback):
    """Stop when the Learner has trained for so long in all: `FixedStopper('20ep')`, `'1h'`, `'5000ba'`, `'0.5dur'`.

    The time is that of `learn.time`, over all fits and resumes. A fit that starts at or after it trains nothing; one
    that reaches it ends after that batch (that epoch for `ep`, that iteration for `iter`) with all its events and its
    last evaluation.

    Raises `TimeError` for what is no time, and before training for a unit that the fit does not count.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(n_train=10, cbs=FixedStopper('25ba'))
    >>> with learn.no_bar(): learn.fit(2); learn.fit(5)
    >>> learn.time.ba, len(learn.history)
    (25, 3)
    """

    order, run_valid, remove_on_find = 63, False, True
    at: Time

    def __init__(
        self,
        at: str | int | Time,  # when; a plain number counts epochs
    ) -> None:
        self.at = as_time(at, 'ep')

    def before_fit(self) -> None:
        "Leave out a fit for which there is no time."
        if not self.learn.fitting:
            return
        check_counted(self.learn, self.at, 'at')
        if self.learn.resumed or not self._is_over():
            return  # the time is still to be put in place
        say(self, f'FixedStopper: {self.at} are over, and nothing is trained.')
        raise CancelFitException

    def after_batch(self) -> None:
        "Look at the time."
        if self.at.unit not in ('ep', 'iter') and self._is_over():
            self.learn.run.stopping = True

    def after_train(self) -> None:
        "Look at the epochs and iterations with this one, so that its evaluation is known to be the last."
        learn, now = self.learn, self.learn.time
        if self.at.unit not in ('ep', 'iter'):
            return
        if now.replace(ep=now.ep + 1, iter=now.iter + learn.ends_iteration()) >= self.at:
            learn.run.stopping = True

    def after_epoch(self) -> None:
        "Look at the epochs, also after one that was cancelled in training."
        if self.at.unit == 'ep' and self.learn.fitting and self._is_over():
            self.learn.run.stopping = True

    def after_iteration(self) -> None:
        "Look at the iterations."
        if self.at.unit == 'iter' and self._is_over():
            self.learn.run.stopping = True

    def _is_over(self) -> bool:
        return self.learn.time >= self.at


class ThresholdStopper(TrackerCallback):
    """Stop the fit once a metric passes a threshold: `ThresholdStopper('accuracy', 0.97)`.

    It looks after every evaluation, also in the middle of an epoch, and at the end of each epoch for what is known only
    then; what the value was is left in `value`. Of several loaders, one is named: `ThresholdStopper('night/accuracy',
    0.9)`. Equal is not past, and NaN is past nothing.

    Raises `OptionError` for a threshold that is no number and for a metric of which is not known which way is better;
    `MetricError` before training when there is no such column. Checkpointed: `value`, and what a tracker has.

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
        monitor: Monitor,  # a column of the history, or a function of the learner
        threshold: float,  # where to stop
        comp: Comparison | None = None,  # f(value, limit), 'less', 'greater', `MetricProperties`
    ) -> None:
        if not isinstance(threshold, Real) or isinstance(threshold, bool) or math.isnan(threshold):
            raise OptionError(f'threshold={threshold!r}: give a number.')
        name = monitor if isinstance(monitor, str) else getattr(monitor, '__name__', '')
        super().__init__(monitor, as_comparison(comp, name))
        self.threshold, self.value = threshold, None

    def after_eval(self) -> None:
        "Look at what was measured."
        if not self.learn.fitting or callable(self.monitor):
            return
        self._look(self._records().measured.get(self.monitor))

    def after_epoch(self) -> None:
        "Look at the epoch's row."
        if not self.learn.fitting or self.learn.run.stopping or (row := self._row()) is None:
            return
        self._look(self.monitor(self.learn) if callable(self.monitor) else self._measured(row))

    def _look(self, measured: Any) -> None:
        if (value := self._number(measured)) is None:
            return
        self.value = value
        self.new_best = bool(self.comp(value, self.best))
        if self.new_best:
            self.best = value
        if not self.comp(value, self.threshold):
            return
        name = self.monitor if isinstance(self.monitor, str) else 'The monitored value'
        say(self, f'{name} is {value:.6g}, past {self.threshold:g}: stopping')
        self.learn.stop()

    def state_dict(self) -> dict[str, Any]:
        "Return the last value."
        return {**super().state_dict(), 'value': self.value}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Go on from the last value."
        super().load_state_dict(sd)
        self.value = sd['value']
