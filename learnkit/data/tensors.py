# SPDX-License-Identifier: Apache-2.0
"""Conversion of arrays, data frames and lists of numbers to tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from learnkit.core.batch import describe
from learnkit.core.errors import LoaderError


def is_rows(o: object) -> bool:
    """Return True for a table with one row per sample: a tensor, an array, a data frame or a column of one.

    >>> is_rows(torch.zeros(2)), is_rows(np.zeros(2)), is_rows([1, 2])
    (True, True, False)
    """
    return isinstance(o, (Tensor, np.ndarray)) or callable(getattr(o, 'to_numpy', None))


def are_rows_apart(o: Any) -> bool:
    """Return True if a tuple or list holds the inputs and targets of all samples, not batches.

    >>> x, y = torch.zeros(8, 2), torch.zeros(8)
    >>> are_rows_apart((x, y)), are_rows_apart([x, y]), are_rows_apart([x, x]), are_rows_apart([(x, y)])
    (True, True, False, False)
    """
    if not isinstance(o, (tuple, list)) or len(o) < 2 or not _have_one_length(o):
        return False
    return isinstance(o, tuple) or len({(len(t.shape), _dtype(t)) for t in o}) > 1


def are_inputs_and_targets(a: Any, b: Any) -> bool:
    """Return True if two tables of one length differ in row shape or dtype, as inputs and targets do.

    >>> are_inputs_and_targets(torch.zeros(8, 2), torch.zeros(8)), are_inputs_and_targets(torch.zeros(8), torch.ones(8))
    (True, False)
    """
    return _have_one_length((a, b)) and (a.shape[1:], _dtype(a)) != (b.shape[1:], _dtype(b))


def _have_one_length(tables: Any) -> bool:
    return (
        all(is_rows(t) and getattr(t, 'shape', ()) for t in tables)
        and len({t.shape[0] for t in tables}) == 1
    )


def _dtype(table: Any) -> str:
    return str(getattr(table, 'dtype', ''))


def as_rows(
    name: object,  # name of the entry in errors
    o: Any,  # tensor, array, data frame, column of a data frame, or list of numbers
    device: torch.device | str | None = None,  # device of the tensor; None: unchanged
) -> Tensor:
    """Convert a table to a tensor with one row per sample, sharing memory if possible.

    An existing dtype is kept. Floats in a list get torch's default dtype. Raises `LoaderError` for data without rows
    and for strings, dates and objects.

    >>> as_rows('x', np.arange(3.)), as_rows('x', [1.5, 2])
    (tensor([0., 1., 2.], dtype=torch.float64), tensor([1.5000, 2.0000]))
    """
    given = o
    if isinstance(o, (list, tuple)):
        o = _convert_list(name, o)
    elif not isinstance(o, (Tensor, np.ndarray)) and is_rows(o):
        o = np.ascontiguousarray(o.to_numpy())
    if not isinstance(o, (Tensor, np.ndarray)) or not o.ndim:
        raise LoaderError(
            f'TensorLoader: entry {name!r} has no rows, one a sample: it is {describe(given)}.'
        )
    if isinstance(o, np.ndarray):
        _check_numeric(name, o, given)
        # batches are writable views; pandas returns read-only arrays; a memory map is not copied
        if type(o) is np.ndarray and not o.flags.writeable:
            o = o.copy()
    return torch.as_tensor(o, device=device).detach()


def _convert_list(name: object, rows: Any) -> Any:
    if rows and all(isinstance(row, Tensor) for row in rows):
        if len({row.shape for row in rows}) == 1:
            return torch.stack(list(rows))
        raise LoaderError(
            f'TensorLoader: entry {name!r} is a list of tensors of different shapes: pad them.'
        )
    try:
        array = np.asarray(rows)
    except ValueError as e:
        raise LoaderError(
            f'TensorLoader: entry {name!r} is a list of rows that differ in length: pad them.'
        ) from e
    if array.dtype == np.float64:
        return array.astype(str(torch.get_default_dtype()).removeprefix('torch.'))
    return array


def _check_numeric(name: object, array: np.ndarray[Any, Any], given: Any) -> None:
    "Raise `LoaderError` for an array of strings, dates or objects."
    if array.dtype.kind in 'biufc':
        return
    column_dtypes = getattr(given, 'dtypes', None)  # of a data frame
    odd = [
        f'{column!r} ({dtype})'
        for column, dtype in getattr(column_dtypes, 'items', tuple)()
        if getattr(dtype, 'kind', 'O') not in 'biufc'
    ]
    where = f', of the columns {", ".join(odd)}' if odd else ''
    raise LoaderError(
        f'TensorLoader: entry {name!r} is {describe(array)}, expected numbers{where}: encode classes, '
        "`pandas.factorize(y)[0]`, and make numbers of all else, `.astype('float32')`."
    )
