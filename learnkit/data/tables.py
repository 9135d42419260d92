"""Tables of samples, and the texts that a person reads for targets and predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from learnkit.core.batch import TARGET_NAMES, children_of, describe, find_bs, is_sample_list
from learnkit.core.html import table

__all__ = ['Table', 'as_table', 'readable', 'class_names', 'cell', 'shorten']

MOST_COLUMNS = 10  # of a vector in a table
LONGEST = 60  # characters of a cell


class Table:
    """Rows of values that print as text and, in a notebook, as a table; wrong ones are marked.

    >>> table = Table({'x': [0.25, 2.], 'target': ['cat', 'dog']}, wrong=[1])
    >>> table
       x  target
    0.25     cat
       2     dog  wrong
    >>> table.columns['target']
    ['cat', 'dog']
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[Any]],  # values by name, as many in each
        wrong: Sequence[int] = (),  # rows to mark
    ) -> None:
        self.columns, self.wrong = (
            {name: list(values) for name, values in columns.items()},
            list(wrong),
        )

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def to_pandas(self) -> Any:
        "Return a pandas DataFrame of the values, not rounded."
        import pandas as pd

        return pd.DataFrame(self.columns)

    def _cells(self) -> Iterator[list[str]]:
        yield [*self.columns, *([''] if self.wrong else [])]
        for i, row in enumerate(zip(*self.columns.values(), strict=True)):
            yield [*map(cell, row), *(['wrong' * (i in self.wrong)] if self.wrong else [])]

    def __repr__(self) -> str:
        rows = list(self._cells())
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return '\n'.join(
            '  '.join(text.rjust(w) for text, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    def _repr_html_(self) -> str:
        head, *rows = self._cells()
        return table(head, rows)


def as_table(
    xb: tuple[Any, ...],  # inputs
    told: dict[str, list[Any]],  # further columns
    wrong: Sequence[int] = (),  # samples to mark
) -> Table:
    """Return samples as rows: a vector's first numbers in a column each, of other things a short text.

    >>> import torch
    >>> as_table(({'age': torch.tensor([31, 64]), 'name': ['Ada', 'Alan']},), {'target': ['yes', 'no']})
    age  name  target
     31   Ada     yes
     64  Alan      no
    """
    columns: dict[str, Sequence[Any]] = {}
    n = find_bs(xb, tuple(told.values()))
    for i, o in enumerate(xb):
        name = 'x' if len(xb) == 1 else f'x{i + 1}'
        for k, v in o.items() if isinstance(o, Mapping) else ((name, o),):
            if not (isinstance(o, Mapping) and k in TARGET_NAMES):
                columns |= _columns(str(k), v, n)
    return Table({**columns, **told}, wrong)


def _columns(name: str, o: Any, n: int) -> dict[str, Sequence[Any]]:
    if not isinstance(o, Tensor):
        return {
            name: [_short(v) for v in o]
            if isinstance(o, (list, tuple)) and len(o) == n
            else [describe(o)] * n
        }
    if o.ndim == 3 and 1 in o.shape[1:]:
        o = o.flatten(1)
    if o.ndim == 2 and o.shape[1] > 1:
        size = o.shape[1]
        k = size if size <= MOST_COLUMNS else MOST_COLUMNS - 2
        more = {'...': [f'{size - k} more'] * n} if k < size else {}
        return {f'{name}[{i}]': o[:, i].tolist() for i in range(k)} | more
    return {name: o.reshape(-1).tolist() if o.numel() == n else [describe(o[0])] * n}


# What a person reads


def class_names(vocab: Any) -> Any:
    "Return the names of classes: of fastai's vocab of texts and classes, the latter."
    is_list = lambda o: isinstance(o, (list, tuple)) or type(o).__name__ in ('L', 'CategoryMap')
    return vocab[-1] if is_list(vocab) and len(vocab) and is_list(vocab[-1]) else vocab


def readable(
    values: Any,  # a tensor or list with an entry a sample, or a tuple of several
    n: int,  # samples
    vocab: Any = None,  # names of classes
) -> list[Any]:  # a text or number each
    """Return what a person reads of targets: names of classes, numbers, or short lists of them.

    >>> import torch
    >>> readable(torch.tensor([1, 0]), 2, ['cat', 'dog']), readable(torch.tensor([[1, 1], [0, 1]]), 2, ['cat', 'dog'])
    (['dog', 'cat'], ['cat, dog', 'dog'])
    """
    vocab = class_names(vocab)
    if is_sample_list(values, n):
        return [_short(v) for v in values]
    if isinstance(values, tuple):
        several = [readable(v, n, vocab) for v in values]
        return (
            several[0]
            if len(several) == 1
            else [', '.join(map(cell, row)) for row in zip(*several, strict=True)]
        )
    if not isinstance(values, Tensor):
        return list(values) if isinstance(values, list) else [describe(values)] * n
    values = values.cpu()
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    is_class = not values.is_floating_point()
    if values.ndim == 1:
        return [_name(v, vocab) if is_class else v for v in values.tolist()]
    if values.ndim > 2:
        return [describe(values[0])] * n
    if (
        vocab is not None
        and len(vocab) == values.shape[1]
        and bool(((values == 0) | (values == 1)).all())
    ):
        return [
            ', '.join(str(vocab[i]) for i in row.nonzero()[:, 0].tolist()) or 'none'
            for row in values
        ]
    return [_joined(row.tolist()) for row in values]


def _short(value: Any) -> Any:
    "Describe tensors and containers, and return anything else as it is."
    return describe(value) if isinstance(value, Tensor) or children_of(value) is not None else value


def _name(value: Any, vocab: Any) -> Any:
    return vocab[int(value)] if vocab is not None and 0 <= int(value) < len(vocab) else value


def _joined(row: list[Any]) -> str:
    return ', '.join([*map(cell, row[:MOST_COLUMNS]), *['...'] * (len(row) > MOST_COLUMNS)])


def cell(value: Any) -> str:
    "Return a value as a short text."
    return shorten(value, LONGEST)


def shorten(text: Any, longest: int) -> str:
    "Return a text in one line of at most so many characters."
    text = f'{text:.4g}' if isinstance(text, float) else ' '.join(str(text).split())
    return text if len(text) <= longest else f'{text[: longest - 3]}...'
