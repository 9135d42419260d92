"""Runs: what surrounds the loop from the first event to the cleanup, whatever happens between."""

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

from learnkit.core.errors import CancelError, CancelException, add_note
from learnkit.core.interrupts import allow_interrupts, run_all
from learnkit.core.learner_type import LoopLike
from learnkit.core.model import preserved_modes, takes_batches
from learnkit.core.random import preserved_rng
from learnkit.core.validation import warn_user
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import CallbackHost, format_place, takes_every_event
from learnkit.engine.events import CONTEXTS, LEVELS

__all__ = [
    'ContextStack',
    'Run',
    'Turn',
    'call_each',
    'end_run',
    'open_run',
    'preserved_state',
    'raise_first',
]

NO_CONTEXT = nullcontext()

# what an evaluation restores
STATE = (
    'training', 'phase', 'dl', 'dl_name', 'iter', 'n_iter', 'batch', 'xb', 'yb', 'pred', 'loss', 'loss_grad',
    'batch_form', 'loader_name',
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Turn:
    "One call of `optimize`."

    only: str | None = None  # the optimizer that steps; None: all of them
    compute: Callable[[], Any] | None = None  # computes the loss again; None: it was a tensor
    retain_graph: bool = False


@dataclass
class Run:
    """The run under way, and where it is: `learn.run`.

    A run is a fit, a stand-alone validation or prediction, or one of them inside another. Each has
    its own levels, so that no Cancel exception crosses out of it.
    """

    kind: str = ''  # 'fit', 'evaluation', or '' for none
    depth: int = 0  # how many runs are open: 1 in a fit, 2 in a validate() inside it
    levels: tuple[str, ...] = ()  # the open levels of the current run, outermost first
    stopping: bool = False  # the fit ends after the batch or the epoch at hand
    ending: bool = False  # the outermost run is being cleaned up
    evaluating: bool = False  # from before_eval to after_eval
    repeating: bool = False  # an optimizer evaluates the batch again
    checkpoint_event: str = ''  # 'batch', 'epoch', 'iteration' while that checkpoint event fires
    resume: Any = None  # the `ResumeState` of the checkpoint that is still to be restored
    resumes_at: int = 0  # the next batch of the epoch in which a checkpoint was taken
    stage: int | None = None  # which of the fits of `fine_tune` this is
    takes_batches: bool = False  # the model is called with whole batches
    device: torch.device | None = None  # where the batches of the loader at hand go
    turn: Turn | None = None  # the call of `optimize` that is under way
    retains_graph: bool | None = None  # whether a backward pass keeps its graph for another one
    calls_modules: bool = False  # `forward` calls modules themselves, without their wrapper
    counts_samples: str | None = None  # what of this fit counts samples: '60sp'
    microbatch: int = 0  # the number of the microbatch at hand
    is_last_microbatch: bool = True
    microbatch_share: Any = 1.0  # the share of the microbatch in the loss of its batch


def is_in_use(learn: LoopLike) -> bool:
    "Return True while a run is under way that is not being cleaned up."
    return learn.run.depth > 0 and not learn.run.ending


@contextmanager
def open_run(
    learn: LoopLike,
    kind: str,  # 'fit', 'evaluation', or '' for events fired by hand
) -> Iterator[None]:
    "Open a run; the outermost one ends with `after_error`, `cleanup` and a Learner as before."
    run, counters = learn.run, learn.counters
    with learn.lock:
        outer = run.levels, run.kind, learn.fitting, run.depth
        grad, began = torch.is_grad_enabled(), perf_counter()
        held = hold_others(learn, kind)
        released = release_for_fit(learn, kind)
        try:
            run.levels, run.kind, learn.fitting = (), kind or run.kind, kind == 'fit'
            run.depth += 1
            if kind == 'fit':
                counters.fit_began = began
            if run.depth == 1:
                run.takes_batches = takes_batches(learn.model)
                learn.callbacks.refresh()  # classes may have got new handlers since
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
                counters.seconds, counters.fit_began = learn.finished('sec'), None
            torch.set_grad_enabled(
                grad
            )  # a signal inside torch's own contexts may have switched it


def end_run(learn: LoopLike, error: BaseException | None) -> None:
    "Fire `after_error` and `cleanup`; the run's first error stays first, and gets notes of others."
    run = learn.run
    learn.error, run.ending = error, True
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
            run_all([partial(_settle, learn, error), *_releases(learn)])
        except Exception as e:
            raised.append(e)
    raise_first(error, raised)


def _settle(learn: LoopLike, error: BaseException | None) -> None:
    "Reset the state of the run that ends."
    run = learn.run
    if error is not None:
        learn.forget_run()
    learn.error, run.ending, run.stopping, run.checkpoint_event = None, False, False, ''
    for cb in learn.callbacks:
        if not cb.run:
            cb.run = True


def _releases(learn: LoopLike) -> list[Callable[[], object]]:
    "Return the functions that give back what callbacks hold of the process."
    return [cb.on_run_ended for cb in learn.callbacks if isinstance(cb, Callback)]


def call_each(learn: LoopLike, event_name: str, interrupted: bool = False) -> list[BaseException]:
    """Run every handler of an event, also after one has failed, and return what they raised.

    The second Ctrl-C of a run ends it. Callbacks that were switched off are called too: they may
    have something to undo.
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
    "Restore what an evaluation changes: RNGs, the mode of each module, and the loop's state."
    before = {name: learn.__dict__[name] for name in STATE if name in learn.__dict__}
    try:
        with preserved_modes(learn.model), preserved_rng():
            yield
    finally:
        for name in STATE:
            learn.__dict__.pop(name, None)
        learn.__dict__.update(before)


class ContextStack(ExitStack):
    "Contexts that are made and entered, in order, when this one is entered."

    def __init__(self, makers: list[Callable[[], Any]]) -> None:
        super().__init__()
        self._makers = makers

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            for make in self._makers:
                context = make()
                if context is not None:
                    entered.enter_context(context)
            self.push(entered.pop_all())
        return self


# -- callbacks that start a run --------------------------------------------------------------------

# functions that call handlers, with the names of the Learner and the callback in them
_DISPATCHES = {CallbackHost.__call__.__code__: 'self', call_each.__code__: 'learn'}

# events whose handlers, and contexts, can change the loss and the metrics of an evaluation
_INPUTS = ('after_draw', 'before_batch', 'before_pred', 'after_pred', CONTEXTS['forward'])


def hold_others(learn: LoopLike, kind: str) -> list[Any]:
    """Switch off the callbacks that have no part in a run, and return them.

    These are callbacks whose `run_in` excludes it, and, in an evaluation, callbacks that start it
    from one of their handlers. Otherwise the evaluation would call the same handler, which would
    start the next evaluation, without an end.
    """
    excluded = 'evaluation' if kind == 'fit' else 'fit'
    others = [cb for cb in learn.callbacks if getattr(cb, 'run_in', 'any') == excluded]
    if kind != 'fit':
        callers = running_handlers(learn)
        for cb, event_name in callers:
            warn_of_held_inputs(learn, cb, event_name)
        others += [cb for cb, _ in callers]
    return learn.callbacks.hold(others) if others else []


def release_for_fit(learn: LoopLike, kind: str) -> list[Any]:
    "Switch on the callbacks of fits that an outer run, such as `with learn:`, holds; return them."
    if kind != 'fit':
        return []
    waiting = [cb for cb in learn.callbacks.held if getattr(cb, 'run_in', 'any') == 'fit']
    learn.callbacks.release(waiting)
    return waiting


def running_handlers(learn: LoopLike) -> list[tuple[Any, str]]:
    """Return the callbacks of `learn` whose handlers are running now, with their events, innermost first.

    The call stack knows them already, so that an event that starts no run pays nothing for it.
    """
    found: list[tuple[Any, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = _DISPATCHES.get(frame.f_code)
        if owner is not None:
            names = frame.f_locals
            if names[owner] is learn and names.get('cb') is not None:
                found.append((names['cb'], names['event_name']))
        frame = frame.f_back
    return found


def warn_of_held_inputs(learn: LoopLike, cb: Any, event_name: str) -> None:
    "Warn if a callback that is switched off would have changed the batches of the evaluation."
    if any(cb is held for held in learn.callbacks.held) or takes_every_event(cb):
        return
    if getattr(cb, 'observer', False):
        return
    table = learn.callbacks.tables[False]
    changing = [n for n in _INPUTS if n != event_name and any(o is cb for _, _, o in table[n])]
    if changing:
        name = type(cb).__name__
        warn_user(
            f'{name}.{event_name} starts an evaluation, in which {name} itself is not called: what '
            f'its {" and ".join(changing)} would do to the batches is not done. Move that to a '
            'separate callback.'
        )


# -- errors ----------------------------------------------------------------------------------------


def raise_first(error: BaseException | None, raised: list[BaseException]) -> None:
    "Raise the first of several errors unless there is one already; the first gets notes of the others."
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
    "Make the error for a Cancel exception without an open level of its kind."
    level, legal = LEVELS.get(e.level), ''
    if level:
        end = f'`{level.after_cancel}` or `{level.after}` fires'
        legal = f'It is legal from `{level.before}` on, until {end}. '
    levels = ' > '.join(open_levels) or 'none'
    return CancelError(
        f'{type(e).__name__} was raised {where}, where no {e.level or "such"} level is open (open: {levels}). '
        f'{legal}To end a fit from anywhere: `self.learn.stop()`.'
    )
