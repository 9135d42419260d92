"""Base class of the ways to distribute weights and gradients over ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from learnkit.core.learner_type import LearnerLike

__all__ = ['Parallelism']


class Parallelism:
    """How weights and gradients are distributed over ranks: `Replicas` (DDP) or `Sharded` (FSDP2).

    `DistributedTraining` owns one and calls its methods in the order in which they are defined. A
    new kind is a subclass whose constructor takes its options. `STRATEGIES` in `distributed/callback.py`
    has its name, and `DistributedTraining._make_parallelism` creates it.
    """

    # True if all ranks must evaluate the same number of batches
    needs_equal_evaluations: bool = False
    # True if `average_gradients` averages what no backward pass has averaged
    averages_late: bool = True
    has_synced: bool = False  # True once gradients were averaged in a pass with this model

    def enter(self, learn: LearnerLike) -> None:
        "Change the Learner's model when the callback is added."

    def prepare(self, learn: LearnerLike) -> None:
        "Prepare the model for a fit, after it was moved to its device."

    def catch_up(self, learn: LearnerLike) -> None:
        "Restore the order in which a resumed run averages gradients."

    def begin_pass(
        self,
        learn: LearnerLike,
        averages: bool,  # whether the gradients of this pass are averaged
    ) -> AbstractContextManager[Any] | None:
        "Begin a forward pass in training, and return a context for it."
        return None

    def average_gradients(self, learn: LearnerLike) -> None:
        "Average gradients that each rank has accumulated alone."

    def share_buffers(self, learn: LearnerLike) -> None:
        "Broadcast the first rank's buffers, such as running means, so that all ranks evaluate the same model."

    def release(self, learn: LearnerLike) -> None:
        "Release resources of the process group at the end of a fit or after a failure."

    def leave(self, learn: LearnerLike) -> None:
        "Restore the Learner's model when the callback is removed."
