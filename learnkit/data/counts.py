"""Counts of a loader: numbers that its samplers, its data set and the loader itself keep while they are iterated.

A sampler that shuffles by the number of its pass, for example, repeats the order of an epoch only if that number is
restored. An attribute whose value never changes is an option, which a resumed process may set to another value."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from types import NoneType
from typing import Any

from torch.utils.data import Sampler

__all__ = ['capture_counts', 'find_own_parts', 'restore_counts']

Counts = dict[str, dict[str, tuple[Any, Any]]]  # (first, present) value by path and name

_TYPES = (int, float, bool, NoneType)
_PARTS = ('sampler', 'batch_sampler', 'dataset')
_DEEPEST = 3
# attributes of an owner as they were first seen, by the owner's id
_first_values: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}


def capture_counts(dl: Any) -> Counts:
    """Return the numbers in attributes of a loader, its samplers and its data set, by attribute path and name.

    Each comes with the value that it had when this process first saw its owner.

    >>> from torch.utils.data import DataLoader
    >>> class Reversing(Sampler):
    ...     n_passes = 0
    ...     def __iter__(self):
    ...         self.n_passes += 1
    ...         return iter([0, 1, 2][::-1 if self.n_passes % 2 else 1])
    >>> dl = DataLoader(range(3), sampler=Reversing())
    >>> _ = capture_counts(dl), list(dl), list(dl)
    >>> capture_counts(dl)['sampler']
    {'n_passes': (None, 2)}
    """
    counts = {}
    for path, owner in find_own_parts(dl):
        first = _get_first_values(owner)
        counts[path] = {name: (first.get(name), n) for name, n in _numbers(owner).items()}
    return counts


def restore_counts(dl: Any, counts: Mapping[str, Any]) -> None:
    "Restore the counts of `capture_counts`, except numbers that were changed neither there nor here."
    for path, owner in find_own_parts(dl):
        if path not in counts:
            continue
        own_first, present = _get_first_values(owner), _numbers(owner)
        for name, (first, value) in counts[path].items():
            if value != first or present.get(name) != own_first.get(name):
                owner.__dict__[name] = value
        for name in present.keys() - own_first.keys() - counts[path].keys():
            del owner.__dict__[name]  # the first pass makes it


def find_own_parts(dl: Any) -> Iterator[tuple[str, Any]]:
    "Yield (attribute path, object) of the parts of a loader that were written by the user."
    found, seen = [('', dl)], {id(dl)}
    for _ in range(_DEEPEST):
        inner = []
        for path, owner in found:
            attributes = getattr(owner, '__dict__', None)
            if type(attributes) is not dict:
                continue
            # a loader's own state includes its counts
            has_state = not path and hasattr(type(owner), 'load_state_dict')
            is_torch = type(owner).__module__.partition('.')[0] == 'torch'
            if not has_state and not is_torch:
                yield path, owner
            for name, value in attributes.items():
                is_part = name in _PARTS or isinstance(value, Sampler)
                if is_part and id(value) not in seen:
                    seen.add(id(value))
                    inner.append((f'{path}.{name}'.removeprefix('.'), value))
        found = inner


def _numbers(owner: Any) -> dict[str, Any]:
    "Return the attributes that are numbers; `epoch` is set by `set_epochs`."
    return {k: v for k, v in vars(owner).items() if type(v) in _TYPES and k != 'epoch'}


def _get_first_values(owner: Any) -> dict[str, Any]:
    known = _first_values.get(id(owner))
    if known is not None and known[0]() is owner:
        return known[1]
    values = _numbers(owner)
    try:
        reference = weakref.ref(owner, partial(_forget, id(owner)))
    except TypeError:  # an object of a class with `__slots__`
        return values
    _first_values[id(owner)] = reference, values
    return values


def _forget(key: int, reference: object) -> None:
    "Drop the values of an owner that is gone; a newer object may have its id already."
    known = _first_values.get(key)
    if known is not None and known[0] is reference:
        del _first_values[key]
