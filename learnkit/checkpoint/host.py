# SPDX-License-Identifier: Apache-2.0
"""Copy a state to host memory, new or of an earlier copy, or view it there without a copy."""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from learnkit.comm.dtensor import is_dtensor, local_shard, on_host
from learnkit.core.device import has_streams, synchronize
from learnkit.core.plain import identify_memory, is_dense

# size in bytes from which a tensor gets its own pages, which are returned to the system when freed
_MIN_MAPPED = 1 << 22


def copy_to_host(state: Any) -> Any:
    "Return a nested state with its tensors copied to host memory; tensors that share memory are copied once."
    return _map_state(state, lambda t: _copy(t, _allocate(t)))


def view_on_host(state: Any) -> Any:
    """Return a nested state with its tensors in host memory. Tensors that are already there are not copied.

    The result has the content of `state` as long as no tensor of `state` is modified.
    """
    return _map_state(state, lambda t: t.detach() if _is_on_host(t) else _copy(t, _allocate(t)))


class HostMemory:
    """Memory for copies of a state, of which only the latest is needed.

    A copy overwrites the previous copy: a tensor is copied into the memory of a previous tensor of the same layout.
    Memory that the new copy does not need is freed.

    >>> memory = HostMemory()
    >>> first = memory.copy({'w': torch.ones(2)})
    >>> second = memory.copy({'w': torch.zeros(2)})
    >>> first['w'] is second['w'], first
    (True, {'w': tensor([0., 0.])})
    """

    def __init__(self) -> None:
        self._previous: dict[Any, list[Tensor]] = {}  # tensors of the previous copy, by layout
        self._current: defaultdict[Any, list[Tensor]] = defaultdict(list)

    def copy(self, state: Any) -> Any:
        "Return a nested state with its tensors copied; tensors that share memory are copied once."
        self._previous = self._current
        self._current = defaultdict(list)
        try:
            return _map_state(state, lambda t: _copy(t, self._reuse(t)))
        finally:
            self._previous = {}

    def _reuse(self, t: Tensor) -> Tensor:
        "Return a tensor of the previous copy that has the layout of `t`, or a new one."
        layout = t.device, t.dtype, t.shape, t.stride()
        unused = self._previous.get(layout)
        target = unused.pop(0) if unused else _map_like(t)
        self._current[layout].append(target)
        return target


def _map_state(state: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    "Apply a function to the tensors of a nested state, and wait for the device."
    with torch.no_grad():
        converted = _map_value(state, convert, {})
    synchronize()  # once for all tensors
    return converted


# not a closure, which would refer to itself, and keep the results until the garbage collector runs
def _map_value(
    value: Any,
    convert: Callable[[Tensor], Tensor],
    results: dict[Any, Tensor],  # converted tensors, by memory
) -> Any:
    if type(value) is int:  # first, because Python's random state has 625 of them
        return value
    if is_dtensor(value):
        return on_host(value, _map_value(local_shard(value), convert, results))
    if isinstance(value, Tensor):
        key = identify_memory(value)
        if key not in results:
            results[key] = convert(value)
        return results[key]
    if isinstance(value, Mapping):
        return {k: _map_value(v, convert, results) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_map_value(v, convert, results) for v in value])
    return value


def _copy(t: Tensor, target: Tensor) -> Tensor:
    return target.copy_(t, non_blocking=has_streams(t.device))


def _allocate(t: Tensor) -> Tensor:
    "Return an uninitialized tensor like `t` in host memory, pinned for an accelerator that copies on streams."
    return torch.empty_like(t, device='cpu', pin_memory=has_streams(t.device))


def _map_like(t: Tensor) -> Tensor:
    "Return an uninitialized tensor like `t` in host memory; a large one has its own pages."
    if t.nbytes < _MIN_MAPPED or not _is_plain(t) or has_streams(t.device):
        return _allocate(t)
    strides = torch.empty_like(t, device='meta').stride()
    return allocate_bytes(t.nbytes).view(t.dtype).as_strided(t.shape, strides)


def allocate_bytes(n: int) -> Tensor:
    """Return an uninitialized tensor of `n` bytes in host memory; a large one uses an anonymous memory map.

    The allocator may keep large blocks that are freed; a map is returned to the system at once.
    """
    if n < _MIN_MAPPED:
        return torch.empty(n, dtype=torch.uint8)
    flags = getattr(mmap, 'MAP_PRIVATE', 0) | getattr(mmap, 'MAP_ANONYMOUS', 0)
    memory = mmap.mmap(-1, n, **({'flags': flags} if flags else {}))
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the map alive


def _is_on_host(t: Tensor) -> bool:
    return t.device.type == 'cpu' and _is_plain(t)


def _is_plain(t: Tensor) -> bool:
    return type(t) in (Tensor, nn.Parameter) and is_dense(t)
