"""What must be alike in all processes before they train together: models, data and options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from learnkit.core.comm import Comm
from learnkit.core.dtensor import is_dtensor
from learnkit.core.errors import DistributedError, ModelError
from learnkit.core.learner_type import LearnerLike
from learnkit.core.model import bare_model
from learnkit.data.dataloaders import TensorLoader, evaluation_loaders, n_batches
from learnkit.distributed.ddp import share_first

__all__ = [
    'check_alike',
    'check_bare',
    'check_replicas',
    'checksum',
    'totals_differ',
    'list_lengths',
    'optimizer_state',
    'compute_totals',
    'what_is_trained',
]


def check_bare(model: nn.Module) -> None:
    "Raise `ModelError` for a model that somebody else has prepared for several processes."
    kinds = {type(m).__name__ for m in model.modules()}
    if known := sorted(
        kinds & {'DistributedDataParallel', 'DataParallel', 'FullyShardedDataParallel'}
    ):
        raise ModelError(
            f'The model is a {known[0]}, or has one in it: give the bare model (`model.module`) to the '
            'Learner, and the options to `learn.distributed()`.'
        )


def list_lengths(dls: Any) -> dict[str, str]:
    "Return how long each loader is, in words."

    def told(dl: Any) -> str:
        n = (
            getattr(dl, 'n', None)
            if isinstance(dl, TensorLoader)
            else n_batches(getattr(dl, 'dataset', None))
        )
        # of a Subset, as `random_split` makes them
        chosen = getattr(getattr(dl, 'dataset', None), 'indices', None)
        which = (
            f' (choice {crc32(np.asarray(chosen).tobytes())})'
            if isinstance(chosen, (list, range, Tensor))
            else ''
        )
        return f'{n_batches(dl)} batches' + (f' of {n} samples{which}' if n is not None else '')

    return {
        f'{name} loader': told(dl) for name, dl in [('train', dls.train), *evaluation_loaders(dls)]
    }


def what_is_trained(learn: LearnerLike) -> dict[str, Tensor]:
    "Return the parameters and buffers of the model and of the loss function, by name."
    model, loss_func = bare_model(learn.model), learn.loss_func
    own = loss_func.state_dict(keep_vars=True) if isinstance(loss_func, nn.Module) else {}
    return {
        **dict(model.named_parameters()),
        **dict(model.named_buffers()),
        **{f'loss_func.{name}': t for name, t in own.items()},
    }


def optimizer_state(learn: LearnerLike) -> dict[str, Tensor]:
    "Return the tensors of the optimizer's state, by name."
    if learn.opt is None:
        return {}
    names = {t: name for name, t in what_is_trained(learn).items()}
    return {
        f'{key} of {names.get(p, f"parameter {i}")}': value
        for i, (p, state) in enumerate(learn.opt.state.items())
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def check_alike(
    learn: LearnerLike,
    world: Comm,
    told: dict[str, str],  # of data and options, for comparison
) -> None:
    """Give every process the first one's weights, and its optimizer's state.

    Raises `DistributedError` where models, data or options are not alike."""
    tensors, state = what_is_trained(learn), optimizer_state(learn)
    mine = {name: f'{t.dtype} {tuple(t.shape)}' for name, t in (tensors | state).items()}
    mine['validation loaders'] = ', '.join(name for name, _ in evaluation_loaders(learn.dls))
    mine |= told
    same = len(set(world.gather(crc32(repr(mine).encode())))) == 1
    first, *others = [mine] if same else world.gather(mine)
    for rank, theirs in enumerate(others, 1):
        unlike = [
            f'{k}: {first.get(k, "absent")} in process 0, {theirs.get(k, "absent")} in process {rank}'
            for k in dict.fromkeys((*first, *theirs))
            if theirs.get(k) != first.get(k)
        ]
        if unlike:
            raise DistributedError(
                'The processes do not have the same model, data and options:\n  '
                + '\n  '.join(unlike[:10])
            )
    share_first(tensors.values(), world.control)
    if totals_differ(world.gather(compute_totals(state.values()))):
        share_first(state.values(), world.control)


@torch.no_grad()
def compute_totals(tensors: Iterable[Tensor]) -> tuple[float, float]:
    "Return the sum of all numbers, and that of their magnitudes, which tell different weights apart."
    real = [
        torch.view_as_real(t) if t.is_complex() else t if t.is_floating_point() else t.double()
        for t in tensors
        if t.numel()
    ]
    if not real:
        return 0.0, 0.0
    sums = [
        torch.stack(
            [t.sum(dtype=torch.float64), torch.linalg.vector_norm(t, 1, dtype=torch.float64)]
        )
        for t in real
    ]
    total, size = (
        torch.stack([t.to(sums[0].device) for t in sums]).sum(0).nan_to_num(nan=0.0).tolist()
    )
    return total, size


def totals_differ(totals: Iterable[Sequence[float]]) -> bool:
    "Tell whether models are not the same by their totals, beyond what other hardware would round otherwise."
    sums, sizes = zip(*totals, strict=True)
    return max(sums) - min(sums) > 1e-6 * max(sizes)


def check_replicas(learn: LearnerLike) -> None:
    "Compare weights, buffers and the optimizer's state of all processes; raise `DistributedError`."
    sums = {name: checksum(t) for name, t in replicated_tensors(learn)}
    everyone = learn.world.gather(sums)
    differ = [
        f'{name} (process {rank})'
        for rank, theirs in enumerate(everyone)
        for name in sorted({*theirs, *everyone[0]})
        if theirs.get(name) != everyone[0].get(name)
    ]
    if differ:
        more = ', ...' if len(differ) > 10 else ''
        raise DistributedError(
            f'{len(differ)} tensors are not as in process 0: {", ".join(differ[:10])}{more}. '
            'Something changes them in one process alone, or gradients were not averaged: those of '
            'parameters that were unfrozen within an epoch, or of a second backward pass of a batch.'
        )


def replicated_tensors(learn: LearnerLike) -> Iterator[tuple[str, Tensor]]:
    "Yield the tensors that must be the same in every process, with their names."
    for name, t in (what_is_trained(learn) | optimizer_state(learn)).items():
        if not is_dtensor(t):
            yield name, t


def checksum(t: Tensor) -> int:
    "Return a number that differs for tensors of different bytes, as good as always."
    t = t.detach()
    if t.layout is not torch.strided:
        t = t.to_dense()
    return crc32(t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
