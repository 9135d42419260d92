"""Strategies: what differs where a Learner trains in several processes, and the strategy of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from learnkit.engine.resume import ResumeState

__all__ = ['SINGLE_PROCESS', 'SingleProcess']


class SingleProcess:
    """Train in one process.

    A strategy has every place at which several processes differ, so that no other module asks for their number.
    """

    def find_checkpoint(
        self,
        learn: Any,
        resume: Any,  # what was given to `fit(resume=...)`
        find: Callable[[Any], ResumeState | None],  # finds it in this process
    ) -> ResumeState | None:
        "Return the checkpoint that all processes resume from, None where there is none."
        return find(resume)

    def add_own_state(self, learn: Any, state: dict[str, Any]) -> dict[str, Any]:
        "Return the state of a checkpoint with what is each process's own."
        return state

    def take_own_state(self, learn: Any, resume: ResumeState) -> ResumeState:
        "Return a checkpoint with what is this process's own in the places of what is the first one's."
        return resume

    def after_restore(self, learn: Any, resume: ResumeState) -> None:
        "Complete what was restored from a checkpoint."


SINGLE_PROCESS = SingleProcess()
