"""Costs of single parts of a training in two processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.teams import TASKS, in_a_team

if TYPE_CHECKING:
    from learnkit.comm.ranks import Comm

__all__ = ['PARTS', 'in_rounds', 'measure_parts', 'table']

Measure = Callable[['Comm'], float]  # called in every process; returns a number in the part's unit
PARTS: dict[str, tuple[str, Measure]] = {}  # unit and function by name
N = 2  # processes
WIDTH = 2048  # of the layer in a checkpoint: with Adam's averages 50 MB


def part(label: str, unit: str) -> Callable[[Measure], Measure]:
    "Register a function to measure."

    def add(f: Measure) -> Measure:
        PARTS[label] = unit, f
        return f

    return add


def us_each(
    f: Callable[[], object], n: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    "Return the microseconds of a call, the mean of `n`."
    began = clock()
    for _ in range(n):
        f()
    return (clock() - began) / n * 1e6


# -- between batches -------------------------------------------------------------------------------


def flag(world: Comm, clock: Callable[[], float]) -> float:
    "Return the CPU time of a flag that has 2 ms to arrive."

    def pause() -> None:
        time.sleep(0.002)

    def batch() -> None:
        pause()
        world.exchange()

    return us_each(batch, 100, clock) - us_each(pause, 100, clock)


@part('flag after a batch, in the thread that trains', 'us CPU')
def flag_in_thread(world: Comm) -> float:
    return flag(world, time.thread_time)


@part('flag after a batch, with the threads that carry it', 'us CPU')
def flag_in_all(world: Comm) -> float:
    return flag(world, time.process_time)


@part('flag there and back', 'us')
def flag_and_back(world: Comm) -> float:
    def send_and_wait() -> None:
        world.exchange()
        world.exchange(sends=False)

    return us_each(send_and_wait, 100)


# -- data ------------------------------------------------------------------------------------------


def more_per_batch(share: Any, loader: Any) -> float:
    "Return the additional microseconds of CPU time of a batch of `share` compared with a batch of `loader`."

    def each(dl: Any) -> float:
        batches = iter(dl)
        n = 0
        began = time.thread_time()
        for _ in batches:
            n += 1
        return (time.thread_time() - began) / n * 1e6

    return each(share) - each(loader)


@part('share of a TensorLoader, over a loader of as many batches', 'us/batch')
def share_of_tensors(world: Comm) -> float:
    from learnkit.data.dataloaders import TensorLoader
    from learnkit.distributed.shards import shard

    x = torch.randn(world.size * 64_000, 16)
    loaders = [TensorLoader(rows, bs=64, shuffle=True, seed=1) for rows in (x, x[:64_000])]
    return more_per_batch(shard(loaders[0], world.rank, world.size), loaders[1])


@part('share of a DataLoader, over a loader of as many batches', 'us/batch')
def share_of_samples(world: Comm) -> float:
    from learnkit.distributed.shards import shard

    x = torch.randn(world.size * 12_800, 16)
    loaders = [DataLoader(TensorDataset(rows), 64, shuffle=True) for rows in (x, x[:12_800])]
    return more_per_batch(shard(loaders[0], world.rank, world.size), loaders[1])


@part('order of a TensorLoader, drawn by each process', 'ns/sample')
def order_of_tensors(world: Comm) -> float:
    return us_each(lambda: torch.randperm(4_000_000), 1) / 4_000


@part('order of a DataLoader, drawn by each process', 'ns/sample')
def order_of_samples(world: Comm) -> float:
    from learnkit.distributed.shards import shard

    n: Any = range(200_000)
    share: Any = shard(DataLoader(n, 64, shuffle=True), world.rank, world.size)
    return us_each(lambda: sum(1 for _ in share.batch_sampler), 1) / 200


# -- what processes send each other ----------------------------------------------------------------


@part('gathering a number from each process', 'us')
def gather_number(world: Comm) -> float:
    return us_each(lambda: world.gather(1.0), 50)


@part('gathering 4 MB from each process', 'ms')
def gather_bytes(world: Comm) -> float:
    t = torch.zeros(1_000_000)
    return us_each(lambda: world.gather(t), 3) / 1e3


@part('reading what one process has sent', 'us CPU')
def read_number(world: Comm) -> float:
    from learnkit.comm.ranks import pack, unpack

    sent = pack(1.0)
    return us_each(lambda: unpack(sent), 50, time.thread_time)


@part('asking the store of the first process something', 'us')
def ask_store(world: Comm) -> float:
    from torch.distributed import TCPStore

    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    store.set('a', 'b')
    return us_each(lambda: store.get('a'), 200)


@part('all-reduce of 4 MB by gloo', 'ms')
def all_reduce(world: Comm) -> float:
    import torch.distributed as dist

    t = torch.zeros(1_000_000)
    return us_each(lambda: dist.all_reduce(t), 3) / 1e3


# -- trainings -------------------------------------------------------------------------------------


@part('another control group', 'ms')
def new_group(world: Comm) -> float:
    from learnkit.comm.ranks import join_ranks

    made: list[Comm] = []
    took = us_each(lambda: made.append(join_ranks()), 1) / 1e3
    made[0].leave()
    return took


@part('entering and leaving `learn.distributed()`', 'ms')
def context(world: Comm) -> float:
    learn = small_learner()

    def enter() -> None:
        with learn.distributed('ddp'):
            pass

    return us_each(enter, 1) / 1e3


@part('end of an epoch: losses, metrics, decisions; over a process alone', 'ms')
def epoch(world: Comm) -> float:
    learn = small_learner()

    def fit() -> float:
        learn.fit(1)
        return us_each(lambda: learn.fit(10), 1) / 1e4

    with learn.no_bar(), learn.no_logging():
        alone = fit()
        with learn.distributed('ddp', batch_size='global'):
            return fit() - alone


def small_learner() -> Any:
    from learnkit import DataLoaders, Learner, accuracy

    task = TASKS['linears']
    x, y = (t[:128] for t in task.data(1))
    dls = DataLoaders.from_tensors((x, y), (x, y), bs=128, seed=1, device='cpu')
    return Learner(dls, task.model(), F.cross_entropy, opt_func=task.optimizer, metrics=accuracy)


@part('checkpoint of 50 MB, over one of a process alone', 'ms')
def checkpoint(world: Comm) -> float:
    from learnkit import Callback, Checkpoint, DataLoaders, Learner

    took: list[float] = []

    def save(cb: Any) -> None:
        took.append(us_each(cb.learn.checkpoint.save, 1) / 1e3)

    def fit(folder: Path, together: bool) -> float:
        saver = Checkpoint(
            every=None, folder=folder, keep_last=1, background=False, preemption=False
        )
        learn = Learner(
            DataLoaders([(x, x)] * 8, device='cpu'),
            nn.Linear(WIDTH, WIDTH),
            F.mse_loss,
            opt_func=torch.optim.Adam,
            cbs=[Callback(batch_checkpoint=save), saver],
        )
        took.clear()
        with (
            learn.no_bar(),
            learn.no_logging(),
            learn.distributed('ddp') if together else nullcontext(),
        ):
            learn.fit(1)
        return median(took[1:])

    x = torch.randn(4, WIDTH)
    with TemporaryDirectory() as folder:
        where = Path(world.broadcast(folder))
        alone = fit(where / 'alone', together=False) if world.is_first else 0.0
        world.gather(None)
        all_of_them = fit(where / 'together', together=True)
        world.gather(None)
    return all_of_them - alone


@part('random generators of each process, in a checkpoint', 'kB')
def generators(world: Comm) -> float:
    from learnkit.comm.ranks import pack
    from learnkit.core.random import capture_rng

    return len(pack(capture_rng())) / 1e3


# -- all of them -----------------------------------------------------------------------------------


def in_rounds(rank: int, labels: list[str], rounds: int) -> dict[str, list[float]]:
    "Measure each part once per round in all processes, after a round of warm-up."
    from learnkit.comm.ranks import join_ranks

    world = join_ranks()
    values: dict[str, list[float]] = {label: [] for label in labels}
    for i in range(rounds + 1):
        for label in labels:
            world.gather(None)  # all begin at once
            value = PARTS[label][1](world)
            if i:
                values[label].append(value)
    world.leave()
    return values


def measure_parts(rounds: int) -> dict[str, list[float]]:
    "Return the cost of every part in the first process, by round."
    return dict(in_a_team(N, in_rounds, list(PARTS), rounds)[0])


def table(values: dict[str, list[float]]) -> str:
    "Return the medians of the rounds, with their range."
    lines = [f'costs: the parts, in {N} processes']
    for label, several in values.items():
        unit = PARTS[label][0]
        least = min(several)
        most = max(several)
        lines.append(f'{label:<70}{median(several):9.1f} {unit:<10}({least:.1f} to {most:.1f})')
    return '\n'.join(lines)
