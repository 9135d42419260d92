# SPDX-License-Identifier: Apache-2.0
"""Values that callbacks watch: which values are evaluations, and which one is better.

An absent value (None) is not an evaluation: it neither counts as a failure to improve nor replaces a value. NaN is an
evaluation that is never better than another and never the best, whether it comes first or later."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan, prod
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from learnkit.core.errors import MetricError


def as_number(
    owner: Any,  # callback that watches the value, for the message
    name: Any,  # name of the value, or the function that returns it
    value: Any,  # None, a number, or a tensor or array of one element
) -> float | None:
    """Return a watched value as a float, which may be NaN, or None if it is absent.

    Raises `MetricError` for any other type.

    >>> as_number(None, 'loss', np.float32(0.5)), as_number(None, 'loss', None)
    (0.5, None)
    """
    if value is None:
        return None
    if isinstance(value, (Tensor, np.ndarray)) and prod(value.shape) == 1:
        value = value.item()
    if not isinstance(value, Real) or isinstance(value, bool):
        raise MetricError(f'{type(owner).__name__}: {name!r}: it is {value!r}, not a number.')
    return float(value)


def can_be_best(value: Any) -> bool:
    """Return True unless a value is absent or NaN.

    >>> can_be_best(float('inf')), can_be_best(float('nan')), can_be_best(None)
    (True, False, False)
    """
    return value is not None and not isnan(value)


def is_better(
    value: float | None,  # new value; None: absent
    best: float | None,  # best value so far; None: no value so far
    comp: Callable[[Any, Any], Any],  # f(new, best), such as `np.less`
) -> bool:
    """Return True if a value is better than the best one so far; any number is better than None or NaN.

    >>> nan = float('nan')
    >>> is_better(2., 3., np.less), is_better(2., nan, np.less), is_better(nan, None, np.less)
    (True, True, False)
    """
    if not can_be_best(value):
        return False
    return not can_be_best(best) or bool(comp(value, best))
