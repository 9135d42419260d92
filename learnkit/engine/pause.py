# SPDX-License-Identifier: Apache-2.0
"""Pauses of a fit: how one is requested, at which points the fit leaves the loop, and how it continues there.

A request changes nothing that the loop calls in a batch: it ends the numbers of the batches, which the source of the
fit gives to the loop (`engine/positions.py`). `checkpoint/pause.py` keeps what the fit needs to continue."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, compress
from multiprocessing import current_process
from types import FrameType
from typing import TYPE_CHECKING, Any

from fastcore.basics import noop
from torch.utils.data import get_worker_info
from typing_extensions import override

from learnkit.core.errors import FitError, TimeError
from learnkit.core.time import Time, as_time
from learnkit.engine.callback import Callback
from learnkit.engine.resumed_run import ResumedRun, ResumeState

if TYPE_CHECKING:
    from learnkit.engine.positions import TrainingPositions
    from learnkit.learner import Learner

_LOOP = 'learnkit.engine.loop'
# methods of the loop in which Ctrl-C interrupts at once, although a pass over the training data is open
_INTERRUPTED_AT_ONCE = ('draw_batches', 'do_evaluation')


class FitPaused(Exception):
    "Leaves the loop at a point where the fit can continue. `fit` catches it; no event but `cleanup` fires."

    def __init__(self, point: str) -> None:
        super().__init__(point)
        self.point = point  # 'batch' or 'epoch', as in `SAVE_POINTS`


@dataclass
class FitCall:
    "Arguments with which a fit was called, to call it again."

    n_epoch: Any
    lr: Any
    wd: float | None
    cbs: list[Any]  # callbacks of this fit, as instances
    added: list[Any]  # callbacks that `fit` adds itself
    start_epoch: int
    iteration: Any
    stage: int | None = None  # index of the fit in `fine_tune`
    then: Callable[..., None] | None = (
        None  # what follows the fit, as the second fit of `fine_tune`
    )

    def arguments(self) -> dict[str, Any]:
        "Return the arguments of `fit`."
        names = ('n_epoch', 'lr', 'wd', 'cbs', 'start_epoch', 'iteration')
        return {name: getattr(self, name) for name in names}


class PauseRequest:
    """Request to pause the running fit, which a callback, another thread or a signal handler may make.

    >>> request = PauseRequest()
    >>> [n for n in request.watch(range(3)) if n < 1 or request.make()]
    Traceback (most recent call last):
    ...
    learnkit.engine.pause.FitPaused: batch
    """

    def __init__(self, learn: Learner | None = None) -> None:
        self.learn = learn
        self.is_interrupt = False  # whether Ctrl-C has made the request
        self._flags = [None]  # two elements after a request
        self._pid = os.getpid()
        # number of the first batch of the pass, and of the batches that were trained before it
        self._start: tuple[int, int] | None = None

    @property
    def is_made(self) -> bool:
        "True after a request."
        return len(self._flags) > 1

    def make(self) -> None:
        "Request a pause; this is one assignment, so any thread and any signal handler may do it."
        self._flags[:] = [None, None]

    @property
    def has_begun(self) -> bool:
        "True if the pass of the current epoch has begun."
        return self._start is not None

    def begin_epoch(self) -> None:
        "Note that an epoch begins."
        self._start = None

    def count_drawn(self, learn: Learner) -> int:
        "Return the number of batches of this epoch that were trained."
        assert self._start is not None
        first, n_before = self._start
        return first + learn.parts.counters.batches - n_before

    def watch(self, numbers: Iterable[int], first: int = 0) -> Iterator[int]:
        "Yield the numbers of the batches until a pause is requested; then raise `FitPaused`."
        if self.learn is not None:
            self._start = first, self.learn.parts.counters.batches
        # all in C: the loop calls no function of Python for it in a batch
        until_request = compress(numbers, iter(self._flags.__len__, 2))
        return chain(until_request, self._leave())

    def _leave(self) -> Iterator[int]:
        self.leave_if_made('batch')
        yield from ()

    def leave_if_made(self, point: str) -> None:
        "Raise `FitPaused` if a pause was requested."
        if self.is_made:
            raise FitPaused(point)

    # -- Ctrl-C ------------------------------------------------------------------------------------

    def receive_interrupt(self, signum: int, frame: FrameType | None) -> None:
        "Handle Ctrl-C: the first one in a training batch pauses the fit behind the batch."
        if os.getpid() != self._pid:
            # Ctrl-C in a terminal reaches the workers of loaders too, whose batches are still needed
            if not _is_loader_worker():
                raise KeyboardInterrupt
        elif self.is_interrupt or not self._is_within_batch(frame):
            raise KeyboardInterrupt
        else:
            self.is_interrupt = True
            self.make()

    def _is_within_batch(self, frame: FrameType | None) -> bool:
        "Return True from `before_batch` to `batch_checkpoint` of a training batch, but not in an evaluation."
        learn = self.learn
        if learn is None or learn.world.size > 1 or learn.run.depth != 1:
            return False
        if not learn.parts.positions.is_open:
            return False
        while frame is not None:
            code, module = frame.f_code, frame.f_globals.get('__name__')
            if module == _LOOP and code.co_name in _INTERRUPTED_AT_ONCE:
                return False
            frame = frame.f_back
        return True


def _is_loader_worker() -> bool:
    "Return True in a worker process of a loader; one that only begins is known as a daemon."
    return get_worker_info() is not None or current_process().daemon


def request_pause(learn: Learner) -> None:
    "Request a pause of the running fit; raise `FitError` if no fit is running."
    request = learn.run.request
    if request is None:
        raise FitError(
            'learn.pause(): no fit is running. Call it in a callback, or in another thread.'
        )
    learn.parts.processes.pause(learn)


class _PauseAt(Callback):
    "Request a pause when the Learner's time reaches an amount over all fits."

    order = 10_000  # after callbacks that write a checkpoint of the batch
    run_in = 'fit'
    run_valid = False
    remove_on_find = True
    needed_to_rewind = False

    def __init__(self, until: Time) -> None:
        self._until = until

    def batch_checkpoint(self) -> None:
        self._pause_if_due()

    def epoch_checkpoint(self) -> None:
        self._pause_if_due()

    def iteration_checkpoint(self) -> None:
        self._pause_if_due()

    def _pause_if_due(self) -> None:
        if _is_reached(self.learn, self._until):
            self.learn.run.request.make()  # all ranks count the same

    def state_dict(self) -> None:
        "Return None: a pause is no part of the run."


def _is_reached(learn: Learner, until: Time) -> bool:
    now = learn.pct_train if until.unit == 'dur' else learn.finished(until.unit)
    return bool(now >= until.value)


def parse_pause(
    learn: Learner,
    pause_at: Any,  # argument of `fit`
) -> list[Callback]:
    "Return the callback that pauses a fit, or none; raise `TimeError` for a time that has passed."
    if pause_at is None:
        return []
    until = as_time(pause_at, 'ba')
    if until.unit != 'dur' and _is_reached(learn, until):
        now = learn.finished(until.unit)
        raise TimeError(
            f'pause_at={str(until)!r}: the Learner has trained {now:g}{until.unit} already. The time counts over all '
            'fits; give a later one.'
        )
    return [_PauseAt(until)]


# -- the open pass over the training data -------------------------------------------------------------


@dataclass
class OpenPass:
    "Pass over the training loader that a fit has left, to be continued by the same iterator."

    dl: Any
    batches: Iterator[Any] | None  # None: between two epochs, or the iterator has failed
    position: Any  # `LoaderPosition` of the pass, or of the last one
    stream: Any  # pass that all epochs share
    mark: Any = field(default=None, repr=False)  # state of the loader, to find out if it was used


@dataclass
class PausedState(ResumeState):
    "State of a paused fit, which `fit` resumes in memory."

    open_pass: OpenPass | None = (
        None  # None: the pass is found again from its position, as from a file
    )
    pause: Any = None  # `Pause` that the state belongs to
    begin: Callable[..., None] = field(default=noop)  # f(learn, self): begins to continue the fit

    @override
    def make_source(self, positions: TrainingPositions) -> ResumedRun:
        "Return the epochs and batches that remain."
        if self.open_pass is None:
            return super().make_source(positions)
        return PausedRun(positions, self, self.open_pass)


def resumes_in_memory(learn: Learner) -> bool:
    "Return True while a paused fit begins to continue, with the callbacks that it had."
    return isinstance(learn.run.resuming, PausedState)


class PausedRun(ResumedRun):
    "Epochs and batches that remain of a paused fit. The open pass is continued by the same iterator."

    resume: PausedState

    def __init__(
        self, positions: TrainingPositions, resume: PausedState, open_pass: OpenPass
    ) -> None:
        super().__init__(positions, resume)
        self.open_pass = open_pass
        self._has_left_out = False  # whether handlers of this epoch's end are left out

    @override
    def _select_loader(self, learn: Learner) -> None:
        "Set the loader of the rest of the epoch: that of the open pass, also if the fit has another one now."
        learn.dl = self.open_pass.dl

    @override
    def epochs(self, learn: Learner, first: int = 0) -> Iterator[int]:
        "Yield the epochs that remain."
        for epoch in super().epochs(learn, first):
            yield epoch
            if self._has_left_out:
                self._has_left_out = False
                learn.parts.callbacks.refresh()

    @override
    def _open_pass(self, learn: Learner) -> Iterator[Any]:
        "Return the batches that remain of the open pass."
        self._take_position()
        if self.resume.pause.is_trained:
            # the handlers have run; the next epoch collects them again
            table = learn.parts.callbacks.tables[True]
            for event in ('before_draw', 'after_train'):
                table[event] = table[event][:0]
            self._has_left_out = True
        assert self.open_pass.batches is not None
        return self.positions.continue_pass(self.open_pass.batches)

    @override
    def _restore_between_epochs(self, learn: Learner) -> None:
        "Restore the position in the data after an epoch."
        self._take_position()

    def _take_position(self) -> None:
        self.positions.position = self.open_pass.position
        self.positions.stream = self.open_pass.stream
        self.positions.rest = None
