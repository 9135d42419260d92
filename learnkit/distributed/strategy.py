"""The part of the Learner that trains in several processes: where it differs from one that trains alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from typing import Any

import torch
from torch import Tensor

from learnkit.checkpoint.dcp import replace_at, take_parts
from learnkit.core.batch import count_samples, cut_batch, find_bs
from learnkit.core.comm import Comm
from learnkit.core.dtensor import is_dtensor
from learnkit.core.errors import DistributedError
from learnkit.core.learner_type import LoopLike
from learnkit.core.random import capture_rng
from learnkit.distributed.compare import checksum
from learnkit.engine.microbatch import ratio
from learnkit.engine.resume import ResumeState
from learnkit.engine.run import open_run
from learnkit.engine.strategy import SingleProcess

__all__ = ['SeveralProcesses']


class SeveralProcesses(SingleProcess):
    "Training in several processes that were joined by a `DistributedTraining`, the `team`."

    def __init__(
        self,
        team: Any,  # the `DistributedTraining`
    ) -> None:
        self.team = team

    @contextmanager
    def run(self, learn: LoopLike, kind: str) -> Iterator[None]:
        "Open a run; an error in one process ends it in all of them."
        if learn.run.depth:
            with open_run(learn, kind):
                yield
            return
        check_world(learn.world)
        try:
            with open_run(learn, kind):
                yield
            learn.world.barrier()  # no process ends a run well that another one does not
        except BaseException as e:
            error = self.team.fail(e)
            if error is e:
                raise
            raise error from e

    def end_run(self, learn: LoopLike, error: BaseException | None) -> None:
        "Report an error to the other processes before anything is undone."
        if error is not None:
            self.team.failures.report(error, learn)
        super().end_run(learn, error)

    def stop(self, learn: LoopLike) -> None:
        "Post the wish to stop; the processes end the fit once they have agreed on it."
        if learn.fitting:
            learn.world.post('stop', 1.0)
        else:
            super().stop(learn)

    def seconds(self, learn: LoopLike) -> float:
        "Return the time that all processes agree on, so that what is due is due in all of them."
        return learn.world.value('clock') if learn.fitting else super().seconds(learn)

    # -- a batch ---------------------------------------------------------------------------------

    def batch_loss(self, learn: LoopLike) -> Tensor:
        "Return the mean loss over the samples of all processes."
        return learn.world.sum(learn.loss * self.gradient_share(learn)) / learn.world.size

    def gradient_share(self, learn: LoopLike) -> Any:
        "Return the factor of this process's loss with which the processes' mean is the mean over all samples."
        size, share = learn.world.size, self.team.batch.share
        if learn.loss_weights.is_sum(learn):
            return size if self.own_samples(learn) else 0
        if learn.loss_weights.are_samples(learn):
            own, total = share or (1, size)
            return 1 if own * size == total else own * size / total
        weights = self.team.sum_weights()
        own_weight = torch.as_tensor(weights.own, dtype=torch.float64)
        return ratio(own_weight * size, weights.total())

    def split(self, learn: LoopLike, xb: Any, yb: Any, size: int) -> list[tuple[Any, Any]]:
        "Split a batch into as many microbatches as the process with most samples does."
        parts, share = super().split(learn, xb, yb, size), self.team.batch.share
        if share is None or learn.microbatch in (1, 'auto'):
            return parts
        n = -(-share[1] // (learn.world.size * size))
        if len(parts) == n:
            return parts
        bs = find_bs(xb, yb, learn.size_func)
        return cut_batch(xb, yb, bs, [slice(bs * i // n, bs * (i + 1) // n) for i in range(n)])

    def own_samples(self, learn: LoopLike) -> int:
        "Return the number of samples of this process's batch."
        share = self.team.batch.share
        return count_samples(learn) if share is None else share[0]

    def own_weight(self, learn: LoopLike) -> Any:
        "Return the weight of this process's batch; 0 for a sample that only keeps it in step."
        return learn.loss_weights.of(learn, learn.xb, learn.yb) if self.own_samples(learn) else 0.0

    def count_samples(self, learn: LoopLike) -> int:
        "Return the number of samples of the batch over all processes."
        share = self.team.batch.share
        return super().count_samples(learn) if share is None else share[1]

    def total_weight(self, learn: LoopLike) -> Any:
        "Return the weight of the batch over all processes; None for a loss that is a sum."
        if learn.loss_weights.is_sum(learn):
            return None
        if learn.loss_weights.are_samples(learn):
            return self.count_samples(learn)
        return self.team.sum_weights().total()

    # -- checkpoints -----------------------------------------------------------------------------

    def find_checkpoint(
        self,
        learn: LoopLike,
        resume: Any,
        find: Callable[[Any], ResumeState | None],
    ) -> ResumeState | None:
        "Let the first process find it; the others read the same file."
        world = learn.world
        is_given = resume in (None, False) or isinstance(resume, (Mapping, ResumeState))
        if world.size == 1 or is_given:
            return find(resume)
        check_world(world)
        found = world.run_on_all(lambda: find(resume) if world.is_first else None)
        path = world.broadcast(None if found is None else str(found.path))
        is_found = world.is_first or path is None
        own: ResumeState | None = world.run_on_all(lambda: found if is_found else find(path))
        return own

    def add_own_state(self, learn: LoopLike, state: dict[str, Any]) -> dict[str, Any]:
        "Add what is each process's own: random generators, its place in the data, and states that differ."
        own = own_parts(state, learn.world)
        return {**state, 'processes': own, 'has_synced': self.team.parts.has_synced}

    def take_own_state(self, learn: LoopLike, resume: ResumeState) -> ResumeState:
        "Put this process's own parts in the places of the first one's, where it was there when they were saved."
        parts, world = resume.state.get('processes', [{}]), learn.world
        if len(parts) != world.size:
            if not world.is_first:
                # random numbers of its own
                resume.state = {**resume.state, 'rng': capture_rng()}
            return resume
        if world.is_first:
            return resume
        own, states = dict(parts[world.rank]), dict(resume.state['callbacks'])
        shared = own.pop('shared', {})
        for key, state in own.pop('callbacks').items():
            state, *_ = take_parts(state)  # in lists and dicts of its own
            for place in shared.get(key, ()):
                state = replace_at(state, place, reduce(getitem, place, states[key]))
            states[key] = state
        resume.state = {**resume.state, **own, 'callbacks': states}
        return resume

    def after_restore(self, learn: LoopLike, resume: ResumeState) -> None:
        "Let the clock of all processes go on from the checkpoint's."
        self.team.parts.has_synced = resume.state.get('has_synced', False)
        learn.world.set('clock', learn.counters.seconds)


def check_world(world: Comm) -> None:
    "Raise `DistributedError` if the last run in these processes has failed."
    if world.is_broken:
        raise DistributedError(
            'The last run in these processes has failed, and nobody knows where each of them '
            'stands. Leave the context of `learn.distributed()`, or start the processes again; '
            '`fit(..., resume=True)` goes on from a checkpoint.'
        )


def own_parts(
    state: Mapping[str, Any],  # from `_gather`, in each process
    world: Comm,
) -> list[dict[str, Any]]:
    """Return, for each process, what of its state is not as in the first; in the others, of themselves alone.

    Tensors that are cut over processes belong to all: their places are None there, and listed as 'shared'."""
    sums = {key: fingerprint(value) for key, value in state['callbacks'].items()}
    grads = fingerprint(state['grads'])
    first_sums, first_grads = world.broadcast((sums, grads))
    differ = {
        k: take_parts(v) for k, v in state['callbacks'].items() if sums[k] != first_sums.get(k)
    }
    own = {
        'rng': state['rng'],
        'position': state['position'],
        'callbacks': {k: v for k, (v, *_) in differ.items()},
        'shared': {k: places for k, (_, places, _) in differ.items() if places},
    }
    if grads != first_grads:
        own['grads'] = state['grads']
    parts = world.collect({} if world.is_first else own)
    return parts or [own if rank == world.rank else {} for rank in range(world.size)]


def fingerprint(value: Any) -> Any:
    "Return a nested state with its tensors as checksums; those that are cut over processes belong to all."
    if is_dtensor(value):
        return tuple(value.shape)
    if isinstance(value, Tensor):
        return checksum(value), tuple(value.shape)
    if isinstance(value, Mapping):
        return {k: fingerprint(v) for k, v in value.items()}
    return [fingerprint(v) for v in value] if isinstance(value, (list, tuple)) else value
