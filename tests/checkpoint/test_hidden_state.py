"""State in unusual places is restored, named at the first checkpoint, or in the list of docs/checkpoints.md."""

import re
from pathlib import Path

import pytest

from tests.checkpoint.hidden_state import EXACT, ITERATORS, NAMED, UNSEEN, in_callback, judge

PAGE = Path(__file__).resolve().parents[2] / 'docs/checkpoints.md'


@pytest.mark.parametrize('name', ITERATORS)
def test_iterators_are_named(name: str, tmp_path: Path) -> None:
    assert judge(lambda: in_callback(name), tmp_path, 'FromIterator.it: ') == 'named'


@pytest.mark.parametrize('name', NAMED)
def test_state_in_unusual_places_is_named(name: str, tmp_path: Path) -> None:
    make, line = NAMED[name]
    assert judge(make, tmp_path, line) == 'named'


@pytest.mark.parametrize('name', EXACT)
def test_what_is_restored_is_not_named(name: str, tmp_path: Path) -> None:
    assert judge(EXACT[name], tmp_path) == 'exact'


@pytest.mark.parametrize('name', UNSEEN)
def test_entries_of_the_list_are_not_seen(name: str, tmp_path: Path) -> None:
    assert judge(UNSEEN[name], tmp_path) == 'silent'


def test_the_list_of_the_page_is_complete() -> None:
    "Each row has a test, and each test has a row."
    section = PAGE.read_text().partition('### What the rehearsal does not look at')[2]
    table = section.partition('\n\n## ')[0]
    rows = re.findall(r'^\| ([^|]+?) \|', table, re.MULTILINE)[1:]
    assert rows == [*UNSEEN]
