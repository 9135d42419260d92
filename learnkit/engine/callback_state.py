"""States of callbacks: the result of `state_dict`, or the changed attributes that are plain data."""

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
from warnings import warn

import numpy as np
import torch
from fastcore.foundation import L
from torch import Tensor, nn

from learnkit.core.errors import CallbackError, OptionError, add_note, did_you_mean
from learnkit.core.learner_type import LearnerLike
from learnkit.core.model import model_device
from learnkit.core.plain import is_dense, to_plain
from learnkit.core.random import capture_own, own_generators, restore_own
from learnkit.engine.callback import Callback, declared

__all__ = [
    'callback_states',
    'load_callback_states',
    'collect_nondeterministic_state',
    'has_own_state',
    'keeps_attributes',
    'note_attributes',
    'note_beginnings',
    'changed_attributes',
    'put_attributes',
    'lost_attributes',
    'replaced_attributes',
    'DataKind',
    'data_kinds',
    'encode',
    'decode',
]

# keys of a callback's state that has two parts
STATE = '__state__'
ATTRIBUTES = '__attributes__'

# attributes of a callback that hold encoded copies of all its attributes
_ADDED_KEY = '_as_added'
_BEGUN_KEY = '_as_begun'
_NO_DATA = ...  # stands in these copies for an attribute that is not data
_NOT_STATE = frozenset(
    {
        'learn',
        'order',
        'run',
        'run_in',
        'run_train',
        'run_valid',
        _ADDED_KEY,
        _BEGUN_KEY,
        '_given_by_learnkit',
    }
)
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
# types of objects that a callback of another library opens itself: files, loggers and their handlers
_OPENED_TYPES = IOBase, Filterer


# -- states by the callbacks' keys -----------------------------------------------------------------


def callback_states(learn: LearnerLike) -> dict[str, Any]:
    """Return the state of every callback that has one, by the callback's key.

    The key is the callback's `state_key`, or its name, made unique. Raises `CallbackError` for a state
    that is not plain data.
    """
    states = {}
    for cb in learn.cbs:
        state = _get_state(cb)
        if state is None:
            continue
        try:
            states[learn.callbacks.keys[id(cb)]] = to_plain(state, 'state_dict()')
        except OptionError as e:
            raise CallbackError(f'{type(cb).__name__}: {e}') from None
    return states


def load_callback_states(
    learn: LearnerLike,
    states: Mapping[str, Any],  # states by the callbacks' keys, from `callback_states`
) -> None:
    """Load each state into its callback.

    Warns of a state without a callback and of a stateful callback without a state.
    """
    keys = {learn.callbacks.keys[id(cb)]: cb for cb in learn.cbs}
    stateful = {key for key, cb in keys.items() if has_own_state(cb) and _get_state(cb) is not None}
    for key in (k for k in states if k not in keys):
        warn(
            f'There is a state for a callback `{key}`, and no such callback.'
            f'{did_you_mean(key, keys)} It is left out; add the callback first to load it.',
            stacklevel=3,
        )
    for key in sorted(stateful - set(states)):
        warn(
            f'There is no state for the callback `{key}` ({type(keys[key]).__name__}): it stays '
            'as it is.',
            stacklevel=3,
        )
    for key, cb in keys.items():
        try:
            _load_state(cb, states.get(key))
        except Exception as e:
            add_note(e, f'in {type(cb).__name__}.load_state_dict')
            raise


def collect_nondeterministic_state(learn: LearnerLike) -> dict[str, list[str]]:
    """Return the parts of callbacks' states that depend on the clock or the machine, by the callbacks' keys.

    The key '*' stands for every callback.
    """
    keys = learn.callbacks.keys
    names = {keys[id(cb)]: declared(cb, 'nondeterministic_state', ()) for cb in learn.cbs}
    found = {key: list(value) for key, value in names.items() if value}
    measuring = [cb for cb in learn.cbs if declared(cb, 'machine_dependent')]
    columns = [name for cb in measuring for name in cb.metric_names]
    # places of columns in the states of the Recorder and of loggers
    places = ('history.*', 'open.logged', 'rows.*.1', 'writer.cache')
    if columns:
        # the order of columns depends on the time of the first measurement
        found['*'] = ['logged_names', *(f'{place}.{name}' for name in columns for place in places)]
    return found


def _get_state(cb: Any) -> Any:
    "Return the result of a callback's `state_dict`, its changed attributes, or both; None for no state."
    attributes = changed_attributes(cb) if keeps_attributes(cb) else None
    if not has_own_state(cb):
        return attributes
    state = getattr(cb, 'state_dict', lambda: None)()
    return state if attributes is None else {STATE: state, ATTRIBUTES: attributes}


def _load_state(cb: Any, state: Any) -> None:
    "Load a state that `_get_state` returned into a callback."
    attributes = None if has_own_state(cb) else state
    if isinstance(state, Mapping) and STATE in state:
        attributes = state[ATTRIBUTES]
        state = state[STATE]
    if state is not None and has_own_state(cb):
        cb.load_state_dict(state)
    if keeps_attributes(cb):
        put_attributes(cb, attributes or {})


def has_own_state(cb: Any) -> bool:
    "Return True if the callback's class defines `state_dict`, or comes from this package."
    state_dict = getattr(type(cb), 'state_dict', None)
    return _is_from_learnkit(type(cb)) or state_dict not in (None, Callback.state_dict)


def keeps_attributes(cb: Any) -> bool:
    "Return True if attributes are all or a part of a callback's state."
    return not has_own_state(cb) or _inherits_state(cb)


def _inherits_state(cb: Any) -> bool:
    """Return True if a user's class inherits `state_dict` from a callback of this package.

    The inherited method does not know the attributes of the subclass.
    """
    definer = next((cls for cls in type(cb).__mro__ if 'state_dict' in vars(cls)), Callback)
    is_inherited = definer is not Callback and _is_from_learnkit(definer)
    return is_inherited and not _is_from_learnkit(type(cb))


def _is_from_learnkit(cls: type) -> bool:
    return cls.__module__.partition('.')[0] == 'learnkit'


# -- attributes ------------------------------------------------------------------------------------


def note_attributes(cb: Any) -> None:
    "Store a callback's attributes when it is added, because only attributes that change later are state."
    own = _get_attributes(cb)
    if _ADDED_KEY not in own:
        own[_ADDED_KEY] = {**dict.fromkeys(own, _NO_DATA), **_encode_attributes(cb)}


def note_beginnings(learn: LearnerLike) -> None:
    """Store the attributes of callbacks without a `state_dict` before a fit is resumed.

    `put_attributes` resets an attribute that changes before it is called and that the checkpoint does not hold.
    """
    for cb in learn.cbs:
        if keeps_attributes(cb):
            _get_attributes(cb)[_BEGUN_KEY] = _encode_attributes(cb)


def changed_attributes(cb: Any) -> dict[str, Any] | None:
    "Return, as plain data, the attributes that changed since a callback was added, or None if none did."
    added = _get_attributes(cb).get(_ADDED_KEY, {})
    return _find_changes(added, _encode_attributes(cb)) or None


def put_attributes(cb: Any, attributes: Mapping[str, Any]) -> None:
    "Restore attributes that `changed_attributes` returned, without calling the callback's `__setattr__`."
    own = _get_attributes(cb)
    changed = _find_changes(_encode_attributes(cb), own.pop(_BEGUN_KEY, {}))
    reset = {name: value for name, value in changed.items() if name in own}
    for name, value in {**reset, **attributes}.items():
        own[name] = decode(value, own.get(name), cb)


def _find_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    "Return the attributes with another value, or a tensor, which may have been modified in-place."
    return {
        name: value
        for name, value in after.items()
        if name not in before or not _is_same(before[name], value)
    }


def _is_same(a: Any, b: Any) -> bool:
    "Return True if two plain values without tensors are equal."
    if isinstance(a, Tensor) or type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_is_same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return bool(a == b)


def lost_attributes(cb: Any) -> dict[str, str]:
    "Return the attributes of a callback that no checkpoint holds, with their types."
    return {
        name: type(value).__name__
        for name, value in _get_attributes(cb).items()
        if name not in _NOT_STATE and not _is_recreated(value) and not _is_data(value)
    }


def replaced_attributes(cb: Any) -> dict[str, str]:
    """Return the attributes that no checkpoint holds and that are new, or were data, since the callback was added.

    The values of the dict are the types. Other attributes that no checkpoint holds were created with the callback, or
    the callback opens or looks them up: files, loggers, tables of modules, objects of this package.
    """
    own = _get_attributes(cb)
    added = own.get(_ADDED_KEY, {})
    return {
        name: kind
        for name, kind in lost_attributes(cb).items()
        if not _is_opened(own[name]) and (name not in added or added[name] is not _NO_DATA)
    }


def _get_attributes(cb: Any) -> dict[str, Any]:
    return getattr(cb, '__dict__', {})


def _is_opened(value: Any) -> bool:
    "Return True for objects that a callback opens or looks up itself, and for objects of this package."
    if isinstance(value, dict) and value:
        return all(map(_is_recreated, value)) or all(map(_is_recreated, value.values()))
    return isinstance(value, _OPENED_TYPES) or _is_from_learnkit(type(value))


def _is_recreated(value: Any) -> bool:
    "Return True if a value belongs to the Learner or to a class, so that creating these creates the value."
    if isinstance(value, (list, tuple)) and value:
        return all(map(_is_recreated, value))
    if isinstance(value, Tensor):
        return value.requires_grad
    return isinstance(value, (*_NO_PARTS, Callback)) or callable(value)


def _is_data(value: Any) -> bool:
    try:
        _encode_attribute(value)
    except _ENCODE_ERRORS:
        return False
    return True


@cache
def _find_base_names(cls: Any) -> frozenset[str]:
    """Return every name that methods of a class's bases in this package use.

    Attributes with these names belong to the bases, whose `state_dict` covers them.
    """
    bases = [base for base in cls.__mro__ if _is_from_learnkit(base)]
    members = [getattr(m, 'fget', m) for base in bases for m in vars(base).values()]
    functions = [m for m in members if isinstance(m, FunctionType)]
    return frozenset(name for f in functions for name in f.__code__.co_names)


# -- encoding as plain data ------------------------------------------------------------------------

_ATOMS = (type(None), bool, int, float, complex, str)
_KIND = '__kind__'  # key of the type in a dict that encodes a value which is not plain data
_MAX_BITS = 2000  # of an integer
# errors raised by `encode` for values that a checkpoint cannot hold
_ENCODE_ERRORS = (OptionError, RecursionError, TypeError, ValueError)
_FACTORIES: dict[str, Any] = {f.__name__: f for f in (list, dict, set, int, float, str)}


@dataclass(frozen=True)
class DataKind:
    "A type whose values a checkpoint holds as plain data."

    accepts: Callable[[Any], bool]  # f(value)
    encode: Callable[[Any], Any]  # f(value): data that `encode` accepts
    decode: Callable[[Any, Any], Any]  # f(data, callback): the value


def _is_numeric(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and value.dtype.kind in 'biufc'


def _to_tensor(value: Any) -> Tensor:
    return torch.from_numpy(np.array(value))


def _sort(items: Any) -> list[Any]:
    return sorted(items, key=repr)  # the order of a set differs from run to run


def _is_type(cls: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is cls


def _list_items(mapping: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return list(mapping.items())


def _has_known_factory(value: Any) -> bool:
    return type(value) is defaultdict and value.default_factory in _FACTORIES.values()


def _decode_defaultdict(data: tuple[str, list[Any]], cb: Any) -> defaultdict[Any, Any]:
    factory, items = data
    return defaultdict(_FACTORIES[factory], items)


def _decode_typed_tensor(data: tuple[str, Tensor], cb: Any) -> Tensor:
    "Return a tensor of a subclass, or a plain tensor if the subclass is not imported."
    name, content = data
    cls = _find_tensor_class(name)
    return content if cls is None else content.as_subclass(cls)


data_kinds: dict[str, DataKind] = {
    'number': DataKind(
        lambda v: _is_numeric(v, np.generic), _to_tensor, lambda t, cb: t.numpy()[()]
    ),
    'array': DataKind(
        lambda v: _is_numeric(v, np.ndarray), _to_tensor, lambda t, cb: t.numpy().copy()
    ),
    'Path': DataKind(lambda v: isinstance(v, PurePath), str, lambda name, cb: Path(name)),
    'timedelta': DataKind(
        _is_type(timedelta),
        lambda v: (v.days, v.seconds, v.microseconds),
        lambda parts, cb: timedelta(*parts),
    ),
    'L': DataKind(_is_type(L), list, lambda items, cb: L(items)),
    'set': DataKind(_is_type(set), _sort, lambda items, cb: set(items)),
    'frozenset': DataKind(_is_type(frozenset), _sort, lambda items, cb: frozenset(items)),
    'deque': DataKind(
        _is_type(deque), lambda v: (list(v), v.maxlen), lambda data, cb: deque(*data)
    ),
    'dict': DataKind(_is_type(dict), _list_items, lambda items, cb: dict(items)),
    'OrderedDict': DataKind(
        _is_type(OrderedDict), _list_items, lambda items, cb: OrderedDict(items)
    ),
    'Counter': DataKind(_is_type(Counter), _list_items, lambda items, cb: Counter(dict(items))),
    'defaultdict': DataKind(
        _has_known_factory,
        lambda v: (v.default_factory.__name__, _list_items(v)),
        _decode_defaultdict,
    ),
}

# kinds of tensors that `_encode_tensor` encodes, by the function that decodes them: f(data, callback)
tensor_kinds: dict[str, Callable[[Any, Any], Tensor]] = {
    'typed': _decode_typed_tensor,
    'on device': lambda t, cb: t.to(model_device(_find_model(cb), None)),
}


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
    if kind is dict and _KIND not in value and all(type(k) in (str, int) for k in value):
        return {encode(k): encode(v) for k, v in value.items()}
    for name, data_kind in data_kinds.items():
        if data_kind.accepts(value):
            return {_KIND: name, 'of': encode(data_kind.encode(value))}
    raise OptionError(f'A {kind.__name__} is more than data.')


def decode(
    value: Any,  # result of `encode` or `_encode_attribute`
    current: Any,  # present value of the attribute, an Enum or a generator for such a value
    cb: Any,  # callback that gets the value
) -> Any:
    "Return the value that was encoded."
    if isinstance(value, (list, tuple)):
        return type(value)(decode(v, None, cb) for v in value)
    if not isinstance(value, Mapping):
        return value
    if _KIND not in value:
        return {k: decode(v, None, cb) for k, v in value.items()}
    kind = value[_KIND]
    if kind in ('Enum', 'generator', 'callbacks'):
        return _restore_present(kind, value['of'], current)
    decode_kind = tensor_kinds.get(kind) or data_kinds[kind].decode
    return decode_kind(decode(value['of'], None, cb), cb)


def _restore_present(
    kind: str,  # 'Enum', 'generator' or 'callbacks'
    content: Any,  # saved name or state
    current: Any,  # present value of the attribute
) -> Any:
    "Return the member of the present value's Enum, or the present value with a saved state."
    if kind == 'Enum':
        is_member = isinstance(current, Enum) and content in type(current).__members__
        return type(current)[content] if is_member else current
    if kind == 'generator':
        restore_own([current], content)
    else:
        for inner, state in zip(_find_nested_callbacks(current), content, strict=False):
            put_attributes(inner, state)
    return current


def _encode_attributes(
    cb: Any,
    owners: tuple[Any, ...] = (),  # callbacks that hold this one, outermost first
) -> dict[str, Any]:
    "Return a callback's attributes as plain data, except values that are not data and views of the model's weights."
    owners = (*owners, cb)
    cls: Any = type(cb)
    base_names = _find_base_names(cls) if _inherits_state(cb) else frozenset[str]()
    encoded = {}
    for name, value in _get_attributes(cb).items():
        if name in _NOT_STATE or name in base_names:
            continue
        if isinstance(value, Tensor) and _shares_weights(value, cb):
            continue
        try:
            encoded[name] = _encode_attribute(value)
        except _ENCODE_ERRORS:
            # an object that is created with the callback: only its random generators are saved
            nested = _find_nested_callbacks(value)
            if nested:
                states: list[dict[str, Any]] = []
                for inner in nested:
                    # a callback that refers back to its owner is encoded once, as the owner
                    is_owner = any(inner is owner for owner in owners)
                    states.append({} if is_owner else _encode_attributes(inner, owners))
                encoded[name] = {_KIND: 'callbacks', 'of': states}
            elif not isinstance(value, _NO_PARTS) and own_generators([value]):
                encoded[name] = {_KIND: 'generator', 'of': capture_own([value])}
    return encoded


def _encode_attribute(value: Any) -> Any:
    "Encode a value. An Enum or a generator is encoded as a state, which `decode` restores in the new callback."
    if isinstance(value, Enum):
        return {_KIND: 'Enum', 'of': value.name}
    # NumPy's types are recognized by name, as naming the module would import it
    is_numpy = type(value).__module__.startswith('numpy.random')
    if is_numpy or isinstance(value, (torch.Generator, Random)):
        return {_KIND: 'generator', 'of': capture_own([value])}
    return encode(value)


def _find_nested_callbacks(value: Any) -> list[Callback]:
    "Return the callbacks in an attribute (a callback, or a list or dict of them) that were not added to a Learner."
    values = value.values() if isinstance(value, dict) else value
    items = [*values] if isinstance(value, (list, tuple, dict)) else [value]
    held = [item for item in items if isinstance(item, Callback) and not has_own_state(item)]
    return [cb for cb in held if not _is_added(cb)]


def _is_added(cb: Callback) -> bool:
    "Return True if a Learner has this callback in `cbs`."
    return any(cb is other for other in getattr(cb.learn, 'cbs', ()))


def _encode_tensor(t: Tensor) -> Any:
    if t.requires_grad or not is_dense(t):
        raise OptionError('This tensor is a part of the model, or of a graph.')
    content: Any = t.as_subclass(Tensor)
    if not t.is_cpu:
        content = {_KIND: 'on device', 'of': content}
    if type(t) in (Tensor, nn.Parameter):
        return content
    return {_KIND: 'typed', 'of': (_name_class(type(t)), content)}


def _name_class(cls: type) -> str:
    return f'{cls.__module__}.{cls.__qualname__}'


def _find_tensor_class(name: str, base: type[Tensor] = Tensor) -> type[Tensor] | None:
    "Return the imported subclass of tensors with this name, or None; nothing is imported."
    for cls in base.__subclasses__():
        found = cls if _name_class(cls) == name else _find_tensor_class(name, cls)
        if found is not None:
            return found
    return None


def _find_model(cb: Any) -> nn.Module:
    "Return the model of a callback's Learner, or an empty module."
    model = getattr(getattr(cb, 'learn', None), 'model', None)
    return nn.Module() if model is None else model


def _shares_weights(t: Tensor, cb: Any) -> bool:
    "Return True if a tensor is a view of a parameter or buffer of the model, which the checkpoint holds already."
    if not is_dense(t) or not t.numel():
        return False
    model = _find_model(cb)
    address = t.untyped_storage().data_ptr()
    return any(
        weight.untyped_storage().data_ptr() == address
        for weight in (*model.parameters(), *model.buffers())
        if is_dense(weight)
    )
