# SPDX-License-Identifier: Apache-2.0
"""Callback for distributed training: sharded loaders, weighted gradients, and agreement between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from fastcore.basics import noop
from torch import Tensor, nn
from typing_extensions import override

from learnkit.comm.dtensor import count_parts, local_shard
from learnkit.comm.ranks import SINGLE_RANK, Comm, join_ranks
from learnkit.core.batch import batch_counter
from learnkit.core.errors import CancelBatchException, DistributedError, OptionError
from learnkit.core.random import draw_seed, preserved_rng, seed_all
from learnkit.core.time import Time, as_time
from learnkit.core.validation import check_count
from learnkit.data.dataloaders import n_batches
from learnkit.distributed.compare import check_alike, check_bare, compute_totals, describe_loaders
from learnkit.distributed.ddp import Parallelism, Replicas, average
from learnkit.distributed.global_batch import GlobalBatch
from learnkit.distributed.processes import ManyProcesses, share_generators
from learnkit.distributed.shards import check_lengths, list_samplers, make_rank_seed, shard_loaders
from learnkit.engine.callback import Callback
from learnkit.engine.processes import OneProcess
from learnkit.engine.run import clear_pass

if TYPE_CHECKING:
    from learnkit.learner import Learner

T = TypeVar('T')

STRATEGIES = ('ddp', 'fsdp')
BATCH_SIZES = ('process', 'global')


class DistributedTraining(Callback):
    """Train on all ranks of a process group, as one process would train on the combined batches.

    With torchrun, SLURM's `srun`, or an existing process group (such as Ray Train's), each rank trains on its shard of
    every batch. Gradients are averaged over all ranks, and losses, metrics and logs are reduced over them. In a single
    process the callback has no effect, so one script serves both. `learn.distributed(...)` adds it for a context.

    While the callback is added, `learn.world` has `rank` and `size`, and `learn.dls` iterates over this rank's shard of
    the user's loaders, which are unchanged. A loader with torch's `DistributedSampler`, or `sharded_already=True`, is
    not sharded. Rank 0 writes files and prints rows and bars.

    With `batch_size='process'` each rank uses the loader's batch size; with 'global' the ranks split it. If the last
    batch has too few samples for all ranks, each sample is used once, and gradients are weighted to be the mean over
    the samples. A loader with `drop_last` drops a last batch that is smaller.

    The ranks agree on `learn.stop()`, SIGTERM and the clock every `agree_every` batches, while the next batch is
    computed, and between epochs. By default that is every 8 batches for a model of less than ten million weights, and
    every batch for a larger one.

    Raises `OptionError` for unknown options, and `DistributedError` if the process group cannot be joined, if the
    models differ, and if another rank fails or does not respond for `timeout`. It has no checkpointed state; a
    checkpoint holds the random generators and the data position of each rank.

    >>> DistributedTraining('ddp', batch_size='global').strategy
    'ddp'
    """

    # right after the counters
    order = -9.5
    needs_events = False
    needed_to_rewind = False
    remove_on_find = False
    processes: ManyProcesses  # operations of the ranks, from joining to leaving
    gradient_mean: GradientMean  # added with this callback

    def __init__(
        self,
        strategy: str = 'ddp',  # 'ddp': replicated model; 'fsdp': sharded model
        *,
        batch_size: str = 'process',  # meaning of the loaders' batch size: 'process' or 'global'
        sharded_already: bool = False,  # True if the loaders iterate over this rank's shard
        agree_every: int | None = None,  # batches between agreements; None: by size of the model
        timeout: str | int | Time = '10m',  # timeout of the process group
        backend: str | None = None,  # backend of the group; None: NCCL for GPUs, gloo for CPUs
        **options: Any,  # options of the strategy, see `Replicas` and `Sharded`
    ) -> None:
        if strategy not in STRATEGIES:
            raise OptionError(f"strategy={strategy!r}: pass 'ddp' or 'fsdp'.")
        if batch_size not in BATCH_SIZES:
            raise OptionError(f"batch_size={batch_size!r}: pass 'process' or 'global'.")
        if agree_every is not None:
            check_count('agree_every', agree_every)
        self.timeout = as_time(timeout, 'sec')
        if self.timeout.unit != 'sec':
            raise OptionError(f'timeout={timeout!r}: pass seconds, or a time like "10m".')
        self.strategy = strategy
        self.backend = backend
        self.sharded_already = sharded_already
        self.batch_size = batch_size
        self.strategy_options = sorted(options)
        self.agree_every = agree_every
        self.parallelism = make_parallelism(strategy, options)
        self._saved_attributes: dict[str, Any] = {}  # attributes of the Learner to restore
        self._dls: Any = None  # sharded loaders
        self._interval = 1  # batches between agreements

    @override
    def runs_at(self, event_name: str, training: bool | None) -> bool:
        "Return False in a single process."
        is_alone = self.learn is None or self.learn.world.size == 1
        return not is_alone and super().runs_at(event_name, training)

    # -- joining and leaving the process group -----------------------------------------------------

    def on_added(self) -> None:
        learn = self.learn
        if learn.world.size > 1:
            raise DistributedError(
                'This Learner trains in several processes already: leave out this context, or the callback.'
            )
        world = join_ranks(self.timeout.value, self.backend)
        if world.size == 1:
            return world.leave()
        self._saved_attributes = {'dls': learn.dls, 'logger': learn.logger}
        learn.world = world
        self.processes = learn.parts.processes = ManyProcesses(
            learn, self.parallelism, not self.sharded_already, self.batch_size
        )
        self.gradient_mean = GradientMean(self.processes.batch, self.parallelism)
        try:
            with self.processes.failing_together():
                self._join(learn, world)
        except BaseException:
            learn.remove_cb(self)
            raise

    def _join(self, learn: Learner, world: Comm) -> None:
        "Compare the ranks, and give each its shard of the data and of the model."
        # synchronize first: a rank that fails must not leave while another one still joins
        world.run_on_all(lambda: check_bare(learn.model))
        self.parallelism.check_size(world.size)
        world.copies = self.parallelism.tensor
        check_alike(learn, world, self._collect_shared_options())
        self._share_loaders()
        self._dls = learn.dls
        # depends only on the model, so that the same run stops at the same batch
        is_small = sum(p.numel() for p in learn.model.parameters()) < 10**7
        self._interval = self.agree_every or (8 if is_small else 1)
        if not world.is_first:
            learn.logger = noop
        self._seed()
        self.parallelism.enter(learn)
        share_generators(world)  # the first rank may have drawn initial weights
        learn.add_cb(self.gradient_mean)

    def _collect_shared_options(self) -> dict[str, str]:
        "Return the options and lengths that must be equal on all ranks, in addition to the model."
        lengths = {} if self.sharded_already else describe_loaders(self.learn.dls)
        counts = [f'{n} {unit}' for unit, n in self.learn.parts.counters.by_unit().items()]
        names = ('strategy', 'strategy_options', 'batch_size', 'sharded_already')
        shared = {f'option {name}': repr(getattr(self, name)) for name in names}
        return {**lengths, 'trained so far': ', '.join(counts), **shared}

    def _share_loaders(self) -> None:
        learn = self.learn
        world = self.learn.world
        if self.sharded_already:
            check_lengths(world.gather(n_batches(learn.dls.train)))
            learn.dls = copy(learn.dls)  # the device of the user's own stays
        else:
            learn.dls = shard_loaders(
                learn.dls,
                world.data_rank,
                world.data_size,
                batch_size=self.batch_size,
                count=batch_counter(learn),
            )
        if torch.device(learn.dls.device).type == world.device.type:
            learn.dls.device = world.device

    def _seed(self) -> None:
        "Seed the random generators differently for each shard of the data; rank 0 keeps its state."
        world = self.learn.world
        with preserved_rng():
            seed = world.broadcast(draw_seed())
        if world.data_rank:
            seed_all(make_rank_seed(seed, world.data_rank))

    def on_removed(self) -> None:
        learn = self.learn
        world = self.learn.world
        saved = self._saved_attributes
        self._saved_attributes = {}
        if not saved:
            return  # a single process, or joining has failed
        try:
            self.parallelism.leave(learn)
        finally:
            learn.remove_cb(self.gradient_mean)
            self.processes.failures.leave()
            del self.processes, self.gradient_mean
            for name, value in saved.items():
                setattr(learn, name, value)
            learn.world = SINGLE_RANK
            learn.parts.processes = OneProcess()
            world.leave()

    # -- the fit -----------------------------------------------------------------------------------

    def before_fit(self) -> None:
        learn = self.learn
        world = self.learn.world
        if not self.fitting or learn.run.depth > 1:
            return
        if learn.dls is not self._dls:
            raise DistributedError(
                '`learn.dls` was set while several processes train: each would train on all of it. Set it before '
                '`learn.distributed()`, or the loader in it, `learn.dls.train`, in a new context.'
            )
        world.reset(clock=max(world.gather(learn.parts.counters.elapsed())))

    def before_train(self) -> None:
        self.parallelism.prepare(self.learn)
        self._share_order()

    def before_validate(self) -> None:
        self.parallelism.share_buffers(self.learn)
        self._share_order()

    def _share_order(self) -> None:
        "Shuffle the data on every rank in the order that rank 0's random generators determine."
        dl = self.learn.dl
        if hasattr(dl, 'order_state'):
            dl.take_order(self.world.broadcast(dl.order_state() if self.world.is_first else None))
            return
        for sampler in list_samplers(dl):
            set_epoch = getattr(sampler, 'set_epoch', None)
            if set_epoch is not None:
                return set_epoch(self.learn.parts.counters.epochs)  # epochs of all fits

    # -- each batch --------------------------------------------------------------------------------

    def before_batch(self) -> None:
        self.processes.batch.begin(self.learn)

    def forward_context(self) -> AbstractContextManager[Any] | None:
        "Return a context without gradient synchronization if no step follows this pass."
        learn = self.learn
        if not learn.training:
            return None
        if not learn.microbatch:
            self.processes.batch.start_sum(learn)
        averages = not learn.parts.custom_batch.calls_modules and self._will_step()
        self.gradient_mean.are_averaged = averages
        return self.parallelism.begin_pass(learn, averages)

    def _will_step(self) -> bool:
        learn = self.learn
        if learn.microbatch and not learn.parts.microbatches.is_last:
            return False
        return learn.parts.callbacks.is_step_due()

    def after_pred(self) -> None:
        "Cancel a filler batch of an evaluation, which only keeps the ranks in step."
        if self.learn.training or self.processes.batch.has_local_samples(self.learn):
            return
        clear_pass(self.learn)
        raise CancelBatchException

    def after_batch(self) -> None:
        if self.learn.training:
            self.processes.batch.update_counters(self.learn)

    def batch_checkpoint(self) -> None:
        world = self.learn.world
        n = self.learn.parts.counters.batches % self._interval
        # one batch after an exchange has begun, its values are received
        if n in (0, 1 % self._interval):
            self._agree(partial(world.exchange, n == 0))

    def epoch_checkpoint(self) -> None:
        learn = self.learn
        copies = self.world.copies
        # copies have equal parts of the layers that are not divided between them
        n_parts = self.world.data_size if copies > 1 else 1
        replicated = [local_shard(p) for p in learn.model.parameters() if count_parts(p) == n_parts]
        numbers = (*compute_totals(replicated), learn.finished('st'))
        sums, magnitudes, steps = zip(*self._agree(partial(self.world.sync, *numbers)), strict=True)
        if len(set(steps)) > 1:
            raise DistributedError(
                f'The processes have taken {min(steps):g} to {max(steps):g} steps, and have different weights now. In '
                'some of them alone a step was cancelled: let `self.world.any(...)` take such a decision.'
            )
        n = copies if copies > 1 else self.world.size
        groups = [sums[i : i + n] for i in range(0, self.world.size, n)]
        # more than the rounding errors of different hardware
        if all(max(group) - min(group) <= 1e-6 * max(magnitudes) for group in groups):
            return
        if copies > 1:
            raise DistributedError(
                f'The {n} processes that share layers have different weights: their batches, random numbers or '
                'predictions were not the same.'
            )
        learn.check_replicas()

    def _agree(self, exchange: Callable[[], T]) -> T:
        learn = self.learn
        learn.world.post('clock', learn.parts.counters.elapsed())
        result = exchange()
        if learn.world.value('stop'):
            learn.run.stop('another process')
        if learn.world.value('pause') and learn.run.request is not None:
            learn.run.request.make()
        return result


class GradientMean(Callback):
    "Callback of `DistributedTraining`, with another order, that averages gradients over the samples of all ranks."

    # after gradient accumulation, before mixed precision
    order = 7
    run_valid = False
    needs_events = False
    needed_to_rewind = False
    runs_last = ('before_backward',)

    def __init__(
        self,
        batch: GlobalBatch,  # the current batch of all ranks
        parallelism: Parallelism,  # how gradients are distributed over ranks
    ) -> None:
        self.batch = batch
        self.parallelism = parallelism
        self.are_averaged = False  # whether the backward pass has averaged the gradients
        self._extra_params: list[nn.Parameter] = []  # trained parameters outside the model

    def before_train(self) -> None:
        own = set(self.learn.model.parameters())
        self._extra_params = [p for p in self.learn.opt.parameters() if p not in own]
        self.are_averaged = False  # a resumed epoch may have restored gradients of this rank

    def before_batch(self) -> None:
        "Weigh the whole batch before it is split into microbatches."
        if self.learn.microbatch:
            self.batch.start_sum(self.learn)

    def before_backward(self) -> None:
        "Multiply the loss by its factor in the mean over ranks."
        factor = self.batch.loss_factor(self.learn)
        if isinstance(factor, Tensor) or factor != 1:
            self.learn.loss_grad = self.learn.loss_grad * factor

    def after_cancel_backward(self) -> None:
        "Treat gradients as not averaged: the canceled pass may not have reached the reduction."
        self.are_averaged = False

    after_cancel_batch = after_cancel_backward

    def before_step(self) -> None:
        "Average gradients that the backward pass has not reduced, and gradients of the loss function's parameters."
        learn = self.learn
        if not self.are_averaged:
            self.parallelism.average_gradients(learn)
        self.are_averaged = False  # a custom loop may bypass the wrapper that reduces gradients
        if self._extra_params:
            stepping = set(learn.step_parameters)
            average(p for p in self._extra_params if p in stepping)

    def before_validate(self) -> None:
        "Broadcast buffers again, because averaged weights may include buffers."
        self.parallelism.share_buffers(self.learn)


def make_parallelism(strategy: str, options: Mapping[str, Any]) -> Parallelism:
    "Return the object that distributes weights and gradients."
    if strategy == 'ddp':
        return Replicas(**options)
    from learnkit.distributed.fsdp import Sharded

    return Sharded(**options)
