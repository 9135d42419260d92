"""Run the fault matrix, quick and full forms alike, and write what came out into docs/faults.md.

    python -m tests.faults.table

Further arguments go to pytest. The page is written only when everything has run; the table is printed always."""

import ast
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import learnkit
from benchmarks.harness import machine

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / 'docs' / 'faults.md'
BEGIN, END = '<!-- written by python -m tests.faults.table -->', '<!-- end -->'
HEAD = [
    '| # | fault, and what holds | tests | what the full form did | result | seconds |',
    '|--:|---|--:|---|---|--:|',
]


@dataclass
class Row:
    "Results of one row's tests."

    fault: str  # from the file's docstring
    outcomes: Counter[str] = field(default_factory=Counter[str])
    # the lines that full forms print, in their order
    printed_lines: dict[str, None] = field(default_factory=dict[str, None])
    seconds: float = 0.0

    def cells(self) -> list[str]:
        "Return the cells of the table."
        counts = [
            f'{n} {outcome}' for outcome in ('failed', 'skipped') if (n := self.outcomes[outcome])
        ]
        return [
            self.fault,
            str(self.outcomes.total()),
            '; '.join(self.printed_lines),
            ', '.join(counts) or 'passed',
            f'{self.seconds:.1f}',
        ]


class Rows:
    "A pytest plugin that collects results by row."

    def __init__(self) -> None:
        self.rows = {
            int(path.stem[6:8]): Row(_fault(path)) for path in sorted(HERE.glob('test_f*.py'))
        }
        self.n_left_out = 0  # tests that the command line has left out

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        match = re.search(r'test_f(\d+)_\w+\.py', report.nodeid)
        if match is None:
            return
        row = self.rows[int(match[1])]
        row.seconds += report.duration
        if report.when == 'call' or report.outcome != 'passed':
            row.outcomes[report.outcome] += 1
        row.printed_lines |= dict.fromkeys(
            re.findall(rf'^row {int(match[1])}: (.*)$', report.capstdout, re.M)
        )

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.n_left_out += len(items)

    def table(self) -> str:
        "Return the table in Markdown, below a line with date and machine."
        rows = {number: row for number, row in self.rows.items() if row.outcomes}
        total = sum((row.outcomes for row in rows.values()), Counter[str]())
        here = {**machine(), 'learnkit': learnkit.__version__}
        place = ', '.join(
            f'{key} {value}' for key, value in here.items() if key not in ('date', 'threads')
        )
        count = (
            f'{len(rows)} rows, {total.total()} tests, {total["failed"]} failed, {total["skipped"]} skipped, '
            f'{sum(row.seconds for row in rows.values()):.0f} seconds'
        )
        cells = [[f'{number}', *row.cells()] for number, row in rows.items()]
        lines = [' | '.join(cell.replace('|', r'\|') for cell in line) for line in cells]
        return '\n'.join(
            [f'{here["date"]}; {place}; {count}.', '', *HEAD, *(f'| {line} |' for line in lines)]
        )


def _fault(path: Path) -> str:
    "Return the docstring of a row's file after its number."
    text = ast.get_docstring(ast.parse(path.read_text('utf-8'))) or ''
    fault = ' '.join(text.partition('\n\n')[0].split()).partition(': ')[2]
    return fault[:1].upper() + fault[1:]


def write(table: str) -> None:
    "Replace the table in the page."
    before, _, rest = PAGE.read_text('utf-8').partition(BEGIN)
    PAGE.write_text(f'{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}', 'utf-8')


def main(arguments: list[str]) -> int:
    "Run the tests, show the table, and return pytest's exit status."
    rows = Rows()
    options = ['-q', '-m', '', '-o', 'faulthandler_timeout=3600']  # full forms take long
    status = pytest.main([*options, *arguments, str(HERE)], plugins=[rows])
    print(f'\n{rows.table()}')
    has_run = any(row.outcomes for row in rows.rows.values())  # not with --help
    if (
        not has_run
        or rows.n_left_out
        or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    ):
        print(f'\n{PAGE.name} stays as it is: not everything has run.')
    else:
        write(rows.table())
    return int(status)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
