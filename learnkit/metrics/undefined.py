# SPDX-License-Identifier: Apache-2.0
"""Metrics that cannot be computed from their data: the value is NaN, and the fit continues."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import Any

from torch import Tensor

from learnkit.core.batch import tensors_in
from learnkit.core.errors import LearnkitError
from learnkit.core.validation import warn_user


def compute_or_nan(
    name: str,  # name of the metric
    compute: Callable[..., Any],  # f(*data)
    *data: Any,  # predictions, then targets
) -> Any:
    """Return `compute(*data)`, or NaN if it raises `ValueError` because the values have no such score.

    Values have no score if one is not finite, as after training has diverged, or if all targets are
    equal, as for one class or one sample, which also causes a warning. Every other error is raised,
    including a `ValueError` for different numbers of predictions and targets.

    >>> import torch
    >>> def ratio(pred, targ):
    ...     if not bool(pred.isfinite().all()): raise ValueError('Input contains NaN.')
    ...     return (pred / targ).mean()
    >>> compute_or_nan('ratio', ratio, torch.tensor([1., float('nan')]), torch.tensor([1., 2.]))
    nan
    """
    try:
        return compute(*data)
    except ValueError as e:
        tensors = tensors_in(data)
        # scikit-learn's error for an invalid option is a `TypeError` too
        is_mistake = isinstance(e, (LearnkitError, TypeError))
        if is_mistake or len({len(t) for t in tensors if t.ndim}) > 1:
            raise
        if not all(bool(t.isfinite().all()) for t in tensors):
            return nan
        targets = tensors_in(data[1:])
        if not targets or not all(map(_is_constant, targets)):
            raise
        warn_user(f'Metric `{name}` is NaN, since all targets are equal. {type(e).__name__}: {e}')
        return nan


def _is_constant(t: Tensor) -> bool:
    values = t.flatten()
    return bool((values == values[:1]).all())
