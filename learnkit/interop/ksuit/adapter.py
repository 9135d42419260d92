# SPDX-License-Identifier: Apache-2.0
"""Adapter that runs ksuit and Noether callbacks in a Learner: `from_ksuit(cb)`."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from learnkit.checkpoint.host import copy_to_host
from learnkit.core.batch import concat, to_device
from learnkit.core.errors import CallbackError, add_note, add_place
from learnkit.core.model import model_device, preserved_modes
from learnkit.core.random import preserved_generators, preserved_rng
from learnkit.core.validation import check_count
from learnkit.engine.callback import Callback
from learnkit.engine.counters import sample_count
from learnkit.engine.lengths import find_length
from learnkit.engine.resumed_run import ResumeState
from learnkit.interop.common.adapter import CallbackAdapter, list_adapters
from learnkit.interop.common.hooks import (
    batches_per_step,
    check_kind,
    collect_epoch_values,
    own_hooks,
    parameters_of,
    takes_any,
)
from learnkit.interop.ksuit.construct import construct
from learnkit.interop.ksuit.trainer import Trainer, model_view, name_outputs
from learnkit.interop.ksuit.views import (
    CheckpointWriter,
    DataContainer,
    LogWriter,
    MetricPropertyProvider,
    Paths,
    Progress,
    Tracker,
    UpdateCounter,
)

EVENTS: tuple[str, ...] = tuple(
    'before_training after_training before_epoch before_every_update before_every_accumulation_step '
    'before_every_backward track_after_accumulation_step before_every_optim_step '
    'track_after_update_step after_update after_epoch'.split()
)
PERIODIC = ('periodic_callback', '_periodic_callback')
STOP_HOOKS = ('should_stop_after_update', 'should_stop_after_sample', 'should_stop_after_epoch')
PASS_HOOKS = ('process_data', 'process_results')
WRAPPED = 'before_training after_training track_after_accumulation_step track_after_update_step'
TEMPLATES = {f'_{name}': name for name in WRAPPED.split()}
HOOKS = (*EVENTS, *PERIODIC, *TEMPLATES, *PASS_HOOKS, 'at_eval', *STOP_HOOKS)
COMMON = 'update_counter trainer model trainer_model effective_batch_size batch_size'.split()
HOOK_ARGUMENTS = {
    'before_every_accumulation_step': 'batch',
    'track_after_update_step': 'times',
    'track_after_accumulation_step': (
        'batch losses update_outputs accumulation_steps accumulation_step'
    ),
    'after_update': 'times data_iter',
    'after_epoch': 'data_iter',
    'at_eval': 'data_iter',
    'periodic_callback': 'interval_type data_iter',
    'process_results': 'interval_type data_iter',
}
# methods of ksuit's base classes that call the periodic hook
DISPATCHERS = ('after_update', 'after_epoch', 'at_eval')
MICROBATCH_EVENTS = {
    'before_pred': ('before_every_accumulation_step', 'track_after_accumulation_step'),
    'after_pred': ('track_after_accumulation_step',),
    'after_loss': ('track_after_accumulation_step',),
    'before_backward': ('before_every_backward',),
    'after_backward': ('track_after_accumulation_step',),
    'before_step': ('before_every_optim_step',),
}
# attribute of a ksuit callback with the names of the attributes that the adapter has set
SET_ATTRIBUTES = '_given_by_learnkit'
SHARED = ('writer', 'log_writer', 'tracker')  # services that all ksuit callbacks of a Learner share
INTERVALS = {'epoch': 'every_n_epochs', 'update': 'every_n_updates', 'sample': 'every_n_samples'}


def from_ksuit(
    cb: Any,  # callback with hooks such as `before_training(update_counter=...)`, or its class
    **config: Any,  # options for the constructor of a class
) -> Callback:
    """Return a callback that runs a ksuit or Noether callback.

    A class is constructed when the callback is added to a Learner. Its constructor receives the
    options and, if it or its bases accept them by name, `trainer`, `model`, `data_container`,
    `tracker`, `log_writer`, `checkpoint_writer`, `path_provider`, `metric_property_provider` and
    `update_counter`. A constructor with a `callback_config` receives the options as an object of the
    annotated class (without an annotation, as a plain object). `model` is then the Learner's model
    with the attributes of Noether's models: `name`, `device`, `trainable_param_count`, `optimizer`
    and so on.

    Each hook receives the arguments that it accepts by name: `update_counter`, `trainer`, `model`,
    `trainer_model`, `batch`, `losses`, `update_outputs`, `accumulation_steps`, `accumulation_step`,
    `times`, `effective_batch_size`, `batch_size`, `data_iter`, `interval_type` (see
    nbs/from_ksuit.ipynb). Hooks run without gradients. Before and after training, and at the end of
    an interval (`every_n_epochs`, `every_n_updates`, `every_n_samples`), the model is in evaluation
    mode, and modes and random generators are restored. An update is an optimizer step; counts are
    over all fits.

    The attributes `trainer`, `model`, `data_container`, `tracker`, `writer`, `checkpoint_writer`,
    `path_provider`, `metric_property_provider`, `update_counter`, `logger` of the object are set if
    missing or None. For an object with `process_data(batch, trainer_model=)` and
    `process_results(results, ...)`, the first method is called with each batch of the loader named
    by its `dataset_key`, and the second one with the concatenated results. `EarlyStopIteration`, and
    `should_stop_after_...` returning True, end the fit like `learn.stop()`; after an
    `EarlyStopIteration` there is a checkpoint with the tag `.early_exit`, as in Noether. `at_eval`
    runs at the end of a `learn.validate()`. At the end of a fit, all values that were logged are
    written to `tracker/entries.th` below `learn.path`, as `{key: {update: value}}`.

    Checkpointed: the callback's `state_dict` (without one, or if it returns None, its changed
    attributes with plain data), start and progress of the fit, the log and the tracker's summary. In
    a resumed fit the state is loaded and `resume_from_checkpoint(paths, model)` is called before
    `before_training`, whose counter holds the progress of the checkpoint. The state is loaded again
    after `before_training`, which may have reset it.

    Raises `CallbackError` for an object without hooks.

    >>> from learnkit.testing import synth_learner
    >>> class Shout:
    ...     def __init__(self, every_n_epochs, model=None, **kwargs):
    ...         self.every_n_epochs, self.n = every_n_epochs, model.param_count
    ...     def periodic_callback(self, *, interval_type, update_counter):
    ...         print(update_counter.cur_iteration, self.n)
    >>> learn = synth_learner(n_train=3, cbs=from_ksuit(Shout, every_n_epochs=2))
    >>> with learn.no_bar(): learn.fit(4)
    E2_U6_S96 2
    E4_U12_S192 2
    """
    return _FromKsuit(cb, config)


class _FromKsuit(CallbackAdapter):
    "Run a ksuit callback, and keep the counts that ksuit's trainer reports and the Learner does not."

    order = 45  # before the Recorder adds the epoch's row
    run_valid = False
    runs_last = ('before_fit',)  # after the Recorder, which discards values logged earlier
    library = style = 'ksuit'

    def __init__(
        self,
        cb: Any,  # object with hooks, or its class
        config: dict[str, Any],  # options for the constructor of the class
    ) -> None:
        if config and not isinstance(cb, type):
            raise CallbackError(
                f'from_ksuit({cb!r}, {", ".join(config)}): options are for the constructor of a class.'
            )
        check_kind(cb, self.style, 'from_ksuit')
        self._config = config
        self._cls: type = cb if isinstance(cb, type) else type(cb)
        self.wrapped = None  # until the callback is constructed
        self._is_constructed = isinstance(cb, type)
        writer = LogWriter(self)
        self.services: dict[str, Any] = {
            'update_counter': UpdateCounter(self),
            'trainer': Trainer(self),
            'data_container': DataContainer(self),
            'tracker': Tracker(self),
            'writer': writer,
            'log_writer': writer,
            'checkpoint_writer': CheckpointWriter(self),
            'path_provider': Paths(self),
            'metric_property_provider': MetricPropertyProvider(),
            'logger': logging.getLogger(self._cls.__name__),
        }
        # progress at the start of the fit, and at the last update
        self.started_at = Progress(0, 0, 0)
        self._last_progress = Progress(0, 0, 0)
        self._seen_size = 0  # largest number of samples in a batch so far
        self._n_microbatches = 1
        self._microbatch_index = 0
        self._interval_kind = ''  # value of the hooks' argument `interval_type`
        # whether training of the epoch is over, and whether the Learner has counted the epoch
        self.at_epoch_end = False
        self._is_epoch_counted = True
        # whether `resume_from_checkpoint` has run for the resumed fit
        self._has_read_files = False
        # parts of the microbatch's loss, recorded between `after_pred` and `after_loss`
        self._loss_parts: dict[str, Any] = {}
        self._is_recording_parts = False
        self._times: defaultdict[str, float] = defaultdict(
            float
        )  # seconds of each part of an update
        self._lap_start = 0.0
        self._hooks: dict[str, Any] = {}
        self._inner_hooks: dict[str, Any] = {}
        self._argument_names: dict[str, list[str]] = {}
        self._processes_batches = False  # whether the callback processes the batches of a loader
        self._intervals: dict[str, int] = {}
        if not self._is_constructed:
            self._wrap(cb)

    @property
    @override
    def wrapped_class(self) -> type:
        return self._cls

    def _wrap(self, cb: Any) -> None:
        "Store the callback and its hooks, and add handlers for the events of a batch that it needs."
        found = own_hooks(cb, HOOKS)
        self.wrap(cb, HOOKS, found)
        self._inner_hooks = {TEMPLATES[name]: f for name, f in found.items() if name in TEMPLATES}
        self._hooks = {**self._inner_hooks, **found}
        if '_periodic_callback' in found:
            self._hooks.setdefault('periodic_callback', found['_periodic_callback'])
        if 'periodic_callback' in self._hooks:
            self._inner_hooks |= dict.fromkeys(DISPATCHERS, self._hooks['periodic_callback'])
        self._argument_names = {
            name: self._list_arguments(name, f) for name, f in self._hooks.items()
        }
        self._processes_batches = all(name in self._hooks for name in PASS_HOOKS)
        self._intervals = find_intervals(cb)
        for event, hooks in MICROBATCH_EVENTS.items():
            if not self._hooks.keys().isdisjoint(hooks):
                setattr(self, event, partial(self._run_batch_hook, event, hooks[0]))
        # these hooks receive `times`
        if not self._hooks.keys().isdisjoint(('track_after_update_step', 'after_update')):
            timers = {
                'before_draw': self._start_lap,
                'after_draw': partial(self._add_lap, 'data_wait'),
                'before_backward': partial(
                    self._run_batch_hook, 'before_backward', 'before_every_backward'
                ),
            }
            for event, handler in timers.items():
                setattr(self, event, handler)

    def on_added(self) -> None:
        if self.wrapped is not None:
            return
        try:
            self._construct()
        except BaseException as e:
            add_note(e, f'while from_ksuit constructed {self._cls.__name__}')
            self.learn.remove_cb(self)
            raise

    def _construct(self) -> None:
        self._share_services()
        model = model_view(self.learn.model, self)
        services = {**self.services, 'model': model}
        cb = construct(self._cls, services, self._config)
        own = vars(cb)
        own[SET_ATTRIBUTES] = {name for name, value in services.items() if own.get(name) is value}
        self._wrap(cb)

    @override
    def __repr__(self) -> str:
        options = [f'{name}={value!r}' for name, value in self._config.items()]
        return f'from_ksuit({", ".join([self._cls.__name__, *options])})'

    # -- events ------------------------------------------------------------------------------------

    def before_fit(self) -> None:
        if not self.learn.fitting:
            return
        self._set_attributes()
        self._has_read_files = False
        checkpoint = self.learn.run.resuming
        if checkpoint is not None:
            self._load_resumed_state(checkpoint)
        else:
            self.at_epoch_end = False
            self._is_epoch_counted = True
            self.started_at = self._last_progress = self.progress()
        if self._find_first() is self:
            self.services['writer'].discard_entry()
        with self._evaluation_mode():
            self._call_hook('before_training')

    def _load_resumed_state(self, checkpoint: ResumeState) -> None:
        "Load the checkpointed state before `before_training`; the Learner loads it only after `before_fit`."
        state = checkpoint.find_state(self)
        if state is not None:
            self.load_state_dict(copy_to_host(state))
        if checkpoint.path is not None:
            self.resume_from_checkpoint(checkpoint.path.parent, self.learn.model)
            self._has_read_files = True

    def before_epoch(self) -> None:
        if self.learn.fitting:
            self._call_hook('before_epoch')

    def _start_lap(self) -> None:
        self._lap_start = perf_counter()

    def before_batch(self) -> None:
        learn = self.learn
        size = self.learn.microbatch
        self.services['writer'].flush()
        self._microbatch_index = -1
        self.at_epoch_end = False
        self._is_epoch_counted = True
        if learn.iter == 0 or not self._seen_size:
            self._seen_size = max(self._seen_size, sample_count(learn))
        self._n_microbatches = (
            -(-sample_count(learn) // size) if isinstance(size, int) and size else 1
        )
        self._call_hook('before_every_update')

    def _run_batch_hook(self, event: str, hook: str) -> None:
        "Run the hook for an event of a microbatch or a step; record times and parts of the loss."
        if event in ('after_pred', 'after_loss'):
            self._is_recording_parts = event == 'after_pred'
            return
        if event == 'before_pred':
            self._microbatch_index += 1
            self._loss_parts = {}
        elif event == 'before_backward' and self._times:
            self._add_lap('forward', 'update')
        self._call_hook(hook)

    def after_batch(self) -> None:
        learn = self.learn
        if self._times:
            self._add_lap('backward', 'update')
        if learn.n_iter is not None and learn.iter == learn.n_iter - 1:
            self._end_epoch()
        now = self.progress()
        before = self._last_progress
        if now.update == before.update:
            return  # gradients accumulate
        self._last_progress = now
        self._call_hook('track_after_update_step')
        due = []
        for kind, n in self._intervals.items():
            if kind != 'epoch' and getattr(now, kind) // n > getattr(before, kind) // n:
                due.append(kind)
        self._run_periodic('after_update', due)
        self._times.clear()

    def after_train(self) -> None:
        if not self.at_epoch_end:
            self._end_epoch()

    def _end_epoch(self) -> None:
        self.at_epoch_end = True
        self._is_epoch_counted = False

    def after_epoch(self) -> None:
        self._is_epoch_counted = True  # the Learner counts it before this event
        learn = self.learn
        if not learn.fitting:
            return self._run_at_eval()
        values = collect_epoch_values(learn).items()
        self.services['writer'].record({k: v for k, v in values if isinstance(v, (int, float))})
        is_due = 'epoch' in self._intervals and learn.time.ep % self._intervals['epoch'] == 0
        self._run_periodic('after_epoch', ['epoch'] if is_due else [])

    def _run_at_eval(self) -> None:
        "Run the hook `at_eval` after an evaluation outside of training."
        if self.learn.phase == 'predict' or 'at_eval' not in self._hooks:
            return
        self._set_attributes()
        self._interval_kind = 'eval'
        with self._evaluation_mode():
            self._run_interval() if self._processes_batches else self._call_hook('at_eval')

    def after_fit(self) -> None:
        if not self.learn.fitting:
            return
        self.services['writer'].flush()
        with self._evaluation_mode():
            self._call_hook('after_training')
        if self is list_adapters(self.learn, 'ksuit')[-1]:
            self.services['writer'].finish()

    def cleanup(self) -> None:
        self.services['writer'].flush()
        self._times.clear()

    def receive_log(self, name: str, value: Any, weight: Any = 1, shown: bool = True) -> None:
        "Record a value that another callback logs, or a part of the loss."
        if isinstance(value, Tensor):
            value = value.detach()
        if self._is_recording_parts and name.startswith('train_'):
            self._loss_parts[name.removeprefix('train_')] = value
        writer = self.services['writer']
        if name not in writer.log_cache:
            writer.record({name: value})

    # -- calls -------------------------------------------------------------------------------------

    def _run_periodic(self, hook: str, due: list[str]) -> None:
        "Run the periodic hook for the intervals that are due, by the callback's own dispatcher `hook` if it has one."
        if hook in self._hooks and not self._processes_batches:
            with self._evaluation_mode() if due else nullcontext():
                self._call_hook(hook)
        else:
            for self._interval_kind in due:
                with self._evaluation_mode():
                    self._run_interval()
        for kind in ('epoch',) if hook == 'after_epoch' else ('update', 'sample'):
            if self._call_hook(f'should_stop_after_{kind}', self.progress()):
                self.learn.stop()

    def _run_interval(self) -> None:
        "Call the periodic hook, or process the batches of a loader."
        if not self._processes_batches:
            return self._call_hook('periodic_callback')
        process = self._hooks['process_data']
        model = self.learn.model
        with torch.no_grad():
            results = [process(batch, trainer_model=model) for batch in self._iterate_batches()]
        self._call_hook('process_results', join_results(results))

    def _iterate_batches(self) -> Iterator[Any]:
        "Yield the batches of the loader named by `dataset_key`, moved to the model's device."
        dl = self.services['data_container'].loader(getattr(self.wrapped, 'dataset_key', None))
        device = model_device(self.learn.model, self.learn.dls)
        with preserved_generators(dl):
            yield from (to_device(batch, device) for batch in dl)

    def _call_hook(self, name: str, *args: Any) -> Any:
        "Call a hook with the arguments that it accepts; an exception named `EarlyStopIteration` ends the fit."
        f = self._hooks.get(name)
        if f is None:
            return None
        values = {key: self._get_argument(key) for key in self._argument_names[name]}
        try:
            with torch.no_grad():
                return f(*args, **values)
        except Exception as e:
            if type(e).__name__ == 'EarlyStopIteration':
                return self._stop_early()
            add_place(e, f'{type(self.wrapped).__name__}.{name}, a ksuit-style callback')
            raise

    def _stop_early(self) -> None:
        "End the fit, and save a checkpoint with the tag that Noether's trainer uses."
        if self.learn.world.is_first and not self.learn.run.stopping:
            tag = f'{self.progress()}.early_exit'
            trainer = self.services['trainer']
            self.services['checkpoint_writer'].save(self._get_argument('model'), tag, trainer)
        self.learn.stop()

    def _list_arguments(self, name: str, f: Any) -> list[str]:
        """Return the names of the arguments that a hook accepts.

        A hook with `**kwargs` passes them on to an inner hook, such as `_before_training`, whose
        arguments are included.
        """
        names = [*COMMON, *HOOK_ARGUMENTS.get(name, '').split()]
        inner = self._inner_hooks.get(name, f)
        if takes_any(f) and takes_any(inner):
            return names
        accepted = parameters_of(f)
        if takes_any(f):
            accepted |= parameters_of(inner)
        return [key for key in names if key in accepted]

    def _get_argument(self, key: str) -> Any:
        "Return the value of a hook's argument by name."
        learn = self.learn
        if key in ('model', 'trainer_model'):
            return learn.model
        if key in self.services:
            return self.services[key]
        if key == 'losses':
            return {'total': learn.loss, **(self._loss_parts or {'loss': learn.loss})}
        if key == 'update_outputs':
            return name_outputs(learn.__dict__.get('pred'))
        if key == 'data_iter':
            return self._iterate_batches()
        if key == 'batch':
            return (*learn.xb, *learn.yb) if isinstance(learn.batch, (tuple, list)) else learn.xb[0]
        return {
            'effective_batch_size': self.effective_batch_size,
            'batch_size': self.batch_size,
            'interval_type': self._interval_kind,
            'accumulation_steps': self._n_microbatches,
            'accumulation_step': self._microbatch_index,
            'times': self._times,
        }[key]

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        "Set the model to evaluation mode in a context; restore modes and random generators."
        model = self.learn.model
        with preserved_modes(model), preserved_rng():
            model.eval()
            yield

    def _set_attributes(self) -> None:
        "Set missing attributes of the callback, and replace attributes that were set for another Learner."
        self._share_services()
        # names of the attributes that this function has set, and may replace
        set_names = vars(self.wrapped).setdefault(SET_ATTRIBUTES, set())
        model = self.learn.model
        if self._is_constructed:
            model = model_view(model, self)
        for name, value in {**self.services, 'model': model}.items():
            if name not in set_names and getattr(self.wrapped, name, None) is not None:
                continue
            try:
                setattr(self.wrapped, name, value)
            except AttributeError:
                continue  # a read-only property
            set_names.add(name)

    def _find_first(self) -> _FromKsuit:
        "Return the first ksuit callback of the Learner, which stores the services that all of them share."
        adapters = [] if self.learn is None else list_adapters(self.learn, 'ksuit')
        return adapters[0] if adapters else self

    def _share_services(self) -> None:
        "Use the writer and the tracker of the first ksuit callback of the Learner."
        first = self._find_first()
        for name in SHARED:
            self.services[name] = first.services[name]

    # -- counting ----------------------------------------------------------------------------------

    def _add_lap(self, *keys: str) -> None:
        "Add the seconds since the last lap to the times with these keys."
        now = perf_counter()
        for key in keys:
            self._times[key] += now - self._lap_start
        self._lap_start = now

    def progress(self) -> Progress:
        "Return the progress of training; before a checkpoint is restored, the progress of the checkpoint."
        source = self.learn.run.resuming or self.learn
        n_uncounted = int(self.at_epoch_end and not self._is_epoch_counted)
        return Progress(
            source.finished('ep') + n_uncounted, source.finished('st'), source.finished('sp')
        )

    @property
    def batch_size(self) -> int:
        "Samples per batch, from the batches seen or else from the loader; 0 if unknown."
        train = self.learn.dls.train
        reported = getattr(train, 'bs', None) or getattr(train, 'batch_size', None)
        return self._seen_size or reported or 0

    @property
    def effective_batch_size(self) -> int:
        return self.batch_size * (batches_per_step(self.learn, self.batch_size) or 1)

    def count_updates(self, n: int | None) -> int | None:
        "Return the number of steps in a fit of `n` batches, or None if unknown."
        per = batches_per_step(self.learn, self.batch_size)
        size = self._epoch_length()
        if n is None or per == 1:
            return n
        if per is None or not size or (n >= size and size < per):
            return None  # leftover samples of an epoch count toward the next epoch's first step
        epochs, rest = divmod(n, size)
        return epochs * -(-size // per) + (-(-rest // per) if rest >= per else 0)

    def updates_per_epoch(self) -> int | None:
        return self.count_updates(self._epoch_length())

    def _epoch_length(self) -> int | None:
        return find_length(self.learn, self.learn.dls.train)

    # -- state -------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the callback's state and progress; the first ksuit callback adds the log and the summary."
        shared = None
        if self._find_first() is self:
            shared = {
                **self.services['writer'].state_dict(),
                'summary': self.services['tracker'].summary,
            }
        return {
            **super().state_dict(),
            'started': dict(self.started_at),
            'reached': dict(self._last_progress),
            'size': self._seen_size,
            'at_epoch_end': self.at_epoch_end,
            'counted': self._is_epoch_counted,
            'writer': shared,
        }

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the callback's state and progress."
        self.started_at = Progress(**sd['started'])
        self._last_progress = Progress(**sd['reached'])
        self._seen_size = sd['size']
        self.at_epoch_end = sd['at_epoch_end']
        self._is_epoch_counted = sd['counted']
        if sd['writer'] is not None:
            self.services['writer'].load_state_dict(sd['writer'])
            self.services['tracker'].summary = dict(sd['writer'].get('summary', {}))
        super().load_state_dict(sd)

    @override
    def resume_from_checkpoint(self, folder: Path, model: Any) -> None:
        "Call the callback's `resume_from_checkpoint`, which reads its files next to a checkpoint."
        resume = getattr(self.wrapped, 'resume_from_checkpoint', None)
        if self._has_read_files or resume is None:
            self._has_read_files = False
            return
        self._set_attributes()
        paths = Paths(self, Path(folder))
        resume(paths, model)


def find_intervals(cb: Any) -> dict[str, int]:
    "Return the intervals of a callback by unit; raise `OptionError` for an invalid interval."
    values = {kind: getattr(cb, name, None) for kind, name in INTERVALS.items()}
    every = {kind: n for kind, n in values.items() if n is not None}
    for kind, n in every.items():
        check_count(f'{type(cb).__name__}.{INTERVALS[kind]}', n)
    return every


def join_results(results: list[Any]) -> Any:
    "Concatenate batch results: tensors along dimension 0, numbers into a tensor; None if all are None."
    if all(r is None for r in results):
        return None
    if all(isinstance(r, (int, float)) for r in results):
        return torch.tensor(results)
    return concat(results)
