"""How often and how long: `Time` is a quantity in one unit, `Timestamp` says how far a run has come in all of them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import total_ordering
from numbers import Integral, Real
from typing import Any

from learnkit.core.errors import TimeError, did_you_mean
from learnkit.core.html import definitions, never_raising

__all__ = ['UNITS', 'Time', 'Timestamp', 'as_time', 'crossings', 'format_seconds', 'in_words']

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
LARGEST = 2**63 - 1  # of a count: what a checkpoint can hold

# what users write for each
_SPELLED = {
    'iter': 'iteration iterations',
    'ep': 'epoch epochs',
    'ba': 'batch batches',
    'st': 'step steps',
    'sp': 'sample samples',
    'tok': 'token tokens',
    'd': 'day days',
    'h': 'hr hour hours',
    'm': 'min mins minute minutes',
    's': 'secs second seconds',
}

_NUMBER = r'[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,3})?'
_QUANTITY = re.compile(rf'\s*(-?{_NUMBER})\s*([a-z]*)\s*')
_PERCENT = re.compile(rf'\s*({_NUMBER})\s*%\s*')
_CLOCK = re.compile(''.join(rf'\s*(?:({_NUMBER})\s*{unit})?' for unit in SECONDS) + r'\s*')


@total_ordering
@dataclass(frozen=True, slots=True, init=False, repr=False)
class Time:
    """A quantity of one unit, immutable.

    The units `iter ep ba st sp tok` are counted; `sec` and `dur` (a share of the run, 0 to 1) need not be whole.
    It compares, adds and subtracts within its unit only. Raises `TimeError` for what is no time, and for a result that
    is none: below zero, a broken number of what is counted, or a share above 1.

    >>> Time('500ba') + Time(20, 'ba'), Time('1h20m'), Time('1e6sp')/4
    (Time('520ba'), Time('4800sec'), Time('250000sp'))
    >>> Time('90m') > Time('1h'), Time('1h')/Time('90m')
    (True, 0.6666666666666666)
    """

    value: int | float
    unit: str

    def __init__(
        self,
        value: Time | str | int | float,  # '500ba', '1h20m', or a number
        unit: str | None = None,  # of a number
    ) -> None:
        if unit is None:
            value, unit = _parse(value)
        elif isinstance(value, (Time, str)):
            raise TimeError(f'{value!r} has its own unit: leave out {unit!r}.')
        object.__setattr__(self, 'value', _valid(value, unit))
        object.__setattr__(self, 'unit', unit)

    def __str__(self) -> str:
        return f'{self.value!r}'.removesuffix('.0') + self.unit

    def __repr__(self) -> str:
        return f"Time('{self}')"

    @never_raising
    def _repr_html_(self) -> str:
        return definitions({str(self): in_words(self.value, self.unit)})

    def __bool__(self) -> bool:
        return self.value != 0

    def __lt__(self, other: Time) -> bool:
        if not isinstance(other, Time):
            return NotImplemented
        return self.value < self._same_unit(other)

    def __add__(self, other: Time) -> Time:
        if not isinstance(other, Time):
            return NotImplemented
        return Time(self.value + self._same_unit(other), self.unit)

    def __sub__(self, other: Time) -> Time:
        if not isinstance(other, Time):
            return NotImplemented
        return Time(self.value - self._same_unit(other), self.unit)

    def __mul__(self, factor: Any) -> Time:
        return self._map(lambda v: v * factor) if isinstance(factor, Real) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, Time):
            return self.value / self._same_unit(other)
        return (
            self._map(lambda v: Fraction(v) / other) if isinstance(other, Real) else NotImplemented
        )

    def __floordiv__(self, other: Any) -> Any:
        if isinstance(other, Time):
            return int(self.value // self._same_unit(other))
        return self._map(lambda v: v // other) if isinstance(other, Real) else NotImplemented

    def __mod__(self, other: Time) -> Time:
        if not isinstance(other, Time):
            return NotImplemented
        return Time(self.value % self._same_unit(other), self.unit)

    def __abs__(self) -> Time:
        return self

    def _map(self, change: Callable[[Any], Any]) -> Time:
        return Time(change(self.value), self.unit)

    def _same_unit(self, other: Time) -> int | float:
        "The value of `other`, which has to be in this unit."
        if other.unit == self.unit:
            return other.value
        raise TimeError(
            f'{self} and {other} have different units ({UNITS[self.unit]}, {UNITS[other.unit]}): '
            'they cannot be compared or combined.'
        )


@dataclass(frozen=True, slots=True, repr=False)
class Timestamp:
    """What a run has finished, in every unit, immutable. It compares with a `Time` in that one's unit.

    >>> now = Timestamp(ep=3, ba=1200, st=1200, sp=76800, sec=12.4)
    >>> now >= Time('500ba'), now['ep'], now + Time('1ep')
    (True, Time('3ep'), Timestamp(ep=4, ba=1200, st=1200, sp=76800, sec=12.4))
    """

    iter: int = 0  # iterations: numbers of whole epochs
    ep: int = 0  # epochs
    ba: int = 0  # batches
    st: int = 0  # optimizer steps
    sp: int = 0  # samples
    tok: int = 0  # tokens
    sec: float = 0.0  # seconds
    dur: float | None = None  # the share of the run, where its length is known

    def __getitem__(self, unit: str) -> Time:
        return Time(self._in(_known(unit)), unit)

    get = __getitem__

    def __lt__(self, other: Time) -> bool:
        return self._in(other.unit) < other.value if isinstance(other, Time) else NotImplemented

    def __le__(self, other: Time) -> bool:
        return self._in(other.unit) <= other.value if isinstance(other, Time) else NotImplemented

    def __gt__(self, other: Time) -> bool:
        return self._in(other.unit) > other.value if isinstance(other, Time) else NotImplemented

    def __ge__(self, other: Time) -> bool:
        return self._in(other.unit) >= other.value if isinstance(other, Time) else NotImplemented

    def __add__(self, other: Time) -> Timestamp:
        if not isinstance(other, Time):
            return NotImplemented
        return self.replace(**{other.unit: (self[other.unit] + other).value})

    def __sub__(self, earlier: Timestamp) -> Timestamp:
        "What was finished since `earlier`."
        if not isinstance(earlier, Timestamp):
            return NotImplemented
        units = [
            u for u in UNITS if getattr(self, u) is not None and getattr(earlier, u) is not None
        ]
        values: dict[str, Any] = {u: (self[u] - earlier[u]).value for u in units}
        return Timestamp(**values)

    def _in(self, unit: str) -> Any:
        "The plain number in `unit`."
        value = getattr(self, unit)
        if value is None:
            raise TimeError(
                "The share of the run ('dur') is not known: this run has no known length."
            )
        return value

    def replace(self, **changes: Any) -> Timestamp:
        "Return a copy with other values."
        return dataclasses.replace(self, **changes)

    def state_dict(self) -> dict[str, int | float | None]:
        return {u: getattr(self, u) for u in UNITS}

    @classmethod
    def from_state_dict(cls, sd: dict[str, int | float | None]) -> Timestamp:
        "Return the `Timestamp` that was saved; a unit that is missing starts at its default."
        values: dict[str, Any] = {
            _known(u): v if v is None else Time(v, u).value for u, v in sd.items()
        }
        return cls(**values)

    def __repr__(self) -> str:
        values = {u: v for u, v in self.state_dict().items() if v or (u == 'dur' and v is not None)}
        return f'Timestamp({", ".join(f"{u}={round(v, 3) if u in CONTINUOUS else v}" for u, v in values.items())})'

    @never_raising
    def _repr_html_(self) -> str:
        values = {u: v for u, v in self.state_dict().items() if v is not None}
        return definitions({u: in_words(v, u) for u, v in values.items()}, 'finished so far')


def as_time(
    value: Time | str | int | float,  # an interval: '500ba', or a number of `unit`
    unit: str | None = None,  # what a bare number counts
) -> Time:
    """Return an interval as a `Time`. Raises `TimeError` for zero too.

    >>> as_time(3, 'ep'), as_time('90s', 'ep')
    (Time('3ep'), Time('90sec'))
    """
    time = Time(value) if isinstance(value, (Time, str)) else Time(value, unit)
    if not time:
        raise TimeError(f'An interval must be positive, got {time}.')
    return time


def crossings(
    before: Timestamp,  # where the last look was
    after: Timestamp,  # now
    every: Time,  # the interval
) -> int:
    """Return how many multiples of `every` lie after `before` and up to `after`.

    Parts of a stretch add up to the whole. In seconds and shares, a multiple that is missed by a rounding error counts
    as reached.

    >>> crossings(Timestamp(ba=90), Timestamp(ba=310), Time('100ba'))
    3
    """
    if not every:
        raise TimeError(f'An interval must be positive, got {every}.')
    start, end = before._in(every.unit), after._in(every.unit)
    if end < start and every.unit == 'dur':
        return 0  # a loader longer than it says: its epoch begins where it should
    if end < start:
        raise TimeError(f'{after} lies before {before}: crossings are counted forwards.')
    return _multiples(end, every) - _multiples(start, every)


def _multiples(value: Any, every: Time) -> int:
    "The whole intervals in `value`; a third of a run is no exact float, so a billionth of an interval may lack."
    return (
        math.floor(value / every.value + 1e-9)
        if every.unit in CONTINUOUS
        else int(value // every.value)
    )


def _parse(value: Any) -> tuple[Any, str]:
    "The number and unit that `value` spells."
    if isinstance(value, Time):
        return value.value, value.unit
    if not isinstance(value, str):
        raise TimeError(f'{value!r} is no time: a number needs a unit. {_help()}')
    text = value.lower()
    if percent := _PERCENT.fullmatch(text):
        return Decimal(percent[1]) / 100, 'dur'
    if (quantity := _QUANTITY.fullmatch(text)) and quantity[2] in UNITS:
        return Decimal(quantity[1]), quantity[2]
    if (clock := _CLOCK.fullmatch(text)) and any(clock.groups()):
        parts = zip(clock.groups(), SECONDS.values(), strict=True)
        return sum(Decimal(n) * seconds for n, seconds in parts if n), 'sec'
    raise TimeError(
        f'{value!r} is no time.{_meant(*quantity.groups()) if quantity else ""} {_help()}'
    )


def _meant(number: str, word: str) -> str:
    "Say how a time is written whose unit was spelled out."
    short = next((short for short, names in _SPELLED.items() if word in names.split()), None)
    return f' Write {number + short!r}.' if short else did_you_mean(word, UNITS)


def _valid(value: Any, unit: str) -> int | float:
    "The number as `unit` keeps it: an int where it counts, else a float."
    _known(unit)
    if isinstance(value, bool) or not isinstance(value, (Real, Decimal)) or not _finite(value):
        raise TimeError(f'{value!r} is no number of {UNITS[unit]}. {_help()}')
    return _in_range(value, unit)


def _in_range(value: Any, unit: str) -> int | float:
    if value < 0:
        raise TimeError(f'A time cannot be negative, got {value}{unit}.')
    if unit == 'dur' and value > 1:
        raise TimeError(f'A share of the run lies within 0 and 1, got {value}dur.')
    if unit in CONTINUOUS:
        return float(value) + 0.0  # no -0.0
    if value > LARGEST:
        raise TimeError(f'{value}{unit} is too large to count.')
    if not isinstance(value, Integral) and value != int(value):
        raise TimeError(f'{UNITS[unit].capitalize()} are whole numbers, got {value}{unit}.')
    return int(value)


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False  # an int that no float can hold


def _known(unit: Any) -> str:
    if isinstance(unit, str) and unit in UNITS:
        return unit
    raise TimeError(f'There is no unit {unit!r}.{did_you_mean(str(unit), UNITS)} {_help()}')


def in_words(value: int | float, unit: str) -> str:
    """Write a time out.

    >>> in_words(1200, 'ba'), in_words(1, 'ep'), in_words(0.25, 'dur'), in_words(4805.3, 'sec')
    ('1,200 batches', '1 epoch', '25% of the run', '1:20:05')
    """
    if unit == 'dur':
        return f'{value * 100:.4g}% of the run'
    if unit == 'sec':
        return f'{value:.3g} seconds' if value < 60 else format_seconds(value)
    words = UNITS[unit] if value != 1 else UNITS[unit].removesuffix('es' if unit == 'ba' else 's')
    return f'{value:,} {words}'


def _help() -> str:
    units = ', '.join(f'{unit} ({words})' for unit, words in UNITS.items())
    return f"The units are {units}, written as '500ba', or a wall time as '1h20m'."


def format_seconds(seconds: float) -> str:
    """Return a duration as a clock shows it.

    >>> format_seconds(62.7), format_seconds(3725)
    ('01:02', '1:02:05')
    """
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f'{hours}:{m:02}:{s:02}' if hours else f'{m:02}:{s:02}'
