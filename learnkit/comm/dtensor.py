# SPDX-License-Identifier: Apache-2.0
"""Functions for DTensors, the sharded tensors of torch: gathering, sharding like another tensor, and norms."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from learnkit.core.batch import map_tensors
from learnkit.core.errors import DistributedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_PLAIN = (Tensor, nn.Parameter)  # a parameter that is a DTensor has the class DTensor
TENSOR = 'tensor'  # name of the mesh's dimension over which layers are parallel
_host_meshes: dict[DeviceMesh, DeviceMesh] = {}  # mesh of hosts of a mesh of accelerators


def is_dtensor(value: Any) -> bool:
    """Return True if a tensor is a DTensor.

    >>> is_dtensor(torch.zeros(2))
    False
    """
    if type(value) in _PLAIN or 'torch.distributed.tensor' not in sys.modules:
        return False
    # the import takes 0.25 s, which single-process training avoids
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def local_shard(t: Any) -> Any:
    "Return this rank's shard of a DTensor, sharing memory; return any other tensor unchanged."
    if not is_dtensor(t):
        return t
    with torch.no_grad():
        return t.to_local()


def local_shards(tensors: Iterable[Any]) -> list[Any]:
    "Return this rank's shards of tensors. Elementwise operations are faster on shards than on DTensors."
    if 'torch.distributed.tensor' not in sys.modules:
        return list(tensors)
    return [t if type(t) in _PLAIN else local_shard(t) for t in tensors]


def reshard(model: nn.Module) -> None:
    "Reshard the parameters of an FSDP model, which frees the full parameters that a forward pass has gathered."
    if 'torch.distributed.fsdp' not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    for m in model.modules():
        if isinstance(m, FSDPModule):
            m.reshard()


# -- gathering -------------------------------------------------------------------------------------


def full_tensor(
    t: Any,
    first_only: bool = False,  # the other ranks return an empty tensor
) -> Any:
    "Gather a DTensor on the host; return any other tensor unchanged. All ranks must call it."
    if not is_dtensor(t):
        return t
    from torch.distributed.tensor import Replicate

    with torch.no_grad():
        # one dimension of the mesh at a time: torch warns of the order of the messages otherwise
        for i in range(1, t.device_mesh.ndim):
            t = t.redistribute(placements=[*[Replicate()] * i, *t.placements[i:]])
        full = t.full_tensor()
        is_kept = not first_only or torch.distributed.get_rank() == 0
        return full.cpu() if is_kept else full.new_empty(0)


def gather_full_state(state: Any, first_only: bool = False) -> Any:
    "Gather every tensor of a nested state. All ranks must call it."
    return map_tensors(state, partial(full_tensor, first_only=first_only))


# -- sharding --------------------------------------------------------------------------------------


def distribute_like(
    value: Any,  # full or sharded tensor; any other value is returned unchanged
    own: Any,  # tensor of the same shape, full or sharded
) -> Any:
    """Shard or gather a value like the tensor `own`, as a copy on the device of `own`.

    All ranks must call it if the value is sharded in another way, because it is gathered."""
    if not isinstance(value, Tensor) or value.shape != own.shape:
        return value
    if not is_dtensor(own):
        return full_tensor(value).to(own.device) if is_dtensor(value) else value
    is_alike = getattr(value, 'placements', None) == own.placements
    shard = local_shard(value) if is_alike else take_shard(full_tensor(value), own)
    return make_dtensor(shard.detach().to(local_shard(own).device, copy=True), own)


def take_shard(t: Tensor, template: Any) -> Tensor:
    "Return this rank's shard of a full tensor, without communication."
    return t[shard_rows(template)]


def shard_rows(t: Any) -> tuple[slice, ...]:
    "Return the slices of a full tensor that are this rank's shard of a DTensor; of any other tensor, all of it."
    rows = [slice(0, n) for n in t.shape]
    # `fully_shard` cuts the parts of a parallel layer once more, along a dimension with a `split_factor`
    cuts = sorted(list_shardings(t), key=lambda i: hasattr(t.placements[i], 'split_factor'))
    for i in cuts:
        dim = t.placements[i].dim
        start, stop = rows[dim].start, rows[dim].stop
        per_rank = -(-(stop - start) // t.device_mesh.size(i))
        start = min(stop, start + t.device_mesh.get_local_rank(i) * per_rank)
        rows[dim] = slice(start, min(stop, start + per_rank))
    return tuple(rows)


def list_shardings(t: Any) -> list[int]:
    "Return the dimensions of the mesh that a tensor is sharded over; none for one that is not sharded."
    placements = t.placements if is_dtensor(t) else ()
    return [i for i, placement in enumerate(placements) if hasattr(placement, 'dim')]


def count_parts(t: Any) -> int:
    "Return the number of different shards of a tensor; 1 for one that is not sharded."
    return prod(t.device_mesh.size(i) for i in list_shardings(t))


def count_replicas(t: Any) -> int:
    "Return the number of ranks that have the same shard of a DTensor; 0 for any other tensor."
    return torch.distributed.get_world_size() // count_parts(t) if is_dtensor(t) else 0


def make_dtensor(
    shard: Tensor,  # this rank's shard
    template: Any,  # DTensor
    mesh: DeviceMesh | None = None,  # mesh of the same ranks; None: of `template`
) -> DTensor:
    "Return a DTensor with the placements, shape and strides of `template`."
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard,
        mesh or template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )


def on_host(t: Any, mine: Tensor) -> Any:
    "Return a DTensor on the host that is sharded like `t`, from this rank's shard `mine`."
    return make_dtensor(mine, t, host_mesh(t.device_mesh))


def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    "Return the mesh of hosts of a mesh of accelerators; raise `DistributedError` after `close_hosts`."
    if mesh.device_type == 'cpu':
        return mesh
    if mesh not in _host_meshes:
        raise DistributedError(
            'This tensor is sharded over processes that no longer train together: read it within '
            '`learn.distributed(...)`.'
        )
    return _host_meshes[mesh]


def open_hosts(
    mesh: DeviceMesh,
    group: Any,  # process group of the same ranks on the hosts
) -> None:
    "Register the mesh of hosts of a mesh of accelerators, until `close_hosts`."
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if mesh.ndim == 1:
        _host_meshes[mesh] = DeviceMesh.from_group(group, 'cpu')
    elif mesh.device_type != 'cpu':
        names = mesh.mesh_dim_names or ()
        hosts = init_device_mesh('cpu', tuple(mesh.shape), mesh_dim_names=names)
        _host_meshes[mesh] = hosts
        _host_meshes.update({mesh[name]: hosts[name] for name in names})


def close_hosts() -> None:
    "Forget all meshes of hosts."
    _host_meshes.clear()


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    "Return the mesh that a model is sharded over, or None for an unsharded model."
    return next((p.device_mesh for p in model.parameters() if is_dtensor(p)), None)  # type: ignore[attr-defined]


def find_reading_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh of hosts whose ranks read their rows of a checkpoint's tensors.

    Returns None where ranks read whole tensors: for an unsharded model, and with layers that are parallel."""
    meshes = [p.device_mesh for p in model.parameters() if is_dtensor(p)]  # type: ignore[attr-defined]
    if not meshes or any(TENSOR in mesh.mesh_dim_names for mesh in meshes):
        return None
    return host_mesh(meshes[0])


# -- norms -----------------------------------------------------------------------------------------


def unpack_shards(tensors: Iterable[Any]) -> tuple[list[Any], list[int]]:
    "Return this rank's shards, and the number of ranks that have each, 0 for a tensor that is not sharded."
    tensors = list(tensors)
    return local_shards(tensors), list(map(count_replicas, tensors))


def sum_of_parts(
    numbers: Tensor,  # one number per tensor, computed from this rank's shard
    n_replicas: list[int],  # ranks that have the same shard, as `unpack_shards` returns them
    largest: bool = False,  # reduce by the maximum instead of the sum
) -> Tensor:
    "Reduce numbers of sharded tensors over ranks. All ranks must call it."
    if not any(n_replicas):
        return numbers
    import torch.distributed as dist

    replicas = torch.tensor(n_replicas, device=numbers.device)
    total = numbers.clone() if largest else numbers / replicas.clamp(min=1)
    dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    return torch.where(replicas > 0, total, numbers)


@torch.no_grad()
def total_norm(
    tensors: Iterable[Any],
    norm_type: float = 2.0,  # `inf` for the largest absolute value
) -> Tensor:
    """Return the total norm of full or sharded tensors, without waiting on the host. All ranks must call it.

    >>> total_norm([torch.tensor([3.]), torch.tensor([4.])])
    tensor(5.)
    """
    shards, n_replicas = unpack_shards(tensors)
    if not any(n_replicas):
        return nn.utils.get_total_norm(shards, norm_type)
    norms = torch.stack([_compute_norm(t, norm_type).to(shards[0].device) for t in shards])
    if norm_type == float('inf'):
        return sum_of_parts(norms, n_replicas, largest=True).max()
    powers = sum_of_parts(norms.double() ** norm_type, n_replicas)
    total = powers.sum() ** (1 / norm_type)
    return total.to(norms.dtype)


def _compute_norm(t: Tensor, norm_type: float) -> Tensor:
    "Return the norm of a shard, which may be empty."
    return torch.linalg.vector_norm(t, norm_type) if t.numel() else t.new_zeros(())
