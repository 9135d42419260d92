"""Capture and restore of every random generator that a training run draws from.

A captured state holds tensors and plain numbers in tuples and dicts, so that a checkpoint with the state loads with
`weights_only=True`. Capture and restore never initialize CUDA."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random, SystemRandom
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    'RNGState',
    'capture_rng',
    'restore_rng',
    'same_states',
    'preserved_rng',
    'own_generators',
    'capture_own',
    'capture_generator',
    'restore_generator',
    'restore_own',
    'preserved_generators',
    'state_setter',
]

RNGState = dict[str, Any]  # 'python', 'torch' and, if in use, 'numpy', 'cuda', 'mps'


def capture_rng(
    devices: bool = True,  # whether to capture CUDA and MPS, which do not draw the order of data
    with_torch: bool = True,  # whether to capture the generators of torch
) -> RNGState:
    """Return the states of the global generators of Python and torch, and of NumPy, all CUDA devices and MPS if in use.

    >>> state = capture_rng()
    >>> drawn = torch.rand(3)
    >>> restore_rng(state)
    >>> torch.equal(torch.rand(3), drawn)
    True
    """
    state: RNGState = {'python': random.getstate()}
    if (np_random := sys.modules.get('numpy.random')) is not None:
        state['numpy'] = _to_tensors(np_random.get_state(legacy=False))
    if not with_torch:
        return state
    state['torch'] = torch.get_rng_state()
    if devices and torch.cuda.is_initialized():
        state['cuda'] = tuple(torch.cuda.get_rng_state_all())
    if devices and torch.backends.mps.is_available():
        state['mps'] = torch.mps.get_rng_state()
    return state


def restore_rng(
    state: RNGState,  # return value of `capture_rng`, also of another process
) -> None:
    """Restore the global generators; generators that `state` does not contain are unchanged.

    A CUDA state takes effect when CUDA is initialized. States of missing devices are ignored."""
    version, words, gauss = state['python']
    random.setstate((version, tuple(words), gauss))
    if 'torch' in state:
        torch.set_rng_state(state['torch'].cpu())
    if 'numpy' in state:
        np.random.set_state(_to_arrays(state['numpy']))
    if 'cuda' in state:
        for i, device_state in enumerate(state['cuda'][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state.cpu(), i)
    if 'mps' in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state['mps'].cpu())


def same_states(a: Any, b: Any) -> bool:
    "Return True if two captured states, or parts of states, are equal."
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_states(a[k], b[k]) for k in a)
    if isinstance(a, tuple) and a and isinstance(a[0], Tensor):
        return all(map(same_states, a, b))
    return bool(a == b)


@contextmanager
def preserved_rng(
    with_torch: bool = True,  # whether to restore the generators of torch
) -> Iterator[None]:
    """Restore every global generator at the end of the block, also if the block raises.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> with preserved_rng(): _ = torch.rand(1)
    >>> a = torch.rand(1)
    >>> bool(a == torch.rand(1, generator=torch.Generator().manual_seed(0)))
    True
    """
    state = capture_rng(with_torch=with_torch)
    try:
        yield
    finally:
        restore_rng(state)


# -- the generators of a loader --------------------------------------------------------------------

_LEAVES = frozenset(
    {
        int,
        float,
        complex,
        str,
        bytes,
        bool,
        NoneType,
        Tensor,
        type,
        ModuleType,
        FunctionType,
        BuiltinFunctionType,
        range,
        slice,
        torch.dtype,
        torch.device,
        SystemRandom,
    }
)
_CALLS = {MethodType: ('__self__',), partial: ('func', 'args', 'keywords')}
# limits of the search: depth including containers, number of objects, entries of a container
_DEEPEST = 7
_MOST = 200
_LONGEST = 32


def own_generators(
    dl: Any,  # the loader
) -> dict[str, Any]:  # generators by attribute path, each once
    """Return the generators of a loader, its samplers, its data set and transforms.

    Generators of torch, NumPy and Python are found by following attributes and short lists or dicts. The search stops
    after a limited number of objects.

    >>> from torch.utils.data import DataLoader
    >>> list(own_generators(DataLoader([1, 2], shuffle=True, generator=torch.Generator())))
    ['generator']
    """
    found: dict[str, Any] = {}
    seen = {id(dl)}
    objects = [('', dl)]
    kinds = _generator_types()
    for _ in range(_DEEPEST):
        inner: list[tuple[str, Any]] = []
        for path, owner in objects:
            for name, value in _parts(path, owner):
                if type(value) in _LEAVES or id(value) in seen:
                    continue
                seen.add(id(value))
                if isinstance(value, kinds):
                    found[name] = value
                elif len(seen) < _MOST:
                    inner.append((name, value))
        if not inner:
            break
        objects = inner
    return found


def _parts(path: str, owner: Any) -> Iterator[tuple[str, Any]]:
    "Yield (path, value) of an object's attributes, or of the entries of a short container."
    base = next((b for b in (dict, list, tuple) if isinstance(owner, b)), None)
    if base is not None:
        # methods of the base class, because iterating a subclass may start a loader
        items = dict.items(owner) if base is dict else enumerate(base.__iter__(owner))
        if base.__len__(owner) <= _LONGEST:
            for k, value in items:
                yield f'{path}[{k!r}]', value
    own = getattr(owner, '__dict__', None)
    if type(owner) in _CALLS:
        own = {name: getattr(owner, name) for name in _CALLS[type(owner)]}
    if type(own) is not dict:
        return
    dot = path and f'{path}.'
    if isinstance(owner, nn.Module):
        own = {k: v for k, v in own.items() if k[0] != '_'} | own['_modules']
    for k, value in own.items():
        # the iterator of a DataLoader refers to parts of the loader, a callback to everything
        if k not in ('_iterator', 'learn'):
            yield f'{dot}{k}', value


def _generator_types() -> tuple[type, ...]:
    "Return the classes of generators; numpy.random is not imported for them."
    np_random = sys.modules.get('numpy.random')
    if np_random is None:
        return torch.Generator, Random
    of_numpy = np_random.Generator, np_random.RandomState, np_random.BitGenerator
    return torch.Generator, Random, *of_numpy


def capture_own(dl: Any) -> dict[str, tuple[str, Any]]:
    "Return (kind, state) of each of a loader's own generators, as tensors and plain numbers."
    return {name: capture_generator(g) for name, g in own_generators(dl).items()}


def restore_own(
    dl: Any,
    states: dict[str, tuple[str, Any]],  # return value of `capture_own` of a loader made alike
) -> list[str]:  # names of generators that this loader lacks
    "Restore a loader's own generators."
    own = own_generators(dl)
    return [name for name, state in states.items() if not restore_generator(own.get(name), state)]


@contextmanager
def preserved_generators(dl: Any) -> Iterator[None]:
    "Restore the generators of a loader, its samplers and its data set at the end of the block."
    states = [(g, capture_generator(g)) for g in own_generators(dl).values()]
    try:
        yield
    finally:
        for g, state in states:
            restore_generator(g, state)


def state_setter(o: Any) -> Callable[[], object] | None:
    "Return a function that restores a random generator's current state, or None for other objects."
    if isinstance(o, _generator_types()) and not isinstance(o, SystemRandom):
        return partial(restore_generator, o, capture_generator(o))
    return None


def capture_generator(g: Any) -> tuple[str, Any]:
    "Return (kind, state) of a generator, as tensors and plain numbers."
    g = getattr(g, 'bit_generator', g)  # of NumPy's Generator
    state: Any
    if isinstance(g, torch.Generator):
        state = g.get_state()
    elif isinstance(g, Random):
        state = g.getstate()
    else:
        state = _to_tensors(g.get_state(legacy=False) if hasattr(g, 'get_state') else g.state)
    return _name_kind(g), state


def restore_generator(
    g: Any,
    captured: tuple[str, Any],  # return value of `capture_generator`
) -> bool:
    "Restore a generator and return True, or return False for an object of another kind."
    kind, state = captured
    g = getattr(g, 'bit_generator', g)
    if _name_kind(g) != kind:
        return False
    if isinstance(g, torch.Generator):
        g.set_state(state.cpu())
    elif isinstance(g, Random):
        g.setstate((state[0], tuple(state[1]), state[2]))
    elif hasattr(g, 'set_state'):
        g.set_state(_to_arrays(state))
    else:
        g.state = _to_arrays(state)
    return True


def _name_kind(g: Any) -> str:
    cls = type(g)
    return f'{cls.__module__.partition(".")[0]}.{cls.__name__}'


def _to_tensors(state: Any) -> Any:
    "Copy NumPy's nested state, with tensors for arrays and Python numbers for NumPy scalars."
    if isinstance(state, dict):
        return {k: _to_tensors(v) for k, v in state.items()}
    if not hasattr(state, 'dtype'):
        return state
    return torch.from_numpy(state.copy()) if state.ndim else state.item()


def _to_arrays(state: Any) -> Any:
    "Invert `_to_tensors`."
    if isinstance(state, dict):
        return {k: _to_arrays(v) for k, v in state.items()}
    return state.cpu().numpy() if isinstance(state, Tensor) else state
