"""The table of faults: every row has its file, and test results become rows."""

import ast

from tests.faults import table

FILES = sorted(table.HERE.glob('test_f*.py'))


def test_every_row_has_one_file_that_describes_its_fault() -> None:
    assert list(table.Rows().rows)[:34] == list(range(1, 35)) and len(FILES) == len(
        table.Rows().rows
    )
    for number, path in zip(table.Rows().rows, FILES, strict=True):
        assert (ast.get_docstring(ast.parse(path.read_text('utf-8'))) or '').startswith(
            f'Row {number}: '
        ), path
