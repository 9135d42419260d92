"""Memory of the host, and the time of a step, of a sharded model: a Learner and a loop around FSDP2 written by hand.

A model of 67 million float32 weights (268 MB), in layers of the size of a model of 7 billion, is sharded over two
processes on the CPU, and trained by SGD with momentum. `raw` makes it on the meta device, shards it block by block, and
initializes the shards. `learnkit` gets the same model on the meta device, `learnkit-weights` one with weights. Each is
measured in fresh processes, in turns.

    python -m benchmarks.fsdp
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.cli import options
from benchmarks.harness import machine
from benchmarks.teams import in_a_team

__all__ = ['SUBJECTS', 'main', 'measure']

WIDTH, N_BLOCKS, N_BATCHES = 4096, 4, 7
SKIPPED = 2  # steps before the first that is timed
MB = 1e6


class Batches:
    "Batches that note when they are drawn."

    def __init__(self) -> None:
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
        self.batch = x, x.roll(1, 1)
        self.times: list[float] = []

    def __len__(self) -> int:
        return N_BATCHES

    def __iter__(self) -> Iterator[Any]:
        for _ in range(N_BATCHES):
            self.times.append(time.perf_counter())
            yield self.batch

    def step_s(self) -> float:
        times = self.times[SKIPPED:]
        return median(b - a for a, b in pairwise(times))


def make_model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(N_BLOCKS)])


def peak_mb() -> float:
    "Return the largest resident memory of this process so far."
    lines = Path('/proc/self/status').read_text('utf-8').splitlines()
    return next(int(line.split()[1]) * 1024 / MB for line in lines if line.startswith('VmHWM'))


def run_raw(note: Callable[[], None], batches: Batches) -> None:
    "Train by hand."
    from torch.distributed.fsdp import fully_shard

    from learnkit.comm.dtensor import local_shard

    with torch.device('meta'):
        model = make_model()
    for block in model.children():
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device='cpu')
    with torch.no_grad():
        for p in model.parameters():
            local_shard(p).uniform_(-0.02, 0.02)
    note()
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for x, y in batches:
        F.mse_loss(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    note()


def run_learner(note: Callable[[], None], batches: Batches, device: str) -> None:
    "Train with a Learner, on a model that is made on a device."
    from learnkit import DataLoaders, Learner

    with torch.device(device):
        model = make_model()
    opt_func = partial(torch.optim.SGD, momentum=0.9)
    learn = Learner(DataLoaders(batches), model, F.mse_loss, opt_func=opt_func, lr=0.01)
    with learn.no_bar(), learn.no_logging(), learn.distributed('fsdp', sharded_already=True):
        note()
        learn.fit(1)
        note()


SUBJECTS: dict[str, Callable[[Callable[[], None], Batches], None]] = {
    'raw': run_raw,
    'learnkit': partial(run_learner, device='meta'),
    'learnkit-weights': partial(run_learner, device='cpu'),
}


def measure(rank: int, subject: str) -> tuple[float, float, float]:
    "Return MB over the process before, when the model is sharded and when it has trained, and the seconds of a step."
    import torch.distributed.fsdp

    import learnkit.distributed.fsdp  # noqa: F401
    from learnkit import DataLoaders, Learner

    # what the first fit imports is not the model's
    first = Learner(DataLoaders([(torch.zeros(1, 1),) * 2]), nn.Linear(1, 1), F.mse_loss)
    with first.no_bar(), first.no_logging():
        first.fit(1)
    batches = Batches()
    before = peak_mb()
    peaks: list[float] = []
    SUBJECTS[subject](lambda: peaks.append(peak_mb() - before), batches)
    return peaks[0], peaks[1], batches.step_s()


def main(argv: list[str] | None = None) -> int:
    "Measure each subject in turn, print the table, and return 0."
    args = options('python -m benchmarks.fsdp', __doc__, rounds=3).parse_args(argv)
    print(', '.join(f'{key} {value}' for key, value in machine().items()), flush=True)
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in SUBJECTS}
    for _ in range(args.rounds):
        for name in SUBJECTS:
            ranks = in_a_team(2, measure, name)
            found[name].append(tuple(max(values) for values in zip(*ranks, strict=True)))
    print('\n| | MB when sharded | MB in training | over raw | ms a step | over raw |')
    print('|---|--:|--:|--:|--:|--:|')
    for name, rounds in found.items():
        entered, peak, step = (median(values) for values in zip(*rounds, strict=True))
        ratios = [
            median(mine[i] / raw[i] for mine, raw in zip(rounds, found['raw'], strict=True))
            for i in (1, 2)
        ]
        print(
            f'| {name} | {entered:.0f} | {peak:.0f} | {ratios[0]:.2f} | {step * 1e3:.0f} | {ratios[1]:.2f} |'
        )
    return 0


if __name__ == '__main__':
    sys.exit(main())
