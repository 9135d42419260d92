"""Composer-style callbacks in a Learner: `from_composer(cb)`."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import Any
from weakref import ref

from fastcore.basics import camel2snake

from learnkit.callbacks.recorder import recorder_of
from learnkit.core.learner_type import LearnerLike
from learnkit.core.time import Timestamp
from learnkit.engine.attributes import note_attributes
from learnkit.engine.budget import Budget
from learnkit.engine.callback import Callback
from learnkit.engine.events import EVENTS
from learnkit.engine.loop import sample_count
from learnkit.engine.run import add_note
from learnkit.interop.composer_state import ComposerLogger, ComposerState, Measured, label_of
from learnkit.interop.composer_time import Event, types_for
from learnkit.interop.hooks import check_style, load_state, own_hooks, state_of

__all__ = ['from_composer', 'composer_events']

# learnkit's events, and the Composer events of the same moment, in all phases
ALWAYS = {
    'after_create': 'init',
    'before_load': 'before_load',
    'after_load': 'after_load',
    'before_predict': 'predict_start',
    'after_predict': 'predict_end',
    'close': 'close',
    'post_close': 'post_close',
}
FIT = {
    'before_fit': 'fit_start',
    'before_iteration': 'iteration_start',
    'before_epoch': 'epoch_start',
    'after_train': 'epoch_end',
    'epoch_checkpoint': 'epoch_checkpoint',
    'after_iteration': 'iteration_end',
    'iteration_checkpoint': 'iteration_checkpoint',
    'after_fit': 'fit_end',
}
TRAIN = {
    'before_draw': 'before_dataloader',
    'after_draw': 'after_dataloader',
    'before_batch': 'batch_start before_train_batch',
    'before_pred': 'before_forward',
    'after_pred': 'after_forward before_loss',
    'after_loss': 'after_loss',
    'before_backward': 'before_backward',
    'after_backward': 'after_backward',
    'before_step': 'after_train_batch',
    'after_batch': 'batch_end',
    'batch_checkpoint': 'batch_checkpoint',
}
EVAL = {
    'before_validate': 'eval_start',
    'before_batch': 'eval_batch_start',
    'before_pred': 'eval_before_forward',
    'after_pred': 'eval_after_forward',
    'after_batch': 'eval_batch_end',
    'after_validate': 'eval_end',
}
PREDICT = {
    'before_batch': 'predict_batch_start',
    'before_pred': 'predict_before_forward',
    'after_pred': 'predict_after_forward',
    'after_batch': 'predict_batch_end',
}
IN_FIT = {'before_eval': 'eval_before_all', 'after_eval': 'eval_after_all'}
ALONE = {'before_eval': 'eval_standalone_start', 'after_eval': 'eval_standalone_end'}

HOOKS = (*(e.value for e in Event), 'close', 'post_close')
# events during which `xb` and `yb` exist
SPLIT = frozenset(EVENTS[EVENTS.index('before_batch') : EVENTS.index('batch_checkpoint') + 1])
_TABLES = ALWAYS, FIT, TRAIN, EVAL, PREDICT, IN_FIT, ALONE


def composer_events(
    event: str,  # name of a learnkit event
    learn: LearnerLike,  # the Learner, whose phase decides
) -> tuple[str, ...]:
    """Return the Composer events of a learnkit event, in their order.

    >>> from types import SimpleNamespace
    >>> composer_events('before_batch', SimpleNamespace(training=True, fitting=True, phase='train'))
    ('batch_start', 'before_train_batch')
    """
    if event in ALWAYS:
        names = ALWAYS[event]
    elif event in FIT:
        names = FIT[event] if learn.fitting else ''
    elif learn.phase == 'predict':
        names = PREDICT.get(event, '')
    elif event in IN_FIT:
        names = (IN_FIT if learn.fitting else ALONE)[event]
    else:
        names = (TRAIN if learn.training else EVAL).get(event, '')
    return tuple(names.split())


def from_composer(
    cb: Any,  # callback with methods such as `epoch_start(state, logger)`, or with `run_event`
) -> Callback:
    """Return a callback that runs a Composer callback.

    The methods run at the events in the table of docs/lifecycle.md, with a `state` that reads the
    Learner and a `logger` that writes to `learn.log`; microbatches have their own events from
    `before_forward` to `after_backward`. `init` runs before any other event, also for a callback
    that is added later. Composer itself is not needed; if it is imported, its own callbacks get its
    own events and times.

    Checkpointed: the callback's `state_dict` (without one, its changed attributes with plain data),
    the position in the epoch, and the last measurements.

    Raises `CallbackError` for an object without hooks, and warns of a misspelled hook.

    >>> from learnkit.testing import synth_learner
    >>> class Shout:
    ...     def epoch_end(self, state, logger): print(state.timestamp.epoch, state.timestamp.batch)
    >>> learn = synth_learner(n_train=3, cbs=from_composer(Shout()))
    >>> with learn.no_bar(): learn.fit(2)
    1ep 3ba
    2ep 6ba
    """
    return _FromComposer(cb)


class _Pass:
    "Counts of one pass over a loader outside of training."

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.batches, self.samples, self.began = 0, 0, perf_counter()

    def timestamp(self, types: Any) -> Any:
        return types.Timestamp(
            batch=self.batches,
            sample=self.samples,
            batch_in_epoch=self.batches,
            sample_in_epoch=self.samples,
            total_wct=timedelta(seconds=perf_counter() - self.began),
        )


class _FromComposer(Callback):
    "Run a Composer callback, and count what Composer's state reports and the Learner does not."

    order, remove_on_find, nondeterministic_state = 60, True, ('evaluated',)
    is_composer = True

    def __init__(self, cb: Any) -> None:
        self.wrapped = cb
        base = 'composer.core.callback'  # module of the base class, whose methods do nothing
        every = own_hooks(cb, ['run_event'], base)
        hooks = own_hooks(cb, HOOKS, base)
        check_style(cb, HOOKS, {**every, **hooks}, 'Composer', 'from_composer')
        note_attributes(cb)
        self.types, self._every, self._hooks = types_for(cb), every.get('run_event'), hooks
        self._view, self._logs = ComposerState(self), ComposerLogger(self)
        self.passes = {'eval': _Pass(), 'predict': _Pass()}
        self.measured: dict[str, dict[str, Measured]] = {}
        self.in_fit = self.has_fitted = self.is_split = self.has_graph = False
        self._known: Any = None  # weak reference to the Learner that `init` ran for
        self._since = self._since_epoch = Timestamp()  # start of the iteration and of the epoch
        self._before = Timestamp(), False  # counts before the last batch
        self._end: tuple[Any, str] | None = None  # end of this or the last fit
        self._epoch_over = False  # whether training of the epoch is over, but not counted yet
        self._evaluated, self._eval_began, self._epochs_before = 0.0, 0.0, 0
        for event in EVENTS:
            counts = getattr(self, f'_{event}') if hasattr(type(self), f'_{event}') else None
            if self._handles(event) or (counts and event not in SPLIT):
                self.__dict__[event] = partial(self._at, event)
            elif counts:
                self.__dict__[event] = counts  # only counts, as the event occurs at every batch

    @property
    def name(self) -> str:
        return f'composer_{camel2snake(type(self.wrapped).__name__)}'

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_known': None}

    def __repr__(self) -> str:
        return f'from_composer({type(self.wrapped).__name__})'

    def _handles(self, event: str) -> bool:
        "Return True if the callback has a hook for an event."
        names = {name for table in _TABLES for name in table.get(event, '').split()}
        return bool((self._every and names) or names & {*self._hooks})

    def _at(self, event: str) -> None:
        count = getattr(type(self), f'_{event}', None)
        if count:
            count(self)
        self.is_split, self.has_graph = event in SPLIT, event in ('after_loss', 'before_backward')
        is_known = self._known is not None and self._known() is self.learn
        if event == 'after_create' or not (is_known or event in ('close', 'post_close')):
            self._known = ref(self.learn)
            self._fire('init')
        for name in composer_events(event, self.learn):
            if name != 'init':
                self._fire(name)

    def _fire(self, name: str) -> None:
        closes = name in ('close', 'post_close')  # Composer has no events for these
        f = self._hooks.get(name) if closes or not self._every else None
        try:
            if name == 'post_close' and f:
                f()
            elif f:
                f(self._view, self._logs)
            elif self._every and not closes:
                self._every(self.types.Event(name), self._view, self._logs)
        except Exception as e:
            add_note(e, f'in {type(self.wrapped).__name__}.{name}, a Composer-style callback')
            raise

    # -- counting ----------------------------------------------------------------------------------

    def _before_fit(self) -> None:
        if not self.learn.fitting:
            return
        self.in_fit = self.has_fitted = True
        self._epochs_before, self._before = self.learn.counters.epochs, (self.learn.time, False)
        self._end = None
        # a failed fit may have left these set
        self._epoch_over, self._eval_began = False, 0.0

    def _cleanup(self) -> None:
        self.end()  # keeps the end, as the budget is removed after the fit
        self.in_fit = False

    def _before_iteration(self) -> None:
        self._since = self.learn.time

    def _before_epoch(self) -> None:
        if self.learn.fitting:
            self._since_epoch, self._epoch_over = self.learn.time, False

    def _before_batch(self) -> None:
        if self.learn.training:
            self._before = self.learn.time, False

    def _after_train(self) -> None:
        self._before = self.learn.time, False
        self._epoch_over = True
        self._measure('train', 'train_')

    def _after_epoch(self) -> None:
        if not self.learn.fitting:
            return
        # the Learner has counted the epoch by now
        self._since_epoch, self._epoch_over = self.learn.time, False

    def _before_eval(self) -> None:
        self._eval_began = perf_counter()

    def _after_eval(self) -> None:
        if self.in_fit:
            self._evaluated += perf_counter() - self._eval_began
        self._eval_began = 0.0

    def _before_predict(self) -> None:
        self.passes['predict'].start()

    def _before_validate(self) -> None:
        if self.learn.phase != 'predict':
            self.passes['eval'].start()

    def _after_batch(self) -> None:
        if self.learn.training:
            return
        run = self.passes['predict' if self.learn.phase == 'predict' else 'eval']
        run.batches, run.samples = run.batches + 1, run.samples + sample_count(self.learn)

    def _after_validate(self) -> None:
        name = self.learn.dl_name
        if self.learn.phase != 'predict':
            self._measure(label_of(name), '' if name == 'valid' else f'{name}/')

    def _measure(self, label: str, prefix: str) -> None:
        "Keep the Recorder's values of a loader."
        recorder = recorder_of(self.learn)
        values: dict[str, Any] = {}
        if recorder is not None:
            values = recorder._frame.values if label == 'train' else recorder.measured
        found = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
        if not prefix:
            found = {k: v for k, v in found.items() if '/' not in k and not k.startswith('train_')}
        self.measured[label] = {
            k: Measured(v) for k, v in found.items() if isinstance(v, (int, float))
        }

    def counts_before(self) -> dict[str, Any]:
        "Return the counts before the last batch, or before the end of the epoch."
        return self._counts(*self._before)

    def counts(self) -> dict[str, Any]:
        "Return the fields of a Composer timestamp."
        return self._counts(self.learn.time, self._epoch_over)

    def _counts(self, now: Timestamp, over: bool) -> dict[str, Any]:
        start = self._since
        at = now if over else self._since_epoch
        evaluating = perf_counter() - self._eval_began if self._eval_began and self.in_fit else 0.0
        wall = timedelta(seconds=max(0.0, now.sec - self._evaluated - evaluating))
        since = timedelta(seconds=0.0 if over else max(0.0, now.sec - at.sec))
        return {
            'iteration': now.iter,
            'epoch': now.ep + over,
            'batch': now.ba,
            'sample': now.sp,
            'token': now.tok,
            'epoch_in_iteration': now.ep + over - start.ep,
            'token_in_iteration': now.tok - start.tok,
            'batch_in_epoch': now.ba - at.ba,
            'sample_in_epoch': now.sp - at.sp,
            'token_in_epoch': now.tok - at.tok,
            'total_wct': wall,
            'epoch_wct': since,
        }

    def end(self) -> tuple[Any, str] | None:
        "Return end and unit of training over all fits; None if unknown or not a Composer unit."
        if not self.has_fitted:
            return None
        budget = self._budget()
        if budget:
            self._end = budget
        elif self.in_fit and isinstance(self.learn.n_epoch, int):
            self._end = self._epochs_before + self.learn.n_epoch, 'ep'
        return None if self._end is None or self._end[1] == 'st' else self._end

    def _budget(self) -> tuple[Any, str] | None:
        found = next((cb for cb in self.learn.cbs if isinstance(cb, Budget)), None)
        return None if found is None else (found._began + found.total.value, found.total.unit)

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        "Return the callback's state, the start of epoch and iteration, and the measurements."
        before, over = self._before
        measured = {
            label: {k: float(v) for k, v in values.items()}
            for label, values in self.measured.items()
        }
        return {
            'callback': state_of(self.wrapped),
            'epoch': self._since_epoch.state_dict(),
            'iteration': self._since.state_dict(),
            'before': before.state_dict(),
            'over': (over, self._epoch_over),
            'evaluated': self._evaluated,
            'epochs': self._epochs_before,
            'measured': measured,
            'passes': {name: (p.batches, p.samples) for name, p in self.passes.items()},
        }

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the callback's state and the counts."
        self._since_epoch = Timestamp.from_state_dict(sd['epoch'])
        self._since = Timestamp.from_state_dict(sd['iteration'])
        over, self._epoch_over = sd['over']
        self._before = Timestamp.from_state_dict(sd['before']), over
        self._evaluated = sd['evaluated']
        self._epochs_before = sd['epochs']
        for name, counts in sd['passes'].items():
            self.passes[name].batches, self.passes[name].samples = counts
        self.measured = {
            label: {k: Measured(v) for k, v in values.items()}
            for label, values in sd['measured'].items()
        }
        load_state(self.wrapped, sd['callback'])
