"""Tables that are written again: no row is lost in silence."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.sweeps import verdicts
from tests.sweeps.__main__ import check_nothing_is_lost, run_family
from tests.sweeps.claims import EQUAL
from tests.sweeps.families import Family, describe_claims
from tests.sweeps.verdicts import (
    Subject,
    Verdict,
    find_lost,
    list_subjects,
    load_verdicts,
    read_between,
    save_verdicts,
)

HEAD = '| library | things | verdict |\n|---|---|---|\n'
WRITTEN = HEAD + '| no library | a, b | equal |\n| absent-library 1.2 | c(x, y) | equal |\n'


def judge(subject: Subject, folder: Path) -> list[Verdict]:
    version = '1.2' if subject.library else ''
    return [Verdict(subject.library, version, subject.title, EQUAL, claim='trains')]


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Family:
    "A family of two libraries, of which one is not installed, and its page."
    monkeypatch.setattr(verdicts, 'RESULTS', tmp_path / 'kept')
    page = tmp_path / 'page.md'
    tables = [
        f'<!-- {name} table -->\n{WRITTEN}<!-- end of {name} table -->\n'
        for name in ('things', 'others')
    ]
    page.write_text(''.join(tables), 'utf-8')
    return Family(
        'things',
        ['', 'absent-library'],
        lambda library: [Subject(library, title, dict) for title in 'ab'],
        judge,
        partial(describe_claims, 'things'),
        page,
    )


def choose(only: str = '', libraries: str | None = None) -> Namespace:
    return Namespace(only=only, libraries=libraries, write=True)


def test_subjects_of_a_table() -> None:
    assert list_subjects(WRITTEN) == {'': {'a', 'b'}, 'absent-library': {'c(x', 'y)'}}
    numbers = '| library | things | median |\n|---|--:|--:|\n| lib 1.2 | 3 | 1.02 |'
    assert list_subjects(numbers) == {'lib': {'0', '1', '2'}}


def test_lost_rows_are_named_by_library() -> None:
    fewer = HEAD + '| no library | a | equal |\n| absent-library 1.3 | c(x, y), d | equal |\n'
    assert find_lost(WRITTEN, fewer) == ['']
    assert find_lost(WRITTEN, fewer, renewed=['']) == []
    assert find_lost(fewer, WRITTEN) == ['absent-library']
    assert find_lost(WRITTEN, HEAD) == ['', 'absent-library']
    assert find_lost(WRITTEN, WRITTEN) == find_lost(HEAD, WRITTEN) == []


def test_a_table_that_would_lose_rows_is_refused(family: Family) -> None:
    with pytest.raises(SystemExit, match=r'things: absent-library$'):
        check_nothing_is_lost([family], choose())
    with pytest.raises(SystemExit, match=r'things: no library, absent-library$'):
        check_nothing_is_lost([family], choose(only='a'))
    complete = replace(family, name='others', libraries=[''])
    with pytest.raises(SystemExit, match=r'`--families others`\.\n  things: absent-library$'):
        check_nothing_is_lost([family, complete], choose())
    save_verdicts('things', judge(Subject('absent-library', 'c(x, y)', dict), Path()))
    check_nothing_is_lost([family, complete], choose())
    with pytest.raises(SystemExit, match=r'things: no library$'):
        check_nothing_is_lost([family], choose(libraries='absent-library'))
    assert WRITTEN in family.page.read_text('utf-8')


def test_kept_rows_are_written_and_removed_subjects_are_not(family: Family) -> None:
    save_verdicts('things', judge(Subject('absent-library', 'c(x, y)', dict), Path()))
    save_verdicts('things', judge(Subject('', 'of an earlier release', dict), Path()))
    assert run_family(family, choose()) == 0
    assert [v.title for v in load_verdicts('things')] == ['c(x, y)', 'a', 'b']
    written = read_between(family.page, *family.find_lines())
    assert list_subjects(written) == {'': {'a', 'b'}, 'absent-library': {'c(x', 'y)'}}
    assert '3 things, 1 library: 3 equal in every claim.' in written
