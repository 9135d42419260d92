"""Row 50: two runs in one folder by other paths, links or mounts. The second is refused, whatever reads the folder."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from learnkit.core.errors import FolderInUseError
from learnkit.core.files import FolderLock
from tests.faults.file_helpers import result_of

CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


def is_refused(folder: Path) -> bool:
    "Return True if this process cannot lock a folder."
    try:
        FolderLock(folder).acquire().release()
    except FolderInUseError:
        return True
    return False


def is_refused_elsewhere(folder: Path) -> bool:
    "Return True if another process cannot lock a folder."
    return bool(result_of(lambda: is_refused(folder)))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    "A folder that a run of this process has locked."
    with FolderLock(tmp_path / 'a' / 'run'):
        yield tmp_path / 'a' / 'run'


def paths_to(run: Path) -> dict[str, Path]:
    "Return other paths to a folder."
    base = run.parents[1]
    (base / 'link').symlink_to(run)
    (base / 'to a link').symlink_to(base / 'link')
    (base / 'parent').symlink_to(run.parent)
    fd = os.open(run, os.O_RDONLY)
    return {
        'relative': Path(os.path.relpath(run)),
        'up and down': run / '..' / 'run',
        'a link': base / 'link',
        'a link to a link': base / 'to a link',
        'a link to its parent': base / 'parent' / 'run',
        'a descriptor': Path(f'/proc/{os.getpid()}/fd/{fd}'),
    }


def test_other_paths(run: Path) -> None:
    for name, path in paths_to(run).items():
        assert is_refused(path), name
        assert is_refused_elsewhere(path), name
