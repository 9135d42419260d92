"""Tables as HTML and text, and updatable outputs for notebooks.

All table contents are escaped. Tables use the page's colors, light or dark, with gray borders that are visible on both.
A saved notebook needs no other files, and contains a plain-text version of each output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import wraps
from html import escape
from math import inf
from numbers import Integral, Real
from typing import Any

MAX_ROWS = 60  # maximum number of rows of a table, which keeps a saved notebook small
_LINE = 'thin solid rgba(128,128,128,.4)'


def table(
    head: Sequence[str],  # names of the columns
    rows: Iterable[Sequence[Any]],  # rows of values; columns of numbers are right-aligned
    title: str = '',  # title above the table
    max_rows: int = MAX_ROWS,  # maximum number of rows; of a longer table, the first and last rows are shown
) -> str:
    """Return an HTML table.

    >>> table(['part', 'us'], [['loss', 3]], 'a step')[:67]
    '<div><b>a step</b></div><table style="border-collapse:collapse"><th'
    """
    cells = [list(map(format_cell, row)) for row in rows]
    columns = zip(*cells, strict=False)
    sides = ['right' if all(map(_is_number, column)) else 'left' for column in columns]
    lines = [html_row('td', row, sides) for row in cells]
    note_row = f'<tr><td colspan="{len(head)}">{{}}</td></tr>'
    body = ''.join(truncate_rows(lines, max_rows, note_row, '... {} more ...'))
    header = f'<thead>{html_row("th", head, sides, f"border-bottom:{_LINE}")}</thead>'
    return (
        f'{_make_title(title)}<table style="border-collapse:collapse">{header}'
        f'<tbody>{body}</tbody></table>'
    )


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
    name_style = f'vertical-align:top;border-right:{_LINE}'
    rows = ''
    for name, value in entries.items():
        content = '<br>'.join(map(escape, _format_lines(value)))
        name_cell = _make_cell('th', escape(name), 'left', name_style)
        rows += f'<tr>{name_cell}{_make_cell("td", content, "left")}</tr>'
    return (
        f'{_make_title(title)}<table style="border-collapse:collapse"><tbody>{rows}</tbody></table>'
    )


def html_row(
    tag: str,  # tag of the cells: 'th' or 'td'
    cells: Iterable[str],  # contents of the cells
    sides: Sequence[str] = (),  # alignment of the cells: 'left' or 'right'; empty: the default
    style: str = '',  # CSS of each cell
) -> str:
    "Return a row of a table."
    cells = list(cells)
    sides = [*sides, *[''] * (len(cells) - len(sides))]
    html_cells = [
        _make_cell(tag, escape(cell), side, style) for cell, side in zip(cells, sides, strict=False)
    ]
    return f'<tr>{"".join(html_cells)}</tr>'


def _make_cell(tag: str, html: str, side: str, style: str = '') -> str:
    alignment = f'text-align:{side}' if side else ''
    styles = ';'.join(filter(None, (alignment, style)))
    return f'<{tag} style="{styles}">{html}</{tag}>' if styles else f'<{tag}>{html}</{tag}>'


def _is_number(text: str) -> bool:
    "Return True for the text of a number, and for an empty cell."
    return text in ('', 'nan', 'inf', '-inf') or text.lstrip('-')[:1].isdigit()


def _make_title(title: str) -> str:
    return f'<div><b>{escape(title)}</b></div>' if title else ''


def _format_lines(value: Any) -> list[str]:
    "Return the lines of a value, a list of lines, or a function that returns either."
    if callable(value):
        value = safe_call(value)
    return list(map(str, value)) if isinstance(value, (list, tuple)) else [str(value)]


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
    row: str,  # template of the row with the note, with '{}'
    note: str,  # template of the note, with '{}' for the number of hidden lines
    first: int = 10,  # number of lines before the note
) -> list[str]:
    """Replace surplus lines after the first few by a note.

    >>> truncate_rows(['a', 'b', 'c', 'd'], 2, '({})', '{} more', first=1)
    ['a', '(2 more)', 'd']
    """
    hidden = len(lines) - max_rows
    if hidden <= 0:
        return lines
    return [*lines[:first], row.format(note.format(hidden)), *lines[first + hidden :]]


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
