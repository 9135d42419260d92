"""State of a loader that is not a `state_dict`: random generators and epoch numbers of the loader and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from learnkit.core.random import capture_own, restore_own

State = dict[str, Any]  # 'own': generators, 'epochs', each by attribute path


def capture_loader_state(dl: Any) -> State:
    """Return the generators and epoch numbers of a loader, its samplers and its data set.

    >>> from torch.utils.data import DataLoader, DistributedSampler
    >>> sampler = DistributedSampler(range(4), num_replicas=2, rank=0)
    >>> sampler.set_epoch(3)
    >>> capture_loader_state(DataLoader(range(4), sampler=sampler))
    {'own': {}, 'epochs': {'sampler': 3}}
    """
    epochs = {path: getattr(part, 'epoch', None) for path, part in list_parts(dl)}
    epochs = {path: epoch for path, epoch in epochs.items() if type(epoch) is int}
    return {'own': capture_own(dl), 'epochs': epochs}


def restore_loader_state(
    dl: Any,
    state: Mapping[str, Any],  # return value of `capture_loader_state` of a loader made alike
) -> list[str]:  # names of generators that this loader lacks
    "Restore a loader's state. An epoch number is set by `set_epoch` if its owner has that method."
    epochs = state.get('epochs', {})
    for path, part in list_parts(dl):
        epoch = epochs.get(path)
        if epoch is None or epoch == getattr(part, 'epoch', epoch):
            continue
        if hasattr(part, 'set_epoch'):
            part.set_epoch(epoch)
        else:
            with suppress(AttributeError):
                part.epoch = epoch  # a read-only property raises
    return restore_own(dl, state.get('own', {}))


def list_parts(dl: Any) -> list[tuple[str, Any]]:
    "Return (attribute path, object) of a loader, its samplers and its data set, each once."
    parts = [('', dl)]
    for path, owner in parts:  # grows during the loop
        for name in ('sampler', 'batch_sampler', 'dataset'):
            part = getattr(owner, '__dict__', {}).get(name)
            if part is not None and all(part is not known for _, known in parts):
                parts.append((f'{path}.{name}'.removeprefix('.'), part))
    return parts
