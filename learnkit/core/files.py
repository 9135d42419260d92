"""Atomic writing of files."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from learnkit.core.errors import OptionError

__all__ = [
    'atomic_write',
    'check_file',
    'check_folder',
    'check_folder_name',
    'check_writable',
    'sweep',
    'flush_file',
    'flush_folder',
    'unused_path',
]

# errors of file systems that do not support fsync of a folder
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
_TEMPORARY = re.compile(r'\..+\.tmp-(\d{1,10})-[0-9a-f]{8}', re.DOTALL)

_writing: set[Path] = set()  # temporary files that this process is writing


@contextmanager
def atomic_write(
    path: str | Path,  # path of the file; missing parent folders are created
) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`, to be written in the block, and rename it to `path` afterwards.

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


def check_folder(
    folder: Path,  # the folder; it and its parent folders are created if missing
    keep_new: bool = False,  # whether a folder that was missing is kept
) -> None:
    "Raise `OptionError` if a folder cannot be written; a folder that was missing is removed again."
    is_new = not folder.exists()
    try:
        check_writable(folder / '.writable')  # a name that no folder in it is likely to have
    except OSError as e:
        raise OptionError(f'{folder} cannot be written: {e}.') from None
    if is_new and not keep_new:
        folder.rmdir()


def check_folder_name(
    folder: str | os.PathLike[str],  # argument of a user
) -> Path:
    "Return the path of a folder; raise `OptionError` for an empty name and for other types."
    if isinstance(folder, (str, os.PathLike)) and str(folder).strip():
        return Path(folder)
    raise OptionError(f'folder={folder!r}: give a folder.')


def unused_path(path: Path) -> Path:
    "Return the path, or a numbered one if the file exists."
    numbered = (path.with_name(f'{path.stem}-{i}{path.suffix}') for i in count(2))
    return path if not path.exists() else next(p for p in numbered if not p.exists())


def sweep(
    folder: str | Path,  # folder that no other machine writes to: hold its lock
) -> list[Path]:
    """Remove temporary files in `folder` left by processes that have ended, and return their paths.

    Files of running processes, all other files, folders, and files that cannot be removed are kept."""
    removed: list[Path] = []
    for path in sorted(Path(os.path.realpath(folder)).glob('.*.tmp-*')):
        name = _TEMPORARY.fullmatch(path.name)
        if name is None or path.is_symlink() or not path.is_file():
            continue
        pid = int(name[1])
        is_in_use = path in _writing if pid == os.getpid() else _is_running(pid)
        if is_in_use:
            continue
        try:
            path.unlink()
        except OSError:
            continue
        removed.append(path)
    return removed


def _is_running(pid: int) -> bool:
    "Return False if a process has certainly ended."
    if os.name == 'nt':
        return True  # on Windows os.kill would end the process
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # the process of another user
    return True


def _make_temporary_path(path: Path) -> Path:
    # torch.save writes the file name without its suffix into the file: only the suffix may be random
    return path.with_name(f'.{path.name[:40]}.tmp-{os.getpid()}-{secrets.token_hex(4)}')


def flush_file(path: Path) -> None:
    "Let a file's bytes reach the disk."
    with path.open('rb+') as f:
        os.fsync(f.fileno())


def flush_folder(folder: Path) -> None:
    "Flush the directory entries of a folder to disk, if the file system supports it."
    if os.name == 'nt':
        return  # Windows cannot open folders
    try:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        if e.errno not in _CANNOT_SYNC:
            raise
