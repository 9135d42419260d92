# SPDX-License-Identifier: Apache-2.0
"""Tables of samples, and readable strings for targets and predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from learnkit.core.batch import TARGET_NAMES, children_of, describe, find_bs, is_sample_list
from learnkit.core.html import table, text_table

MAX_COLUMNS = 10  # of a vector in a table
MAX_CELL_CHARS = 60


class Table:
    """Table of values, shown as text or, in a notebook, as HTML, with wrong rows marked.

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
        columns: Mapping[str, Sequence[Any]],  # values of equal length by column name
        wrong: Sequence[int] = (),  # indices of the rows to mark
    ) -> None:
        self.columns = {name: list(values) for name, values in columns.items()}
        self.wrong = list(wrong)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def _format_rows(self) -> Iterator[list[str]]:
        "Yield the column names, then each row as strings."
        yield [*self.columns, ''] if self.wrong else [*self.columns]
        for i, row in enumerate(zip(*self.columns.values(), strict=True)):
            cells = [cell(value) for value in row]
            if self.wrong:
                cells.append('wrong' if i in self.wrong else '')
            yield cells

    def __repr__(self) -> str:
        rows = list(self._format_rows())
        return text_table(rows, right=range(len(rows[0])))

    def _repr_html_(self) -> str:
        head, *rows = self._format_rows()
        return table(head, rows)


def as_table(
    xb: tuple[Any, ...],  # inputs
    details: dict[str, list[Any]],  # further columns by name
    wrong: Sequence[int] = (),  # indices of the samples to mark
) -> Table:
    """Return a table with one row per sample: vectors fill several columns, other inputs a short string.

    >>> import torch
    >>> as_table(({'age': torch.tensor([31, 64]), 'name': ['Ada', 'Alan']},), {'target': ['yes', 'no']})
    age  name  target
     31   Ada     yes
     64  Alan      no
    """
    columns: dict[str, Sequence[Any]] = {}
    n = find_bs(xb, tuple(details.values()))
    for i, x in enumerate(xb):
        if isinstance(x, Mapping):
            inputs = {k: v for k, v in x.items() if k not in TARGET_NAMES}
        else:
            inputs = {'x' if len(xb) == 1 else f'x{i + 1}': x}
        for name, values in inputs.items():
            columns |= _make_columns(str(name), values, n)
    return Table({**columns, **details}, wrong)


def _make_columns(name: str, values: Any, n: int) -> dict[str, Sequence[Any]]:
    "Return the columns of one input of `n` samples."
    if not isinstance(values, Tensor):
        if isinstance(values, (list, tuple)) and len(values) == n:
            return {name: [_describe_container(v) for v in values]}
        return {name: [describe(values)] * n}
    if values.ndim == 3 and 1 in values.shape[1:]:
        values = values.flatten(1)
    if values.ndim == 2 and values.shape[1] > 1:
        size = values.shape[1]
        k = size if size <= MAX_COLUMNS else MAX_COLUMNS - 2
        more = {'...': [f'{size - k} more'] * n} if k < size else {}
        return {f'{name}[{i}]': values[:, i].tolist() for i in range(k)} | more
    if values.numel() == n:
        return {name: values.reshape(-1).tolist()}
    return {name: [describe(values[0])] * n}


# -- readable strings ------------------------------------------------------------------------------


def class_names(vocab: Any) -> Any:
    "Return the class names of a vocab; fastai's vocab of a text classifier holds words and classes."
    is_list = lambda o: isinstance(o, (list, tuple)) or type(o).__name__ in ('L', 'CategoryMap')
    return vocab[-1] if is_list(vocab) and len(vocab) and is_list(vocab[-1]) else vocab


def format_targets(
    values: Any,  # tensor or list with one entry per sample, or a tuple of several
    n: int,  # number of samples
    vocab: Any = None,  # class names
) -> list[Any]:  # a string or number per sample
    """Return targets in readable form: class names, numbers, or short lists of them.

    >>> import torch
    >>> vocab = ['cat', 'dog']
    >>> format_targets(torch.tensor([1, 0]), 2, vocab)
    ['dog', 'cat']
    >>> format_targets(torch.tensor([[1, 1], [0, 1]]), 2, vocab)
    ['cat, dog', 'dog']
    """
    vocab = class_names(vocab)
    if is_sample_list(values, n):
        return [_describe_container(v) for v in values]
    if isinstance(values, tuple):
        columns = [format_targets(v, n, vocab) for v in values]
        if len(columns) == 1:
            return columns[0]
        return [', '.join(map(cell, row)) for row in zip(*columns, strict=True)]
    if not isinstance(values, Tensor):
        return list(values) if isinstance(values, list) else [describe(values)] * n
    values = values.cpu()
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    is_class = not values.is_floating_point()
    if values.ndim == 1:
        return [find_class_name(v, vocab) if is_class else v for v in values.tolist()]
    if values.ndim > 2:
        return [describe(values[0])] * n
    if (
        vocab is not None
        and len(vocab) == values.shape[1]
        and bool(((values == 0) | (values == 1)).all())
    ):
        return [_join_class_names(row, vocab) for row in values]
    return [_join_cells(row.tolist()) for row in values]


def _join_class_names(row: Tensor, vocab: Any) -> str:
    "Return the names of the classes whose entry of a row is not 0, or 'none'."
    indices = row.nonzero()[:, 0].tolist()
    return ', '.join(str(vocab[i]) for i in indices) or 'none'


def _describe_container(value: Any) -> Any:
    "Describe a tensor or container; return any other value unchanged."
    return describe(value) if isinstance(value, Tensor) or children_of(value) is not None else value


def find_class_name(value: Any, vocab: Any) -> Any:
    "Return the name of a class number, or the number without a name for it."
    return vocab[int(value)] if vocab is not None and 0 <= int(value) < len(vocab) else value


def _join_cells(row: list[Any]) -> str:
    cells = [cell(value) for value in row[:MAX_COLUMNS]]
    if len(row) > MAX_COLUMNS:
        cells.append('...')
    return ', '.join(cells)


def cell(value: Any) -> str:
    "Format a value as a string of one line."
    return shorten(value, MAX_CELL_CHARS)


def shorten(text: Any, longest: int) -> str:
    "Format a value as a string of one line with at most `longest` characters."
    text = f'{text:.4g}' if isinstance(text, float) else ' '.join(str(text).split())
    return text if len(text) <= longest else f'{text[: longest - 3]}...'
