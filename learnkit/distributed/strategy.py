"""The part of the Learner that trains in several processes: where it differs from one that trains alone."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, reduce
from operator import getitem
from typing import Any, Self
from zlib import crc32

import torch
from torch import Tensor

from learnkit.checkpoint.dcp import put, take_parts
from learnkit.core.batch import count_samples, cut_batch, find_bs
from learnkit.core.comm import Comm, has_joined
from learnkit.core.dtensor import is_dtensor
from learnkit.core.errors import DistributedError
from learnkit.core.random import capture_rng
from learnkit.core.time import Time
from learnkit.core.validation import warn_user
from learnkit.distributed import DistributedTraining
from learnkit.distributed.compare import optimizer_state, what_is_trained
from learnkit.engine.loop import Loop
from learnkit.engine.microbatch import ratio
from learnkit.engine.resume import ResumeState
from learnkit.engine.strategy import SINGLE_PROCESS, SingleProcess

__all__ = ['Processes', 'SeveralProcesses']


class Processes(Loop):
    "The part of the Learner that trains in several processes."
    dls: Any
    _team: DistributedTraining | None = None   # the callback that has joined other processes, where there are any

    @property
    def strategy(self) -> SingleProcess:
        "What this Learner does otherwise in several processes."
        if self.world.size > 1 or self._team is not None:
            return SEVERAL_PROCESSES
        return SINGLE_PROCESS

    def distributed(
        self,
        strategy: str = 'auto',   # 'ddp': each process has the whole model; 'fsdp': a part of it; 'auto'
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
        return self.added_cbs(DistributedTraining(strategy, **options))

    def launch(
        self,
        fn: Callable[[Any], Any],   # called with the Learner in each process: `lambda learn: learn.fit(3)`
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

    # -- the run -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _run(self, doing: str) -> Iterator[None]:
        if doing == 'fit' and self._team is None and not has_joined(): warn_of_others(os.environ.get('WORLD_SIZE', ''))
        team = self._team if not self._depth else None
        if team is None:
            with super()._run(doing): yield
            return
        self._check_world()
        try:
            with super()._run(doing): yield
            self.world.barrier()  # no process ends a run well that another one does not
        except BaseException as e:
            error = team.fail(e)
            if error is e:
                raise
            raise error from e

    def _check_world(self) -> None:
        if self.world.is_broken: raise DistributedError(
            'The last run in these processes has failed, and nobody knows where each of them stands. Leave the '
            'context of `learn.distributed()`, or start the processes again; `fit(..., resume=True)` goes on from a '
            'checkpoint.')

    def _end_run(self, error: BaseException | None) -> None:
        "Let the other processes know of an error before anything is undone."
        if error is not None and self._team is not None:
            self._team.failures.report(error, self)
        super()._end_run(error)

    def stop(self) -> None:
        if self.world.size == 1 or not self.fitting: super().stop()
        else: self.world.post('stop', 1.)

    stop.__doc__ = Loop.stop.__doc__

    def _finished(self, unit: str) -> Any:
        "Take the time that all agree on: what is due, or used up, is so for all at the same batch."
        if unit == 'sec' and self.world.size > 1 and self.fitting: return self.world.value('clock')
        return super()._finished(unit)

    # -- shares --------------------------------------------------------------------------------------------------------

    def _share_of_gradient(self) -> Any:
        "Return what this process's loss is multiplied by, so that the mean over processes is that over all samples."
        team = self._team
        if team is None: return 1
        if self._loss_is_sum(): return self.world.size if self._own_samples() else 0
        if self._weighs_samples():
            own, total = team._now.share or (1, self.world.size)
            return 1 if own * self.world.size == total else own * self.world.size / total
        weights = team.sum_weights()
        own_weight = torch.as_tensor(weights.own, dtype=torch.float64)
        return ratio(own_weight * self.world.size, weights.total())

    def _loss_of_all(self) -> Tensor:
        if self.world.size == 1: return super()._loss_of_all()
        return self.world.sum(self.loss * self._share_of_gradient()) / self.world.size

    def _cut(self, xb: Any, yb: Any, size: int) -> list[tuple[Any, Any]]:
        "Cut a batch into as many pieces as the process with most samples does: what is asked of each is asked alike."
        pieces, team = super()._cut(xb, yb, size), self._team
        if team is None or team._now.share is None or self.microbatch in (1, 'auto'): return pieces
        n, k = -(-team._now.share[1] // (self.world.size * size)), find_bs(xb, yb, self.size_func)
        if len(pieces) == n: return pieces
        return cut_batch(xb, yb, k, [slice(k*i // n, k*(i + 1) // n) for i in range(n)])

    def _own_samples(self) -> int:
        team = self._team
        return count_samples(self) if team is None or team._now.share is None else team._now.share[0]

    def _own_weight(self) -> Any:
        "Return what this process's batch weighs; a sample that is only there to keep step, nothing."
        return self._weight_of(self.xb, self.yb) if self._own_samples() else 0.

    def _samples(self) -> int:
        team = self._team
        return super()._samples() if team is None or team._now.share is None else team._now.share[1]

    def _whole_weight(self) -> Any:
        if self.world.size == 1 or self._loss_is_sum(): return super()._whole_weight()
        team = self._team
        return self._samples() if team is None or self._weighs_samples() else team.sum_weights().total()


class SeveralProcesses(SingleProcess):
    "Train in several processes: a checkpoint has the state of each."

    def find_checkpoint(
        self,
        learn: Any,
        resume: Any,
        find: Callable[[Any], ResumeState | None],
    ) -> ResumeState | None:
        "Let the first process find it; the others read the same file."
        world = learn.world
        is_given = resume in (None, False) or isinstance(resume, (Mapping, ResumeState))
        if world.size == 1 or is_given:
            return find(resume)
        learn._check_world()
        found = world.run_on_all(lambda: find(resume) if world.is_first else None)
        path = world.broadcast(None if found is None else str(found.path))
        is_found = world.is_first or path is None
        own: ResumeState | None = world.run_on_all(lambda: found if is_found else find(path))
        return own

    def add_own_state(self, learn: Any, state: dict[str, Any]) -> dict[str, Any]:
        "Add what is each process's own: random generators, its place in the data, and states that differ."
        if (team := learn._team) is None:
            return state
        own = own_parts(state, learn.world)
        return {**state, 'processes': own, 'has_synced': team._parts.has_synced}

    def take_own_state(self, learn: Any, resume: ResumeState) -> ResumeState:
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
                state = put(state, place, reduce(getitem, place, states[key]))
            states[key] = state
        resume.state = {**resume.state, **own, 'callbacks': states}
        return resume

    def after_restore(self, learn: Any, resume: ResumeState) -> None:
        "Let the clock of all processes go on from the checkpoint's."
        if learn._team is not None:
            learn._team._parts.has_synced = resume.state.get('has_synced', False)
        learn.world.set('clock', learn._seconds)


SEVERAL_PROCESSES = SeveralProcesses()


@cache
def warn_of_others(
    n: str,   # how many processes a launcher says it has started
) -> None:
    "Say once that there are others, with which this process has nothing in common."
    if n.isdigit() and int(n) > 1: warn_user(f'{n} processes were started (WORLD_SIZE), and this one trains alone, on '
                                             'all of the data: put `with learn.distributed():` around the fit.')


def own_parts(
    state: Mapping[str, Any],   # from `collect_state`, in each process
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


