"""What a loader says of its state, as a file can hold it and `torch.load(weights_only=True)` gives it back."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learnkit.errors import CheckpointError

__all__ = ['as_loadable', 'from_loadable']

_ARRAY = '__array__'  # the name under which a tensor stands for an array


def as_loadable(value: Any, where: str) -> Any:
    "Return a state made of what loads safely, arrays as marked tensors; raise `CheckpointError` for anything else."
    if isinstance(value, np.generic): value = value.item()
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)): return value
    if isinstance(value, Tensor): return value.detach().clone()
    if isinstance(value, np.ndarray) and value.dtype.kind in 'biufc': return {_ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, Mapping): return {k: as_loadable(v, f'{where}[{k!r}]') for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [as_loadable(v, f'{where}[{i}]') for i, v in enumerate(value)]
        return entries if isinstance(value, list) else tuple(entries)
    raise CheckpointError(f'{where} is a {type(value).__name__}, which would not load safely. Let the loader, its '
                          'sampler and its data set keep tensors, arrays, numbers, texts, and lists, tuples or dicts '
                          'of them.')


def from_loadable(value: Any) -> Any:
    "Return what `as_loadable` was given."
    if isinstance(value, Tensor): return value.clone()
    if isinstance(value, dict): return value[_ARRAY].numpy().copy() if _ARRAY in value else {
        k: from_loadable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)): return type(value)(map(from_loadable, value))
    return value
