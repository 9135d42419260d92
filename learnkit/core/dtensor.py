"""Tensors of which every process has a part, torch's DTensors: told from others, gathered, and cut as another is."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from learnkit.core.batch import map_tensors
from learnkit.core.errors import DistributedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = [
    'is_dtensor',
    'local',
    'locals_of',
    'full_tensor',
    'whole_state',
    'distribute_like',
    'part_of',
    'cut_again',
    'on_host',
    'hosted_empty',
    'host_mesh',
    'open_hosts',
    'close_hosts',
    'mesh_of',
    'grouped',
    'total_norm',
    'sum_of_parts',
]

# of each strategy at work, its mesh of accelerators, its group between hosts, and their mesh; equal ones take turns
_hosts: list[tuple[DeviceMesh, Any, DeviceMesh]] = []


def is_dtensor(value: Any) -> bool:
    """Return True if a tensor is a DTensor.

    >>> is_dtensor(torch.zeros(2))
    False
    """
    return (
        type(value) is not Tensor
        and 'torch.distributed.tensor' in sys.modules
        and _is_dtensor(value)
    )


def _is_dtensor(value: Any) -> bool:
    # a quarter of a second, which training in one process can do without
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def local(t: Any) -> Any:
    "Return this process's part of a tensor, in the same memory; any other tensor as it is."
    if not is_dtensor(t):
        return t
    with torch.no_grad():
        return t.to_local()


def locals_of(tensors: Iterable[Any]) -> list[Any]:
    "Return this process's parts of tensors: what is computed number by number is the same on them, and faster."
    return list(map(local, tensors)) if 'torch.distributed.tensor' in sys.modules else list(tensors)


def cut_again(model: nn.Module) -> None:
    "Let go of weights that a forward pass has put together: the model's parameters are parts again."
    if 'torch.distributed.fsdp' not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    for m in model.modules():
        if isinstance(m, FSDPModule):
            m.reshard()


# Gathering


def full_tensor(t: Any) -> Any:
    "Return all of a tensor on the host, where every process has a part of it; any other as it is. All call it."
    if not is_dtensor(t):
        return t
    with torch.no_grad():
        return t.full_tensor().cpu()


def whole_state(state: Any) -> Any:
    "Return a nested state with every tensor whole. All processes call it."
    return map_tensors(state, full_tensor)


# Cutting


def distribute_like(
    value: Any,  # a tensor, whole or cut, anything else stays as it is
    own: Any,  # a tensor of the same shape
) -> Any:
    """Return a value as another tensor is: this process's part of it, on its device, in memory of its own.

    For one that is whole all of it is put together, which all processes call."""
    if not isinstance(value, Tensor) or value.shape != own.shape:
        return value
    if not is_dtensor(own):
        return full_tensor(value).to(own.device) if is_dtensor(value) else value
    mine = local(value) if is_dtensor(value) else part_of(value, own.device_mesh, own.placements)
    return _rejoined(mine.detach().to(local(own).device, copy=True), own.device_mesh, own)


def part_of(t: Tensor, mesh: DeviceMesh, placements: Any) -> Tensor:
    "Return the part of a whole tensor that this process has of it on a mesh of one dimension."
    [placement] = placements
    if not placement.is_shard():
        return t
    parts = t.chunk(mesh.size(), placement.dim)
    rank = mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else t.narrow(placement.dim, 0, 0)


def _rejoined(mine: Tensor, mesh: DeviceMesh, like_this: Any) -> DTensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        mine,
        mesh,
        like_this.placements,
        run_check=False,
        shape=like_this.shape,
        stride=like_this.stride(),
    )


def on_host(t: Any, mine: Tensor) -> Any:
    "Return a tensor cut as `t` is, of which this process's part is `mine`, on the host."
    return _rejoined(mine, host_mesh(t.device_mesh), t)


def hosted_empty(size: list[int], dtype: torch.dtype, mesh: DeviceMesh) -> Any:
    "Return a tensor cut along its first dimension, as `fully_shard` cuts, on a mesh of hosts; its numbers are any."
    from torch.distributed.tensor import DTensor, Shard

    n, rank = mesh.size(), mesh.get_local_rank()
    length = -(-size[0] // n)  # as torch.chunk does it
    mine = torch.empty([max(0, min(length, size[0] - rank * length)), *size[1:]], dtype=dtype)
    strides = torch.empty(size, device='meta').stride()
    return DTensor.from_local(
        mine, mesh, [Shard(0)], run_check=False, shape=torch.Size(size), stride=strides
    )


def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    "Return the mesh of the processes' hosts. Raises `DistributedError` where nothing works with this mesh any more."
    if mesh.device_type == 'cpu':
        return mesh
    for known, _, hosts in reversed(_hosts):
        if known == mesh:
            return hosts
    raise DistributedError(
        'This tensor is cut over processes that no longer train together: look at it while '
        '`learn.distributed(...)` lasts.'
    )


def open_hosts(
    mesh: DeviceMesh,
    group: Any,  # of the same processes, between their hosts
) -> None:
    "Know the mesh of the hosts of a mesh of accelerators until `close_hosts`."
    if mesh.device_type == 'cpu':
        return
    from torch.distributed.device_mesh import DeviceMesh

    _hosts.append((mesh, group, DeviceMesh.from_group(group, 'cpu')))


def close_hosts(group: Any) -> None:
    "Forget the mesh of the hosts that a group connects."
    _hosts[:] = [entry for entry in _hosts if entry[1] is not group]


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    "Return the mesh that a model is cut over, None for a model that is whole."
    # DTensors
    return next((p.device_mesh for p in model.parameters() if is_dtensor(p)), None)  # type: ignore[attr-defined]


# Norms


def grouped(tensors: Iterable[Any]) -> tuple[list[Any], list[bool], Any]:
    "Return this process's parts, which of them are parts, and the group that has the rest; None where all are whole."
    tensors = list(tensors)
    are_parts = [is_dtensor(t) for t in tensors]
    group = next(
        (t.device_mesh.get_group() for t, part in zip(tensors, are_parts, strict=True) if part),
        None,
    )
    return locals_of(tensors), are_parts, group


def sum_of_parts(
    numbers: Tensor,  # one for each of some tensors: of this process's part of it
    are_parts: list[bool],  # of the others it has all
    group: Any,  # from `grouped`
    largest: bool = False,  # the greatest instead of the sum
) -> Tensor:
    "Return the numbers of whole tensors. All processes call it."
    if group is None:
        return numbers
    import torch.distributed as dist

    cut = torch.tensor(are_parts, device=numbers.device)
    total = numbers.clone()
    dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return torch.where(cut, total, numbers)


@torch.no_grad()
def total_norm(
    tensors: Iterable[Any],
    norm_type: float = 2.0,  # `inf` for the largest absolute value
    mine: list[Any] | None = None,  # use the norm of these instead: this process's parts of tensors
) -> Tensor:
    """Return the norm of all tensors together, whole or cut; no host waits for it. All processes call it.

    >>> total_norm([torch.tensor([3.]), torch.tensor([4.])])
    tensor(5.)
    """
    own, are_parts, group = grouped(tensors)
    if mine is None:
        mine = own
    if group is None:
        return nn.utils.get_total_norm(mine, norm_type)
    inf = norm_type == float('inf')
    norms = torch.stack([_norm_of(t, norm_type).to(mine[0].device) for t in mine])
    if inf:
        return sum_of_parts(norms, are_parts, group, largest=True).max()
    total = sum_of_parts(norms.double() ** norm_type, are_parts, group).sum() ** (1 / norm_type)
    return total.to(norms.dtype)


def _norm_of(t: Tensor, norm_type: float) -> Tensor:
    "Return the norm of a part, which may be empty."
    return torch.linalg.vector_norm(t, norm_type) if t.numel() else t.new_zeros(())
