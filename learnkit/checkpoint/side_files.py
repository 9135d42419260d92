"""Files in a folder next to a checkpoint's file: shards, and what callbacks write in `save_to_checkpoint`."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learnkit.core.errors import DamagedError
from learnkit.core.files import flush_file, flush_folder
from learnkit.core.learner_type import LearnerLike
from learnkit.engine.callback import Callback

__all__ = [
    'check_files',
    'check_own_files',
    'damaged_error',
    'describe_file',
    'file_has_size',
    'read_own_files',
    'remove_own_files',
    'sweep_folders',
    'write_own_files',
]

PARTS, OWN_FILES = '.parts', '.files'  # suffixes of the folders of shards, and of callbacks


def describe_file(path: Path) -> list[Any]:
    "Return size and digest of a file."
    with path.open('rb') as f:
        return [path.stat().st_size, hashlib.file_digest(f, 'sha256').hexdigest()]


def file_has_size(path: Path, size: int) -> bool:
    "Return True if a file exists and has the given size in bytes."
    try:
        return path.is_file() and path.stat().st_size == size
    except OSError:
        return False


def check_files(
    path: Path,  # file of the checkpoint
    folder: Path,  # folder of its other files
    files: Mapping[str, Any],  # size and digest of each, by its path in the folder
    digests: bool = True,  # verify digests, not only sizes
) -> None:
    "Raise `DamagedError` if a file of the folder is missing or damaged."
    for name, (size, digest) in files.items():
        if not file_has_size(folder / name, size):
            raise damaged_error(
                path, f'belongs to {folder.name}/{name}, which is missing or was cut short'
            )
        if digests and describe_file(folder / name)[1] != digest:
            raise damaged_error(
                path, f'belongs to {folder.name}/{name}, whose digest differs: bytes have changed'
            )


def damaged_error(path: Path, what: str) -> DamagedError:
    "Make the error for a damaged checkpoint."
    return DamagedError(f'{path} {what}. Nothing was loaded.')


def sweep_folders(folder: Path) -> list[Path]:
    "Remove the folders without a checkpoint file, and return them; the caller must hold the lock of `folder`."
    stale = [
        p
        for p in sorted(folder.iterdir())
        if p.suffix in (PARTS, OWN_FILES)
        and p.is_dir()
        and not p.is_symlink()
        and re.match(r'\d+-', p.name)
        and not p.with_suffix('.ckpt').exists()
    ]
    for p in stale:
        shutil.rmtree(p, ignore_errors=True)
    return stale


# -- files of callbacks ----------------------------------------------------------------------------


def own_folder(path: Path) -> Path:
    "Return the folder of the files that belong to a checkpoint's file."
    return path.with_suffix(OWN_FILES)


def writes_files(cb: Any) -> bool:
    "Return True for a callback that has files of its own in a checkpoint."
    return (
        isinstance(cb, Callback) and type(cb).save_to_checkpoint is not Callback.save_to_checkpoint
    )


def write_own_files(
    learn: LearnerLike,
    path: Path,  # the file that the checkpoint will have
) -> dict[str, list[Any]]:
    """Let callbacks write their files; return size and SHA-256 of each, by its path in the folder.

    A folder without its checkpoint's file is one of a write that was interrupted, and is removed
    when the next run opens the folder.
    """
    writers = [cb for cb in learn.callbacks if writes_files(cb)]
    if not writers:
        return {}
    folder = own_folder(path)
    shutil.rmtree(folder, ignore_errors=True)
    for cb in writers:
        own = folder / learn.callbacks.keys[id(cb)]
        own.mkdir(parents=True)
        cb.save_to_checkpoint(own)
    files = [file for file in sorted(folder.rglob('*')) if file.is_file()]
    for file in files:
        flush_file(file)
        flush_folder(file.parent)
    return {file.relative_to(folder).as_posix(): describe_file(file) for file in files}


def check_own_files(
    path: Path,  # the checkpoint's file
    files: Mapping[str, Any],  # what `write_own_files` returned
    digests: bool = True,  # compare digests, not sizes alone
) -> None:
    "Raise `DamagedError` for a file that is missing, or not as it was written."
    folder = own_folder(path)
    for name in files:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise damaged_error(path, f'names a file {ascii(name)[:80]}')
    check_files(path, folder, files, digests)


def read_own_files(
    learn: LearnerLike,
    path: Path,  # the checkpoint's file
) -> None:
    "Let callbacks read their files; callbacks that write none get the checkpoint's folder."
    folder = own_folder(path)
    for cb in learn.cbs:
        read = getattr(cb, 'resume_from_checkpoint', None)
        if read is None:
            continue
        if not writes_files(cb):
            read(path.parent, learn.model)
            continue
        own = folder / learn.callbacks.keys[id(cb)]
        if own.is_dir():  # the callback may be newer than the checkpoint
            read(own, learn.model)


def remove_own_files(path: Path) -> None:
    "Remove the files of a checkpoint whose file was removed."
    shutil.rmtree(own_folder(path), ignore_errors=True)
