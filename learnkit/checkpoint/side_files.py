"""Files in a folder next to a checkpoint's file: shards, and files of callbacks."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learnkit.core.errors import DamagedError

__all__ = ['check_files', 'damaged_error', 'describe_file', 'file_has_size', 'sweep_folders']


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


def sweep_folders(folder: Path, suffix: str) -> list[Path]:
    "Remove the folders of this suffix without a checkpoint file; the caller must hold the lock of `folder`."
    stale = [
        p
        for p in sorted(folder.glob(f'*{suffix}'))
        if p.is_dir()
        and not p.is_symlink()
        and re.match(r'\d+-', p.name)
        and not p.with_suffix('.ckpt').exists()
    ]
    for p in stale:
        shutil.rmtree(p, ignore_errors=True)
    return stale
