"""The parts of a checkpoint that processes write each for itself: a folder of torch.distributed.checkpoint's.

    00012-ep3-ba1200.ckpt   the sealed file, written last: with it the checkpoint is whole
    00012-ep3-ba1200.dcp/   the tensors that are cut over processes, one file a process, and torch's `.metadata`

The sealed file has size and SHA-256 of every file of the folder, and where in them each tensor lies. That is what is
read: `.metadata`, a pickle, is there for torch's own tools, and never opened here."""
from __future__ import annotations

import hashlib
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from learnkit.comm import Comm
from learnkit.dtensors import hosted_empty, is_part
from learnkit.errors import CheckpointError, DamagedError
from learnkit.files import flush_folder

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ['folder_of', 'take_parts', 'put', 'with_parts', 'check_parts', 'remove_parts', 'sweep_parts', 'Writers']

_FILE = re.compile(r'__\d{1,7}_\d{1,7}\.distcp', re.ASCII)
_METADATA = '.metadata'
MOST_CUT = 4   # dimensions along which a tensor may be cut

Parts = dict[str, Tensor]     # DTensors, on the host when they are written


def folder_of(path: Path) -> Path:
    "Return the folder that belongs to a checkpoint's file."
    return path.with_suffix('.dcp')


# What is cut

def take_parts(state: Any) -> tuple[Any, list[list[Any]], Parts]:
    """Return a nested state with None in the places of tensors that are cut, these places, and the tensors.

    >>> take_parts({'a': [torch.ones(1), 2]})
    ({'a': [tensor([1.]), 2]}, [], {})
    """
    places: list[list[Any]] = []
    parts: Parts = {}

    def take(value: Any, place: tuple[Any, ...]) -> Any:
        if is_part(value):
            places.append(list(place))
            parts[name_of_place(places[-1], len(parts))] = value
            return None
        if isinstance(value, Mapping): return {k: take(v, (*place, k)) for k, v in value.items()}
        if isinstance(value, (list, tuple)): return type(value)(take(v, (*place, i)) for i, v in enumerate(value))
        return value
    return take(state, ()), places, parts


def name_of_place(place: list[Any], i: int) -> str:
    "Return the name of a tensor in the folder: its place, for people, and its number."
    return f'{i}.{".".join(map(str, place))}'


def put(state: Any, place: list[Any], value: Any) -> Any:
    "Return a nested state with a value at a place; dicts and lists are changed."
    if not place: return value
    k, rest = place[0], place[1:]
    if isinstance(state, tuple): return (*state[:k], put(state[k], rest, value), *state[k + 1:])
    state[k] = put(state[k], rest, value)
    return state


# Writing

class Writers:
    "All processes as those who write checkpoints, each on a thread of its own, with a group of their own for it."

    def __init__(self, world: Comm) -> None:
        import torch.distributed as dist
        group = dist.new_group(backend='gloo', timeout=timedelta(seconds=world.timeout_s))
        self.world = Comm(world.rank, world.size, world.local_rank, world.timeout_s, group)

    def write(
        self,
        parts: Parts,
        folder: Path,   # what is in it goes
    ) -> dict[str, Any]:
        """Write each process's parts, and return what the sealed file is to have of them.

        All processes call it. What fails in one is raised in all: `CheckpointError`, or there the `OSError` itself."""
        self.world.run_on_all(lambda: self._make(folder))
        try: metadata = self.world.run_on_all(lambda: self._save(parts, folder))
        except BaseException:
            if self.world.is_first: shutil.rmtree(folder, ignore_errors=True)
            raise
        names = sorted({info.relative_path for info in metadata.storage_data.values()})
        own = [name for name in names if name.startswith(f'__{self.world.rank}_')]
        if self.world.is_first: own.append(_METADATA)
        described = self.world.run_on_all(lambda: {name: describe(folder/name) for name in own})
        files = {name: entry for table in self.world.gather(described) for name, entry in table.items()}
        self.world.run_on_all(lambda: self._look(folder, files))
        return {'files': files, 'tensors': tables(metadata, sorted(files))}

    def _make(self, folder: Path) -> None:
        if not self.world.is_first: return
        shutil.rmtree(folder, ignore_errors=True)  # of a write that broke off
        folder.mkdir(parents=True)

    def _save(self, parts: Parts, folder: Path) -> Metadata:
        import torch.distributed.checkpoint as dcp
        try: return dcp.save(parts, storage_writer=dcp.FileSystemWriter(folder), process_group=self.world.control)
        except dcp.api.CheckpointException as e:  # no Exception, by its class
            rank, (error, _) = min(e.failures.items())
            if rank == self.world.rank and isinstance(error, OSError): raise error from None
            raise CheckpointError(f'{folder}: process {rank} of {self.world.size} cannot write its part: '
                                  f'{type(error).__name__}: {error}') from None

    def _look(self, folder: Path, files: Mapping[str, Any]) -> None:
        "Let the first process see the files of all."
        if not self.world.is_first: return
        flush_folder(folder)
        if missing := [name for name, (size, _) in files.items() if not has_size(folder/name, size)]:
            raise CheckpointError(f'{folder} has not got {", ".join(missing[:5])}, which other processes have written: '
                                  'checkpoints of several machines need a folder that all of them share.')

    def close(self) -> None:
        import torch.distributed as dist
        if dist.is_initialized(): dist.destroy_process_group(self.world.control)


def describe(path: Path) -> list[Any]:
    "Return size and digest of a file."
    with path.open('rb') as f: return [path.stat().st_size, hashlib.file_digest(f, 'sha256').hexdigest()]


def has_size(path: Path, size: int) -> bool:
    "Tell whether a file is there, and as long as it should be."
    try: return path.stat().st_size == size
    except OSError: return False


def tables(metadata: Metadata, names: list[str]) -> list[dict[str, Any]]:
    "Return, for each tensor, its type and size, and a row for each piece of it: where in it, how large, and where."
    pieces: dict[str, list[list[int]]] = {}
    sizes = {(name, tuple(c.offsets)): c.sizes for name, t in metadata.state_dict_metadata.items()
             for c in t.chunks}  # type: ignore[union-attr]  # they are all tensors
    for index, info in metadata.storage_data.items():
        pieces.setdefault(index.fqn, []).append([*index.offset, *sizes[index.fqn, tuple(index.offset)],
                                                 names.index(info.relative_path), info.offset, info.length])
    return [{'name': name, 'dtype': str(t.properties.dtype).removeprefix('torch.'), 'size': list(t.size),  # type: ignore[union-attr]  # as above
             'pieces': torch.tensor(sorted(pieces[name]), dtype=torch.int64)}
            for name, t in metadata.state_dict_metadata.items()]


# Looking

def check_parts(
    path: Path,                 # the sealed file
    parts: Mapping[str, Any],   # its entry of that name
    digests: bool = True,       # compare digests, not sizes alone
) -> None:
    "Raise `DamagedError` where a file of the folder is missing, or not as it was written."
    folder, files = folder_of(path), parts['files']
    for name, (size, digest) in files.items():
        if not (_FILE.fullmatch(name) or name == _METADATA): raise _damaged(path, f'names a file {ascii(name)[:80]}')
        if not has_size(folder/name, size):
            raise _damaged(path, f'belongs to {folder.name}/{name}, which is missing or was cut short')
        if digests and describe(folder/name)[1] != digest:
            raise _damaged(path, f'belongs to {folder.name}/{name}, whose digest differs: bytes have changed')


def _damaged(path: Path, what: str) -> DamagedError: return DamagedError(f'{path} {what}. Nothing was loaded.')


# Reading

def with_parts(
    state: Mapping[str, Any],         # of a sealed file
    path: Path,                       # that file
    mesh: DeviceMesh | None = None,   # of hosts: read this process's part of each tensor; None: read them whole
) -> Mapping[str, Any]:
    """Return a checkpoint's state with the tensors that lie beside its file.

    They may have been written by any number of processes. Nothing is agreed on with others: each reads what it needs.
    Raises `DamagedError` for what cannot be read."""
    described = state['parts']
    rest = {k: v for k, v in state.items() if k != 'parts'}
    try:
        targets = {entry['name']: target_of(entry, mesh) for entry in checked_tables(described, folder_of(path))}
        read(targets, path, described)
        for i, place in enumerate(described['places']): rest = put(rest, place, targets[name_of_place(place, i)])
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as e:
        raise _damaged(path, f'has parts that cannot be read: {next(iter(str(e).splitlines()), type(e).__name__)}') \
            from None
    return rest


def checked_tables(described: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    "Return the tables of tensors, if they are what was written; raise `ValueError`."
    sizes = [size for _, (size, _) in sorted(described['files'].items())]
    n_bytes = 0
    for entry in described['tensors']:
        rows, dim = entry['pieces'], len(entry['size'])
        dtype = getattr(torch, entry['dtype'], None)
        if not isinstance(dtype, torch.dtype) or rows.dtype != torch.int64 or rows.shape[1:] != (2*dim + 3,) or \
                (rows < 0).any(): raise ValueError(f'{entry["name"]} is no tensor')
        n_bytes += prod(entry['size']) * dtype.itemsize
        pieces = rows.tolist()
        for *_, file, start, length in pieces:
            if start + length > sizes[file]: raise ValueError(f'{entry["name"]} lies beyond the end of its file')
        if not is_covered(entry['size'], pieces): raise ValueError(f'{entry["name"]} is not there as a whole')
    if n_bytes > sum(sizes): raise ValueError(f'{folder} has fewer bytes than its tensors')
    return list(described['tensors'])


def is_covered(
    size: list[int],
    pieces: list[list[int]],   # of each its place and its size, and more
) -> bool:
    """Tell whether pieces make up a tensor, each of its numbers once.

    They do when their corners cancel out but for the tensor's own: one counts 1 or -1, by the ends that meet in it.

    >>> is_covered([4], [[0, 3], [3, 1]]), is_covered([4], [[0, 2], [1, 2]])
    (True, False)
    """
    if 0 in size: return True
    dim = len(size)
    cut = [d for d in range(dim) if any(piece[d] or piece[dim + d] != size[d] for piece in pieces)]
    if len(cut) > MOST_CUT: return False   # a corner has as many ends: nobody cuts like that
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, box in (*((1, piece) for piece in pieces), (-1, [0]*dim + size)):
        for ends in product((0, 1), repeat=len(cut)):
            corners[*(box[d] + end*box[dim + d] for d, end in zip(cut, ends, strict=True))] += sign * (-1)**sum(ends)
    return not any(corners.values())


def target_of(entry: Mapping[str, Any], mesh: DeviceMesh | None) -> Any:
    "Return a tensor to be read into."
    dtype = getattr(torch, entry['dtype'])
    if mesh is None: return torch.empty(entry['size'], dtype=dtype)
    return hosted_empty(entry['size'], dtype, mesh)


def read(targets: dict[str, Any], path: Path, described: Mapping[str, Any]) -> None:
    "Fill tensors, of whatever shares, from the files of pieces in a folder."
    import torch.distributed.checkpoint as dcp

    class Reader(dcp.FileSystemReader):
        "torch's, which is told where everything is instead of opening a pickle."

        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata: return metadata_of(described)

    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'torch.distributed is', UserWarning)  # it is not asked for
        try: dcp.load(targets, storage_reader=Reader(folder_of(path)), no_dist=True)
        except dcp.api.CheckpointException as e:
            error, _ = next(iter(e.failures.values()))
            raise ValueError(f'{type(error).__name__}: {error}') from None


def metadata_of(described: Mapping[str, Any]) -> Metadata:
    "Return torch's own description of the folder, made from the sealed file's."
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # what its reader looks up, and nothing public is
    names, tensors = sorted(described['files']), {}
    places: dict[Any, Any] = {}
    for name, dtype, size, rows in _rows(described):
        properties = m.TensorProperties(dtype=dtype)
        chunks = [m.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, *_ in rows]
        tensors[name] = m.TensorStorageMetadata(properties, torch.Size(size), chunks)
        places |= {m.MetadataIndex(name, offsets): _StorageInfo(names[file], start, length)
                   for offsets, _, file, start, length in rows}
    return m.Metadata(tensors, storage_data=places, storage_meta=m.StorageMeta())  # type: ignore[arg-type]  # its dict is invariant


def _rows(described: Mapping[str, Any]) -> Iterator[tuple[str, torch.dtype, list[int], list[tuple[Any, ...]]]]:
    for entry in described['tensors']:
        dim = len(entry['size'])
        yield entry['name'], getattr(torch, entry['dtype']), entry['size'], [
            (row[:dim], row[dim:2*dim], *row[2*dim:]) for row in entry['pieces'].tolist()]


# Removing

def remove_parts(path: Path) -> None:
    "Remove the folder of a checkpoint whose file is gone."
    shutil.rmtree(folder_of(path), ignore_errors=True)


def sweep_parts(folder: Path) -> list[Path]:
    "Remove the folders of checkpoints that were never whole, or are gone; hold the lock of `folder`."
    stale = [p for p in sorted(folder.glob('*.dcp')) if p.is_dir() and not p.is_symlink()
             and re.match(r'\d+-', p.name) and not p.with_suffix('.ckpt').exists()]
    for p in stale: shutil.rmtree(p, ignore_errors=True)
    return stale
