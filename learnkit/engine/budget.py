"""Length of a fit: a number of epochs, or a budget of batches, steps, samples, tokens or seconds."""

from __future__ import annotations

from typing import Any

from learnkit.core.errors import FitError, TimeError
from learnkit.core.learner_type import LearnerLike
from learnkit.core.time import Time, as_time
from learnkit.engine.callback import Callback
from learnkit.engine.checks import check_fit
from learnkit.engine.every import check_countable

__all__ = ['Budget', 'parse_length']


def parse_length(
    learn: LearnerLike,
    length: Any,  # number of epochs, or a time
    start_epoch: Any = 0,  # first epoch to train
    epochs_per_iteration: int | None = None,  # number of epochs of an iteration, if set
) -> tuple[int | None, Time | None]:  # number of epochs (None: unknown), budget (None: no budget)
    "Return the number of epochs, or the budget, of a fit; raise `FitError` or `TimeError` for an invalid length."
    epochs, budget = _split_length(learn, length, epochs_per_iteration)
    return check_fit(learn, epochs, start_epoch, has_budget=budget is not None), budget


def _split_length(
    learn: LearnerLike, length: Any, epochs_per_iteration: int | None
) -> tuple[Any, Time | None]:
    if not isinstance(length, (str, Time)):
        return length, None
    total = as_time(length)
    check_countable(learn, total)
    if total.unit == 'ep':
        return int(total.value), None
    if total.unit == 'iter':
        if epochs_per_iteration is None:
            raise TimeError(f"fit({str(total)!r}): say how long one is, `iteration='2ep'`.")
        return int(total.value) * epochs_per_iteration, None
    if total.unit == 'dur':
        raise TimeError(f'fit({str(total)!r}): a share of what? Give epochs, batches or hours.')
    return None, total


class Budget(Callback):
    """Stop the fit at the end of a batch when its budget is used; `pct_train` is the used share.

    `fit('2h')` adds it. The current epoch ends as usual, with its evaluation and its checkpoints. Checkpointed: the
    Learner's total at the start of the fit, the used share at the end of the last epoch, and the number of consecutive
    epochs that have used nothing.

    >>> Budget('500ba').total
    Time('500ba')
    """

    order = -9  # right after the counters
    run_in, run_valid = 'fit', False

    def __init__(self, total: str | int | Time = '1ep') -> None:
        self.total = as_time(total, 'ep')
        self._began = 0.0  # total of the Learner at the start of the fit
        self._ended = False  # True if this callback has stopped the fit
        self._last = 0.0  # share at the end of the last epoch
        self._n_idle = 0  # number of consecutive epochs that have used nothing
        if self.total.unit == 'sec':
            self.nondeterministic_state = ('began', 'last')

    def before_fit(self) -> None:
        self._began = self.learn.finished(self.total.unit)
        self._n_idle = 0
        self._last = 0.0
        self._ended = False

    def before_train(self) -> None:
        self.learn.pct_train = min(1.0, self.share())

    def after_batch(self) -> None:
        self._update_share()

    def after_epoch(self) -> None:
        self._update_share()
        last, self._last = self._last, self.share()
        self._n_idle = 0 if self._last > last else self._n_idle + 1
        if self._n_idle > 1:
            raise FitError(
                f'fit({str(self.total)!r}) would never end: two epochs in a row have used nothing of '
                'it. Are their batches or steps all cancelled?'
            )

    def share(self) -> float:
        "Return the share that has been used."
        return (self.learn.finished(self.total.unit) - self._began) / self.total.value

    def _update_share(self) -> None:
        share = self.share()
        self.learn.pct_train = min(1.0, share)
        if share < 1 or self.learn.run.stopping:
            return
        self._ended = True
        self.learn.run.stopping = True  # on every rank, because all ranks count the same amount

    def state_dict(self) -> dict[str, Any]:
        return {
            'began': self._began,
            'last': self._last,
            'n_idle': self._n_idle,
            'ended': self._ended,
        }

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self._began = sd['began']
        self._last = sd['last']
        self._n_idle = sd['n_idle']
        self._ended = sd['ended']
        if self._ended and self.share() < 1:
            self._ended = self.learn.run.stopping = False  # the fit is resumed with a larger budget
