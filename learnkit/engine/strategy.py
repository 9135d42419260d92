"""Where training in several processes differs from training in one: the methods of a strategy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor

from learnkit.core.batch import count_samples, find_bs, microbatches
from learnkit.core.comm import has_joined
from learnkit.core.learner_type import LoopLike
from learnkit.core.validation import warn_user
from learnkit.engine.resume import ResumeState
from learnkit.engine.run import end_run, open_run

__all__ = ['SingleProcess']


class SingleProcess:
    """Training in one process: what the loop asks wherever several processes differ.

    `learn.strategy` is one of these. `DistributedTraining` sets another one for as long as several
    processes train together.
    """

    team: Any = None  # the `DistributedTraining` of several processes
    has_samples = True  # False on a rank without samples in the batch, which joins in

    @contextmanager
    def run(
        self,
        learn: LoopLike,
        kind: str,  # 'fit', 'evaluation', or '' for events fired by hand
    ) -> Iterator[None]:
        "Open a run."
        n_started = os.environ.get('WORLD_SIZE', '1')
        if kind == 'fit' and n_started != '1' and not has_joined():
            warn_of_others(n_started)
        with open_run(learn, kind):
            yield

    def end_run(self, learn: LoopLike, error: BaseException | None) -> None:
        "End the outermost run: `after_error` if it failed, and `cleanup`."
        end_run(learn, error)

    def stop(self, learn: LoopLike) -> None:
        "End the fit after the current batch or epoch."
        learn.run.stopping = True

    def seconds(self, learn: LoopLike) -> float:
        "Return the seconds spent in fits."
        return float(learn.counters.elapsed())

    # -- a batch ---------------------------------------------------------------------------------

    def batch_loss(self, learn: LoopLike) -> Tensor:
        "Return the loss of the batch over all processes, by which an optimizer decides."
        loss: Tensor = learn.loss
        return loss

    def gradient_share(self, learn: LoopLike) -> Any:
        "Return the factor of this process's loss in the mean over processes."
        return 1

    def split(self, learn: LoopLike, xb: Any, yb: Any, size: int) -> list[tuple[Any, Any]]:
        "Split a batch into microbatches of at most `size` samples."
        return microbatches(xb, yb, size, find_bs(xb, yb, learn.size_func))

    def count_samples(self, learn: LoopLike) -> int:
        "Return the number of samples of the batch over all processes."
        return count_samples(learn)

    def total_weight(self, learn: LoopLike) -> Any:
        "Return the weight of the batch over all processes; None for a loss that is a sum."
        weights = learn.loss_weights
        return None if weights.is_sum(learn) else weights.weigh_batch(learn, learn.xb, learn.yb)

    # -- checkpoints -----------------------------------------------------------------------------

    def find_checkpoint(
        self,
        learn: LoopLike,
        resume: Any,  # what was given to `fit(resume=...)`
        find: Callable[[Any], ResumeState | None],  # finds it in this process
    ) -> ResumeState | None:
        "Return the checkpoint that all processes resume from, None where there is none."
        return find(resume)

    def add_own_state(self, learn: LoopLike, state: dict[str, Any]) -> dict[str, Any]:
        "Return the state of a checkpoint with what is each process's own."
        return state

    def take_own_state(self, learn: LoopLike, resume: ResumeState) -> ResumeState:
        "Return a checkpoint with what is this process's own in the places of what is the first one's."
        return resume

    def after_restore(self, learn: LoopLike, resume: ResumeState) -> None:
        "Complete what was restored from a checkpoint."


@cache
def warn_of_others(
    n: str,  # number of processes that a launcher reports
) -> None:
    "Warn once of other processes, which this one does not train with."
    if n.isdigit() and int(n) > 1:
        warn_user(
            f'{n} processes were started (WORLD_SIZE), and this one trains alone, on all of the '
            'data: put `with learn.distributed():` around the fit.'
        )
