# SPDX-License-Identifier: Apache-2.0
"""`Time`, a duration or interval in one unit, and `Timestamp`, the progress of a run in all units."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import total_ordering
from numbers import Real
from typing import Any

from learnkit.core.errors import TimeError, did_you_mean

UNITS = {
    'iter': 'iterations',
    'ep': 'epochs',
    'ba': 'batches',
    'st': 'optimizer steps',
    'sp': 'samples',
    'tok': 'tokens',
    'sec': 'seconds',
    'dur': 'share of the run',
}
CONTINUOUS = ('sec', 'dur')  # the other units are whole numbers
SECONDS = {'d': 86400, 'h': 3600, 'm': 60, 's': 1}

_NUMBER = r'[0-9][0-9_]*(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,3})?'
_QUANTITY = re.compile(rf'\s*({_NUMBER})\s*([a-z]+)\s*')
_CLOCK = re.compile(''.join(rf'\s*(?:({_NUMBER})\s*{unit})?' for unit in SECONDS) + r'\s*')


@total_ordering
@dataclass(frozen=True, slots=True, init=False, repr=False)
class Time:
    """Immutable quantity in one unit.

    The units `iter ep ba st sp tok` are integer counts. `sec` and `dur` (a fraction of the run, 0 to 1) are floats.
    Comparison, addition and subtraction require equal units. Raises `TimeError` for an invalid time, and for an
    invalid result: a negative number, a fractional count, or a `dur` above 1.

    >>> Time('500ba') + Time(20, 'ba'), Time('1h20m'), Time('1e6sp')/4, Time('1_000ba')
    (Time('520ba'), Time('4800sec'), Time('250000sp'), Time('1000ba'))
    >>> Time('90m') > Time('1h'), Time('1h')/Time('90m')
    (True, 0.6666666666666666)
    """

    value: int | float
    unit: str

    def __init__(
        self,
        value: Time | str | int | float,  # string such as '500ba' or '1h20m', or a number of `unit`
        unit: str | None = None,  # unit of a number
    ) -> None:
        if unit is None:
            value, unit = _parse(value)
        elif isinstance(value, (Time, str)):
            raise TimeError(f'{value!r} has its own unit: leave out {unit!r}.')
        object.__setattr__(self, 'value', _convert_value(value, unit))
        object.__setattr__(self, 'unit', unit)

    def __str__(self) -> str:
        return f'{self.value!r}'.removesuffix('.0') + self.unit

    def __repr__(self) -> str:
        return f"Time('{self}')"

    def __bool__(self) -> bool:
        return self.value != 0

    def __lt__(self, other: Time) -> bool:
        if not isinstance(other, Time):
            return NotImplemented
        return self.value < self._get_value_of(other)

    def __add__(self, other: Time) -> Time:
        if not isinstance(other, Time):
            return NotImplemented
        return Time(self.value + self._get_value_of(other), self.unit)

    def __sub__(self, other: Time) -> Time:
        if not isinstance(other, Time):
            return NotImplemented
        return Time(self.value - self._get_value_of(other), self.unit)

    def __mul__(self, factor: Any) -> Time:
        is_number = isinstance(factor, Real)
        return Time(self.value * factor, self.unit) if is_number else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, Time):
            return self.value / self._get_value_of(other)
        is_number = isinstance(other, Real)
        return Time(self.value / other, self.unit) if is_number else NotImplemented

    def _get_value_of(self, other: Time) -> int | float:
        "Return the value of `other`; raise `TimeError` for another unit."
        if other.unit == self.unit:
            return other.value
        raise TimeError(
            f'{self} and {other} have different units ({UNITS[self.unit]}, {UNITS[other.unit]}): '
            'they cannot be compared or combined.'
        )


@dataclass(frozen=True, slots=True, repr=False)
class Timestamp:
    """Immutable progress of a run in every unit; comparison with a `Time` uses the unit of the `Time`.

    >>> now = Timestamp(ep=3, ba=1200, st=1200, sp=76800, sec=12.4)
    >>> now >= Time('500ba'), now['ep']
    (True, Time('3ep'))
    """

    iter: int = 0  # iterations, each of one or more whole epochs
    ep: int = 0  # epochs
    ba: int = 0  # batches
    st: int = 0  # optimizer steps
    sp: int = 0  # samples
    tok: int = 0  # tokens
    sec: float = 0.0  # seconds
    dur: float | None = None  # fraction of the run; None: unknown length

    def __getitem__(self, unit: str) -> Time:
        _check_unit(unit)
        return Time(self._get(unit), unit)

    def __lt__(self, other: Time) -> bool:
        return self._get(other.unit) < other.value if isinstance(other, Time) else NotImplemented

    def __le__(self, other: Time) -> bool:
        return self._get(other.unit) <= other.value if isinstance(other, Time) else NotImplemented

    def __gt__(self, other: Time) -> bool:
        return self._get(other.unit) > other.value if isinstance(other, Time) else NotImplemented

    def __ge__(self, other: Time) -> bool:
        return self._get(other.unit) >= other.value if isinstance(other, Time) else NotImplemented

    def __sub__(self, earlier: Timestamp) -> Timestamp:
        "Return the progress since `earlier`."
        if not isinstance(earlier, Timestamp):
            return NotImplemented
        units = [
            u for u in UNITS if getattr(self, u) is not None and getattr(earlier, u) is not None
        ]
        values: dict[str, Any] = {u: (self[u] - earlier[u]).value for u in units}
        return Timestamp(**values)

    def _get(self, unit: str) -> Any:
        "Return the value in `unit`; raise `TimeError` if `dur` is unknown."
        value = getattr(self, unit)
        if value is None:
            raise TimeError(
                "The share of the run ('dur') is not known: this run has no known length."
            )
        return value

    def replace(self, **changes: Any) -> Timestamp:
        "Return a copy with changed values, such as `replace(ep=3)`."
        return dataclasses.replace(self, **changes)

    def state_dict(self) -> dict[str, int | float | None]:
        return {u: getattr(self, u) for u in UNITS}

    @classmethod
    def from_state_dict(cls, sd: dict[str, int | float | None]) -> Timestamp:
        "Create a `Timestamp` from a state dict; missing units get default values."
        return cls(**sd)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        values = {u: v for u, v in self.state_dict().items() if v or (u == 'dur' and v is not None)}
        rounded = {u: round(v, 3) if u in CONTINUOUS else v for u, v in values.items()}
        return f'Timestamp({", ".join(f"{u}={v}" for u, v in rounded.items())})'


def as_time(
    value: Time | str | int | float,  # interval such as '500ba', or number of `unit`
    unit: str | None = None,  # unit of a bare number
) -> Time:
    """Convert an interval to a `Time`. Raises `TimeError` for an invalid time and for zero.

    >>> as_time(3, 'ep'), as_time('90s', 'ep')
    (Time('3ep'), Time('90sec'))
    """
    time = Time(value) if isinstance(value, (Time, str)) else Time(value, unit)
    if not time:
        raise TimeError(f'An interval must be positive, got {time}.')
    return time


def count_crossings(
    before: Timestamp,  # start, exclusive
    after: Timestamp,  # end, inclusive
    every: Time,  # interval
) -> int:
    """Return the number of multiples of `every` after `before` and up to `after`.

    The crossings of consecutive ranges add up to the crossings of the whole range. In `sec` and `dur`, a multiple
    missed by a rounding error counts as reached.

    >>> count_crossings(Timestamp(ba=90), Timestamp(ba=310), Time('100ba'))
    3
    """
    start = before._get(every.unit)
    end = after._get(every.unit)
    # `dur` of a loader that is longer than its `len` is corrected at the next epoch
    if end < start:
        return 0
    return count_multiples(end, every) - count_multiples(start, every)


def count_multiples(value: Any, every: Time) -> int:
    "Return the number of whole intervals in `value`, with a tolerance of 1e-9 intervals for floats."
    if every.unit in CONTINUOUS:
        return math.floor(value / every.value + 1e-9)
    return int(value // every.value)


def _parse(value: Any) -> tuple[Any, str]:
    "Return the number and unit of a string or `Time`."
    if isinstance(value, Time):
        return value.value, value.unit
    if not isinstance(value, str):
        raise TimeError(f'{value!r} is not a time: a number needs a unit. {_describe_units()}')
    text = value.lower()
    quantity = _QUANTITY.fullmatch(text)
    if quantity and quantity[2] in UNITS:
        return Decimal(quantity[1]), quantity[2]
    clock = _CLOCK.fullmatch(text)
    if clock and any(clock.groups()):
        parts = zip(clock.groups(), SECONDS.values(), strict=True)
        return sum(Decimal(n) * seconds for n, seconds in parts if n), 'sec'
    raise TimeError(f'{value!r} is not a time. {_describe_units()}')


def _convert_value(value: Any, unit: str) -> int | float:
    "Convert a number to a float for `sec` and `dur`, otherwise to an int; raise `TimeError` for an invalid number."
    _check_unit(unit)
    is_number = isinstance(value, (Real, Decimal)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise TimeError(f'{value!r} is not a number of {UNITS[unit]}. {_describe_units()}')
    if value < 0:
        raise TimeError(f'A time cannot be negative, got {value}{unit}.')
    if unit == 'dur' and value > 1:
        raise TimeError(f'A share of the run lies within 0 and 1, got {value}dur.')
    if unit in CONTINUOUS:
        return float(value)
    if value != int(value):
        raise TimeError(f'{UNITS[unit].capitalize()} are whole numbers, got {value}{unit}.')
    return int(value)


def _check_unit(unit: Any) -> None:
    if unit not in UNITS:
        raise TimeError(
            f'There is no unit {unit!r}.{did_you_mean(str(unit), UNITS)} {_describe_units()}'
        )


def format_time(value: int | float, unit: str) -> str:
    """Return a time in words.

    >>> format_time(1200, 'ba'), format_time(1, 'ep'), format_time(0.25, 'dur'), format_time(4805.3, 'sec')
    ('1,200 batches', '1 epoch', '25% of the run', '1:20:05')
    """
    if unit == 'dur':
        return f'{value * 100:.4g}% of the run'
    if unit == 'sec':
        return f'{value:.3g} seconds' if value < 60 else format_seconds(value)
    words = UNITS[unit]
    if value == 1:
        words = words.removesuffix('es' if unit == 'ba' else 's')
    return f'{value:,} {words}'


def _describe_units() -> str:
    units = ', '.join(f'{unit} ({words})' for unit, words in UNITS.items())
    return f"The units are {units}, written as '500ba', or a wall time as '1h20m'."


def format_seconds(seconds: float) -> str:
    """Format a duration as MM:SS or H:MM:SS.

    >>> format_seconds(62.7), format_seconds(3725)
    ('01:02', '1:02:05')
    """
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f'{hours}:{m:02}:{s:02}' if hours else f'{m:02}:{s:02}'
