"""`FolderLock`, a lock that keeps two runs from writing to one folder, released when its process ends."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self
from warnings import warn

from filelock import FileLock, Timeout

from learnkit.core.errors import FolderInUseError
from learnkit.core.interrupts import run_all

__all__ = ['FolderLock']

# errors of file systems without locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class FolderLock:
    """Lock that one run at a time holds on a folder: `with FolderLock(folder): ...`, or `acquire` and `release`.

    The lock is a `filelock.FileLock` of the file `.lock` in the folder, which names the owner. The lock is released
    when the process ends, for any reason: forked workers do not keep the lock, and a remaining file `.lock` has no
    effect. On a file system without locks, the folder is not locked, and a warning is issued.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, FolderLock(folder):
    ...     try: FolderLock(folder).acquire()
    ...     except FolderInUseError as e: print(str(e).replace(folder, 'runs/1')[:41])
    runs/1 is in use: this process has been w
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock = self._make_lock()

    def acquire(self) -> Self:
        """Create the folder if missing, and lock it; do nothing if this lock is held.

        Raises `FolderInUseError`, which names the owner, and `OSError` for a folder that is not writable."""
        if self.held:
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._make_lock()  # a lock from before a fork cannot be acquired in the child
        try:
            with _waiting_signals():
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
        with _waiting_signals():
            self._lock.release()

    @property
    def held(self) -> bool:
        "True if this process holds this lock."
        return self._lock.is_locked

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.release()

    def _make_lock(self) -> FileLock:
        path = self.folder / '.lock'
        with _waiting_signals():
            return FileLock(path, timeout=0, thread_local=False, on_acquired=_write_owner)

    def _make_error(self) -> FolderInUseError:
        try:
            owner = (self.folder / '.lock').read_text(errors='replace')
        except OSError:  # Windows does not read a locked file
            owner = ''
        owner = owner.replace(_get_process_name(), 'this process')
        return FolderInUseError(
            f'{self.folder} is in use: {owner or "another process is writing there"}. Two runs '
            'would mix their checkpoints: give this one its own folder, or end the other.'
        )


@contextmanager
def _waiting_signals() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait, whichever thread the system gives them to.

    filelock would lose a lock that it was interrupted in taking or giving back, and its own locks, for which other
    threads would wait forever, where it was interrupted in between."""
    if threading.current_thread() is not threading.main_thread():  # Python's handlers run there
        yield
        return
    received: list[int] = []
    handlers = {
        n: handler
        for n in (signal.SIGINT, signal.SIGTERM)
        if (handler := signal.getsignal(n)) is not None  # None: installed by code in C
    }
    try:
        for n in handlers:
            signal.signal(n, lambda number, frame: received.append(number))
        yield
    finally:
        run_all(partial(signal.signal, n, handler) for n, handler in handlers.items())
        for number in sorted(set(received), reverse=True):  # SIGTERM first: it may set a flag only
            signal.raise_signal(number)


def _write_owner(fd: int) -> None:
    "Write which process locked the file, and since when."
    os.ftruncate(fd, 0)
    time = f'{datetime.now():%Y-%m-%d %H:%M:%S}'
    os.write(fd, f'{_get_process_name()} has been writing there since {time}'.encode())


def _get_process_name() -> str:
    return f'process {os.getpid()} on {socket.gethostname()}'
