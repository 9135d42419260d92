"""Default state of a callback without `state_dict`: its attributes that changed and are plain data."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cache
from io import IOBase
from logging import Filterer
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
from learnkit.core.random import capture_own, own_generators, restore_own
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
    'replaced_attributes',
    'DataKind',
    'data_kinds',
    'encode',
    'decode',
]

# attributes of a callback that hold copies of its attributes
_ADDED_KEY = '_as_added'
_NAMES_KEY = '_names_as_added'
_BEGUN_KEY = '_as_begun'
_NOT_STATE = frozenset(
    {
        'learn',
        'order',
        'run',
        'run_in',
        'run_train',
        'run_valid',
        _ADDED_KEY,
        _NAMES_KEY,
        _BEGUN_KEY,
        '_given_by_learnkit',
    }
)
_ATOMS = (type(None), bool, int, float, complex, str)
_KIND = '__kind__'  # key of the type in a dict that encodes a value which is not plain data
_DICTS: dict[str, Any] = {'dict': dict, 'OrderedDict': OrderedDict, 'Counter': Counter}
_MAKERS: dict[str, Any] = {**_DICTS, 'L': L, 'set': set, 'frozenset': frozenset}
_FACTORIES: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (list, dict, set, int, float, str)
}
_MAX_BITS = 2000  # of an integer
# errors raised by `encode` for values that a checkpoint cannot hold
_ENCODE_ERRORS = (OptionError, RecursionError, TypeError, ValueError)
# types that are created with the callback or the Learner, so no checkpoint needs them
_NO_PARTS = (
    FunctionType,
    MethodType,
    BuiltinFunctionType,
    ModuleType,
    type,
    nn.Module,
    nn.Parameter,
    torch.optim.Optimizer,
    torch.device,
    torch.dtype,
)
_RECREATED_TYPES = (*_NO_PARTS, Callback)
# further types that a callback of another library opens itself: files, loggers and their handlers
_OPENED_TYPES = IOBase, Filterer


@dataclass(frozen=True)
class DataKind:
    "A type of another package whose values a checkpoint holds as plain data."

    accepts: Callable[[Any], bool]  # f(value)
    encode: Callable[[Any], Any]  # f(value): plain data
    decode: Callable[[Any, Any], Any]  # f(data, callback): the value


data_kinds: dict[str, DataKind] = {}


def has_own_state(cb: Any) -> bool:
    "Return True if the callback's class defines `state_dict`, or comes from this package."
    state_dict = getattr(type(cb), 'state_dict', None)
    return _is_from_learnkit(type(cb)) or state_dict not in (None, Callback.state_dict)


def inherits_state(cb: Any) -> bool:
    """Return True if a user's class inherits `state_dict` from a callback of this package.

    The inherited method does not know the attributes of the subclass.
    """
    definer = next((cls for cls in type(cb).__mro__ if 'state_dict' in vars(cls)), Callback)
    is_inherited = definer is not Callback and _is_from_learnkit(definer)
    return is_inherited and not _is_from_learnkit(type(cb))


def keeps_attributes(cb: Any) -> bool:
    "Return True if attributes are all or a part of a callback's state."
    return not has_own_state(cb) or inherits_state(cb)


def _is_from_learnkit(cls: type) -> bool:
    return cls.__module__.partition('.')[0] == 'learnkit'


@cache
def _find_base_names(cls: Any) -> frozenset[str]:
    """Return every name that methods of a class's bases in this package use.

    Attributes with these names belong to the bases, whose `state_dict` covers them.
    """
    bases = [base for base in cls.__mro__ if _is_from_learnkit(base)]
    members = [getattr(m, 'fget', m) for base in bases for m in vars(base).values()]
    functions = [m for m in members if isinstance(m, FunctionType)]
    return frozenset(name for f in functions for name in f.__code__.co_names)


def note_attributes(cb: Any) -> None:
    "Store a callback's attributes as it is added: an attribute that never changes is an option, not state."
    own = _own_attributes(cb)
    if _ADDED_KEY not in own:
        own[_NAMES_KEY] = tuple(own)
        own[_ADDED_KEY] = _encode_attributes(cb)


def note_beginning(cb: Any) -> None:
    """Store a callback's attributes before a fit is resumed.

    `put_attributes` resets an attribute that changes before it is called and that the checkpoint does not hold.
    """
    _own_attributes(cb)[_BEGUN_KEY] = _encode_attributes(cb)


def changed_attributes(cb: Any) -> dict[str, Any] | None:
    "Return, as plain data, the attributes that changed since a callback was added, or None if none did."
    added = _own_attributes(cb).get(_ADDED_KEY, {})
    changed = {
        name: value
        for name, value in _encode_attributes(cb).items()
        if name not in added or not _is_same(added[name], value)
    }
    return changed or None


def put_attributes(cb: Any, attributes: Mapping[str, Any]) -> None:
    "Restore attributes that `changed_attributes` returned, without calling the callback's `__setattr__`."
    own = _own_attributes(cb)
    begun = own.pop(_BEGUN_KEY, {})
    now = _encode_attributes(cb)
    changed = {
        name: value
        for name, value in begun.items()
        if name not in attributes and name in own and not _is_same(now.get(name), value)
    }
    for name, value in {**changed, **attributes}.items():
        own[name] = decode(value, own.get(name), cb)


def lost_attributes(cb: Any) -> dict[str, str]:
    "Return the attributes of a callback that no checkpoint holds, with their types."
    candidates = {
        name: value
        for name, value in _own_attributes(cb).items()
        if name not in _NOT_STATE and not _is_recreated(value)
    }
    return {name: type(value).__name__ for name, value in candidates.items() if not _is_data(value)}


def replaced_attributes(cb: Any) -> dict[str, str]:
    """Return the attributes that no checkpoint holds and that are new, or were data, since the callback was added.

    The values are their types. Other attributes that no checkpoint holds came with the callback, or
    are opened or looked up by it: files, loggers, tables of modules, objects of this package.
    """
    own = _own_attributes(cb)
    added, names = own.get(_ADDED_KEY, {}), own.get(_NAMES_KEY, ())
    lost = {name: kind for name, kind in lost_attributes(cb).items() if not _is_opened(own[name])}
    return {name: kind for name, kind in lost.items() if name in added or name not in names}


def _is_opened(value: Any) -> bool:
    if isinstance(value, dict) and value:
        return all(map(_is_recreated, value)) or all(map(_is_recreated, value.values()))
    return isinstance(value, _OPENED_TYPES) or _is_from_learnkit(type(value))


def _own_attributes(cb: Any) -> dict[str, Any]:
    return getattr(cb, '__dict__', {})


def _is_recreated(value: Any) -> bool:
    "Return True if a value belongs to the Learner or to a class, so that creating these creates the value."
    if isinstance(value, (list, tuple)) and value:
        return all(map(_is_recreated, value))
    if isinstance(value, Tensor):
        return value.requires_grad
    return isinstance(value, _RECREATED_TYPES) or callable(value)


def _encode_attributes(
    cb: Any,
    owners: tuple[Any, ...] = (),  # callbacks that hold this one, outermost first
) -> dict[str, Any]:
    "Return a callback's attributes as plain data, except values that are not data and views of the model's weights."
    owners = (*owners, cb)
    cls: Any = type(cb)
    base_names = _find_base_names(cls) if inherits_state(cb) else frozenset[str]()
    encoded = {}
    for name, value in _own_attributes(cb).items():
        if name in _NOT_STATE or name in base_names or not isinstance(name, str):
            continue
        if isinstance(value, Tensor) and _shares_weights(value, cb):
            continue
        is_object = isinstance(value, Enum) or _is_generator(value)
        try:
            encoded[name] = _encode_object(value) if is_object else encode(value)
        except _ENCODE_ERRORS:
            # an object of some class: it is created with the callback, its random generators move
            if nested := _find_nested_callbacks(value):
                # a callback that refers back to its owner is encoded once, as the owner
                states = [
                    {}
                    if any(inner is owner for owner in owners)
                    else _encode_attributes(inner, owners)
                    for inner in nested
                ]
                encoded[name] = {_KIND: 'callbacks', 'of': states}
            elif not isinstance(value, _NO_PARTS) and own_generators([value]):
                encoded[name] = _encode_generators(value)
    return encoded


def _find_nested_callbacks(value: Any) -> list[Callback]:
    "Return the callbacks of an attribute, itself or in a list or dict, that belong to their owner, not to the Learner."
    values = value.values() if isinstance(value, dict) else value
    items = [*values] if isinstance(value, (list, tuple, dict)) else [value]
    held = [item for item in items if isinstance(item, Callback) and not has_own_state(item)]
    return [cb for cb in held if all(cb is not other for other in getattr(cb.learn, 'cbs', ()))]


def _shares_weights(t: Tensor, cb: Any) -> bool:
    "Return True if a tensor is a view of a parameter or buffer of the model, which the checkpoint holds already."
    model = getattr(getattr(cb, 'learn', None), 'model', None)
    if model is None or t.layout is not torch.strided or not t.numel():
        return False
    address = t.untyped_storage().data_ptr()
    for weight in (*model.parameters(), *model.buffers()):
        if is_lazy(weight) or weight.layout is not torch.strided:
            continue
        if weight.untyped_storage().data_ptr() == address:
            return True
    return False


def _is_data(value: Any) -> bool:
    try:
        encode(value)
    except _ENCODE_ERRORS:
        return isinstance(value, Enum) or _is_generator(value)
    return True


def _is_same(a: Any, b: Any) -> bool:
    "Return True if two plain values are equal; a tensor may have been modified in-place and counts as changed."
    if isinstance(a, Tensor) or type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_is_same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return bool(a == b)


# Encoding as plain data


def _is_generator(value: Any) -> bool:
    "Return True for a random generator; NumPy's types are recognized by name, as naming the module would import it."
    is_numpy = type(value).__module__.startswith('numpy.random')
    return is_numpy or isinstance(value, (torch.Generator, Random))


def _encode_object(value: Any) -> dict[str, Any]:
    "Return the state of an Enum or a generator, from which the new callback's own object is restored."
    if isinstance(value, Enum):
        return {_KIND: 'Enum', 'of': value.name}
    return _encode_generators(value)


def _encode_generators(value: Any) -> dict[str, Any]:
    "Return the states of the random generators in a value, by attribute path."
    return {_KIND: 'generator', 'of': capture_own([value])}


def encode(value: Any) -> Any:
    "Return a value as data that loads safely. Raises one of `_ENCODE_ERRORS` for any other value."
    kind = type(value)
    if kind is int and value.bit_length() > _MAX_BITS:
        raise OptionError('This number is too long for a file.')
    if kind in _ATOMS or (kind is bytes and value):
        return value
    if kind in (list, tuple):
        return kind(map(encode, value))
    if isinstance(value, Tensor):
        return _encode_tensor(value)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in 'biufc':
        name = 'number' if isinstance(value, np.generic) else 'array'
        return {_KIND: name, 'of': torch.from_numpy(np.array(value))}
    if isinstance(value, PurePath):
        return {_KIND: 'Path', 'of': str(value)}
    if kind is timedelta:
        return {_KIND: 'timedelta', 'of': (value.days, value.seconds, value.microseconds)}
    if kind in (L, set, frozenset):
        # the order of a set differs from run to run
        items = value if kind is L else sorted(value, key=repr)
        return {_KIND: kind.__name__, 'of': list(map(encode, items))}
    if kind is deque:
        return {_KIND: 'deque', 'of': list(map(encode, value)), 'maxlen': value.maxlen}
    if kind is dict and _KIND not in value and all(type(k) in (str, int) for k in value):
        return {encode(k): encode(v) for k, v in value.items()}
    if isinstance(value, dict):
        return {_KIND: _get_dict_type(value), **_encode_dict(value)}
    for name, data_kind in data_kinds.items():
        if data_kind.accepts(value):
            return {_KIND: name, 'of': encode(data_kind.encode(value))}
    raise OptionError(f'A {kind.__name__} is more than data.')


def _encode_tensor(t: Tensor) -> Any:
    if t.requires_grad or t.layout is not torch.strided or t.is_quantized or t.is_meta:
        raise OptionError('This tensor is a part of the model, or of a graph.')
    content: Any = t.as_subclass(Tensor)
    if not t.is_cpu:
        content = {_KIND: 'on device', 'of': content}
    if type(t) in (Tensor, nn.Parameter):
        return content
    return {_KIND: 'typed', 'type': _name_class(type(t)), 'of': content}


def _name_class(cls: type) -> str:
    return f'{cls.__module__}.{cls.__qualname__}'


def _find_tensor_class(name: str, base: type[Tensor] = Tensor) -> type[Tensor] | None:
    "Return the imported subclass of tensors with this name, or None; nothing is imported."
    for cls in base.__subclasses__():
        found = cls if _name_class(cls) == name else _find_tensor_class(name, cls)
        if found is not None:
            return found
    return None


def _encode_dict(value: dict[Any, Any]) -> dict[str, Any]:
    items = [(encode(k), encode(v)) for k, v in value.items()]
    factory = getattr(value, 'default_factory', None)
    return {'of': items, 'factory': getattr(factory, '__name__', None)}


def _get_dict_type(value: dict[Any, Any]) -> str:
    name = type(value).__name__
    if _DICTS.get(name) is type(value):
        return name
    if type(value) is defaultdict and value.default_factory in _FACTORIES.values():
        return name
    raise OptionError(f'A {name} of this kind is more than data.')


def decode(
    value: Any,  # result of `encode` or `_encode_object`
    current: Any,  # present value of the attribute, an Enum or a generator for such a value
    cb: Any,  # callback that gets the value
) -> Any:
    "Return the value that was encoded."
    if isinstance(value, (list, tuple)):
        return type(value)(decode(v, None, cb) for v in value)
    if not isinstance(value, Mapping):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {k: decode(v, None, cb) for k, v in value.items()}
    content = value['of']
    match kind:
        case 'Enum':
            is_member = isinstance(current, Enum) and content in type(current).__members__
            return type(current)[content] if is_member else current
        case 'generator':
            restore_own([current], content)
            return current
        case 'callbacks':
            for inner, state in zip(_find_nested_callbacks(current), content, strict=False):
                put_attributes(inner, state)
            return current
        case 'number':
            return content.numpy()[()]
        case 'array':
            return content.numpy().copy()
        case 'Path':
            return Path(content)
        case 'typed':
            tensor_class = _find_tensor_class(value['type'])
            tensor = decode(content, None, cb)
            return tensor if tensor_class is None else tensor.as_subclass(tensor_class)
        case 'timedelta':
            return timedelta(*content)
        case 'on device':
            return content.to(_find_device(cb) or content.device)
    items = decode(content, None, cb)
    if kind in data_kinds:
        return data_kinds[kind].decode(items, cb)
    match kind:
        case 'deque':
            return deque(items, value['maxlen'])
        case 'defaultdict':
            return defaultdict(_FACTORIES[value['factory']], items)
        case 'Counter':
            return Counter(dict(items))
    return _MAKERS[kind](items)


def _find_device(cb: Any) -> Any:
    "Return the device of the model's first parameter, or None if there is no model or parameter."
    model = getattr(getattr(cb, 'learn', None), 'model', None)
    return None if model is None else next((p.device for p in model.parameters()), None)
