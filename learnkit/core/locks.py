"""A lock on a folder, so that no two runs write into it; it dies with the process that holds it."""

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
# what file systems without locks say
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

# Held by this process: by process (a forked child holds none of its parent's), and the folder's device and inode.
_held: dict[tuple[int, int, int], FolderLock] = {}
_warned: set[int] = set()  # devices


class FolderLock:
    """Keep a folder to one run at a time: `with FolderLock(folder): ...`, or `acquire` and `release`.

    The lock is one of the system's on the file `.lock` in the folder, which ends with the process, however that ends:
    workers forked by it do not keep it, and a `.lock` that was left behind means nothing. The file stays. Within the
    process a registry excludes a second run; where the system has no such locks (Windows, some network file systems)
    the registry is all there is. Closing *any* handle of `.lock` in this process gives the lock up: do not open it.

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
        """Make the folder if it is not there, and lock it; nothing happens if this lock is held.

        Raises `FolderInUseError`, which says by whom, and the `OSError` of a folder that cannot be written."""
        if self.held:
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        found = self.folder.stat()
        key = (os.getpid(), found.st_dev, found.st_ino)
        self._since = f' has been writing there since {datetime.now():%Y-%m-%d %H:%M:%S}'
        if (other := _held.setdefault(key, self)) is not self:
            raise self._in_use(f'this process{other._since}')
        try:
            self._fd = self._locked()
        except BaseException:
            del _held[key]
            raise
        self._key = key
        return self

    def release(self) -> None:
        "Give the lock up; nothing happens if it is not held, or in a forked child of the process that holds it."
        if not self.held or self._key is None:
            return
        fd, key, self._fd, self._key = self._fd, self._key, None, None
        if fd is not None:
            os.close(fd)
        del _held[key]

    @property
    def held(self) -> bool:
        "Whether this process holds this lock."
        return self._key is not None and self._key[0] == os.getpid()

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.release()

    def _locked(self) -> int | None:
        "Lock the file and say in it who did; return its descriptor, None where there are no locks."
        if fcntl is None:
            return None
        # a link is not followed: what it leads to would be overwritten
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
                raise self._in_use(owner) from None
            if e.errno not in _NO_LOCKS:
                raise
            self._warn(e)
            return None

    def _in_use(self, owner: str) -> FolderInUseError:
        return FolderInUseError(
            f'{self.folder} is in use: {owner or "another process is writing there"}. Two runs '
            'would mix their checkpoints: give this one a folder of its own, or end the other.'
        )

    def _warn(self, e: OSError) -> None:
        if (device := self.folder.stat().st_dev) in _warned:
            return
        _warned.add(device)
        warn(
            f'The file system of {self.folder} has no locks ({e.strerror}): nothing keeps another process from '
            'writing there too.',
            stacklevel=4,
        )
