# SPDX-License-Identifier: Apache-2.0
"""Comparison of models, data and options over ranks, before and during a training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from learnkit.comm.dtensor import is_dtensor
from learnkit.comm.ranks import Comm
from learnkit.core.errors import DistributedError, ModelError
from learnkit.core.model import bare_model, is_on_meta
from learnkit.data.dataloaders import TensorLoader, evaluation_loaders, n_batches
from learnkit.distributed.ddp import broadcast_tensors
from learnkit.distributed.initialize import list_tensors

if TYPE_CHECKING:
    from learnkit.learner import Learner


def check_bare(model: nn.Module) -> None:
    "Raise `ModelError` for a model that is wrapped for several processes already."
    for m in model.modules():
        if isinstance(m, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise ModelError(
                f'The model is a {type(m).__name__}, or has one in it: pass the bare model (`model.module`) to the '
                'Learner, and the options to `learn.distributed()`.'
            )


def describe_loaders(dls: Any) -> dict[str, str]:
    "Return descriptions of the numbers of batches and samples of the loaders, and of the choice of samples, by name."
    described = {}
    for name, dl in [('train', dls.train), *evaluation_loaders(dls)]:
        dataset = getattr(dl, 'dataset', None)
        n = dl.n if isinstance(dl, TensorLoader) else n_batches(dataset)
        text = f'{n_batches(dl)} batches of {n} samples'
        indices = getattr(dataset, 'indices', None)  # of a Subset, as `random_split` returns it
        if isinstance(indices, (list, range, Tensor)):
            text += f' (choice {crc32(np.asarray(indices).tobytes())})'
        described[f'{name} loader'] = text
    return described


def list_model_tensors(learn: Learner) -> dict[str, Tensor]:
    "Return the parameters and buffers of the model and of the loss function, by name."
    model = bare_model(learn.model)
    loss_func = learn.loss_func
    own = loss_func.state_dict(keep_vars=True) if isinstance(loss_func, nn.Module) else {}
    return {
        **dict(list_tensors(model)),
        **{f'loss_func.{name}': t for name, t in own.items()},
    }


def list_optimizer_tensors(learn: Learner) -> dict[str, Tensor]:
    "Return the tensors of the optimizer's state, by name."
    if learn.opt is None:
        return {}
    names = {t: name for name, t in list_model_tensors(learn).items()}
    found: dict[str, Tensor] = {}
    for i, (p, state) in enumerate(learn.opt.state.items()):
        if isinstance(p, Tensor):
            name = names.get(p, f'parameter {i}')
            entries = state if isinstance(state, Mapping) else {'state': state}
            found |= {f'{k} of {name}': v for k, v in entries.items() if isinstance(v, Tensor)}
        elif isinstance(state, Tensor):
            found[f'entry {p!r} of the optimizer'] = state
    return found


def check_alike(
    learn: Learner,
    world: Comm,  # process group
    descriptions: dict[str, str],  # descriptions of data and options, by name
) -> None:
    """Compare the ranks, and broadcast the first rank's weights and optimizer state.

    Raises `DistributedError` if models, data or options differ."""
    tensors = list_model_tensors(learn)
    state = list_optimizer_tensors(learn)
    own = {name: f'{t.dtype} {tuple(t.shape)}' for name, t in (tensors | state).items()}
    own['validation loaders'] = ', '.join(name for name, _ in evaluation_loaders(learn.dls))
    differences = [
        f'{name}: {first} in process 0, {other} in process {rank}'
        for name, rank, first, other in find_differences(world, own | descriptions)
    ]
    if differences:
        raise DistributedError(
            'The processes do not have the same model, data and options:\n  '
            + '\n  '.join(differences[:10])
        )
    if not any(world.gather(is_on_meta(learn.model))):
        broadcast_tensors([*tensors.values(), *state.values()], world.control)


@torch.no_grad()
def compute_totals(tensors: Iterable[Tensor]) -> tuple[float, float]:
    "Return the sum of all numbers and the sum of their magnitudes, to compare the weights of ranks."
    totals = torch.zeros(2, dtype=torch.float64)
    for t in tensors:
        numbers = torch.view_as_real(t) if t.is_complex() else t
        sums = [numbers.sum(dtype=torch.float64), numbers.abs().sum(dtype=torch.float64)]
        totals += torch.stack(sums).cpu()
    total, magnitude = totals.nan_to_num(nan=0.0).tolist()
    return total, magnitude


def check_replicas(learn: Learner) -> None:
    "Raise `DistributedError` if weights, buffers or optimizer states differ between ranks."
    tensors = list_model_tensors(learn) | list_optimizer_tensors(learn)
    # shards differ between ranks
    own = {name: compute_checksum(t) for name, t in tensors.items() if not is_dtensor(t)}
    names = [f'{name} (process {rank})' for name, rank, *_ in find_differences(learn.world, own)]
    if names:
        raise DistributedError(
            f'{len(names)} tensors are not as in process 0: {", ".join(names[:10])}. Something changes them in one '
            'process alone, or gradients were not averaged: the gradients of parameters that were unfrozen within an '
            'epoch, or of a second backward pass of a batch.'
        )


def find_differences(world: Comm, own: dict[str, Any]) -> list[tuple[str, int, Any, Any]]:
    "Return name, rank, the first rank's value and the rank's value of each value that differs from the first rank's."
    first, *others = world.gather(own)
    return [
        (name, rank, first.get(name, 'absent'), other.get(name, 'absent'))
        for rank, other in enumerate(others, 1)
        for name in dict.fromkeys((*first, *other))
        if other.get(name) != first.get(name)
    ]


def compute_checksum(t: Tensor) -> int:
    "Return the CRC-32 of a tensor's bytes."
    return crc32(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
