# SPDX-License-Identifier: Apache-2.0
"""`Evaluator`: a validation loader with its own name, evaluation interval and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from learnkit.core.errors import LoaderError
from learnkit.core.time import Time, as_time


class Evaluator:
    """Validation loader with its own interval and metrics: `DataLoaders(train, {'night': Evaluator(dl, '500ba')})`.

    Raises `LoaderError` for a nested Evaluator, and `TimeError` for an invalid interval.

    >>> Evaluator([1, 2], every='2ep').every
    Time('2ep')
    """

    def __init__(
        self,
        dl: Any,  # the validation loader
        every: str | int | Time | None = 'fit',  # interval; None: never; 'fit': the Learner's
        metrics: Any = None,  # metrics of the loader; None: the Learner's metrics
    ) -> None:
        if isinstance(dl, Evaluator):
            raise LoaderError('An Evaluator holds a loader, not another Evaluator.')
        self.dl = dl
        self.metrics = metrics
        self.every: Any = every if every == 'fit' else as_every(every)
        self._as_metrics: Any = None

    def as_metrics(self, convert: Callable[[Any], Any]) -> Any:
        "Return the metrics, converted once, because metrics accumulate from batch to batch."
        if self._as_metrics is None:
            self._as_metrics = convert(self.metrics)
        return self._as_metrics


def as_every(every: Any) -> Time | None:
    """Return an interval between evaluations; a bare number counts epochs, None means never.

    >>> as_every(2), as_every('10m'), as_every(None)
    (Time('2ep'), Time('600sec'), None)
    """
    return None if every is None else as_time(every, 'ep')


def named_loaders(valid: Any) -> list[tuple[str, Any]]:
    "Return (name, loader) of each validation loader; raise `LoaderError` for an invalid name."
    if valid is None:
        return []
    if not isinstance(valid, Mapping):
        return [('valid', valid)]
    if not valid:
        raise LoaderError(
            'The dict of validation loaders is empty: pass None to train without validation.'
        )
    for name in valid:
        if not isinstance(name, str) or not name.strip() or name == 'train':
            raise LoaderError(
                f'{name!r} cannot name a validation loader: use a string other than "train".'
            )
    return list(valid.items())
