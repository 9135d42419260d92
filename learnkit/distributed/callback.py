"""The callback that lets one Learner train in several processes: what they share, weigh and agree on."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from fastcore.basics import noop
from torch import Tensor, nn

from learnkit.core.batch import batch_counter
from learnkit.core.comm import ALONE, Comm, join_ranks
from learnkit.core.errors import CancelBatchException, DistributedError, OptionError, did_you_mean
from learnkit.core.random import preserved_rng
from learnkit.core.time import Time, as_time
from learnkit.data.checks import check_count
from learnkit.data.dataloaders import n_batches
from learnkit.distributed.compare import alike, check_bare, differ, lengths_of, total_of
from learnkit.distributed.cut import BATCH_SIZES, UNEVEN
from learnkit.distributed.ddp import Replicas, average, too_big
from learnkit.distributed.failures import Failures
from learnkit.distributed.shards import FirstBatches, check_lengths, shard_loaders
from learnkit.distributed.strategy import SeveralProcesses
from learnkit.engine.callback import Callback
from learnkit.engine.loop import sample_count, token_count
from learnkit.engine.strategy import SingleProcess

__all__ = ['DistributedTraining']

T = TypeVar('T')

LONGEST_S = 1.0  # from one agreement to the next, unless a single batch takes longer
STRATEGIES = ('auto', 'ddp', 'fsdp')
CHOICES = {'strategy': STRATEGIES, 'batch_size': BATCH_SIZES, 'uneven': UNEVEN}


class Weights:
    "What the loss of a batch averages over in this process, and the sum over all, which comes while it is computed."

    def __init__(self, own: Any, world: Comm) -> None:
        self.own, self._total = own, None  # type: tuple[Any, Any]
        on_device = isinstance(own, Tensor) and not own.is_cpu
        self._wait = (
            summed_on_device(own)
            if on_device
            else world.start_sum(torch.as_tensor(own, dtype=torch.float64))
        )
        self._on_device = on_device

    def total(self) -> Any:
        "Return the sum over all processes: a number, or a tensor on the device of what was given."
        if self._total is None:
            self._total = self._wait() if self._on_device else float(self._wait())
        return self._total


def summed_on_device(t: Tensor) -> Callable[[], Tensor]:
    "Begin to sum a tensor over all processes where it is, and return the function that gives the sum."
    import torch.distributed as dist

    total = t.detach().double()
    total = total.clone() if total is t else total
    work = dist.all_reduce(total, async_op=True)

    def wait() -> Tensor:
        work.wait()  # for a GPU the stream waits, and the host goes on
        return total

    return wait


@dataclass(slots=True)
class BatchShare:
    "What is known of the training batch at hand."

    share: tuple[int, int] | None = None  # own samples, and those of all; None: not known
    n_steps: int | None = None  # before it, while no `before_step` has been
    local: bool = True  # gradients that are there may not be averaged yet
    tokens_before: int = 0
    tokens: Callable[[], Tensor] | None = None  # gives those of all processes
    weights: Weights | None = None  # what the loss averages over, where that is not samples


class DistributedTraining(Callback):
    """Train in all the processes that were started together, as one process would train on what they have between them.

    Started by torchrun, by SLURM's `srun`, or with a process group that is there already (Ray Train makes one), the
    Learner takes its share of every batch, and gradients, losses, metrics and logs are those of all. In a process that
    is alone it does nothing, so that one script serves both. `learn.distributed(...)` adds it for a context.

    From being added to being removed, `learn.world` says who is there (`rank`, `size`), and `learn.dls` gives this
    process's share of the user's loaders, which are not changed. A loader with torch's `DistributedSampler`, or
    `sharded_already=True`, is left as it is. Files, rows and bars are the first process's.

    Batches are the same as those of one process with `batch_size` times as many samples ('process': the loader's batch
    size is that of each) or as many ('global'). At the end of the data there may be too few for all: with
    `uneven='join'` each sample is used once, and gradients are weighted so that they are the mean over what there is;
    'pad' repeats samples until all have equally many, 'drop' leaves out what is left over.

    `learn.stop()` in one process, SIGTERM and the clock are agreed on every `agree_every` batches, while the next is
    computed, and between epochs. Without a number, that is each batch for a big model, and every 64 batches at most for
    a small one, more often where batches are slow.

    Raises `OptionError` for options that are none, `DistributedError` where the processes cannot be joined, where their
    models differ, and when another one fails or hangs for longer than `timeout`. No state of its own; a checkpoint has
    random generators and the place in the data for each process.

    >>> DistributedTraining('ddp', batch_size='global').strategy
    'ddp'
    """

    order, needs_events = -9.5, False  # right after the counters
    remove_on_find = False
    failures: Failures  # of the processes that are joined

    def __init__(
        self,
        strategy: str = 'auto',  # 'ddp': each rank has the whole model; 'fsdp': a part; 'auto'
        *,
        batch_size: str = 'process',  # whose batch size loaders have: each 'process', or 'global'
        uneven: str = 'join',  # what becomes of the last batch: 'join', 'pad' or 'drop'
        sharded_already: bool = False,  # the loaders give this process's share themselves
        agree_every: int | None = None,  # batches between agreements; None: by model and speed
        timeout: str | int | Time = '10m',  # after which a process that waits for another gives up
        backend: str | None = None,  # torch's name; None: NCCL between GPUs and gloo between CPUs
        **options: Any,  # of the strategy, see `Replicas` and `Sharded`
    ) -> None:
        given = {'batch_size': batch_size, 'uneven': uneven}
        for name, value in {'strategy': strategy, **given}.items():
            if value not in (known := CHOICES[name]):
                raise OptionError(
                    f'{name}={value!r}: give {" or ".join(map(repr, known))}.'
                    f'{did_you_mean(str(value), known)}'
                )
        if agree_every is not None:
            check_count('DistributedTraining', 'agree_every', agree_every)
        self.timeout = as_time(timeout, 'sec')
        if self.timeout.unit != 'sec':
            raise OptionError(f'timeout={timeout!r}: give seconds, or a time like "10m".')
        self.strategy, self.backend, self.sharded_already = strategy, backend, sharded_already
        self._given, self._options, self.agree_every = given, options, agree_every
        if strategy != 'auto':
            self._made()  # whose options it checks
        self.parts: Any = None  # the strategy at work
        self._mean = GradientMean()
        self._before: dict[str, Any] = {}  # what the Learner had before
        self._dls: Any = None  # the shares of its loaders
        self.batch = BatchShare()
        self._evaluates = True  # the batch of an evaluation has samples of this process
        self._every = self._most = 1  # batches from one agreement to the next, now and at most
        self._heard = 0, 0.0  # at which batch the last one was heard of, and its clock
        self._catches_up = False  # a resumed fit is to compute as if it had not stopped
        self._loose: list[nn.Parameter] = []  # those that are trained and are not the model's
        self._steps_before = 0  # those of other fits
        # all callbacks; those that say whether a step follows
        self._asked: tuple[list[Any], list[Any]] = [], []

    def _runs_when(self, event_name: str, training: bool | None) -> bool:
        "Have no handler at all in a process that is alone, and one of predictions in evaluations alone."
        if (
            self.learn is None
            or self.learn.world.size == 1
            or (training and event_name == 'after_pred')
        ):
            return False
        return super()._runs_when(event_name, training)

    # -- coming and going --------------------------------------------------------------------------

    def on_added(self) -> None:
        learn = self.learn
        if learn.world.size > 1:
            raise DistributedError(
                'This Learner trains in several processes already: by a `DistributedTraining` among its callbacks, or '
                'in a context of `learn.distributed()` that is open. Leave out one of them.'
            )
        world = join_ranks(self.timeout.value, self.backend)
        if world.size == 1:
            return world.leave()
        self._before = {'dls': learn.dls, 'logger': learn.logger}
        learn.world, learn.strategy, self.failures = world, SeveralProcesses(self), Failures(world)
        try:
            # nobody leaves while another still joins
            world.run_on_all(lambda: check_bare(learn.model))
            alike(learn, world, self._told())
            self.parts = self._made(
                cuts=self.strategy == 'auto' and world.any(too_big(learn.model))
            )
            self._share_loaders()
            self._dls = learn.dls
            self._every = self._most = self.agree_every or batches_between(learn.model)
            if not world.is_first:
                learn.logger = noop
            self._seed()
            self.parts.enter(learn)
            learn.add_cb(self._mean)
        except BaseException as e:
            error = self.fail(e)
            learn.remove_cb(self)
            if error is e:
                raise
            raise error from e

    def _told(self) -> dict[str, str]:
        "Return what must be the same in every process, besides the model."
        lengths = {} if self.sharded_already else lengths_of(self.learn.dls)
        options = {
            'strategy': self.strategy,
            'sharded_already': self.sharded_already,
            **self._given,
        }
        lengths['trained so far'] = ', '.join(
            f'{n} {unit}' for unit, n in self.learn.counters.by_unit().items()
        )
        return {**lengths, **{f'option {name}': repr(value) for name, value in options.items()}}

    def _made(self, cuts: bool = False) -> Any:
        "Return the strategy: one that cuts the model over the processes, if it is asked for, or `cuts` says so."
        if self.strategy == 'ddp' or not (cuts or self.strategy == 'fsdp'):
            return Replicas(**self._options)
        from learnkit.distributed.fsdp import Sharded

        return Sharded(**self._options)

    def _share_loaders(self) -> None:
        learn, world = self.learn, self.learn.world
        if self.sharded_already:
            learn.dls = self._cut_to_the_shortest()
        else:
            learn.dls = shard_loaders(
                learn.dls,
                world.rank,
                world.size,
                **self._given,
                fillers_in_evaluation=self.parts.needs_equal_evaluations,
                count=batch_counter(learn),
            )
        if torch.device(learn.dls.device).type == world.device.type:
            learn.dls.device = world.device

    def _cut_to_the_shortest(self) -> Any:
        "Refuse training loaders of different lengths, or leave out what the longer ones have more."
        dls = copy(self.learn.dls)
        n = check_lengths(self.learn.world.gather(n_batches(dls.train)), self._given['uneven'])
        if n is not None and n != n_batches(dls.train):
            dls.train = FirstBatches(dls.train, n)
        return dls

    def _seed(self) -> None:
        "Give every process random numbers of its own; the first keeps those that it has."
        with preserved_rng():
            seed = int(torch.empty((), dtype=torch.int64).random_())
        seed = self.learn.world.broadcast(seed)
        if self.learn.world.is_first:
            return
        seed = (seed + 0x9E3779B97F4A7C15 * self.learn.world.rank) % 2**63
        torch.manual_seed(seed)
        random.seed(seed)
        import numpy as np

        np.random.seed(seed % 2**32)

    def on_removed(self) -> None:
        learn, world = self.learn, self.learn.world
        before, self._before = self._before, {}
        if not before:
            return  # it has not joined any
        try:
            if self.parts is not None:
                self.parts.leave(learn)
        finally:
            learn.remove_cb(self._mean)
            self.failures.leave()
            del self.failures
            self.parts = None
            self._asked = [], []
            for name, value in before.items():
                setattr(learn, name, value)
            learn.world, learn.strategy = ALONE, SingleProcess()
            world.leave()

    def fail(
        self,
        e: BaseException,  # has ended a run of this process
    ) -> BaseException:
        """Let the other processes know of an error, and close the connections on which they wait for this one.

        Return what is to be raised: `e`, or a `DistributedError` that says which process has failed before."""
        failures, world = self.failures, self.learn.world
        error = failures.report(e, self.learn)
        if isinstance(e, SystemExit):
            return e
        if self.parts is not None:
            self.parts.release(self.learn)
        self.batch = BatchShare()
        world.leave()
        failures.linger()
        return error

    # -- the fit -----------------------------------------------------------------------------------

    def before_fit(self) -> None:
        learn, world = self.learn, self.learn.world
        if not self.fitting or learn.run.depth > 1:
            return
        if learn.dls is not self._dls:
            raise DistributedError(
                '`learn.dls` was set while several processes train: each would train on all of it. Set it before '
                '`learn.distributed()`, or the loader in it, `learn.dls.train`, in a new context.'
            )
        world.reset(clock=max(world.gather(learn.counters.elapsed())))
        self._every, self._heard = self._most, (learn.counters.batches, world.value('clock'))
        r = learn.run.resume
        self._steps_before = learn.finished('st') if r is None else 0
        self._catches_up = world.size > 2 and r is not None and r.state.get('has_synced', True)

    def before_train(self) -> None:
        self.parts.prepare(self.learn)
        own = set(self.learn.model.parameters())
        self._loose = [p for p in self.learn.opt.parameters() if p not in own]
        self.batch.local = True  # also those that a resumed epoch has brought with it
        self._share_order()

    def before_validate(self) -> None:
        self.parts.share_buffers(self.learn)
        self._share_order()

    def _share_order(self) -> None:
        "Let every process draw the order of the data from the first one's generators."
        dl = self.learn.dl
        if hasattr(dl, 'order_state'):
            dl.take_order(self.world.broadcast(dl.order_state() if self.world.is_first else None))
            return
        for sampler in (
            getattr(dl, 'sampler', None),
            getattr(getattr(dl, 'batch_sampler', None), 'sampler', None),
        ):
            if set_epoch := getattr(sampler, 'set_epoch', None):
                return set_epoch(self.learn.counters.epochs)  # of all fits

    # -- each batch --------------------------------------------------------------------------------

    def before_batch(self) -> None:
        learn = self.learn
        share = getattr(learn.dl, 'share', None)
        known = share(learn.iter) if share is not None else None
        if not learn.training:
            self._evaluates = known is None or known[0] > 0
            return
        now = self.batch
        now.share = known if share is not None else self._counted_share()
        now.tokens_before, now.tokens, now.n_steps = (
            learn.counters.tokens,
            None,
            learn.finished('st'),
        )
        now.weights = None
        if not self._catches_up:
            return
        self._catches_up = False
        self.parts.catch_up(learn)

    @property
    def has_samples(self) -> bool:
        "Whether the batch at hand has samples of this process, and does not only keep it in step with others."
        if not self.learn.training:
            return self._evaluates
        return self.batch.share is None or self.batch.share[0] > 0

    def _counted_share(self) -> tuple[int, int] | None:
        "Return the share of a batch from a loader that gives this process's own; torch's sampler gives all as many."
        own = sample_count(self.learn)
        total = (
            int(self.world.sum(torch.tensor(own)))
            if self.sharded_already
            else own * self.world.size
        )
        return (own, total) if total else None

    def forward_context(self) -> AbstractContextManager[Any] | None:
        "Add gradients up in this process alone where no step follows this pass."
        learn = self.learn
        if not learn.training:
            return None
        now = self.batch
        if now.tokens is None and has_tokens(learn) and not learn.microbatch:
            self._sum_tokens()
        if (
            not learn.microbatch
            and not learn.loss_weights.is_sum(learn)
            and not learn.loss_weights.are_samples(learn)
        ):
            self.sum_weights()
        now.local = learn.run.calls_modules or not self._steps_after_this()
        if now.local:
            return self.parts.pass_without_sync()
        self.parts.has_synced = True
        return None

    def _steps_after_this(self) -> bool:
        learn = self.learn
        if learn.microbatch and not learn.run.is_last_microbatch:
            return False
        cbs, asked = self._asked
        if cbs is not (here := learn.callbacks.ordered()):
            asked = [cb for cb in here if hasattr(cb.__class__, 'will_step')]
            self._asked = here, asked
        return not asked or all(cb.will_step() for cb in asked)

    def after_pred(self) -> None:
        "Leave a sample out of an evaluation that only keeps this process in step."
        if self._evaluates:
            return
        self.learn.clear_pass()
        raise CancelBatchException

    def after_cancel_backward(self) -> None:
        "Take nothing as averaged: the pass that was to do it may not have come so far."
        if self.learn.training:
            self.batch.local = True

    def after_cancel_batch(self) -> None:
        self.after_cancel_backward()

    def after_batch(self) -> None:
        learn = self.learn
        if not learn.training:
            return
        now = self.batch
        if now.n_steps is not None and now.local and self.parts.averages_late:
            self._check_no_step()
        if now.share is not None:
            learn.counters.samples += now.share[1] - sample_count(learn)
        if not has_tokens(learn):
            return
        # else of a batch that was cancelled, or cut into pieces
        tokens = now.tokens or self._sum_tokens()
        learn.counters.tokens = now.tokens_before + int(tokens())

    def _check_no_step(self) -> None:
        "Raise `DistributedError` for a step with gradients that nothing has averaged."
        learn = self.learn
        if learn.finished('st') == self.batch.n_steps:
            return
        raise DistributedError(
            f'{type(learn).__name__} has stepped without `before_step`, where gradients are averaged over the '
            'processes: each has weights of its own now. Write the batch as `train_batch`, with `self.optimize(loss)`, '
            'or let `self._do_grad_opt()` call `_step`: both fire the events around backward and step.'
        )

    def _sum_tokens(self) -> Callable[[], Tensor]:
        "Begin to sum this batch's tokens up; the answer comes while it is computed."
        self.batch.tokens = self.learn.world.start_sum(
            torch.tensor(token_count(self.learn) if self.has_samples else 0)
        )
        return self.batch.tokens

    def sum_weights(self) -> Weights:
        "Return what this batch's loss averages over, here and in all processes; begin to sum it up where that is new."
        if self.batch.weights is None:
            self.batch.weights = Weights(self.learn.strategy.own_weight(self.learn), self.world)
        return self.batch.weights

    def batch_checkpoint(self) -> None:
        world, n = self.learn.world, self.learn.counters.batches
        sends, hears = n % self._every == 0, world.is_exchanging
        if sends or hears:
            self._agree(partial(world.exchange, sends))
        if hears and self.agree_every is None:
            self._keep_pace(n, world.value('clock'))

    def _keep_pace(self, n: int, clock: float) -> None:
        "Agree more often where batches take long, by the clock that all agree on."
        (n_before, before), self._heard = self._heard, (n, clock)
        self._every = self._most
        while self._every > 1 and self._every * (clock - before) > LONGEST_S * (n - n_before):
            self._every //= 4

    def epoch_checkpoint(self) -> None:
        total = total_of(self.learn.model.parameters()) if self.parts.averages_late else (0.0, 0.0)
        totals = self._agree(partial(self.world.sync, *total))
        # evaluations are no batches
        self._heard = self.learn.counters.batches, self.world.value('clock')
        if differ(totals):
            self.learn.check_replicas()

    def iteration_checkpoint(self) -> None:
        self._agree(self.world.sync)

    def _agree(self, how: Callable[[], T]) -> T:
        learn = self.learn
        learn.world.post('clock', learn.counters.elapsed())
        learn.world.n_steps = learn.finished('st') - self._steps_before
        told = how()
        if learn.world.value('stop'):
            learn.run.stopping = True
        return told


class GradientMean(Callback):
    "Make gradients the mean over the samples of all processes: a part of `DistributedTraining` with another order."

    # after gradient accumulation, before mixed precision
    order, run_valid, needs_events = 7, False, False
    runs_last = ('before_backward',)
    _factor: Any = None  # of a batch that is cut into pieces

    def before_batch(self) -> None:
        "Look at the whole batch, where its loss is that of pieces."
        learn = self.learn
        if (
            learn.microbatch
            and not learn.loss_weights.is_sum(learn)
            and not learn.loss_weights.are_samples(learn)
        ):
            self._factor = learn.strategy.gradient_share(learn)
        elif self._factor is not None:
            self._factor = None

    def before_backward(self) -> None:
        "Weigh this process's loss by its share."
        factor = (
            self.learn.strategy.gradient_share(self.learn) if self._factor is None else self._factor
        )
        if isinstance(factor, Tensor) or factor != 1:
            self.learn.loss_grad = self.learn.loss_grad * factor

    def before_step(self) -> None:
        "Average what is not averaged yet: what was added up in each process alone, and the loss function's own."
        learn = self.learn
        team = learn.strategy.team
        if team is None:
            return
        now = team.batch
        now.n_steps = None
        if now.local:
            team.parts.average_gradients(learn)
        now.local = (
            True  # until a pass has averaged others: a loop of one's own may go around the wrapper
        )
        if team._loose:
            stepping = set(learn.step_parameters)
            average(p for p in team._loose if p in stepping)

    def before_validate(self) -> None:
        "Share buffers again, which averaged weights may have brought with them."
        if (team := self.learn.strategy.team) is not None:
            team.parts.share_buffers(self.learn)


def has_tokens(learn: Any) -> bool:
    "Tell whether tokens are counted of the batch at hand."
    if learn.token_func is not None:
        return True
    first = learn.xb[0] if learn.xb else None
    return first.__class__ is not Tensor and isinstance(first, Mapping) and 'input_ids' in first


def batches_between(model: nn.Module) -> int:
    """Return how many batches go by from one agreement to the next, if these are not slow.

    One costs some tenths of a millisecond where all cores are busy. As long as the number follows from the model alone,
    the same run stops at the same batch."""
    n = sum(p.numel() for p in model.parameters())
    return 64 if n < 1e5 else 16 if n < 1e7 else 4 if n < 1e8 else 1
