# SPDX-License-Identifier: Apache-2.0
"""Digest of a loader's last batch, which shows whether a repeated epoch returns the same batches.

A tensor that was changed in place since it was drawn has another version, and is not compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learnkit.core.plain import ATOMS, as_plain, is_dense

# by the place of an entry: its version (-1: any), and a hash of its content
Digest = dict[str, tuple[int, str]]

_LARGEST = 1 << 18  # elements of a tensor whose content is hashed whole
_ANY = -1


def hold_batch(batch: Any) -> Any:
    """Return a batch in new containers, without copying its tensors.

    >>> batch = [torch.zeros(2), {'label': 1}]
    >>> held = hold_batch(batch)
    >>> _ = batch.pop(), batch[0].add_(1)
    >>> held
    [tensor([1., 1.]), {'label': 1}]
    """
    if type(batch) is Tensor:
        return batch
    if isinstance(batch, (tuple, list)):
        return [hold_batch(entry) for entry in batch]
    if isinstance(batch, Mapping):
        return {name: hold_batch(entry) for name, entry in batch.items()}
    return batch


def digest_batch(
    held: Any,  # result of `hold_batch`
) -> Digest:
    """Return the digest of each entry of a batch that is a tensor, an array, a number or a string.

    >>> held = hold_batch((torch.zeros(2), {'label': 1}))
    >>> sorted(digest_batch(held))
    ['.0', '.1.label']
    """
    return {place: _digest_entry(entry) for place, entry in _list_entries(held, '')}


def differs(
    saved: Digest,  # digest of a batch that was trained on
    again: Digest,  # digest of the same batch, drawn again
    everywhere: bool,  # random entries may differ: return True only if no entry is equal
) -> bool:
    """Return True if a batch that was drawn again differs from the batch that was trained on.

    >>> first, again = (digest_batch([torch.tensor(x), 'a']) for x in (1., 2.))
    >>> differs(first, again, everywhere=False), differs(first, again, everywhere=True)
    (True, False)
    """
    places = [
        place for place in saved.keys() & again.keys() if saved[place][0] in (_ANY, again[place][0])
    ]
    unequal = [saved[place][1] != again[place][1] for place in places]
    return bool(unequal) and (all(unequal) if everywhere else any(unequal))


def _list_entries(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    "Yield the place and the value of each entry that can be hashed."
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _list_entries(entry, f'{place}.{name}')
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            yield from _list_entries(entry, f'{place}.{i}')
    elif isinstance(value, Tensor):
        if is_dense(value) and not value.is_inference():  # which has no version
            yield place, as_plain(value.detach())
    elif isinstance(value, ATOMS) or (isinstance(value, np.ndarray) and value.dtype != object):
        yield place, value


def _digest_entry(value: Any) -> tuple[int, str]:
    "Return the version and the hash of an entry; an unchanged copy on a device may be of a tensor of any version."
    if isinstance(value, np.ndarray):
        part = np.ascontiguousarray(_shorten(value))
        return _ANY, _hash(value.shape, value.dtype, part.tobytes())
    if not isinstance(value, Tensor):
        return _ANY, _hash(type(value).__name__, repr(value))
    is_unchanged_copy = not value.is_cpu and value._version == 0
    part = _shorten(value).to('cpu').resolve_conj().resolve_neg().contiguous()
    content = part.view(-1).view(torch.uint8).numpy() if part.numel() else b''
    version = _ANY if is_unchanged_copy else value._version
    return version, _hash(tuple(value.shape), value.dtype, content)


def _shorten(value: Any) -> Any:
    "Return the middle of the inner dimensions of a large tensor or array, with a part of each sample."
    for dim in range(value.ndim - 1, 0, -1):
        size = prod(value.shape)
        if size <= _LARGEST:
            break
        n = max(1, value.shape[dim] * _LARGEST // size)
        first = (value.shape[dim] - n) // 2
        value = value[(*[slice(None)] * dim, slice(first, first + n))]
    return value


def _hash(kind: Any, form: Any, content: Any = b'') -> str:
    sha = blake2b(f'{kind};{form};'.encode(), digest_size=16)
    sha.update(content)
    return sha.hexdigest()
