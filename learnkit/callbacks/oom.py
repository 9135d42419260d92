"""Where the memory went: a report when it ran out, and a recording of what was allocated over a few batches."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from learnkit.callbacks.nan_guard import print_line
from learnkit.core.batch import describe
from learnkit.core.errors import OptionError
from learnkit.core.files import atomic_write, check_writable
from learnkit.core.model import model_device
from learnkit.core.time import Time, as_time
from learnkit.engine.callback import Callback
from learnkit.engine.microbatch import is_out_of_memory

__all__ = ['MemorySnapshot', 'OOMObserver', 'biggest_tensors', 'write_snapshot']


class OOMObserver(Callback):
    """Write a report when memory runs out, on a GPU or on the CPU: `<folder>/oom-batch-<n>.txt`.

    It says where it happened, the batch's shapes, torch's memory summary of each GPU that is in use, and the biggest
    tensors that are alive, by the names they have in the model and the optimizer. `report` is its path. The error goes
    on unchanged. Tensors are found by the garbage collector: those that only autograd keeps for the backward pass have
    no Python object, and are the difference to what the summary says is allocated.

    Until then it costs nothing. Raises `OptionError` before training when the folder cannot be written.

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

    order, remove_on_find = 100, False
    report: Path | None

    def __init__(
        self,
        folder: str | Path = 'oom',  # below `learn.path`, or an absolute path
        n_tensors: int = 30,  # how many of the biggest tensors are listed
    ) -> None:
        self.folder, self.n_tensors, self.report = (
            _folder(folder),
            _positive('n_tensors', n_tensors),
            None,
        )

    def before_fit(self) -> None:
        "See that the report can be written."
        if self.learn.fitting and self.learn.world.is_first:
            _check_folder(self.learn.path / self.folder)

    def after_error(self) -> None:
        "Write the report, if memory is what is missing."
        learn = self.learn
        if not isinstance(learn.error, RuntimeError) or not is_out_of_memory(learn.error):
            return
        path = _free(learn.path / self.folder / f'oom-batch-{learn.time.ba}.txt')
        with atomic_write(path) as tmp:
            tmp.write_text('\n'.join(self._lines()), 'utf-8')
        self.report = path

    def _lines(self) -> Iterator[str]:
        learn = self.learn
        device = model_device(learn.model, learn.dls)
        phase = {'train': 'training', 'valid': 'evaluation', 'predict': 'prediction'}.get(
            learn.phase, learn.phase
        )
        yield (
            f'Out of memory: batch {learn.iter} of epoch {learn.epoch}, in {phase}, {type(learn.model).__name__} on '
            f'{device}'
        )
        yield f'{datetime.now():%Y-%m-%d %H:%M:%S}  {type(learn.error).__name__}: {learn.error}'
        yield from (f'  {note}' for note in getattr(learn.error, '__notes__', ()))
        yield f'\nInputs:  {describe(learn.xb)}\nTargets: {describe(learn.yb)}'
        if learn.microbatch:
            yield f'Microbatches of {learn.microbatch}'
        yield f'\nThe biggest of the tensors that are alive:\n{_rows(learn, self.n_tensors)}'
        if torch.cuda.is_initialized():
            for i in range(torch.cuda.device_count()):
                if torch.cuda.memory_reserved(i):
                    yield f'\nGPU {i}:\n{torch.cuda.memory_summary(i)}'
        yield ''


def biggest_tensors(
    n: int = 30,  # how many
) -> list[tuple[int, list[Tensor]]]:
    """Return the biggest pieces of memory that tensors hold: (bytes, the tensors in it), the biggest first.

    Tensors that share memory, as views do, are one piece.

    >>> x = torch.zeros(1000, 1000)
    >>> size, tensors = next((s, ts) for s, ts in biggest_tensors(1000) if any(t is x for t in ts))
    >>> size
    4000000
    """
    pieces: dict[tuple[str, int], tuple[int, list[Tensor]]] = {}
    for o in gc.get_objects():
        if not issubclass(type(o), Tensor):
            continue  # not isinstance: a proxy would be asked, and might do things
        # gradients are not all known to gc
        tensors = [o] if o.grad_fn is not None or o.grad is None else [o, o.grad]
        for t in tensors:
            if (place := _place(t)) is not None:
                pieces.setdefault(place[:2], (place[2], []))[1].append(t)
    unique = [(size, list({id(t): t for t in ts}.values())) for size, ts in pieces.values()]
    return sorted(unique, key=lambda piece: -piece[0])[:n]


def _place(t: Tensor) -> tuple[str, int, int] | None:
    "Return the device, address and size of a tensor's memory; None for one without any of its own."
    try:
        storage = t.untyped_storage()
        if storage.device.type == 'meta' or not storage.nbytes():
            return None  # a compiler's fake tensors among them
        return str(t.device), storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError, ValueError):
        return None  # sparse, lazy


def _rows(learn: Any, n: int) -> str:
    names = dict(_names(learn))
    rows = [('MiB', 'Device', 'Type', 'Shape', 'What')]
    for size, ts in biggest_tensors(n):
        t = max(ts, key=Tensor.numel)
        known = [names[id(o)] for o in ts if id(o) in names]
        what = ', '.join(known) if known else 'part of a graph' if t.grad_fn is not None else ''
        rows.append(
            (
                f'{size / 2**20:,.2f}',
                str(t.device),
                str(t.dtype).removeprefix('torch.'),
                ' x '.join(map(str, t.shape)) or 'scalar',
                what,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return '\n'.join(
        '  '.join(
            c.rjust(w) if not i else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _names(learn: Any) -> Iterator[tuple[int, str]]:
    "Yield the ids of the tensors that have a name in the model, the optimizer or the batch."
    names = {p: name for name, p in learn.model.named_parameters()}
    for p, name in names.items():
        yield id(p), f'parameter {name}'
        if p.grad is not None:
            yield id(p.grad), f'gradient of {name}'
    for name, b in learn.model.named_buffers():
        yield id(b), f'buffer {name}'
    for opt in learn.opt.optimizers.values() if learn.opt is not None else ():
        for p, state in opt.state.items():
            owner = names.get(p, 'a parameter') if isinstance(p, nn.Parameter) else 'a parameter'
            yield from (
                (id(v), f'{k} of {owner}') for k, v in state.items() if isinstance(v, Tensor)
            )
    for kind, part in (('input', learn.xb), ('target', learn.yb)):
        yield from ((id(t), f'{kind} {i}') for i, t in enumerate(part) if isinstance(t, Tensor))


# ---------------------------------------------------------------------------------------- recording


class MemorySnapshot(Callback):
    """Record what is allocated and freed on the GPU over a few batches, each with the lines of code that did it.

    After `skip_batches` batches of the fit it records for `interval` and writes two files to `folder`:
    `memory-batch-<n>.html`, a picture over time that opens in a browser (which fetches torch's viewer from the net),
    and `.json`, the same in plain text. `files` has their paths. It records once in the life of the Learner; an error,
    out of memory above all, ends the recording, and what was recorded is written.

    On another device there is nothing to record: it says so and does nothing. Raises `OptionError` and `TimeError` for
    bad options. Checkpointed: whether it has recorded.

    >>> MemorySnapshot(interval='3ba').interval
    Time('3ba')
    """

    order, run_valid, remove_on_find = -5, False, True
    interval: Time
    files: list[Path]

    def __init__(
        self,
        skip_batches: int = 1,  # batches of the fit before it begins: the first ones differ
        interval: int | str | Time = '3ba',  # how long it records; a plain number counts batches
        folder: str | Path = 'memory',  # below `learn.path`, or an absolute path
        max_entries: int = 100_000,  # the most events that are kept: the last ones
    ) -> None:
        if not isinstance(skip_batches, int) or skip_batches < 0:
            raise OptionError(
                f'skip_batches={skip_batches!r}: give a number of batches, 0 or more.'
            )
        self.skip_batches, self.interval = skip_batches, as_time(interval, 'ba')
        self.folder, self.max_entries = _folder(folder), _positive('max_entries', max_entries)
        self.files, self._is_done = [], False
        self._since: Any = None  # when recording began; None: it does not record
        self._to_skip = (
            0  # batches still to come before it begins; -1: nothing to record in this fit
        )

    def before_fit(self) -> None:
        "See that there is something to record, and that it can be written."
        if not self.learn.fitting:
            return
        device = getattr(self.learn.dls, 'device', None) or model_device(
            self.learn.model, self.learn.dls
        )
        self._to_skip = -1
        if self._is_done:
            return
        if torch.device(device).type != 'cuda':
            print_line(
                self,
                f'MemorySnapshot records the memory of CUDA devices; on {device} there is nothing to record.',
            )
            return
        if self.learn.world.is_first:
            _check_folder(self.learn.path / self.folder)  # it comes and goes
        self._to_skip = self.skip_batches

    def before_batch(self) -> None:
        "Begin, once it is time."
        if self._to_skip or self._since is not None:
            return
        torch.cuda.memory._record_memory_history(
            max_entries=self.max_entries, stacks='python', clear_history=True
        )
        self._since = self.learn.time

    def after_batch(self) -> None:
        "Count batches, and end, once it is time."
        if self._since is None:
            self._to_skip -= self._to_skip > 0
        elif self.learn.time - self._since >= self.interval:
            self._end()

    def cleanup(self) -> None:
        "End with the fit."
        if self._since is not None:
            self._end()

    def _end(self) -> None:
        "Write what was recorded."
        self._since, self._to_skip, self._is_done = None, -1, True
        try:
            snapshot = torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        self.files = write_snapshot(
            snapshot, self.learn.path / self.folder / f'memory-batch-{self.learn.time.ba}'
        )

    def state_dict(self) -> dict[str, Any]:
        "Return whether it has recorded."
        return {'is_done': self._is_done}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Do not record again."
        self._is_done = sd['is_done']


def write_snapshot(
    snapshot: Any,  # of `torch.cuda.memory._snapshot`
    stem: Path,  # of the files, without a suffix
) -> list[Path]:
    "Write a memory snapshot as text (`.json`) and as a page that draws it (`.html`), and return the files."
    from torch.cuda._memory_viz import trace_plot  # one second

    files = [_free(stem.with_name(f'{stem.name}{suffix}')) for suffix in ('.json', '.html')]
    for path, text in zip(
        files, (json.dumps(snapshot, default=str), trace_plot(snapshot)), strict=True
    ):
        with atomic_write(path) as tmp:
            tmp.write_text(text, 'utf-8')
    return files


def _positive(option: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise OptionError(f'{option}={value!r}: give a whole number, 1 or more.')


def _folder(folder: Any) -> Path:
    if isinstance(folder, (str, Path)) and str(folder).strip():
        return Path(folder)
    raise OptionError(f'folder={folder!r}: give a folder.')


def _check_folder(folder: Path) -> None:
    "Raise `OptionError` if no file can be written in a folder; one that was not there is taken away again."
    missing = not folder.exists()
    try:
        check_writable(folder / 'report')
    except OSError as e:
        raise OptionError(f'{folder} cannot be written: {e}.') from None
    if missing:
        folder.rmdir()


def _free(path: Path) -> Path:
    "Return the path, or one with a number behind its name where there is a file."
    numbered = (path.with_name(f'{path.stem}-{i}{path.suffix}') for i in count(2))
    return path if not path.exists() else next(p for p in numbered if not p.exists())
