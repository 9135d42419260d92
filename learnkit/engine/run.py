"""Runs of a Learner: open a fit, evaluation or prediction, and always end it with its cleanup."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from learnkit.core.errors import CancelError, CancelException, FitError, add_note
from learnkit.core.interrupts import allow_interrupts, run_all
from learnkit.core.model import WholeBatches, preserved_modes, takes_batches
from learnkit.core.random import preserved_rng
from learnkit.core.validation import warn_user
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.data.torch_loader import forget_workers
from learnkit.engine.advice import explain_error
from learnkit.engine.callback import Callback, declared
from learnkit.engine.dispatch import (
    contains_object,
    format_place,
    list_running,
    takes_every_event,
)
from learnkit.engine.events import CONTEXTS, LEVELS

if TYPE_CHECKING:
    from learnkit.learner import Learner

CLEANUP = 'cleanup'  # kind of a run that ends

# attributes of the loop that an evaluation restores
STATE = (
    'training', 'phase', 'dl', 'dl_name', 'iter', 'n_iter', 'batch', 'xb', 'yb', 'pred', 'loss', 'loss_grad',
    'batch_form', 'loader_name',
)  # fmt: skip


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


def clear_pass(learn: Learner) -> None:
    "Delete the prediction and the loss of the last forward pass."
    learn.__dict__.pop('pred', None)
    learn.__dict__.pop('loss_grad', None)


def release_loss(learn: Any) -> None:
    "Detach `loss` from its graph, in place, so that a callback that has kept it keeps no graph."
    loss = learn.loss
    if isinstance(loss, Tensor) and loss.requires_grad:
        try:
            loss.detach_()
        except RuntimeError:  # a view cannot be detached in place
            learn.loss = loss.detach()


def refuse_run(learn: Learner, value: object) -> None:
    "Raise `FitError` for an assignment to `learn.run`."
    raise FitError(
        f'learn.run = {value!r}: `learn.run` is the state of the current run and is not assigned. `learn.fit(5)` '
        'trains; to switch a callback off, set `run = False` on the callback.'
    )


def is_in_use(learn: Learner) -> bool:
    "Return True during a run, until its cleanup begins."
    return learn.run.depth > 0 and learn.run.kind != CLEANUP


@contextmanager
def open_run(
    learn: Learner,
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
                learn.whole_batches = WholeBatches() if takes_batches(learn.model) else None
                learn.callbacks.refresh(classes=True)
                learn._open_for_use()
            try:
                yield
            except CancelException as e:
                raise make_cancel_error(e, f'({format_place(learn)})', ()) from e
        except BaseException as e:
            error = explain_error(learn, e)
            if run.depth == 1:
                learn.strategy.end_run(learn, error)
            else:
                learn.callbacks.notify('on_run_failed')
            if error is not e:
                raise error from e
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
        run.kind = kind
    raise_first(error, raised)


def _reset_run(learn: Learner, error: BaseException | None) -> None:
    "Reset the state of the run that has ended."
    run = learn.run
    if error is not None:
        forget_run(learn)
    learn.passes.close()
    learn.resuming = None
    learn.resumed = False
    learn.error = None
    run.stopping = False
    for cb in learn.callbacks:
        if not cb.run:
            cb.run = True


def forget_run(learn: Learner) -> None:
    "Release the tensors of a failed run, and the persistent workers of its loaders."
    for dl in (learn.dls.train, *(dl for _, dl in evaluation_loaders(learn.dls))):
        forget_workers(dl)
    learn.passes.forget()
    learn._end_cleanup()
    if learn.opt is not None:
        learn.opt.zero_grad()


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
    where = f'{type(cb).__name__}.{event_name} ({format_place(learn)}{evaluation})'
    if not isinstance(e, CancelException):
        add_note(e, f'in {where}')
    elif not is_open(learn, e.level):
        raise make_cancel_error(e, f'in {where}', learn.run.levels) from e


def _list_releases(learn: Learner) -> list[Callable[[], object]]:
    "Return the functions of callbacks that release resources of the process."
    ends = [declared(cb, 'on_run_ended') for cb in learn.callbacks]
    return [end for end in ends if end is not None]


def call_each(learn: Learner, event_name: str, interrupted: bool = False) -> list[BaseException]:
    """Run every handler of an event, also if one of them raises, and return the exceptions.

    A second Ctrl-C is raised at once. Except in `after_error`, callbacks that were switched off are
    called too, because they may have changes to undo.
    """
    raised: list[BaseException] = []
    for handler, switch, cb in learn.tables[learn.training][event_name]:
        has_left = cb not in learn.callbacks
        if not switch and (event_name == 'after_error' or has_left):
            continue
        learn.running = cb, event_name, learn.running
        try:
            with allow_interrupts():
                handler()
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt) and interrupted:
                raise
            interrupted = interrupted or isinstance(e, KeyboardInterrupt)
            try:
                note_error(learn, e, cb, event_name)
            except CancelError as stray:
                e = stray
            raised.append(e)
        finally:
            learn.running = learn.running[2]
    return raised


@contextmanager
def open_level(learn: Learner, event_type: str) -> Iterator[None]:
    """Open a level of the loop within a context: fire its first event, and at the end the others.

    For a function, `_with_events` takes less time. It also drops the Cancel exception, with the
    tensors of its frames, before the handlers of `after_cancel_*` run.
    """
    level = LEVELS[event_type]
    run = learn.run
    outer = run.levels
    cancelled = False
    run.levels = (*outer, event_type)
    try:
        yield
    except level.exception:
        cancelled = True
    finally:
        run.levels = outer
    if cancelled:
        learn(level.after_cancel)
    learn(level.after)


@contextmanager
def preserved_state(learn: Learner) -> Iterator[None]:
    "Restore the random generators, the mode of each module and the loop's state at the end of a context."
    before = {name: learn.__dict__[name] for name in STATE if name in learn.__dict__}
    try:
        with preserved_modes(learn.model), preserved_rng():
            yield
    finally:
        for name in STATE:
            learn.__dict__.pop(name, None)
        learn.__dict__.update(before)


# -- callbacks that start a run --------------------------------------------------------------------

# events and contexts that can change the loss and the metrics of an evaluation
_INPUTS = ('after_draw', 'before_batch', 'before_pred', 'after_pred', CONTEXTS['forward'])


def hold_others(learn: Learner, kind: str) -> list[Any]:
    """Switch off the callbacks that take no part in a run, and return them.

    These are callbacks whose `run_in` excludes the run, and, in an evaluation, callbacks whose
    handlers started it: the evaluation would call the same handler, which would start another
    evaluation, endlessly.
    """
    excluded = 'evaluation' if kind == 'fit' else 'fit'
    others = [cb for cb in learn.callbacks if getattr(cb, 'run_in', 'any') == excluded]
    if kind != 'fit':
        callers = list_running(learn)
        for cb, event_name in callers:
            warn_of_switched_off(learn, cb, event_name)
        others += [cb for cb, _ in callers]
    return learn.callbacks.hold(others) if others else []


def release_for_fit(learn: Learner, kind: str) -> list[Any]:
    "Switch on the callbacks with `run_in='fit'` that an outer run has switched off, and return them."
    if kind != 'fit':
        return []
    waiting = [cb for cb in learn.callbacks.held if getattr(cb, 'run_in', 'any') == 'fit']
    if waiting:
        learn.callbacks.release(waiting)
    return waiting


def warn_of_switched_off(learn: Learner, cb: Any, event_name: str) -> None:
    "Warn if a callback that was switched off would have changed the batches of the evaluation."
    if contains_object(learn.callbacks.held, cb) or takes_every_event(type(cb)):
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
            f'{name}.{event_name} starts an evaluation, in which {name} itself is not called. Its '
            f'{" and ".join(changing)} does not change the batches there: move it to a separate '
            'callback.'
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
