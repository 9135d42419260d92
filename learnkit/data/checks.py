"""Length and description of any loader, and checks of loaders and data sets, whose errors name the loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from learnkit.core.errors import (
    EmptyLoaderError,
    LoaderError,
)
from learnkit.data.tensors import are_rows_apart, is_rows

__all__ = [
    'n_batches',
    'describe_loader',
    'check_loader',
    'check_not_empty',
    'check_dataset',
    'epoch_length',
]


def n_batches(dl: Any) -> int | None:
    """Return the number of batches of a loader, or None if the loader has no length.

    >>> n_batches([1, 2]), n_batches(iter([1, 2]))
    (2, None)
    """
    if not hasattr(type(dl), '__len__'):
        return None
    try:
        return len(dl)
    except (TypeError, NotImplementedError):
        return None


def describe_loader(dl: Any) -> str:
    "Return a string with a loader's type, length and batch size."
    n, bs = n_batches(dl), getattr(dl, 'bs', getattr(dl, 'batch_size', None))
    count = 'unknown length' if n is None else f'{n} batch' if n == 1 else f'{n} batches'
    return f'{type(dl).__name__}, {count}' + (f' of {bs}' if isinstance(bs, int) else '')


def check_loader(name: str, dl: Any) -> None:
    "Raise `LoaderError` unless `dl` looks like an iterable of batches; `dl` is not iterated."
    what = f'The loader {name!r} is a {type(dl).__name__}'
    if is_rows(dl):
        raise LoaderError(f'{what}: use DataLoaders.from_tensors for tensors.')
    if are_rows_apart(dl):
        raise LoaderError(
            f'{what} of tensors, not of batches: use DataLoaders.from_tensors((x, y), (xv, yv)), or give '
            'one batch as `[(x, y)]`.'
        )
    if isinstance(dl, Dataset) and not isinstance(dl, IterableDataset):
        raise LoaderError(
            f'{what}, which gives samples: use DataLoaders.from_datasets, or a DataLoader.'
        )
    if isinstance(dl, (str, bytes, Mapping, nn.Module)) or not (
        hasattr(dl, '__iter__') or hasattr(dl, '__getitem__')
    ):
        raise LoaderError(
            f'{what}, which gives no batches: a loader is a DataLoader or any other iterable.'
        )
    check_not_empty(name, dl)


def check_not_empty(name: str, dl: Any) -> None:
    "Raise `EmptyLoaderError` for a loader of length 0."
    if n_batches(dl) != 0:
        return
    why = ': are there samples in its data set?'
    if getattr(dl, 'drop_last', False):
        why = (
            ': drop_last is on, and there are fewer samples than a batch has. Lower the batch size.'
        )
    raise EmptyLoaderError(f'The loader {name!r} ({type(dl).__name__}) has no batches{why}')


def check_dataset(name: str, ds: Any) -> None:
    "Raise `LoaderError` unless `ds` has samples by index and a length, and `EmptyLoaderError` for length 0."
    if isinstance(ds, IterableDataset):
        return
    if isinstance(ds, DataLoader) or not (hasattr(ds, '__getitem__') and hasattr(ds, '__len__')):
        raise LoaderError(
            f'The data set {name!r} is a {type(ds).__name__}: it needs samples by index and a length.'
        )
    if len(ds) == 0:
        raise EmptyLoaderError(f'The data set {name!r} ({type(ds).__name__}) is empty.')


def epoch_length(dls: Any, dl: Any) -> tuple[int | None, int | None]:
    "Return the number of batches in an epoch of `dl`, or None, and the limit `n_iter` on it, or None."
    n = n_batches(dl)
    limit = getattr(dls, 'n_iter', None) if n is None and dl is dls.train else None
    return (limit if n is None else n), limit
