# SPDX-License-Identifier: Apache-2.0
"""Annealing schedules: functions that map a position from 0 to 1 to a value, and combinations of schedules."""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from learnkit.core.errors import ScheduleError

Schedule = Callable[[Any], Any]  # maps a position (0 to 1) to a value, or one value per param group

ROUNDING = 1e-6  # tolerance of sums of fractions


class Annealer:
    "Schedule from `start` to `end`: a function of the position (0 to 1) that can be pickled."

    def __init__(self, maker: Callable[..., Annealer], start: Any, end: Any, *more: Any) -> None:
        self.maker = maker
        self.f = maker.__wrapped__  # type: ignore[attr-defined]  # set by `wraps`
        self.more = more
        self.start = np.array(start) if isinstance(start, Sequence) else start
        self.end = np.array(end) if isinstance(end, Sequence) else end

    def __call__(self, pos: Any) -> Any:
        return self.f(self.start, self.end, pos, *self.more)

    def __reduce__(self) -> Any:
        return self.maker, (self.start, self.end, *self.more)

    def __repr__(self) -> str:
        return f'{self.maker.__name__}({", ".join(map(repr, (self.start, self.end, *self.more)))})'


def annealer(
    f: Callable[..., Any],  # f(start, end, pos, *more)
) -> Callable[..., Annealer]:
    """Convert `f(start, end, pos, *more)` to a function of `(start, end, *more)` that returns a schedule.

    `start` and `end` are numbers, arrays or tensors.

    >>> @annealer
    ... def SchedSquare(start, end, pos): return start + (end - start) * pos ** 2
    >>> SchedSquare(0., 8.)(0.5)
    2.0
    """

    @wraps(f)
    def make(start: Any, end: Any, *more: Any, **named: Any) -> Annealer:
        return Annealer(make, *signature.bind(start, end, *more, **named).args)

    parameters = inspect.signature(f).parameters.values()
    signature = inspect.Signature([p for p in parameters if p.name != 'pos'])
    return make


def _cos(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.cos()
    return np.cos(x) if isinstance(x, np.ndarray) else math.cos(x)


@annealer
def SchedLin(start: Any, end: Any, pos: Any) -> Any:
    """Anneal linearly from `start` to `end`.

    >>> SchedLin(1., 2.)(0.25)
    1.25
    """
    return start + pos * (end - start)


@annealer
def SchedCos(start: Any, end: Any, pos: Any) -> Any:
    """Anneal along half a cosine, flat at both ends: `start + (end - start) * (1 - cos(pi * pos)) / 2`.

    >>> SchedCos(1., 2.)
    SchedCos(1.0, 2.0)
    """
    return start + (1 + _cos(math.pi * (1 - pos))) * (end - start) / 2


@annealer
def SchedNo(start: Any, end: Any, pos: Any) -> Any:
    "Return `start` at every position."
    return start


@annealer
def SchedExp(start: Any, end: Any, pos: Any) -> Any:
    """Anneal exponentially: `start * (end / start) ** pos`.

    >>> SchedExp(1., 100.)(0.5)
    10.0
    """
    return start * (end / start) ** pos


@annealer
def SchedPoly(start: Any, end: Any, pos: Any, power: Any) -> Any:
    """Anneal by a power of the position: `start + (end - start) * pos ** power`.

    >>> SchedPoly(0., 1., 2)(0.5)
    0.25
    """
    return start + (end - start) * pos**power


class _Combined:
    "Sequence of schedules."

    def __init__(self, pcts: list[float], scheds: list[Schedule]) -> None:
        self.pcts = pcts
        self.scheds = scheds
        self.starts = [0.0, *accumulate(pcts)][:-1]

    def __call__(self, pos: Any) -> Any:
        pos = float(pos)
        i = bisect_right(self.starts, pos) - 1
        return self.scheds[i](min((pos - self.starts[i]) / self.pcts[i], 1.0))

    def __repr__(self) -> str:
        return f'combine_scheds({self.pcts}, {self.scheds})'


def combine_scheds(
    pcts: Sequence[float],  # length of each schedule, as a fraction of the whole; the sum is 1
    scheds: Sequence[Schedule],  # schedules over positions 0 to 1
) -> Schedule:
    """Return a schedule that runs several schedules in sequence; a boundary belongs to the later schedule.

    Raises `ScheduleError` for a sum other than 1, and if `pcts` and `scheds` differ in length.

    >>> f = combine_scheds([0.25, 0.75], [SchedLin(0., 1.), SchedNo(1., 1.)])
    >>> f(0.125), f(0.9)
    (0.5, 1.0)
    """
    shares = [float(p) for p in pcts]
    if len(shares) != len(scheds):
        raise ScheduleError(
            f'{len(shares)} shares for {len(scheds)} schedules: pass one share per schedule.'
        )
    if min(shares, default=0) < 0 or abs(math.fsum(shares) - 1) > ROUNDING:
        raise ScheduleError(
            f'pcts={shares} sum to {math.fsum(shares):g}: shares of a whole are 0 or more, and sum to 1.'
        )
    filled = [(p, f) for p, f in zip(shares, scheds, strict=True) if p]
    return _Combined([p for p, _ in filled], [f for _, f in filled])


def combined_cos(
    pct: float,  # position of the middle, 0 to 1
    start: Any,  # value at position 0
    middle: Any,  # value at position `pct`
    end: Any,  # value at position 1
) -> Schedule:
    """Return a schedule from `start` to `middle` to `end`, each along half a cosine.

    >>> f = combined_cos(0.25, 0., 1., 0.)
    >>> f(0.), f(0.25), f(1.)
    (0.0, 1.0, 0.0)
    """
    return combine_scheds([pct, 1 - pct], [SchedCos(start, middle), SchedCos(middle, end)])
