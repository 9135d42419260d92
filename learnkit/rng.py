"""Capture and restore every random generator that a training run draws from.

A captured state holds tensors and plain numbers in tuples and dicts, so that a checkpoint can carry it and be loaded
with `weights_only=True`. Capturing and restoring never initialise CUDA."""
from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ['RNGState', 'capture_rng', 'restore_rng', 'preserved_rng', 'preserved_generators']

RNGState = dict[str, Any]  # 'python', 'torch' and, where in use, 'numpy', 'cuda', 'mps'


def capture_rng() -> RNGState:
    """Return the states of the global generators of Python, torch, and where in use NumPy, every CUDA device and MPS.

    >>> state = capture_rng()
    >>> drawn = torch.rand(3)
    >>> restore_rng(state)
    >>> torch.equal(torch.rand(3), drawn)
    True
    """
    state: RNGState = {'python': random.getstate(), 'torch': torch.get_rng_state()}
    if (np_random := sys.modules.get('numpy.random')) is not None:
        state['numpy'] = _map_arrays(np_random.get_state(legacy=False), _to_tensor)
    if torch.cuda.is_initialized(): state['cuda'] = tuple(torch.cuda.get_rng_state_all())
    if torch.backends.mps.is_available(): state['mps'] = torch.mps.get_rng_state()
    return state


def restore_rng(
    state: RNGState,  # from `capture_rng`, of this process or of another one
) -> None:
    """Put the generators back to `state`; those that it does not hold keep theirs.

    A CUDA state takes effect when CUDA is initialised; those of devices that this machine lacks are left out."""
    version, words, gauss = state['python']
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state['torch'].cpu())
    if 'numpy' in state:
        import numpy as np
        np.random.set_state(_map_arrays(state['numpy'], _to_array))

    if 'cuda' in state:
        for i, device_state in enumerate(state['cuda'][:torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state.cpu(), i)
    if 'mps' in state and torch.backends.mps.is_available(): torch.mps.set_rng_state(state['mps'].cpu())


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Leave every generator after the block as it was before it, also when the block raises.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> with preserved_rng(): _ = torch.rand(1)
    >>> a = torch.rand(1)
    >>> bool(a == torch.rand(1, generator=torch.Generator().manual_seed(0)))
    True
    """
    state = capture_rng()
    try: yield
    finally: restore_rng(state)


@contextmanager
def preserved_generators(dl: Any) -> Iterator[None]:
    "Leave a loader's own generators, and its sampler's, after the block as they were before it."
    owners = (dl, getattr(dl, 'sampler', None), getattr(getattr(dl, 'batch_sampler', None), 'sampler', None))
    generators = [getattr(o, 'generator', None) for o in owners]
    states = [(g, g.get_state()) for g in generators if isinstance(g, torch.Generator)]
    try: yield
    finally:
        for g, state in states: g.set_state(state)


def _map_arrays(state: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    "Return NumPy's nested state with `convert` applied to what is no dict."
    return {k: _map_arrays(v, convert) if isinstance(v, dict) else convert(v) for k, v in state.items()}


def _to_tensor(value: Any) -> Any:
    "Return an array as a tensor of its own and a NumPy scalar as a Python number."
    if not hasattr(value, 'dtype'): return value
    return torch.from_numpy(value.copy()) if value.ndim else value.item()


def _to_array(value: Any) -> Any:
    "Return a tensor as an array, anything else as it is."
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value
