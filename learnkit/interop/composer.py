# SPDX-License-Identifier: Apache-2.0
"""Adapters that run Composer callbacks, algorithms and logger destinations in a Learner: `from_composer(cb)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import ref

from fastcore.basics import camel2snake
from typing_extensions import override

from learnkit.callbacks.recorder import recorder_of
from learnkit.core.errors import add_note
from learnkit.core.time import Timestamp
from learnkit.engine.budget import Budget
from learnkit.engine.callback import Callback
from learnkit.engine.callback_state import note_attributes
from learnkit.engine.counters import sample_count
from learnkit.engine.events import EVENTS
from learnkit.interop.composer_state import (
    ComposerLogger,
    ComposerState,
    Measured,
    label_of,
    measured_values,
    wrap_values,
)
from learnkit.interop.composer_time import (
    ALWAYS,
    EVAL,
    FIT,
    FIT_EVAL,
    PREDICT,
    STANDALONE_EVAL,
    TABLES,
    TRAIN,
    Event,
    types_for,
)
from learnkit.interop.composer_trainer import ComposerTrainer, add_trainer
from learnkit.interop.hooks import check_style, load_state, own_hooks, state_of

if TYPE_CHECKING:
    from learnkit.learner import Learner

HOOKS = (*(e.value for e in Event), 'close', 'post_close')
# events during which `xb` and `yb` exist
BATCH_EVENTS = frozenset(
    EVENTS[EVENTS.index('before_batch') : EVENTS.index('batch_checkpoint') + 1]
)


def composer_events(
    event: str,  # name of a learnkit event
    learn: Learner,  # Learner whose phase selects the events
) -> tuple[str, ...]:
    """Return the Composer events that correspond to a learnkit event, in order.

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
    elif event in FIT_EVAL:
        names = (FIT_EVAL if learn.fitting else STANDALONE_EVAL)[event]
    else:
        names = (TRAIN if learn.training else EVAL).get(event, '')
    return tuple(names.split())


def from_composer(
    cb: Any,  # callback, algorithm or logger destination with Composer's interface
) -> Callback:
    """Return a callback that runs a Composer callback, algorithm or logger destination.

    The methods of a callback (`epoch_start(state, logger)` ..., or `run_event`) run at the events in
    the table of docs/lifecycle.md, with a `state` that reads the Learner and a `logger` that writes
    to `learn.log`. The events from `before_forward` to `after_backward` fire for each microbatch.
    `init` runs before any other event, including for a callback that is added later; `before_load`
    and `after_load` run before the first fit or evaluation. The gradients of a step can be read
    until the next `before_forward`. A fit that ends within an epoch has no `epoch_end`, as in
    Composer.

    An algorithm has `match(event, state)` and `apply(event, state, logger)`, and runs before
    callbacks. A logger destination receives the values that `learn.log`, other callbacks and
    Composer's Trainer log. Composer need not be installed; if it is imported, callbacks of its
    package receive Composer's event and time classes.

    Checkpointed: the callback's `state_dict` (without one, its attributes with plain data), the
    position in the epoch, and the last metric values.

    Raises `CallbackError` for an object without hooks, and warns of attributes that cannot be saved.

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
    "Count the batches, samples and seconds of one pass over a loader outside of training."

    def __init__(self) -> None:
        self.batches = 0
        self.samples = 0
        self.started_at = perf_counter()

    def make_timestamp(
        self,
        types: Any,  # result of `types_for`
    ) -> Any:
        return types.Timestamp(
            batch=self.batches,
            sample=self.samples,
            batch_in_epoch=self.batches,
            sample_in_epoch=self.samples,
            total_wct=timedelta(seconds=perf_counter() - self.started_at),
        )


class _FromComposer(Callback):
    "Run a Composer callback, and keep the counts that Composer's state reports and the Learner does not."

    order = 60
    remove_on_find = True
    nondeterministic_state = ('evaluated', 'walls')
    is_composer = True
    is_algorithm = False
    is_destination = False

    def __init__(self, cb: Any) -> None:
        self.wrapped = cb
        run_event, hooks = self._find_hooks(cb)
        check_style(cb, HOOKS, {**run_event, **hooks}, 'Composer', 'from_composer')
        note_attributes(cb)
        self.types = types_for(cb)
        self._hooks = hooks
        self._run_event_hook = run_event.get('run_event')
        self.view = ComposerState(self)
        self.logs = ComposerLogger(self)
        self.passes = {'eval': _Pass(), 'predict': _Pass()}
        self.measured: dict[str, dict[str, Measured]] = {}
        self.in_fit = self.is_split = self.has_graph = False
        # loader in Composer's state: 'train', 'eval' or 'predict'; empty during `init`
        self.loader_kind = ''
        self.last_loss: Any = None  # loss of the last microbatch
        self.batch_loss: Any = None  # loss of the last batch
        self._known_learner: Any = None  # weak reference to the Learner that `init` ran for
        self._trainer: ComposerTrainer | None = None
        self._has_loaded = False  # whether `before_load` and `after_load` ran
        self._grads: list[tuple[Any, Any]] = []  # gradients of the last step
        self._training_modules: list[Any] = []  # modules in training mode before an evaluation
        self._iteration_start = self._epoch_start = Timestamp()
        # counts before the last batch or the last end of an epoch
        self.previous_counts: dict[str, Any] | None = None
        self._batch_start_counts: dict[str, Any] = {}
        self._stopped_at: tuple[Any, str] | None = None  # end set by `stop_training`
        self._is_epoch_over = False  # True after training until the Learner counts the epoch
        # counts at the end of a fit that stopped within an epoch
        self._unfinished_counts: dict[str, Any] | None = None
        self._eval_seconds = 0.0
        self._eval_start = 0.0
        self._n_previous_epochs = 0
        for event in EVENTS:
            counts = getattr(self, f'_{event}') if hasattr(type(self), f'_{event}') else None
            if self._has_hook_for(event) or (counts and event not in BATCH_EVENTS):
                self.__dict__[event] = partial(self._process_event, event)
            elif counts:
                self.__dict__[event] = counts  # without a hook, events of a batch only count

    def _find_hooks(self, cb: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        "Return the callback's `run_event`, and its methods named after events, by name."
        base = 'composer.core.callback'  # module of the base class, whose methods do nothing
        return own_hooks(cb, ['run_event'], base), own_hooks(cb, HOOKS, base)

    @property
    @override
    def name(self) -> str:
        return f'composer_{camel2snake(type(self.wrapped).__name__)}'

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_known_learner': None, '_grads': [], '_training_modules': []}

    def __repr__(self) -> str:
        return f'from_composer({type(self.wrapped).__name__})'

    def _has_hook_for(self, event: str) -> bool:
        "Return True if the callback has a hook for an event."
        names = {name for table in TABLES for name in table.get(event, '').split()}
        return bool((self._run_event_hook and names) or names & {*self._hooks})

    # -- events ------------------------------------------------------------------------------------

    def _process_event(self, event: str) -> None:
        "Update the counts, and run the hooks for the Composer events of a learnkit event."
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
        self.is_split = event in BATCH_EVENTS
        self.has_graph = event in ('after_loss', 'before_backward')
        for name in self._find_composer_events(event):
            starts = name == 'before_train_batch'
            if starts and self._trainer is not None and self._find_hook(name) is not None:
                self._trainer.begin_batch()
            self._fire(name)
            if starts:
                self._grads = []  # Composer clears the gradients after this event
        if event == 'after_predict' or (event == 'after_validate' and self.loader_kind == 'eval'):
            self.loader_kind = 'train'

    def begin(self) -> None:
        "Run `init` before the first event of a Learner."
        if self._known_learner is None or self._known_learner() is not self.learn:
            self._known_learner = ref(self.learn)
            self._has_loaded = False
            self._trainer = add_trainer(self.learn, self.is_destination)
            self.loader_kind = ''
            self._fire('init')
            self.loader_kind = 'train'

    def _find_composer_events(self, event: str) -> list[str]:
        "Return the Composer events of a learnkit event, corrected where Composer fires them at other times."
        learn = self.learn
        names = [name for name in composer_events(event, learn) if name != 'init']
        if event == 'before_epoch' and learn.fitting and self._starts_training():
            names = ['iteration_start', *names]
        elif event == 'after_train' and self._unfinished_counts is not None:
            names = ['fit_end']  # in Composer the last evaluation follows `fit_end` in this case
        elif event in ('epoch_checkpoint', 'after_fit') and self._unfinished_counts is not None:
            names = []
        return names

    def _starts_training(self) -> bool:
        "Return True in the first epoch of a training without iterations."
        learn = self.learn
        return learn.epochs_per_iteration is None and not learn.time.ba and not learn.resumed

    def _fire(self, name: str) -> None:
        "Run the callback's hook for a Composer event, if there is one."
        hook = self._find_hook(name)
        if hook is None:
            return
        try:
            with self._composer_context():
                hook()
        except Exception as e:
            add_note(e, f'in {type(self.wrapped).__name__}.{name}, a Composer-style callback')
            raise

    def _find_hook(self, name: str) -> Callable[[], Any] | None:
        "Return a function that runs the hook for a Composer event, or None without a hook."
        hook = self._hooks.get(name)
        if name == 'post_close':
            return hook
        if self._run_event_hook and name != 'close':  # Composer has no event for `close`
            return partial(self._run_event_hook, self.types.Event(name), self.view, self.logs)
        return None if hook is None else partial(hook, self.view, self.logs)

    @contextmanager
    def _composer_context(self) -> Iterator[None]:
        "Restore the last step's gradients and Composer's module modes in a context."
        changed = self._find_changed_modes()
        cleared = [(p, grad) for p, grad in self._grads if p.grad is None]
        for m in changed:
            m.training = not m.training
        for p, grad in cleared:
            p.grad = grad
        try:
            yield
        finally:
            for p, grad in cleared:
                if p.grad is grad:
                    p.grad = None
            for m in changed:
                m.training = not m.training

    def _find_changed_modes(self) -> list[Any]:
        "Return the modules whose mode before or after an evaluation differs from their mode in Composer."
        is_train = self.loader_kind == 'train'
        return [m for m in self._training_modules if is_train and not m.training]

    # -- counting ----------------------------------------------------------------------------------

    def _before_fit(self) -> None:
        self.loader_kind = 'train'
        self._training_modules = []
        if not self.learn.fitting:
            return
        self.in_fit = True
        self._n_previous_epochs = self.learn.parts.counters.epochs
        self._stopped_at = self._unfinished_counts = None
        # a failed fit may not have reset these attributes
        self._is_epoch_over = False
        self._eval_start = 0.0

    def _cleanup(self) -> None:
        self.in_fit = False
        self.loader_kind = 'train'
        self._grads = []

    def _before_iteration(self) -> None:
        self._iteration_start = self.learn.time

    def _before_epoch(self) -> None:
        if self.learn.fitting:
            self._epoch_start = self.learn.time
            self._is_epoch_over = False

    def _before_train(self) -> None:
        self._training_modules = []

    def _before_batch(self) -> None:
        if self.learn.training:
            self._batch_start_counts = self.collect_counts()
            self._training_modules = []
            if not self._has_hook_for('before_batch'):
                self._grads = []
        elif self.learn.phase != 'predict':
            self.measured.pop(label_of(self.learn.dl_name), None)  # the evaluation replaces it

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
            self._unfinished_counts = self.collect_counts()
            return
        self.previous_counts = self.collect_counts()
        self._is_epoch_over = True

    def ends_within_epoch(self) -> bool:
        "Return True if the fit stops before the last batch of the epoch."
        learn = self.learn
        return learn.run.stopping and (learn.n_iter is None or learn.iter + 1 < learn.n_iter)

    def _after_epoch(self) -> None:
        if self.learn.fitting:
            # the Learner counts the epoch before this event
            self._epoch_start = self.learn.time
            self._is_epoch_over = False

    def _before_eval(self) -> None:
        self._eval_start = perf_counter()
        training = [m for m in self.learn.model.modules() if m.training]
        self._training_modules = training or self._training_modules

    def _after_eval(self) -> None:
        if self.in_fit:
            self._eval_seconds += perf_counter() - self._eval_start
        self._eval_start = 0.0

    def _before_predict(self) -> None:
        self.passes['predict'] = _Pass()
        self.loader_kind = 'predict'

    def _before_validate(self) -> None:
        if self.learn.phase != 'predict':
            self.passes['eval'] = _Pass()
            self.loader_kind = 'eval'

    def _after_batch(self) -> None:
        if self.learn.training:
            self.previous_counts = self._batch_start_counts
            return
        current = self.passes['predict' if self.learn.phase == 'predict' else 'eval']
        current.batches += 1
        current.samples += sample_count(self.learn)

    def _after_validate(self) -> None:
        learn = self.learn
        recorder = recorder_of(self.learn)
        if learn.phase != 'predict' and recorder is not None:
            values = measured_values(learn, recorder.measured)
            self.measured[label_of(learn.dl_name)] = wrap_values(values)

    def _measure_training(self) -> None:
        "Store the Recorder's training loss and metrics of the epoch."
        recorder = recorder_of(self.learn)
        values = {} if recorder is None else recorder.epoch_metrics.values
        self.measured['train'] = wrap_values(
            {k.removeprefix('train_'): v for k, v in values.items() if k.startswith('train_')}
        )

    def collect_counts(self) -> dict[str, Any]:
        "Return the fields of a Composer timestamp."
        if self._unfinished_counts is not None:
            return self._unfinished_counts
        now = self.learn.time
        iteration_start = self._iteration_start
        epoch_start = now if self._is_epoch_over else self._epoch_start
        epoch = now.ep + self._is_epoch_over
        eval_seconds = self._eval_seconds
        if self._eval_start and self.in_fit:
            eval_seconds += perf_counter() - self._eval_start
        return {
            'iteration': now.iter,
            'epoch': epoch,
            'batch': now.ba,
            'sample': now.sp,
            'token': now.tok,
            'epoch_in_iteration': epoch - iteration_start.ep,
            'token_in_iteration': now.tok - iteration_start.tok,
            'batch_in_epoch': now.ba - epoch_start.ba,
            'sample_in_epoch': now.sp - epoch_start.sp,
            'token_in_epoch': now.tok - epoch_start.tok,
            'total_wct': timedelta(seconds=max(0.0, now.sec - eval_seconds)),
            'epoch_wct': timedelta(seconds=max(0.0, now.sec - epoch_start.sec)),
        }

    def stop(self) -> None:
        "End the fit, and set the end of training to the current time, as Composer's `stop_training` does."
        end = self.find_end()
        unit = 'ba' if end is None or end[1] == 'ep' else end[1]
        self._stopped_at = self.view.timestamp.get(unit).value, unit
        self.learn.stop()

    def find_end(self) -> tuple[Any, str] | None:
        "Return value and unit of the fit's end over all fits; None outside, if unknown or not of Composer."
        if self._stopped_at is not None:
            return self._stopped_at
        if not self.in_fit:
            return None
        budget = next((cb for cb in self.learn.cbs if isinstance(cb, Budget)), None)
        if budget is not None:
            unit = budget.total.unit
            return None if unit == 'st' else (budget.total_at_start + budget.total.value, unit)
        n_epoch = self.learn.n_epoch
        return (self._n_previous_epochs + n_epoch, 'ep') if isinstance(n_epoch, int) else None

    # -- state -------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the callback's state, the counts of this adapter and the last metric values."
        measured = {}
        for label, values in self.measured.items():
            measured[label] = {k: float(v) for k, v in values.items()}
        counts = self.previous_counts or {}
        durations = {k: v.total_seconds() for k, v in counts.items() if isinstance(v, timedelta)}
        return {
            'callback': state_of(self.wrapped),
            'epoch': self._epoch_start.state_dict(),
            'iteration': self._iteration_start.state_dict(),
            'previous': {k: v for k, v in counts.items() if k not in durations} or None,
            'walls': durations,
            'over': self._is_epoch_over,
            'evaluated': self._eval_seconds,
            'epochs': self._n_previous_epochs,
            'measured': measured,
            'passes': {name: (p.batches, p.samples) for name, p in self.passes.items()},
        }

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the callback's state, the counts and the last metric values."
        self._epoch_start = Timestamp.from_state_dict(sd['epoch'])
        self._iteration_start = Timestamp.from_state_dict(sd['iteration'])
        self._is_epoch_over = sd['over']
        durations = {name: timedelta(seconds=seconds) for name, seconds in sd['walls'].items()}
        self.previous_counts = {**sd['previous'], **durations} if sd['previous'] else None
        self._eval_seconds = sd['evaluated']
        self._n_previous_epochs = sd['epochs']
        for name, counts in sd['passes'].items():
            self.passes[name].batches, self.passes[name].samples = counts
        self.measured = {label: wrap_values(values) for label, values in sd['measured'].items()}
        load_state(self.wrapped, sd['callback'])


class _FromAlgorithm(_FromComposer):
    "Run a Composer algorithm, before callbacks: `apply` at each event for which `match` returns True."

    order = 59
    is_algorithm = True

    @override
    def _find_hooks(self, cb: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {'run_event': self._apply}, own_hooks(cb, ['close', 'post_close'])

    @override
    def begin(self) -> None:
        "Run `init` after the `init` of callbacks, as Composer does."
        for cb in self.learn.cbs:
            if isinstance(cb, _FromComposer) and not cb.is_algorithm:
                cb.begin()
        super().begin()

    def _apply(self, event: Any, state: Any, logger: Any) -> None:
        if self.wrapped.match(event, state):
            self.wrapped.apply(event, state, logger)


class _FromDestination(_FromComposer):
    "Run a logger destination of Composer, after callbacks, and pass the values of `learn.log` to it."

    order = 61
    is_destination = True

    def receive_log(
        self,
        name: str,
        value: Any,
        weight: Any = 1,  # unused
        shown: bool = True,  # unused
    ) -> None:
        "Pass a value to the destination, at the current batch."
        self.wrapped.log_metrics({name: value}, self.collect_counts()['batch'])
