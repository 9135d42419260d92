# SPDX-License-Identifier: Apache-2.0
"""Callbacks that end a fit, and whether a resumed fit has still ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from learnkit.engine.callback import Callback

if TYPE_CHECKING:
    from learnkit.learner import Learner


class Stopper(Callback):
    """Base class of callbacks that end a fit. Subclasses set and save `has_stopped`, and define `is_over`.

    A fit that is resumed with more patience, a later time or another limit continues, because its stoppers
    are asked again.
    """

    has_stopped = False  # True if this callback has ended the fit

    def is_over(self) -> bool:
        "Return True if this callback ends the fit."
        raise NotImplementedError


def ask_stoppers(learn: Learner) -> None:
    "Let a resumed fit continue if every callback that had ended it no longer does."
    stoppers = [cb for cb in learn.cbs if isinstance(cb, Stopper) and cb.has_stopped]
    for cb in stoppers:
        cb.has_stopped = cb.is_over()
    if stoppers and not any(cb.has_stopped for cb in stoppers):
        learn.run.stopping = False
        learn.run.stopped_by = ''
