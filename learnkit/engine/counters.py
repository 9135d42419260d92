# SPDX-License-Identifier: Apache-2.0
"""Counters of a Learner's training over all its fits, and intervals in their units: `Counters`, `Every`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from learnkit.core.batch import count_samples
from learnkit.core.errors import BatchError
from learnkit.core.time import Time, count_multiples

if TYPE_CHECKING:
    from learnkit.learner import Learner

# attributes of `Counters` by the units of `Time`
COUNTER_OF_UNIT = {
    'iter': 'iterations',
    'ep': 'epochs',
    'ba': 'batches',
    'st': 'steps',
    'sp': 'samples',
    'tok': 'tokens',
}


@dataclass
class Counters:
    """Numbers of epochs, batches, steps, samples and tokens finished over all fits of a Learner.

    `learn.time` is an immutable copy of the counters, with the optimizer's steps and the seconds of
    the running fit added. Checkpointed.

    >>> from learnkit.testing import synth_learner
    >>> with synth_learner(n_train=10).no_bar() as learn: learn.fit(2)
    >>> learn.parts.counters.epochs, learn.parts.counters.batches, learn.parts.counters.samples
    (2, 20, 320)
    """

    iterations: int = 0
    epochs: int = 0
    batches: int = 0
    steps: int = 0  # steps of replaced optimizers; the current optimizer counts its own
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0  # seconds spent in completed fits
    fit_began: float | None = None  # start of the running fit by `perf_counter`
    has_trained: bool = False  # the training of the epoch has begun; a skipped epoch does not count
    needed: list[Time] = field(default_factory=list)  # amounts of the fit in samples or tokens

    def count_epoch(self) -> None:
        "Count an epoch, if its training has begun."
        self.epochs += self.has_trained
        self.has_trained = False

    def elapsed(self) -> float:
        "Return the seconds spent in fits, including the running fit, by this process's clock."
        running = 0.0 if self.fit_began is None else perf_counter() - self.fit_began
        return self.seconds + running

    def by_unit(self) -> dict[str, int]:
        "Return the counters by the units of `Time`, for checkpoints."
        return {unit: getattr(self, name) for unit, name in COUNTER_OF_UNIT.items()}

    def load_units(self, numbers: Mapping[str, int]) -> None:
        "Restore the counters that `by_unit` returned."
        for unit, name in COUNTER_OF_UNIT.items():
            setattr(self, name, numbers[unit])


class Every:
    """Interval that is due each time a Learner's time reaches a multiple of the interval.

    Multiples are counted from the Learner's start, not from the start of a fit; in `dur`, from the start of the fit.

    >>> from learnkit.testing import synth_learner
    >>> learn, every = synth_learner(n_train=10), Every(Time('5ba'))
    >>> with learn.no_bar(): learn.fit(1)
    >>> every.is_due(learn), every.is_due(learn)
    (True, False)
    """

    def __init__(
        self,
        interval: Time,  # a positive amount
    ) -> None:
        self.interval = interval
        self._passed: int | None = 0  # number of multiples up to the last check; None: not checked

    def start(self, learn: Learner) -> None:
        "Count from a Learner's current time."
        if learn.fitting:
            check_countable(learn, self.interval)
        self._passed = self._count(learn, 0)

    def is_due(
        self,
        learn: Learner,
        ahead: int = 0,  # number of units that are about to finish
    ) -> bool:
        "Return True once per multiple, when it was reached since the last check."
        before = self._passed
        now = self._count(learn, ahead)
        self._passed = now
        return before is not None and now > before

    def is_reached(self, learn: Learner, ahead: int = 0) -> bool:
        "Return True if `is_due` has to be called: a multiple was reached, or nothing was checked yet."
        return self._passed is None or self._count(learn, ahead) > self._passed

    def _count(self, learn: Learner, ahead: int) -> int:
        unit = self.interval.unit
        position = learn.pct_train if unit == 'dur' else learn.finished(unit)
        return count_multiples(position + ahead, self.interval)

    def state_dict(self) -> dict[str, Any]:
        "Return the interval, and the number of multiples up to the last check."
        return {'every': str(self.interval), 'passed': self._passed}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the number of multiples; for another interval, counting starts at the next check."
        self._passed = sd['passed'] if sd['every'] == str(self.interval) else None


def token_count(learn: Learner) -> int:
    "Return the number of tokens of a batch, from `token_func` or its `input_ids`, or 0 without these."
    if learn.token_func is not None:
        return int(learn.token_func(learn.xb, learn.yb))
    ids = learn.xb[0].get('input_ids') if learn.xb and isinstance(learn.xb[0], Mapping) else None
    return ids.numel() if isinstance(ids, Tensor) else 0


def sample_count(learn: Learner) -> int:
    "Return the number of samples of a batch, or 0 if it is unknown."
    try:
        return count_samples(learn)
    except BatchError:
        return 0


def check_countable(learn: Learner, time: Time) -> None:
    "Let TrainEvalCallback raise `TimeError` at the first batch if an amount in samples or tokens is not counted."
    if time.unit in ('sp', 'tok'):
        learn.parts.counters.needed.append(time)
