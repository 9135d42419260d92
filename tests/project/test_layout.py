"""The folders of tests mirror the packages: a test file has the name of the module that it tests."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / 'learnkit'
# folders with an order of their own
SPECIAL = {
    'browser',
    'compat',
    'faults',
    'golden',
    'helpers',
    'peers',
    'project',
    'silent',
}
# tests of many modules, or of another library with learnkit
INTERPLAY = {
    'callbacks/test_every_callback.py',
    'callbacks/test_every_callback_resumes.py',
    'interop/test_hf_trainer.py',
    'interop/test_peft.py',
}
MIRRORED = sorted(
    folder.name
    for folder in TESTS.iterdir()
    if folder.is_dir() and folder.name not in SPECIAL and any(folder.glob('test_*.py'))
)


def module_names(folder: str) -> list[str]:
    "Return the modules of a package, or the top-level modules for the folder of a single module."
    path = PACKAGE / folder if (PACKAGE / folder).is_dir() else PACKAGE
    return [module.stem for module in path.glob('*.py')]


@pytest.mark.parametrize('folder', MIRRORED)
def test_each_test_file_begins_with_the_name_of_a_module(folder: str) -> None:
    files = {path.stem: f'{folder}/{path.name}' for path in (TESTS / folder).glob('test_*.py')}
    prefixes = tuple(f'test_{name}_' for name in module_names(folder))
    unknown = {file for stem, file in files.items() if not f'{stem}_'.startswith(prefixes)}
    assert unknown <= INTERPLAY


def test_each_folder_is_a_package_or_a_module() -> None:
    known = {path.stem for path in PACKAGE.iterdir()}
    assert set(MIRRORED) <= known


def test_each_interplay_test_exists() -> None:
    assert [file for file in INTERPLAY if not (TESTS / file).exists()] == []
