"""Paths in checkpoints: relative to the Learner's folder where they lie below it, so that this folder may be moved."""

from __future__ import annotations

import os
from pathlib import Path

from learnkit.core.learner_type import LearnerLike
from learnkit.core.validation import warn_user

__all__ = ['kept_path', 'found_path']


def kept_path(
    learn: LearnerLike,  # a Learner
    path: str | Path | None,
) -> str | None:
    """Return a path as a checkpoint keeps it.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(path='/runs/a')
    >>> kept_path(learn, '/runs/a/models/best.pth'), kept_path(learn, '/other/best.pth')
    ('models/best.pth', '/other/best.pth')
    """
    if path is None or learn is None:
        return None if path is None else str(path)
    absolute, folder = (Path(os.path.abspath(p)) for p in (path, learn.path))
    return absolute.relative_to(folder).as_posix() if absolute.is_relative_to(folder) else str(path)


def found_path(
    learn: LearnerLike,  # a Learner, whose folder may be another one by now
    kept: str | None,  # from `kept_path`
    own: str | Path | None = None,  # the folder that the callback was given
) -> Path | None:
    """Return the path again; None, with a warning, for one outside of the Learner's folder and the callback's own.

    A checkpoint may come from anywhere, and what it names may be written to.
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
