# SPDX-License-Identifier: Apache-2.0
"""Callback that records training batches with torch.profiler."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import torch

from learnkit.callbacks.nan_guard import print_line
from learnkit.core.files import as_local_path, atomic_write, check_folder, unused_path
from learnkit.core.model import model_device
from learnkit.core.validation import check_count, warn_user
from learnkit.engine.callback import Callback


class TorchProfiler(Callback):
    """Record training batches with `torch.profiler`: a trace of each operator, and a table of the slowest ones.

    `wait` batches of the fit are left alone, the profiler warms up for `warmup` batches, and records
    the next `active` batches, each from the request to the loader to the end of the batch. This is
    done `repeat` times. Each time writes `<folder>/trace-batch-<n>.json`, where `n` is the first
    recorded batch (in several processes `-rank<r>` follows, and every rank writes its own), for
    https://ui.perfetto.dev or chrome://tracing, and rank 0 prints the table. Existing files are kept.
    `files` has the paths of this process, and `table` is the last table.

    An error or the end of the fit ends the recording, and the batches so far are written. An
    evaluation between recorded batches is in the trace. A GPU is recorded if there is one. A fit that
    ends before the first recorded batch is a warning.

    Raises `OptionError` for invalid numbers, and before training if the folder cannot be written.
    Checkpointed: nothing; a resumed fit is recorded again.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=TorchProfiler(wait=2, warmup=1, active=3))
    ...     with learn.no_bar(): learn.fit(1)
    ...     print(learn.torch_profiler.files[0].relative_to(folder).as_posix())
    profile/trace-batch-3.json
    """

    order = -1000
    run_in = 'fit'
    run_valid = False
    remove_on_find = True
    writes_files = True
    runs_last = ('after_batch',)  # the work of other callbacks belongs to the batch

    def __init__(
        self,
        wait: int = 5,  # number of batches before each recording: the first ones differ
        warmup: int = 1,  # number of batches for which the profiler runs and its results are dropped
        active: int = 3,  # number of batches to record
        repeat: int = 1,  # number of recordings; 0: until the end of the fit
        folder: str | Path = 'profile',  # path below `learn.path`, or an absolute path
        n_rows: int = 10,  # number of operators in the table; 0: no table
        record_shapes: bool = False,  # record the shapes of inputs
        profile_memory: bool = False,  # record allocations
        with_stack: bool = False,  # record source files and lines, which is slow
    ) -> None:
        self.wait = check_count('wait', wait, 0)
        self.warmup = check_count('warmup', warmup, 0)
        self.active = check_count('active', active)
        self.repeat = check_count('repeat', repeat, 0)
        self.folder = as_local_path(folder)
        self.n_rows = check_count('n_rows', n_rows, 0)
        self.options: dict[str, Any] = {
            'record_shapes': record_shapes,
            'profile_memory': profile_memory,
            'with_stack': with_stack,
        }
        self.files: list[Path] = []
        self.table = ''
        self._profiler: Any = None  # while it runs
        self._n_left = 0.0  # number of recordings to begin in this fit
        self._n_waits = 0  # number of batches before the next recording
        self._n_steps = 0  # number of batches of this recording
        self._n_files_before = 0  # number of files before this fit
        self._name = ''  # name of the file of this recording

    def before_fit(self) -> None:
        "Check the folder, and wait for the first batch."
        if self.learn.world.is_first:
            check_folder(self.learn.path / self.folder)
        self._n_left = self.repeat or inf
        self._n_waits = self.wait
        self._n_files_before = len(self.files)

    def before_draw(self) -> None:
        "Begin a recording if it is due."
        if self._profiler is None and self._n_left and not self._n_waits:
            self._begin()

    def _begin(self) -> None:
        world = self.learn.world
        first = self.learn.parts.counters.batches + self.warmup
        rank = f'-rank{world.rank}' if world.size > 1 else ''
        self._name = f'trace-batch-{first}{rank}.json'
        self._n_steps = 0
        self._n_left -= 1
        self._n_waits = self.wait
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(
                wait=0, warmup=self.warmup, active=self.active, repeat=1
            ),
            on_trace_ready=self._write,
            **self.options,
        )
        self._profiler.start()

    def after_batch(self) -> None:
        "End a batch of the recording; after the last batch, end the recording."
        if self._profiler is None:
            self._n_waits = max(self._n_waits - 1, 0)
            return
        self._n_steps += 1
        self._profiler.step()
        if self._n_steps == self.warmup + self.active:
            self._stop()

    def after_fit(self) -> None:
        "End the recording with the fit, even if an outer run continues; warn if no batch was recorded."
        self._stop()
        if self.learn.train_iter and len(self.files) == self._n_files_before:
            warn_user(
                f'TorchProfiler has recorded no batch: the fit ended before batch {self.wait + self.warmup}. Pass a '
                f'smaller `wait` (it is {self.wait}) or `warmup` ({self.warmup}), or train for longer.'
            )

    def _stop(self) -> None:
        "End a running recording, and write what was recorded."
        profiler = self._profiler
        self._profiler = None
        if profiler is not None:
            profiler.stop()

    def cleanup(self) -> None:
        "End the recording after an error."
        self._stop()

    def _write(self, profiler: Any) -> None:
        "Write the trace, and print the table; do nothing if no recorded batch was completed."
        if self._n_steps <= self.warmup:
            return
        path = unused_path(self.learn.path / self.folder / self._name)
        with atomic_write(path) as tmp:
            profiler.export_chrome_trace(str(tmp))
        self.files.append(path)
        if self.n_rows:
            device = model_device(self.learn.model, self.learn.dls).type
            sort_by = (
                f'self_{device}_time_total' if device in ('cuda', 'xpu') else 'self_cpu_time_total'
            )
            self.table = profiler.key_averages().table(sort_by, self.n_rows)
            if self.learn.world.is_first:
                print_line(self, f'{self.table}\n{path}')
