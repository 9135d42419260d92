"""Tables as HTML and text: contents are escaped, numbers are aligned, long tables are shortened."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import pytest

from learnkit.core.html import (
    MAX_ROWS,
    definitions,
    in_notebook,
    never_raising,
    table,
    text_table,
)


def test_a_table_is_well_formed_and_escaped() -> None:
    html = table(['<name>', 'loss'], [['a & b', 0.5], ['"c"', None]], '<b>')
    page = ElementTree.fromstring(f'<div>{html}</div>')
    rows = [[cell.text or '' for cell in row] for row in page.iter('tr')]
    assert rows == [['<name>', 'loss'], ['a & b', '0.500000'], ['"c"', '']]
    sides = [cell.get('style', '').rpartition(':')[2] for cell in page.iter('td')]
    assert sides == ['left', 'right'] * 2
    assert [b.text for b in page.iter('b')] == ['<b>']


def test_of_many_rows_the_first_and_the_last_are_shown() -> None:
    n = MAX_ROWS + 25
    page = ElementTree.fromstring(table(['i'], [[i] for i in range(n)]))
    cells = [cell.text for cell in page.iter('td')]
    shown = [str(i) for i in range(n) if i < 10 or i >= 35]
    assert cells == [*shown[:10], '... 25 more ...', *shown[10:]]


def test_columns_of_text_are_aligned() -> None:
    lines = text_table([('name', 'n'), ('a', '10'), ('bcdefg', '3')], right=[1]).splitlines()
    assert lines == ['name     n', 'a       10', 'bcdefg   3']


def test_an_error_is_shown_in_its_row() -> None:
    html = definitions({'lines': ['a', '<b>'], 'bad': lambda: {}['x']})
    assert 'a<br>&lt;b&gt;' in html and '(not known: KeyError)' in html
    assert never_raising(lambda self: self.missing)(1) is None  # type: ignore[attr-defined]
    assert never_raising(str)(1) == '1'


def test_this_process_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, 'IPython', raising=False)
    assert not in_notebook() and 'IPython' not in sys.modules
