"""What a Learner has finished so far, over all its fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

__all__ = ['COUNTER_OF_UNIT', 'Counters']

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
    """What is finished so far, over all fits of a Learner: plain numbers, in a checkpoint.

    `learn.time` is an immutable copy of them, with the optimizer's steps and the seconds of the
    running fit added.

    >>> from learnkit.testing import synth_learner
    >>> with synth_learner(n_train=10).no_bar() as learn: learn.fit(2)
    >>> learn.counters.epochs, learn.counters.batches, learn.counters.samples
    (2, 20, 320)
    """

    iterations: int = 0
    epochs: int = 0
    batches: int = 0
    steps: int = 0  # of optimizers that were replaced; the one in use counts its own
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0  # in fits that are over
    fit_began: float | None = None  # by `perf_counter`; None: no fit is running

    def elapsed(self) -> float:
        "Return the seconds spent in fits, the running one included, by this process's clock."
        if self.fit_began is None:
            return self.seconds
        return self.seconds + perf_counter() - self.fit_began

    def by_unit(self) -> dict[str, int]:
        "Return the numbers by the units of `Time`, as checkpoints hold them."
        return {unit: getattr(self, name) for unit, name in COUNTER_OF_UNIT.items()}

    def load_units(self, numbers: Mapping[str, int]) -> None:
        "Restore the numbers of `by_unit`."
        for unit, name in COUNTER_OF_UNIT.items():
            setattr(self, name, numbers[unit])
