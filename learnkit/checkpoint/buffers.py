# SPDX-License-Identifier: Apache-2.0
"""Buffers that a state dict leaves out, and buffers that a model has only after its first batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from learnkit.core.model import bare_model, model_device
from learnkit.core.plain import is_dense

# path of a buffer, the module that has it, its name there, and the buffer
Place = tuple[str, nn.Module, str, Tensor]


def _list_buffers(module: Any) -> Iterator[Place]:
    "Yield all buffers of a module, tied ones under each of their paths."
    if not isinstance(module, nn.Module):
        return
    for prefix, owner in bare_model(module).named_modules(remove_duplicate=False):
        for name, buffer in owner._buffers.items():
            if type(buffer) is Tensor:
                yield f'{prefix}.{name}'.removeprefix('.'), owner, name, buffer


def collect_loose_buffers(
    module: Any,  # model or loss function
) -> dict[str, Tensor]:
    "Return the buffers that are not persistent, as far as a file can hold them."
    return {
        path: buffer
        for path, owner, name, buffer in _list_buffers(module)
        if name in owner._non_persistent_buffers_set and is_dense(buffer)
    }


def list_persistent(model: nn.Module) -> list[str]:
    "Return the paths of the persistent buffers of modules that are not of torch, which may add or resize them."
    return [
        path
        for path, owner, name, _ in _list_buffers(model)
        if name not in owner._non_persistent_buffers_set and not _is_of_torch(owner)
    ]


def add_buffers(
    model: nn.Module,
    weights: Mapping[str, Any],  # state dict in a checkpoint
    paths: Iterable[str],  # its buffers that `list_persistent` returned
) -> None:
    """Give a model the buffers of a checkpoint that it lacks, has as None, or in another shape.

    A module that is not of torch may register or resize a buffer in its forward pass. Other values are loaded later.
    """
    for path in paths:
        value = weights.get(path)
        if isinstance(value, Tensor):
            _put(model, path, value, persistent=True)


def restore_loose_buffers(module: Any, buffers: Mapping[str, Tensor]) -> None:
    "Restore buffers that are not persistent, and register the ones that the module lacks."
    for path, value in buffers.items():
        if _put(module, path, value, persistent=False):
            continue
        buffer = bare_model(module).get_buffer(path)
        if not torch.equal(buffer.cpu(), value):  # constants may be views or shared
            buffer.copy_(value)


def _put(module: Any, path: str, value: Tensor, persistent: bool) -> bool:
    "Set a buffer that is missing, is None, or has another shape or dtype; return True if it is as it should be."
    prefix, _, name = path.rpartition('.')
    try:
        owner = bare_model(module).get_submodule(prefix)
    except AttributeError:
        return True  # another model: the comparison of weights names the difference
    if hasattr(owner, name) and name not in owner._buffers:
        return True  # the same
    buffer = owner._buffers.get(name)
    if buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
        return False
    device = model_device(owner, None) if buffer is None else buffer.device
    owner.register_buffer(name, value.clone().to(device), persistent)
    return True


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.partition('.')[0] == 'torch'
