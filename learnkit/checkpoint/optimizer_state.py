# SPDX-License-Identifier: Apache-2.0
"""State of optimizers as plain data, which a file can hold.

Dtypes, NumPy's numbers, deques and the other `data_kinds` are encoded. Options of a param group that
are not data, such as functions and devices, are left out: a resumed run uses the options with which
its optimizer is created."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learnkit.core.errors import CheckpointError, OptionError
from learnkit.core.file_tensor import read_values
from learnkit.core.plain import ATOMS, has_parts, map_plain, split_parts, to_plain
from learnkit.engine.callback_state import DataKind, data_kinds, decode, encode_object
from learnkit.optim.hyperparams import OPTIONS
from learnkit.optim.state import is_single

_NAME = "The optimizer's state"
_PLAIN_TYPES = (Tensor, *ATOMS)
_TORCH_TYPES = (torch.dtype, torch.layout, torch.memory_format)
_TORCH_OBJECTS = {str(o): o for o in vars(torch).values() if isinstance(o, _TORCH_TYPES)}


def _is_made_of_parts(value: Any) -> bool:
    return isinstance(value, Tensor) and has_parts(value)


def _split_tensor(t: Tensor) -> tuple[Any, ...]:
    cls = type(t)
    parts, context = split_parts(t)
    return cls.__module__, cls.__qualname__, parts, context, tuple(t.shape), tuple(t.stride())


def _join_tensor(data: Any, cb: Any) -> Tensor:
    "Make a tensor of its parts."
    module, name, parts, context, shape, stride = data
    cls: Any = _find_tensor_class(module, name)
    joined: Tensor = cls.__tensor_unflatten__(
        read_values(parts), context, torch.Size(shape), stride
    )
    return joined


def _find_tensor_class(module: str, name: str) -> type[Tensor]:
    "Return a class of tensors that exists already, without reading or importing a module that a file names."
    found: list[type[Tensor]] = [Tensor]
    for cls in found:
        if (cls.__module__, cls.__qualname__) == (module, name):
            return cls
        found += cls.__subclasses__()
    raise TypeError(f'{module}.{name} is not a class of tensors, or is not imported yet')


_KINDS = {
    **data_kinds,
    'parts': DataKind(_is_made_of_parts, _split_tensor, _join_tensor),
    'torch': DataKind(
        lambda value: isinstance(value, _TORCH_TYPES), str, lambda name, cb: _TORCH_OBJECTS[name]
    ),
}


def encode_optimizer(state: Any) -> Any:
    """Return a state dict, or a dict from names to state dicts, as plain data.

    Raises `OptionError`, which names the entry, for a state of a parameter that is not data.
    """
    if not isinstance(state, Mapping):
        return to_plain(state, _NAME)
    if not is_single(state):
        return {name: encode_optimizer(part) for name, part in state.items()}
    groups = [_encode_group(group, i) for i, group in enumerate(state['param_groups'])]
    rest = {name: value for name, value in state.items() if name != 'param_groups'}
    return {**encode_value(rest), 'param_groups': groups}


def _encode_group(group: Mapping[str, Any], i: int) -> dict[str, Any]:
    "Return the options of param group `i` that are data. Raises `OptionError` for a rate that is not a number."
    encoded = {}
    for name, value in group.items():
        where = f"{_NAME}['param_groups'][{i}][{name!r}]"
        if name in OPTIONS:
            encoded[name] = to_plain(value, where)  # as torch's own files have it
            continue
        with suppress(OptionError):
            encoded[name] = encode_value(value, where)
    return encoded


def encode_value(
    value: Any,
    where: str = _NAME,  # name of the value in errors
) -> Any:
    "Return a value of a state as plain data; raise `OptionError` for an object that is not data."
    return map_plain(value, _encode_leaf, where)


def _encode_leaf(value: Any, where: str) -> Any:
    is_plain = isinstance(value, _PLAIN_TYPES) and not isinstance(value, np.number)
    if not is_plain or _is_made_of_parts(value):
        with suppress(OptionError):
            return encode_object(value, lambda part: encode_value(part, where), _KINDS)
    return to_plain(value, where)


def decode_optimizer(state: Any) -> Any:
    "Return the state that was encoded. Raises `CheckpointError` for an entry that cannot be decoded."
    try:
        return decode(state, None, _KINDS)
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as e:
        raise CheckpointError(f'{_NAME} cannot be read: {e!r}. Nothing was loaded.') from None


def list_left_out(state: Any) -> Iterator[tuple[str, Any]]:
    "Yield the options that `encode_optimizer` leaves out, each with its place."
    if not is_single(state):
        for part in state.values() if isinstance(state, Mapping) else ():
            yield from list_left_out(part)
        return
    for i, group in enumerate(state['param_groups']):
        for name in group.keys() - _encode_group(group, i).keys():
            yield f'param_groups[{i}][{name!r}]', group[name]
