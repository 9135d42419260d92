"""The frame of the bench: what it calls equal, and how it writes the page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.peers.__main__ import PAGE, WILD, begin
from tests.peers.environments import PEERS
from tests.peers.rows import EQUAL, TOO_FAR, compare_numbers
from tests.peers.wild import SOURCES, Files, replace_names
from tests.peers.wild_sources import BEHAVIORS


def test_numbers_are_equal_bitwise_or_within_a_limit() -> None:
    a = {'w': torch.tensor([1.0, float('nan')]), 'n': torch.tensor(3)}
    assert compare_numbers(a, {name: t.clone() for name, t in a.items()}) == EQUAL
    assert compare_numbers(a, {**a, 'w': a['w'] + 3e-7}) == 'within 1e-05'
    assert compare_numbers(a, {**a, 'w': a['w'] + 2e-5}) == 'within 0.001'
    assert compare_numbers(a, {**a, 'w': a['w'] + 0.01}) == TOO_FAR
    assert compare_numbers(a, {**a, 'w': torch.ones(2)}) == TOO_FAR  # NaN and a number
    assert compare_numbers(a, {**a, 'w': torch.ones(3)}) == TOO_FAR
    assert compare_numbers(a, {'w': a['w']}) == TOO_FAR


def test_the_page_has_a_part_for_each_package() -> None:
    page = PAGE.read_text('utf-8')
    assert all(page.count(begin(peer)) == 1 for peer in [*PEERS, WILD])


def test_each_behavior_of_users_code_has_a_statement_and_a_line() -> None:
    tests = ''.join(file.read_text('utf-8') for file in Path('tests/interop').glob('test_*.py'))
    page = PAGE.read_text('utf-8')
    for behavior in BEHAVIORS:
        assert f'def test_{behavior.statement}(' in tests, behavior.statement
        assert page.count(f'| {behavior.text} |') == 1, behavior.text


def test_a_file_is_run_without_its_package_and_what_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / 'owner+name' / 'package'
    folder.mkdir(parents=True)
    (folder / 'base.py').write_text('class Base:\n    size = SIZE\n')
    source = """
import not_installed
from .base import *
from package.base import Base as Again
class Right(Base):
    def read(self) -> not_installed.Value: return outside
class Wrong(not_installed.Base): pass
raise RuntimeError('a program')
"""
    (folder / 'right.py').write_text(source)
    monkeypatch.setenv(SOURCES, str(tmp_path))
    names = Files('owner/name', {'SIZE': 3}).load('package/right.py')
    assert names.Right.size == 3 and names.Again is names.Base
    assert replace_names(names.Right, outside=7)().read() == 7
    with pytest.raises(ImportError, match='not_installed'):
        names.Wrong()
