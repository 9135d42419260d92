# SPDX-License-Identifier: Apache-2.0
"""Sinks of `get_preds`: write the predictions of each batch to a folder or a .npy file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from fastcore.basics import noop
from torch import Tensor

from learnkit.comm.ranks import Comm
from learnkit.core.batch import describe
from learnkit.core.errors import BatchError, OptionError
from learnkit.core.files import as_local_path
from learnkit.core.plain import ATOMS, as_atom, map_plain


def check_sink(sink: Any, names: tuple[str, ...], world: Comm) -> None:
    "Raise `OptionError`, on every rank, for a sink that cannot store the entries of these names."
    world.run_on_all(partial(_check_on_rank, sink, names, world))


def _check_on_rank(sink: Any, names: tuple[str, ...], world: Comm) -> None:
    if callable(sink):
        return
    if not isinstance(sink, (str, Path)):
        raise OptionError(
            f'sink={describe(sink)}: pass a folder, the path of a .npy file, or a function that is called with the '
            'entries of each batch.'
        )
    path = as_local_path(sink)  # raises for a URL
    others = [name for name in names if name not in ('preds', 'targs')]
    if _is_npy(path) and (others or world.size > 1):
        raise OptionError(
            'A .npy file takes the predictions of one process, and nothing else: pass a folder as the sink.'
        )
    for existing in (path, _part_path(path)):
        if existing.is_file() or (existing.is_dir() and any(existing.iterdir())):
            raise OptionError(
                f'{str(existing)!r} is there already, and not an empty folder: it would be overwritten. Remove it, or '
                'pass another name.'
            )


def _is_npy(path: Path) -> bool:
    return path.suffix == '.npy'


def _part_path(path: Path) -> Path:
    return path.with_name(f'{path.name}.part')


@contextmanager
def open_sink(
    sink: Any,
    names: tuple[str, ...],  # names of a batch's entries
    world: Comm,  # ranks that share the loader
    number: Callable[[], int],  # f() -> number of the batch, used if several ranks share the loader
) -> Iterator[Callable[..., Any]]:
    """Open a sink and yield the function that writes the entries of a batch.

    A folder receives one file per batch; a `.npy` file receives the rows of the predictions. Both are named
    `<name>.part` until they are complete, and are readable at any time. Several ranks write into one folder, with files
    numbered in the order of the data.
    """
    if world.size == 1:
        number = partial(next, count())  # cancelled batches leave no gap
    if callable(sink):
        yield sink
    elif _is_npy(Path(sink)):
        with _open_npy(Path(sink)) as add:
            yield partial(_add_preds, names, add)
    else:
        with _open_folder(Path(sink), world) as part:

            def write(*entries: Any) -> None:
                file = part / f'{number() * world.data_size + world.data_rank:06}.pt'
                save_plain(dict(zip(names, entries, strict=True)), file)

            yield noop if world.has_copied_data else write


@contextmanager
def _open_npy(path: Path) -> Iterator[Callable[[np.ndarray], None]]:
    "Yield a function that appends rows to the `.part` file, and rename the file at the end."
    part = _part_path(path)
    part.parent.mkdir(parents=True, exist_ok=True)
    with open(part, 'wb') as file:
        yield _NpyFile(file).add
    os.replace(part, path)


@contextmanager
def _open_folder(path: Path, world: Comm) -> Iterator[Path]:
    "Yield the `.part` folder, which all ranks share, and rename it at the end."
    part = _part_path(path)

    def finish() -> None:
        if path.exists():
            path.rmdir()  # `check_sink` has checked that the folder is empty
        os.replace(part, path)

    world.run_on_all(partial(part.mkdir, parents=True, exist_ok=True))
    yield part
    world.barrier()  # wait until all ranks have written
    world.run_on_all(finish if world.is_first else noop)


def _add_preds(names: tuple[str, ...], add: Callable[[Any], None], *entries: Any) -> None:
    "Add the predictions of a batch's entries to a .npy file."
    preds = entries[names.index('preds')]
    if not isinstance(preds, Tensor):
        raise OptionError(
            f'A .npy file cannot hold predictions like {describe(preds)}: pass a folder as the sink.'
        )
    preds = preds.detach().cpu()
    if preds.dtype == torch.bfloat16:  # numpy does not have bfloat16
        preds = preds.float()
    add(preds.numpy())


def save_plain(
    o: Any,  # any nesting of tensors, numbers and strings
    path: Path,  # path of the file, which is written atomically
) -> None:
    "Save an object as plain containers and compact tensors, which `torch.load` reads with `weights_only=True`."
    temporary = path.with_name(f'.{path.name}.tmp')
    torch.save(map_plain(o, _to_plain), temporary)
    os.replace(temporary, path)


def _to_plain(o: Any, where: str = '') -> Any:
    "Convert arrays to tensors and dataclasses to dicts; raise `BatchError` for types that are not safe to load."
    if isinstance(o, np.generic):
        o = o.item()
    if isinstance(o, Tensor):
        # the clone frees a view from its storage, which `torch.save` would write as a whole
        return o.detach().as_subclass(Tensor).clone()
    if isinstance(o, np.ndarray) and o.dtype.kind in 'biufc':
        return torch.tensor(o)
    if is_dataclass(o):
        return map_plain({f.name: getattr(o, f.name) for f in fields(o)}, _to_plain)
    if isinstance(o, ATOMS):
        return as_atom(o)
    raise BatchError(
        f'A {type(o).__name__} cannot be saved in a file that is safe to load: pass tensors, numbers and '
        'strings in dicts, tuples and lists.'
    )


class _NpyFile:
    "Growing .npy file: the header is updated after each batch, so the file is readable at any time."

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.n = 0

    def add(self, rows: np.ndarray) -> None:
        "Append the rows of a batch; raise `OptionError` if their shape or type differs from the first batch."
        rows = np.ascontiguousarray(rows if rows.ndim else rows[None])
        if not self.file.tell():
            self.dtype = rows.dtype
            self.shape = rows.shape[1:]
            self._write_header()
        if (rows.dtype, rows.shape[1:]) != (self.dtype, self.shape):
            raise OptionError(
                f'A .npy file holds rows of one shape and type: {list(self.shape)} {self.dtype} first, '
                f'then {list(rows.shape[1:])} {rows.dtype}. Pass a folder as the sink.'
            )
        self.file.write(rows.data)
        self.n += len(rows)
        self.file.seek(0)
        self._write_header()
        self.file.seek(0, os.SEEK_END)
        self.file.flush()

    def _write_header(self) -> None:
        "Write a header; numpy pads the number of rows, so the length of the header does not change."
        np.lib.format.write_array_header_1_0(
            self.file,
            {
                'descr': np.lib.format.dtype_to_descr(self.dtype),
                'fortran_order': False,
                'shape': (self.n, *self.shape),
            },
        )
