"""Files that callbacks write next to a checkpoint: `save_to_checkpoint` and `resume_from_checkpoint`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learnkit.checkpoint.side_files import check_files, damaged_error, describe_file, sweep_folders
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
    "Return True for a callback that has its own files in a checkpoint."
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


def sweep_own_files(folder: Path) -> None:
    "Remove the files of checkpoints that do not exist; hold the lock of `folder`."
    sweep_folders(folder, '.files')
