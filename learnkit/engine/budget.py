"""How long a fit lasts: a number of epochs, or an amount of batches, steps, samples, tokens or seconds."""

from __future__ import annotations

from typing import Any

from learnkit.core.errors import FitError, TimeError
from learnkit.core.time import Time, as_time
from learnkit.engine.callback import Callback
from learnkit.engine.checks import check_fit
from learnkit.engine.countable import check_countable

__all__ = ['Budget', 'as_length']


def as_length(
    learn: Any,
    length: Any,  # a number of epochs, or a time
    start_epoch: Any = 0,  # the epochs before it are skipped
    per_iteration: int | None = None,  # epochs of an iteration, where it is set
) -> tuple[int | None, Time | None]:  # number of epochs (None: not known), and the budget if any
    "Return how many epochs a fit has, or what it may use; raise `FitError` or `TimeError` for what it cannot follow."
    epochs, budget = _as_length(learn, length, per_iteration)
    return check_fit(learn, epochs, start_epoch, has_budget=budget is not None), budget


def _as_length(learn: Any, length: Any, per_iteration: int | None) -> tuple[Any, Time | None]:
    if not isinstance(length, (str, Time)):
        return length, None
    total = as_time(length)
    check_countable(learn, total)
    if total.unit == 'ep':
        return int(total.value), None
    if total.unit == 'iter':
        if per_iteration is None:
            raise TimeError(f"fit({str(total)!r}): say how long one is, `iteration='2ep'`.")
        return int(total.value) * per_iteration, None
    if total.unit == 'dur':
        raise TimeError(f'fit({str(total)!r}): a share of what? Give epochs, batches or hours.')
    return None, total


class Budget(Callback):
    """Stop the fit once it has used so much of a unit, at the end of a batch; `pct_train` is the share used.

    `fit('2h')` adds it. The epoch that is under way ends as usual, with its evaluation and its checkpoints.
    Checkpointed: what the Learner had used when the fit began and when its last epoch ended, and how many epochs in a
    row have used nothing.

    >>> Budget('500ba').total
    Time('500ba')
    """

    order = -9  # right after the counters
    run_in, run_valid = 'fit', False

    def __init__(self, total: str | int | Time = '1ep') -> None:
        self.total = as_time(total, 'ep')
        self._began = 0.0  # what the Learner had used when the fit began
        self._ended = False  # it was this that stopped the fit
        # the share at the end of the last epoch; epochs that used nothing
        self._last, self._n_idle = 0.0, 0
        if self.total.unit == 'sec':
            self.wall_clock = ('began', 'last')

    def before_fit(self) -> None:
        self._began, self._n_idle, self._last = self.learn.finished(self.total.unit), 0, 0.0
        self._ended = False

    def before_train(self) -> None:
        self.learn.pct_train = min(1.0, self.share())

    def after_batch(self) -> None:
        self._look()

    def after_epoch(self) -> None:
        self._look()
        last, self._last = self._last, self.share()
        self._n_idle = 0 if self._last > last else self._n_idle + 1
        if self._n_idle > 1:
            raise FitError(
                f'fit({str(self.total)!r}) would go on for ever: two epochs in a row have used nothing of '
                'it. Are their batches or steps all cancelled?'
            )

    def share(self) -> float:
        "Return the share that has been used."
        return (self.learn.finished(self.total.unit) - self._began) / self.total.value

    def _look(self) -> None:
        share = self.share()
        self.learn.pct_train = min(1.0, share)
        if share < 1 or self.learn.run.stopping:
            return
        self._ended = True
        self.learn.run.stopping = True  # whatever is counted, it is the same in every process

    def state_dict(self) -> dict[str, Any]:
        return {
            'began': self._began,
            'last': self._last,
            'n_idle': self._n_idle,
            'ended': self._ended,
        }

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self._began, self._last, self._n_idle, self._ended = (
            sd['began'],
            sd['last'],
            sd['n_idle'],
            sd['ended'],
        )
        if self._ended and self.share() < 1:
            self._ended = self.learn.run.stopping = False  # there is more of it now
