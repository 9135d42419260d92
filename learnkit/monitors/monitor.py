# SPDX-License-Identifier: Apache-2.0
"""Base class of monitors: measure at an interval and log the values, without changing the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from learnkit.core.time import Time
from learnkit.engine.callback import IntervalCallback


class Monitor(IntervalCallback):
    """Log the values of `measure` at an interval; the base class measures nothing.

    A subclass defines `measure`, which returns numbers by name, and describes the names in
    `metric_names`. The numbers are passed to `learn.log`: each becomes a column of the history,
    averaged over the measurements of the epoch, and reaches every logger; the printed table does
    not change. For names that begin with an entry of `latest`, the last value of the epoch counts.

    A subclass sets `machine_dependent = True` if its numbers differ from machine to machine and
    from run to run: they are then left out of comparisons of runs (`learn.check_resume`,
    `learnkit.checkpoint.compare`).

    The monitor measures after the training batch that completes a multiple of `every`, counted from
    the Learner's start; for epochs, after the training of an epoch, so that the values are in the
    row of that epoch.

    Raises `TimeError` for an invalid interval. Checkpointed: the number of intervals passed.

    >>> from learnkit.testing import synth_learner
    >>> class Slope(Monitor):
    ...     metric_names = {'slope': 'the weight `a` of the model'}
    ...     def measure(self): return {'slope': self.learn.model.a.detach()}
    >>> learn = synth_learner(cbs=Slope(every='5ba'))
    >>> with learn.no_bar(): learn.fit(1)
    >>> 'slope' in learn.history[0]
    True
    """

    order = 100
    observer = True
    remove_on_find = True
    remove_on_fetch = True
    metric_names: ClassVar[Mapping[str, str]] = {}  # meanings by name; {...} is a placeholder
    latest: ClassVar[tuple[str, ...]] = ()  # prefixes of names that are not averaged: peaks, totals

    def __init__(
        self,
        every: int | str | Time = '10ba',  # interval of measurements; an int counts batches
    ) -> None:
        super().__init__(every, 'ba')

    def measure(self) -> Mapping[str, Any]:
        "Return the values to log, numbers or tensors of one element, by name."
        return {}

    def look(self) -> None:
        "Measure, and log the values."
        for name, value in self.measure().items():
            weight = None if name.startswith(self.latest) else 1
            self.learn.log(name, value, weight=weight, shown=False)

    def after_batch(self) -> None:
        "Measure if due."
        if self.every.unit != 'ep' and self._interval.is_due(self.learn):
            self.look()

    def after_train(self) -> None:
        "Measure if due, for intervals in epochs."
        if self.every.unit == 'ep' and self._interval.is_due(self.learn, ahead=1):
            self.look()  # the epoch is counted after this event
