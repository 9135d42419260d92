"""Monitored values: find a column of the history, and read this epoch's value as a number."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from learnkit.callbacks.recorder import recorder_of
from learnkit.core.errors import MetricError, did_you_mean
from learnkit.core.learner_type import LearnerLike
from learnkit.data.dataloaders import evaluation_loaders

__all__ = ['records', 'find_column', 'epoch_row', 'as_number']

_OTHERS = {'fit', 'epoch', 'time'}  # columns of a row that are not values
_LOGGED = " For what `learn.log` averages, give a function: `monitor=lambda learn: learn.history[-1]['...']`."


def records(cb: Any) -> Any:
    "Return the Recorder of a callback's Learner, or raise `MetricError`."
    found = recorder_of(cb.learn)
    if found is None:
        raise MetricError(f'{type(cb).__name__} reads the Recorder, and this Learner has none.')
    return found


def find_column(cb: Any, monitor: str) -> int | None:
    "Return the index of a column, None if only an earlier fit logged it; raise `MetricError` if unknown."
    recorder = records(cb)
    names = _columns(recorder)
    if monitor not in names:
        recorder.find_keys()
        names = _columns(recorder)
    if monitor in names:
        return names.index(monitor)
    if any(monitor in row for row in _rows(cb.learn, recorder)) and monitor not in _OTHERS:
        return None
    if evaluation_loaders(cb.learn.dls):
        hint = did_you_mean(monitor, names) or _LOGGED
    else:
        hint = (
            f' Without validation data nothing is evaluated: `DataLoaders(train, valid)`.{_LOGGED}'
        )
    raise MetricError(
        f'{type(cb).__name__}(monitor={monitor!r}): no such value is recorded, but '
        f'{", ".join(names)}.{hint}'
    )


def _columns(recorder: Any) -> list[str]:
    return [n for n in recorder.metric_names[1:] if n != 'time']


def _rows(learn: LearnerLike, recorder: Any) -> list[dict[str, Any]]:
    "Return the history; for a fit being resumed also the history in the checkpoint."
    resumed = learn.run.resume
    if resumed is None:
        return list(recorder.history)
    saved = resumed.state['callbacks'].get(learn.callbacks.keys[id(recorder)], {})
    return [*recorder.history, *saved.get('history', ())]


def epoch_row(cb: Any) -> dict[str, Any] | None:
    "Return this epoch's row of the history, or None if the epoch was skipped."
    recorder = records(cb)
    if not recorder.history:
        return None
    row = recorder.history[-1]
    is_current = (row.get('fit'), row.get('epoch')) == (recorder.n_fits - 1, cb.learn.epoch)
    return row if is_current else None


def as_number(cb: Any, monitor: Any, value: Any) -> float | None:
    "Return a value as a float, or None for None and NaN; raise `MetricError` for other types."
    if value is None:
        return None
    if isinstance(value, (Tensor, np.ndarray)) and math.prod(value.shape) == 1:
        value = value.item()
    if not isinstance(value, Real) or isinstance(value, bool):
        raise MetricError(
            f'{type(cb).__name__} cannot compare {monitor!r}: it is {value!r}, no number.'
        )
    return None if math.isnan(value) else float(value)
