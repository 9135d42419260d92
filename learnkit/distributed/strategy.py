"""The part of the Learner that trains in several processes: where it differs from one that trains alone."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from operator import getitem
from typing import Any, Self
from zlib import crc32

import torch
from torch import Tensor

from learnkit.checkpoint.dcp import put, take_parts
from learnkit.checkpoint.resume_check import ResumeChecks
from learnkit.core.batch import count_samples, cut_batch, find_bs
from learnkit.core.comm import Comm
from learnkit.core.dtensor import is_dtensor
from learnkit.core.errors import DistributedError
from learnkit.core.random import capture_rng
from learnkit.core.time import Time
from learnkit.core.validation import warn_user
from learnkit.distributed.compare import optimizer_state, what_is_trained
from learnkit.engine.microbatch import ratio
from learnkit.engine.resume import ResumeState
from learnkit.engine.run import open_run
from learnkit.engine.strategy import SingleProcess

__all__ = ['Processes', 'SeveralProcesses']


class SeveralProcesses(SingleProcess):
    "Training in several processes that were joined by a `DistributedTraining`, the `team`."

    def __init__(
        self,
        team: Any,  # the `DistributedTraining`
    ) -> None:
        self.team = team

    @contextmanager
    def run(self, learn: Any, kind: str) -> Iterator[None]:
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

    def end_run(self, learn: Any, error: BaseException | None) -> None:
        "Report an error to the other processes before anything is undone."
        if error is not None:
            self.team.failures.report(error, learn)
        super().end_run(learn, error)

    def stop(self, learn: Any) -> None:
        "Post the wish to stop; the processes end the fit once they have agreed on it."
        if learn.fitting:
            learn.world.post('stop', 1.0)
        else:
            super().stop(learn)

    def seconds(self, learn: Any) -> float:
        "Return the time that all processes agree on, so that what is due is due in all of them."
        return learn.world.value('clock') if learn.fitting else super().seconds(learn)

    # -- a batch ---------------------------------------------------------------------------------

    def batch_loss(self, learn: Any) -> Tensor:
        "Return the mean loss over the samples of all processes."
        return learn.world.sum(learn.loss * self.gradient_share(learn)) / learn.world.size

    def gradient_share(self, learn: Any) -> Any:
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

    def split(self, learn: Any, xb: Any, yb: Any, size: int) -> list[tuple[Any, Any]]:
        "Split a batch into as many microbatches as the process with most samples does."
        parts, share = super().split(learn, xb, yb, size), self.team.batch.share
        if share is None or learn.microbatch in (1, 'auto'):
            return parts
        n = -(-share[1] // (learn.world.size * size))
        if len(parts) == n:
            return parts
        bs = find_bs(xb, yb, learn.size_func)
        return cut_batch(xb, yb, bs, [slice(bs * i // n, bs * (i + 1) // n) for i in range(n)])

    def own_samples(self, learn: Any) -> int:
        "Return the number of samples of this process's batch."
        share = self.team.batch.share
        return count_samples(learn) if share is None else share[0]

    def own_weight(self, learn: Any) -> Any:
        "Return the weight of this process's batch; 0 for a sample that only keeps it in step."
        return learn.loss_weights.of(learn, learn.xb, learn.yb) if self.own_samples(learn) else 0.0

    def count_samples(self, learn: Any) -> int:
        "Return the number of samples of the batch over all processes."
        share = self.team.batch.share
        return super().count_samples(learn) if share is None else share[1]

    def total_weight(self, learn: Any) -> Any:
        "Return the weight of the batch over all processes; None for a loss that is a sum."
        if learn.loss_weights.is_sum(learn):
            return None
        if learn.loss_weights.are_samples(learn):
            return self.count_samples(learn)
        return self.team.sum_weights().total()


def check_world(world: Comm) -> None:
    "Raise `DistributedError` if the last run in these processes has failed."
    if world.is_broken:
        raise DistributedError(
            'The last run in these processes has failed, and nobody knows where each of them '
            'stands. Leave the context of `learn.distributed()`, or start the processes again; '
            '`fit(..., resume=True)` goes on from a checkpoint.'
        )


class Processes(ResumeChecks):
    "The part of the Learner that trains in several processes."
    dls: Any

    def _find_checkpoint(self, resume: Any) -> ResumeState | None:
        "Let the first process find it; the others read the same file."
        world = self.world
        if world.size == 1 or resume in (None, False) or isinstance(resume, (Mapping, ResumeState)):
            return super()._find_checkpoint(resume)
        check_world(self.world)
        find = super()._find_checkpoint
        found = world.run_on_all(lambda: find(resume) if world.is_first else None)
        path = world.broadcast(None if found is None else str(found.path))
        return world.run_on_all(lambda: found if world.is_first or path is None else find(path))

    def distributed(
        self,
        strategy: str = 'auto',   # 'ddp': each rank has the whole model; 'fsdp': a part; 'auto'
        **options: Any,           # more of `DistributedTraining`
    ) -> AbstractContextManager[Self]:
        """Return a context in which this Learner trains in all the processes that were started together.

        Start the script by `torchrun --nproc-per-node=2 script.py`; on its own, it trains in one process. See
        `DistributedTraining` for the options and for what is raised.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> with learn.no_bar(), learn.distributed('ddp'): learn.fit(1)
        >>> len(learn.history), learn.world.size
        (1, 1)
        """
        from learnkit.distributed.callback import DistributedTraining

        return self.added_cbs(DistributedTraining(strategy, **options))

    def launch(
        self,
        fn: Callable[[Any], Any],   # f(learn) in each process: `lambda learn: learn.fit(3)`
        nproc: int = 2,             # processes
        *,
        timeout: str | int | Time = '10m',  # after which a process that waits for another gives up
        **options: Any,             # more of `DistributedTraining`
    ) -> Any:
        """Train in several processes that are started here, as from a notebook, and bring back what they have trained.

        Each calls `fn` with a copy of this Learner, in the context of `distributed(**options)`. Weights, optimizer,
        history, counters and callbacks' states of the first are then this Learner's, and what `fn` has returned there
        is returned. Rows and bars of the first are shown here; interrupting the kernel ends them all. Functions and
        classes of a notebook go along by value (`pip install "learnkit[launch]"`).

        Raises `OptionError` or `MissingExtraError` before anything is started, for what cannot be sent with its name,
        and `DistributedError` with the traceback of the process that has failed first; this Learner is then unchanged.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner().launch(lambda learn: learn.fit(1), nproc=0)
        Traceback (most recent call last):
        learnkit.core.errors.OptionError: nproc=0: give a whole number of processes, 1 or more.
        """
        from learnkit.distributed.launch import launch
        return launch(self, fn, nproc, timeout=timeout, **options)

    def check_replicas(self) -> None:
        """Compare weights, buffers and the optimizer's state of all processes.

        Every process calls it. Raises `DistributedError`, in each, with the names of the tensors that differ.

        >>> from learnkit.testing import synth_learner
        >>> synth_learner().check_replicas()
        """
        sums = {name: checksum(t) for name, t in self._replicated()}
        everyone = self.world.gather(sums)
        differ = [f'{name} (process {rank})' for rank, theirs in enumerate(everyone)
                  for name in sorted({*theirs, *everyone[0]}) if theirs.get(name) != everyone[0].get(name)]
        if differ: raise DistributedError(f'{len(differ)} tensors are not as in process 0: {", ".join(differ[:10])}'
                                          f'{", ..." if len(differ) > 10 else ""}. Something changes them in one '
                                          'process alone, or gradients were not averaged: those of parameters that '
                                          'were unfrozen within an epoch, or of a second backward pass of a batch.')

    def _replicated(self) -> Iterator[tuple[str, Tensor]]:
        "Yield what must be the same in every process, with its name."
        for name, t in (what_is_trained(self) | optimizer_state(self)).items():
            if not is_dtensor(t): yield name, t

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _gather(self, place: str) -> dict[str, Any]:
        "Add what is each process's own: random generators, its place in the data, and states that differ."
        state = super()._gather(place)
        if (team := self.strategy.team) is None: return state
        return {**state, 'processes': own_parts(state, self.world), 'has_synced': team.parts.has_synced}

    def _put(self, r: ResumeState) -> None:
        super()._put(r)
        if self.strategy.team is not None: self.strategy.team.parts.has_synced = r.state.get('has_synced', False)
        self.world.set('clock', self.counters.seconds)  # the clock goes on from the checkpoint's

    def _begin_resume(self, r: ResumeState | None) -> None:
        super()._begin_resume(None if r is None else self._of_this_process(r))
        if r is None or r.at == 'epoch' or (n := len(r.state.get('processes', [{}]))) == self.world.size: return
        warn_user(f'The checkpoint is of {n} process{"es" * (n > 1)}, this run has {self.world.size}: what was '
                  'measured of this epoch so far is that of the first process.')

    def load_checkpoint_state(self, state: Mapping[str, Any]) -> None:
        super().load_checkpoint_state(self._of_this_process(ResumeState(state)).state)

    load_checkpoint_state.__doc__ = ResumeChecks.load_checkpoint_state.__doc__

    def _of_this_process(self, r: ResumeState) -> ResumeState:
        "Put this process's own parts in the places of the first one's, where it was there when they were saved."
        parts, world = r.state.get('processes', [{}]), self.world
        if len(parts) != world.size:
            if not world.is_first: r.state = {**r.state, 'rng': capture_rng()}  # random numbers of its own
            return r
        if world.is_first: return r
        own, states = dict(parts[self.world.rank]), dict(r.state['callbacks'])
        shared = own.pop('shared', {})
        for key, state in own.pop('callbacks').items():
            state, *_ = take_parts(state)  # in lists and dicts of its own
            for place in shared.get(key, ()): state = put(state, place, reduce(getitem, place, states[key]))
            states[key] = state
        r.state = {**r.state, **own, 'callbacks': states}
        return r


def own_parts(
    state: Mapping[str, Any],   # from `_gather`, in each process
    world: Comm,
) -> list[dict[str, Any]]:
    """Return, for each process, what of its state is not as in the first; in the others, of themselves alone.

    Tensors that are cut over processes belong to all: their places are None there, and listed as 'shared'."""
    sums = {key: fingerprint(value) for key, value in state['callbacks'].items()}
    grads = fingerprint(state['grads'])
    first_sums, first_grads = world.broadcast((sums, grads))
    differ = {k: take_parts(v) for k, v in state['callbacks'].items() if sums[k] != first_sums.get(k)}
    own = {'rng': state['rng'], 'position': state['position'], 'callbacks': {k: v for k, (v, *_) in differ.items()},
           'shared': {k: places for k, (_, places, _) in differ.items() if places}}
    if grads != first_grads: own['grads'] = state['grads']
    parts = world.collect({} if world.is_first else own)
    return parts or [own if rank == world.rank else {} for rank in range(world.size)]


def checksum(t: Tensor) -> int:
    "Return a number that differs for tensors of different bytes, as good as always."
    t = t.detach()
    if t.layout is not torch.strided: t = t.to_dense()
    return crc32(t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def fingerprint(value: Any) -> Any:
    "Return a nested state with its tensors as checksums; those that are cut over processes belong to all."
    if is_dtensor(value): return tuple(value.shape)
    if isinstance(value, Tensor): return checksum(value), tuple(value.shape)
    if isinstance(value, Mapping): return {k: fingerprint(v) for k, v in value.items()}
    return [fingerprint(v) for v in value] if isinstance(value, (list, tuple)) else value


