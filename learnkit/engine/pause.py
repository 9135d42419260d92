# SPDX-License-Identifier: Apache-2.0
"""Pauses of a fit: how one is requested, at which points the fit leaves the loop, and how it continues there.

A request changes nothing that the loop calls in a batch: it ends the numbers of the batches, which the source of the
fit yields to the loop (`engine/positions.py`). `checkpoint/pause.py` keeps what the fit needs to continue.

An error has no request. `Failure` names the handler that failed; the rest is the state of the source
and of the optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, compress
from multiprocessing import current_process
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import finalize

from fastcore.basics import noop
from torch.utils.data import get_worker_info
from typing_extensions import override

from learnkit.core.errors import FitError, TimeError, list_places
from learnkit.core.random import capture_rng
from learnkit.core.time import Time, as_time
from learnkit.data.position import describe_drawn
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import contains_object
from learnkit.engine.resumed_run import ResumedRun, ResumeState

if TYPE_CHECKING:
    from learnkit.core.random import RNGState
    from learnkit.engine.positions import TrainingPositions
    from learnkit.learner import Learner


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
        self.has_raised = False  # whether Ctrl-C has raised an exception at once
        self.restored: Any = None  # `Pause` that is being restored
        self.failure: Failure | None = None  # the last handler that has raised
        # random generators at the start of the fit, and then of the epoch
        self.rng: RNGState = {} if learn is None else capture_rng()
        self.has_epoch = False  # True from the first epoch on
        self.n_epochs = 0  # number of epochs that had finished over all fits when the epoch began
        self.dl: Any = (
            None  # loader of the epoch's pass, also if the Learner has another one by now
        )
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
        "Note that an epoch begins, with the random generators from before its first event."
        self._start = None
        self.has_epoch = True
        if self.learn is None:
            return
        self.n_epochs = self.learn.parts.counters.epochs
        self.dl = self.learn.dls.train
        self.learn.parts.evaluations.is_at_end = False
        if self.learn.epoch:
            self.rng = capture_rng()

    def count_drawn(self, learn: Learner) -> int:
        "Return the number of batches of this epoch that were trained."
        assert self._start is not None
        first, n_before = self._start
        return first + learn.parts.counters.batches - n_before

    def watch(self, numbers: Iterable[int], first: int = 0) -> Iterator[int]:
        "Yield the numbers of the batches until a pause is requested; then raise `FitPaused`."
        if self.learn is not None:
            self._start = first, self.learn.parts.counters.batches
            self.dl = self.learn.dl
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

    # -- errors ------------------------------------------------------------------------------------

    def note_failure(self, learn: Learner, place: str, cb: Any, event: str) -> None:
        "Note the handler that has raised an exception; that of the outermost event is noted last."
        if learn.run.depth == 1:
            self.failure = Failure(place, event, cb, learn.parts.evaluations.running)

    def find_failure(self, error: BaseException) -> Failure | None:
        "Return the handler that has raised this exception; None if something else has."
        failure = self.failure
        places = list_places(error)
        return failure if failure is not None and places[-1:] == (failure.place,) else None

    # -- Ctrl-C ------------------------------------------------------------------------------------

    def receive_interrupt(self, signum: int, frame: FrameType | None) -> None:
        "Handle Ctrl-C: the first one in a pass over the training data pauses the fit after the batch."
        if os.getpid() != self._pid:
            # Ctrl-C in a terminal reaches the workers of loaders too, whose batches are still needed
            if not _is_loader_worker():
                raise KeyboardInterrupt
        elif self.is_interrupt or not self._is_within_pass():
            self.has_raised = True
            raise KeyboardInterrupt
        else:
            self.is_interrupt = True
            self.make()

    def _is_within_pass(self) -> bool:
        "Return True while batches are drawn and trained, but not in an evaluation."
        learn = self.learn
        if learn is None or learn.world.size > 1 or learn.run.depth != 1:
            return False
        return learn.parts.positions.is_open and not learn.parts.evaluations.running


@dataclass
class Failure:
    "Handler of a fit's outermost event that has raised an exception."

    place: str  # as recorded in the exception, to which nothing refers from here
    event: str
    cb: Any  # callback of the handler
    in_evaluation: bool


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
        "Return None: a pause is not part of the run."


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
            'fits; pass a later time.'
        )
    return [_PauseAt(until)]


# -- the open pass over the training data -------------------------------------------------------------


class OpenPass:
    """Pass over the training loader that a fit has left, to be continued by the same iterator.

    Only this object keeps the iterator alive, by a finalizer. The garbage collector, which finds a Learner that was
    dropped, ends the queues of the workers in any order, and torch would wait 5 s for each worker.
    """

    def __init__(
        self,
        dl: Any,
        batches: Iterator[Any] | None,  # None: between two epochs, or the iterator has failed
        position: Any,  # `LoaderPosition` of the pass, or of the last one
        stream: Any,  # pass that all epochs share
        mark: Any = None,  # state of the loader, to find out if it was used
        iterator: Any = None,  # iterator of the loader that yields the batches
    ) -> None:
        self.dl = dl
        self.position = position
        self.stream = stream
        self.mark = mark
        self._keep(iterator, batches)

    def _keep(self, iterator: Any, batches: Any) -> None:
        self._kept = finalize(self, noop, iterator, batches)
        self._kept.atexit = False

    @property
    def batches(self) -> Iterator[Any] | None:
        "Batches that remain."
        return self._find_kept()[1]

    @property
    def iterator(self) -> Iterator[Any] | None:
        "Iterator that the fit has left."
        return self._find_kept()[0]

    def close(self) -> None:
        "Drop the iterator, whose workers end."
        self._kept.detach()

    def _find_kept(self) -> tuple[Any, Any]:
        kept = self._kept.peek()
        return (None, None) if kept is None else kept[2]

    def prepend(self, batch: Any) -> None:
        "Give a batch before those that remain."
        iterator, batches = self._find_kept()
        self._kept.detach()
        self._keep(iterator, chain([batch], batches))


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
        return PausedRun(positions, self, self.open_pass)


def resumes_in_memory(learn: Learner) -> bool:
    "Return True while a paused fit begins to continue, with the callbacks that it had."
    return isinstance(learn.run.resuming, PausedState)


class PausedRun(ResumedRun):
    "Epochs and batches that remain of a paused fit. The open pass is continued by the same iterator."

    resume: PausedState

    def __init__(
        self, positions: TrainingPositions, resume: PausedState, open_pass: OpenPass | None
    ) -> None:
        super().__init__(positions, resume)
        self.open_pass = open_pass
        self._has_left_out = False  # whether handlers of this epoch's end are left out

    @override
    def _select_loader(self, learn: Learner) -> None:
        "Set the loader of the rest of the epoch: that of the open pass, also if the fit has another one now."
        if self.open_pass is not None:
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
        "Return the batches that remain of the open pass, after the rest of a batch that has failed."
        batches = self._open_again(learn) if self.open_pass is None else self._continue_pass()
        pause = self.resume.pause
        if pause.is_trained:
            self._leave_out(learn, {'before_draw': None, **pause.handled})
        elif pause.handled:
            vars(learn).update(pause.batch_fields)
            self._finish_events(learn)
        return batches

    def _open_again(self, learn: Learner) -> Iterator[Any]:
        "Return the batches that remain of a new pass, which is found by its position."
        position = self.resume.state['position']
        dl = learn.dls.train
        if position is not None and dl is self.resume.pause.open_pass.dl:
            # the loader itself may have another length by now than at the start of the fit
            position = {**position, 'loader': describe_drawn(dl)}
            self.resume.state = {**self.resume.state, 'position': position}
        return super()._open_pass(learn)

    def _continue_pass(self) -> Iterator[Any]:
        own_pass = self.open_pass
        assert own_pass is not None and own_pass.batches is not None
        self._take_position(own_pass)
        return self.positions.continue_pass(own_pass.batches, own_pass.iterator)

    @override
    def _restore_between_epochs(self, learn: Learner) -> None:
        "Restore the position in the data after an epoch, and run the rest of the events at its end."
        assert self.open_pass is not None
        self._take_position(self.open_pass)
        handled = self.resume.pause.handled
        if 'after_fit' in handled:
            self._leave_out(learn, handled)
        elif handled:
            self._finish_events(learn)
            learn.run.request.leave_if_made('epoch')

    def _finish_events(self, learn: Learner) -> None:
        "Fire the events that an error has cut, for the handlers that had not finished."
        handled = self.resume.pause.handled
        self._leave_out(learn, handled)
        for event in handled:
            learn(event)
        learn.parts.callbacks.refresh()
        self._has_left_out = False

    def _leave_out(self, learn: Learner, handled: Mapping[str, list[Any] | None]) -> None:
        "Leave out the handlers of events that have run; None: all. The next epoch collects them again."
        for table in learn.parts.callbacks.tables:
            for event, cbs in handled.items():
                table[event] = [
                    entry
                    for entry in table[event]
                    if cbs is not None and not contains_object(cbs, entry[2])
                ]
        self._has_left_out = True

    def _take_position(self, open_pass: OpenPass) -> None:
        self.positions.position = open_pass.position
        self.positions.stream = open_pass.stream
        self.positions.rest = None
