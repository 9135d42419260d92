# SPDX-License-Identifier: Apache-2.0
"""Recorded losses of a run, and their comparison with the losses of the same batches when they are repeated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from learnkit.core.errors import CheckpointError
from learnkit.core.validation import warn_user

_NEARBY = 10  # batches on each side of a jump, whose jumps are the noise
STANDS_OUT = (
    10.0  # least size of a spike; losses of 1,000 batches with Gaussian noise jump by about 6
)


@dataclass(frozen=True)
class Jump:
    """Change of the loss from one batch to the next.

    >>> print(Jump(11, 1.0, 5.0, 12.5))
    loss 1 -> 5, 12.5 times the noise nearby
    """

    ba: int  # number of the batch after the change
    before: float
    after: float
    size: float  # change over the noise: the median of the absolute changes of ten batches on each side

    def __str__(self) -> str:
        return f'loss {self.before:.4g} -> {self.after:.4g}, {self.size:.3g} times the noise nearby'


def measure_jumps(
    losses: Mapping[int, float],  # by the number of the batch
) -> list[Jump]:
    """Return the change of the loss at each batch but the first; a loss that is not finite has an infinite size.

    >>> [jump.size for jump in measure_jumps({10: 1.0, 11: 2.0, 12: 1.0, 13: 6.0, 14: 5.0})]
    [1.0, -1.0, 5.0, -1.0]
    """
    if len(losses) < 2:
        return []
    batches = [*losses]
    values = np.array([*losses.values()])
    with np.errstate(invalid='ignore'):
        jumps = np.diff(values)
    known = np.where(np.isfinite(jumps), np.abs(jumps), 0.0)
    windows = sliding_window_view(np.pad(known, _NEARBY, mode='reflect'), 2 * _NEARBY + 1)
    least = max(np.median(known) / 1000, np.finfo(float).tiny)  # noise of constant losses
    sizes = jumps / np.median(windows, axis=-1).clip(least)
    sizes[~np.isfinite(values[1:])] = np.inf
    return [
        Jump(batches[i + 1], float(values[i]), float(values[i + 1]), float(size))
        for i, size in enumerate(sizes)
    ]


@dataclass(frozen=True)
class Record:
    """Recorded losses of a run, by the number of the batch; a batch of `batches` without a loss was skipped.

    >>> record = Record({3: 0.5, 5: 0.25}, range(3, 6))
    >>> record.find_other({3: 0.5, 5: 0.25}, range(3, 6))
    []
    >>> record.find_other({3: 0.5, 4: 1.0}, range(3, 5)), record.find_other({6: 1.0}, [6])
    (['batch 4 has the loss 1.0, and had no loss'], ['the run has recorded no loss of batch 6'])
    """

    losses: Mapping[int, float] = field(default_factory=dict)
    batches: range = range(0)  # batches that the record covers

    def find_other(self, losses: Mapping[int, float], batches: Iterable[int]) -> list[str]:
        "Return a description of the first batch whose loss is not the recorded one, bit for bit."
        for ba in batches:
            if ba not in self.batches:
                return [f'the run has recorded no loss of batch {ba}']
            if not is_same_loss(losses.get(ba), self.losses.get(ba)):
                now, known = (describe_loss(o.get(ba)) for o in (losses, self.losses))
                return [f'batch {ba} has {now}, and had {known}']
        return []


def is_same_loss(a: float | None, b: float | None) -> bool:
    "Return True for equal losses, and for two batches without a loss; NaN equals itself."
    if a is None or b is None:
        return a is b
    return a == b or (a != a and b != b)


def describe_loss(loss: float | None) -> str:
    "Return a loss as a noun phrase."
    return 'no loss' if loss is None else f'the loss {loss!r}'


def read_record(
    recorder: Mapping[str, Any],  # state of the Recorder; may be empty
    first: int,  # number of the first batch of the fit
    n: int,  # number of batches up to the checkpoint
) -> Record:
    "Return the losses in a Recorder's state; the record is empty if they cannot be assigned to batches."
    if not recorder:
        return Record()
    losses = recorder['smooth_loss']['raw']
    skipped = set(recorder['skipped'].tolist())
    numbers = [i for i in range(n) if i not in skipped]
    if not len(losses) or len(losses) != len(numbers):
        return Record()
    found = {first + i: float(loss) for i, loss in zip(numbers, losses, strict=True)}
    return Record(found, range(first, first + n))


def refuse(reasons: list[str], exact: bool) -> None:
    "Raise `CheckpointError` with the reasons why a run is not repeated exactly; warn if `exact` is False."
    if not reasons:
        return
    text = '\n  '.join(['The run cannot be repeated exactly:', *reasons])
    if exact:
        raise CheckpointError(f'{text}\nTo rewind anyway, pass `exact=False`.')
    warn_user(text)
