# SPDX-License-Identifier: Apache-2.0
"""Weights of a sharded model: from a model with weights, from files, or initialized layer by layer.

No rank holds the whole model for it: a tensor, or the tensors of one layer, at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learnkit.comm.dtensor import (
    full_tensor,
    is_dtensor,
    local_shard,
    shard_rows,
    take_shard,
)
from learnkit.comm.ranks import Comm
from learnkit.core.errors import ModelError, WeightsError
from learnkit.core.random import preserved_rng


def list_tensors(model: nn.Module, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a module, with their names.

    >>> [name for name, _ in list_tensors(nn.Linear(1, 2))]
    ['weight', 'bias']
    """
    yield from model.named_parameters(recurse=recurse)
    yield from model.named_buffers(recurse=recurse)


def copy_on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters and buffers are on the meta device.

    >>> copy_on_meta(nn.Linear(1, 2)).weight
    Parameter containing:
    tensor(..., device='meta', size=(2, 1), requires_grad=True)
    """
    memo: dict[int, Any] = {}
    for t in chain(model.parameters(), model.buffers()):
        meta = torch.empty_like(t, device='meta')
        memo[id(t)] = nn.Parameter(meta, t.requires_grad) if isinstance(t, nn.Parameter) else meta
    return deepcopy(model, memo)


@torch.no_grad()
def fill(
    sharded: nn.Module,  # sharded model, with memory for its shards
    model: nn.Module,  # model of the same tensors; on some ranks, or on all, on the meta device
    are_empty: list[bool],  # whether the model of each rank is on the meta device
    world: Comm,
    weights: str | Path | None,  # safetensors file, or folder of them; None: see below
) -> None:
    """Initialize a sharded model, and empty the parameters of `model`, one at a time.

    The values are read from files if `weights` names them. Otherwise each rank keeps its own values, or receives the
    first rank's if it has no values. If the first rank has no values, each layer is initialized by its
    `reset_parameters` or `init_weights`, with the first rank's generator.

    Raises `ModelError` for a layer that cannot be initialized, and `WeightsError` for tensors that no file has."""
    targets = dict(list_tensors(sharded))
    if weights is not None:
        return _read(targets, Path(weights))
    sources = _initialize(model, world) if are_empty[0] else _move(model, world, any(are_empty))
    for name, value in sources:
        if name in targets:  # a tied parameter has one name
            put(targets[name], value)


@torch.no_grad()
def take_back(model: nn.Module, sharded: nn.Module) -> None:
    "Gather the values of a sharded model in `model`, one at a time, on the ranks where it is not on the meta device."
    shards = dict(list_tensors(sharded))
    for name, t in list_tensors(model):
        value = full_tensor(shards[name])
        if not t.is_meta:
            t.data = value.to(t.device)


def put(target: Tensor, value: Tensor) -> None:
    "Copy a full tensor, or this rank's shard of it, into a tensor of a sharded model."
    local_shard(target).copy_(take_shard(value, target) if is_dtensor(target) else value)


def _move(
    model: nn.Module,
    world: Comm,
    is_sent: bool,  # whether the first rank sends its values to the others
) -> Iterator[tuple[str, Tensor]]:
    "Yield the tensors of a model, or of the first rank's, and empty each parameter after it was taken."
    for name, t in list_tensors(model):
        value = t.detach()
        if is_sent:
            is_own = world.is_first
            value = value if is_own else torch.empty(t.shape, dtype=t.dtype)
            value = value.to(world.device).contiguous()
            dist.broadcast(value, 0)
        yield name, value
        if isinstance(t, nn.Parameter) and not t.is_meta:
            t.data = t.new_empty(0)
            t.grad = None


def _initialize(model: nn.Module, world: Comm) -> Iterator[tuple[str, Tensor]]:
    "Yield the tensors of a model on the meta device, initialized layer by layer, on all ranks equally."
    state = world.broadcast(torch.get_rng_state())
    with preserved_rng():
        torch.set_rng_state(state)
        # a copy, because tied parameters come apart
        for prefix, layer in copy_on_meta(model).named_modules():
            if any(True for _ in list_tensors(layer, recurse=False)):
                yield from _initialize_layer(prefix, layer)
        state = torch.get_rng_state()
    if world.is_first:
        torch.set_rng_state(state)


def _initialize_layer(prefix: str, layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    initialize = getattr(layer, 'reset_parameters', None) or getattr(layer, 'init_weights', None)
    if initialize is None:
        raise ModelError(
            f'{prefix or "The model"} ({type(layer).__name__}) is on the meta device and has neither '
            '`reset_parameters` nor `init_weights`: define one, or pass `weights=`, a safetensors file.'
        )
    layer.to_empty(device='cpu', recurse=False)
    initialize()
    dot = f'{prefix}.' if prefix else ''
    for name, t in list_tensors(layer, recurse=False):
        yield f'{dot}{name}', t.detach()
    layer.to_empty(device='meta', recurse=False)


def _read(targets: Mapping[str, Tensor], path: Path) -> None:
    "Read this rank's shards from safetensors files."
    from safetensors import safe_open

    files = sorted(path.glob('*.safetensors')) if path.is_dir() else [path]
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework='pt')) for file in files]
        where = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        missing = [name for name in targets if name not in where]
        if missing:
            raise WeightsError(
                f'{path} lacks {len(missing)} tensors of the model: {", ".join(missing[:5])}.'
            )
        for name, target in targets.items():
            values = where[name].get_slice(name)
            if list(values.get_shape()) != list(target.shape):
                raise WeightsError(
                    f'{path}: {name} is {values.get_shape()}, not {list(target.shape)}.'
                )
            local_shard(target).copy_(values[shard_rows(target)])
