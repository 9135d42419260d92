"""Row 50: two runs in one folder by other paths, links or mounts. The second is refused, whatever reads the folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from learnkit.core.errors import FolderInUseError
from learnkit.core.files import FolderLock
from tests.faults.fault_helpers import At
from tests.faults.file_helpers import result_of
from tests.faults.run_helpers import checkpointed

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


def copy_folder(run: Path) -> None:
    unfinished = shutil.ignore_patterns('.*.tmp-*')  # gets its final name at any time
    shutil.copytree(run, run.with_name('copy'), ignore=unfinished)


def test_a_run_whose_callback_reads_its_folder(tmp_path: Path) -> None:
    "A second process is refused from the first step to the last."
    refused: list[bool] = []

    def read(cb: Any) -> None:
        copy_folder(tmp_path / 'run')
        shutil.rmtree(tmp_path / 'copy')
        refused.append(is_refused_elsewhere(tmp_path / 'run'))

    watch = [At('before_batch', read, nth) for nth in (1, 2, 3)]
    checkpointed(tmp_path / 'run', every='1ba')(*watch).fit(1)
    assert refused == [True] * 3
    assert not is_refused_elsewhere(tmp_path / 'run')


def test_an_interrupted_attempt_gives_the_folder_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "Ctrl-C right after the system has locked the file."

    def interrupt(fd: int, n: int) -> None:
        raise KeyboardInterrupt

    before = len(os.listdir('/proc/self/fd'))
    with monkeypatch.context() as m:
        m.setattr(os, 'ftruncate', interrupt)
        with pytest.raises(KeyboardInterrupt):
            FolderLock(tmp_path).acquire()
    assert len(os.listdir('/proc/self/fd')) == before
    assert not is_refused(tmp_path) and not is_refused_elsewhere(tmp_path)
