"""Checks of numbers that users pass as options."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

from learnkit.core.batch import short_repr
from learnkit.core.errors import LearnkitError, OptionError

__all__ = ['is_number', 'is_count', 'check_number', 'check_count']


def is_number(value: object) -> bool:
    """Return True for real numbers other than NaN and booleans.

    >>> is_number(2), is_number(float('inf')), is_number(True), is_number('2')
    (True, True, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def is_count(value: object, least: int = 1) -> bool:
    """Return True for integers of `least` or more, other than booleans.

    >>> is_count(2), is_count(0), is_count(2.0), is_count(True)
    (True, False, False, False)
    """
    try:
        # the annotation is ignored because `operator.index` is the check itself
        return not isinstance(value, bool) and operator.index(value) >= least  # type: ignore[arg-type]
    except TypeError:
        return False


def check_number(
    name: str,  # name of the option
    value: object,
    above: float = 0.0,  # lower bound, excluded
    below: float = math.inf,  # upper bound, excluded
    error: type[LearnkitError] = OptionError,
) -> None:
    "Raise `error` unless `value` is a number between two bounds."
    if is_number(value) and above < value < below:  # type: ignore[operator]
        return
    limit = '' if below == math.inf else f' and below {below:g}'
    raise error(f'{name}={short_repr(value)}: give a number above {above:g}{limit}.')


def check_count(
    name: str,  # name of the option
    value: Any,
    least: int = 1,
    error: type[LearnkitError] = OptionError,
) -> int:
    """Return `value` as an int; raise `error` if it is not a whole number, or below `least`.

    >>> check_count('n_epoch', -1, 0)
    Traceback (most recent call last):
    learnkit.core.errors.OptionError: n_epoch=-1: give a whole number, 0 or more.
    """
    if is_count(value, least):
        return operator.index(value)
    raise error(f'{name}={short_repr(value)}: give a whole number, {least} or more.')
