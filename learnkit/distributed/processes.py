# SPDX-License-Identifier: Apache-2.0
"""Methods of the training loop that differ in distributed training, and rank-specific checkpoint state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from learnkit.checkpoint.digest import digest
from learnkit.comm.dtensor import is_dtensor
from learnkit.comm.ranks import Comm
from learnkit.core.batch import tensors_in
from learnkit.core.device import find_used_accelerator
from learnkit.core.errors import DistributedError
from learnkit.core.random import capture_rng, restore_rng
from learnkit.data.loader_state import drop_seeds
from learnkit.distributed.ddp import Parallelism
from learnkit.distributed.failures import Failures
from learnkit.distributed.global_batch import GlobalBatch
from learnkit.engine.processes import OneProcess
from learnkit.engine.resumed_run import ResumeState
from learnkit.engine.run import name_stopper, open_run

if TYPE_CHECKING:
    from learnkit.learner import Learner

OWN_STATES = ('callbacks', 'grads', 'generators')  # parts of a checkpoint that may differ by rank


class ManyProcesses(OneProcess):
    """Operations of a Learner that trains on several ranks.

    `DistributedTraining` creates the object when the ranks join."""

    batch: GlobalBatch

    def __init__(
        self,
        learn: Learner,  # Learner whose `world` is the process group
        parallelism: Parallelism,  # released after a failure
        shards_loaders: bool,  # False if the user's loaders iterate over this rank's shard
        batch_size: str,  # meaning of the loaders' batch size: 'process' or 'global'
    ) -> None:
        self.learn = learn
        self.parallelism = parallelism
        self.shards_loaders = shards_loaders
        self.batch_size = batch_size
        self.batch = GlobalBatch(is_even=shards_loaders)
        self.failures = Failures(learn.world)  # failures of all ranks

    @contextmanager
    @override
    def run(self, learn: Learner, kind: str) -> Iterator[None]:
        "Open a run, which ends on all ranks if one rank raises an error."
        if learn.run.depth:
            with open_run(learn, kind):
                yield
            return
        check_world(learn.world)
        with self.failing_together():
            with open_run(learn, kind):
                yield
            learn.world.barrier()  # no rank may succeed in a run that fails on another rank

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Report an error to the other ranks, and close the connections on which they wait for this rank.

        Raises the error, or a `DistributedError` with the rank that has failed first."""
        try:
            yield
        except BaseException as e:
            error = self._report(e)
            if not isinstance(e, SystemExit):
                self.parallelism.release(self.learn)
                self.learn.world.leave()
                self.failures.linger()
            if error is e:
                raise
            raise error from e

    def _report(self, e: BaseException) -> BaseException:
        "Report an error that has ended a run of this rank, and return the error to raise."
        self.batch.clear()  # a sum that is awaited would keep the connections open
        return self.failures.report(e, self.learn)

    @override
    def end_run(self, learn: Learner, error: BaseException | None) -> None:
        "Report an error to the other ranks, and then end the outermost run."
        if error is not None:
            self._report(error)
        super().end_run(learn, error)

    @override
    def stop(self, learn: Learner) -> None:
        "Request the end of the fit; the fit ends when all ranks have received the request."
        if learn.fitting:
            learn.run.stopped_by = learn.run.stopped_by or name_stopper(learn)
            learn.world.post('stop', 1.0)
        else:
            super().stop(learn)

    @override
    def pause(self, learn: Learner) -> None:
        "Request a pause; the fit pauses when all ranks have received the request."
        learn.world.post('pause', 1.0)

    @override
    def seconds(self, learn: Learner) -> float:
        "Return the seconds spent in fits; within a fit, the value that all ranks share."
        return learn.world.value('clock') if learn.fitting else super().seconds(learn)

    # -- checkpoints -----------------------------------------------------------------------------

    @override
    def find_checkpoint(
        self,
        learn: Learner,
        resume: Any,
        find: Callable[[Any], ResumeState | None],
    ) -> ResumeState | None:
        "Find the checkpoint on the first rank, and read the same file on the other ranks."
        world = learn.world
        is_given = resume in (None, False) or isinstance(resume, (Mapping, ResumeState))
        if is_given:
            return find(resume)
        check_world(world)
        found = world.run_on_all(lambda: find(resume) if world.is_first else None)
        path = world.broadcast(None if found is None else str(found.path))
        is_found = world.is_first or path is None
        own: ResumeState | None = world.run_on_all(lambda: found if is_found else find(path))
        return own

    @override
    def add_own_state(self, learn: Learner, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a checkpoint with each rank's own state added.

        A rank's own state is its random generators, its position in the data, and the states of callbacks, the
        gradients and the generators of modules that differ from the first rank's."""
        return {**state, 'processes': gather_rank_states(state, learn.world)}

    @override
    def take_own_state(self, learn: Learner, resume: ResumeState) -> ResumeState:
        """Return a checkpoint in which this rank's own state replaces the first rank's.

        From a checkpoint of another number of ranks, all ranks restore the first rank's state, except for its random
        generators, and the mean of the gradients that the ranks had accumulated."""
        world = learn.world
        rank_states = resume.state.get('processes', [{}])
        if len(rank_states) != world.data_size:
            resume = super().take_own_state(learn, resume)
            if world.data_rank:
                # ranks must not draw the same random numbers
                resume.state = {
                    **resume.state,
                    'rng': capture_rng(),
                    'position': _drop_seeds(resume.state.get('position')),
                }
            return resume
        if world.is_first:
            return resume
        own = rank_states[world.data_rank]
        merged = {name: {**resume.state.get(name, {}), **own.get(name, {})} for name in OWN_STATES}
        resume.state = {**resume.state, **own, **merged}
        return resume

    @override
    def after_restore(self, learn: Learner, resume: ResumeState) -> None:
        "Set the clock that all ranks share to the time of the checkpoint."
        share_generators(learn.world)
        learn.world.reset(clock=learn.parts.counters.seconds)


def _drop_seeds(position: Mapping[str, Any] | None) -> dict[str, Any] | None:
    "Return a position in the data without the seeds of the loader."
    if position is None:
        return None
    states = {name: position[name] and drop_seeds(position[name]) for name in ('start', 'now')}
    return {**position, **states}


def share_generators(world: Comm) -> None:
    "Give ranks that train on the same samples the generators of the first of them."
    if world.copies == 1:
        return
    accelerator = find_used_accelerator()
    module: Any = None if accelerator is None else torch.get_device_module(accelerator)
    on_device = None if module is None else module.get_rng_state()
    states = world.gather((capture_rng(devices=False), on_device))
    rng, on_device = states[world.data_rank * world.copies]
    restore_rng(rng)
    if module is not None:
        module.set_rng_state(on_device)


def check_world(world: Comm) -> None:
    "Raise `DistributedError` if the last run on these ranks has failed."
    if world.is_broken:
        raise DistributedError(
            'The last run in these processes has failed, and their states may differ. Leave the '
            'context of `learn.distributed()`, or start the processes again; '
            '`fit(..., resume=True)` continues from a checkpoint.'
        )


def gather_rank_states(
    state: Mapping[str, Any],  # state of a checkpoint on this rank
    world: Comm,  # process group
) -> list[dict[str, Any]]:
    """Gather on the first rank the states that differ from the first rank's, one for each shard of the data.

    The other ranks return a list with their own entry only. States with sharded tensors belong to all ranks."""
    own_states = {
        name: {key: value for key, value in state[name].items() if not has_shards(value)}
        for name in OWN_STATES
    }
    digests = {
        name: {key: digest(value, ()) for key, value in states.items()}
        for name, states in own_states.items()
    }
    first = world.broadcast(digests)
    own = {name: state[name] for name in ('rng', 'position')}
    for name, states in own_states.items():
        own[name] = {
            key: value
            for key, value in states.items()
            if digests[name][key] != first[name].get(key)
        }
    gathered = world.gather({} if world.is_first else own)
    if world.is_first:
        return gathered[:: world.copies]
    return [own if rank == world.data_rank else {} for rank in range(world.data_size)]


def has_shards(state: Any) -> bool:
    "Return True if a nested state has a sharded tensor."
    return any(map(is_dtensor, tensors_in(state)))
