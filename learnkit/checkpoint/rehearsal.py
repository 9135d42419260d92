# SPDX-License-Identifier: Apache-2.0
"""Rehearse a resume at the first checkpoint of a fit: find what has changed since its start and no checkpoint holds.

A resumed process makes its objects as they were at the fit's start. An attribute that differs now, and that the state
does not contain, would be lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import length_hint
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.data import Sampler

from learnkit.checkpoint.optimizer_state import list_left_out
from learnkit.core.model import bare_model
from learnkit.core.plain import ATOMS
from learnkit.core.random import MODULE_INTERNALS, state_setter
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.data.loader_state import LISTS, find_own_parts, find_parts
from learnkit.data.shard import Shard
from learnkit.data.torch_loader import belongs_to_sampler
from learnkit.engine.callback import declared
from learnkit.engine.callback_state import keeps_attributes, lost_attributes

if TYPE_CHECKING:
    from learnkit.learner import Learner

# by the name of an attribute: its fingerprint, and what to do
Inventory = dict[str, tuple[Any, str]]

SUMMARY = (
    'A run that resumes from this checkpoint has lost what has changed, and no checkpoint holds:'
)

_IN_MODULE = 'make it a buffer, or save it by `get_extra_state`'
_IN_DATA = 'harmless if it only caches what would be computed again'
_IN_CALLBACK = 'give the callback `state_dict` and `load_state_dict`'
_IN_LOSS = 'make the loss an `nn.Module`, and this a buffer of it'
_IN_LEARNER = 'keep it in a callback, as an attribute'
_IN_OPTIMIZER = "keep it in the optimizer's `state` or `param_groups`"
_IN_SAMPLER = 'harmless if each pass makes it again; else keep it as a number, or in a callback'
_DEEPEST = 6  # levels of objects in an attribute
_LONGEST = 100  # entries of a container, of which all are compared
_ENDS = 8  # first and last entries of a longer one
_LARGEST = 1 << 20  # bytes of an array whose content is compared
_MOST = 5000  # objects of an attribute that are compared
# packages whose objects are not searched
_LIBRARIES = frozenset('torch learnkit fastai datasets transformers peft timm diffusers'.split())
_LAZY = 'lazy'  # mark of a module that gets its sizes at the first batch
_COMPUTED = 'computed'  # mark of what a forward pass computes
_NONE = (None, '')
_EMPTY: tuple[int, list[Any]] = (0, [])  # mark of a container without entries
_PLAIN = {*ATOMS, list, dict, set, tuple, deque}
_OPTIMIZER_NAMES = frozenset(('state', 'param_groups', 'defaults'))
_SKIPPED = (
    type,
    ModuleType,
    torch.device,
    torch.dtype,
    nn.Parameter,
    LazyModuleMixin,
)


def take_inventory(learn: Learner) -> Inventory:
    "Return a fingerprint of each attribute that no checkpoint holds, by its name."
    found: Inventory = {}
    model = bare_model(learn.model)
    loss = learn.loss_func
    found |= _list_module(model, 'model')
    if isinstance(loss, nn.Module):
        found |= _list_module(loss, 'loss_func')
    elif loss is not None and id(getattr(loss, '__self__', None)) not in map(id, learn.cbs):
        # a callback sets its own method again, as fastai's MixUp does
        found['loss_func'] = fingerprint(loss), _IN_LOSS
    found |= _list_data(learn.dls.train)
    own_classes = [
        name for base in type(learn).__mro__ if _is_from_library(base) for name in vars(base)
    ]
    own_names = learn.parts.own_names.union(own_classes)
    found |= _list_plain(learn, 'learn', own_names, _IN_LEARNER)
    for opt in getattr(learn.opt, 'optimizers', {}).values():
        # an optimizer with its own `state_dict` saves its attributes
        if not _is_foreign(opt) and type(opt).state_dict is torch.optim.Optimizer.state_dict:
            found |= _list_plain(opt, type(opt).__name__, _OPTIMIZER_NAMES, _IN_OPTIMIZER)
        for place, value in list_left_out(opt.state_dict()):
            found[f'{type(opt).__name__}.{place}'] = fingerprint(value), _IN_OPTIMIZER
    found |= _list_callbacks(learn)
    for cb in learn.cbs:
        for name in declared(cb, 'saved_of_model', tuple)():
            found.pop(name, None)
    return found


def _list_callbacks(learn: Learner) -> Inventory:
    "Return the attributes of callbacks that no checkpoint holds, their modules, functions and class attributes."
    found: Inventory = {}
    held = _list_held(learn)
    for cb in filter(keeps_attributes, learn.cbs):
        name = type(cb).__name__
        for attribute, value in {**lost_attributes(cb), **_find_modules_and_functions(cb)}.items():
            if id(value) not in held:
                found[f'{name}.{attribute}'] = fingerprint(value, held), _IN_CALLBACK
        if not _is_foreign(cb):
            found |= _list_plain(type(cb), name, (), _IN_CALLBACK)
    return found


def _list_held(learn: Learner) -> set[int]:
    "Return the ids of what checkpoints hold, or what is listed by itself."
    loss = learn.loss_func
    modules = chain(learn.model.modules(), loss.modules() if isinstance(loss, nn.Module) else [])
    loaders = [learn.dls.train, *(dl for _, dl in evaluation_loaders(learn.dls))]
    datasets = [getattr(dl, 'dataset', dl) for dl in loaders]
    optimizers = [learn.opt, *getattr(learn.opt, 'optimizers', {}).values()]
    return set(map(id, [*modules, learn.dls, *loaders, *datasets, *optimizers, *learn.cbs]))


def find_lost(before: Inventory, now: Inventory) -> list[str]:
    "Return a line for each attribute that has changed or is new, with what to do."
    lost = []
    for name, (mark, fix) in now.items():
        is_of_lazy = before.get(name.rpartition('.')[0], _NONE)[0] == _LAZY
        if mark == _EMPTY and name not in before:
            continue  # such as a list that a hook adds to a layer and empties again
        if mark != _COMPUTED and not is_of_lazy and before.get(name, _NONE)[0] != mark:
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
    "Return True for what torch computes again in its modules, and for parts that a checkpoint holds."
    if name == 'forward':  # a callback that replaces it does so in each fit
        return True
    is_torch = type(module).__module__.startswith('torch.')
    is_computed = is_torch and (name.startswith('_') or isinstance(value, Tensor))
    return is_computed or isinstance(value, (nn.Module, nn.Parameter))


def _list_data(dl: Any) -> Inventory:
    "Return the attributes of the data set, the collate function and a loader of the user's."
    dl = dl.source if isinstance(dl, Shard) else dl
    if hasattr(type(dl), 'load_state_dict'):
        return {}
    found: Inventory = {}
    for place, part in _find_samplers(dl):
        found |= _list_sampler(part, place)
    parts = find_own_parts(dl)
    counted = {id(part) for _, part in parts}
    owners = {'': dl, **{name: getattr(dl, name, None) for name in ('dataset', 'collate_fn')}}
    owners |= {path: part for path, part in parts if _is_entry(path)}
    for root, owner in owners.items():
        attributes = getattr(owner, '__dict__', None)
        if isinstance(owner, FunctionType):
            found[root] = fingerprint(owner), _IN_DATA
        if attributes is None or _is_foreign(owner):
            continue
        for name, value in attributes.items():
            is_number = id(owner) in counted and type(value) in ATOMS
            is_listed = isinstance(value, Sampler) or name in ('dataset', '_iterator', *LISTS)
            if not is_number and not is_listed:
                place = '.'.join(filter(None, ('training loader', root, name)))
                found[place] = fingerprint(value), _IN_DATA
    return found


def _is_entry(path: str) -> bool:
    "Return True for the path of an entry of a list of data sets or stages."
    return path.rpartition('.')[2].isdigit() and not belongs_to_sampler(path)


def _find_samplers(dl: Any) -> list[tuple[str, Any]]:
    return [(place, part) for place, part in find_parts(dl) if belongs_to_sampler(place)]


def _list_sampler(sampler: Any, place: str) -> Inventory:
    """Return the attributes of a sampler, without numbers and generators, which are restored, and without its data.

    A tensor counts as changed if it was changed in place; a new one is drawn again from the generators.
    """
    found: Inventory = {}
    for name, value in getattr(sampler, '__dict__', {}).items():
        is_held = type(value) in ATOMS or state_setter(value) is not None
        if is_held or isinstance(value, Sampler) or name in ('data_source', 'dataset'):
            continue
        mark = value._version if isinstance(value, Tensor) else fingerprint(value)
        found[f'{place}.{name}'] = mark, _IN_SAMPLER
    return found


def _list_plain(owner: Any, place: str, known: Container[str], fix: str) -> Inventory:
    "Return the attributes of the user's that are plain data; a tensor is the batch's, mostly."
    own = {k: v for k, v in vars(owner).items() if k not in known and k[0] != '_'}
    return {f'{place}.{k}': (fingerprint(v), fix) for k, v in own.items() if type(v) in _PLAIN}


def _is_foreign(owner: Any) -> bool:
    return _is_from_library(type(owner))


def _is_own(owner: Any) -> bool:
    "Return True for an object of learnkit, which saves itself."
    return type(owner).__module__.startswith('learnkit.')


def _is_from_library(kind: type) -> bool:
    return kind.__module__.partition('.')[0] in _LIBRARIES


def _find_modules_and_functions(cb: Any) -> dict[str, Any]:
    "Return the modules that a callback has, such as a copy of the model, and its functions, which may keep counts."
    kinds = (nn.Module, FunctionType, MethodType, partial)

    def has_kind(value: Any) -> bool:
        parts = value if isinstance(value, (list, tuple)) else [value]
        return any(isinstance(part, kinds) for part in parts)

    return {name: value for name, value in vars(cb).items() if has_kind(value)}


# -- fingerprints ----------------------------------------------------------------------------------


def fingerprint(
    value: Any,
    held: Container[int] = (),  # ids of objects that are left out
) -> Any:
    """Return a value that is equal as long as an object has not changed, without a copy of its tensors.

    >>> log = [1, {'a': torch.zeros(2)}]
    >>> before = fingerprint(log)
    >>> _ = log[1]['a'].add_(1)
    >>> fingerprint(log) == before
    False
    """
    return _mark(value, _DEEPEST, set(), held)


def _mark(value: Any, depth: int, seen: set[int], held: Container[int]) -> Any:
    kind = type(value)
    if kind in ATOMS:
        return kind, repr(value)
    if depth == 0 or isinstance(value, _SKIPPED) or id(value) in seen or len(seen) > _MOST:
        return kind.__name__
    if id(value) in held:
        return kind.__name__
    if hasattr(value, 'dls') or getattr(value, 'grad_fn', None) is not None:
        return _COMPUTED  # also a Learner, which holds everything
    if kind is not tuple:  # an entry of a mapping has no lasting id
        seen.add(id(value))
    if isinstance(value, nn.Module):
        tensors = [(t.data_ptr(), t._version) for t in (*value.parameters(), *value.buffers())]
        own = {k: v for k, v in vars(value).items() if k not in MODULE_INTERNALS}
        return tensors, _mark(own, depth - 1, seen, held)
    if isinstance(value, Tensor):
        return id(value), value._version, value.shape
    if isinstance(value, np.ndarray):
        content = (
            value.tobytes() if value.nbytes <= _LARGEST and value.dtype != object else id(value)
        )
        return value.shape, hash(content)
    if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
        return _mark_container(value, depth, seen, held)
    if _is_foreign(value) and hasattr(value, 'load_state_dict') and not _is_own(value):
        value = value.state_dict()  # such as a scheduler of torch
        return _mark(value, depth - 1, seen, held)
    return kind.__name__, [_mark(part, depth - 1, seen, held) for part in _list_parts(value)]


def _mark_container(value: Any, depth: int, seen: set[int], held: Container[int]) -> Any:
    items = list(value.items()) if isinstance(value, Mapping) else list(value)
    if len(items) > _LONGEST:
        items = [*items[:_ENDS], *items[-_ENDS:]]
    return len(value), [_mark(item, depth - 1, seen, held) for item in items]


def _find_length(iterator: Iterator[Any]) -> int | None:
    "Return the number of entries left, or None if it is unknown: loaders raise any type of error."
    try:
        return length_hint(iterator, 0)
    except Exception:
        return None


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
        yield _find_length(value) if isinstance(value, Iterator) else None
        yield from list(getattr(value, '__dict__', {}).items())
        yield from (getattr(value, name, None) for name in getattr(type(value), '__slots__', ()))
        if not hasattr(value, '__dict__'):  # `repr` of a user's class may do work, even on the data
            text = repr(value)
            yield None if ' at 0x' in text else text  # such as a Decimal
