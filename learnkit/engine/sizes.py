# SPDX-License-Identifier: Apache-2.0
"""Checks of the first batch of a loader: its structure, and the axis of its samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from learnkit.core.batch import describe, first_array
from learnkit.core.errors import BatchError
from learnkit.core.validation import warn_user
from learnkit.data.dataloaders import TensorLoader, batch_size_of, n_batches

if TYPE_CHECKING:
    from learnkit.learner import Learner


def count_second_axis(xb: Any, yb: Any) -> int:
    "Return the length of the second axis of the first tensor, (T, B, ...)."
    return int(first_array(xb).shape[1])


def count_targets(xb: Any, yb: Any) -> int:
    "Return the number of rows of the first target, (B, ...)."
    return int(first_array(yb).shape[0])


def check_first_batch(
    learn: Learner,
    batch: Any,  # first batch of `learn.dl`
) -> None:
    "Raise `BatchError` for a batch with its number and the number of its loader, as from Lightning's loaders."
    is_triple = type(batch) is tuple and len(batch) == 3
    if not is_triple or type(batch[1]) is not int or type(batch[2]) is not int:
        return
    raise BatchError(
        f'The {learn.dl_name} loader ({type(learn.dl).__name__}) yields {describe(batch)}: a batch with its number and '
        'the number of its loader. Pass an object that yields only the batches, whose `__iter__` returns '
        '`(batch for batch, _, _ in loader)`.'
    )


def set_size_func(
    learn: Learner,
    batch: Any,  # batch of `learn.dl`, one of the first
    square: int = 0,  # length of the first two axes of the batches before
) -> int:  # length of the first two axes if they are equal, so that the next batch decides; else 0
    """Decide how the samples of the current loader's batches are counted, from its first batch.

    The first axis of the first tensor counts them, or its second axis if that has the loader's batch size or one
    entry for each of the targets, or else the targets if these have the loader's batch size. After batches with two
    equal axes, the axis that has the rest of the data set in the last batch counts them.
    """
    if learn.size_func is not None or _stacks_samples(learn.dl) or learn.batch_form is None:
        return 0
    try:
        xb, yb = learn.batch_form.split(batch, learn.phase == 'predict')
    except Exception:
        return 0  # the loop raises it
    x = first_array(xb)
    if x is None:
        return 0
    if x.shape[:1] == x.shape[1:2]:
        return int(x.shape[0])
    y = first_array(yb)
    func: Callable[[Any, Any], int] | None
    if square and is_last_batch(learn.dl, square, x) and not is_decided_by_targets(x, y):
        func = count_second_axis if x.shape[0] == square else None
    else:
        func = find_size_func(x, y, expected_size(learn.dl))
    if func is not None:
        learn.batch_form = replace(learn.batch_form, size_func=func)
    elif not learn.parts.advice.has_checked_size:
        _warn_of_doubt(learn, xb, yb)
    return 0


def find_size_func(
    x: Any,  # first array of the inputs
    y: Any,  # first array of the targets, or None
    bs: int | None,  # expected number of samples, or None
) -> Callable[[Any, Any], int] | None:
    """Return the function that counts the samples of a loader's batches, or None for the first axis of the inputs.

    >>> import torch
    >>> x = torch.zeros(7, 4, 3)
    >>> [find_size_func(x, torch.zeros(n), None) for n in (7, 28)]
    [None, None]
    >>> find_size_func(x, torch.zeros(4), None) is find_size_func(x, torch.zeros(7, 4), 4) is count_second_axis
    True
    >>> find_size_func(torch.zeros(28), torch.zeros(4), 4) is count_targets
    True
    """
    rows, *others = x.shape
    second = others[0] if others else None
    targets = [] if y is None else list(y.shape)
    if is_decided_by_targets(x, y):
        return count_second_axis if targets == [second] and rows != second else None
    if bs is None or rows == bs:
        return None
    if second == bs:
        return count_second_axis
    return count_targets if targets[:1] == [bs] else None


def is_decided_by_targets(
    x: Any,  # first array of the inputs
    y: Any,  # first array of the targets, or None
) -> bool:
    "Return True if there is one target, or row of targets, for each row or for each column of the inputs."
    rows, *others = x.shape
    second = others[0] if others else None
    targets = [] if y is None else list(y.shape)
    is_row = targets[:1] == [rows] and targets[1:2] != [second]
    return is_row or (targets == [second] and x.ndim < 4)


def is_last_batch(
    dl: Any,
    bs: int,  # length of the first two axes of the batches before
    x: Any,  # first array of the inputs
) -> bool:
    "Return True if one axis has the batch size, and the other one the number of samples in the last batch."
    n = n_batches(getattr(dl, 'dataset', None))
    return bs == expected_size(dl) and n is not None and sorted(x.shape[:2]) == sorted((bs, n % bs))


def expected_size(dl: Any) -> int | None:
    "Return the number of samples of a loader's first batch, or None if it is unknown."
    bs = batch_size_of(dl)
    if bs is None:
        bs = batch_size_of(getattr(dl, 'batch_sampler', None))
    n = n_batches(getattr(dl, 'dataset', None))
    return bs if bs is None or n is None else min(bs, n)


def _stacks_samples(dl: Any) -> bool:
    "Return True for loaders that always have the samples along the first axis."
    return isinstance(dl, TensorLoader) or getattr(dl, 'collate_fn', None) is default_collate


def _warn_of_doubt(learn: Learner, xb: Any, yb: Any) -> None:
    "Warn once if the targets suggest a different number of samples."
    x, y = first_array(xb), first_array(yb)
    if y is None or y.shape[0] == x.shape[0] or expected_size(learn.dl) == x.shape[0]:
        return
    if x.ndim == 4:  # images, with any number of boxes for instance
        return
    is_second = y.shape[0] in x.shape[1:2]
    if not is_second and not (y.ndim == 1 and y.shape[0] < x.shape[0]):
        return
    learn.parts.advice.has_checked_size = True
    warn_user(
        f'A batch of the {learn.dl_name} loader, {describe((*xb, *yb))}, has {x.shape[0]} samples by its first tensor '
        f'and {y.shape[0]} by its targets: {x.shape[0]} is assumed. Pass `Learner(size_func=f)`, where f(xb, yb) '
        'returns the number of samples.'
    )
