# SPDX-License-Identifier: Apache-2.0
"""Sharded checkpoints: the ranks write their shards by `torch.distributed.checkpoint` to a common folder.

    00012-ep3-ba1200.ckpt     written last: it completes the checkpoint
    00012-ep3-ba1200.parts/   .metadata, __0_0.distcp, __1_0.distcp, ...: the sharded tensors, and the model's others

The `.ckpt` file holds everything else, and size and SHA-256 of the files in the folder. Any number of ranks can read
the folder, and so can torch: `torch.distributed.checkpoint.load({'model': model.state_dict()}, checkpoint_id=folder)`.
Its pickles run no code: only torch's description of the tensors is accepted.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from learnkit.checkpoint.file import damaged_error, shorten_error
from learnkit.checkpoint.folder import SHARDS, describe_file, file_has_size
from learnkit.comm.dtensor import full_tensor, is_dtensor, list_shardings
from learnkit.comm.ranks import Comm, new_host_group
from learnkit.core.errors import CheckpointError
from learnkit.core.files import flush_folder

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Parts = dict[str, Tensor]  # DTensors, on the CPU when they are written


def find_parts_folder(path: Path) -> Path:
    "Return the folder of shards that belongs to a checkpoint's file."
    return path.with_suffix(SHARDS)


# -- splitting a state -----------------------------------------------------------------------------


def take_parts(state: Any) -> tuple[Any, list[list[Any]], Parts]:
    """Return a nested state with None for each sharded tensor, the positions of the sharded tensors, and the tensors.

    DTensors of which all ranks have the whole stay in the state, as full tensors.

    >>> take_parts({'a': [torch.ones(1), 2]})
    ({'a': [tensor([1.]), 2]}, [], {})
    """
    key_paths: list[list[Any]] = []
    parts: Parts = {}

    def take(value: Any, key_path: tuple[Any, ...]) -> Any:
        if is_dtensor(value) and not list_shardings(value):
            return full_tensor(value)
        if is_dtensor(value):
            name = make_part_name(key_path)
            if name in parts:
                raise CheckpointError(f'Two tensors of the state have the name {name}.')
            key_paths.append(list(key_path))
            parts[name] = value
            return None
        if isinstance(value, Mapping):
            return {k: take(v, (*key_path, k)) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(take(v, (*key_path, i)) for i, v in enumerate(value))
        return value

    return take(state, ()), key_paths, parts


def make_part_name(key_path: Iterable[Any]) -> str:
    "Return the name of a tensor in the folder, as torch flattens nested states."
    return '.'.join(map(str, key_path))


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

    They communicate over a separate process group, so that they can work in a background thread: the group that the
    strategy 'fsdp' makes when it joins the ranks.
    """

    def __init__(self, world: Comm) -> None:
        self._is_own_group = world.writing is None  # a model that was sharded by hand
        group = world.writing or new_host_group(timedelta(seconds=world.timeout_s))
        self.world = Comm(world.rank, world.size, world.local_rank, world.timeout_s, group)

    def write(
        self,
        parts: Parts,
        folder: Path,  # folder for the files; existing content is removed
    ) -> dict[str, Any]:
        """Write each rank's shards, and return size and digest of each file.

        Every rank must call `write`. An error on one rank is raised on all ranks.
        """
        from torch.distributed.checkpoint import FileSystemWriter, save
        from torch.distributed.checkpoint.api import CheckpointException

        self.world.run_on_all(lambda: self._create_folder(folder))
        try:
            save(parts, storage_writer=FileSystemWriter(folder), process_group=self.world.control)
            return self._describe_files(folder)
        except BaseException as e:
            if self.world.is_first:
                shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(e, CheckpointException):
                raise
            errors = [f'process {rank}: {error}' for rank, (error, _) in e.failures.items()]
            raise CheckpointError(f'{folder} was not written by {", ".join(errors)}.') from None

    def _create_folder(self, folder: Path) -> None:
        if self.world.is_first:
            shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted write
            folder.mkdir(parents=True)

    def _describe_files(self, folder: Path) -> dict[str, Any]:
        "Return size and digest of each file by its name; every rank reads its own files."
        own = [*folder.glob(f'__{self.world.rank}_*')]
        if self.world.is_first:
            own.append(folder / '.metadata')
        files: dict[str, Any] = {}
        for described in self.world.gather({path.name: describe_file(path) for path in own}):
            files |= described
        self.world.run_on_all(lambda: self._check_files(folder, files))
        return files

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
                f'{folder} lacks {", ".join(missing[:5])}, written by other processes: '
                'checkpoints of several machines need a folder that all of them share.'
            )

    def close(self) -> None:
        import torch.distributed as dist

        if self._is_own_group and dist.is_initialized():
            dist.destroy_process_group(self.world.control)


# -- reading ---------------------------------------------------------------------------------------


def load_shards(
    state: Mapping[str, Any],  # state of the checkpoint's file
    path: Path,  # file of the checkpoint
    mesh: DeviceMesh | None = None,  # CPU mesh: read this rank's shards; None: read full tensors
) -> Mapping[str, Any]:
    """Return a checkpoint's state with the tensors of its folder, if the checkpoint has one.

    Any number of ranks may have written the files. Each rank reads the rows that it needs, without communication.
    Raises `DamagedError` for files that cannot be read.
    """
    if 'parts' not in state:
        return state
    places = state['parts']['places']
    full_state: Any = {k: v for k, v in state.items() if k != 'parts'}
    try:
        tensors = _read({make_part_name(place) for place in places}, find_parts_folder(path), mesh)
        for place in places:
            full_state = replace_at(full_state, place, tensors[make_part_name(place)])
    except Exception as e:  # arbitrary bytes raise almost any type of error
        raise damaged_error(path, f'its parts cannot be read: {shorten_error(e)}') from None
    return full_state


def _read(names: Iterable[str], folder: Path, mesh: DeviceMesh | None) -> dict[str, Any]:
    "Return the tensors of a folder by name: full tensors, or this rank's shards."
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
    from torch.distributed.tensor import Replicate, Shard, empty

    with (folder / '.metadata').open('rb') as f:
        metadata = _MetadataUnpickler(f).load()
    tensors: dict[str, Any] = {}
    for name in names:
        described = metadata.state_dict_metadata[name]
        size, dtype = described.size, described.properties.dtype
        if mesh is None:
            tensors[name] = torch.empty(size, dtype=dtype)
        else:
            placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
            tensors[name] = empty(size, dtype=dtype, device_mesh=mesh, placements=placements)
    # not by torch's `load`, which would run any pickle in `.metadata`
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner = DefaultLoadPlanner()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    plan = planner.finish_plan(planner.create_local_plan())
    reader.read_data(plan, planner).wait()
    return tensors


class _MetadataUnpickler(pickle.Unpickler):
    "Unpickler of torch's description of the tensors in a folder; raises `UnpicklingError` for anything else."

    def find_class(self, module: str, name: str) -> Any:
        is_description = (
            module.startswith('torch.distributed.checkpoint.') and name in _DESCRIPTIONS
        )
        is_dtype = module == 'torch' and isinstance(getattr(torch, name, None), torch.dtype)
        is_other = (module, name) in _OTHERS or module == 'pathlib'
        if '.' in name or not (is_description or is_dtype or is_other):
            raise pickle.UnpicklingError(f'{module!a}.{name!a} does not describe a tensor')
        return super().find_class(module, name)


# names in `.metadata`; without `BytesStorageMetadata`, whose content torch would unpickle
_DESCRIPTIONS = {
    'Metadata',
    'MetadataIndex',
    'TensorStorageMetadata',
    'TensorProperties',
    'ChunkStorageMetadata',
    'StorageMeta',
    '_MEM_FORMAT_ENCODING',
    '_StorageInfo',
}
_OTHERS = {('torch', 'Size'), ('torch.serialization', '_get_layout')}
