# SPDX-License-Identifier: Apache-2.0
"""Length of a fit: a number of epochs, or a budget of batches, steps, samples, tokens or seconds."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from learnkit.core.errors import FitError, TimeError
from learnkit.core.time import Time, as_time
from learnkit.core.validation import check_count
from learnkit.engine.counters import check_countable
from learnkit.engine.stopper import Stopper

if TYPE_CHECKING:
    from learnkit.learner import Learner


def parse_length(
    learn: Learner,
    length: Any,  # number of epochs, or a time
    start_epoch: Any = 0,  # first epoch to train
    epochs_per_iteration: int | None = None,  # number of epochs of an iteration, if set
) -> tuple[int | None, Time | None]:  # number of epochs (None: unknown), budget (None: no budget)
    "Return the number of epochs, or the budget, of a fit; raise `FitError` or `TimeError` for an invalid length."
    n, budget = length, None
    if isinstance(length, (str, Time)):
        n, budget = _parse_time(learn, as_time(length), epochs_per_iteration)
    if budget is None:
        n = check_count('n_epoch', n, 0, FitError)
    start = check_count('start_epoch', start_epoch, 0, FitError)
    if n is not None and start > n:
        raise FitError(
            f'start_epoch={start_epoch} is past n_epoch={n}, which counts '
            f'those that are skipped: `fit({start} + epochs to train)`.'
        )
    check_not_running(learn)
    return n, budget


def check_not_running(learn: Learner) -> None:
    "Raise `FitError` if the Learner is running already."
    if learn.run.kind:
        raise FitError(
            f'fit() was called inside the {learn.run.kind} of the same Learner. Continue training in the running one, '
            'end it with `learn.stop()`, or use another Learner.'
        )


def _parse_time(
    learn: Learner, total: Time, epochs_per_iteration: int | None
) -> tuple[int | None, Time | None]:
    check_countable(learn, total)
    if total.unit == 'ep':
        return int(total.value), None
    if total.unit == 'iter':
        if epochs_per_iteration is None:
            raise TimeError(f"fit({str(total)!r}): say how long one is, `iteration='2ep'`.")
        return int(total.value) * epochs_per_iteration, None
    if total.unit == 'dur':
        raise TimeError(
            f'fit({str(total)!r}): the total length of the fit is not known. Pass epochs, batches or hours.'
        )
    return None, total


def parse_iteration(every: Any) -> int:
    "Return the number of epochs of an iteration; raise `FitError` for another unit."
    every = as_time(every, 'ep')
    if every.unit != 'ep':
        raise FitError(f'iteration={str(every)!r}: pass a number of epochs, such as 2 or `2ep`.')
    return int(every.value)


def find_budget(learn: Learner) -> Budget | None:
    "Return the callback that ends the fit at an amount of batches, samples or another unit, or None."
    return next((cb for cb in learn.cbs if isinstance(cb, Budget)), None)


class Budget(Stopper):
    """Stop the fit at the end of the batch that uses up its budget; `pct_train` is the used share.

    `fit('2h')` adds it. The current epoch ends as usual, with its evaluation and its checkpoints. Checkpointed: the
    Learner's total at the start of the fit, and whether the budget is used up.

    >>> Budget('500ba').total
    Time('500ba')
    """

    order = -9  # right after the counters
    run_in = 'fit'
    run_valid = False

    def __init__(self, total: str | int | Time = '1ep') -> None:
        self.total = as_time(total, 'ep')
        self.total_at_start = 0.0  # amount that the Learner had finished at the start of the fit
        self._shares: list[float] = []  # used share at the start of the fit and after each epoch
        # used share and number of batches when this process began to train
        self._first = 0.0, 0.0
        if self.total.unit == 'sec':
            self.nondeterministic_state = ('began',)

    def before_fit(self) -> None:
        self.total_at_start = self.learn.finished(self.total.unit)
        self.has_stopped = False
        self._shares = [self.share()]
        self._first = self.share(), self.learn.finished('ba')

    def before_train(self) -> None:
        self.learn.pct_train = min(1.0, self.share())

    def after_batch(self) -> None:
        self._update_share()

    def after_epoch(self) -> None:
        self._update_share()
        self._shares = [*self._shares[-2:], self.share()]
        if len(self._shares) == 3 and len(set(self._shares)) == 1:
            raise FitError(
                f'fit({str(self.total)!r}) would never end: two epochs in a row used none of it.'
            )

    def share(self) -> float:
        "Return the used share of the budget; it may exceed 1."
        return (self.learn.finished(self.total.unit) - self.total_at_start) / self.total.value

    def estimate_batches_left(self) -> int | None:
        "Return the number of batches until the budget is used up, at the rate so far; None before the first batch."
        share, batches = self._first
        used = self.share() - share
        if self.total.unit == 'ba':
            return max(0, ceil(self.total.value * (1 - self.share())))
        if used <= 0:
            return None
        return max(0, round((self.learn.finished('ba') - batches) * (1 - self.share()) / used))

    @override
    def is_over(self) -> bool:
        "Return True if the budget is used up."
        return self.share() >= 1

    def _update_share(self) -> None:
        share = self.share()
        self.learn.pct_train = min(1.0, share)
        if share < 1 or self.learn.run.stopping:
            return
        self.has_stopped = True
        self.learn.run.stop('the budget')  # on every rank, because all ranks count the same amount

    @override
    def state_dict(self) -> dict[str, Any]:
        return {'began': self.total_at_start, 'ended': self.has_stopped}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self.total_at_start = sd['began']
        self.has_stopped = sd['ended']
        self._first = self.share(), self.learn.finished('ba')
