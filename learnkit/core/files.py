# SPDX-License-Identifier: Apache-2.0
"""Files and folders: atomic writes, checks, and `FolderLock`, a lock that only one run at a time holds on a folder."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Self
from warnings import warn

from learnkit.core.errors import FolderInUseError, OptionError
from learnkit.core.interrupts import deferred_interrupts

if TYPE_CHECKING:
    from filelock import FileLock

# `Path` leaves one of the slashes of `s3://`; the drives of Windows have one letter
_URL = re.compile(r'[A-Za-z][A-Za-z0-9+.-]+:/')

# errors of file systems that do not support fsync of a folder
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
# errors of file systems without locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_TEMPORARY = re.compile(r'\..+\.tmp-(\d{1,10})-[0-9a-f]{8}', re.DOTALL)
_TEMPORARY_OF_SAFETENSORS = re.compile(r'\.tmp\w{6}')

_writing: set[Path] = set()  # temporary files that this process is writing


@contextmanager
def atomic_write(
    path: str | Path,  # path of the file; missing parent folders are created
) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; after the block has written it, rename it to `path`.

    `path` always holds either the complete old content or the complete new content: the temporary file is flushed to
    disk and renamed, then the folder is flushed. If the block or any of these steps fails, the temporary file is
    removed. The temporary name is `.<name>.tmp-<process>-<random>`. If `path` is a link, its target is replaced.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(f'{folder}/a.txt') as tmp: _ = tmp.write_text('all of it')
    ...     print(Path(folder, 'a.txt').read_text(), os.listdir(folder))
    all of it ['a.txt']
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = _make_temporary_path(path)
    _writing.add(tmp)
    try:
        yield tmp
        flush_file(tmp)
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)
        _writing.discard(tmp)
    flush_folder(path.parent)


def check_writable(path: str | Path) -> None:
    "Create the parent folders of `path`, and create and remove an empty file there. Raises `OSError` on failure."
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = _make_temporary_path(path)
    try:
        tmp.touch()
    finally:
        tmp.unlink(missing_ok=True)


def check_file(path: Path) -> None:
    "Raise `OptionError` if a file cannot be written; its parent folders are created if missing."
    try:
        check_writable(path)
    except OSError as e:
        raise OptionError(f'{path} cannot be written: {e}.') from None


def check_folder(folder: Path) -> None:
    "Create a folder and its parent folders if missing; raise `OptionError` if it cannot be written."
    try:
        check_writable(folder / '.writable')  # a subfolder is unlikely to have this name
    except OSError as e:
        raise OptionError(f'{folder} cannot be written: {e}.') from None


def as_local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file or folder; raise `OptionError` for a URL.

    >>> as_local_path('runs/s3').parts
    ('runs', 's3')
    """
    if _URL.match(os.fspath(path)):
        raise OptionError(f'{os.fspath(path)!r} is a URL: pass a path of this machine.')
    return Path(path)


def unused_path(path: Path) -> Path:
    "Return `path` if it does not exist, or else the first unused path with a number, such as `trace-2.json`."
    numbered = (path.with_name(f'{path.stem}-{i}{path.suffix}') for i in count(2))
    return path if not path.exists() else next(p for p in numbered if not p.exists())


def sweep(
    folder: str | Path,  # folder whose lock is held, so that no other machine writes to it
) -> list[Path]:
    """Remove temporary files in `folder` left by processes that have ended, and return their paths.

    Files of running processes, all other files, folders, and files that cannot be removed are kept."""
    removed: list[Path] = []
    for path in sorted(Path(os.path.realpath(folder)).glob('.*tmp*')):
        if path.is_symlink() or not path.is_file() or not _is_stale(path):
            continue
        try:
            path.unlink()
        except OSError:
            continue
        removed.append(path)
    return removed


def _is_stale(path: Path) -> bool:
    if _TEMPORARY_OF_SAFETENSORS.fullmatch(path.name):
        return all(tmp.parent != path.parent for tmp in _writing)
    name = _TEMPORARY.fullmatch(path.name)
    if name is None:
        return False
    pid = int(name[1])
    return path not in _writing if pid == os.getpid() else not _is_running(pid)


def _is_running(pid: int) -> bool:
    "Return False if a process has ended for certain."
    if os.name == 'nt':
        return True  # os.kill ends the process on Windows
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user owns the process
    return True


def _make_temporary_path(path: Path) -> Path:
    # only the suffix may be random, because torch.save writes the file name without the suffix into the file
    return path.with_name(f'.{path.name[:40]}.tmp-{os.getpid()}-{secrets.token_hex(4)}')


def link_or_copy(source: Path, target: Path) -> None:
    "Hard-link a file that is no longer changed, or copy it where the file system has no links."
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def identify_version(status: os.stat_result) -> tuple[int, ...]:
    "Return device, inode, size and time of modification, which differ after a file has been changed or replaced."
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def flush_file(path: Path) -> None:
    "Flush a file to disk."
    with path.open('rb+') as f:
        os.fsync(f.fileno())


def flush_folder(folder: Path) -> None:
    "Flush the entries of a folder to disk, if the file system supports it."
    if os.name == 'nt':
        return  # Windows cannot open a folder
    try:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        if e.errno not in _CANNOT_SYNC:
            raise


class FolderLock:
    """Lock that one run at a time holds on a folder: `with FolderLock(folder): ...`, or `acquire` and `release`.

    The lock is a `filelock.FileLock` of the file `.lock` in the folder. The file contains the owner's name. The lock is
    released when the process ends, for any reason: forked workers do not keep the lock, and a remaining file `.lock`
    has no effect. On a file system without locks, `acquire` issues a warning and does not lock the folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, FolderLock(folder):
    ...     try: FolderLock(folder).acquire()
    ...     except FolderInUseError as e: print(str(e).replace(folder, 'runs/1')[:41])
    runs/1 is in use: this process has been w
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock: FileLock | None = None

    def acquire(self) -> Self:
        """Create the folder if missing, and lock it; do nothing if this lock is held.

        Raises `FolderInUseError` with the owner's name if another run holds the lock, and `OSError` for a folder that
        is not writable."""
        from filelock import FileLock, Timeout  # imported only by runs that write checkpoints

        if self.held:
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / '.lock'
        try:
            # an interrupt within filelock would lose the lock, or leave filelock's own locks held
            with deferred_interrupts():
                # a new lock, because a child process cannot acquire a lock made before the fork
                self._lock = FileLock(path, timeout=0, thread_local=False, on_acquired=_write_owner)
                self._lock.acquire()
        except Timeout:
            raise self._make_error() from None
        except OSError as e:
            if e.errno not in _NO_LOCKS:
                raise
            warn(
                f'The file system of {self.folder} has no locks ({e.strerror}): nothing keeps another run from '
                'writing there too.',
                stacklevel=2,
            )
        return self

    def release(self) -> None:
        "Release the lock; do nothing if it is not held, or in a forked child of the owner."
        with deferred_interrupts():
            if self._lock is not None:
                self._lock.release()

    @property
    def held(self) -> bool:
        "True if this process holds this lock."
        return self._lock is not None and self._lock.is_locked

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _make_error(self) -> FolderInUseError:
        try:
            owner = (self.folder / '.lock').read_text(errors='replace')
        except OSError:  # a locked file cannot be read on Windows
            owner = ''
        owner = owner.replace(_get_process_name(), 'this process')
        return FolderInUseError(
            f'{self.folder} is in use: {owner or "another process is writing there"}. Two runs '
            'would mix their checkpoints: give this run its own folder, or end the other.'
        )


def _write_owner(fd: int) -> None:
    "Write the process that locked the file, and the time."
    os.ftruncate(fd, 0)
    time = f'{datetime.now():%Y-%m-%d %H:%M:%S}'
    os.write(fd, f'{_get_process_name()} has been writing there since {time}'.encode())


def _get_process_name() -> str:
    return f'process {os.getpid()} on {socket.gethostname()}'
