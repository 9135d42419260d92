"""Runs of a Learner: open a fit, evaluation or prediction, and always end it with its cleanup."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import FrameType
from typing import Any, Self

import torch

from learnkit.core.errors import CancelError, CancelException, FitError, add_note
from learnkit.core.interrupts import allow_interrupts, run_all
from learnkit.core.learner_type import LoopLike
from learnkit.core.model import preserved_modes, takes_batches
from learnkit.core.random import preserved_rng
from learnkit.core.validation import warn_user
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import CallbackHost, contains_object, format_place, takes_every_event
from learnkit.engine.events import CONTEXTS, LEVELS

__all__ = [
    'ContextStack',
    'Run',
    'OptimizeCall',
    'call_each',
    'end_run',
    'open_run',
    'preserved_state',
    'raise_first',
    'refuse_run',
]

NO_CONTEXT = nullcontext()

# attributes of the loop that an evaluation restores
STATE = (
    'training', 'phase', 'dl', 'dl_name', 'iter', 'n_iter', 'batch', 'xb', 'yb', 'pred', 'loss', 'loss_grad',
    'batch_form', 'loader_name',
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OptimizeCall:
    "Arguments of the current `optimize` call."

    only: str | None = None  # optimizer that steps; None: all of them
    compute: Callable[[], Any] | None = None  # computes the loss; None: a tensor was given
    retain_graph: bool = False


@dataclass
class Run:
    """State of the current run: `learn.run`.

    A run is a fit, a stand-alone validation or prediction, or one of these inside another run. Each
    run has its own levels, so that no Cancel exception leaves it.
    """

    kind: str = ''  # 'fit', 'evaluation', 'prediction', or '' for no run
    depth: int = 0  # number of open runs: 1 in a fit, 2 in a validate() inside it
    levels: tuple[str, ...] = ()  # open levels of the current run, outermost first
    stopping: bool = False  # the fit ends after the current batch or epoch
    ending: bool = False  # the outermost run is being cleaned up
    evaluating: bool = False  # True from before_eval to after_eval
    repeating: bool = False  # an optimizer evaluates the batch again
    checkpoint_event: str = ''  # 'batch', 'epoch' or 'iteration' while its checkpoint event fires
    resume: Any = None  # `ResumeState` of a checkpoint that is not restored yet
    resumes_at: int = 0  # number of the next batch, in the epoch of the checkpoint
    stage: int | None = None  # index of the fit in `fine_tune`
    takes_batches: bool = False  # the model is called with whole batches
    device: torch.device | None = None  # device of the batches of the current loader
    optimize_call: OptimizeCall | None = None  # current call of `optimize`
    retains_graph: bool | None = None  # whether backward keeps the graph for another pass
    calls_modules: bool = False  # `forward` calls modules directly, without their wrapper
    counts_samples: str | None = None  # amount of this fit that is counted in samples: '60sp'
    microbatch: int = 0  # number of the current microbatch
    is_last_microbatch: bool = True
    microbatch_share: Any = 1.0  # weight of the microbatch in the loss of its batch


def refuse_run(learn: LoopLike, value: object) -> None:
    "Raise `FitError` for an assignment to `learn.run`."
    raise FitError(
        f'learn.run = {value!r}: `learn.run` is the state of the current run and is not assigned. `learn.fit(5)` '
        'trains; to switch a callback off, set `run = False` on the callback.'
    )


def is_in_use(learn: LoopLike) -> bool:
    "Return True during a run, until its cleanup begins."
    return learn.run.depth > 0 and not learn.run.ending


@contextmanager
def open_run(
    learn: LoopLike,
    kind: str,  # 'fit', 'evaluation', 'prediction', or '' for events fired by hand
) -> Iterator[None]:
    "Open a run. The outermost run ends with `after_error` and `cleanup`, and restores the Learner."
    run = learn.run
    counters = learn.counters
    with learn.lock:
        outer = run.levels, run.kind, learn.fitting, run.depth
        grad = torch.is_grad_enabled()
        began = perf_counter()
        held = hold_others(learn, kind)
        released = release_for_fit(learn, kind)
        try:
            run.levels = ()
            run.kind = kind or run.kind
            learn.fitting = kind == 'fit'
            run.depth += 1
            if kind == 'fit':
                counters.fit_began = began
            if run.depth == 1:
                run.takes_batches = takes_batches(learn.model)
                learn.callbacks.refresh()  # classes may have new handlers
                learn._open_for_use()
            try:
                yield
            except CancelException as e:
                raise make_cancel_error(e, f'({format_place(learn)})', ()) from e
        except BaseException as e:
            if run.depth == 1:
                learn.strategy.end_run(learn, e)
            else:
                learn.callbacks.notify('on_run_failed')
            raise
        else:
            if run.depth == 1:
                learn.strategy.end_run(learn, None)
        finally:
            run.levels, run.kind, learn.fitting, run.depth = outer
            learn.callbacks.release(held)
            learn.callbacks.hold(released)
            if kind == 'fit':
                counters.seconds = learn.finished('sec')
                counters.fit_began = None
            # a signal inside a context of torch may have switched it
            torch.set_grad_enabled(grad)


def end_run(learn: LoopLike, error: BaseException | None) -> None:
    "End the outermost run: fire `after_error` and `cleanup`. The first error gets notes about later errors."
    run = learn.run
    learn.error = error
    run.ending = True
    raised: list[BaseException] = []
    interrupted = isinstance(error, KeyboardInterrupt)
    try:
        if error is not None:
            if not any(note.startswith('in ') for note in getattr(error, '__notes__', ())):
                add_note(error, f'in {learn.phase} ({format_place(learn)})')
            raised += call_each(learn, 'after_error', interrupted)
        interrupted = interrupted or any(isinstance(e, KeyboardInterrupt) for e in raised)
        raised += call_each(learn, 'cleanup', interrupted)
    finally:
        try:
            run_all([partial(_reset_run, learn, error), *_list_releases(learn)])
        except Exception as e:
            raised.append(e)
    raise_first(error, raised)


def _reset_run(learn: LoopLike, error: BaseException | None) -> None:
    "Reset the state of the run that has ended."
    run = learn.run
    if error is not None:
        learn.forget_run()
    learn.error = None
    run.ending = False
    run.stopping = False
    run.checkpoint_event = ''
    for cb in learn.callbacks:
        if not cb.run:
            cb.run = True


def _list_releases(learn: LoopLike) -> list[Callable[[], object]]:
    "Return the functions of callbacks that release resources of the process."
    return [cb.on_run_ended for cb in learn.callbacks if isinstance(cb, Callback)]


def call_each(learn: LoopLike, event_name: str, interrupted: bool = False) -> list[BaseException]:
    """Run every handler of an event, also if one of them raises, and return the exceptions.

    A second Ctrl-C is raised at once. Except in `after_error`, callbacks that were switched off are
    called too, because they may have changes to undo.
    """
    raised: list[BaseException] = []
    for handler, switch, cb in learn.tables[learn.training][event_name]:
        has_left = cb not in learn.callbacks
        if not switch and (event_name == 'after_error' or has_left):
            continue
        try:
            call_handler(handler)
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt) and interrupted:
                raise
            interrupted = interrupted or isinstance(e, KeyboardInterrupt)
            try:
                learn.note_error(e, cb, event_name)
            except CancelError as stray:
                e = stray
            raised.append(e)
    return raised


@allow_interrupts
def call_handler(handler: Callable[[], Any]) -> None:
    "Call a handler at the end of a run."
    handler()


@contextmanager
def preserved_state(learn: LoopLike) -> Iterator[None]:
    "Restore the random generators, the mode of each module and the loop's state at the end of a context."
    before = {name: learn.__dict__[name] for name in STATE if name in learn.__dict__}
    try:
        with preserved_modes(learn.model), preserved_rng():
            yield
    finally:
        for name in STATE:
            learn.__dict__.pop(name, None)
        learn.__dict__.update(before)


class ContextStack(ExitStack):
    "Context manager that creates and enters several contexts in order."

    def __init__(self, factories: list[Callable[[], Any]]) -> None:
        super().__init__()
        self._factories = factories

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            for create in self._factories:
                context = create()
                if context is not None:
                    entered.enter_context(context)
            self.push(entered.pop_all())
        return self


# -- callbacks that start a run --------------------------------------------------------------------

# code of the functions that call handlers, with the name of their variable for the Learner
_DISPATCHERS = {CallbackHost.__call__.__code__: 'self', call_each.__code__: 'learn'}

# events and contexts that can change the loss and the metrics of an evaluation
_INPUTS = ('after_draw', 'before_batch', 'before_pred', 'after_pred', CONTEXTS['forward'])


def hold_others(learn: LoopLike, kind: str) -> list[Any]:
    """Switch off the callbacks that take no part in a run, and return them.

    These are callbacks whose `run_in` excludes the run, and, in an evaluation, callbacks whose
    handlers started it: the evaluation would call the same handler, which would start another
    evaluation, endlessly.
    """
    excluded = 'evaluation' if kind == 'fit' else 'fit'
    others = [cb for cb in learn.callbacks if getattr(cb, 'run_in', 'any') == excluded]
    if kind != 'fit':
        callers = find_running_handlers(learn)
        for cb, event_name in callers:
            warn_of_switched_off(learn, cb, event_name)
        others += [cb for cb, _ in callers]
    return learn.callbacks.hold(others) if others else []


def release_for_fit(learn: LoopLike, kind: str) -> list[Any]:
    "Switch on the callbacks with `run_in='fit'` that an outer run has switched off, and return them."
    if kind != 'fit':
        return []
    waiting = [cb for cb in learn.callbacks.held if getattr(cb, 'run_in', 'any') == 'fit']
    if waiting:
        learn.callbacks.release(waiting)
    return waiting


def find_running_handlers(learn: LoopLike) -> list[tuple[Any, str]]:
    """Return the callbacks of `learn` whose handlers are running, with their events, innermost first.

    They are found in the call stack, so that events have no overhead.
    """
    found: list[tuple[Any, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = _DISPATCHERS.get(frame.f_code)
        if owner is not None:
            names = frame.f_locals
            if names[owner] is learn and names.get('cb') is not None:
                found.append((names['cb'], names['event_name']))
        frame = frame.f_back
    return found


def warn_of_switched_off(learn: LoopLike, cb: Any, event_name: str) -> None:
    "Warn if a callback that was switched off would have changed the batches of the evaluation."
    if contains_object(learn.callbacks.held, cb) or takes_every_event(cb):
        return
    if getattr(cb, 'observer', False):
        return
    table = learn.callbacks.tables[False]
    changing = []
    for name in _INPUTS:
        owners = [owner for _, _, owner in table[name]]
        if name != event_name and contains_object(owners, cb):
            changing.append(name)
    if changing:
        name = type(cb).__name__
        warn_user(
            f'{name}.{event_name} starts an evaluation, in which {name} itself is not called: what '
            f'its {" and ".join(changing)} would do to the batches is not done. Move that to a '
            'separate callback.'
        )


# -- errors ----------------------------------------------------------------------------------------


def raise_first(error: BaseException | None, raised: list[BaseException]) -> None:
    "Raise the first error, unless `error` is being raised already. It gets notes about the other errors."
    first = error or (raised[0] if raised else None)
    for e in raised:
        if e is first:
            continue
        try:
            message = str(e)
        except Exception:
            message = 'without a message'
        notes = ' '.join(getattr(e, '__notes__', ()))
        add_note(first or e, f'and then {type(e).__name__}: {message} {notes}')
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
