# SPDX-License-Identifier: Apache-2.0
"""Digests and differences of nested states: bitwise equality, and the places in which two states differ."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import translate
from hashlib import sha256
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from learnkit.core.errors import OptionError
from learnkit.core.plain import is_dense
from learnkit.core.time import UNITS

# entries of a checkpoint that depend on the clock; `Timestamp` is the place of the state of any Timestamp
WALL_CLOCK = ('loop.sec', 'loop.seconds', 'callbacks.*.history.*.time', 'Timestamp.sec')

KeyPath = tuple[Any, ...]  # keys that lead to a value


def digest(
    state: Any,  # tensors, numbers, strings, bytes, None; lists, tuples and dicts of these
    leave_out: Iterable[str] = WALL_CLOCK,  # places to exclude: `a.b.c`, `*` for any keys
) -> str:
    """Return the SHA-256 of a nested state, which is equal for bitwise equal states only.

    The digest depends on the keys of a dict, not on their order, and on the dtype, shape and bytes of a tensor, not on
    its device or layout. 1, 1.0 and True differ, as do 0.0 and -0.0, a list and a tuple; NaN equals itself. NumPy
    scalars are treated as Python numbers. Of a checkpoint's state, times are excluded, and the names that the entry
    `nondeterministic_state` (`{callback: names}`) lists. Raises `OptionError`, with the keys, for a value of any
    other type.

    >>> a, b = torch.ones(2), torch.ones(2)
    >>> digest({'a': a, 'lr': 0.1}) == digest({'lr': 0.1, 'a': b})
    True
    >>> digest(1) == digest(1.)
    False
    """
    sha = sha256()
    for piece in _encode_pieces(_leave_out(state, leave_out), ()):
        sha.update(piece)
    return sha.hexdigest()


def differences(
    first: Any,  # state, as for `digest`
    second: Any,  # state to compare with
    leave_out: Iterable[str] = WALL_CLOCK,  # places to exclude, as for `digest`
    limit: int = 20,  # maximum number of lines
) -> list[str]:
    """Return a line for each entry in which two states differ; of a list, only for the first entry that differs.

    The list is empty if the digests are equal.

    >>> a = {'model': {'0.weight': torch.zeros(2, 3)}, 'loop': {'epoch': 3}}
    >>> b = {'model': {'0.weight': torch.eye(2, 3) / 8}, 'loop': {}}
    >>> for line in differences(a, b): print(line)
    model.0.weight: 2 of 6 elements differ, at most 0.12 (first at [0, 0]: 0.0 and 0.125)
    only in the first: loop.epoch
    """
    leave_out = [*leave_out]
    found = _compare(_leave_out(first, leave_out), _leave_out(second, leave_out), ())
    lines = list(found)
    return lines if len(lines) <= limit else [*lines[:limit], f'and {len(lines) - limit} more']


# -- excluded places -------------------------------------------------------------------------------


def _leave_out(state: Any, places: Iterable[str]) -> Any:
    "Return a state without some places, and without those that a checkpoint lists in `nondeterministic_state`."
    if isinstance(places, str):
        raise OptionError(f'leave_out={places!r}: pass a list of places.')
    patterns = [*places]
    if not patterns:
        return state
    listed = state.get('nondeterministic_state', {}) if isinstance(state, Mapping) else {}
    for key, names in listed.items():
        patterns += [f'callbacks.{key}.{name}' for name in names]
    is_left_out = re.compile('|'.join(map(translate, patterns))).match

    def drop(value: Any, prefix: str) -> Any:
        if isinstance(value, Mapping):
            prefix = 'Timestamp.' if value.keys() == set(UNITS) else prefix
            kept = {k: v for k, v in value.items() if not is_left_out(f'{prefix}{k}')}
            return {k: drop(v, f'{prefix}{k}.') for k, v in kept.items()}
        if isinstance(value, (list, tuple)):
            entries = [drop(v, f'{prefix}{i}.') for i, v in enumerate(value)]
            return entries if isinstance(value, list) else tuple(entries)
        return value

    return drop(state, '')


# -- digests ---------------------------------------------------------------------------------------


def _encode_pieces(value: Any, key_path: KeyPath) -> Iterator[Any]:
    "Yield bytes that are unique to a value: each piece begins with the value's kind and its length."
    if isinstance(value, Tensor):
        yield from _encode_tensor(value, key_path)
    elif isinstance(value, Mapping):
        yield _make_head(b'D', len(value))
        codes = {_encode(k, (*key_path, k)): k for k in value}  # in which 1, 1.0 and True differ
        for code, k in sorted(codes.items()):
            yield code
            yield from _encode_pieces(value[k], (*key_path, k))
    elif isinstance(value, (list, tuple)):
        yield _make_head(b'L' if isinstance(value, list) else b'T', len(value))
        for i, v in enumerate(value):
            yield from _encode_pieces(v, (*key_path, i))
    else:
        kind, content = _encode_scalar(value, key_path)
        yield _make_head(kind, len(content)) + content


def _encode(value: Any, key_path: KeyPath) -> bytes:
    return b''.join(_encode_pieces(value, key_path))


def _encode_scalar(value: Any, key_path: KeyPath) -> tuple[bytes, bytes]:
    "Return the kind and the content of a value that contains no other values."
    if isinstance(value, np.generic):
        value = value.item()
    match value:
        case None:
            return b'N', b''
        case bool():
            return b'B', b'%d' % value
        case int():
            return b'I', b'%d' % value
        case float():
            return b'F', struct.pack('<d', value)
        case complex():
            return b'C', struct.pack('<dd', value.real, value.imag)
        case str():
            return b'S', value.encode('utf-8', 'surrogatepass')
        case bytes():
            return b'Y', value
    raise OptionError(
        f'{_format_keys(key_path)} is a {type(value).__name__}, which has no digest. Keep tensors, '
        'numbers, strings, and lists, tuples or dicts of them.'
    )


def _make_head(kind: bytes, length: int) -> bytes:
    return kind + struct.pack('<q', length)


def _encode_tensor(t: Tensor, key_path: KeyPath) -> Iterator[Any]:
    content = _view_bytes(_copy_to_host(t, key_path)).reshape(-1)
    yield _make_head(b'A', len(content)) + _encode((_get_dtype(t), list(t.shape)), key_path)
    yield content.numpy()


def _copy_to_host(t: Tensor, key_path: KeyPath) -> Tensor:
    "Return a contiguous tensor on the CPU. Raises `OptionError` for tensors without readable values."
    if is_lazy(t) or not is_dense(t):
        raise OptionError(
            f'{_format_keys(key_path)} is a tensor without values, or a {t.layout} one: it has no digest.'
        )
    return t.detach().cpu().resolve_conj().resolve_neg().contiguous()


# -- differences -----------------------------------------------------------------------------------


def _compare(a: Any, b: Any, key_path: KeyPath) -> Iterator[str]:
    "Yield a description of each difference between two values."
    if type(a) is int and type(b) is int and a == b:  # Python's random state has 625 of them
        return
    place = _format_keys(key_path)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        yield from _compare_dicts(a, b, key_path)
    elif any(isinstance(a, kind) and isinstance(b, kind) for kind in (list, tuple)):
        if len(a) != len(b):
            yield f'{place}: {len(a)} and {len(b)} entries'
        entries = enumerate(zip(a, b, strict=False))
        lines = (line for i, (x, y) in entries for line in _compare(x, y, (*key_path, i)))
        yield from islice(lines, 1)  # lists are long
    elif isinstance(a, Tensor) and isinstance(b, Tensor):
        text = _compare_tensors(_copy_to_host(a, key_path), _copy_to_host(b, key_path))
        if text:
            yield f'{place}: {text}'
    elif _encode(a, key_path) != _encode(b, key_path):
        yield f'{place}: {_describe(a)} and {_describe(b)}'


def _compare_dicts(a: Mapping[Any, Any], b: Mapping[Any, Any], key_path: KeyPath) -> Iterator[str]:
    for key in a:
        if key in b:
            yield from _compare(a[key], b[key], (*key_path, key))
        else:
            yield f'only in the first: {_format_keys((*key_path, key))}'
    for key in b:
        if key not in a:
            yield f'only in the second: {_format_keys((*key_path, key))}'


def _compare_tensors(a: Tensor, b: Tensor) -> str:
    "Return a description of the difference of two tensors, an empty string if they are equal."
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f'{_describe(a)} and {_describe(b)}'
    indices = (_view_bytes(a) != _view_bytes(b)).any(1).nonzero().flatten()
    if not len(indices):
        return ''
    x, y = (t.flatten()[indices] for t in (a, b))
    values = f'{_format_number(x[0])} and {_format_number(y[0])}'
    if a.numel() == 1:
        return values
    dtype = torch.complex128 if a.is_complex() else torch.float64
    gap = float((x.to(dtype) - y.to(dtype)).abs().max())
    first = [int(i) for i in np.unravel_index(int(indices[0]), a.shape)]
    n = len(indices)
    return f'{n} of {a.numel()} elements differ, at most {gap:.2g} (first at {first}: {values})'


def _view_bytes(t: Tensor) -> Tensor:
    "Return the bytes of a tensor, shape (element, byte)."
    return t.reshape(-1).view(torch.uint8).reshape(t.numel(), t.itemsize)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f'{_get_dtype(value)} {list(value.shape)}'
    text = repr(value)
    return text if len(text) <= 80 else f'{text[:40]}...{text[-37:]}'


def _format_number(t: Tensor) -> str:
    if t.is_floating_point() and t.itemsize < 4:
        t = t.float()  # NumPy has no bfloat16 and no float8
    return str(t.numpy()[()])


def _get_dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix('torch.')


def _format_keys(key_path: KeyPath) -> str:
    "Return the keys that lead to a value: strings separated by dots, other keys in brackets."
    text = ''.join(f'.{key}' if isinstance(key, str) else f'[{key!r}]' for key in key_path)
    return text.removeprefix('.') or 'the state'
