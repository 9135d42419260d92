# SPDX-License-Identifier: Apache-2.0
"""Rehearse a resume at the first checkpoint of a fit: find what has changed since its start and no checkpoint holds.

A resumed process makes its objects as they were at the fit's start. An attribute that differs now, and that the state
does not contain, would be lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from operator import length_hint
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.data import Sampler

from learnkit.core.model import bare_model
from learnkit.core.plain import ATOMS
from learnkit.core.random import MODULE_INTERNALS, state_setter
from learnkit.data.loader_state import find_own_parts
from learnkit.data.shard import Shard
from learnkit.engine.callback import declared
from learnkit.engine.callback_state import keeps_attributes, lost_attributes

if TYPE_CHECKING:
    from learnkit.learner import Learner

# by the name of an attribute: its fingerprint, and what to do
Inventory = dict[str, tuple[Any, str]]

_IN_MODULE = 'make it a buffer, or save it by `get_extra_state`'
_IN_DATA = 'harmless if it only caches what would be computed again'
_IN_CALLBACK = 'give the callback `state_dict` and `load_state_dict`'
_IN_LOSS = 'make the loss an `nn.Module`, and this a buffer of it'
_DEEPEST = 6  # levels of objects in an attribute
_LONGEST = 100  # entries of a container, of which all are compared
_ENDS = 8  # first and last entries of a longer one
_LARGEST = 1 << 20  # bytes of an array whose content is compared
_MOST = 5000  # objects of an attribute that are compared
# packages whose objects are not searched
_LIBRARIES = frozenset('torch learnkit fastai datasets transformers peft timm diffusers'.split())
_LAZY = 'lazy'  # mark of a module that gets its sizes at the first batch
_NONE = (None, '')
_SKIPPED = (
    type,
    ModuleType,
    torch.device,
    torch.dtype,
    nn.Parameter,
    LazyModuleMixin,
)


def take_inventory(learn: Learner) -> Inventory:
    "Return a fingerprint of each attribute that no checkpoint holds: of modules, the data, and callbacks."
    found: Inventory = {}
    model = bare_model(learn.model)
    loss = learn.loss_func
    found |= _list_module(model, 'model')
    if isinstance(loss, nn.Module):
        found |= _list_module(loss, 'loss_func')
    elif loss is not None:
        found['loss_func'] = fingerprint(loss), _IN_LOSS
    found |= _list_data(learn.dls.train)
    held = {id(m) for m in model.modules()}
    for cb in filter(keeps_attributes, learn.cbs):
        for name, value in {**lost_attributes(cb), **_find_modules(cb, held)}.items():
            found[f'{type(cb).__name__}.{name}'] = fingerprint(value), _IN_CALLBACK
    for cb in learn.cbs:
        for name in declared(cb, 'saved_of_model', tuple)():
            found.pop(name, None)
    return found


def find_lost(before: Inventory, now: Inventory) -> list[str]:
    "Return a line for each attribute that has changed or is new, with what to do."
    lost = []
    for name, (mark, fix) in now.items():
        is_of_lazy = before.get(name.rpartition('.')[0], _NONE)[0] == _LAZY
        if not is_of_lazy and before.get(name, _NONE)[0] != mark:
            lost.append(f'{name}: {fix}')
    return lost


def _list_module(module: nn.Module, root: str) -> Inventory:
    "Return the attributes of a module and its parts, without parameters, buffers and modules."
    found: Inventory = {}
    for path, m in module.named_modules():
        if isinstance(m, LazyModuleMixin):
            found['.'.join(filter(None, (root, path)))] = _LAZY, ''
            continue
        if _saves_itself(m):
            continue
        for name, value in vars(m).items():
            place = '.'.join(filter(None, (root, path, name)))
            if state_setter(value) is not None:
                found[place] = '', 'make the generator in `__init__`'
            elif name not in MODULE_INTERNALS and not _is_made_by_torch(m, name, value):
                found[place] = fingerprint(value), _IN_MODULE
    return found


def _saves_itself(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _is_made_by_torch(module: nn.Module, name: str, value: Any) -> bool:
    "Return True for what torch caches in its modules, and for parts that a checkpoint holds."
    is_cache = name.startswith('_') and type(module).__module__.startswith('torch.')
    return is_cache or isinstance(value, (nn.Module, nn.Parameter))


def _list_data(dl: Any) -> Inventory:
    "Return the attributes of the data set, the collate function and a loader of the user's."
    dl = dl.source if isinstance(dl, Shard) else dl
    if hasattr(type(dl), 'load_state_dict'):
        return {}
    counted = {id(part) for _, part in find_own_parts(dl)}
    found: Inventory = {}
    for root in ('', 'dataset', 'collate_fn'):
        owner = getattr(dl, root, None) if root else dl
        attributes = getattr(owner, '__dict__', None)
        if isinstance(owner, FunctionType):
            found[root] = fingerprint(owner), _IN_DATA
        if attributes is None or (root and _is_foreign(owner)):
            continue
        if _is_foreign(owner):
            attributes = {k: v for k, v in attributes.items() if isinstance(v, Sampler)}
        for name, value in attributes.items():
            is_number = id(owner) in counted and type(value) in ATOMS
            if isinstance(value, Sampler):
                found |= _list_sampler(value, name)
            elif not is_number and name not in ('dataset', '_iterator'):
                place = '.'.join(filter(None, ('training loader', root, name)))
                found[place] = fingerprint(value), _IN_DATA
    return found


def _list_sampler(sampler: Any, place: str) -> Inventory:
    "Return how often the tensors of a sampler were changed in place; others are drawn again from its generators."
    tensors = {k: t for k, t in getattr(sampler, '__dict__', {}).items() if isinstance(t, Tensor)}
    fix = 'keep it in a callback that has `state_dict`'
    return {f'{place}.{name}': (t._version, fix) for name, t in tensors.items()}


def _is_foreign(owner: Any) -> bool:
    return type(owner).__module__.partition('.')[0] in _LIBRARIES


def _find_modules(cb: Any, held: set[int]) -> dict[str, nn.Module]:
    "Return the modules that a callback has for itself, such as a copy of the model."
    modules = {name: m for name, m in vars(cb).items() if isinstance(m, nn.Module)}
    return {name: m for name, m in modules.items() if id(m) not in held}


# -- fingerprints ----------------------------------------------------------------------------------


def fingerprint(value: Any) -> Any:
    """Return a value that is equal as long as an object has not changed, without a copy of its tensors.

    >>> log = [1, {'a': torch.zeros(2)}]
    >>> before = fingerprint(log)
    >>> _ = log[1]['a'].add_(1)
    >>> fingerprint(log) == before
    False
    """
    return _mark(value, _DEEPEST, set())


def _mark(value: Any, depth: int, seen: set[int]) -> Any:
    kind = type(value)
    if kind in ATOMS:
        return kind, repr(value)
    if depth == 0 or isinstance(value, _SKIPPED) or id(value) in seen or len(seen) > _MOST:
        return kind.__name__
    if hasattr(value, 'dls') or getattr(value, 'grad_fn', None) is not None:
        return kind.__name__  # a Learner, and what a forward pass computes
    if kind is not tuple:  # an entry of a mapping has no lasting id
        seen.add(id(value))
    if isinstance(value, nn.Module):
        return [(t.data_ptr(), t._version) for t in (*value.parameters(), *value.buffers())]
    if isinstance(value, Tensor):
        return id(value), value._version, value.shape
    if isinstance(value, np.ndarray):
        content = (
            value.tobytes() if value.nbytes <= _LARGEST and value.dtype != object else id(value)
        )
        return value.shape, hash(content)
    if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
        return _mark_container(value, depth, seen)
    return kind.__name__, [_mark(part, depth - 1, seen) for part in _list_parts(value)]


def _mark_container(value: Any, depth: int, seen: set[int]) -> Any:
    items = list(value.items()) if isinstance(value, Mapping) else list(value)
    if len(items) > _LONGEST:
        items = [*items[:_ENDS], *items[-_ENDS:]]
    return len(value), [_mark(item, depth - 1, seen) for item in items]


def _list_parts(value: Any) -> Iterator[Any]:
    "Yield what a function, a method or an object of the user's keeps; generators of random numbers by their state."
    if state_setter(value) is not None:
        yield repr(getattr(value, 'bit_generator', value))
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # its variable is not set yet
                yield cell.cell_contents
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif type(value).__module__ == 'itertools':
        yield repr(value)
    elif not _is_foreign(value):
        yield length_hint(value, 0) if isinstance(value, Iterator) else None
        yield from getattr(value, '__dict__', {}).items()
        yield from (getattr(value, name, None) for name in getattr(type(value), '__slots__', ()))
