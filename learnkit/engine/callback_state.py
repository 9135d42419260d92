# SPDX-License-Identifier: Apache-2.0
"""States of callbacks: the result of `state_dict`, or all attributes that are plain data."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from io import IOBase
from logging import Logger
from pathlib import Path, PurePath
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from warnings import warn

import numpy as np
import torch
from fastcore.foundation import L
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from learnkit.core.errors import (
    CallbackError,
    CheckpointError,
    LearnkitError,
    OptionError,
    add_place,
    did_you_mean,
)
from learnkit.core.model import model_device
from learnkit.core.plain import ATOMS, as_plain, is_dense, own_attributes, to_plain
from learnkit.core.random import capture_own, own_generators, restore_own
from learnkit.core.validation import warn_user
from learnkit.engine.callback import (
    SET_BY_BASE,
    Callback,
    has_user_code,
    is_from_learnkit,
)
from learnkit.engine.traits import trait_of

if TYPE_CHECKING:
    from learnkit.learner import Learner

# keys of a callback's state that has two parts
STATE = '__state__'
ATTRIBUTES = '__attributes__'

# attribute of a callback with the attributes that no checkpoint holds, as they were when it was added
_ADDED_KEY = '_as_added'
_NAMES_KEY = '_names_as_added'  # names of the attributes that it had then
_DELETED = '__deleted__'  # key of the names of attributes that the run has deleted
_NOT_STATE = {'learn', 'order', 'run', 'run_in', 'run_train', 'run_valid', '_given_by_learnkit'}
_NOT_STATE |= {_ADDED_KEY, _NAMES_KEY, SET_BY_BASE}
# types of objects, next to functions, that a run creates or opens itself
_RECREATED_TYPES = (
    ModuleType,
    IOBase,
    Logger,
    torch.optim.Optimizer,
    torch.device,
    torch.dtype,
    RemovableHandle,
)


# -- states by the callbacks' keys -----------------------------------------------------------------


def callback_states(learn: Learner) -> dict[str, Any]:
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
            states[learn.parts.callbacks.keys[id(cb)]] = to_plain(state, 'state_dict()')
        except OptionError as e:
            raise CallbackError(f'{type(cb).__name__}: {e}') from None
    return states


def callback_names(learn: Learner) -> dict[str, str]:
    """Return the class of every callback by its key; for a callback that is made of functions, also their names.

    Callbacks that run in the first process only (loggers, progress bars) cannot change the training and are left out,
    as are the callbacks of the process group.
    """
    keys = learn.parts.callbacks.keys
    return {
        keys[id(cb)]: repr(cb) if type(cb) is Callback else type(cb).__name__
        for cb in learn.cbs
        if not getattr(cb, 'first_process_only', False) and trait_of(cb, 'needed_to_rewind')
    }


def warn_of_changed_callbacks(
    learn: Learner,
    saved: Mapping[str, str],  # result of `callback_names` in the run of the checkpoint
) -> None:
    "Warn of the callbacks that were added or removed since a checkpoint."
    now = callback_names(learn)
    ways = {'added': _subtract(now, saved), 'removed': _subtract(saved, now)}
    changes = [f'{way} {", ".join(names)}' for way, names in ways.items() if names]
    if changes:
        warn_user(
            f'The callbacks differ from those in the checkpoint: {"; ".join(changes)}. A callback that was added '
            'starts without a state, and the state of one that was removed is ignored.'
        )


def _subtract(names: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    "Return the keys, with their classes, that the others lack or that belong to other functions there."
    return [
        f'`{key}` ({name})'
        for key, name in names.items()
        if key not in others or (name != others[key] and Callback.__name__ + '(' in name)
    ]


def load_callback_states(
    learn: Learner,
    *,
    states: Mapping[str, Any],  # states by the callbacks' keys, from `callback_states`
) -> None:
    """Load each state into its callback.

    Warns of the `state_dict` of a callback that is gone, and of a stateful callback without a state.
    """
    keys = {learn.parts.callbacks.keys[id(cb)]: cb for cb in learn.cbs}
    stateful = {key for key, cb in keys.items() if has_own_state(cb) and _get_state(cb) is not None}
    for key, state in states.items():
        # attributes of a removed callback are not needed
        if key not in keys and not (isinstance(state, Mapping) and set(state) == {ATTRIBUTES}):
            warn(
                f'No callback `{key}` for the saved state, which is ignored.{did_you_mean(key, keys)} '
                'To load it, add the callback first.',
                stacklevel=3,
            )
    for key in sorted(stateful - set(states)):
        name = type(keys[key]).__name__
        warn(
            f'No saved state for the callback `{key}` ({name}), which keeps its current state.',
            stacklevel=3,
        )
    load_states(learn, states)


def load_states(learn: Learner, states: Mapping[str, Any]) -> None:
    "Load each state into its callback, without a warning of what is missing."
    for cb in learn.cbs:
        key = learn.parts.callbacks.keys[id(cb)]
        try:
            _load_state(cb, states.get(key))
        except Exception as e:
            if is_from_learnkit(type(cb)) and not isinstance(e, LearnkitError):
                raise CheckpointError(
                    f'The state of the callback `{key}` cannot be loaded: {type(e).__name__}: {e}.'
                ) from e
            add_place(e, f'{type(cb).__name__}.load_state_dict')
            raise


def collect_nondeterministic_state(learn: Learner) -> dict[str, list[str]]:
    """Return the parts of callbacks' states that depend on the clock or the machine, by the callbacks' keys.

    The key '*' stands for every callback.
    """
    keys = learn.parts.callbacks.keys
    names = {keys[id(cb)]: trait_of(cb, 'nondeterministic_state') for cb in learn.cbs}
    found = {key: list(value) for key, value in names.items() if value}
    measuring = [cb for cb in learn.cbs if trait_of(cb, 'machine_dependent')]
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
    "Return True if the callback's class defines `state_dict`, or all code of the callback is from this package."
    state_dict = getattr(type(cb), 'state_dict', None)
    return not has_user_code(cb) or state_dict not in (None, Callback.state_dict)


def keeps_attributes(cb: Any) -> bool:
    "Return True if attributes are all or a part of a callback's state."
    return not has_own_state(cb) or _inherits_state(cb)


def _inherits_state(cb: Any) -> bool:
    """Return True if a callback with a user's code has the `state_dict` of a callback of this package.

    This method does not know the attributes of a subclass, nor the attributes that functions have set.
    """
    definer = next((cls for cls in type(cb).__mro__ if 'state_dict' in vars(cls)), Callback)
    return definer is not Callback and is_from_learnkit(definer) and has_user_code(cb)


# -- attributes ------------------------------------------------------------------------------------


def collect_attributes(cb: Any) -> dict[str, Any] | None:
    """Return the attributes that are plain data, or None without any.

    Attributes that a constructor of this package has set are left out if its class has a `state_dict`.
    """
    return _split_attributes(cb)[0] or None


def lost_attributes(cb: Any) -> dict[str, Any]:
    "Return the attributes of a callback that no checkpoint holds, and that no new run creates itself."
    return _split_attributes(cb)[1]


def unsaved_attributes(cb: Any) -> dict[str, Any]:
    "Return the attributes of a callback that are not data, whose state holds at most their generators."
    encoded = _split_attributes(cb)[0]
    kinds = {k: v.get(_KIND) for k, v in encoded.items() if isinstance(v, Mapping)}
    return {
        name: value
        for name, value in _list_attributes(cb).items()
        if name not in encoded or kinds.get(name) == _GENERATORS
    }


def _split_attributes(cb: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    "Return the encoded attributes, and those that are lost."
    encoded, lost = {}, {}
    added = vars(cb).get(_ADDED_KEY, {})
    for name, value in _list_attributes(cb).items():
        try:
            encoded[name] = _encode_attribute(value, cb)
        except _ENCODE_ERRORS:
            if type(value) is type(added.get(name)) and _has_own_class(value):
                encoded[name] = {_KIND: _OWN_CLASS, 'of': _encode_own_class(value)}
            elif not _is_recreated(value) and not _shares_weights(value, cb):
                lost[name] = value
    deleted = sorted(set(vars(cb).get(_NAMES_KEY, ())) - set(own_attributes(cb)))
    return encoded | ({_DELETED: deleted} if deleted else {}), lost


def put_attributes(cb: Any, attributes: Mapping[str, Any]) -> None:
    "Restore attributes that `collect_attributes` returned, without calling the callback's `__setattr__`."
    for name, value in attributes.items():
        kind = value.get(_KIND) if isinstance(value, Mapping) else None
        present = own_attributes(cb)
        if name == _DELETED:
            for deleted in present.keys() & set(value):
                object.__delattr__(cb, deleted)
        elif kind == _GENERATORS:
            restore_own([present.get(name)], value['of'])
        elif kind == _OWN_CLASS:
            object.__setattr__(cb, name, _decode_own_class(value['of'], present.get(name)))
        else:
            object.__setattr__(cb, name, decode(value, cb))


def note_attributes(cb: Any) -> None:
    "Store the attributes that no checkpoint holds when a callback is added; they are created with the callback."
    own = vars(cb)
    if _ADDED_KEY not in own:
        own[_NAMES_KEY] = list(_list_attributes(cb))
        own[_ADDED_KEY] = lost_attributes(cb)


def replaced_attributes(cb: Any) -> dict[str, str]:
    "Return the types of the attributes that no checkpoint holds and that are new since the callback was added."
    added = vars(cb).get(_ADDED_KEY, {})
    return {
        name: type(value).__name__
        for name, value in lost_attributes(cb).items()
        if added.get(name, added) is not value
    }


def _list_attributes(cb: Any) -> dict[str, Any]:
    "Return a callback's attributes, except for those of stateful classes of this package."
    own = own_attributes(cb)
    by_base = own.get(SET_BY_BASE, ()) if _inherits_state(cb) else ()
    return {k: v for k, v in own.items() if k not in _NOT_STATE and k not in by_base}


def _is_recreated(value: Any) -> bool:
    "Return True for a value that a new run creates itself, or a list, tuple or dict of such values."
    if isinstance(value, dict):
        value = [*value.values()]
    return all(map(_is_part, value if isinstance(value, (list, tuple)) else [value]))


def _is_part(value: Any) -> bool:
    "Return True for a part of a model, a function or another callable, a file, and an object of this package."
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, Callback):
        return value.learn is not None
    return isinstance(value, _RECREATED_TYPES) or is_from_learnkit(type(value)) or callable(value)


def _encode_attribute(value: Any, cb: Any) -> Any:
    """Encode a value. Of an object with random generators, the states of the generators are encoded.

    Raises one of `_ENCODE_ERRORS` for other objects, and for a view of the model's weights.
    """
    if _shares_weights(value, cb):
        raise OptionError('The checkpoint holds the weights already.')
    try:
        return encode(value)
    except _ENCODE_ERRORS:
        if _is_recreated(value) or not own_generators([value]):
            raise
        return {_KIND: _GENERATORS, 'of': capture_own([value])}


def _shares_weights(t: Any, cb: Any) -> bool:
    "Return True if a tensor is a view of a parameter or buffer of the model, which the checkpoint holds already."
    if not isinstance(t, Tensor):
        return False
    model = _find_model(cb)
    weights = (t, *model.parameters(), *model.buffers())
    address, *others = [w.untyped_storage().data_ptr() if is_dense(w) else 0 for w in weights]
    return address != 0 and address in others


def _find_model(cb: Any) -> nn.Module:
    "Return the model of a callback's Learner, or an empty module."
    model = getattr(getattr(cb, 'learn', None), 'model', None)
    return nn.Module() if model is None else model


# -- encoding as plain data ------------------------------------------------------------------------

_KIND = '__kind__'  # key of the type in a dict that encodes a value which is not plain data
_GENERATORS = 'generator'  # kind of the states of random generators
_OWN_CLASS = 'class of the attribute'  # kind of a member of an enum, and of a named tuple
_ON_DEVICE = 'on device'  # kind of a tensor that was not on the CPU
# errors raised by `encode` for values that a checkpoint cannot hold
_ENCODE_ERRORS = (OptionError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class DataKind:
    "A type whose values a checkpoint holds as plain data."

    accepts: Callable[[Any], bool]  # f(value)
    encode: Callable[[Any], Any]  # f(value): data that `encode` accepts
    decode: Callable[[Any, Any], Any]  # f(data, callback): the value


def _is(kind: type) -> Callable[[Any], bool]:
    "Return a function that is True for objects of exactly this class."
    return lambda value: type(value) is kind


def _encode_array(array: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(array.copy())  # raises for strings, objects and the other byte order


def _list_set(items: Any) -> list[Any]:
    "Return the items of a set; numbers in their order, which is the same in every process."
    return list(items) if all(type(i) in (int, float) for i in items) else sorted(items, key=repr)


def _has_own_class(value: Any) -> bool:
    return isinstance(value, Enum) or (isinstance(value, tuple) and hasattr(value, '_fields'))


def _encode_own_class(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else encode(list(value))


def _decode_own_class(data: Any, now: Any) -> Any:
    "Return the value in the class that the attribute has now."
    if not _has_own_class(now):
        raise CallbackError(
            f'The attribute is {type(now).__name__}, and was an enum or a named tuple.'
        )
    return type(now)[data] if isinstance(now, Enum) else type(now)(*decode(data, None))


def _is_scalar(value: Any) -> bool:
    "Return True for a scalar of NumPy that an object of Python holds exactly."
    return isinstance(value, np.generic) and type(value.item()) in ATOMS


_FACTORIES: dict[str, Any] = {f.__name__: f for f in (list, dict, set, int, float)}

data_kinds: dict[str, DataKind] = {
    # NumPy's numbers compute in their own precision; np.float64 is also a float
    'number': DataKind(
        _is_scalar,
        lambda value: (value.dtype.str, value.item()),
        lambda data, cb: np.dtype(data[0]).type(data[1]),
    ),
    'array': DataKind(_is(np.ndarray), _encode_array, lambda t, cb: t.numpy().copy()),
    'Path': DataKind(lambda value: isinstance(value, PurePath), str, lambda name, cb: Path(name)),
    'timedelta': DataKind(_is(timedelta), timedelta.total_seconds, lambda s, cb: timedelta(0, s)),
    'L': DataKind(_is(L), list, lambda items, cb: L(items)),
    'set': DataKind(_is(set), _list_set, lambda items, cb: set(items)),
    'frozenset': DataKind(_is(frozenset), _list_set, lambda items, cb: frozenset(items)),
    'OrderedDict': DataKind(
        _is(OrderedDict), lambda d: list(d.items()), lambda items, cb: OrderedDict(items)
    ),
    'Counter': DataKind(_is(Counter), dict, lambda counts, cb: Counter(counts)),
    'namespace': DataKind(
        _is(SimpleNamespace), vars, lambda entries, cb: SimpleNamespace(**entries)
    ),
    'bytearray': DataKind(_is(bytearray), bytes, lambda data, cb: bytearray(data)),
    'range': DataKind(
        _is(range), lambda r: (r.start, r.stop, r.step), lambda ends, cb: range(*ends)
    ),
    'defaultdict': DataKind(
        lambda value: type(value) is defaultdict and value.default_factory in _FACTORIES.values(),
        lambda value: (value.default_factory.__name__, dict(value)),
        lambda data, cb: defaultdict(_FACTORIES[data[0]], data[1]),
    ),
    'deque': DataKind(
        _is(deque), lambda value: (list(value), value.maxlen), lambda data, cb: deque(*data)
    ),
}


def encode(value: Any) -> Any:
    "Return a value as data that loads safely. Raises one of `_ENCODE_ERRORS` for any other value."
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind in (list, tuple):
        return kind(map(encode, value))
    if kind is dict and all(type(key) in ATOMS for key in value):
        return {key: encode(v) for key, v in value.items()}
    if isinstance(value, Tensor):
        return _encode_tensor(value)
    return encode_object(value, encode)


def encode_object(
    value: Any,
    encode_part: Callable[[Any], Any],  # encodes the data of the object
    kinds: Mapping[str, DataKind] = data_kinds,
) -> dict[str, Any]:
    "Encode an object of one of the kinds; raise `OptionError` for any other object."
    for name, data_kind in kinds.items():
        if data_kind.accepts(value):
            return {_KIND: name, 'of': encode_part(data_kind.encode(value))}
    raise OptionError(f'A {type(value).__name__} is more than data.')


def decode(
    value: Any,  # result of `encode`
    cb: Any,  # callback that gets the value
    kinds: Mapping[str, DataKind] = data_kinds,
) -> Any:
    "Return the value that was encoded."
    if isinstance(value, (list, tuple)):
        return type(value)([decode(v, cb, kinds) for v in value])
    if not isinstance(value, Mapping):
        return value
    if _KIND not in value:
        return {key: decode(v, cb, kinds) for key, v in value.items()}
    content = decode(value['of'], cb, kinds)
    if value[_KIND] == _ON_DEVICE:
        return content.to(model_device(_find_model(cb), None))
    return kinds[value[_KIND]].decode(content, cb)


def _encode_tensor(t: Tensor) -> Any:
    "Encode a tensor; one of a subclass, such as fastai's `TensorCategory`, as a plain one."
    t = as_plain(t)
    if t.requires_grad or not is_dense(t) or type(t) is not Tensor:
        raise OptionError('This tensor is part of the model or of a graph, or has its own class.')
    return t if t.is_cpu else {_KIND: _ON_DEVICE, 'of': t}
