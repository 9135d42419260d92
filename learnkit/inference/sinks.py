"""Where predictions are written as they come, by one process or several: a folder, a .npy file, an array."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from shutil import rmtree
from typing import Any, BinaryIO

import numpy as np
import torch
from fastcore.basics import noop
from numpy.lib.format import open_memmap
from torch import Tensor

from learnkit.core.batch import describe
from learnkit.core.comm import ALONE, Comm
from learnkit.core.errors import BatchError, OptionError

__all__ = ['check_sink', 'opened_sink', 'save_plain', 'read_rows']


def check_sink(sink: Any, names: tuple[str, ...], world: Comm = ALONE) -> None:
    "Raise `OptionError` for a sink that cannot take these entries; in every process, where one has found it."
    world.run_on_all(partial(_check, sink, names, world))


def _check(sink: Any, names: tuple[str, ...], world: Comm) -> None:
    if callable(sink):
        return
    if _is_path(sink):
        _check_free(
            Path(sink) if _is_folder(sink) else _own_file(Path(sink), world), _is_folder(sink)
        )
        if not _is_folder(sink) and world.size > 1:
            _check_free(_index_of(Path(sink)), False)
    if _is_folder(sink):
        return
    if isinstance(sink, np.ndarray) and world.size > 1:
        raise OptionError(
            'An array takes the predictions of one process, and here are several: give the path of a '
            '.npy file, and read it with `read_rows`.'
        )
    if not isinstance(sink, np.ndarray) and not _is_path(sink):
        raise OptionError(
            f'sink={describe(sink)}: give a folder, the path of a .npy file, a numpy array or memory '
            'map, or a function that is called with the entries of each batch.'
        )
    if others := [name for name in names if name not in ('preds', 'targs')]:
        raise OptionError(
            f'An array holds predictions alone, not {", ".join(others)}: give a folder as the sink.'
        )


def _check_free(path: Path, is_folder: bool) -> None:
    "Raise `OptionError` where something is in the way: nothing but what a run cut short has left is written over."
    free = is_folder and path.is_dir() and not any(path.iterdir())
    if path.exists() and not free:
        raise OptionError(
            f'sink={str(path)!r} is there already{" and not an empty folder" * is_folder}: it would be '
            'overwritten. Remove it, or give another name.'
        )
    part = _part_of(path)
    if not part.exists():
        return
    if is_folder:
        ours = part.is_dir() and all(_OWN_FILE.fullmatch(name) for name in os.listdir(part))
    else:
        ours = part.is_file() and _starts_as_npy(part)
    if not ours:
        raise OptionError(
            f'sink={str(path)!r} is called {part.name!r} until it is complete, and that is there '
            'already, with what no prediction has written. Move it away, or give another name.'
        )


def _starts_as_npy(path: Path) -> bool:
    with open(path, 'rb') as file:
        return file.read(6) in (b'', b'\x93NUMPY')


# a batch, and a batch on its way to the disk
_OWN_FILE = re.compile(r'\d{6,}\.pt|\.\d{6,}\.pt\.tmp')


def _part_of(path: Path) -> Path:
    return path.with_name(f'{path.name}.part')


def _is_path(sink: Any) -> bool:
    return isinstance(sink, (str, Path))


def _is_folder(sink: Any) -> bool:
    return _is_path(sink) and Path(sink).suffix != '.npy'


@contextmanager
def opened_sink(
    sink: Any,
    names: tuple[str, ...],  # of a batch's entries
    world: Comm = ALONE,  # the processes that share the loader
    number: Callable[[], int] | None = None,  # the batch's number, if processes share the loader
) -> Iterator[Callable[..., Any]]:
    """Open a sink and yield the function that takes the entries of a batch.

    A folder gets a file a batch and a `.npy` file rows; both are called `<name>.part` until they are complete, and are
    usable by then too. Several processes write into one folder, their files numbered in the order of the data; of a
    `.npy` file each writes one of its own, and `read_rows` joins them.
    """
    if world.size == 1 or number is None:
        number = partial(next, count())  # without a gap where one was cancelled
    if callable(sink):
        yield sink
    elif isinstance(sink, np.ndarray):
        yield partial(_only_preds, names, _Rows(sink).add)
    elif _is_folder(sink):
        with _folder(Path(sink), world) as part:
            yield lambda *entries: save_plain(
                dict(zip(names, entries, strict=True)),
                part / f'{number() * world.size + world.rank:06}.pt',
            )
    else:
        path, index = _own_file(Path(sink), world), []
        part = _part_of(path)
        # a disk that fails is found before anyone predicts
        world.run_on_all(partial(_make_empty, part))
        with open(part, 'wb') as file:
            rows = _NpyFile(file)

            def add(array: np.ndarray) -> None:
                before = rows.n
                rows.add(array)
                index.append((number(), world.rank, rows.n - before))

            yield partial(_only_preds, names, add)
        told = world.gather(index)  # all have written
        world.run_on_all(partial(os.replace, part, path))
        if world.size > 1:
            world.run_on_all(partial(_write_index, Path(sink), world, told))


def _make_empty(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b'')


@contextmanager
def _folder(path: Path, world: Comm) -> Iterator[Path]:
    "Yield the folder until it is complete: one for all processes, where they share the disk."
    part = _part_of(path)

    def make() -> None:
        if part.is_dir():
            rmtree(part)  # what an earlier run, cut short, has left
        part.mkdir(parents=True)

    def finish() -> None:
        if not part.is_dir():
            return  # the first process has done it, on the disk that is shared
        if path.exists():
            path.rmdir()  # empty, as was checked
        os.replace(part, path)

    world.run_on_all(make if world.is_first else noop)
    world.run_on_all(partial(part.mkdir, parents=True, exist_ok=True))
    yield part
    world.barrier()  # all have written
    world.run_on_all(finish if world.is_first else noop)
    world.run_on_all(finish if world.local_rank == 0 else noop)


def _own_file(path: Path, world: Comm) -> Path:
    return path if world.size == 1 else path.with_name(f'{path.stem}.rank{world.rank}.npy')


def _index_of(path: Path) -> Path:
    return path.with_name(f'{path.stem}.index.json')


def _write_index(path: Path, world: Comm, told: list[list[tuple[int, int, int]]]) -> None:
    "Write which rows come from which file, in the order of the data."
    if not world.is_first:
        return
    files = [f'{path.stem}.rank{rank}.npy' for rank in range(world.size)]
    rows = [[rank, n] for _, rank, n in sorted(chain(*told))]
    _index_of(path).write_text(json.dumps({'files': files, 'rows': rows}), 'utf-8')


def read_rows(
    path: str | Path,  # what was given as `sink`, with `.npy` at its end
) -> np.ndarray:
    """Return predictions that were written to a `.npy` file, in the order of the data.

    Of several processes there is a file each (`preds.rank0.npy`) and an index (`preds.index.json`): their rows are put
    in order in memory. One process's file is mapped and not read.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     np.save(f'{folder}/preds.npy', [[1.], [2.]])
    ...     read_rows(f'{folder}/preds.npy').tolist()
    [[1.0], [2.0]]
    """
    path = Path(path)
    if path.exists():
        return open_memmap(path, mode='r')
    index = json.loads(_index_of(path).read_text('utf-8'))
    arrays = {
        rank: open_memmap(path.with_name(index['files'][rank]), mode='r')
        for rank, _ in index['rows']
    }
    starts, pieces = dict.fromkeys(arrays, 0), []
    for rank, n in index['rows']:
        pieces.append(arrays[rank][starts[rank] : starts[rank] + n])
        starts[rank] += n
    return np.concatenate(pieces)


def _only_preds(names: tuple[str, ...], add: Callable[[Any], None], *entries: Any) -> None:
    preds = entries[names.index('preds')]
    if not isinstance(preds, Tensor):
        raise OptionError(
            f'An array cannot hold predictions like {describe(preds)}: give a folder as the sink.'
        )
    preds = preds.detach().cpu()
    add((preds.float() if preds.dtype == torch.bfloat16 else preds).numpy())


def save_plain(
    o: Any,  # any nesting of tensors, numbers and strings
    path: Path,  # the file is there only when it is complete
) -> None:
    "Save as plain containers and tensors of their own, so that `torch.load` reads it with `weights_only=True`."
    temporary = path.with_name(f'.{path.name}.tmp')
    torch.save(_plain(o), temporary)
    os.replace(temporary, path)


def _plain(o: Any) -> Any:
    if isinstance(o, Tensor):
        return o.detach().as_subclass(Tensor).clone()  # a view would drag its storage along
    if isinstance(o, np.ndarray):
        return torch.as_tensor(o)
    if isinstance(o, Mapping):
        return {k: _plain(v) for k, v in o.items()}
    if isinstance(o, (tuple, list)):
        return (list if isinstance(o, list) else tuple)(map(_plain, o))
    if is_dataclass(o):
        return {f.name: _plain(getattr(o, f.name)) for f in fields(o)}
    if o is None or isinstance(o, (bool, int, float, complex, str)):
        return o
    raise BatchError(
        f'A {type(o).__name__} cannot be saved in a file that is safe to load: give tensors, numbers and '
        'strings in dicts, tuples and lists.'
    )


class _Rows:
    "An array that is filled row by row."

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.n = array, 0

    def add(self, rows: np.ndarray) -> None:
        "Write the rows of a batch behind those that are there."
        end, room = self.n + len(rows), len(self.array)
        if end > room or rows.shape[1:] != self.array.shape[1:]:
            raise OptionError(
                f'The sink is an array {list(self.array.shape)}, which has no room for rows {self.n} to '
                f'{end} of shape {list(rows.shape[1:])}.'
            )
        self.array[self.n : end], self.n = rows, end


class _NpyFile:
    "A .npy file that grows: after each batch its header tells the rows so far, so that it can be read at any time."

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.n = file, 0

    def add(self, rows: np.ndarray) -> None:
        "Append the rows of a batch; all batches have rows of one shape and type."
        rows = np.ascontiguousarray(rows if rows.ndim else rows[None])
        if not self.n:
            self.dtype, self.shape = rows.dtype, rows.shape[1:]
            self.file.write(self._header())
        if (rows.dtype, rows.shape[1:]) != (self.dtype, self.shape):
            raise OptionError(
                f'A .npy file holds rows of one shape and type: {list(self.shape)} {self.dtype} first, '
                f'then {list(rows.shape[1:])} {rows.dtype}. Give a folder as the sink.'
            )
        self.file.write(rows.data)
        self.n += len(rows)
        self.file.seek(0)
        self.file.write(self._header())
        self.file.seek(0, os.SEEK_END)
        self.file.flush()

    def _header(self) -> bytes:
        "Return a header (numpy's format 1.0) as long for any number of rows."

        def told(n: int) -> str:
            return repr(
                {
                    'descr': np.lib.format.dtype_to_descr(self.dtype),
                    'fortran_order': False,
                    'shape': (n, *self.shape),
                }
            )

        size = (10 + len(told(sys.maxsize)) + 1 + 63) // 64 * 64  # data are aligned to 64 bytes
        start = b'\x93NUMPY\x01\x00' + (size - 10).to_bytes(2, 'little')
        return start + told(self.n).ljust(size - 11).encode() + b'\n'
