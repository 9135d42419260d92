"""States of callbacks: the result of `state_dict`, or all attributes that are plain data."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from io import IOBase
from logging import Filterer
from pathlib import Path, PurePath
from types import ModuleType
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
from learnkit.core.validation import warn_user
from learnkit.engine.callback import SET_BY_BASE, Callback, declared

__all__ = [
    'callback_states',
    'load_callback_states',
    'collect_nondeterministic_state',
    'has_own_state',
    'keeps_attributes',
    'note_attributes',
    'collect_attributes',
    'put_attributes',
    'lost_attributes',
    'replaced_attributes',
    'warn_of_lost_attributes',
    'DataKind',
    'data_kinds',
    'encode',
    'decode',
]

# keys of a callback's state that has two parts
STATE = '__state__'
ATTRIBUTES = '__attributes__'

# attribute of a callback with the attributes that no checkpoint holds, as they were when it was added
_ADDED_KEY = '_as_added'
_NOT_STATE = frozenset(
    {
        'learn',
        'order',
        'run',
        'run_in',
        'run_train',
        'run_valid',
        _ADDED_KEY,
        SET_BY_BASE,
        '_given_by_learnkit',
    }
)
# types of objects that are created with the callback or the Learner, or that a callback opens itself
_RECREATED_TYPES = (
    ModuleType,
    type,
    nn.Module,
    nn.Parameter,
    torch.optim.Optimizer,
    torch.device,
    torch.dtype,
    IOBase,
    Filterer,
)


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

    Warns of the `state_dict` of a callback that is gone, and of a stateful callback without a state.
    """
    keys = {learn.callbacks.keys[id(cb)]: cb for cb in learn.cbs}
    stateful = {key for key, cb in keys.items() if has_own_state(cb) and _get_state(cb) is not None}
    for key, state in states.items():
        if key in keys or (isinstance(state, Mapping) and set(state) == {ATTRIBUTES}):
            continue  # attributes of a callback that is gone are no loss
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
    "Return the result of a callback's `state_dict`, its attributes, or both; None for no state."
    attributes = collect_attributes(cb) if keeps_attributes(cb) else None
    if not has_own_state(cb):
        return None if attributes is None else {ATTRIBUTES: attributes}
    state = getattr(cb, 'state_dict', lambda: None)()
    return state if attributes is None else {STATE: state, ATTRIBUTES: attributes}


def _load_state(cb: Any, state: Any) -> None:
    "Load a state that `_get_state` returned into a callback."
    attributes = None if has_own_state(cb) else state
    if isinstance(state, Mapping) and ATTRIBUTES in state:
        attributes = state[ATTRIBUTES]
        state = state.get(STATE)
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


def collect_attributes(cb: Any) -> dict[str, Any] | None:
    """Return the attributes that are plain data, or None without any.

    Attributes that a constructor of this package has set are left out if its class has a `state_dict`.
    """
    encoded = {}
    for name, value in _list_attributes(cb).items():
        with suppress(*_ENCODE_ERRORS):
            encoded[name] = _encode_attribute(value, cb)
    return encoded or None


def put_attributes(cb: Any, attributes: Mapping[str, Any]) -> None:
    "Restore attributes that `collect_attributes` returned, without calling the callback's `__setattr__`."
    own = _get_attributes(cb)
    for name, value in attributes.items():
        own[name] = decode(value, own.get(name), cb)


def lost_attributes(cb: Any) -> dict[str, Any]:
    "Return the attributes of a callback that no checkpoint holds."
    found = {}
    for name, value in _list_attributes(cb).items():
        if not _is_recreated(value):
            try:
                _encode_attribute(value, cb)
            except _ENCODE_ERRORS:
                found[name] = value
    return found


def note_attributes(cb: Any) -> None:
    "Store the attributes that no checkpoint holds when a callback is added; they are created with the callback."
    _get_attributes(cb).setdefault(_ADDED_KEY, lost_attributes(cb))


def replaced_attributes(cb: Any) -> dict[str, str]:
    """Return the types of the attributes that no checkpoint holds and that are new since the callback was added.

    A callback that the Learner does not have changes without being replaced.
    """
    added = _get_attributes(cb).get(_ADDED_KEY, {})
    return {
        name: type(value).__name__
        for name, value in lost_attributes(cb).items()
        if added.get(name, added) is not value or isinstance(value, Callback)
    }


def warn_of_lost_attributes(learn: LearnerLike) -> None:
    "Warn of the attributes of callbacks that have changed and that no checkpoint holds."
    for cb in learn.cbs:
        lost = replaced_attributes(cb) if keeps_attributes(cb) else {}
        for name, kind in lost.items():
            warn_user(
                f'{type(cb).__name__} has set `{name}` ({kind}), which no checkpoint holds: give it `state_dict` and '
                '`load_state_dict`.'
            )


def _get_attributes(cb: Any) -> dict[str, Any]:
    return getattr(cb, '__dict__', {})


def _list_attributes(cb: Any) -> dict[str, Any]:
    "Return the attributes that a callback has by itself, not by a class of this package with a state."
    own = _get_attributes(cb)
    by_base = own.get(SET_BY_BASE, ()) if _inherits_state(cb) else ()
    return {k: v for k, v in own.items() if k not in _NOT_STATE and k not in by_base}


def _is_recreated(value: Any) -> bool:
    "Return True if a value is created with the Learner, the callback or a class, or belongs to this package."
    if isinstance(value, dict) and value:
        return all(map(_is_recreated, value)) or all(map(_is_recreated, value.values()))
    if isinstance(value, (list, tuple)) and value:
        return all(map(_is_recreated, value))
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, Callback):
        return _is_added(value)
    return isinstance(value, _RECREATED_TYPES) or _is_from_learnkit(type(value)) or callable(value)


def _is_added(cb: Callback) -> bool:
    "Return True if a Learner has this callback in `cbs`."
    return any(cb is other for other in getattr(cb.learn, 'cbs', ()))


# -- encoding as plain data ------------------------------------------------------------------------

_ATOMS = (type(None), bool, int, float, complex, str)
_KIND = '__kind__'  # key of the type in a dict that encodes a value which is not plain data
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

# kind of a tensor on another device than the CPU, which a checkpoint holds in host memory
_ON_DEVICE = 'on device'


def encode(value: Any) -> Any:
    "Return a value as data that loads safely. Raises one of `_ENCODE_ERRORS` for any other value."
    kind = type(value)
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
    if kind in ('Enum', 'generator'):
        return _restore_present(kind, value['of'], current)
    content = decode(value['of'], None, cb)
    if kind == _ON_DEVICE:
        return content.to(model_device(_find_model(cb), None))
    return data_kinds[kind].decode(content, cb)


def _restore_present(
    kind: str,  # 'Enum' or 'generator'
    content: Any,  # saved name or state
    current: Any,  # present value of the attribute
) -> Any:
    "Return the member of the present value's Enum, or the present value with a saved state."
    if kind == 'generator':
        restore_own([current], content)
        return current
    is_member = isinstance(current, Enum) and content in type(current).__members__
    return type(current)[content] if is_member else current


def _encode_attribute(value: Any, cb: Any) -> Any:
    """Encode a value. An Enum, or an object with generators, is encoded as a state for the new callback's object.

    Raises one of `_ENCODE_ERRORS` for other objects, and for a view of the model's weights.
    """
    if isinstance(value, Enum):
        return {_KIND: 'Enum', 'of': value.name}
    if isinstance(value, Tensor) and _shares_weights(value, cb):
        raise OptionError('The checkpoint holds the weights already.')
    try:
        return encode(value)
    except _ENCODE_ERRORS:
        if isinstance(value, (*_RECREATED_TYPES, Callback)) or not own_generators([value]):
            raise
        return {_KIND: 'generator', 'of': capture_own([value])}


def _encode_tensor(t: Tensor) -> Any:
    if t.requires_grad or not is_dense(t) or type(t) not in (Tensor, nn.Parameter):
        raise OptionError(
            'This tensor is a part of the model or of a graph, or has a class of its own.'
        )
    return t if t.is_cpu else {_KIND: _ON_DEVICE, 'of': t}


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
