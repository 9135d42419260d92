# SPDX-License-Identifier: Apache-2.0
"""History of a training: one row per epoch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex, overload

from fastcore.foundation import L

from learnkit.core.html import never_raising, table
from learnkit.core.optional import import_library
from learnkit.core.time import format_seconds


class History(list[dict[str, Any]]):
    """Rows of all fits, one dict per epoch: `fit`, `epoch`, losses, metrics, logged values, `time` (s).

    >>> History([{'epoch': 0, 'train_loss': 0.5}, {'epoch': 1, 'train_loss': 0.25}]).to_pandas()
       epoch  train_loss
    0      0        0.50
    1      1        0.25
    """

    def __init__(
        self,
        rows: Iterable[dict[str, Any]] = (),
        changes: Iterable[
            dict[str, Any]
        ] = (),  # changes of a fit that was paused: batch, epoch, what, old, new
    ) -> None:
        super().__init__(rows)
        self.changes = list(changes)

    @overload
    def __getitem__(self, i: SupportsIndex) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, i: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, i: Any) -> Any:
        if self or isinstance(i, slice):
            return super().__getitem__(i)
        raise IndexError(
            'There is no row yet. The Recorder (`order` 50) writes it in after_epoch: a callback that reads it '
            'there needs `order = 60`.'
        )

    def to_pandas(self) -> Any:
        "Return the history as a pandas DataFrame, one row an epoch; raise `MissingExtraError` without pandas."
        return import_library('pandas', 'to_pandas').DataFrame(list(self))

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


def describe_change(
    change: dict[str, Any],  # entry of `History.changes`
) -> str:
    """Return a change of a paused fit as text.

    >>> describe_change({'ba': 613, 'ep': 2, 'what': 'lr', 'old': '0.01', 'new': '0.003'})
    'lr 0.01 -> 0.003'
    """
    return f'{change["what"]} {change["old"]} -> {change["new"]}'


class Values(L):
    """Values of an evaluation: a list that also finds a value by its name, and shows the names.

    >>> values = Values({'valid_loss': 0.25, 'accuracy': 0.5})
    >>> values, values['accuracy'], values == [0.25, 0.5]
    ([valid_loss=0.25, accuracy=0.5], 0.5, True)
    """

    def __init__(
        self,
        values: dict[str, Any],  # values by name
    ) -> None:
        super().__init__(list(values.values()))
        self.names = list(values)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.names:
            raise KeyError(f'There is no value {key!r}, only {", ".join(map(repr, self.names))}.')
        return self[self.names.index(key)]

    def _new(self, items: Any, *args: Any, **kwargs: Any) -> L:
        return L(items, *args, use_list=None, **kwargs)  # a part, whose names are not known

    def __repr__(self) -> str:
        cells = (f'{v:.6g}' if isinstance(v, float) else repr(v) for v in self)
        return f'[{", ".join(map("=".join, zip(self.names, cells, strict=True)))}]'
