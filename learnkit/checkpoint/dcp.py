"""Sharded checkpoints: each rank writes its shards to a safetensors file in a common folder.

    00012-ep3-ba1200.ckpt     written last: it completes the checkpoint
    00012-ep3-ba1200.parts/   0.safetensors, 1.safetensors, ...: each rank's shards of the sharded tensors

The `.ckpt` file holds size and SHA-256 of the other files, and the sharding of each tensor. Any number of ranks can
read the files. No file contains a pickle.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from learnkit.checkpoint.file import read_entries, write_state
from learnkit.checkpoint.folder import PARTS, damaged_error, describe_file, file_has_size
from learnkit.core.comm import Comm
from learnkit.core.dtensor import empty_on_host, full_tensor, is_dtensor, local_shard
from learnkit.core.errors import CheckpointError, DamagedError
from learnkit.core.files import flush_folder

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    'find_parts_folder',
    'take_parts',
    'replace_at',
    'load_parts',
    'Writers',
]

Parts = dict[str, Tensor]  # DTensors, on the CPU when they are written


def find_parts_folder(path: Path) -> Path:
    "Return the folder of shards that belongs to a checkpoint's file."
    return path.with_suffix(PARTS)


# -- splitting a state -----------------------------------------------------------------------------


def take_parts(state: Any) -> tuple[Any, list[list[Any]], Parts]:
    """Return a nested state with None for each sharded tensor, the positions of the sharded tensors, and the tensors.

    DTensors that are not sharded along their first dimension stay in the state, as full tensors.

    >>> take_parts({'a': [torch.ones(1), 2]})
    ({'a': [tensor([1.]), 2]}, [], {})
    """
    key_paths: list[list[Any]] = []
    parts: Parts = {}

    def take(value: Any, key_path: tuple[Any, ...]) -> Any:
        if is_dtensor(value) and not is_sharded(value):
            return full_tensor(value)
        if is_dtensor(value):
            key_paths.append(list(key_path))
            parts[make_part_name(key_paths[-1], len(parts))] = value
            return None
        if isinstance(value, Mapping):
            return {k: take(v, (*key_path, k)) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(take(v, (*key_path, i)) for i, v in enumerate(value))
        return value

    return take(state, ()), key_paths, parts


def make_part_name(key_path: list[Any], i: int) -> str:
    "Return the name of a tensor in the folder: a unique number, and the position for readability."
    return f'{i}.{".".join(map(str, key_path))}'


def replace_at(state: Any, key_path: list[Any], value: Any) -> Any:
    "Return a nested state with the value at a position replaced; dicts and lists are modified."
    if not key_path:
        return value
    key, *inner_path = key_path
    if isinstance(state, tuple):
        return (*state[:key], replace_at(state[key], inner_path, value), *state[key + 1 :])
    state[key] = replace_at(state[key], inner_path, value)
    return state


# -- writing ---------------------------------------------------------------------------------------


class Writers:
    """Writers of checkpoints on all ranks.

    They communicate over a separate process group, so that they can work in a background thread.
    """

    def __init__(self, world: Comm) -> None:
        import torch.distributed as dist

        group = dist.new_group(backend='gloo', timeout=timedelta(seconds=world.timeout_s))
        self.world = Comm(world.rank, world.size, world.local_rank, world.timeout_s, group)

    def write(
        self,
        parts: Parts,
        folder: Path,  # folder for the files; existing content is removed
    ) -> dict[str, Any]:
        """Write each rank's shards to a file, and return the index of all shards for the checkpoint's file.

        Every rank must call `write`. An error on one rank is raised on all ranks: as `CheckpointError`, or on the
        failing rank as the `OSError` itself.
        """
        self.world.run_on_all(lambda: self._create_folder(folder))
        try:
            described = self.world.run_on_all(
                lambda: self._save(parts, folder / make_rank_file_name(self.world.rank))
            )
        except BaseException:
            if self.world.is_first:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        gathered = self.world.gather(described)
        files = {make_rank_file_name(rank): file for rank, (file, _) in enumerate(gathered)}
        self.world.run_on_all(lambda: self._check_files(folder, files))
        lengths_by_tensor = zip(*[lengths for _, lengths in gathered], strict=True)
        tensors = [
            {
                'name': name,
                'dtype': str(t.dtype).removeprefix('torch.'),
                'size': [*t.shape],
                'lengths': [*lengths],
            }
            for (name, t), lengths in zip(parts.items(), lengths_by_tensor, strict=True)
        ]
        return {'files': files, 'tensors': tensors}

    def _create_folder(self, folder: Path) -> None:
        if not self.world.is_first:
            return
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted write
        folder.mkdir(parents=True)

    def _save(self, parts: Parts, path: Path) -> tuple[list[Any], list[int]]:
        "Write this rank's shards; return size and digest of the file, and the length of each shard."
        shards = {name: local_shard(t) for name, t in parts.items()}
        write_state(path, shards, {})
        return describe_file(path), [len(shard) for shard in shards.values()]

    def _check_files(self, folder: Path, files: Mapping[str, Any]) -> None:
        "Raise `CheckpointError` unless rank 0 sees the files of all ranks."
        if not self.world.is_first:
            return
        flush_folder(folder)
        missing = [
            name for name, (size, _) in files.items() if not file_has_size(folder / name, size)
        ]
        if missing:
            raise CheckpointError(
                f'{folder} has not got {", ".join(missing[:5])}, which other processes have written: '
                'checkpoints of several machines need a folder that all of them share.'
            )

    def close(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group(self.world.control)


def make_rank_file_name(rank: int) -> str:
    "Return the name of the file that holds a rank's shards."
    return f'{rank}.safetensors'


def is_sharded(t: Any) -> bool:
    "Return True if a DTensor is sharded along its first dimension, as `fully_shard` does it."
    [placement] = t.placements
    is_shard: bool = placement.is_shard(0)
    return is_shard


# -- reading ---------------------------------------------------------------------------------------


def load_parts(
    state: Mapping[str, Any],  # state of the checkpoint's file
    path: Path,  # file of the checkpoint
    mesh: DeviceMesh | None = None,  # CPU mesh: read this rank's shards; None: read full tensors
) -> Mapping[str, Any]:
    """Return a checkpoint's state with the tensors of its folder.

    Any number of ranks may have written the files. Each rank reads the rows that it needs, without communication.
    Raises `DamagedError` for files that cannot be read.
    """
    parts = state['parts']
    full_state: Any = {k: v for k, v in state.items() if k != 'parts'}
    try:
        tensors = _read(parts, find_parts_folder(path), mesh)
        for i, key_path in enumerate(parts['places']):
            full_state = replace_at(full_state, key_path, tensors[make_part_name(key_path, i)])
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
        raise damaged_error(path, f'has parts that cannot be read: {reason}') from None
    return full_state


def _read(parts: Mapping[str, Any], folder: Path, mesh: DeviceMesh | None) -> dict[str, Any]:
    "Return the tensors of a folder by name: full tensors, or this rank's shards."
    parts_by_name: dict[str, list[Tensor]] = {entry['name']: [] for entry in parts['tensors']}
    for rank in range(len(parts['files'])):
        rows = {entry['name']: _find_rows_in_shard(entry, rank, mesh) for entry in parts['tensors']}
        names = {name for name, (start, stop) in rows.items() if start < stop}
        for name, part in read_entries(folder / make_rank_file_name(rank), names).items():
            parts_by_name[name].append(part[slice(*rows[name])])
    return {
        entry['name']: _join(entry, parts_by_name[entry['name']], mesh)
        for entry in parts['tensors']
    }


def _find_rows(entry: Mapping[str, Any], mesh: DeviceMesh | None) -> tuple[int, int]:
    "Return the range of rows that this rank needs of a tensor: all rows, or its shard as in `empty_on_host`."
    n = entry['size'][0]
    if mesh is None:
        return 0, n
    length = -(-n // mesh.size())
    start = min(n, length * mesh.get_local_rank())
    return start, min(n, start + length)


def _find_rows_in_shard(
    entry: Mapping[str, Any], rank: int, mesh: DeviceMesh | None
) -> tuple[int, int]:
    "Return the range of the needed rows within the shard that `rank` has written."
    start, stop = _find_rows(entry, mesh)
    first = sum(entry['lengths'][:rank])
    length = entry['lengths'][rank]
    return max(0, start - first), min(length, stop - first)


def _join(entry: Mapping[str, Any], parts: list[Tensor], mesh: DeviceMesh | None) -> Any:
    "Concatenate the rows that this rank needs; raise `ValueError` if they are incomplete."
    start, stop = _find_rows(entry, mesh)
    size = entry['size']
    dtype = getattr(torch, entry['dtype'])
    rows = torch.cat(parts) if parts else torch.empty([0, *size[1:]], dtype=dtype)
    if rows.dtype != dtype or [*rows.shape] != [stop - start, *size[1:]]:
        raise ValueError(f'{entry["name"]} is not there as a whole')
    if mesh is None:
        return rows
    t = empty_on_host(size, dtype, mesh)
    local_shard(t).copy_(rows)
    return t
