"""The parts of a checkpoint that ranks write, each its own: a folder of safetensors files.

    00012-ep3-ba1200.ckpt     written last: with it the checkpoint is whole
    00012-ep3-ba1200.parts/   0.safetensors, 1.safetensors, ...: each rank's shards of the tensors that are cut

The first file holds size and SHA-256 of each of the others, and how each tensor is cut. Any number of ranks can
read them. Neither has a pickle."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from learnkit.checkpoint.file import read_entries, write_state
from learnkit.core.comm import Comm
from learnkit.core.dtensor import hosted_empty, is_dtensor, local
from learnkit.core.errors import CheckpointError, DamagedError
from learnkit.core.files import flush_folder

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    'folder_of',
    'take_parts',
    'put',
    'with_parts',
    'check_parts',
    'remove_parts',
    'sweep_parts',
    'Writers',
]

_FILE = re.compile(r'\d{1,7}\.safetensors', re.ASCII)

Parts = dict[str, Tensor]  # DTensors, on the host when they are written


def folder_of(path: Path) -> Path:
    "Return the folder that belongs to a checkpoint's file."
    return path.with_suffix('.parts')


# What is cut


def take_parts(state: Any) -> tuple[Any, list[list[Any]], Parts]:
    """Return a nested state with None in the places of tensors that are cut, these places, and the tensors.

    >>> take_parts({'a': [torch.ones(1), 2]})
    ({'a': [tensor([1.]), 2]}, [], {})
    """
    places: list[list[Any]] = []
    parts: Parts = {}

    def take(value: Any, place: tuple[Any, ...]) -> Any:
        if is_dtensor(value) and dim_of(value) is None:
            return local(value)
        if is_dtensor(value):
            places.append(list(place))
            parts[name_of_place(places[-1], len(parts))] = value
            return None
        if isinstance(value, Mapping):
            return {k: take(v, (*place, k)) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(take(v, (*place, i)) for i, v in enumerate(value))
        return value

    return take(state, ()), places, parts


def name_of_place(place: list[Any], i: int) -> str:
    "Return the name of a tensor in the folder: its place, for people, and its number."
    return f'{i}.{".".join(map(str, place))}'


def put(state: Any, place: list[Any], value: Any) -> Any:
    "Return a nested state with a value at a place; dicts and lists are changed."
    if not place:
        return value
    k, rest = place[0], place[1:]
    if isinstance(state, tuple):
        return (*state[:k], put(state[k], rest, value), *state[k + 1 :])
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
        folder: Path,  # what is in it goes
    ) -> dict[str, Any]:
        """Write each process's parts, and return what the checkpoint's file has to say of them.

        All processes call it. What fails in one is raised in all: `CheckpointError`, or there the `OSError` itself."""
        self.world.run_on_all(lambda: self._make(folder))
        try:
            described = self.world.run_on_all(
                lambda: self._save(parts, folder / file_name(self.world.rank))
            )
        except BaseException:
            if self.world.is_first:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        gathered = self.world.gather(described)
        files = {file_name(rank): file for rank, (file, _) in enumerate(gathered)}
        self.world.run_on_all(lambda: self._look(folder, files))
        tensors = [
            {
                'name': name,
                'dtype': str(t.dtype).removeprefix('torch.'),
                'size': [*t.shape],
                'dim': dim_of(t),
                'lengths': [lengths[i] for _, lengths in gathered],
            }
            for i, (name, t) in enumerate(parts.items())
        ]
        return {'files': files, 'tensors': tensors}

    def _make(self, folder: Path) -> None:
        if not self.world.is_first:
            return
        shutil.rmtree(folder, ignore_errors=True)  # of a write that broke off
        folder.mkdir(parents=True)

    def _save(self, parts: Parts, path: Path) -> tuple[list[Any], list[int]]:
        "Write this rank's shards; return size and digest of the file, and the length of each shard."
        shards = {name: local(t) for name, t in parts.items()}
        write_state(path, shards, {})
        return describe(path), [shards[name].shape[dim_of(t)] for name, t in parts.items()]

    def _look(self, folder: Path, files: Mapping[str, Any]) -> None:
        "Let the first process see the files of all."
        if not self.world.is_first:
            return
        flush_folder(folder)
        if missing := [
            name for name, (size, _) in files.items() if not has_size(folder / name, size)
        ]:
            raise CheckpointError(
                f'{folder} has not got {", ".join(missing[:5])}, which other processes have written: '
                'checkpoints of several machines need a folder that all of them share.'
            )

    def close(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group(self.world.control)


def describe(path: Path) -> list[Any]:
    "Return size and digest of a file."
    with path.open('rb') as f:
        return [path.stat().st_size, hashlib.file_digest(f, 'sha256').hexdigest()]


def has_size(path: Path, size: int) -> bool:
    "Tell whether a file is there, and as long as it should be."
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def file_name(rank: int) -> str:
    return f'{rank}.safetensors'


def dim_of(t: Any) -> Any:
    "Return the dimension along which a DTensor is cut; None where every rank has all of it."
    [placement] = t.placements
    return placement.dim if placement.is_shard() else None


# Looking


def check_parts(
    path: Path,  # the checkpoint's file
    parts: Mapping[str, Any],  # its entry of that name
    digests: bool = True,  # compare digests, not sizes alone
) -> None:
    "Raise `DamagedError` where a file of the folder is missing, or not as it was written."
    folder, files = folder_of(path), parts['files']
    for name, (size, digest) in files.items():
        if not _FILE.fullmatch(name):
            raise _damaged(path, f'names a file {ascii(name)[:80]}')
        if not has_size(folder / name, size):
            raise _damaged(
                path, f'belongs to {folder.name}/{name}, which is missing or was cut short'
            )
        if digests and describe(folder / name)[1] != digest:
            raise _damaged(
                path, f'belongs to {folder.name}/{name}, whose digest differs: bytes have changed'
            )


def _damaged(path: Path, what: str) -> DamagedError:
    return DamagedError(f'{path} {what}. Nothing was loaded.')


# Reading


def with_parts(
    state: Mapping[str, Any],  # of a checkpoint's file
    path: Path,  # that file
    mesh: DeviceMesh | None = None,  # of hosts: read this process's parts; None: read whole tensors
) -> Mapping[str, Any]:
    """Return a checkpoint's state with the tensors that lie beside its file.

    They may have been written by any number of processes. Nothing is agreed on with others: each reads what it needs.
    Raises `DamagedError` for what cannot be read."""
    parts = state['parts']
    rest: Any = {k: v for k, v in state.items() if k != 'parts'}
    try:
        tensors = _read(parts, folder_of(path), mesh)
        for i, place in enumerate(parts['places']):
            rest = put(rest, place, tensors[name_of_place(place, i)])
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        RuntimeError,
        OSError,
        DamagedError,
    ) as e:
        reason = next(iter(str(e).splitlines()), type(e).__name__)
        raise _damaged(path, f'has parts that cannot be read: {reason}') from None
    return rest


def _read(parts: Mapping[str, Any], folder: Path, mesh: DeviceMesh | None) -> dict[str, Any]:
    "Return the tensors of a folder by name: whole, or this rank's shards of them."
    pieces: dict[str, list[Tensor]] = {entry['name']: [] for entry in parts['tensors']}
    for rank in range(len(parts['files'])):
        rows = {entry['name']: _rows_in(entry, rank, mesh) for entry in parts['tensors']}
        names = {name for name, (start, stop) in rows.items() if start < stop}
        for name, piece in read_entries(folder / file_name(rank), names).items():
            pieces[name].append(piece[slice(*rows[name])])
    return {entry['name']: _join(entry, pieces[entry['name']], mesh) for entry in parts['tensors']}


def _rows(entry: Mapping[str, Any], mesh: DeviceMesh | None) -> tuple[int, int]:
    "Return which rows of a tensor this rank needs: all, or what `hosted_empty` gives it."
    n = entry['size'][0]
    if mesh is None:
        return 0, n
    length = -(-n // mesh.size())
    start = min(n, length * mesh.get_local_rank())
    return start, min(n, start + length)


def _rows_in(entry: Mapping[str, Any], rank: int, mesh: DeviceMesh | None) -> tuple[int, int]:
    "Return where these rows are in the shard that a rank has written."
    start, stop = _rows(entry, mesh)
    if entry['dim'] != 0:
        return start, stop
    first, length = sum(entry['lengths'][:rank]), entry['lengths'][rank]
    return max(0, start - first), min(length, stop - first)


def _join(entry: Mapping[str, Any], pieces: list[Tensor], mesh: DeviceMesh | None) -> Any:
    "Return the rows that this rank needs, from their pieces."
    start, stop = _rows(entry, mesh)
    size, dtype = entry['size'], getattr(torch, entry['dtype'])
    found = torch.cat(pieces, entry['dim']) if pieces else torch.empty([0, *size[1:]], dtype=dtype)
    if found.dtype != dtype or [*found.shape] != [stop - start, *size[1:]]:
        raise ValueError(f'{entry["name"]} is not there as a whole')
    if mesh is None:
        return found
    t = hosted_empty(size, dtype, mesh)
    local(t).copy_(found)
    return t


# Removing


def remove_parts(path: Path) -> None:
    "Remove the folder of a checkpoint whose file is gone."
    shutil.rmtree(folder_of(path), ignore_errors=True)


def sweep_parts(folder: Path) -> list[Path]:
    "Remove the folders of checkpoints that were never whole, or are gone; hold the lock of `folder`."
    stale = [
        p
        for p in sorted(folder.glob('*.parts'))
        if p.is_dir()
        and not p.is_symlink()
        and re.match(r'\d+-', p.name)
        and not p.with_suffix('.ckpt').exists()
    ]
    for p in stale:
        shutil.rmtree(p, ignore_errors=True)
    return stale
