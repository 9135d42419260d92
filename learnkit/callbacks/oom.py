"""Callbacks for GPU memory: a report after an out-of-memory error, and a record of allocations."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from learnkit.callbacks.nan_guard import print_line
from learnkit.core.batch import describe
from learnkit.core.errors import OptionError
from learnkit.core.files import atomic_write, check_folder, check_folder_name, unused_path
from learnkit.core.html import text_table
from learnkit.core.learner_type import LearnerLike
from learnkit.core.model import model_device
from learnkit.core.time import Time, as_time
from learnkit.core.validation import check_count, is_count
from learnkit.engine.callback import Callback
from learnkit.engine.microbatch import is_out_of_memory

__all__ = ['MemorySnapshot', 'OOMObserver', 'biggest_tensors', 'write_snapshot']


class OOMObserver(Callback):
    """Write a report on an out-of-memory error, on a GPU or on the CPU: `<folder>/oom-batch-<n>.txt`.

    The report has the place of the error, the shapes of the batch, torch's memory summary of each
    GPU in use, and the biggest live tensors, by their names in the model and the optimizer.
    `report` is its path. The error is raised unchanged. Tensors are found by the garbage collector.
    Tensors that only autograd keeps for the backward pass have no Python object, and make up the
    difference to the allocated memory in the summary.

    The callback costs nothing before an error. Raises `OptionError` before training if the folder
    cannot be written.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> def run_out(cb): raise torch.OutOfMemoryError('made up')
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=[OOMObserver(), Callback(after_pred=run_out)])
    ...     try:
    ...         with learn.no_bar(): learn.fit(1)
    ...     except torch.OutOfMemoryError as e: print(e)
    ...     print(learn.oom_observer.report.read_text().splitlines()[0])
    made up
    Out of memory: batch 0 of epoch 0, in training, RegModel on cpu
    """

    order = 100
    remove_on_find = False
    report: Path | None

    def __init__(
        self,
        folder: str | Path = 'oom',  # path below `learn.path`, or an absolute path
        n_tensors: int = 30,  # number of biggest tensors to list
    ) -> None:
        self.folder = check_folder_name(folder)
        self.n_tensors = check_count('n_tensors', n_tensors)
        self.report = None

    def before_fit(self) -> None:
        "Check that the report can be written."
        if self.learn.fitting and self.learn.world.is_first:
            check_folder(self.learn.path / self.folder)

    def after_error(self) -> None:
        "Write the report if the error is out of memory."
        learn = self.learn
        if not isinstance(learn.error, RuntimeError) or not is_out_of_memory(learn.error):
            return
        path = unused_path(learn.path / self.folder / f'oom-batch-{learn.time.ba}.txt')
        with atomic_write(path) as tmp:
            tmp.write_text('\n'.join(self._write_lines()), 'utf-8')
        self.report = path

    def _write_lines(self) -> Iterator[str]:
        learn = self.learn
        device = model_device(learn.model, learn.dls)
        phases = {'train': 'training', 'valid': 'evaluation', 'predict': 'prediction'}
        phase = phases.get(learn.phase, learn.phase)
        yield (
            f'Out of memory: batch {learn.iter} of epoch {learn.epoch}, in {phase}, {type(learn.model).__name__} on '
            f'{device}'
        )
        yield f'{datetime.now():%Y-%m-%d %H:%M:%S}  {type(learn.error).__name__}: {learn.error}'
        yield from (f'  {note}' for note in getattr(learn.error, '__notes__', ()))
        yield f'\nInputs:  {describe(learn.xb)}\nTargets: {describe(learn.yb)}'
        if learn.microbatch:
            yield f'Microbatches of {learn.microbatch}'
        table = _format_biggest(learn, self.n_tensors)
        yield f'\nThe biggest of the tensors that are alive:\n{table}'
        if torch.cuda.is_initialized():
            for i in range(torch.cuda.device_count()):
                if torch.cuda.memory_reserved(i):
                    yield f'\nGPU {i}:\n{torch.cuda.memory_summary(i)}'
        yield ''


def biggest_tensors(
    n: int = 30,  # number of blocks
) -> list[tuple[int, list[Tensor]]]:
    """Return the biggest memory blocks of tensors as (bytes, tensors in the block), biggest first.

    Tensors that share memory, such as views, are in one block.

    >>> x = torch.zeros(1000, 1000)
    >>> size, tensors = next((s, ts) for s, ts in biggest_tensors(1000) if any(t is x for t in ts))
    >>> size
    4000000
    """
    # size of each block, and its tensors by id, as an object may be found twice
    blocks: dict[tuple[str, int], tuple[int, dict[int, Tensor]]] = {}
    for o in gc.get_objects():
        if not issubclass(type(o), Tensor):
            continue  # isinstance would call the code of a proxy
        # the garbage collector does not know all gradients
        has_grad = o.grad_fn is None and o.grad is not None
        tensors = [o, o.grad] if has_grad else [o]
        for t in tensors:
            memory = _find_memory(t)
            if memory is not None:
                device, address, size = memory
                _, tensors_by_id = blocks.setdefault((device, address), (size, {}))
                tensors_by_id[id(t)] = t
    biggest = sorted(blocks.values(), key=lambda block: -block[0])[:n]
    return [(size, list(tensors_by_id.values())) for size, tensors_by_id in biggest]


def _find_memory(t: Tensor) -> tuple[str, int, int] | None:
    "Return device, address and size of a tensor's memory; None for a tensor without memory."
    try:
        storage = t.untyped_storage()
        if storage.device.type == 'meta' or not storage.nbytes():
            return None  # such as fake tensors of a compiler
        return str(t.device), storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError, ValueError):
        return None  # sparse and lazy tensors


def _format_biggest(learn: LearnerLike, n: int) -> str:
    names = dict(_name_tensors(learn))
    rows = [('MiB', 'Device', 'Type', 'Shape', 'What')]
    for size, tensors in biggest_tensors(n):
        t = max(tensors, key=Tensor.numel)
        what = ', '.join(names[id(o)] for o in tensors if id(o) in names)
        if not what and t.grad_fn is not None:
            what = 'part of a graph'
        mib = f'{size / 2**20:,.2f}'
        dtype = str(t.dtype).removeprefix('torch.')
        shape = ' x '.join(map(str, t.shape)) or 'scalar'
        rows.append((mib, str(t.device), dtype, shape, what))
    return text_table(rows, right=[0])


def _name_tensors(learn: LearnerLike) -> Iterator[tuple[int, str]]:
    "Yield ids and names of the tensors of the model, the optimizer and the batch."
    names = {p: name for name, p in learn.model.named_parameters()}
    optimizers = [] if learn.opt is None else learn.opt.optimizers.values()
    for p, name in names.items():
        yield id(p), f'parameter {name}'
        if p.grad is not None:
            yield id(p.grad), f'gradient of {name}'
    for name, b in learn.model.named_buffers():
        yield id(b), f'buffer {name}'
    for opt in optimizers:
        for p, state in opt.state.items():
            owner = names.get(p, 'a parameter') if isinstance(p, nn.Parameter) else 'a parameter'
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield id(value), f'{key} of {owner}'
    for kind, part in (('input', learn.xb), ('target', learn.yb)):
        for i, value in enumerate(part):
            if isinstance(value, Tensor):
                yield id(value), f'{kind} {i}'


# ---------------------------------------------------------------------------------------- recording


class MemorySnapshot(Callback):
    """Record GPU allocations over a few batches, each with the lines of code that made it.

    After `skip_batches` batches of the fit the callback records for `interval` and writes two files
    to `folder`: `memory-batch-<n>.html`, a plot over time for a browser (which downloads torch's
    viewer), and `.json`, the same data. `files` has their paths. A Learner records once. An error,
    such as out of memory, ends the recording, and the record so far is written.

    On other devices the callback prints a line and does nothing. Raises `OptionError` and
    `TimeError` for invalid options. Checkpointed: whether the recording is done.

    >>> MemorySnapshot(interval='3ba').interval
    Time('3ba')
    """

    order = -5
    run_in = 'fit'
    run_valid = False
    remove_on_find = True
    interval: Time
    files: list[Path]

    def __init__(
        self,
        skip_batches: int = 1,  # number of batches before recording: the first ones differ
        interval: int | str | Time = '3ba',  # duration of the recording; an int counts batches
        folder: str | Path = 'memory',  # path below `learn.path`, or an absolute path
        max_entries: int = 100_000,  # largest number of events to keep: the last ones
    ) -> None:
        if not is_count(skip_batches, 0):
            raise OptionError(
                f'skip_batches={skip_batches!r}: give a number of batches, 0 or more.'
            )
        self.skip_batches = skip_batches
        self.interval = as_time(interval, 'ba')
        self.folder = check_folder_name(folder)
        self.max_entries = check_count('max_entries', max_entries)
        self.files = []
        self._is_done = False
        self._since: Any = None  # time when recording began; None: not recording
        # number of batches before recording; inf: no recording in this fit, None: no fit has begun
        self._to_skip: float | None = None

    def before_fit(self) -> None:
        "Check the device and the folder."
        self._to_skip = inf
        if self._is_done:
            return
        device = model_device(self.learn.model, self.learn.dls)
        if device.type != 'cuda':
            print_line(
                self,
                f'MemorySnapshot records the memory of CUDA devices; on {device} there is nothing to record.',
            )
            return
        if self.learn.world.is_first:
            check_folder(self.learn.path / self.folder)
        self._to_skip = self.skip_batches

    def before_batch(self) -> None:
        "Begin the recording when due."
        if self._to_skip is None:
            self.before_fit()  # the callback was added during the fit
        if self._to_skip or self._since is not None or self._is_done:
            return
        torch.cuda.memory._record_memory_history(
            max_entries=self.max_entries, stacks='python', clear_history=True
        )
        self._since = self.learn.time

    def after_batch(self) -> None:
        "Count batches, and end the recording when due."
        if self._since is not None:
            if self.learn.time - self._since >= self.interval:
                self._end()
        elif self._to_skip:
            self._to_skip -= 1

    def cleanup(self) -> None:
        "End the recording with the fit."
        self._to_skip = None
        if self._since is not None:
            self._end()

    def _end(self) -> None:
        "Write the record."
        self._since = None
        self._is_done = True
        try:
            snapshot = torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        stem = self.learn.path / self.folder / f'memory-batch-{self.learn.time.ba}'
        self.files = write_snapshot(snapshot, stem)

    def state_dict(self) -> dict[str, Any]:
        "Return whether the recording is done."
        return {'is_done': self._is_done}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore whether the recording is done."
        self._is_done = sd['is_done']


def write_snapshot(
    snapshot: Any,  # result of `torch.cuda.memory._snapshot`
    stem: Path,  # path of the files without suffix
) -> list[Path]:
    "Write a memory snapshot as JSON (`.json`) and as a plot (`.html`); return the paths."
    from torch.cuda._memory_viz import trace_plot  # the import takes one second

    contents = {'.json': json.dumps(snapshot, default=str), '.html': trace_plot(snapshot)}
    files = [unused_path(stem.with_name(f'{stem.name}{suffix}')) for suffix in contents]
    for path, text in zip(files, contents.values(), strict=True):
        with atomic_write(path) as tmp:
            tmp.write_text(text, 'utf-8')
    return files
