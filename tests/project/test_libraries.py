"""Tests are skipped where a listed optional library is absent, and nowhere else."""

from __future__ import annotations

import sys

import pytest
from _pytest.outcomes import Failed, Skipped

from learnkit.core.optional import import_library
from tests.helpers.libraries import import_or_skip, require, skip_if_absent


@pytest.fixture
def without_torchmetrics(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ('torchmetrics', 'torchmetrics.classification'):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, 'fastai', None)
    monkeypatch.delenv('LEARNKIT_ALL_LIBRARIES', raising=False)


@pytest.mark.usefixtures('without_torchmetrics')
def test_an_absent_library_skips() -> None:
    with pytest.raises(Skipped, match='torchmetrics'):
        pytest.importorskip('torchmetrics.classification')
    with pytest.raises(Skipped, match='torchmetrics'):
        require('torchmetrics.classification')


@pytest.mark.usefixtures('without_torchmetrics')
def test_where_all_libraries_are_needed_an_absent_one_of_dev_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv('LEARNKIT_ALL_LIBRARIES', '1')
    with pytest.raises(Failed, match='torchmetrics'):
        import_or_skip('torchmetrics')
    with pytest.raises(Skipped, match='fastai'):
        import_or_skip('fastai')


def test_a_mistyped_module_is_an_error() -> None:
    pytest.importorskip('torchmetrics')
    with pytest.raises(ModuleNotFoundError, match=r'torchmetrics\.clasification'):
        import_or_skip('torchmetrics.clasification')
    with pytest.raises(ModuleNotFoundError, match=r'torchmetrics\.clasification'):
        import_library('torchmetrics.clasification', 'F1Score')
    skip_if_absent('torchmetric')  # a library of no list
