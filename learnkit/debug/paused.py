# SPDX-License-Identifier: Apache-2.0
"""A paused fit: where it is, its next batch and its last one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from learnkit.checkpoint.pause import Pause
    from learnkit.core.time import Timestamp
    from learnkit.learner import Learner


class Paused:
    "A fit that is paused; `learn.paused` returns it."

    def __init__(self, learn: Learner, pause: Pause) -> None:
        self.learn = learn
        self._pause = pause

    def __repr__(self) -> str:
        return f'Paused({self._pause.describe()})'

    @property
    def time(self) -> Timestamp:
        "Time of the pause, over all fits."
        return self._pause.time

    @property
    def cbs(self) -> list[Any]:
        "Callbacks that were given to the fit. Change the list to add or remove some."
        return self._pause.call.cbs

    @property
    def batch(self) -> Any:
        "The next batch as its loader gives it; None at the end of an epoch, or if the pass has to start again."
        return self._pause.peek()

    @property
    def last_batch(self) -> Any:
        "The batch that was trained last, as its loader gave it; None if it is unknown."
        return self._pause.last_batch
