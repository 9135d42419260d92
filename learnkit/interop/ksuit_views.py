"""Arguments of ksuit callbacks: counters, trainer, writers, paths and data, as live views of the Learner."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learnkit.callbacks.dataset import n_samples
from learnkit.core.errors import LoaderError, MetricError, did_you_mean
from learnkit.core.files import atomic_write
from learnkit.core.time import Time
from learnkit.data.dataloaders import evaluation_loaders, n_batches
from learnkit.engine.budget import Budget
from learnkit.interop.composer_state import log_as_named
from learnkit.interop.hooks import send_to_loggers
from learnkit.interop.ksuit_construct import extend
from learnkit.metrics.direction import MetricProperties

__all__ = [
    'Progress',
    'UpdateCounter',
    'LogWriter',
    'CheckpointWriter',
    'Paths',
    'DataContainer',
    'Tracker',
    'MetricPropertyProvider',
]


# metrics of which no value is better than another
NEUTRAL_KEYS = (
    'profiler/*',
    'profiling/*',
    'optim/*',
    '*/lr/*',
    'ctx/*',
    'loss_weight/*',
    'gradient/*',
    'detach/*',
    'lossdiff/*',
    'train_time/*',
)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run in epochs, updates (optimizer steps) and samples.

    >>> str(Progress(1, 20, 320)), dict(Progress(1, 20, 320))
    ('E1_U20_S320', {'epoch': 1, 'update': 20, 'sample': 320})
    """

    epoch: int | None = None
    update: int | None = None
    sample: int | None = None

    def __iter__(self) -> Iterator[tuple[str, int]]:
        values = {'epoch': self.epoch, 'update': self.update, 'sample': self.sample}
        return iter([(k, v) for k, v in values.items() if v is not None])

    def __str__(self) -> str:
        return f'E{self.epoch}_U{self.update}_S{self.sample}'

    def copy(self) -> Progress:
        return self

    @property
    def is_fully_specified(self) -> bool:
        return None not in (self.epoch, self.update, self.sample)


class UpdateCounter:
    "Progress of the run: `cur_iteration` (Noether) or `cur_checkpoint` (ksuit), its start and its end."

    def __init__(
        self,
        watch: Any,  # adapter, with its learner and its counts
    ) -> None:
        self._watch = watch

    @property
    def cur_iteration(self) -> Progress:
        return self._watch.progress()

    @property
    def start_iteration(self) -> Progress:
        return self._watch.started_at

    @property
    def end_iteration(self) -> Progress:
        learn, start, bs = self._watch.learn, self._watch.started_at, self._watch.batch_size
        budget = next((cb for cb in learn.cbs if isinstance(cb, Budget)), None)
        if budget:
            return self._end_of_budget(budget.total)
        if not isinstance(learn.n_epoch, int):
            return Progress()
        end = start.epoch + learn.n_epoch
        per_epoch = self._watch.updates_per_epoch()
        n = n_batches(learn.dls.train)
        return Progress(end, per_epoch and end * per_epoch, end * n * bs if n and bs else None)

    def _end_of_budget(self, total: Time) -> Progress:
        "Return the end of a fit in batches, steps or samples; unknown in other units."
        start, n = self._watch.started_at, int(total.value)
        if total.unit == 'sp':
            return Progress(sample=(start.sample or 0) + n)
        steps = {'st': n, 'ba': self._watch.updates_of(n)}.get(total.unit)
        return Progress() if steps is None else Progress(update=(start.update or 0) + steps)

    cur_checkpoint, start_checkpoint, end_checkpoint = cur_iteration, start_iteration, end_iteration

    @property
    def epoch(self) -> int | None:
        return self.cur_iteration.epoch

    @property
    def update(self) -> int | None:
        return self.cur_iteration.update

    @property
    def sample(self) -> int | None:
        return self.cur_iteration.sample

    @property
    def updates_per_epoch(self) -> int | None:
        return self._watch.updates_per_epoch()

    @property
    def effective_batch_size(self) -> int:
        return self._watch.effective_batch_size

    @property
    def epoch_as_float(self) -> float:
        per = self.updates_per_epoch
        return (self.update or 0) / per if per else float(self.epoch or 0)

    @property
    def is_full_epoch(self) -> bool:
        return self._watch.at_epoch_end

    @property
    def is_finished(self) -> bool:
        now, end = dict(self.cur_iteration), dict(self.end_iteration)
        unit = next(iter(end), None)  # epochs if known
        return unit is not None and now.get(unit, 0) >= end[unit]


class LogWriter:
    """Log scalars to `learn.log`, readable in `log_cache` until the next batch.

    All ksuit callbacks of a Learner share one writer. `log_cache` also holds the values that other
    callbacks have logged, and after an epoch the columns of its row in the history; `log_entries`
    holds all values that were written here.
    """

    def __init__(self, watch: Any) -> None:
        self._watch = watch
        self._written: set[str] = set()  # names logged in this update
        self.log_cache: dict[str, Any] = {}
        self.log_entries: list[dict[str, Any]] = []

    def add_scalar(
        self,
        key: str,
        value: Any,  # number, or tensor or array of one element
        logger: logging.Logger | None = None,  # logger that also gets the value
        format_str: str | None = None,  # format of the value for `logger`, such as '.4f'
    ) -> None:
        """Log a number; raise `MetricError` for a name that was logged in this update already."""
        key = key.removesuffix('/')
        if key in self._written:
            raise MetricError(f'{key!r} was logged already at {self._watch.progress()}.')
        if not self._written:
            # values of others may have been noted earlier in the update
            self.log_cache |= dict(self._watch.progress())
        self._written.add(key)
        if isinstance(value, np.generic):
            value = value.item()
        log_as_named(self._watch.learn, key, value)
        if isinstance(value, Tensor):
            value = value.item()
        self.note({key: value})
        if logger is not None:
            logger.info('%s: %s', key, f'{value:{format_str}}' if format_str else value)

    def add_nonscalar(self, key: str, value: Any) -> None:
        "Pass images or a text to the loggers, and to callbacks that accept them."
        method = 'log_text' if isinstance(value, str) else 'log_images'
        send_to_loggers(self._watch.learn, method, key, value)

    def note(self, values: Mapping[str, Any]) -> None:
        "Keep logged values, with the progress of the run."
        if not self.log_cache:
            self.log_cache = dict(self._watch.progress())
        self.log_cache |= values

    def get_all_metric_values(self, key: str) -> list[Any]:
        "Return all values of a metric so far."
        return [entry[key] for entry in self.log_entries if key in entry]

    def flush(self) -> None:
        "End the entry of this update."
        if not self.log_cache:
            return
        kept = {*self._written, 'epoch', 'update', 'sample'}  # the Learner keeps values of others
        if self._written:
            self.log_entries.append({k: v for k, v in self.log_cache.items() if k in kept})
        self.forget()

    def forget(self) -> None:
        "Discard the entry of this update."
        self.log_cache = {}
        self._written.clear()

    def state_dict(self) -> dict[str, Any]:
        "Return all written entries, and the entry of this update."
        return {
            'cache': dict(self.log_cache),
            'written': sorted(self._written),
            'entries': list(self.log_entries),
        }

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore all entries."
        self.log_cache = dict(sd['cache'])
        self.log_entries = [dict(entry) for entry in sd['entries']]
        self._written = set(sd['written'])

    def finish(self) -> None:
        "Do nothing: the Learner's loggers close themselves."


class Tracker:
    """Experiment tracker: `log` goes to `learn.log`, and the summary to the loggers' settings.

    All ksuit callbacks of a Learner share one tracker. `summary` holds all values by name.
    """

    def __init__(self, watch: Any) -> None:
        self._watch = watch
        self.summary: dict[str, Any] = {}

    def log(self, data: Mapping[str, Any]) -> None:
        "Log the numbers in `data`, except the counters, which the Learner logs."
        for name, value in data.items():
            if name not in ('epoch', 'update', 'sample'):
                log_as_named(self._watch.learn, name, value)

    def set_summary(self, key: str, value: Any) -> None:
        "Set a value of the summary."
        self.update_summary({key: value})

    def update_summary(self, data: Mapping[str, Any]) -> None:
        "Set values of the summary."
        self.summary |= data
        send_to_loggers(self._watch.learn, 'log_params', dict(data))


class Paths:
    "Paths of files: below the Learner's `path`, or next to a checkpoint that a run resumes from."

    def __init__(
        self,
        watch: Any,
        checkpoints: Path | None = None,  # checkpoint folder; None: `checkpoints` below `path`
    ) -> None:
        self._watch, self._checkpoints = watch, checkpoints

    @property
    def run_output_path(self) -> Path:
        return Path(self._watch.learn.path)

    stage_output_path = output_path = run_output_path

    @property
    def checkpoint_path(self) -> Path:
        path = self._checkpoints or self.run_output_path / 'checkpoints'
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def run_id(self) -> str:
        return self.run_output_path.resolve().name

    stage_id = run_id
    stage_name: str | None = None

    def get_stage_output_path(
        self, stage_name: str | None = None, stage_id: str | None = None
    ) -> Path:
        "Return the folder that contains the folder of checkpoints."
        return self.checkpoint_path.parent


class CheckpointWriter:
    "Write weights as plain data, readable with `torch.load(file, weights_only=True)`."

    def __init__(self, watch: Any) -> None:
        self._watch = watch

    @property
    def path_provider(self) -> Paths:
        return self._watch.given['path_provider']

    def save_model_checkpoint(
        self,
        state_dict: Mapping[str, Any],
        checkpoint_tag: Any = 'latest',  # part of the file's name
        model_name: str | None = None,  # part of the file's name; None: the class of the model
        model_info: str | None = None,  # part of the file's name, such as 'ema'
        output_name: str | None = None,  # whole name of the file instead
        **extra: Any,  # further plain values to store
    ) -> Path:
        "Save a state dict and return the path."
        paths, info = self._watch.given['path_provider'], f'_{model_info}' if model_info else ''
        name = model_name or type(self._watch.learn.model).__name__
        file = paths.checkpoint_path / (output_name or f'{name}{info}_cp={checkpoint_tag}_model.th')
        extra = {k: v for k, v in extra.items() if k != 'model_config' and v is not None}
        data = {
            'state_dict': dict(state_dict),
            'checkpoint_tag': str(checkpoint_tag),
            'run_id': paths.run_id,
            'training_iteration': dict(self._watch.progress()),
            **extra,
        }
        with atomic_write(file) as tmp:
            torch.save(data, tmp)
        return file

    def save(
        self,
        model: Any,
        checkpoint_tag: Any = None,  # part of the files' names; None: progress of the run
        trainer: Any = None,  # trainer whose state is saved too
        save_weights: bool = True,
        save_optim: bool = True,
        save_latest_weights: bool = False,
        save_latest_optim: bool = False,
        model_info: str | None = None,
        checkpoint: Any = None,  # ksuit's name of `checkpoint_tag`
        **unused: Any,  # names of submodels: all are saved
    ) -> None:
        "Save weights and optimizer of the Learner."
        tags = [t for t in (checkpoint_tag, checkpoint) if t is not None]
        tag = tags[0] if tags else self._watch.progress()
        name = getattr(model, 'name', type(model).__name__)
        folder = self._watch.given['path_provider'].checkpoint_path
        weights = [
            t for t, is_on in ((tag, save_weights), ('latest', save_latest_weights)) if is_on
        ]
        optims = [t for t, is_on in ((tag, save_optim), ('latest', save_latest_optim)) if is_on]
        for t in weights:
            self.save_model_checkpoint(model.state_dict(), t, name, model_info)
        opt = self._watch.learn.opt
        states = [(t, 'optim', opt.state_dict()) for t in optims if opt is not None]
        if trainer is not None:
            states += [(t, 'trainer', trainer.state_dict()) for t in {*weights, *optims}]
        for t, kind, state in states:
            with atomic_write(folder / f'{name}_cp={t}_{kind}.th') as tmp:
                torch.save(state, tmp)


class DataContainer:
    "Data by name: 'train', or the name of a validation loader."

    def __init__(self, watch: Any) -> None:
        self._watch = watch

    @property
    def loaders(self) -> dict[str, Any]:
        dls = self._watch.learn.dls
        return {'train': dls.train, **dict(evaluation_loaders(dls))}

    @property
    def datasets(self) -> dict[str, Any]:
        return {name: data_set_of(dl) for name, dl in self.loaders.items()}

    def loader(self, key: str | None = None) -> Any:
        "Return a loader by name, by default the first validation loader; raise `LoaderError` if unknown."
        loaders = self.loaders
        if key is None:
            key = next((name for name in loaders if name != 'train'), 'train')
        if key in loaders:
            return loaders[key]
        raise LoaderError(
            f'There is no loader {key!r}: there are {", ".join(loaders)}.{did_you_mean(key, loaders)}'
        )

    def get_dataset(self, key: str | None = None, **unused: Any) -> Any:
        "Return the data set of a loader; for a loader without one, its samples, which can be counted."
        return data_set_of(self.loader(key))


class Samples:
    "Samples of a loader that has no data set; any other attribute is read from the loader."

    pipeline = None

    def __init__(self, dl: Any) -> None:
        self._dl = dl

    def __len__(self) -> int:
        n = n_samples(self._dl)
        if n is None:
            raise TypeError(f'The number of samples of a {type(self._dl).__name__} is unknown.')
        return n

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dl)

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        return getattr(self._dl, name)


def data_set_of(dl: Any) -> Any:
    "Return the data set of a loader; its `pipeline`, unless it has one, is the loader's `collate_fn`."
    data_set = getattr(dl, 'dataset', None)
    if data_set is None:
        return Samples(dl)
    if hasattr(data_set, 'pipeline') or not hasattr(data_set, '__dict__'):
        return data_set
    return extend(data_set, {'pipeline': lambda _: getattr(dl, 'collate_fn', None)})


class MetricPropertyProvider:
    """Directions of metrics (higher, lower or neutral) by their names.

    As in ksuit, a name with `loss` or `error` is lower-is-better, one with `accuracy`
    higher-is-better, and names in `optim/`, `lossdiff/`, `train_time/` and the like are neutral.
    Other names are looked up in `learnkit.MetricProperties`.

    >>> provider = MetricPropertyProvider()
    >>> provider.higher_is_better('loss/test/total'), provider.lower_is_better('wer')
    (False, True)
    >>> provider.is_neutral_key('lossdiff/test/total'), provider.higher_is_better('valid/accuracy')
    (True, True)
    """

    def __init__(self) -> None:
        self._directions = MetricProperties(
            higher='*accuracy*', lower=['*loss*', '*error*'], neutral=NEUTRAL_KEYS
        )

    def _direction(self, key: str) -> str:
        direction = self._directions.get(key)
        if direction is not None:
            return direction
        raise MetricError(
            f'Is more of {key!r} better, or less? Its name does not say: give the callback a '
            '`metric_property_provider` with `higher_is_better(key)` and `is_neutral_key(key)`.'
        )

    def higher_is_better(self, key: str) -> bool:
        return self._direction(key) == 'higher'

    def lower_is_better(self, key: str) -> bool:
        return self._direction(key) == 'lower'

    def is_neutral_key(self, key: str) -> bool:
        return self._directions.get(key) == 'neutral'
