# SPDX-License-Identifier: Apache-2.0
"""Composer's events, time units, times that compare with strings, and timestamps."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from datetime import timedelta
from enum import StrEnum
from functools import partial, total_ordering
from types import SimpleNamespace
from typing import Any

from learnkit.core.errors import TimeError
from learnkit.core.time import Time
from learnkit.engine.callback_state import DataKind, data_kinds
from learnkit.interop.common.hooks import is_of

# Composer events by learnkit event: in every phase, then in the phase that each table is named after
ALWAYS = {
    'after_create': 'init',
    'before_load': 'before_load',
    'after_load': 'after_load',
    'before_predict': 'predict_start',
    'after_predict': 'predict_end',
    'close': 'close',
    'post_close': 'post_close',
}
FIT = {
    'before_fit': 'fit_start',
    'before_iteration': 'iteration_start',
    'before_epoch': 'epoch_start',
    'after_train': 'epoch_end',
    'epoch_checkpoint': 'epoch_checkpoint',
    'after_iteration': 'iteration_end',
    'iteration_checkpoint': 'iteration_checkpoint',
    'after_fit': 'fit_end',
}
TRAIN = {
    'before_draw': 'before_dataloader',
    'after_draw': 'after_dataloader',
    'before_batch': 'batch_start before_train_batch',
    'before_pred': 'before_forward',
    'after_pred': 'after_forward before_loss',
    'after_loss': 'after_loss',
    'before_backward': 'before_backward',
    'after_backward': 'after_backward',
    'before_step': 'after_train_batch',
    'after_batch': 'batch_end',
    'batch_checkpoint': 'batch_checkpoint',
}
EVAL = {
    'before_validate': 'eval_start',
    'before_batch': 'eval_batch_start',
    'before_pred': 'eval_before_forward',
    'after_pred': 'eval_after_forward',
    'after_batch': 'eval_batch_end',
    'after_validate': 'eval_end',
}
PREDICT = {
    'before_batch': 'predict_batch_start',
    'before_pred': 'predict_before_forward',
    'after_pred': 'predict_after_forward',
    'after_batch': 'predict_batch_end',
}
FIT_EVAL = {'before_eval': 'eval_before_all', 'after_eval': 'eval_after_all'}
STANDALONE_EVAL = {'before_eval': 'eval_standalone_start', 'after_eval': 'eval_standalone_end'}
TABLES = (ALWAYS, FIT, TRAIN, EVAL, PREDICT, FIT_EVAL, STANDALONE_EVAL)


class _EventName(StrEnum):
    """Event of Composer's loop: it equals its value in lower or upper case, and Composer's `Event` of the same name.

    >>> Event.FIT_START == 'fit_start', Event.FIT_START == 'FIT_START', Event.FIT_START.name, Event.FIT_START.value
    (True, True, 'FIT_START', 'fit_start')
    """

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return self.value == str.lower(other)
        return type(other).__name__ == 'Event' and self.value == getattr(other, 'value', None)

    def __hash__(self) -> int:
        return str.__hash__(self)

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return cls.__members__.get(value.upper()) if isinstance(value, str) else None


_NAMES = [name for table in TABLES for names in table.values() for name in names.split()]
Event: Any = _EventName(  # type: ignore[call-arg]  # mypy knows no members of a base
    'Event', {name.upper(): name for name in _NAMES if name not in ('close', 'post_close')}
)


class TimeUnit(StrEnum):
    "Units of Composer's time strings."

    ITERATION = 'iter'
    EPOCH = 'ep'
    BATCH = 'ba'
    SAMPLE = 'sp'
    TOKEN = 'tok'
    DURATION = 'dur'
    SECOND = 'sec'


@total_ordering
class ComposerTime:
    """Number with a unit that compares with numbers, strings and other times of the same unit.

    Unlike `learnkit.core.time.Time`, a `ComposerTime` may be negative, like differences in Composer.

    >>> now = ComposerTime(3, 'ep')
    >>> now.value, int(now), now >= '2ep', now == 3, now - '5ep', now / '6ep'
    (3, 3, True, True, Time(-2, TimeUnit.EPOCH), Time(0.5, TimeUnit.DURATION))
    """

    def __init__(
        self,
        value: int | float,
        unit: str,  # value of `TimeUnit`
    ) -> None:
        self.value = value
        self.unit = TimeUnit(getattr(unit, 'value', unit))

    @classmethod
    def from_timestring(cls, text: str) -> ComposerTime:
        "Return the time of a string such as '3ep'."
        time = Time(text)
        return cls(time.value, time.unit)

    def _value_of(self, other: Any) -> int | float:
        "Return the value of a time, a string or a number in this unit; raise `TimeError` for another unit."
        if isinstance(other, (int, float)):
            return other
        time = Time(other) if isinstance(other, str) else other
        if getattr(time.unit, 'value', time.unit) == self.unit.value:
            return time.value
        raise TimeError(
            f'{self} and {other} have different units: they cannot be compared or combined.'
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (int, float, str)) and not hasattr(other, 'unit'):
            return NotImplemented
        return self.value == self._value_of(other)

    def __lt__(self, other: Any) -> bool:
        return self.value < self._value_of(other)

    def __hash__(self) -> int:
        return hash((self.value, self.unit))

    def __int__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __add__(self, other: Any) -> ComposerTime:
        return self._new(self.value + self._value_of(other))

    def __sub__(self, other: Any) -> ComposerTime:
        return self._new(self.value - self._value_of(other))

    def __mod__(self, other: Any) -> ComposerTime:
        return self._new(self.value % self._value_of(other))

    def __truediv__(self, other: Any) -> ComposerTime:
        if isinstance(other, (int, float)):
            return self._new(type(self.value)(self.value / other))
        return ComposerTime(self.value / self._value_of(other), TimeUnit.DURATION)

    def _new(self, value: int | float) -> ComposerTime:
        return ComposerTime(value, self.unit)

    def to_timestring(self) -> str:
        "Return the string of this time, such as '3ep'."
        return f'{self.value}{self.unit.value}'

    __str__ = to_timestring

    def __repr__(self) -> str:
        return f'Time({self.value}, TimeUnit.{self.unit.name})'


_UNITS = {'iteration': 'iter', 'epoch': 'ep', 'batch': 'ba', 'sample': 'sp', 'token': 'tok'}


@total_ordering
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ComposerTimestamp:
    """Finished training in every unit; comparisons with a time use the unit of that time.

    >>> now = ComposerTimestamp(epoch=2, batch=7, batch_in_epoch=1, sample=56)
    >>> now.batch.value, now >= '7ba', now < '3ep', now.get('sp')
    (7, True, True, Time(56, TimeUnit.SAMPLE))
    """

    iteration: Any = 0
    epoch: Any = 0
    batch: Any = 0
    sample: Any = 0
    token: Any = 0
    epoch_in_iteration: Any = 0
    token_in_iteration: Any = 0
    batch_in_epoch: Any = 0
    sample_in_epoch: Any = 0
    token_in_epoch: Any = 0
    total_wct: timedelta = field(default_factory=timedelta)
    epoch_wct: timedelta = field(default_factory=timedelta)

    def __post_init__(self) -> None:
        for f in fields(self):
            unit = _UNITS.get(f.name.split('_')[0])
            if unit and not f.name.endswith('wct'):
                object.__setattr__(self, f.name, ComposerTime(getattr(self, f.name), unit))

    def get(self, unit: Any) -> ComposerTime:
        "Return the time in one unit."
        wanted = TimeUnit(getattr(unit, 'value', unit))
        if wanted is TimeUnit.SECOND:
            return ComposerTime(self.total_wct.total_seconds(), wanted)
        name = next((name for name, short in _UNITS.items() if short == wanted), None)
        if name is None:
            raise TimeError(
                f'A timestamp has no {wanted.value!r}: ask `state.get_elapsed_duration()`.'
            )
        return getattr(self, name)

    def _match_unit(self, other: Any) -> tuple[ComposerTime, Any]:
        "Return this timestamp in the unit of another time, and that time."
        if isinstance(other, str):
            other = ComposerTime.from_timestring(other)
        return self.get(other.unit), other

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ComposerTimestamp):
            return self.state_dict() == other.state_dict()
        if not isinstance(other, str) and not hasattr(other, 'unit'):
            return NotImplemented
        own, other_time = self._match_unit(other)
        return own == other_time

    def __lt__(self, other: Any) -> bool:
        own, other_time = self._match_unit(other)
        return own < other_time

    def __hash__(self) -> int:
        return hash(tuple(self.state_dict().items()))

    def __repr__(self) -> str:
        return f'Timestamp({", ".join(f"{k}={v}" for k, v in self.state_dict().items() if v)})'

    def state_dict(self) -> dict[str, Any]:
        "Return the fields as plain numbers, durations in seconds."
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            k: v.total_seconds() if isinstance(v, timedelta) else v.value for k, v in values.items()
        }


def _is_instance(name: str, value: Any) -> bool:
    "Return True for an instance of Composer's class of this name, or of learnkit's `Composer<name>`."
    cls = type(value)
    is_time_module = cls.__module__ in ('composer.core.time', __name__)
    return is_time_module and cls.__name__.removeprefix('Composer') == name


def _encode_time(time: Any) -> tuple[Any, str]:
    return time.value, time.unit.value


def _decode_time(data: Any, cb: Any) -> Any:
    types = types_for(cb)
    value, unit = data
    return types.Time(value, types.TimeUnit(unit))


def _encode_timestamp(timestamp: Any) -> dict[str, Any]:
    "Return the fields that Composer's timestamps share with `ComposerTimestamp`, as plain values."
    values = {f.name: getattr(timestamp, f.name) for f in fields(ComposerTimestamp)}
    return {name: getattr(value, 'value', value) for name, value in values.items()}


def _decode_timestamp(data: Any, cb: Any) -> Any:
    return types_for(cb).Timestamp(**data)


data_kinds['Composer time'] = DataKind(partial(_is_instance, 'Time'), _encode_time, _decode_time)
data_kinds['Composer timestamp'] = DataKind(
    partial(_is_instance, 'Timestamp'), _encode_timestamp, _decode_timestamp
)


_LEARNKIT_TYPES = SimpleNamespace(
    Event=Event, Time=ComposerTime, Timestamp=ComposerTimestamp, TimeUnit=TimeUnit
)


def types_for(cb: object) -> Any:
    "Return the time and event classes for `cb`: Composer's for a callback of Composer, otherwise learnkit's."
    time = sys.modules.get('composer.core.time')
    event = sys.modules.get('composer.core.event')
    if not is_of(cb, 'composer') or time is None or event is None:
        return _LEARNKIT_TYPES
    return SimpleNamespace(
        Event=event.Event, Time=time.Time, Timestamp=time.Timestamp, TimeUnit=time.TimeUnit
    )
