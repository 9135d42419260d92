# SPDX-License-Identifier: Apache-2.0
"""Conversion to plain data, which loads without executing code, and properties of tensors that matter for files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from learnkit.core.errors import OptionError

# types without entries, and the function that converts an object of a subclass, such as a member of an enum
ATOM_CONVERTERS: dict[type, Callable[[Any], Any]] = {
    bool: bool,
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
}
ATOMS = (NoneType, *ATOM_CONVERTERS)


def as_atom(value: Any) -> Any:
    """Return a number or string of a subclass as its base type, and any other value unchanged.

    >>> from enum import StrEnum
    >>> as_atom(StrEnum('Mode', ['FP16']).FP16)
    'fp16'
    """
    for kind, convert in ATOM_CONVERTERS.items():
        if isinstance(value, kind):
            return value if type(value) is kind else convert(value)
    return value


def map_plain(
    value: Any,
    leaf: Callable[
        [Any, str], Any
    ],  # f(entry, place): the result for an entry that is not a container
    where: str = '',  # place of the value, to which the places of its entries are appended
) -> Any:
    """Apply `leaf` to the entries of nested dicts, lists and tuples, and return them in plain containers.

    >>> map_plain({'a': [1, 2]}, lambda entry, place: f'{place}={entry}', 'x')
    {'a': ["x['a'][0]=1", "x['a'][1]=2"]}
    """
    if isinstance(value, Mapping):
        return {k: map_plain(v, leaf, f'{where}[{k!r}]') for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [map_plain(v, leaf, f'{where}[{i}]') for i, v in enumerate(value)]
        return entries if isinstance(value, list) else tuple(entries)
    return leaf(value, where)


def to_plain(
    value: Any,  # state or configuration
    where: str,  # name of the value in errors
) -> Any:
    """Convert `value` to plain data: tensors, numbers, strings, None, and lists, tuples and dicts of these.

    NumPy scalars become Python numbers, and subclasses of tensors plain tensors. Raises `OptionError`, which names the
    path, for any other object.

    >>> to_plain({'lr': np.float32(0.5), 'sizes': [1, 2]}, 'opt')
    {'lr': 0.5, 'sizes': [1, 2]}
    """
    return map_plain(value, _to_plain_leaf, where)


def _to_plain_leaf(value: Any, where: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor):
        return as_plain(value)
    if isinstance(value, ATOMS):
        return as_atom(value)
    raise OptionError(
        f'{where} is a {type(value).__name__}, which would not load safely. Keep tensors, numbers, '
        'strings, and lists, tuples or dicts of them.'
    )


def is_dense(t: Tensor) -> bool:
    """Return True for a tensor with values in strided memory: not lazy, meta, quantized or sparse.

    >>> is_dense(torch.ones(2)), is_dense(torch.ones(2, device='meta')), is_dense(torch.eye(2).to_sparse())
    (True, False, False)
    """
    return not (is_lazy(t) or t.is_meta or t.is_quantized) and t.layout is torch.strided


def identify_memory(t: Tensor) -> Any:
    """Return device, address and layout of a tensor, which are equal for tensors that share all of their memory.

    >>> t = torch.ones(2, 2)
    >>> identify_memory(t) == identify_memory(t.detach()), identify_memory(t) == identify_memory(t.T)
    (True, False)
    """
    return t.device, t.data_ptr(), t.dtype, t.shape, t.stride()


def as_plain(t: Tensor) -> Tensor:
    "Return a view of a tensor as a plain `Tensor`, unless its class defines `__torch_dispatch__`."
    cls = type(t)
    if cls is Tensor or getattr(cls, '__torch_dispatch__', None) is not Tensor.__torch_dispatch__:
        return t
    return t.as_subclass(Tensor)


def has_parts(t: Tensor) -> bool:
    """Return True for a tensor that is made of others, such as an 8-bit state of torchao with its scales.

    Its class has torch's methods that take it apart. The classes of torch itself, such as DTensor, are not meant.

    >>> has_parts(torch.ones(2))
    False
    """
    cls = type(t)
    has_methods = hasattr(cls, '__tensor_flatten__') and hasattr(cls, '__tensor_unflatten__')
    return has_methods and not cls.__module__.startswith('torch.')


def split_parts(t: Any) -> tuple[dict[str, Tensor], Any]:
    "Return the tensors of which a tensor is made, by name, and what its class needs besides to make it again."
    names, context = t.__tensor_flatten__()
    return {name: getattr(t, name) for name in names}, context


def copy_tensor(t: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a copy of a tensor; `copy` gets each of the tensors of which it is made.

    >>> copy_tensor(torch.ones(2), torch.neg)
    tensor([-1., -1.])
    """
    if not has_parts(t):
        return copy(t)
    parts, context = split_parts(t)
    copies = {name: copy_tensor(part, copy) for name, part in parts.items()}
    cls: Any = type(t)
    copied: Tensor = cls.__tensor_unflatten__(copies, context, t.shape, t.stride())
    return copied


def to_storable(value: Any) -> Any:
    """Convert a metric's value to plain data: arrays to tensors, and unsupported objects to None.

    >>> to_storable({'per class': np.array([0.5, 1.]), 'figure': object()})
    {'per class': tensor([0.5000, 1.0000], dtype=torch.float64), 'figure': None}
    """
    return map_plain(value, _to_storable_leaf)


def _to_storable_leaf(value: Any, where: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in ATOMS:
        return value
    if isinstance(value, Tensor):
        return clone_view(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in 'biufc':
        return torch.tensor(value)
    return None


def clone_view(t: Tensor) -> Tensor:
    "Return a detached plain tensor; a view of a larger storage is cloned, because torch saves whole storages."
    t = t.detach().as_subclass(Tensor)
    if (
        t.layout is not torch.strided
        or t.untyped_storage().nbytes() <= t.numel() * t.element_size()
    ):
        return t
    return t.clone()


def own_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object, in its `__dict__` and in slots.

    >>> class Point: __slots__ = ('x', 'y')
    >>> point = Point()
    >>> point.x = 1
    >>> own_attributes(point)
    {'x': 1}
    """
    names = [slot for kind in type(owner).__mro__ for slot in _list_slots(kind)]
    slots = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
    return {**slots, **getattr(owner, '__dict__', {})}


def _list_slots(kind: type) -> list[str]:
    slots = vars(kind).get('__slots__', ())
    names = [slots] if isinstance(slots, str) else slots
    return [name for name in names if not name.startswith('__')]
