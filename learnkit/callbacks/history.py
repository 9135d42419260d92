"""History of a training: one row per epoch."""

from __future__ import annotations

from typing import Any

from learnkit.core.html import never_raising, table
from learnkit.core.time import format_seconds

__all__ = ['History']


class History(list[dict[str, Any]]):
    """Rows of all fits, one dict per epoch: `fit`, `epoch`, losses, metrics, logged values, `time` (s).

    >>> History([{'epoch': 0, 'train_loss': 0.5}, {'epoch': 1, 'train_loss': 0.25}]).to_pandas()
       epoch  train_loss
    0      0        0.50
    1      1        0.25
    """

    def __getitem__(self, i: Any) -> Any:
        if self or isinstance(i, slice):
            return super().__getitem__(i)
        raise IndexError(
            'There is no row yet. The Recorder writes the row of an epoch at its end (`order` 50): a '
            'callback that reads it in after_epoch needs `order = 60`.'
        )

    def to_pandas(self) -> Any:
        "Return the history as a pandas DataFrame, one row an epoch."
        import pandas as pd

        return pd.DataFrame(list(self))

    @never_raising
    def _repr_html_(self) -> str:
        if not self:
            return 'no epoch yet'
        names = list(dict.fromkeys(name for row in self for name in row))
        rows = []
        for row in self:
            cells = dict(row)
            if 'time' in row:
                cells['time'] = format_seconds(row['time'])
            rows.append([cells.get(name) for name in names])
        return table(names, rows)
