# SPDX-License-Identifier: Apache-2.0
"""Views of the Learner that ksuit callbacks receive: counter, writers, paths, tracker and data."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learnkit.core.errors import LoaderError, MetricError, did_you_mean
from learnkit.core.files import atomic_write
from learnkit.core.time import Time
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.engine.budget import find_budget
from learnkit.engine.lengths import find_length
from learnkit.interop.common.hooks import send_to_loggers
from learnkit.interop.composer.state import log_as_named
from learnkit.interop.ksuit.construct import extend
from learnkit.metrics.direction import MetricProperties

# names of metrics without a better direction
NEUTRAL_KEYS = (
    'profiler/* profiling/* optim/* */lr/* ctx/* loss_weight/* gradient/* detach/* lossdiff/* '
    'train_time/*'
).split()


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


class View:
    "Part of the Learner by ksuit's names, for one callback."

    def __init__(
        self,
        adapter: Any,  # callback of `from_ksuit`
    ) -> None:
        self._adapter = adapter


class UpdateCounter(View):
    "Current, start and end progress of the run: `cur_iteration` (Noether) or `cur_checkpoint` (ksuit), and so on."

    @property
    def cur_iteration(self) -> Progress:
        return self._adapter.progress()

    @property
    def start_iteration(self) -> Progress:
        return self._adapter.started_at

    @property
    def end_iteration(self) -> Progress:
        learn = self._adapter.learn
        start = self._adapter.started_at
        bs = self._adapter.batch_size
        budget = find_budget(learn)
        if budget is not None:
            return self._find_budget_end(budget.total)
        if not isinstance(learn.n_epoch, int):
            return Progress()
        end = start.epoch + learn.n_epoch
        per_epoch = self._adapter.updates_per_epoch()
        n = find_length(learn, learn.dls.train)
        return Progress(end, per_epoch and end * per_epoch, end * n * bs if n and bs else None)

    def _find_budget_end(self, total: Time) -> Progress:
        "Return the end of a fit with a budget of batches, steps or samples; empty for other units."
        start = self._adapter.started_at
        n = int(total.value)
        if total.unit == 'sp':
            return Progress(sample=(start.sample or 0) + n)
        steps = {'st': n, 'ba': self._adapter.count_updates(n)}.get(total.unit)
        return Progress() if steps is None else Progress(update=(start.update or 0) + steps)

    cur_checkpoint = cur_iteration
    start_checkpoint = start_iteration
    end_checkpoint = end_iteration

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
        return self._adapter.updates_per_epoch()

    @property
    def effective_batch_size(self) -> int:
        return self._adapter.effective_batch_size

    @property
    def is_full_epoch(self) -> bool:
        return self._adapter.at_epoch_end


class LogWriter(View):
    """Log scalars to `learn.log`, and keep them in `log_cache` until the next batch.

    All ksuit callbacks of a Learner share one writer. `log_cache` also holds the values that other
    callbacks have logged, and after an epoch the columns of its row in the history; `log_entries`
    holds all values that this writer has logged.
    """

    def __init__(self, adapter: Any) -> None:
        super().__init__(adapter)
        self._update_names: set[str] = set()  # names logged in this update
        self.log_cache: dict[str, Any] = {}
        self.log_entries: list[dict[str, Any]] = []

    def add_scalar(
        self,
        key: str,
        value: Any,  # number, or tensor or array of one element
        logger: logging.Logger | None = None,  # logger that also receives the value
        format_str: str | None = None,  # format of the value for `logger`, such as '.4f'
    ) -> None:
        "Log a number; raise `MetricError` if a value with this name was logged in the same update."
        key = key.removesuffix('/')
        if key in self._update_names:
            raise MetricError(f'{key!r} was logged already at {self._adapter.progress()}.')
        if not self._update_names:
            # other callbacks may have recorded values earlier in the update
            self.log_cache |= dict(self._adapter.progress())
        self._update_names.add(key)
        if isinstance(value, (np.generic, Tensor)):
            value = value.item()
        log_as_named(self._adapter.learn, key, value)
        self.record({key: value})
        if logger is not None:
            logger.info('%s: %s', key, f'{value:{format_str}}' if format_str else value)

    def add_nonscalar(self, key: str, value: Any) -> None:
        "Pass images or a string to the loggers, and to callbacks that accept them."
        method = 'log_text' if isinstance(value, str) else 'log_images'
        send_to_loggers(self._adapter.learn, method, key, value)

    def record(self, values: Mapping[str, Any]) -> None:
        "Add logged values to the entry of this update, together with the progress of the run."
        if not self.log_cache:
            self.log_cache = dict(self._adapter.progress())
        self.log_cache |= values

    def get_all_metric_values(self, key: str) -> list[Any]:
        "Return all values of a metric that this writer has logged."
        return [entry[key] for entry in self.log_entries if key in entry]

    def flush(self) -> None:
        "Append this update's entry to `log_entries`, without the values of other callbacks."
        if not self.log_cache:
            return
        if self._update_names:
            kept = {*self._update_names, 'epoch', 'update', 'sample'}
            self.log_entries.append({k: v for k, v in self.log_cache.items() if k in kept})
        self.discard_entry()

    def finish(self) -> None:
        "Write all entries to `tracker/entries.th` as `{key: {update: value}}`; nothing without entries."
        self.flush()
        if not self.log_entries or not self._adapter.learn.world.is_first:
            return
        by_key: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        for entry in self.log_entries:
            for key, value in entry.items():
                if key != 'update':
                    by_key[key][entry['update']] = value
        with atomic_write(self._adapter.services['path_provider'].basetracker_entries_uri) as tmp:
            torch.save(dict(by_key), tmp)

    def discard_entry(self) -> None:
        "Discard the entry of this update."
        self.log_cache = {}
        self._update_names.clear()

    def state_dict(self) -> dict[str, Any]:
        "Return all entries, and the entry of this update."
        return {
            'cache': dict(self.log_cache),
            'written': sorted(self._update_names),
            'entries': list(self.log_entries),
        }

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore all entries."
        self.log_cache = dict(sd['cache'])
        self.log_entries = [dict(entry) for entry in sd['entries']]
        self._update_names = set(sd['written'])


class Tracker(View):
    """Pass logged values to `learn.log`, and the summary to the loggers as parameters.

    All ksuit callbacks of a Learner share one tracker. `summary` holds all values by name.
    """

    def __init__(self, adapter: Any) -> None:
        super().__init__(adapter)
        self.summary: dict[str, Any] = {}

    def log(self, data: Mapping[str, Any]) -> None:
        "Log the numbers in `data`, except the counters, which the Learner logs."
        for name, value in data.items():
            if name not in ('epoch', 'update', 'sample'):
                log_as_named(self._adapter.learn, name, value)

    def set_summary(self, key: str, value: Any) -> None:
        "Set a value of the summary."
        self.update_summary({key: value})

    def update_summary(self, data: Mapping[str, Any]) -> None:
        "Set values of the summary."
        self.summary |= data
        send_to_loggers(self._adapter.learn, 'log_params', dict(data))


class Paths(View):
    "Folders for files: below the Learner's `path`, or next to the checkpoint that a run resumes from."

    def __init__(
        self,
        adapter: Any,
        checkpoints: Path | None = None,  # checkpoint folder; None: `checkpoints` below `path`
    ) -> None:
        super().__init__(adapter)
        self._checkpoints = checkpoints

    @property
    def run_output_path(self) -> Path:
        return Path(self._adapter.learn.path)

    stage_output_path = output_path = run_output_path

    @property
    def checkpoint_path(self) -> Path:
        path = self._checkpoints or self.run_output_path / 'checkpoints'
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def basetracker_entries_uri(self) -> Path:
        file = self.run_output_path / 'tracker' / 'entries.th'
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    @property
    def run_id(self) -> str:
        return self.run_output_path.resolve().name


class CheckpointWriter(View):
    "Write weights as plain data, readable with `torch.load(file, weights_only=True)`."

    @property
    def path_provider(self) -> Paths:
        return self._adapter.services['path_provider']

    def save_model_checkpoint(
        self,
        state_dict: Mapping[str, Any],
        checkpoint_tag: Any = 'latest',  # part of the file's name
        model_name: str | None = None,  # part of the file's name; None: class name of the model
        model_info: str | None = None,  # part of the file's name, such as 'ema'
        output_name: str | None = None,  # file name; None: built from the other arguments
        **extra: Any,  # further plain values to store
    ) -> Path:
        "Save a state dict and return the path."
        paths = self.path_provider
        info = f'_{model_info}' if model_info else ''
        name = model_name or type(self._adapter.learn.model).__name__
        file = paths.checkpoint_path / (output_name or f'{name}{info}_cp={checkpoint_tag}_model.th')
        extra = {k: v for k, v in extra.items() if k != 'model_config' and v is not None}
        data = {
            'state_dict': dict(state_dict),
            'checkpoint_tag': str(checkpoint_tag),
            'run_id': paths.run_id,
            'training_iteration': dict(self._adapter.progress()),
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
        **unused: Any,  # names of submodels; all submodels are saved
    ) -> None:
        "Save the weights of `model`, the Learner's optimizer, and the state of `trainer`."
        tag = self._adapter.progress() if checkpoint_tag is None else checkpoint_tag
        name = getattr(model, 'name', type(model).__name__)
        folder = self.path_provider.checkpoint_path
        opt = self._adapter.learn.opt
        choices = (
            (tag, save_weights, save_optim),
            ('latest', save_latest_weights, save_latest_optim),
        )
        states = []
        for t, with_weights, with_optim in choices:
            if with_weights:
                self.save_model_checkpoint(model.state_dict(), t, name, model_info)
            if with_optim and opt is not None:
                states.append((t, 'optim', opt.state_dict()))
            if trainer is not None and (with_weights or with_optim):
                states.append((t, 'trainer', trainer.state_dict()))
        for t, kind, state in states:
            with atomic_write(folder / f'{name}_cp={t}_{kind}.th') as tmp:
                torch.save(state, tmp)


class DataContainer(View):
    "Loaders and data sets by name: 'train', or the name of a validation loader."

    @property
    def loaders(self) -> dict[str, Any]:
        dls = self._adapter.learn.dls
        return {'train': dls.train, **dict(evaluation_loaders(dls))}

    @property
    def datasets(self) -> dict[str, Any]:
        return {name: data_set_of(dl) for name, dl in self.loaders.items()}

    def loader(self, key: str | None = None) -> Any:
        "Return a loader by name, or the first validation loader; raise `LoaderError` for an unknown name."
        loaders = self.loaders
        if key is None:
            key = next((name for name in loaders if name != 'train'), 'train')
        if key in loaders:
            return loaders[key]
        raise LoaderError(
            f'There is no loader {key!r}: there are {", ".join(loaders)}.{did_you_mean(key, loaders)}'
        )

    def get_dataset(self, key: str | None = None, **unused: Any) -> Any:
        "Return the data set of a loader, or the loader if it has none."
        return data_set_of(self.loader(key))


def data_set_of(dl: Any) -> Any:
    "Return the data set of a loader, or the loader without one; `pipeline` defaults to its `collate_fn`."
    data_set = getattr(dl, 'dataset', dl)
    if hasattr(data_set, 'pipeline') or not hasattr(data_set, '__dict__'):
        return data_set
    return extend(data_set, {'pipeline': lambda _: getattr(dl, 'collate_fn', None)})


class MetricPropertyProvider:
    """Return the direction of a metric (higher, lower or neutral is better) by the metric's name.

    As in ksuit, names with `loss` or `error` are lower-is-better, names with `accuracy` are
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

    def _find_direction(self, key: str) -> str:
        direction = self._directions.get(key)
        if direction is not None:
            return direction
        raise MetricError(
            f'Is more of {key!r} better, or less? Its name does not say: pass the callback a '
            '`metric_property_provider` with `higher_is_better(key)` and `is_neutral_key(key)`.'
        )

    def higher_is_better(self, key: str) -> bool:
        return self._find_direction(key) == 'higher'

    def lower_is_better(self, key: str) -> bool:
        return self._find_direction(key) == 'lower'

    def is_neutral_key(self, key: str) -> bool:
        return self._directions.get(key) == 'neutral'
