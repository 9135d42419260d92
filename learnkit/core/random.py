# SPDX-License-Identifier: Apache-2.0
"""Capture and restore the states of the random generators that a training run draws from.

A captured state holds tensors and plain numbers in tuples and dicts, so that a checkpoint with the state loads with
`weights_only=True`. Neither capture nor restore initializes CUDA."""

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

from learnkit.core.batch import map_tensors
from learnkit.core.device import find_accelerator, find_used_accelerator
from learnkit.core.plain import map_plain

# attributes that torch itself sets in every module
MODULE_INTERNALS = frozenset(vars(nn.Module()))
# attributes of an optimizer that its `state_dict` covers
OPTIMIZER_INTERNALS = frozenset(('state', 'param_groups', 'defaults'))
RNGState = dict[str, Any]  # 'python', 'torch' and, if in use, 'numpy' and 'devices'


def capture_rng(
    devices: bool = True,  # capture accelerators, whose generators do not affect the order of data
) -> RNGState:
    """Return the states of the global generators: Python, torch, and, if in use, NumPy and all accelerators.

    >>> state = capture_rng()
    >>> drawn = torch.rand(3)
    >>> restore_rng(state)
    >>> torch.equal(torch.rand(3), drawn)
    True
    """
    state: RNGState = {'python': random.getstate()}
    np_random = sys.modules.get('numpy.random')
    if np_random is not None:
        state['numpy'] = _to_tensors(np_random.get_state(legacy=False))
    state['torch'] = torch.get_rng_state()
    accelerator = find_used_accelerator() if devices else None
    if accelerator is not None:
        module: Any = torch.get_device_module(accelerator)
        states = (module.get_rng_state(*number) for number in _number_devices())
        state['devices'] = {str(accelerator): tuple(states)}
    return state


def restore_rng(
    state: RNGState,  # return value of `capture_rng`, in this or another process
) -> None:
    """Restore the global generators; a generator without an entry in `state` is unchanged.

    States of missing devices are ignored."""
    if 'python' in state:
        version, words, gauss = state['python']
        random.setstate((version, tuple(words), gauss))
    if 'torch' in state:
        torch.set_rng_state(state['torch'].cpu())
    if 'numpy' in state:
        np.random.set_state(_to_arrays(state['numpy']))
    devices = state.get('devices', {})
    accelerator = find_accelerator() if devices else None
    if accelerator is not None:
        states = devices.get(str(accelerator), ())
        module: Any = torch.get_device_module(accelerator)
        for device_state, number in zip(states, _number_devices(), strict=False):
            module.set_rng_state(device_state.cpu(), *number)


def _number_devices() -> list[tuple[int, ...]]:
    "Return the argument for each device of the accelerator; none for a single device, as MPS takes none."
    n = torch.accelerator.device_count()
    return [()] if n == 1 else [(i,) for i in range(n)]


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore every global generator at the end of a block, even if the block raises an error.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> with preserved_rng(): _ = torch.rand(1)
    >>> a = torch.rand(1)
    >>> bool(a == torch.rand(1, generator=torch.Generator().manual_seed(0)))
    True
    """
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)


# -- generators of a loader ------------------------------------------------------------------------

# types of objects that are not searched for generators
_ATOMS = frozenset((int, float, complex, str, bytes, bool, NoneType))
_LEAVES = _ATOMS | {
    Tensor,
    np.ndarray,
    type,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    SystemRandom,
}
# attributes of callables that have no `__dict__` with these values
_CALLABLES = {MethodType: ('__self__',), partial: ('func', 'args', 'keywords')}


def draw_seed() -> int:
    "Draw a seed from torch's global generator."
    return int(torch.empty((), dtype=torch.int64).random_())


def seed_all(seed: int) -> None:
    "Seed the global generators of torch, of its devices, of Python and of NumPy."
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def own_generators(
    dl: Any,  # the loader
) -> dict[str, Any]:  # attribute path: generator; each generator once
    """Return the generators of a loader, its samplers, its data set and its transforms.

    The search follows all attributes and all entries of lists, tuples and dicts, and finds generators of torch, NumPy
    and Python.

    >>> from torch.utils.data import DataLoader
    >>> list(own_generators(DataLoader([1, 2], shuffle=True, generator=torch.Generator())))
    ['generator']
    """
    found: dict[str, Any] = {}
    seen = {id(dl)}
    objects = [('', dl)]
    kinds = _list_generator_types()
    for path, owner in objects:  # grows during the loop
        for place, key, value in _list_parts(owner):
            if id(value) in seen or _is_row_of_leaves(value):
                continue
            seen.add(id(value))
            name = (path + place.format(key)).removeprefix('.')
            if isinstance(value, kinds):
                found[name] = value
            else:
                objects.append((name, value))
    return found


def _is_row_of_leaves(value: Any) -> bool:
    "Return True for a container of objects without parts, as data sets have by the million."
    cls = type(value)
    if cls is tuple or cls is list:
        return _LEAVES.issuperset(map(type, value))
    return cls is dict and _LEAVES.issuperset(map(type, value.values()))


def _list_parts(owner: Any) -> list[tuple[str, Any, Any]]:
    "Return (format of the place, key, value) of the attributes and entries of an object that may have parts."
    parts: list[tuple[str, Any, Any]] = []
    base = next((b for b in (dict, list, tuple) if isinstance(owner, b)), None)
    if base is not None:
        # methods of the base class, because iterating over a subclass may start a loader
        items = dict.items(owner) if base is dict else enumerate(base.__iter__(owner))
        # a copy, since threads of a loader may change it
        parts = [('[{!r}]', k, v) for k, v in list(items) if type(v) not in _LEAVES]
    attributes = getattr(owner, '__dict__', None)
    if type(owner) in _CALLABLES:
        attributes = {name: getattr(owner, name) for name in _CALLABLES[type(owner)]}
    if type(attributes) is not dict:
        return parts
    if isinstance(owner, nn.Module):
        own = {k: v for k, v in attributes.items() if k not in MODULE_INTERNALS}
        attributes = own | attributes['_modules']
    elif isinstance(owner, torch.optim.Optimizer):
        attributes = {k: v for k, v in attributes.items() if k not in OPTIMIZER_INTERNALS}
    for k, value in list(attributes.items()):
        # the iterator of a DataLoader refers to parts of the loader, and `learn` of a callback to all objects
        if type(value) not in _LEAVES and k not in ('_iterator', 'learn'):
            parts.append(('.{}', k, value))
    return parts


def _list_generator_types() -> tuple[type, ...]:
    "Return the classes of generators, without importing numpy.random."
    np_random = sys.modules.get('numpy.random')
    if np_random is None:
        return torch.Generator, Random
    numpy_types = np_random.Generator, np_random.RandomState, np_random.BitGenerator
    return torch.Generator, Random, *numpy_types


def capture_own(dl: Any) -> dict[str, tuple[str, Any]]:
    "Return the (kind, state) of each generator that `own_generators` finds, by attribute path."
    return {name: capture_generator(g) for name, g in own_generators(dl).items()}


def restore_own(
    dl: Any,
    states: dict[str, tuple[str, Any]],  # return value of `capture_own` of an equal loader
) -> list[str]:  # paths of generators that this loader lacks
    "Restore the generators that `own_generators` finds."
    found = own_generators(dl)
    return [path for path, state in states.items() if not restore_generator(found.get(path), state)]


@contextmanager
def preserved_generators(dl: Any) -> Iterator[None]:
    "Restore the generators that `own_generators` finds at the end of a block."
    states = [(g, capture_generator(g)) for g in own_generators(dl).values()]
    try:
        yield
    finally:
        for g, state in states:
            restore_generator(g, state)


def state_setter(o: Any) -> Callable[[], object] | None:
    "Return a function that restores the current state of a generator, or None for any other object."
    if isinstance(o, _list_generator_types()) and not isinstance(o, SystemRandom):
        return partial(restore_generator, o, capture_generator(o))
    return None


def capture_generator(g: Any) -> tuple[str, Any]:
    "Return the (kind, state) of a generator, as tensors and plain numbers."
    g = getattr(g, 'bit_generator', g)  # NumPy's Generator has no state
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
    "Copy a nested state of NumPy: arrays become tensors, and NumPy scalars Python numbers."

    def convert(value: Any, where: str) -> Any:
        if not hasattr(value, 'dtype'):
            return value
        return torch.from_numpy(value.copy()) if value.ndim else value.item()

    return map_plain(state, convert)


def _to_arrays(state: Any) -> Any:
    "Convert a state that `_to_tensors` returned back to NumPy's arrays."
    return map_tensors(state, lambda t: t.cpu().numpy())
