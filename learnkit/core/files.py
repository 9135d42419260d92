"""Write files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ['atomic_write', 'check_writable', 'sweep', 'flush_file', 'flush_folder']

# what file systems say that keep folders another way
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
_TEMPORARY = re.compile(r'\..+\.tmp-(\d{1,10})-[0-9a-f]{8}', re.DOTALL)

_writing: set[Path] = set()  # temporaries that this process is writing now


@contextmanager
def atomic_write(
    path: str | Path,  # the file to write; folders above it are made
) -> Iterator[Path]:
    """Yield a temporary path beside `path`, to be written in the block; after it, that file takes the place of `path`.

    Whatever happens, `path` holds all of the old content or all of the new: the temporary file is flushed to the disk,
    renamed, and then the folder is flushed. If the block or any of this fails, the temporary file is removed. Its name
    is `.<name>.tmp-<process>-<random>`; where `path` is a link, the file that it leads to is replaced.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(f'{folder}/a.txt') as tmp: _ = tmp.write_text('all of it')
    ...     print(Path(folder, 'a.txt').read_text(), os.listdir(folder))
    all of it ['a.txt']
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = _temporary(path)
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
    "Make the folders above `path` and write an empty file there for a moment. Raises the `OSError` that this gives."
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = _temporary(path)
    try:
        tmp.touch()
    finally:
        tmp.unlink(missing_ok=True)


def sweep(
    folder: str | Path,  # one that no other machine is writing into: hold its lock
) -> list[Path]:
    """Remove the temporaries in `folder` whose process has ended without doing so, and return them.

    Everything else stays: what a living process is writing, other files, folders, and what cannot be removed."""
    swept: list[Path] = []
    for path in sorted(Path(os.path.realpath(folder)).glob('.*.tmp-*')):
        name = _TEMPORARY.fullmatch(path.name)
        if name is None or path.is_symlink() or not path.is_file():
            continue
        pid = int(name[1])
        if path in _writing if pid == os.getpid() else _lives(pid):
            continue
        try:
            path.unlink()
        except OSError:
            continue
        swept.append(path)
    return swept


def _lives(pid: int) -> bool:
    "Say whether a process exists, as far as this can be known."
    if os.name == 'nt':
        return True  # asking by a signal would end it there
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it is another user's
    return True


def _temporary(path: Path) -> Path:
    # torch names the folder inside its file after the part before the last dot: the same bytes every time
    return path.with_name(f'.{path.name[:40]}.tmp-{os.getpid()}-{secrets.token_hex(4)}')


def flush_file(path: Path) -> None:
    "Let a file's bytes reach the disk."
    with path.open('rb+') as f:
        os.fsync(f.fileno())


def flush_folder(folder: Path) -> None:
    "Let the names in a folder reach the disk, where the system can."
    if os.name == 'nt':
        return  # Windows opens no folders
    try:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        if e.errno not in _CANNOT_SYNC:
            raise
