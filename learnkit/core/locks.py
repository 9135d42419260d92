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


class FolderLock:
    """Lock that one run at a time holds on a folder: `with FolderLock(folder): ...`, or `acquire` and `release`.

    The lock is an `fcntl` lock of the file `.lock` in the folder. The lock is released when the process ends, for any
    reason: forked workers do not keep the lock, and a remaining file `.lock` has no effect. The file is not removed.
    Within a process, a registry excludes a second run. Without `fcntl` locks (Windows, some network file systems),
    only the registry is used. Closing any handle of `.lock` in this process releases the lock: do not open the file.

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
        try:
            holder = _held_locks.setdefault(key, self)
            if holder is not self:
                raise self._make_error(f'this process{holder._since}')
            self._key = key  # from here on it can be released
            self._fd = self._lock_file()
        except BaseException:
            if _held_locks.get(key) is self:
                self._key = key
                self.release()
            raise
        return self

    def release(self) -> None:
        "Release the lock; do nothing if it is not held, or in a forked child of the owner."
        if not self.held or self._key is None:
            return
        # in this order, so that it can be done again if it was interrupted
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        _held_locks.pop(self._key, None)
        self._key = None

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
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(
                fd, f'process {os.getpid()} on {socket.gethostname()}{self._since}'.encode(), 0
            )
            return fd
        except OSError as e:
            owner = os.pread(fd, 300, 0).decode(errors='replace')
            os.close(fd)
            if isinstance(e, (BlockingIOError, PermissionError)):
                raise self._make_error(owner) from None
            if e.errno not in _NO_LOCKS:
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
