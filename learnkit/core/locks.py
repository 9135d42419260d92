"""`FolderLock`, a lock that keeps two runs from writing to one folder, released when its process ends."""

from __future__ import annotations

import errno
import os
import socket
from datetime import datetime
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from warnings import warn

from learnkit.core.errors import FolderInUseError

__all__ = ['FolderLock']

fcntl: Any = import_module('fcntl') if os.name != 'nt' else None
# errors of file systems without locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

# by process id (a forked child does not own its parent's locks), device and inode of the folder
_held_locks: dict[tuple[int, int, int], FolderLock] = {}
_warned_devices: set[int] = set()
_open_files: set[int] = set()  # file descriptors of locks


def _close_files() -> None:
    "Close the parent's lock files in a forked child, which would otherwise keep the locks after the parent's end."
    for fd in _open_files:
        os.close(fd)
    _open_files.clear()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_close_files)


class FolderLock:
    """Lock that one run at a time holds on a folder: `with FolderLock(folder): ...`, or `acquire` and `release`.

    The lock is a `flock` of the file `.lock` in the folder, whatever path leads there. The lock is released when the
    process ends, for any reason: forked children close the file, and a remaining file `.lock` has no effect. The file
    is not removed. Other code may read the file. Within a process, a registry excludes a second run. Without `flock`
    (Windows, some network file systems), only the registry is used.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, FolderLock(folder):
    ...     try: FolderLock(folder).acquire()
    ...     except FolderInUseError as e: print(str(e).replace(folder, 'runs/1')[:41])
    runs/1 is in use: this process has been w
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._key: tuple[int, int, int] | None = None
        self._fd: int | None = None
        self._since = ''

    def acquire(self) -> Self:
        """Create the folder if missing, and lock it; do nothing if this lock is held.

        Raises `FolderInUseError`, which names the owner, and `OSError` for a folder that is not writable."""
        if self.held:
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        stat = self.folder.stat()
        key = (os.getpid(), stat.st_dev, stat.st_ino)
        self._since = f' has been writing there since {datetime.now():%Y-%m-%d %H:%M:%S}'
        holder = _held_locks.setdefault(key, self)
        if holder is not self:
            raise self._make_error(f'this process{holder._since}')
        try:
            self._fd = self._lock_file()
        except BaseException:
            del _held_locks[key]
            raise
        self._key = key
        return self

    def release(self) -> None:
        "Release the lock; do nothing if it is not held, or in a forked child of the owner."
        if not self.held or self._key is None:
            return
        fd, key = self._fd, self._key
        self._fd = None
        self._key = None
        if fd is not None:
            _close_file(fd)
        del _held_locks[key]

    @property
    def held(self) -> bool:
        "True if this process holds this lock."
        return self._key is not None and self._key[0] == os.getpid()

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.release()

    def _lock_file(self) -> int | None:
        "Lock the file and write the owner to it; return the file descriptor, or None without locks."
        if fcntl is None:
            return None
        # O_NOFOLLOW, because the target of a link would be overwritten
        fd = os.open(
            self.folder / '.lock', os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
        )
        _open_files.add(fd)
        try:
            # `lockf` would lose the lock when any other descriptor of the file is closed
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(
                fd, f'process {os.getpid()} on {socket.gethostname()}{self._since}'.encode(), 0
            )
            return fd
        except BaseException as e:
            owner = os.pread(fd, 300, 0).decode(errors='replace')
            _close_file(fd)
            if isinstance(e, (BlockingIOError, PermissionError)):
                raise self._make_error(owner) from None
            if not isinstance(e, OSError) or e.errno not in _NO_LOCKS:
                raise
            self._warn(e)
            return None

    def _make_error(self, owner: str) -> FolderInUseError:
        return FolderInUseError(
            f'{self.folder} is in use: {owner or "another process is writing there"}. Two runs '
            'would mix their checkpoints: give this one its own folder, or end the other.'
        )

    def _warn(self, e: OSError) -> None:
        "Warn once per device that its file system has no locks."
        device = self.folder.stat().st_dev
        if device in _warned_devices:
            return
        _warned_devices.add(device)
        warn(
            f'The file system of {self.folder} has no locks ({e.strerror}): nothing keeps another process from '
            'writing there too.',
            stacklevel=4,
        )


def _close_file(fd: int) -> None:
    _open_files.discard(fd)
    os.close(fd)
