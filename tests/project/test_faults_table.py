"""The table of faults: every row has its file, and test results become rows."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tests.faults import table

FILES = sorted(table.HERE.glob('test_f*.py'))


def report(
    row: int, outcome: Any = 'passed', when: Any = 'call', stdout: str = '', seconds: float = 1.0
) -> Any:
    return pytest.TestReport(
        f'tests/faults/test_f{row}_some.py::test_it',
        ('', None, ''),
        {},
        outcome,
        None,
        when,
        sections=[('Captured stdout call', stdout)],
        duration=seconds,
    )


def test_every_row_has_one_file_that_describes_its_fault() -> None:
    assert list(table.Rows().rows)[:34] == list(range(1, 35)) and len(FILES) == len(
        table.Rows().rows
    )
    for number, path in zip(table.Rows().rows, FILES, strict=True):
        assert (ast.get_docstring(ast.parse(path.read_text('utf-8'))) or '').startswith(
            f'Row {number}: '
        ), path


def test_results_become_rows() -> None:
    rows = table.Rows()
    for when in ('setup', 'call', 'teardown'):
        rows.pytest_runtest_logreport(
            report(13, when=when, stdout='...\nrow 13: 500 offsets\nrow 14: of another\n')
        )
    rows.pytest_runtest_logreport(report(13, 'failed', stdout='row 13: and 3 | 4\n', seconds=0.5))
    rows.pytest_runtest_logreport(report(16, 'skipped', when='setup', seconds=0.0))
    first, _, *lines = rows.table().splitlines()
    assert '; 2 rows, 3 tests, 1 failed, 1 skipped, 4 seconds.' in first and 'torch 2' in first
    assert [line.split(' | ')[2:] for line in lines[2:]] == [
        ['2', r'500 offsets; and 3 \| 4', '1 failed', '3.5 |'],
        ['1', '', '1 skipped', '0.0 |'],
    ]
