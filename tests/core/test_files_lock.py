"""The lock on a folder within one process; `faults/test_f34_two_runs_one_folder.py` tests several processes."""

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from learnkit.core.errors import FolderInUseError
from learnkit.core.files import FolderLock


def test_taking_and_giving_up(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / 'deep' / 'er')
    assert not lock.held
    assert lock.acquire() is lock and lock.held and lock.acquire() is lock
    text = (tmp_path / 'deep' / 'er' / '.lock').read_text()
    assert text.startswith(
        f'process {os.getpid()} on {socket.gethostname()} has been writing there since 20'
    )
    with pytest.raises(FolderInUseError):
        FolderLock(tmp_path / 'deep' / 'er').acquire()
    lock.release()
    lock.release()
    assert not lock.held
    with lock:
        assert lock.held
    with FolderLock(tmp_path / 'deep' / 'er') as other:
        assert other.held and not lock.held


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / 'precious').write_text('text')
    (tmp_path / '.lock').symlink_to(tmp_path / 'precious')
    with pytest.raises(OSError, match=r'\.lock'):
        FolderLock(tmp_path).acquire()
    assert (tmp_path / 'precious').read_text() == 'text'
    (tmp_path / '.lock').unlink()
    with FolderLock(tmp_path):
        pass  # the failure left nothing in the registry


@pytest.mark.parametrize('code', [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(fcntl, 'flock', fails(code))
    with pytest.warns(UserWarning, match=r'has no locks \(.*\)') as caught:
        lock = FolderLock(tmp_path).acquire()
    assert caught[0].filename == __file__ and not lock.held
    lock.release()


def test_other_errors_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, 'flock', fails(errno.EIO))
    with pytest.raises(OSError, match='Input/output'):
        FolderLock(tmp_path).acquire()
    monkeypatch.undo()
    with FolderLock(tmp_path):
        pass


def fails(code: int) -> Any:
    def flock(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    return flock
