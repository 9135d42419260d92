"""Runs: what surrounds the loop from the first event to the cleanup, whatever happens between them."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from types import FrameType
from typing import Any, Self

import torch
from torch import nn

from learnkit.core.comm import ALONE, Comm
from learnkit.core.errors import CancelError, CancelException
from learnkit.core.random import preserved_rng
from learnkit.core.time import Timestamp
from learnkit.core.validation import warn_user
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import HasCallbacks, place, takes_every_event
from learnkit.engine.events import CONTEXTS, LEVELS
from learnkit.engine.timings import FIRST, Timings

__all__ = ['Runs', 'ContextStack', 'Turn']


NO_CONTEXT = nullcontext()

# what an evaluation puts back
STATE = ('training', 'phase', 'dl', 'dl_name', 'iter', 'n_iter', 'batch', 'xb', 'yb', 'pred', 'loss', 'loss_grad',
         '_form', '_source')


@dataclass(frozen=True, slots=True)
class Turn:
    "One call of `optimize`."
    only: str | None = None                     # the optimizer that steps; None: all of them
    compute: Callable[[], Any] | None = None    # computes the loss again; None: loss is a tensor
    retain_graph: bool = False


class Runs(HasCallbacks):
    """The loop's state, and the runs in it: a fit, a stand-alone validation or prediction, or one inside the other.

    A run has levels of its own, so that no Cancel exception crosses out of it. The outermost one ends with `cleanup`,
    after `after_error` when it failed, and leaves a learner that can be used again.
    """
    model: nn.Module
    dls: Any
    dl: Any
    batch: Any
    opt: Any
    loss_func: Any
    microbatch: int | str | None
    token_func: Callable[[tuple[Any, ...], tuple[Any, ...]], int] | None
    size_func: Callable[[tuple[Any, ...], tuple[Any, ...]], int] | None = None
    weight_func: Callable[[tuple[Any, ...], tuple[Any, ...]], Any] | str | None
    xb: tuple[Any, ...]
    yb: tuple[Any, ...]
    pred: Any
    loss: Any
    loss_grad: Any
    _form: Any                              # how batches of the loader at hand are split

    def __init__(self) -> None:
        super().__init__()
        self._open: tuple[str, ...] = ()        # the levels of the current run that are open, outermost first
        self._depth = 0                         # how many runs are open: 1 in a fit, 2 in a validate() inside it
        self._doing = ''                        # what is under way: a fit, an evaluation, or nothing
        self._ending = False                    # the outermost run is being cleaned up
        self._stopping = False
        self._repeating = False                 # an optimizer evaluates the batch again
        self._place = ''                        # of the loop, while the event of a checkpoint fires there
        self._evaluating = False                # from before_eval to after_eval
        self.training, self.fitting, self.phase, self.dl_name = False, False, 'train', 'train'
        self.n_epoch: int | None = 1
        self.epoch, self.iter, self.n_iter = 0, 0, None  # type: tuple[int, int, int | None]
        self.train_iter, self.pct_train = 0, 0.
        self.epochs_per_iteration: int | None = None
        self.error: BaseException | None = None
        self._done = {'iter': 0, 'ep': 0, 'ba': 0, 'st': 0, 'sp': 0, 'tok': 0}
        self._seconds = 0.                      # spent in fits that are over
        self._started: float | None = None      # when the running fit began
        self._device: torch.device | None = None
        self.timings, self._until_timed = Timings(), FIRST
        self.world: Comm = ALONE               # the processes that train together
        self._replica: nn.Module | None = None  # what training calls in the model's place
        self.turn: str | None = None            # the optimizer that `optimize(only=)` trains; None: all of them
        self._turn: Turn | None = None          # the call of `optimize` that is under way
        self._passes_alone = False              # `forward` calls modules themselves, not what stands for the model
        self._end_cleanup()

    def contexts(self, part: str) -> AbstractContextManager[Any]:
        "Return what the callbacks put around a part of a batch: 'forward' (from the model to the loss) or 'backward'."
        entries = self._tables[self.training][CONTEXTS[part]]
        if not entries: return NO_CONTEXT
        if len(entries) > 1: return ContextStack([make for make, switch, _ in entries if switch])
        make, switch, _ = entries[0]
        context = make() if switch else None
        return NO_CONTEXT if context is None else context

    @property
    def step_parameters(self) -> list[nn.Parameter]:
        "The parameters that the step at hand is for: of the optimizer whose turn it is, or of all."
        return list(self.opt.parameters(self.turn))

    @contextmanager
    def _taking(self, turn: Turn) -> Iterator[None]:
        "Let one optimizer, or all, have their turn for the length of a context."
        before = self._turn, self.turn
        self._turn, self.turn = turn, turn.only
        try:
            yield
        finally:
            self._turn, self.turn = before

    def _in_use(self) -> bool: return self._depth > 0 and not self._ending

    def _is_open(self, level: str) -> bool: return level in self._open

    def _note(self, e: BaseException, cb: Callback, event_name: str) -> None:
        "Add to an exception where it was raised; make a `CancelError` of a Cancel with no open level of its kind."
        where = f'{type(cb).__name__}.{event_name} ({place(self)})'
        if not isinstance(e, CancelException): add_note(e, f'in {where}')
        elif not self._is_open(e.level): raise stray_cancel(e, f'in {where}', self._open) from e

    def _call_each(self, event_name: str, interrupted: bool = False) -> list[BaseException]:
        """Run every handler of an event, also after one has failed, and return what they raised.

        The second Ctrl-C of a run ends it. Callbacks that were switched off hear of the end too: they may have
        something to undo."""
        raised: list[BaseException] = []
        for handler, switch, cb in self._tables[self.training][event_name]:
            if not switch and (event_name == 'after_error' or cb not in self._callbacks): continue  # out by now
            try: handler()
            except BaseException as e:
                if isinstance(e, KeyboardInterrupt) and interrupted: raise
                interrupted = interrupted or isinstance(e, KeyboardInterrupt)
                try: self._note(e, cb, event_name)
                except CancelError as stray: e = stray
                raised.append(e)
        return raised

    @contextmanager
    def _run(self, doing: str) -> Iterator[None]:
        """Open a run, levels and all; the outermost one ends with `after_error`, `cleanup` and a learner as before.

        `doing` is 'fit', 'evaluation', or '' for events fired by hand.
        """
        with self.lock:
            outer = self._open, self._doing, self.fitting, self._depth
            grad, began = torch.is_grad_enabled(), perf_counter()
            held = [] if doing == 'fit' else self._hold_callers()
            try:
                self._open, self._doing, self.fitting = (), doing or self._doing, doing == 'fit'
                self._depth += 1
                if doing == 'fit': self._started = began
                if self._depth == 1:
                    self._callbacks.refresh()  # classes may have got new handlers since
                    self._open_for_use()
                try: yield
                except CancelException as e: raise stray_cancel(e, f'({place(self)})', ()) from e
            except BaseException as e:
                if self._depth == 1: self._end_run(e)
                else: self._tell('_run_failed')
                raise
            else:
                if self._depth == 1: self._end_run(None)
            finally:
                self._open, self._doing, self.fitting, self._depth = outer
                self._callbacks.release(held)
                if doing == 'fit': self._seconds, self._started = self._finished('sec'), None
                # a signal inside torch's own contexts may leave it switched
                torch.set_grad_enabled(grad)

    def _hold_callers(self) -> list[Any]:
        """Switch off the callbacks that start the run at hand from one of their handlers; return them.

        Otherwise the run would call the same handler, and that one start the next run, without an end.
        """
        callers = running_handlers(self)
        for cb, event_name in callers:
            warn_of_held_inputs(self, cb, event_name)
        return self._callbacks.hold(cb for cb, _ in callers)

    def _end_run(self, error: BaseException | None) -> None:
        "Fire `after_error` and `cleanup`; the first error of a run stays first, the others are told in its notes."
        self.error, self._ending, raised = error, True, []
        interrupted = isinstance(error, KeyboardInterrupt)
        try:
            if error is not None:
                if not any(n.startswith('in ') for n in getattr(error, '__notes__', ())):
                    add_note(error, f'in {self.phase} ({place(self)})')
                raised += self._call_each('after_error', interrupted)
            raised += self._call_each('cleanup', interrupted or any(isinstance(e, KeyboardInterrupt) for e in raised))
        finally:
            if error is not None: self._forget_run()
            self.error, self._ending, self._stopping, self._place = None, False, False, ''
            for cb in self._callbacks:
                if not cb.run: cb.run = True
        raise_first(error, raised)

    def _tell(self, name: str) -> None:
        """Call a method of this name of every callback that has one.

        `_run_failed`: an evaluation failed, and what was changed for its length is to be put back, as the outer run may
        go on. `_before_evaluation`: one of a fit is about to begin. `_draw_failed`: a loader raised.
        `_check_closure`: a step evaluates the loss again, which is refused where it cannot be."""
        for cb in list(self._callbacks):
            if method := getattr(type(cb), name, None): method(cb)

    def _forget_run(self) -> None:
        "Let go of every tensor of a failed run."
        self._end_cleanup()
        if self.opt is not None: self.opt.zero_grad()

    def _end_cleanup(self) -> None:
        self.dl, self.xb, self.yb, self.pred, self.loss, self.batch = None, (None,), (None,), None, None, None
        self._form = None
        self.__dict__.pop('loss_grad', None)

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        "Put back what an evaluation touches: RNGs, the train or eval mode of each module, and the loop's state."
        before = {n: self.__dict__[n] for n in STATE if n in self.__dict__}
        modes = [(m, m.training) for m in self.model.modules()]
        try:
            with preserved_rng(): yield
        finally:
            for name in STATE: self.__dict__.pop(name, None)
            self.__dict__.update(before)
            for module, mode in modes: module.training = mode

    def stop(self) -> None:
        """End the fit after the current batch or epoch, with every `after_*` and checkpoint event fired.

        >>> from learnkit import Callback
        >>> from learnkit.testing import synth_learner
        >>> def enough(cb):
        ...     if cb.train_iter == 15: cb.learn.stop()
        >>> with synth_learner(n_train=10, cbs=Callback(after_batch=enough)).no_bar() as learn: learn.fit(100)
        >>> learn.train_iter, len(learn.history)
        (15, 2)

        Where several processes train together, they end once they have agreed on it (`DistributedTraining`).
        """
        self._stop_here()

    def _stop_here(self) -> None:
        "Stop, in every process alike, or in the only one."
        self._stopping = True

    @property
    def time(self) -> Timestamp:
        "What is finished so far, over all fits of this Learner."
        # a sum of shares may pass 1 by a rounding
        share = min(self.pct_train, 1.) if self.fitting else None
        return Timestamp(**{**self._done, 'st': self._finished('st')}, sec=self._finished('sec'), dur=share)

    def _finished(self, unit: str) -> Any:
        "Return what is finished so far in one unit, as a plain number."
        if unit == 'sec': return self._own_seconds()
        return self._done[unit] + (getattr(self.opt, 'n_steps', 0) if unit == 'st' else 0)

    def _own_seconds(self) -> float:
        "Return the seconds that this process has trained, by its own clock."
        return self._seconds + (perf_counter() - self._started if self._started is not None else 0.)

    def _ends_iteration(self) -> bool:
        k, done = self.epochs_per_iteration, self.epoch + 1
        return k is not None and (done % k == 0 or done == self.n_epoch or self._stopping)


class ContextStack(ExitStack):
    "Contexts that are made and entered, in order, when this one is entered."

    def __init__(self, makers: list[Callable[[], Any]]) -> None:
        super().__init__()
        self._makers = makers

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            for make in self._makers:
                if (context := make()) is not None: entered.enter_context(context)
            self.push(entered.pop_all())
        return self


# functions that call handlers
_DISPATCHES = (HasCallbacks.__call__.__code__, Runs._call_each.__code__)

# events whose handlers, and contexts, can change the loss and the metrics of an evaluation
_INPUTS = ('after_draw', 'before_batch', 'before_pred', 'after_pred', CONTEXTS['forward'])


def running_handlers(learn: Runs) -> list[tuple[Any, str]]:
    """Return the callbacks of `learn` whose handlers are running now, with their events, innermost first.

    The call stack knows them already, so that an event that starts no run pays nothing for it.
    """
    found: list[tuple[Any, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _DISPATCHES:
            names = frame.f_locals
            if names['self'] is learn and names.get('cb') is not None:
                found.append((names['cb'], names['event_name']))
        frame = frame.f_back
    return found


def warn_of_held_inputs(learn: Runs, cb: Any, event_name: str) -> None:
    "Warn where a callback that is switched off would have changed the batches of the evaluation."
    if any(cb is held for held in learn._callbacks.held) or takes_every_event(cb):
        return
    if getattr(cb, 'observer', False):
        return
    table = learn._callbacks.tables[False]
    changing = [n for n in _INPUTS if n != event_name and any(o is cb for _, _, o in table[n])]
    if changing:
        name = type(cb).__name__
        warn_user(
            f'{name}.{event_name} starts an evaluation, in which {name} itself is not called: what '
            f'its {" and ".join(changing)} would do to the batches is not done. Give that a '
            'callback of its own.'
        )


def add_note(e: BaseException, note: str) -> None:
    "Add a note, where the exception lets itself be added to."
    try: e.add_note(note)
    except Exception: pass


def raise_first(error: BaseException | None, raised: list[BaseException]) -> None:
    "Raise the first of several errors unless there is one already; the first gets notes of the others."
    first = error or (raised[0] if raised else None)
    for e in raised:
        if first is None or e is first: continue
        try: text = str(e)
        except Exception: text = 'without a message'
        notes = ' '.join(getattr(e, '__notes__', ()))
        add_note(first, f'and then {type(e).__name__}: {text} {notes}')
    if error is None and first is not None: raise first


def stray_cancel(e: CancelException, where: str, open_levels: tuple[str, ...]) -> CancelError:
    "Make the error for a Cancel exception without an open level of its kind."
    level, legal = LEVELS.get(e.level), ''
    if level: legal = f'It is legal from `{level.before}` on, until `{level.after_cancel}` or `{level.after}` fires. '
    return CancelError(f'{type(e).__name__} was raised {where}, where no {e.level or "such"} level is open (open: '
                       f'{" > ".join(open_levels) or "none"}). {legal}To end a fit from anywhere: `self.learn.stop()`.')
