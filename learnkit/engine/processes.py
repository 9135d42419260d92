# SPDX-License-Identifier: Apache-2.0
"""Operations of training in one process, which training in several processes replaces."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from learnkit.comm.ranks import has_joined
from learnkit.core.batch import count_samples, describe, list_sizes, microbatches
from learnkit.core.errors import BatchError
from learnkit.core.validation import warn_user
from learnkit.engine.resumed_run import ResumeState
from learnkit.engine.run import end_run, name_stopper, open_run

if TYPE_CHECKING:
    from learnkit.learner import Learner


class LocalBatch:
    "The batch of one process; several processes have a `GlobalBatch` instead."

    def count_samples(self, learn: Learner) -> int:
        "Return the number of samples of the batch over all ranks."
        return count_samples(learn)

    def has_local_samples(self, learn: Learner) -> bool:
        "Return True if the batch has samples of this rank."
        return True

    def total_weight(self, learn: Learner) -> Any:
        "Return the weight of the batch over all ranks; None for a loss that is a sum."
        weights = learn.parts.loss_weights
        return None if weights.is_sum(learn) else weights.weigh_batch(learn, learn.xb, learn.yb)

    def mean_loss(self, learn: Learner) -> Tensor:
        "Return the loss of the batch over all ranks, for optimizers that compare losses."
        loss: Tensor = learn.loss.detach()
        return loss

    def split(self, learn: Learner, xb: Any, yb: Any, size: int) -> list[tuple[Any, Any]]:
        "Split a batch into microbatches of at most `size` samples."
        sizes = list_sizes(learn)
        n = sizes[0]
        if n > size and learn.batch_form is not None and learn.batch_form.size_func is not None:
            raise BatchError(
                f'The batch {describe((*xb, *yb))} has {n} samples, which are not along the first axis of the first '
                'tensor: it cannot be split into microbatches. Let the loader yield batches (B, T, ...), or accumulate '
                'smaller ones with `GradientAccumulation`.'
            )
        if max(sizes) > size and min(sizes) < max(sizes):
            raise BatchError(
                f'The loaders returned batches of {" and ".join(map(str, sizes))} samples, which cannot be split into '
                'microbatches together. Use one batch size and drop_last=True, or accumulate smaller batches '
                'with `GradientAccumulation`.'
            )
        return microbatches(xb, yb, size, n)


class OneProcess:
    """Operations that depend on the number of processes, for training in one process.

    The loop calls the methods of `learn.parts.processes`. `DistributedTraining` replaces the object
    while several processes train together.
    """

    batch = LocalBatch()
    shards_loaders = False  # True if each rank's loaders are made from loaders that all ranks have

    def run(
        self,
        learn: Learner,
        kind: str,  # 'fit', 'evaluation', 'prediction', or '' for events fired by hand
    ) -> AbstractContextManager[None]:
        "Return the context of a run."
        n_started = os.environ.get('WORLD_SIZE', '1')
        if kind == 'fit' and n_started != '1' and not has_joined():
            warn_of_other_processes(n_started)
        return open_run(learn, kind)

    def end_run(self, learn: Learner, error: BaseException | None) -> None:
        "End the outermost run: `after_error` if it failed, and `cleanup`."
        end_run(learn, error)

    def stop(self, learn: Learner) -> None:
        "End the fit after the current batch or epoch."
        learn.run.stop(name_stopper(learn))

    def pause(self, learn: Learner) -> None:
        "Pause the fit after the current batch or epoch."
        learn.run.request.make()

    def seconds(self, learn: Learner) -> float:
        "Return the seconds spent in fits."
        return float(learn.parts.counters.elapsed())

    # -- checkpoints -----------------------------------------------------------------------------

    def find_checkpoint(
        self,
        learn: Learner,
        resume: Any,  # argument of `fit(resume=...)`
        find: Callable[[Any], ResumeState | None],  # finds it on this rank
    ) -> ResumeState | None:
        "Return the checkpoint that all ranks resume from, or None."
        return find(resume)

    def add_own_state(self, learn: Learner, state: dict[str, Any]) -> dict[str, Any]:
        "Return the state of a checkpoint with each rank's own state added."
        return state

    def take_own_state(self, learn: Learner, resume: ResumeState) -> ResumeState:
        "Return a checkpoint of any number of ranks for this process, with the mean of accumulated gradients."
        others = [own.get('grads', {}) for own in resume.state.get('processes', [])[1:]]
        if any(others):
            grads = average_gradients(resume.state['grads'], others)
            resume.state = {**resume.state, 'grads': grads}
        return resume

    def after_restore(self, learn: Learner, resume: ResumeState) -> None:
        "Restore state that depends on the processes, after the rest of a checkpoint was restored."


def average_gradients(
    first: Mapping[str, Tensor],  # gradients of the first rank, by parameter
    others: Sequence[Mapping[str, Tensor]],  # gradients of the other ranks that differ from them
) -> dict[str, Tensor]:
    """Return the mean over ranks of accumulated gradients. A rank without gradients counts as zero.

    >>> average_gradients({'0': torch.tensor(1.0)}, [{}, {'0': torch.tensor(4.0), '1': torch.tensor(3.0)}])
    {'0': tensor(2.), '1': tensor(1.)}
    """
    means = {}
    for name in {**first, **{name: grad for grads in others for name, grad in grads.items()}}:
        grads = [first.get(name), *(grads.get(name, first.get(name)) for grads in others)]
        known = [grad for grad in grads if grad is not None]
        means[name] = torch.stack(known).sum(0) / len(grads)
    return means


@cache
def warn_of_other_processes(
    n: str,  # number of processes, as reported by the launcher
) -> None:
    "Warn once that this process trains alone, although a launcher started several."
    if n.isdigit() and int(n) > 1:
        warn_user(
            f'{n} processes were started (WORLD_SIZE), and this one trains alone, on all of the '
            'data: put `with learn.distributed():` around the fit.'
        )
