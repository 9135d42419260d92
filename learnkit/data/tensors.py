"""Tensors of what people have their data in: arrays, data frames, lists of numbers; and what to do about all else."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from learnkit.core.batch import describe
from learnkit.core.errors import LoaderError

__all__ = ['is_rows', 'are_rows_apart', 'are_inputs_and_targets', 'as_rows']


def is_rows(o: object) -> bool:
    """Tell whether something is a table of samples: a tensor, an array, or what becomes one (a data frame, a column).

    >>> is_rows(torch.zeros(2)), is_rows(np.zeros(2)), is_rows([1, 2])
    (True, True, False)
    """
    return isinstance(o, (Tensor, np.ndarray)) or callable(getattr(o, 'to_numpy', None))


def are_rows_apart(o: Any) -> bool:
    """Tell whether a tuple or list has the inputs of all samples and their targets, where batches belong.

    >>> x, y = torch.zeros(8, 2), torch.zeros(8)
    >>> are_rows_apart((x, y)), are_rows_apart([x, y]), are_rows_apart([x, x]), are_rows_apart([(x, y)])
    (True, True, False, False)
    """
    if not isinstance(o, (tuple, list)) or len(o) < 2 or not _have_one_length(o):
        return False
    return isinstance(o, tuple) or len({(len(t.shape), _dtype(t)) for t in o}) > 1


def are_inputs_and_targets(a: Any, b: Any) -> bool:
    """Tell whether two tables of one length have rows of different kinds, as inputs and their targets do.

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
    name: object,  # the entry's, for messages
    o: Any,  # a tensor, an array, a data frame, a column of one, a list of numbers
    device: torch.device | str | None = None,  # where it shall be; None: where it is
) -> Tensor:
    """Return a tensor with a row a sample, which shares memory where it can. Raises `LoaderError` for what has no rows.

    What has a dtype keeps it; decimal numbers of a list get torch's default one.

    >>> as_rows('x', np.arange(3.)), as_rows('x', [1.5, 2])
    (tensor([0., 1., 2.], dtype=torch.float64), tensor([1.5000, 2.0000]))
    """
    given = o
    if isinstance(o, (list, tuple)):
        o = _of_list(name, o)
    elif not isinstance(o, (Tensor, np.ndarray)) and is_rows(o):
        o = np.ascontiguousarray(o.to_numpy())
    if not isinstance(o, (Tensor, np.ndarray)) or not o.ndim:
        raise LoaderError(
            f'TensorLoader: entry {name!r} has no rows, one a sample: it is {describe(given)}.'
        )
    if isinstance(o, np.ndarray):
        o = _writable(_checked(name, o, given))
    return torch.as_tensor(o, device=device).detach()


def _of_list(name: object, rows: Any) -> Any:
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
    return (
        array.astype(str(torch.get_default_dtype()).removeprefix('torch.'))
        if array.dtype == np.float64
        else array
    )


def _checked(name: object, array: np.ndarray[Any, Any], given: Any) -> np.ndarray[Any, Any]:
    "Return an array of numbers; raise `LoaderError` for texts, dates and objects."
    if array.dtype.kind in 'biufc':
        return array
    kinds = getattr(given, 'dtypes', None)  # of a data frame's columns
    odd = [
        f'{k!r} ({v})'
        for k, v in getattr(kinds, 'items', tuple)()
        if getattr(v, 'kind', 'O') not in 'biufc'
    ]
    where = f', of the columns {", ".join(odd)}' if odd else ''
    if array.dtype.kind in 'mM':
        fix = "make numbers of these times, `.astype('int64')`"
    else:
        fix = "encode classes, `pandas.factorize(y)[0]`, and make numbers of all else, `.astype('float32')`"
    raise LoaderError(
        f'TensorLoader: entry {name!r} is {describe(array)}, no numbers{where}: {fix}.'
    )


def _writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    "Copy an array that must not be written to, as pandas gives them: batches are views. One in a file stays there."
    return array.copy() if type(array) is np.ndarray and not array.flags.writeable else array
