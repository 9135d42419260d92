# SPDX-License-Identifier: Apache-2.0
"""Callback that writes MLPerf Training result files: one line per event, `:::MLLOG {json}`."""

from __future__ import annotations

import json
import math
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from learnkit.callbacks.accumulation import GradientAccumulation
from learnkit.callbacks.recorder import records
from learnkit.callbacks.tracking import Comparison
from learnkit.core.errors import MetricError
from learnkit.core.files import as_local_path, check_file
from learnkit.core.model import model_device
from learnkit.core.validation import check_count
from learnkit.core.watched import is_better
from learnkit.data.dataloaders import batch_size_of, evaluation_loaders
from learnkit.engine.callback import Callback
from learnkit.metrics.direction import as_comparison
from learnkit.monitors.dataset import n_samples

if TYPE_CHECKING:
    from learnkit.learner import Learner

START = 'INTERVAL_START'
END = 'INTERVAL_END'
POINT = 'POINT_IN_TIME'


class MLPerf(Callback):
    """Write each fit as an MLPerf Training result: `<folder>/results/<system>/<benchmark>/result_<n>.txt`.

    The lines have the format of MLPerf's logging library (`:::MLLOG {"namespace": "", "time_ms":
    ..., "event_type": ..., "key": ..., "value": ..., "metadata": {...}}`): the submission and the
    data sizes, `run_start`, `block_start`, `epoch_start`, `epoch_stop`, `eval_start`,
    `eval_accuracy`, `eval_stop`, `block_stop`, and `run_stop` with a status: 'success' as soon as
    an evaluation reaches `target`, where the file ends; 'aborted' for a fit that ended or failed
    before. Without a target, a fit that runs to its end is a success. Epochs are counted from 1.
    Each line is passed to the operating system before training continues, so it survives the
    process; `file` is the path.

    Caches are not cleared, which rules of the benchmark require: clear them before, and pass
    `cache_cleared=True`. To stop at the target too, add `ThresholdStopper`. Each fit gets the first
    unused number from `index` on, also when it is resumed. Checkpointed: nothing.

    Raises `OptionError` for invalid options and for a folder that cannot be written, and
    `MetricError` before training if no evaluation logs `monitor`.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=MLPerf(benchmark='line'))
    ...     with learn.no_bar(), learn.no_logging(): learn.fit(1)
    ...     lines = learn.ml_perf.file.read_text().splitlines()
    >>> json.loads(lines[-1].removeprefix(':::MLLOG '))['metadata']['status']
    'success'
    """

    run_in = 'fit'

    observer = True
    order = 100
    remove_on_find = True
    remove_on_fetch = True
    file: Path | None

    def __init__(
        self,
        folder: str | Path = 'mlperf',  # folder of the submission, below `learn.path` or absolute
        index: int = 0,  # least number of a result
        benchmark: str = 'benchmark',  # name of the benchmark, such as 'resnet'
        monitor: str | None = None,  # column of `eval_accuracy`; None: first metric, or the loss
        target: float | None = None,  # value to reach for a success
        comp: Comparison | None = None,  # f(value, target), 'less', 'greater', `MetricProperties`
        submitter: str = '',  # name of the organization
        division: str = 'open',  # 'open' or 'closed'
        status: str = 'onprem',  # 'onprem', 'cloud' or 'preview'
        system: str | None = None,  # name of the system; None: by the device, '1xcpu_learnkit'
        cache_cleared: bool = False,  # whether caches were cleared before
    ) -> None:
        self.folder = as_local_path(folder)
        self.index = check_count('index', index, 0)
        self.benchmark = benchmark
        self.monitor = monitor
        self.target = target
        self.comp = comp
        self.submitter = submitter
        self.division = division
        self.status = status
        self.system = system
        self.cache_cleared = cache_cleared
        self.file = None
        self._created_ms = _now_ms()
        self._out: TextIO | None = None  # open file during the run
        self._column = ''  # column of `eval_accuracy` in this fit
        self._in_block = False

    # -- events ------------------------------------------------------------------------------------

    def before_fit(self) -> None:
        "Open the file, and write the header."
        learn = self.learn
        self._column = self._find_column()
        if self.target is not None:
            as_comparison(self.comp, self._column)  # raises for an unknown direction
        device = _device_name(model_device(learn.model, learn.dls)).replace('/', '_')
        system = self.system or f'1x{device}_learnkit'.replace(' ', '_')
        results = learn.path / self.folder / 'results' / system / self.benchmark
        paths = (results / f'result_{n}.txt' for n in count(self.index))
        self.file = next(path for path in paths if not path.exists())
        check_file(self.file)
        self._out = self.file.open('w', encoding='utf-8')
        self._write_header(system)

    def _write_header(self, system: str) -> None:
        learn = self.learn
        if self.cache_cleared:
            self._write('cache_clear', True, at_ms=self._created_ms)
        self._write('init_start', event_type=START, at_ms=self._created_ms)
        evaluated = [n_samples(dl) for _, dl in evaluation_loaders(learn.dls)]
        for key, value in {
            'submission_benchmark': self.benchmark,
            'submission_division': self.division,
            'submission_org': self.submitter,
            'submission_platform': system,
            'submission_status': self.status,
            'seed': torch.initial_seed(),
            'global_batch_size': _count_step_samples(learn),
            'train_samples': n_samples(learn.dls.train),
            'eval_samples': None if None in evaluated else sum(n or 0 for n in evaluated),
        }.items():
            self._write(key, value)
        self._write('init_stop', event_type=END)
        self._write('run_start', event_type=START)

    def before_epoch(self) -> None:
        "Start a block of one epoch."
        self._write('block_start', event_type=START, first_epoch_num=self._epoch, epoch_count=1)
        self._in_block = True

    def before_train(self) -> None:
        "Start an epoch."
        self._write('epoch_start', event_type=START, **self._metadata)

    def after_train(self) -> None:
        "End the epoch."
        self._write('epoch_stop', event_type=END, **self._metadata)

    def before_eval(self) -> None:
        "Start an evaluation."
        self._write('eval_start', event_type=START, **self._metadata)

    def after_eval(self) -> None:
        "Write the result of the evaluation; end the run if it has reached its target."
        value = records(self).measured.get(self._column)
        if value is not None:
            self._write('eval_accuracy', value, **self._metadata)
        self._write('eval_stop', event_type=END, **self._metadata)
        if value is None or self.target is None:
            return
        comp = as_comparison(self.comp, self._column)
        if value == self.target or is_better(value, self.target, comp):
            self._end('success')

    def after_epoch(self) -> None:
        "End a block."
        self._end_block()

    def after_fit(self) -> None:
        "End the run: a success if there is no target."
        self._end('success' if self.target is None else 'aborted')

    def cleanup(self) -> None:
        "End a run that was interrupted or failed."
        self._end('aborted')

    def _end_block(self) -> None:
        if self._in_block:
            self._write('block_stop', event_type=END, first_epoch_num=self._epoch, epoch_count=1)
        self._in_block = False

    def _end(self, status: str) -> None:
        if self._out is None:
            return
        self._end_block()
        self._write('run_stop', event_type=END, status=status, **self._metadata)
        self._out.close()
        self._out = None

    # -- lines of the file -------------------------------------------------------------------------

    def _write(
        self,
        key: str,
        value: Any = None,
        event_type: str = POINT,
        at_ms: int | None = None,
        **more: Any,
    ) -> None:
        "Write one line to the file."
        if self._out is None:
            return  # the run is over
        line = {
            'namespace': '',
            'time_ms': _now_ms() if at_ms is None else at_ms,
            'event_type': event_type,
            'key': key,
            'value': value,
            'metadata': {'file': 'learnkit', 'lineno': 0, **more},
        }
        self._out.write(f':::MLLOG {json.dumps(line)}\n')
        self._out.flush()

    @property
    def _epoch(self) -> int:
        return int(self.learn.epoch) + 1

    @property
    def _metadata(self) -> dict[str, Any]:
        return {'epoch_num': self._epoch, 'samples_count': self.learn.time.sp}

    def _find_column(self) -> str:
        "Return the column of `eval_accuracy`; raise `MetricError` if no evaluation logs it."
        names = records(self).evaluated_columns()
        if self.monitor in names:
            return self.monitor
        if self.monitor is None and names:
            return names[min(1, len(names) - 1)]  # the first is the loss
        raise MetricError(
            f'MLPerf(monitor={self.monitor!r}): no evaluation logs that, but {", ".join(names) or "nothing"}. Pass '
            'the name of a metric, and a validation loader.'
        )


def _count_step_samples(learn: Learner) -> int | None:
    "Return the number of samples of a step; None if unknown."
    bs = batch_size_of(learn.dls.train)
    if bs is None:
        return None
    accumulations = [cb for cb in learn.cbs if isinstance(cb, GradientAccumulation)]
    return bs * max((cb.batches or math.ceil(cb.n_acc / bs) for cb in accumulations), default=1)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type


def _now_ms() -> int:
    return int(time.time() * 1000)
