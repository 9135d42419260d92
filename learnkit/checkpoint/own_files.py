"""Files that callbacks write next to a checkpoint: `save_to_checkpoint` and `resume_from_checkpoint`."""

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
    'check_own_files',
    'read_own_files',
    'remove_own_files',
    'sweep_own_files',
    'write_own_files',
]


def own_folder(path: Path) -> Path:
    "Return the folder of the files that belong to a checkpoint's file."
    return path.with_suffix('.files')


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
    return {file.relative_to(folder).as_posix(): describe(file) for file in files}


def check_own_files(
    path: Path,  # the checkpoint's file
    files: Mapping[str, Any],  # what `write_own_files` returned
    digests: bool = True,  # compare digests, not sizes alone
) -> None:
    "Raise `DamagedError` for a file that is missing, or not as it was written."
    folder = own_folder(path)
    for name, (size, digest) in files.items():
        file = folder / name
        if not file.resolve().is_relative_to(folder.resolve()):
            raise DamagedError(f'{path} names a file {ascii(name)[:80]}. Nothing was loaded.')
        if not file.is_file() or file.stat().st_size != size:
            raise DamagedError(
                f'{path} belongs to {folder.name}/{name}, which is missing or was cut short. '
                'Nothing was loaded.'
            )
        if digests and describe(file)[1] != digest:
            raise DamagedError(
                f'{path} belongs to {folder.name}/{name}, whose digest differs: bytes have '
                'changed. Nothing was loaded.'
            )


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


def sweep_own_files(folder: Path) -> None:
    "Remove the files of checkpoints that do not exist; hold the lock of `folder`."
    for own in sorted(folder.glob('*.files')):
        is_checkpoints = own.is_dir() and not own.is_symlink() and re.match(r'\d+-', own.name)
        if is_checkpoints and not own.with_suffix('.ckpt').exists():
            shutil.rmtree(own, ignore_errors=True)


def describe(file: Path) -> list[Any]:
    "Return the size and the SHA-256 of a file."
    with file.open('rb') as f:
        return [file.stat().st_size, hashlib.file_digest(f, 'sha256').hexdigest()]
