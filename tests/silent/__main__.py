"""Print the table of numbers that were once wrong without a word: old value, value now, independent value.

python -m tests.silent
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HEADINGS = ('what', 'was', 'is', 'independent')


class RowCollector:
    "A pytest plugin that keeps the rows of the tests that passed."

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != 'call' or not report.passed:
            return
        self.rows += [cells for name, cells in report.user_properties if name == 'silent']


def table(rows: list[list[str]]) -> str:
    "Return the rows as a Markdown table with aligned columns."
    lines = [list(HEADINGS), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    lines.insert(1, ['-' * width for width in widths])
    padded = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines
    ]
    return '\n'.join(f'| {" | ".join(cells)} |' for cells in padded)


def main() -> int:
    "Run the tests, print the table, and return pytest's exit status."
    collector = RowCollector()
    folder = Path(__file__).parent
    status = pytest.main(
        ['-q', '--no-header', '-p', 'no:cacheprovider', str(folder)], plugins=[collector]
    )
    print(table(collector.rows))
    return int(status)


if __name__ == '__main__':
    sys.exit(main())
