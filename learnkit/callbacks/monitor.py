"""What all monitors have in common: they look every so often, measure, log what they saw and change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from learnkit.core.errors import OptionError, TimeError, did_you_mean
from learnkit.core.time import Time, Timestamp, as_time, crossings
from learnkit.engine.callback import Callback
from learnkit.engine.countable import check_countable

__all__ = ['Monitor']

_BEGIN = Timestamp(dur=0.0)
SECONDS_IN = {'seconds': 1, 'minutes': 60, 'hours': 3600, 'days': 86400}


class Monitor(Callback):
    """Look at the run every so often and log what `measure` returns; by itself it measures nothing.

    A subclass defines `measure`, which returns numbers by name, and tells in `metric_names` what they mean. They go to
    `learn.log`: each becomes a column of the history, averaged over the looks of the epoch, and reaches every logger;
    the printed table stays as it is. Of names that begin with one of `latest`, the last value of the epoch counts.
    A subclass whose numbers tell of the machine, and so differ from run to run, says `of_machine = True`: then they do
    not count where two runs are compared (`learn.check_resume`, `learnkit.checkpoint.digest`).
    It looks after the training batch that completes a multiple of `every`, counted from the Learner's start; with
    epochs, when the training of an epoch is over, so that the values stand in the row of that epoch.

    Raises `TimeError` for an interval that is none, or in iterations. Checkpointed: how many intervals have passed.

    >>> from learnkit.testing import synth_learner
    >>> class Slope(Monitor):
    ...     metric_names = {'slope': 'the weight `a` of the model'}
    ...     def measure(self): return {'slope': self.learn.model.a.detach()}
    >>> learn = synth_learner(cbs=Slope(every='5ba'))
    >>> with learn.no_bar(): learn.fit(1)
    >>> 'slope' in learn.history[0]
    True
    """

    order, observer, run_valid, remove_on_find, remove_on_fetch = 100, True, False, True, True
    metric_names: ClassVar[Mapping[str, str]] = {}  # logged name: meaning; {...} stands for a name
    latest: ClassVar[tuple[str, ...]] = ()  # prefixes of names that are not averaged: peaks, totals
    of_machine: ClassVar[bool] = False  # what is logged differs from run to run
    _passed = 0  # intervals that were over at the last look

    def __init__(
        self,
        every: int | str | Time = '10ba',  # from one look to the next; a plain number: batches
    ) -> None:
        super().__init__()
        self.every = as_time(every, 'ba')
        if self.every.unit == 'iter':
            raise TimeError(
                f'every={str(every)!r}: monitors look while an epoch is trained. Give a number of epochs, '
                "such as '2ep', or another unit."
            )

    def measure(self) -> Mapping[str, Any]:
        "Return what there is to log now: numbers, or tensors of one element, by name."
        return {}

    def look(self) -> None:
        "Measure, and log it."
        for name, value in self.measure().items():
            self.learn.log(
                name, value, weight=None if name.startswith(self.latest) else 1, shown=False
            )

    def before_fit(self) -> None:
        "Count intervals from where the Learner is."
        if not self.learn.fitting:
            return
        check_countable(self.learn, self.every)
        self._passed = self._intervals()

    def after_batch(self) -> None:
        "Look, when it is due."
        if self.every.unit != 'ep' and self._is_due():
            self.look()

    def after_train(self) -> None:
        "Look, when so many epochs are over."
        if self.every.unit == 'ep' and self._is_due(ahead=1):
            self.look()  # this one is counted a moment later

    def _is_due(self, ahead: int = 0) -> bool:
        "Tell, once, that an interval is over, or will be when `ahead` more units are."
        before, self._passed = self._passed, self._intervals(ahead)
        return self._passed > before

    def _intervals(self, ahead: int = 0) -> int:
        "Return how many intervals are over since the Learner began."
        every, counters = self.every, self.learn.counters
        if every.unit in ('ba', 'ep'):  # cheap, as it is asked at every batch
            done = counters.batches if every.unit == 'ba' else counters.epochs
            return int((done + ahead) // every.value)
        now = self.learn.time
        return crossings(_BEGIN, now.replace(st=now.st + ahead) if ahead else now, every)

    def state_dict(self) -> dict[str, Any]:
        "Return how many intervals have passed."
        return {'passed': self._passed}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Go on from there."
        self._passed = sd['passed']


def check_count(name: str, value: object, least: int = 1) -> int:
    "Return a whole number; raise `OptionError` for anything else, and below `least`."
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise OptionError(f'{name}={value!r}: give a whole number, {least} or more.')


def seconds_in(time_unit: str) -> int:
    "Return the seconds in a unit of time; raise `OptionError` where there is none."
    if isinstance(time_unit, str) and time_unit in SECONDS_IN:
        return SECONDS_IN[time_unit]
    raise OptionError(
        f'time_unit={time_unit!r}: give one of {", ".join(SECONDS_IN)}.'
        f'{did_you_mean(str(time_unit), SECONDS_IN)}'
    )


def world_size() -> int:
    "Return how many processes train together."
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1
