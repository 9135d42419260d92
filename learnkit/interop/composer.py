"""Composer-style callbacks, algorithms and loggers in a Learner: `from_composer(cb)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import Any
from weakref import ref

from fastcore.basics import camel2snake

from learnkit.callbacks.recorder import recorder_of
from learnkit.core.errors import add_note
from learnkit.core.learner_type import LearnerLike
from learnkit.core.time import Timestamp
from learnkit.engine.budget import Budget
from learnkit.engine.callback import Callback
from learnkit.engine.callback_state import note_attributes
from learnkit.engine.events import EVENTS
from learnkit.engine.loop import sample_count
from learnkit.interop.composer_state import (
    ComposerLogger,
    ComposerState,
    Measured,
    label_of,
    measured_values,
)
from learnkit.interop.composer_time import Event, types_for
from learnkit.interop.composer_trainer import ComposerTrainer, add_trainer
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
    cb: Any,  # callback, algorithm or logger destination of Composer, or in its style
) -> Callback:
    """Return a callback that runs a Composer callback, algorithm or logger destination.

    The methods of a callback (`epoch_start(state, logger)` ..., or `run_event`) run at the events in
    the table of docs/lifecycle.md, with a `state` that reads the Learner and a `logger` that writes
    to `learn.log`; microbatches have their own events from `before_forward` to `after_backward`.
    `init` runs before any other event, also for a callback that is added later; `before_load` and
    `after_load` run before the first fit or evaluation. The gradients of a step can be read until
    the next `before_forward`. A fit that ends within an epoch has no `epoch_end`, as in Composer.

    An algorithm has `match(event, state)` and `apply(event, state, logger)`, and runs before
    callbacks. A logger destination gets what `learn.log` and other callbacks log, and what
    Composer's Trainer logs itself. Composer is not needed; if it is imported, its own callbacks get
    its own events and times.

    Checkpointed: the callback's `state_dict` (without one, its changed attributes if all of them are
    data), the position in the epoch, and the last measurements.

    Raises `CallbackError` for an object without hooks, and warns of a misspelled hook and of
    attributes that cannot be saved.

    >>> from learnkit.testing import synth_learner
    >>> class Shout:
    ...     def epoch_end(self, state, logger): print(state.timestamp.epoch, state.timestamp.batch)
    >>> learn = synth_learner(n_train=3, cbs=from_composer(Shout()))
    >>> with learn.no_bar(): learn.fit(2)
    1ep 3ba
    2ep 6ba
    """
    if all(callable(getattr(cb, name, None)) for name in ('match', 'apply')):
        return _FromAlgorithm(cb)
    if all(callable(getattr(cb, name, None)) for name in ('log_metrics', 'can_upload_files')):
        return _FromDestination(cb)
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

    order, remove_on_find, nondeterministic_state = 60, True, ('evaluated', 'walls')
    is_composer, is_algorithm, is_destination = True, False, False

    def __init__(self, cb: Any) -> None:
        self.wrapped = cb
        every, hooks = self._find_hooks(cb)
        check_style(cb, HOOKS, {**every, **hooks}, 'Composer', 'from_composer')
        note_attributes(cb)
        self.types, self._every, self._hooks = types_for(cb), every.get('run_event'), hooks
        self.view, self.logs = ComposerState(self), ComposerLogger(self)
        self.passes = {'eval': _Pass(), 'predict': _Pass()}
        self.measured: dict[str, dict[str, Measured]] = {}
        self.in_fit = self.has_fitted = self.is_split = self.has_graph = False
        # the loader that Composer's state has: 'train', 'eval' or 'predict'; empty during `init`
        self.place = ''
        self.last_loss: Any = None  # loss of the last microbatch
        self.batch_loss: Any = None  # loss of the last batch
        self._known: Any = None  # weak reference to the Learner that `init` ran for
        self._trainer: ComposerTrainer | None = None
        self._has_loaded = False  # whether `before_load` and `after_load` ran
        self._grads: list[tuple[Any, Any]] = []  # gradients of the last step
        self._trained: list[Any] = []  # modules that were in training mode before an evaluation
        self._since = self._since_epoch = Timestamp()  # start of the iteration and of the epoch
        self.previous: dict[str, Any] | None = None  # counts before the last batch or epoch end
        self._at_start: dict[str, Any] = {}  # counts at the start of the batch
        self._end: tuple[Any, str] | None = None  # end of this or the last fit
        self._stopped_at: tuple[Any, str] | None = None  # end after `stop_training`
        self._epoch_over = False  # whether training of the epoch is over, but not counted yet
        self._cut: dict[str, Any] | None = None  # counts at the end of a fit within an epoch
        self._evaluated, self._eval_began, self._epochs_before = 0.0, 0.0, 0
        for event in EVENTS:
            counts = getattr(self, f'_{event}') if hasattr(type(self), f'_{event}') else None
            if self._handles(event) or (counts and event not in SPLIT):
                self.__dict__[event] = partial(self._at, event)
            elif counts:
                self.__dict__[event] = counts  # only counts, as the event occurs at every batch

    def _find_hooks(self, cb: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        "Return the callback's `run_event`, and its methods named after events."
        base = 'composer.core.callback'  # module of the base class, whose methods do nothing
        return own_hooks(cb, ['run_event'], base), own_hooks(cb, HOOKS, base)

    @property
    def name(self) -> str:
        return f'composer_{camel2snake(type(self.wrapped).__name__)}'

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_known': None, '_grads': [], '_trained': []}

    def __repr__(self) -> str:
        return f'from_composer({type(self.wrapped).__name__})'

    def _handles(self, event: str) -> bool:
        "Return True if the callback has a hook for an event."
        names = {name for table in _TABLES for name in table.get(event, '').split()}
        return bool((self._every and names) or names & {*self._hooks})

    # -- events ------------------------------------------------------------------------------------

    def _at(self, event: str) -> None:
        if event not in ('close', 'post_close'):
            self.begin()
        if event in ('before_load', 'after_load'):
            self._has_loaded = True
        elif event == 'before_fit' and not self._has_loaded:
            self._has_loaded = True
            self._fire('before_load')
            self._fire('after_load')
        count = getattr(type(self), f'_{event}', None)
        if count:
            count(self)
        self.is_split, self.has_graph = event in SPLIT, event in ('after_loss', 'before_backward')
        for name in self._composer_events(event):
            starts = name == 'before_train_batch'
            if starts and self._trainer is not None and self._hook(name) is not None:
                self._trainer.begin_batch()
            self._fire(name)
            if starts:
                self._grads = []  # where Composer clears them
        if event == 'after_predict' or (event == 'after_validate' and self.place == 'eval'):
            self.place = 'train'

    def begin(self) -> None:
        "Run `init` before the first event of a Learner."
        if self._known is None or self._known() is not self.learn:
            self._known, self._has_loaded = ref(self.learn), False
            self._trainer = add_trainer(self.learn, self.is_destination)
            self.place = ''
            self._fire('init')
            self.place = 'train'

    def _composer_events(self, event: str) -> list[str]:
        "Return the Composer events of an event, with the events that Composer fires at other times."
        learn = self.learn
        names = [name for name in composer_events(event, learn) if name != 'init']
        if event == 'before_epoch' and learn.fitting and self._is_unbroken():
            names = ['iteration_start', *names]
        elif event == 'after_train' and self._cut is not None:
            names = ['fit_end']  # Composer's last evaluation follows `fit_end` here
        elif event in ('epoch_checkpoint', 'after_fit') and self._cut is not None:
            names = []
        return names

    def _is_unbroken(self) -> bool:
        "Return True at the very first epoch of a training without iterations."
        learn = self.learn
        return learn.epochs_per_iteration is None and not learn.time.ba and not learn.resumed

    def _fire(self, name: str) -> None:
        hook = self._hook(name)
        if hook is None:
            return
        try:
            with self._as_in_composer(name):
                hook()
        except Exception as e:
            add_note(e, f'in {type(self.wrapped).__name__}.{name}, a Composer-style callback')
            raise

    def _hook(self, name: str) -> Callable[[], Any] | None:
        "Return what a Composer event calls, or None."
        own = self._hooks.get(name)
        if name == 'post_close':
            return own
        if self._every and name != 'close':  # Composer has no event for `close`
            return partial(self._every, self.types.Event(name), self.view, self.logs)
        return None if own is None else partial(own, self.view, self.logs)

    @contextmanager
    def _as_in_composer(self, name: str) -> Iterator[None]:
        "Return a context with the gradients of the last step, and with Composer's module modes."
        changed = self._other_modes(name)
        gone = [(p, grad) for p, grad in self._grads if p.grad is None]
        for m in changed:
            m.training = not m.training
        for p, grad in gone:
            p.grad = grad
        try:
            yield
        finally:
            for p, grad in gone:
                if p.grad is grad:
                    p.grad = None
            for m in changed:
                m.training = not m.training

    def _other_modes(self, name: str) -> list[Any]:
        "Return the modules whose mode differs from Composer's at an event."
        if name in ('predict_start', 'predict_end'):
            return [m for m in self.learn.model.modules() if m.training]
        if self.place != 'train':
            return []
        return [m for m in self._trained if not m.training]

    def has_no_gradients(self) -> bool:
        "Return True at the end of a batch that made no gradient, because it was cancelled."
        return not self._grads and all(p.grad is None for p in self.learn.model.parameters())

    # -- counting ----------------------------------------------------------------------------------

    def _before_fit(self) -> None:
        self.place, self._trained = 'train', []
        if not self.learn.fitting:
            return
        self.in_fit = self.has_fitted = True
        self._epochs_before = self.learn.counters.epochs
        self._end = self._stopped_at = self._cut = None
        # a failed fit may have left these set
        self._epoch_over, self._eval_began = False, 0.0

    def _cleanup(self) -> None:
        self.end()  # keeps the end, as the budget is removed after the fit
        self.in_fit, self.place, self._grads = False, 'train', []

    def _before_iteration(self) -> None:
        self._since = self.learn.time

    def _before_epoch(self) -> None:
        if self.learn.fitting:
            self._since_epoch, self._epoch_over = self.learn.time, False

    def _before_train(self) -> None:
        self._trained = []

    def _before_batch(self) -> None:
        if self.learn.training:
            self._at_start = self.counts()
            self._trained = []
            if not self._handles('before_batch'):
                self._grads = []
        elif self.learn.phase != 'predict':
            self.measured.pop(label_of(self.learn.dl_name), None)  # it is measured again

    def _after_loss(self) -> None:
        if self.learn.training:
            self.last_loss = self.learn.loss

    def _after_step(self) -> None:
        learn = self.learn
        self.batch_loss = learn.loss
        self._grads = [(p, p.grad) for p in learn.opt.parameters() if p.grad is not None]

    def _after_train(self) -> None:
        self._measure_training()
        if self.ends_within_epoch():
            self._cut = self.counts()
            return
        self.previous = self.counts()
        self._epoch_over = True

    def ends_within_epoch(self) -> bool:
        "Return True if the fit stops before the last batch of the epoch."
        learn = self.learn
        return learn.run.stopping and (learn.n_iter is None or learn.iter + 1 < learn.n_iter)

    def _after_epoch(self) -> None:
        if not self.learn.fitting:
            return
        # the Learner has counted the epoch by now
        self._since_epoch, self._epoch_over = self.learn.time, False

    def _before_eval(self) -> None:
        self._eval_began = perf_counter()
        self._trained = [m for m in self.learn.model.modules() if m.training] or self._trained

    def _after_eval(self) -> None:
        if self.in_fit:
            self._evaluated += perf_counter() - self._eval_began
        self._eval_began = 0.0

    def _before_predict(self) -> None:
        self.passes['predict'].start()
        self.place = 'predict'

    def _before_validate(self) -> None:
        if self.learn.phase != 'predict':
            self.passes['eval'].start()
            self.place = 'eval'

    def _after_batch(self) -> None:
        if self.learn.training:
            self.previous = self._at_start
            return
        run = self.passes['predict' if self.learn.phase == 'predict' else 'eval']
        run.batches, run.samples = run.batches + 1, run.samples + sample_count(self.learn)

    def _after_validate(self) -> None:
        learn, recorder = self.learn, recorder_of(self.learn)
        if learn.phase != 'predict' and recorder is not None:
            values = measured_values(learn, recorder.measured)
            self.measured[label_of(learn.dl_name)] = {k: Measured(v) for k, v in values.items()}

    def _measure_training(self) -> None:
        "Keep the Recorder's values of the epoch's training."
        recorder = recorder_of(self.learn)
        values = {} if recorder is None else recorder._frame.values
        self.measured['train'] = {
            k.removeprefix('train_'): Measured(v)
            for k, v in values.items()
            if k.startswith('train_') and isinstance(v, (int, float))
        }

    def counts(self) -> dict[str, Any]:
        "Return the fields of a Composer timestamp."
        if self._cut is not None:
            return self._cut
        now, over, start = self.learn.time, self._epoch_over, self._since
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

    def stop(self) -> None:
        "End the fit; the end of training is now, as Composer's `stop_training` sets it."
        end = self.end()
        unit = 'ba' if end is None or end[1] == 'ep' else end[1]
        self._stopped_at = self.view.timestamp.get(unit).value, unit
        self.learn.stop()

    def end(self) -> tuple[Any, str] | None:
        "Return end and unit of training over all fits; None if unknown or not a Composer unit."
        if not self.has_fitted:
            return None
        budget = self._budget()
        if self._stopped_at is not None:
            self._end = self._stopped_at
        elif budget:
            self._end = budget
        elif self.in_fit and isinstance(self.learn.n_epoch, int):
            self._end = self._epochs_before + self.learn.n_epoch, 'ep'
        return None if self._end is None or self._end[1] == 'st' else self._end

    def _budget(self) -> tuple[Any, str] | None:
        found = next((cb for cb in self.learn.cbs if isinstance(cb, Budget)), None)
        if found is None:
            return None
        return found.total_at_start + found.total.value, found.total.unit

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        "Return the callback's state, the start of epoch and iteration, and the measurements."
        measured = {
            label: {k: float(v) for k, v in values.items()}
            for label, values in self.measured.items()
        }
        return {
            'callback': state_of(self.wrapped),
            'epoch': self._since_epoch.state_dict(),
            'iteration': self._since.state_dict(),
            'previous': _without_walls(self.previous),
            'walls': _walls(self.previous),
            'over': self._epoch_over,
            'evaluated': self._evaluated,
            'epochs': self._epochs_before,
            'measured': measured,
            'passes': {name: (p.batches, p.samples) for name, p in self.passes.items()},
        }

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the callback's state and the counts."
        self._since_epoch = Timestamp.from_state_dict(sd['epoch'])
        self._since = Timestamp.from_state_dict(sd['iteration'])
        self._epoch_over = sd['over']
        self.previous = sd['previous'] and {**sd['previous'], **_as_durations(sd['walls'])}
        self._evaluated = sd['evaluated']
        self._epochs_before = sd['epochs']
        for name, counts in sd['passes'].items():
            self.passes[name].batches, self.passes[name].samples = counts
        self.measured = {
            label: {k: Measured(v) for k, v in values.items()}
            for label, values in sd['measured'].items()
        }
        load_state(self.wrapped, sd['callback'])


def _walls(counts: Mapping[str, Any] | None) -> dict[str, float]:
    "Return the seconds of a timestamp's fields that are durations."
    found = {} if counts is None else counts
    return {k: v.total_seconds() for k, v in found.items() if isinstance(v, timedelta)}


def _without_walls(counts: Mapping[str, Any] | None) -> dict[str, int] | None:
    "Return the counts of a timestamp's fields."
    if counts is None:
        return None
    return {k: v for k, v in counts.items() if not isinstance(v, timedelta)}


def _as_durations(walls: Mapping[str, float]) -> dict[str, timedelta]:
    return {name: timedelta(seconds=seconds) for name, seconds in walls.items()}


class _FromAlgorithm(_FromComposer):
    "Run a Composer algorithm: `apply` at the events that `match` names, before callbacks."

    order, is_algorithm = 59, True

    def _find_hooks(self, cb: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {'run_event': self._apply}, own_hooks(cb, ['close', 'post_close'])

    def begin(self) -> None:
        "Run `init` after the callbacks' own, as Composer does."
        for cb in self.learn.cbs:
            if isinstance(cb, _FromComposer) and not cb.is_algorithm:
                cb.begin()
        super().begin()

    def _apply(self, event: Any, state: Any, logger: Any) -> None:
        if self.wrapped.match(event, state):
            self.wrapped.apply(event, state, logger)


class _FromDestination(_FromComposer):
    "Run a logger destination of Composer, after callbacks, and give it what `learn.log` logs."

    order, is_destination = 61, True

    def receive_log(
        self,
        name: str,
        value: Any,
        weight: Any = 1,  # unused
        shown: bool = True,  # unused
    ) -> None:
        "Pass a value to the destination, at the present batch."
        self.wrapped.log_metrics({name: value}, self.counts()['batch'])
