# SPDX-License-Identifier: Apache-2.0
"""Paths in checkpoints, relative to the Learner's folder if they are inside it, so that the folder can be moved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from learnkit.core.validation import warn_user

if TYPE_CHECKING:
    from learnkit.learner import Learner


def to_portable_path(
    learn: Learner,  # Learner whose `path` is the folder
    path: str | Path | None,  # path of a file
) -> str | None:
    """Return the string that a checkpoint holds for a path.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(path='/runs/a')
    >>> to_portable_path(learn, '/runs/a/models/best.pth'), to_portable_path(learn, '/other/best.pth')
    ('models/best.pth', '/other/best.pth')
    """
    if path is None or learn is None:
        return None if path is None else str(path)
    absolute = Path(os.path.abspath(path))
    folder = Path(os.path.abspath(learn.path))
    return absolute.relative_to(folder).as_posix() if absolute.is_relative_to(folder) else str(path)


def from_portable_path(
    learn: Learner,  # Learner whose `path` is the folder, possibly another one than before
    kept: str | None,  # string that `to_portable_path` returned
    own: str | Path | None = None,  # folder that the callback was given
) -> Path | None:
    """Return the path that a checkpoint holds.

    Returns None, with a warning, for a path outside of the Learner's folder and the callback's folder: a checkpoint
    may come from an untrusted source, and the path may be written to.
    """
    if kept is None or learn is None:
        return None if kept is None else Path(kept)
    path = Path(os.path.realpath(learn.path / kept))
    folders = [learn.path, *([] if own is None else [learn.path / own])]
    if any(path.is_relative_to(os.path.realpath(folder)) for folder in folders):
        return Path(os.path.abspath(learn.path / kept))
    warn_user(
        f'The checkpoint names {path}, which lies outside of {Path(learn.path).absolute()}: it is left alone.'
    )
    return None
