# SPDX-License-Identifier: Apache-2.0
"""Runs of a Learner: open a fit, evaluation or prediction, and always end it with its cleanup."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from fastcore.basics import noop

from learnkit.core.errors import (
    CancelError,
    CancelException,
    FitError,
    add_note,
    add_place,
    list_places,
)
from learnkit.core.interrupts import run_all, user_code
from learnkit.core.model import check_can_run, preserved_modes
from learnkit.core.random import preserved_rng
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.data.torch_loader import forget_workers
from learnkit.engine.callback import Callback, name_callback, name_handler
from learnkit.engine.composer_model import HOLDER, composer_seams
from learnkit.engine.dispatch import (
    format_place,
    list_running,
)
from learnkit.engine.events import LEVELS
from learnkit.engine.explain import explain_error
from learnkit.engine.fields import RESTORED

if TYPE_CHECKING:
    from learnkit.learner import Learner

CLEANUP = 'cleanup'  # kind of a run that ends


@dataclass
class Run:
    """State of the current run: `learn.run`.

    A run is a fit, a stand-alone validation or prediction, or one of these inside another run. Each
    run has its own levels, so that no Cancel exception leaves it.
    """

    kind: str = ''  # 'fit', 'evaluation', 'prediction', 'cleanup', or '' for no run
    depth: int = 0  # number of open runs: 1 in a fit, 2 in a validate() inside it
    levels: tuple[str, ...] = ()  # open levels of the current run, outermost first
    stopping: bool = False  # the fit ends after the current batch or epoch
    stopped_by: str = ''  # what has stopped the fit: a callback, 'learn.stop()', 'the budget'
    repeating: bool = False  # a step evaluates the batch again, which callbacks do not record
    # a fit with `resume=` has found no checkpoint of the run that wrote its files
    starts_over: bool = False
    has_lost_weights: bool = False  # shards of the model went with a rank that failed
    # `ResumeState` of a checkpoint that is not restored yet
    resuming: Any = field(default=None, repr=False, compare=False)
    # device of the last loader's batches
    batch_device: torch.device | None = field(default=None, repr=False, compare=False)
    # callback that keeps the batch for `replay`
    replay_source: Any = field(default=None, repr=False, compare=False)
    # `PauseRequest` of the running fit
    request: Any = field(default=None, repr=False, compare=False)
    # `Pause` of the last fit, which `resume` continues
    pause: Any = field(default=None, repr=False, compare=False)
    # why `resume` cannot continue the last fit, which was interrupted; '': it was not
    not_paused: str = field(default='', repr=False, compare=False)
    # what follows the next fit, if it is not the last one of the method that was called
    then: Callable[..., None] | None = field(default=None, repr=False, compare=False)
    # one run at a time
    lock: Any = field(default_factory=RLock, repr=False, compare=False)
    # called at the end of the outermost run, also if its cleanup was aborted
    releases: list[Callable[[], object]] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        "Return the attributes without the lock and the open pass of a pause, which cannot be copied."
        left_out = ('lock', 'request', 'pause', 'then')
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=RLock(), request=None, pause=None, then=None)

    @property
    def is_active(self) -> bool:
        "True from the start of a run until its cleanup begins."
        return self.depth > 0 and self.kind != CLEANUP

    def stop(
        self,
        by: str,  # what stops the fit
    ) -> None:
        "End the fit after the current batch or epoch; the first that has stopped it is recorded."
        self.stopping = True
        self.stopped_by = self.stopped_by or by


def refuse_run(learn: Learner, value: object) -> None:
    "Raise `FitError` for an assignment to `learn.run`."
    raise FitError(
        f'learn.run = {value!r}: `learn.run` is the state of the current run and is not assigned. To switch a '
        'callback off, set `run = False` on the callback.'
    )


def clear_pass(learn: Learner) -> None:
    "Delete the prediction and the loss of the last forward pass."
    learn.__dict__.pop('pred', None)
    learn.__dict__.pop('loss_grad', None)


def set_batch(learn: Learner, batch: Any) -> None:
    """Replace the batch: set `xb` and `yb` from a batch as the loader returns it.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner()
    >>> set_batch(learn, (torch.zeros(2, 1), torch.ones(2, 1)))
    >>> learn.yb
    (tensor([[1.],
            [1.]]),)
    """
    learn._split(batch)


def run_level(
    learn: Learner,
    level: str,  # 'backward', 'step' ...
    f: Callable[[], Any],
) -> None:
    """Run `f` as a level of the loop: with the level's events, and until its Cancel exception.

    >>> from learnkit import Callback, CancelBackwardException
    >>> from learnkit.testing import synth_learner
    >>> def skip(): raise CancelBackwardException
    >>> learn = synth_learner(cbs=Callback(after_backward=lambda cb: print('after')))
    >>> run_level(learn, 'backward', skip)
    after
    """
    __tracebackhide__ = True
    learn._with_events(f, level, LEVELS[level].exception)


@contextmanager
def open_run(
    learn: Learner,
    kind: str,  # 'fit', 'evaluation', 'prediction', or '' for events fired by hand
) -> Iterator[None]:
    "Open a run. The outermost run ends with `after_error` and `cleanup`, and restores the Learner."
    callbacks = learn.parts.callbacks
    run = learn.run
    counters = learn.parts.counters
    if kind not in ('', 'fit') and not run.depth:  # `fit` has checked it
        check_can_run(learn)
    with learn.run.lock:
        outer = run.levels, run.kind, learn.fitting, run.depth
        # functions of the loop that a model of whole batches replaces
        convention: dict[str, Any] = {}
        grad = torch.is_grad_enabled()
        began = perf_counter()
        held = hold_others(learn, kind)
        released = release_for_fit(learn, kind)
        pause = run.pause if kind != 'fit' and not run.depth else None
        undo = noop if pause is None else pause.note_options(learn)
        try:
            run.levels = ()
            run.kind = kind or run.kind
            learn.fitting = kind == 'fit'
            run.depth += 1
            if kind == 'fit':
                counters.fit_began = began
            if run.depth == 1:
                convention = learn.seams.take_free(HOLDER, **composer_seams(learn))
                callbacks.refresh(classes=True)
                learn._open_for_use()
            try:
                yield
            except CancelException as e:
                raise make_cancel_error(e, f'({format_place(learn)})', ()) from e
        except BaseException as e:
            error = explain_error(learn, e)
            if run.depth == 1:
                learn.parts.processes.end_run(learn, error)
            else:
                callbacks.notify('on_run_failed')
            if error is not e:
                raise error from e
            raise
        else:
            if run.depth == 1:
                learn.parts.processes.end_run(learn, None)
        finally:
            run.levels, run.kind, learn.fitting, run.depth = outer
            callbacks.release(held)
            callbacks.hold(released)
            undo()
            learn.seams.give_back(convention)
            if kind == 'fit':
                counters.seconds = learn.finished('sec')
                counters.fit_began = None
            # a signal inside a context of torch may have switched it
            torch.set_grad_enabled(grad)


def end_run(learn: Learner, error: BaseException | None) -> None:
    "End the outermost run: fire `after_error` and `cleanup`. The first error gets notes about later errors."
    run = learn.run
    learn.error = error
    kind = run.kind
    run.kind = CLEANUP
    raised: list[BaseException] = []
    interrupted = isinstance(error, KeyboardInterrupt)
    try:
        if error is not None:
            if not list_places(error):
                add_place(error, f'{learn.phase} ({format_place(learn)})')
            raised += call_each(learn, 'after_error', interrupted)
        interrupted = interrupted or any(isinstance(e, KeyboardInterrupt) for e in raised)
        raised += call_each(learn, 'cleanup', interrupted)
    finally:
        try:
            releases, run.releases = run.releases, []
            run_all([partial(_reset_run, learn, error), *releases])
        except Exception as e:
            raised.append(e)
        run.kind = kind
    raise_first(error, raised)


def _reset_run(learn: Learner, error: BaseException | None) -> None:
    "Reset the state of the run that has ended."
    callbacks = learn.parts.callbacks
    run = learn.run
    if error is not None:
        forget_run(learn)
    callbacks.end_run()
    learn.parts.positions.close()
    run.resuming = None
    learn.resumed = False
    learn.error = None
    run.stopping = run.starts_over = False
    run.stopped_by = ''
    for cb in callbacks:
        if not cb.run:
            cb.run = True


def forget_run(learn: Learner) -> None:
    "Release the tensors of a failed run, and the persistent workers of its loaders, except for a pass that is kept."
    pause = learn.run.pause
    for dl in (learn.dls.train, *(dl for _, dl in evaluation_loaders(learn.dls))):
        if pause is None or not pause.keeps_loader(dl):
            forget_workers(dl)
    if pause is not None and not pause.keeps_loader(pause.open_pass.dl):
        pause.open_pass.close()
    learn.parts.positions.forget()
    learn._end_cleanup()
    if learn.opt is not None:
        learn.opt.zero_grad()


def name_stopper(learn: Learner) -> str:
    "Return the name of the callback whose handler calls `learn.stop()`, or 'learn.stop()'."
    running = list_running(learn)
    return name_callback(*running[0]) if running else 'learn.stop()'


def is_open(learn: Learner, level: str) -> bool:
    "Return True if a level of the loop ('fit', 'batch' ...) is open in the current run."
    # an override of `_with_events` may not update `run.levels`
    is_overridden = type(learn)._with_events.__module__ != 'learnkit.engine.loop'
    return level in learn.run.levels or is_overridden


def note_error(learn: Learner, e: BaseException, cb: Callback, event_name: str) -> None:
    """Add a note to an exception: the callback, the event, epoch and batch.

    Raises `CancelError` for a Cancel exception whose level is not open.
    """
    evaluation = ', in an evaluation' if is_open(learn, 'validate') else ''
    where = f'{name_handler(cb, event_name)} ({format_place(learn)}{evaluation})'
    if not isinstance(e, CancelException):
        add_place(e, where)
        if learn.run.request is not None:
            learn.run.request.note_failure(learn, where, cb, event_name)
    elif not is_open(learn, e.level):
        raise make_cancel_error(e, f'in {where}', learn.run.levels) from e


def call_each(learn: Learner, event_name: str, interrupted: bool = False) -> list[BaseException]:
    """Run every handler of an event, also if one of them raises, and return the exceptions.

    A second Ctrl-C is raised at once. Except in `after_error`, callbacks that were switched off are
    called too, because they may have changes to undo.
    """
    callbacks = learn.parts.callbacks
    raised: list[BaseException] = []
    for handler, switch, cb in callbacks.tables[learn.training][event_name]:
        has_left = cb not in callbacks
        if not switch and (event_name == 'after_error' or has_left):
            continue
        callbacks.running = cb, event_name, callbacks.running
        outer, user_code.is_running = user_code.is_running, True
        try:
            handler()
        except BaseException as e:
            user_code.is_running = outer
            if isinstance(e, KeyboardInterrupt) and interrupted:
                raise
            interrupted = interrupted or isinstance(e, KeyboardInterrupt)
            try:
                note_error(learn, e, cb, event_name)
            except CancelError as stray:
                e = stray
            raised.append(e)
        finally:
            user_code.is_running = outer
            callbacks.running = callbacks.running[2]
    return raised


@contextmanager
def preserved_state(
    learn: Learner,
    with_generators: bool = True,  # restore the global generators, too
) -> Iterator[None]:
    "Restore the random generators, the mode of each module and the loop's state at the end of a context."
    before = {name: learn.__dict__[name] for name in RESTORED if name in learn.__dict__}
    try:
        generators = preserved_rng() if with_generators else nullcontext()
        with preserved_modes(learn.model), generators:
            yield
    finally:
        for name in RESTORED:
            learn.__dict__.pop(name, None)
        learn.__dict__.update(before)


# -- callbacks that start a run --------------------------------------------------------------------


def hold_others(learn: Learner, kind: str) -> list[Any]:
    """Switch off the callbacks that take no part in a run, and return them.

    These are callbacks whose `run_in` excludes the run, and, in an evaluation, callbacks whose
    handlers started it: the evaluation would call the same handler, which would start another
    evaluation, endlessly.
    """
    callbacks = learn.parts.callbacks
    excluded = 'evaluation' if kind == 'fit' else 'fit'
    others = [cb for cb in callbacks if getattr(cb, 'run_in', 'any') == excluded]
    if kind != 'fit':
        others += [cb for cb, _ in list_running(learn)]
    return callbacks.hold(others) if others else []


def release_for_fit(learn: Learner, kind: str) -> list[Any]:
    "Switch on the callbacks with `run_in='fit'` for a fit within `with learn:`, and return them."
    callbacks = learn.parts.callbacks
    held = callbacks.held if kind == 'fit' else []
    waiting = [cb for cb in held if getattr(cb, 'run_in', 'any') == 'fit']
    callbacks.release(waiting)
    return waiting


# -- errors ----------------------------------------------------------------------------------------


def raise_first(error: BaseException | None, raised: list[BaseException]) -> None:
    "Raise the first error, unless `error` is being raised already. It gets notes about the other errors."
    first = error or (raised[0] if raised else None)
    for e in raised:
        if e is first:
            continue
        notes = ' '.join(getattr(e, '__notes__', ()))
        add_note(first or e, f'and then {type(e).__name__}: {e} {notes}')
    if error is None and first is not None:
        raise first


def make_cancel_error(e: CancelException, where: str, open_levels: tuple[str, ...]) -> CancelError:
    "Return the error for a Cancel exception that was raised outside of its level."
    level = LEVELS.get(e.level)
    legal = ''
    if level:
        end = f'`{level.after_cancel}` or `{level.after}` fires'
        legal = f'It is legal from `{level.before}` on, until {end}. '
    levels = ' > '.join(open_levels) or 'none'
    return CancelError(
        f'{type(e).__name__} was raised {where}, where no {e.level or "such"} level is open (open: {levels}). '
        f'{legal}To end a fit from anywhere: `self.learn.stop()`.'
    )
