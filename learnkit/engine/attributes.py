"""What a callback that says nothing about its state remembers: those of its attributes that changed, and are data."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from pathlib import Path, PurePath
from random import Random
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from fastcore.foundation import L
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from learnkit.core.errors import OptionError
from learnkit.core.random import capture_own, restore_own
from learnkit.engine.callback import Callback

__all__ = [
    'has_own_state',
    'inherits_state',
    'keeps_attributes',
    'note_attributes',
    'note_beginning',
    'changed_attributes',
    'put_attributes',
    'lost_attributes',
]

_NOTED, _BEGUN = '_as_added', '_as_begun'
_NOT_STATE = frozenset(
    {
        'learn',
        'order',
        'run',
        'run_in',
        'run_train',
        'run_valid',
        _NOTED,
        _BEGUN,
        '_given_by_learnkit',
    }
)
_ATOMS = (type(None), bool, int, float, complex, str)
_KIND = '__kind__'  # in the dict that stands for what a file of plain data has no place for
_DICTS: dict[str, Any] = {'dict': dict, 'OrderedDict': OrderedDict, 'Counter': Counter}
_MAKERS: dict[str, Any] = {**_DICTS, 'L': L, 'set': set, 'frozenset': frozenset}
_FACTORIES: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (list, dict, set, int, float, str)
}
LONGEST = 2000  # bits of a number
# what is raised for values that no file holds
NO_DATA = (OptionError, RecursionError, TypeError, ValueError)
# made anew with the callback, or belonging to the Learner
_NO_DATA = (
    FunctionType,
    MethodType,
    BuiltinFunctionType,
    ModuleType,
    type,
    nn.Module,
    nn.Parameter,
    Callback,
    torch.optim.Optimizer,
    torch.device,
    torch.dtype,
)


def has_own_state(cb: Any) -> bool:
    "Tell whether a callback cares for its state itself, as all of this package do."
    return _is_ours(type(cb)) or getattr(type(cb), 'state_dict', None) not in (
        None,
        Callback.state_dict,
    )


def inherits_state(cb: Any) -> bool:
    "Tell whether a callback of somebody else has the `state_dict` of one of this package, which knows not all of it."
    by = next((cls for cls in type(cb).__mro__ if 'state_dict' in vars(cls)), Callback)
    return not _is_ours(type(cb)) and by is not Callback and _is_ours(by)


def keeps_attributes(cb: Any) -> bool:
    "Tell whether attributes are all or a part of a callback's state."
    return not has_own_state(cb) or inherits_state(cb)


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition('.')[0] == 'learnkit'


@cache
def _names_of_ours(cls: Any) -> frozenset[str]:
    "Return every name that the methods of a class's bases in this package use: attributes of these are theirs."
    members = [
        getattr(m, 'fget', m) for base in cls.__mro__ if _is_ours(base) for m in vars(base).values()
    ]
    return frozenset(
        name for m in members if isinstance(m, FunctionType) for name in m.__code__.co_names
    )


def note_attributes(cb: Any) -> None:
    "Note the attributes of a callback as they are when it is added: those that stay so are its options, not its state."
    if _NOTED not in (own := _own(cb)):
        own[_NOTED] = _attributes(cb)


def note_beginning(cb: Any) -> None:
    "Note them as they are before a fit is resumed: what its first events change may be as it was in the checkpoint."
    _own(cb)[_BEGUN] = _attributes(cb)


def changed_attributes(cb: Any) -> dict[str, Any] | None:
    "Return, as plain data, the attributes that have changed since a callback was added, None where there are none."
    noted = _own(cb).get(_NOTED, {})
    return {
        k: v for k, v in _attributes(cb).items() if k not in noted or not _is_same(noted[k], v)
    } or None


def put_attributes(cb: Any, attributes: Mapping[str, Any]) -> None:
    "Put them back; the callback's own `__setattr__` hears nothing of it."
    own, begun = _own(cb), _own(cb).pop(_BEGUN, {})
    now = _attributes(cb)
    changed = {
        k: v
        for k, v in begun.items()
        if k not in attributes and k in own and not _is_same(now.get(k), v)
    }
    for name, value in {**changed, **attributes}.items():
        own[name] = _decoded(value, own.get(name), cb)


def lost_attributes(cb: Any) -> dict[str, str]:
    "Return the attributes of a callback that no checkpoint holds, with their types."
    found = {
        name: value
        for name, value in _own(cb).items()
        if name not in _NOT_STATE and not _belongs(value)
    }
    return {name: type(value).__name__ for name, value in found.items() if not _is_data(value)}


def _own(cb: Any) -> dict[str, Any]:
    return getattr(cb, '__dict__', {})


def _belongs(value: Any) -> bool:
    "Tell whether something is of the Learner's or the class's, and comes back with them."
    if isinstance(value, (list, tuple)) and value:
        return all(map(_belongs, value))
    if isinstance(value, Tensor):
        return value.requires_grad
    return isinstance(value, _NO_DATA) or callable(value)


def _attributes(cb: Any) -> dict[str, Any]:
    cls: Any = type(cb)
    found, theirs = {}, _names_of_ours(cls) if inherits_state(cb) else frozenset[str]()
    for name, value in _own(cb).items():
        if name in _NOT_STATE or name in theirs or not isinstance(name, str):
            continue
        if isinstance(value, Tensor) and _is_of_model(value, cb):
            continue
        try:
            found[name] = (
                _named(value) if isinstance(value, Enum) or _draws(value) else _encoded(value)
            )
        except NO_DATA:
            continue  # an object of some class: it is made anew with the callback
    return found


def _is_of_model(t: Tensor, cb: Any) -> bool:
    "Tell whether a tensor is a look at the model's weights, which go on without it."
    model = getattr(getattr(cb, 'learn', None), 'model', None)
    if model is None or t.layout is not torch.strided or not t.numel():
        return False
    own = (
        o
        for o in (*model.parameters(), *model.buffers())
        if not is_lazy(o) and o.layout is torch.strided
    )
    return any(o.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for o in own)


def _is_data(value: Any) -> bool:
    try:
        _encoded(value)
    except NO_DATA:
        return isinstance(value, Enum) or _draws(value)
    return True


def _is_same(a: Any, b: Any) -> bool:
    "Compare plain values; tensors may have changed in place, and so count as changed."
    if isinstance(a, Tensor) or type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_is_same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return bool(a == b)


# As plain data


def _draws(value: Any) -> bool:
    "Tell whether something is a random generator; NumPy's are not asked for, as this would import them."
    return isinstance(value, (torch.Generator, Random)) or type(value).__module__.startswith(
        'numpy.random'
    )


def _named(value: Any) -> dict[str, Any]:
    "Return what puts the object back to its state that the callback will have there: an Enum, a generator."
    if isinstance(value, Enum):
        return {_KIND: 'Enum', 'of': value.name}
    return {_KIND: 'generator', 'of': capture_own([value])}


def _encoded(value: Any) -> Any:
    "Return a value as data that loads safely; raise one of `NO_DATA` for one that is more than data."
    kind = type(value)
    if kind is int and value.bit_length() > LONGEST:
        raise OptionError('This number is too long for a file.')
    if kind in _ATOMS or (kind is bytes and value):
        return value
    if kind in (list, tuple):
        return kind(map(_encoded, value))
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in 'biufc':
        return {
            _KIND: 'number' if isinstance(value, np.generic) else 'array',
            'of': torch.from_numpy(np.array(value)),
        }
    if isinstance(value, PurePath):
        return {_KIND: 'Path', 'of': str(value)}
    if kind in (L, set, frozenset):
        # the order of a set differs from run to run
        items = value if kind is L else sorted(value, key=repr)
        return {_KIND: kind.__name__, 'of': list(map(_encoded, items))}
    if kind is deque:
        return {_KIND: 'deque', 'of': list(map(_encoded, value)), 'maxlen': value.maxlen}
    if kind is dict and _KIND not in value and all(type(k) in (str, int) for k in value):
        return {_encoded(k): _encoded(v) for k, v in value.items()}
    if isinstance(value, dict):
        return {_KIND: _name_of_dict(value), **_of_dict(value)}
    raise OptionError(f'A {kind.__name__} is more than data.')


def _of_tensor(t: Tensor) -> Any:
    if t.requires_grad or t.layout is not torch.strided or t.is_quantized or t.is_meta:
        raise OptionError('This tensor is a part of the model, or of a graph.')
    t = t.as_subclass(Tensor)
    return t if t.is_cpu else {_KIND: 'on device', 'of': t}


def _of_dict(value: dict[Any, Any]) -> dict[str, Any]:
    items = [(_encoded(k), _encoded(v)) for k, v in value.items()]
    return {
        'of': items,
        'factory': getattr(getattr(value, 'default_factory', None), '__name__', None),
    }


def _name_of_dict(value: dict[Any, Any]) -> str:
    name = type(value).__name__
    if _DICTS.get(name) is type(value):
        return name
    if type(value) is defaultdict and value.default_factory in _FACTORIES.values():
        return name
    raise OptionError(f'A {name} of this kind is more than data.')


def _decoded(value: Any, there: Any, cb: Any) -> Any:
    "Return what was encoded; `there` is what the callback has in its place."
    if isinstance(value, (list, tuple)):
        return type(value)(_decoded(v, None, cb) for v in value)
    if not isinstance(value, Mapping):
        return value
    if (kind := value.get(_KIND)) is None:
        return {k: _decoded(v, None, cb) for k, v in value.items()}
    of = value['of']
    match kind:
        case 'Enum':
            return (
                type(there)[of]
                if isinstance(there, Enum) and of in type(there).__members__
                else there
            )
        case 'generator':
            restore_own([there], of)
            return there
        case 'number':
            return of.numpy()[()]
        case 'array':
            return of.numpy().copy()
        case 'Path':
            return Path(of)
        case 'on device':
            return of.to(_device(cb) or of.device)
    items = _decoded(of, None, cb)
    match kind:
        case 'deque':
            return deque(items, value['maxlen'])
        case 'defaultdict':
            return defaultdict(_FACTORIES[value['factory']], items)
        case 'Counter':
            return Counter(dict(items))
    return _MAKERS[kind](items)


def _device(cb: Any) -> Any:
    "Return where the model is."
    model = getattr(getattr(cb, 'learn', None), 'model', None)
    return None if model is None else next((p.device for p in model.parameters()), None)
