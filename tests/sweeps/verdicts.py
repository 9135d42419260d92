"""What all sweeps share: subjects of a library, verdicts, and the tables that are written into the documentation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

LONGEST = 160  # characters of a note
ROOT = Path(__file__).resolve().parents[2]
RESULTS = (
    ROOT / '.peers' / 'sweeps'
)  # a JSON file for each sweep, with the last verdict of each subject

EXACT = 'exact'
REPLAYED = 'replayed'  # exact, and what was consumed is computed again
WARNED = 'warned'  # differs, and a warning says so
REFUSED = 'refused'  # a typed error
BROKEN = 'resume fails'  # another error, mostly of the library
WRONG = 'WRONG'  # differs in silence
UNREPEATABLE = 'not repeatable'  # two uninterrupted runs differ
FAILED = 'does not run'  # an error without any interruption
ORDER = (EXACT, REPLAYED, WARNED, REFUSED, BROKEN, UNREPEATABLE, WRONG, FAILED)


@dataclass(frozen=True)
class Subject:
    "Something of a library that a sweep tries."

    library: str  # name of the distribution; '' for code of a few lines without any library
    title: str
    build: Callable[..., Any]
    options: Any = None  # what the sweep has to know besides

    @property
    def name(self) -> str:
        return f'{self.library or "own"}: {self.title}'


@dataclass(frozen=True)
class Verdict:
    "What a sweep found out about a subject."

    library: str
    version: str  # '' for code without any library
    title: str
    verdict: str  # one of `ORDER`
    note: str = ''  # what differs, first sentence of a warning, or an error
    claim: str = ''  # claim of a sweep that has several


def find_version(library: str) -> str | None:
    "Return the version of a library, '' for code without any library, or None if it is not installed."
    if not library:
        return ''
    try:
        return version(library).partition('+')[0]
    except PackageNotFoundError:
        return None


def select_installed(subjects: Iterable[Subject]) -> list[Subject]:
    "Return the subjects whose library is installed."
    return [subject for subject in subjects if find_version(subject.library) is not None]


def shorten(text: str) -> str:
    "Return the first sentence of a text, in one line of a table."
    line = ' '.join(text.split()).replace('|', '/')
    line = re.sub(r'(?<!\S)/\S+/', '', line)  # folders of this machine
    sentence = line.partition('. ')[0].rstrip('.')
    return sentence if len(sentence) <= LONGEST else sentence[:LONGEST].rsplit(' ', 1)[0] + ' ...'


# -- results and tables ----------------------------------------------------------------------------


def load_verdicts(sweep: str) -> list[Verdict]:
    "Return the last verdicts of a sweep."
    path = RESULTS / f'{sweep}.json'
    if not path.exists():
        return []
    return [Verdict(**values) for values in json.loads(path.read_text('utf-8'))]


def save_verdicts(sweep: str, verdicts: Iterable[Verdict]) -> None:
    "Save verdicts of a sweep; the verdicts of other subjects stay."
    new = list(verdicts)
    names = {(verdict.library, verdict.title) for verdict in new}  # with all claims
    kept = [v for v in load_verdicts(sweep) if (v.library, v.title) not in names]
    _replace_verdicts(sweep, [*kept, *new])


def forget_others(sweep: str, library: str, titles: Iterable[str]) -> None:
    "Delete the verdicts of subjects that a library no longer has."
    current = set(titles)
    found = load_verdicts(sweep)
    _replace_verdicts(sweep, [v for v in found if v.library != library or v.title in current])


def _replace_verdicts(sweep: str, verdicts: Sequence[Verdict]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(verdict) for verdict in verdicts], indent=1)
    (RESULTS / f'{sweep}.json').write_text(text, 'utf-8')


def count_libraries(n: int) -> str:
    "Return a number of libraries in words."
    return f'{n} library' if n == 1 else f'{n} libraries'


def count_verdicts(verdicts: Sequence[Verdict], what: str) -> str:
    "Return a sentence with the number of subjects of each verdict."
    kinds = [verdict.verdict for verdict in verdicts]
    counts = [f'{kinds.count(kind)} {kind}' for kind in ORDER if kind in kinds]
    libraries = {verdict.library for verdict in verdicts} - {''}
    return f'{len(verdicts)} {what}, {count_libraries(len(libraries))}: {", ".join(counts)}.'


def make_table(
    subjects: Sequence[Subject],  # in the order of the table
    verdicts: Iterable[Verdict],
    head: str,  # title of the column of subjects
) -> str:
    "Return a Markdown table with a row for each library and verdict."
    found = {(verdict.library, verdict.title): verdict for verdict in verdicts}
    rows: dict[tuple[str, str, str], list[str]] = {}
    for subject in subjects:
        verdict = found.get((subject.library, subject.title))
        if verdict is None:
            continue
        library = f'{verdict.library} {verdict.version}' if verdict.library else 'no library'
        note = '' if verdict.verdict in (EXACT, REPLAYED) else verdict.note
        rows.setdefault((library, verdict.verdict, note), []).append(verdict.title)
    lines = [f'| library | {head} | verdict |', '|---|---|---|']
    for (library, kind, note), titles in rows.items():
        verdict_cell = f'{kind}: {note}' if note else kind
        lines.append(f'| {library} | {"; ".join(titles)} | {verdict_cell} |')
    return '\n'.join(lines)


def list_subjects(table: str) -> dict[str, set[str]]:
    """Return the names in a table by library.

    A name with a comma is in parts. A column that only has the number of subjects counts as the numbers up to it.
    """
    found: dict[str, set[str]] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split('|')]
        if len(cells) < 4 or cells[1] == 'library' or cells[1].startswith('-'):
            continue
        library = '' if cells[1] == 'no library' else cells[1].rpartition(' ')[0]
        parts = re.split('[,;] ', cells[2])
        if cells[2].isdigit():
            parts = [str(i) for i in range(int(cells[2]))]
        found.setdefault(library, set()).update(parts)
    return found


def find_lost(
    written: str,  # table of a page
    table: str,  # table that would replace it
    renewed: Iterable[str] = (),  # libraries whose subjects are all tried again
) -> list[str]:
    "Return the libraries of which a table would lose subjects."
    kept = list_subjects(table)
    renewed = set(renewed)
    return [
        library
        for library, names in list_subjects(written).items()
        if library not in renewed and not names <= kept.get(library, set())
    ]


def read_between(page: Path, start: str, end: str) -> str:
    "Return the text between two lines of a page."
    _, _, rest = page.read_text('utf-8').partition(start)
    text, found, _ = rest.partition(end)
    if not found:
        raise ValueError(f'{page} lacks the lines {start} and {end}.')
    return text


def write_between(
    page: Path,
    start: str,  # line before the text
    end: str,  # line after the text
    text: str,
) -> None:
    "Replace the text between two lines of a page."
    found = f'{start}{read_between(page, start, end)}{end}'
    written = page.read_text('utf-8').replace(found, f'{start}\n{text}\n{end}', 1)
    page.write_text(written, 'utf-8')
