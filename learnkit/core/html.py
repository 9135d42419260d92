# SPDX-License-Identifier: Apache-2.0
"""Tables as HTML and text, and updatable outputs for notebooks.

All table contents are escaped. Tables use the page's colors, light or dark. A saved notebook needs no other files, and
contains a plain-text version of each output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import wraps
from html import escape
from itertools import zip_longest
from math import inf
from numbers import Integral, Real
from typing import Any

MAX_ROWS = 60  # maximum number of rows of a table, which keeps a saved notebook small
_START = '<table style="border-collapse:collapse">'


def table(
    head: Sequence[str],  # names of the columns
    rows: Iterable[Sequence[Any]],  # rows of values; columns of numbers are right-aligned
    title: str = '',  # title above the table
) -> str:
    """Return an HTML table; of more than `MAX_ROWS` rows, the first and last rows are shown.

    >>> table(['part', 'us'], [['loss', 3]], 'a step')[:67]
    '<div><b>a step</b></div><table style="border-collapse:collapse"><th'
    """
    cells = [list(map(format_cell, row)) for row in rows]
    columns = zip(*cells, strict=False)
    sides = ['right' if all(map(_is_number, column)) else 'left' for column in columns]
    lines = [html_row('td', row, sides) for row in cells]
    note = f'<tr><td colspan="{len(head)}">... {{}} more ...</td></tr>'
    body = ''.join(truncate_rows(lines, MAX_ROWS, note))
    header = f'<thead>{html_row("th", head, sides)}</thead>'
    return f'{_make_title(title)}{_START}{header}<tbody>{body}</tbody></table>'


def text_table(
    rows: Iterable[Sequence[str]],  # rows of cells, including the header
    right: Container[int] = (),  # indices of right-aligned columns
) -> str:
    """Return aligned columns as text.

    >>> print(text_table([('part', 'us'), ('loss', '3')], right=[1]))
    part  us
    loss   3
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        sized = enumerate(zip(row, widths, strict=True))
        cells = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in sized]
        lines.append('  '.join(cells).rstrip())
    return '\n'.join(lines)


def definitions(
    entries: Mapping[str, Any],  # values, lists of lines, or functions that return either, by name
    title: str = '',  # title above the table
) -> str:
    """Return an HTML table of names and values; if a function raises an error, its row shows the error.

    >>> 'ZeroDivisionError' in definitions({'half': lambda: 1 / 0, 'whole': 1})
    True
    """
    rows = ''
    for name, value in entries.items():
        found = safe_call(value) if callable(value) else value
        lines = found if isinstance(found, list) else [found]
        content = '<br>'.join(escape(str(line)) for line in lines)
        rows += f'<tr><th>{escape(name)}</th><td style="text-align:left">{content}</td></tr>'
    return f'{_make_title(title)}{_START}<tbody>{rows}</tbody></table>'


def html_row(
    tag: str,  # tag of the cells: 'th' or 'td'
    cells: Iterable[str],  # contents of the cells
    sides: Sequence[str] = (),  # alignment of the cells: 'left' or 'right'; empty: the default
) -> str:
    "Return a row of a table."
    styles = [f' style="text-align:{side}"' for side in sides]
    pairs = zip_longest(cells, styles, fillvalue='')
    row = ''.join(f'<{tag}{style}>{escape(cell)}</{tag}>' for cell, style in pairs)
    return f'<tr>{row}</tr>'


def _is_number(text: str) -> bool:
    "Return True for the text of a number, and for an empty cell."
    return text in ('', 'nan', 'inf', '-inf') or text.lstrip('-')[:1].isdigit()


def _make_title(title: str) -> str:
    return f'<div><b>{escape(title)}</b></div>' if title else ''


def safe_call(f: Callable[[], Any]) -> Any:
    """Return the result of a function, or the name of the error that it raised, for displays that must not fail.

    >>> safe_call(lambda: 'Adam'), safe_call(lambda: 1 / 0)
    ('Adam', '(not known: ZeroDivisionError)')
    """
    try:
        return f()
    except Exception as e:
        return f'(not known: {type(e).__name__})'


def format_cell(value: Any) -> str:
    """Return a table cell's text: floats with six decimals, nothing for None.

    >>> [format_cell(v) for v in (3, 0.5, None, '00:02', 2.5e25)]
    ['3', '0.500000', '', '00:02', '2.5e+25']
    """
    if value is None:
        return ''
    if isinstance(value, Integral) or not isinstance(value, Real):
        return ' '.join(str(value).split())
    number = float(value)
    return f'{number:.6g}' if 1e9 <= abs(number) < inf else f'{number:.6f}'


def truncate_rows(
    lines: list[str],
    max_rows: int,  # maximum number of lines; further lines are hidden
    note: str,  # template of the line that replaces them, with '{}' for their number
) -> list[str]:
    """Replace surplus lines after the first ten by a note.

    >>> truncate_rows([*'abcdefghijklmn'], 12, '{} more')
    ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j', '2 more', 'm', 'n']
    """
    hidden = len(lines) - max_rows
    return lines if hidden <= 0 else [*lines[:10], note.format(hidden), *lines[10 + hidden :]]


def never_raising(f: Callable[[Any], str]) -> Callable[[Any], str | None]:
    "Wrap `_repr_html_` to return None on an exception, so that a notebook shows the plain text."

    @wraps(f)
    def html(self: Any) -> str | None:
        try:
            return f(self)
        except Exception:
            return None

    return html


class DisplayHandle:
    "Output area of a notebook that can be updated; the last content is saved."

    def __init__(self) -> None:
        self.handle: Any = None

    def show(
        self,
        data: dict[str, Any],  # data by MIME type: 'text/html', 'text/plain', 'image/png'
    ) -> None:
        "Show data, replacing the previous content."
        from IPython.display import display

        if self.handle:
            self.handle.update(data, raw=True)
        else:
            self.handle = display(data, raw=True, display_id=True)


def in_notebook() -> bool:
    "Return True in a Jupyter kernel, without importing IPython."
    ipython = sys.modules.get('IPython')
    shell = ipython.get_ipython() if ipython else None
    return any(cls.__name__ == 'ZMQInteractiveShell' for cls in type(shell).__mro__)
