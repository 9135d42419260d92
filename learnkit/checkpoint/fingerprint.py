# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of attributes: values that are equal as long as an object has not changed, without copies of tensors.

Plain data are compared by value, tensors by identity and the count of their changes in place, random generators by
their state, and containers of more than 100,000 entries by identity and length. Functions are followed into their
closures, and objects of the user's classes into their attributes. Objects of installed packages are not looked into,
except by `state_dict`. The content of an iterator cannot be read."""

from __future__ import annotations

import json
import sys
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from io import IOBase
from itertools import chain
from pathlib import Path, PurePath
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import numpy as np
from fastcore.foundation import L
from torch import Tensor, nn

from learnkit.comm.dtensor import local_shard
from learnkit.core.batch import map_tensors
from learnkit.core.plain import ATOMS, is_dense, own_attributes
from learnkit.core.random import MODULE_INTERNALS, capture_generator, state_setter

Mark = Hashable
UNREADABLE: Mark = 'unreadable'  # mark of an object whose content cannot be read
COMPUTED: Mark = ('computed', ())  # mark of a result with a graph, which each forward pass computes

_PLAIN = (*ATOMS, list, dict, set, tuple, deque)
_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque, L)
_LARGEST = 1 << 20  # bytes of an array that is compared by content
_LONGEST = 100_000  # entries of a container that is compared by content
_MANY = 1000  # entries of a container whose entries are not searched for long containers
_INSTALLED = {'site-packages', 'dist-packages'}  # folders of installed packages


class _UnreadableError(Exception):
    "The content of an object cannot be read."


class Held:
    "Objects that are not compared, because a checkpoint holds them or they are listed by themselves."

    def __init__(self, objects: Iterable[Any] = (), weights: Iterable[Tensor] = ()) -> None:
        self.ids = set(map(id, objects))
        self.storages = {_address(t) for t in weights} - {0}

    def __or__(self, other: Held) -> Held:
        both = Held()
        both.ids = self.ids | other.ids
        both.storages = self.storages | other.storages
        return both


class _Same:
    "Equal to another if both refer to the same living object."

    def __init__(self, o: Any) -> None:
        try:
            self.ref: Callable[[], Any] = ref(o)
        except TypeError:  # a list, dict or tuple has no weak references
            self.ref = lambda: o

    def __eq__(self, other: object) -> bool:
        o = self.ref()
        return o is not None and isinstance(other, _Same) and other.ref() is o

    def __hash__(self) -> int:
        return hash(_Same)


@dataclass(frozen=True)
class Entries:
    "Mark of a dict that may be a cache: it counts as unchanged if entries are added."

    entries: frozenset[Mark]


class Fingerprints:
    """Compute fingerprints.

    >>> import torch
    >>> log = [1, {'a': torch.zeros(2)}]
    >>> before = Fingerprints().mark(log)
    >>> _ = log[1]['a'].add_(1)
    >>> Fingerprints().mark(log) == before
    False
    >>> Fingerprints().mark([zip('ab', 'cd')])
    'unreadable'
    """

    def __init__(
        self,
        held: Held | None = None,  # objects that are left out
        with_tensors: bool = True,  # whether tensors are compared
    ) -> None:
        self._held = held or Held()
        self._with_tensors = with_tensors
        self._seen: dict[int, Mark] = {}  # mark of an object that comes again, by its id
        self._kept: list[Any] = []  # so that no other object gets the id of one that was seen

    def mark(self, value: Any) -> Mark:
        "Return a value that is equal as long as an object has not changed, or `UNREADABLE`."
        try:
            return self._mark(value)
        except (_UnreadableError, RecursionError):
            return UNREADABLE

    def mark_cache(self, entries: Mapping[Any, Any]) -> Mark:
        "Return the mark of a dict to which entries may be added."
        if len(entries) > _LONGEST:
            return Entries(frozenset([_Same(entries)]))
        try:
            return Entries(frozenset(self._mark_entries(entries)))
        except (_UnreadableError, RecursionError):
            return UNREADABLE

    def _mark(self, value: Any) -> Mark:
        kind = type(value)
        if kind in ATOMS or isinstance(value, (np.generic, PurePath)):
            return kind, repr(value)
        if isinstance(value, (type, ModuleType)) or id(value) in self._held.ids:
            return kind.__name__, ()
        if isinstance(value, Tensor):
            return self._mark_tensor(value)
        if id(value) in self._seen:
            return self._seen[id(value)]
        if kind is not tuple:  # an entry of a mapping has no lasting id
            self._seen[id(value)] = 'again', len(self._seen)
        mark = kind.__name__, self._mark_content(value)
        if is_empty(mark):
            self._seen[id(value)] = mark
        return mark

    def _mark_tensor(self, t: Tensor) -> Mark:
        if t.grad_fn is not None:
            return COMPUTED
        if not self._with_tensors or _address(t) in self._held.storages:
            return type(t).__name__, ()
        return _Same(t), t._version, t.shape

    def _mark_content(self, value: Any) -> Mark:
        "Return the mark of what an object contains; `()` if it contains nothing that is compared."
        if hasattr(value, 'dls'):
            raise _UnreadableError  # another Learner
        if state_setter(value) is not None:
            return _digest_generator(value)
        if isinstance(value, np.ndarray):
            return self._mark_array(value)
        if isinstance(value, Enum):
            return value.name
        if isinstance(value, nn.Module):
            return self._mark_module(value)
        if is_function(value):
            return self._mark_parts(_list_parts(value))
        if isinstance(value, _CONTAINERS) and not _is_of_package(type(value)):
            return self._mark_container(value)
        if is_installed(type(value)):
            return self._mark_installed(value)
        attributes = own_attributes(value)
        if is_iterator(value) and not attributes:
            raise _UnreadableError
        return self._mark_entries(attributes)

    def _mark_parts(self, parts: Iterable[Any]) -> tuple[Mark, ...]:
        "Return the marks of parts, without parts that contain nothing."
        parts = list(parts)
        self._kept.append(parts)
        marks = map(self._mark, parts)
        return tuple(mark for mark in marks if not is_empty(mark))

    def _mark_entries(self, entries: Mapping[Any, Any]) -> tuple[Mark, ...]:
        "Return the keys and marks of entries, without entries that contain nothing."
        self._kept.append(entries)
        marks = ((self._mark(key), self._mark(value)) for key, value in entries.items())
        return tuple((key, mark) for key, mark in marks if not is_empty(mark))

    def _mark_container(self, value: Any) -> Mark:
        if len(value) > _LONGEST:
            return _Same(value), len(value)
        text = _as_text(value)
        if text is not None:
            return (hash(text),) if value else ()
        if isinstance(value, (set, frozenset)):
            return frozenset(map(self._mark, value)) or ()
        marks = self._mark_entries(value) if isinstance(value, Mapping) else self._mark_parts(value)
        attributes = {} if is_installed(type(value)) else own_attributes(value)
        return marks + self._mark_entries(attributes)

    def _mark_array(self, a: np.ndarray[Any, Any]) -> Mark:
        if a.dtype == object:
            return self._mark_parts([a.tolist()])
        return a.shape, str(a.dtype), hash(a.tobytes()) if a.nbytes <= _LARGEST else _Same(a)

    def _mark_module(self, module: nn.Module) -> Mark:
        "Return the marks of a module's weights, and of the attributes of the user's modules in it."
        weights = self._mark_parts([*module.parameters(), *module.buffers()])
        own = [m for m in module.modules() if not is_installed(type(m))]
        attributes = (
            {
                name: value
                for name, value in own_attributes(m).items()
                if name not in MODULE_INTERNALS
            }
            for m in own
        )
        return weights + tuple(chain.from_iterable(map(self._mark_entries, attributes)))

    def _mark_installed(self, value: Any) -> Mark:
        "Return the mark of an object of an installed package: its state or value, if it has one."
        kind: Any = type(value)
        if isinstance(value, IOBase):
            if not value.closed and value.readable():
                raise _UnreadableError
            return ()
        if is_iterator(value):
            raise _UnreadableError
        if isinstance(value, (bytearray, array)):
            return (hash(bytes(value)),)
        if not _is_of_package(kind) and kind.__eq__ is not object.__eq__:
            # a value such as a Decimal or a Path, or a namespace
            return (
                (value,) if kind.__hash__ is not None else self._mark_entries(own_attributes(value))
            )
        if hasattr(kind, 'state_dict') and hasattr(kind, 'load_state_dict'):
            return self._mark_state(value)
        return ()

    def _mark_state(self, value: Any) -> Mark:
        try:
            state = value.state_dict()
        except Exception as e:  # any error of another package
            raise _UnreadableError from e
        return self._mark_parts([state])


def is_empty(mark: Mark) -> bool:
    "Return True for the mark of an object that contains nothing that is compared."
    return isinstance(mark, tuple) and len(mark) == 2 and mark[1] == ()


def is_plain(value: Any) -> bool:
    "Return True for numbers, strings and containers of the built-in types."
    return type(value) in _PLAIN


def is_iterator(value: Any) -> bool:
    "Return True for an iterator; a class that inherits from Iterable, not from Iterator, starts again."
    kind = type(value)
    starts_again = Iterable in kind.__mro__ and Iterator not in kind.__mro__
    return hasattr(kind, '__next__') and not starts_again


def is_function(value: Any) -> bool:
    "Return True for functions, methods and partial functions."
    is_bound = callable(value) and getattr(value, '__self__', None) is not None
    return is_bound or isinstance(value, (FunctionType, partial))


def is_installed(kind: type) -> bool:
    "Return True for a class of Python, of an installed package or of this package."
    return _is_installed_module(kind.__module__)


def _is_of_package(kind: type) -> bool:
    "Return True for a class of an installed package, not for a container of Python or fastcore's `L`."
    root = kind.__module__.partition('.')[0]
    return is_installed(kind) and kind is not L and root not in sys.stdlib_module_names


@cache
def _is_installed_module(name: str) -> bool:
    root = name.partition('.')[0]
    if root == 'learnkit' or root in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(name), '__file__', None)
    return file is not None and not _INSTALLED.isdisjoint(Path(file).parts)


def class_attributes(kind: type) -> dict[str, Any]:
    "Return the attributes of a class and its bases that are plain data or iterators."
    bases = [base for base in reversed(kind.__mro__) if not is_installed(base)]
    found = chain.from_iterable(vars(base).items() for base in bases)
    return {
        name: value
        for name, value in found
        if not name.startswith('__') and (is_plain(value) or is_iterator(value))
    }


def _list_parts(function: Any) -> Iterator[Any]:
    "Yield what a function keeps: closures, defaults and attributes; and the owner of a method."
    if isinstance(function, partial):
        yield from (function.func, function.args, function.keywords)
    elif not isinstance(function, FunctionType):
        owner = getattr(function, '__self__', type)  # such as a generator, of its method `random`
        # objects of this package are saved by themselves
        yield type if type(owner).__module__.startswith('learnkit.') else owner
        yield from _list_parts(function.__func__) if isinstance(function, MethodType) else ()
    elif not _is_installed_module(function.__module__ or ''):
        yield from (function.__defaults__ or (), function.__kwdefaults__ or {}, vars(function))
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # its variable is not set yet
                yield cell.cell_contents


def _as_text(container: Any) -> str | None:
    "Return a container of plain data as text, or None for any other container."
    if type(container) not in (list, dict, tuple):
        return None
    try:
        return None if _has_long(container) else json.dumps(container)
    except (TypeError, ValueError, RecursionError):
        return None


def _has_long(container: Any) -> bool:
    "Return True for a container that is too long to compare by content, or that contains one."
    if len(container) > _MANY:
        return len(container) > _LONGEST
    entries = container.values() if isinstance(container, dict) else container
    return any(_has_long(e) for e in entries if type(e) in (list, dict, tuple))


def _digest_generator(generator: Any) -> Mark:
    kind, state = capture_generator(generator)
    return kind, repr(map_tensors(state, lambda t: t.numpy().tobytes()))


def _address(t: Tensor) -> int:
    "Return the address of a tensor's values on this rank, or 0 without values."
    mine = local_shard(t)
    return mine.untyped_storage().data_ptr() if is_dense(mine) else 0
