"""Processes that measure several subjects in turn, and the trainings that they measure."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ['SUBJECTS', 'TASKS', 'Clock', 'Task', 'in_a_team', 'in_turns', 'weights']

TIMEOUT_S = 120  # maximum time that a process waits for another
# of a turn, and those before the steady part, in which a new context makes its wrapper
EPOCHS = 3
SKIP = 1
SEED = 7
LR = 0.01


# ----------------------------------------------------------------------------------------- the team


def in_a_team(
    n: int,
    job: Callable[..., Any],  # a module's function, called with a rank and `arguments`
    *arguments: Any,
) -> list[Any]:
    "Call `job` in `n` new processes of one gloo group, and return the results."
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    with ProcessPoolExecutor(n, get_context('spawn')) as pool:
        jobs = [pool.submit(_join, rank, n, port, job, arguments) for rank in range(n)]
        for one in as_completed(jobs):
            one.result()  # the first that fails raises
    return [one.result() for one in jobs]


def _join(rank: int, n: int, port: int, job: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import torch.distributed as dist

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing is printed between the tables
    os.environ.update(GLOO_SOCKET_IFNAME='lo', LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group(
        'gloo',
        init_method=f'tcp://127.0.0.1:{port}',
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        return job(rank, *arguments)
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------- the tasks


@dataclass(frozen=True)
class Task:
    "Linear layers on batches of samples in memory."

    widths: tuple[int, ...]  # of the input, of each layer
    n_batches: int  # of each process in an epoch
    strategy: str = 'ddp'
    bs: int = 64  # samples of each process in a batch
    lr: float = LR

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        layers = [
            layer for sizes in pairwise(self.widths) for layer in (nn.Linear(*sizes), nn.ReLU())
        ]
        return nn.Sequential(*layers[:-1])

    def data(self, size: int) -> tuple[Tensor, Tensor]:
        "Return the samples and classes of all processes."
        g = torch.Generator().manual_seed(1)
        n = size * self.bs * self.n_batches
        return torch.randn(n, self.widths[0], generator=g), torch.randint(
            self.widths[-1], (n,), generator=g
        )

    def optimizer(self, params: Iterable[Any], lr: float = LR) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=lr, momentum=0.9)


TASKS = {
    'linears': Task((32, 64, 64, 10), 500),
    'million': Task((784, 768, 512, 10), 100),
    'shards': Task((32, 64, 64, 10), 50, 'fsdp'),
}


@dataclass
class Clock:
    "Record wall time, and CPU time of the training thread, at the beginning of each epoch."

    ticks: list[tuple[float, float]] = field(default_factory=list)

    def tick(self) -> None:
        self.ticks.append((time.perf_counter(), time.thread_time()))

    def per_step(self, task: Task) -> list[float]:
        "Return the wall and CPU seconds per step, and clear the record."
        steady = self.ticks[SKIP:]
        self.ticks = []
        return [
            (b - a) / (task.n_batches * (len(steady) - 1))
            for a, b in zip(steady[0], steady[-1], strict=True)
        ]


# ------------------------------------------------------------------------------------- the subjects


class ByHand:
    "Hand-written loop around torch's wrappers: all processes draw the same order, and each takes its rows of it."

    def __init__(self, task: Task, rank: int, size: int) -> None:
        self.task = task
        self.rank = rank
        self.size = size
        self.clock = Clock()
        self.x, self.y = task.data(size)
        self.model = task.model()
        self.wrapped = (
            self.model
            if task.strategy == 'fsdp'
            else nn.parallel.DistributedDataParallel(self.model)
        )
        if task.strategy == 'fsdp':
            self._cut()
        self.opt = task.optimizer(self.model.parameters())
        self.order = torch.Generator().manual_seed(SEED)

    def _cut(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh('cpu', (self.size,))
        for m in [*(m for m in self.model.modules() if isinstance(m, nn.Linear)), self.model]:
            fully_shard(m, mesh=mesh)

    def train(self) -> None:
        x = self.x
        y = self.y
        model = self.wrapped
        opt = self.opt
        for _ in range(EPOCHS):
            self.clock.tick()
            order = torch.randperm(len(x), generator=self.order).view(
                self.task.n_batches, self.size, self.task.bs
            )
            model.train()
            for idx in order[:, self.rank].unbind():
                xb = x.index_select(0, idx)
                yb = y.index_select(0, idx)
                loss = F.cross_entropy(model(xb), yb)
                loss.backward()
                opt.step()
                opt.zero_grad()


class WithLearner:
    "A Learner in `learn.distributed()`, in a new context each turn, so that it leaves nothing while others train."

    def __init__(self, task: Task, rank: int, size: int, bare: bool = False) -> None:
        from learnkit import Callback, DataLoaders, Learner, TrainEvalCallback
        from learnkit.data.dataloaders import TensorLoader

        self.task = task
        self.clock = Clock()
        self.model = task.model()
        loader = TensorLoader(*task.data(size), bs=task.bs, shuffle=True, seed=SEED)
        begins = Callback(before_train=lambda cb: self.clock.tick())
        begins.order = -9  # the strategy's wrapper is made before it, in the first epoch
        options: dict[str, Any] = (
            {'default_cbs': False, 'cbs': [TrainEvalCallback, begins]}
            if bare
            else {'cbs': [begins]}
        )
        self.learn = Learner(
            DataLoaders(loader, device='cpu'),
            self.model,
            F.cross_entropy,
            opt_func=task.optimizer,
            lr=LR,
            **options,
        )

    def train(self) -> None:
        with self.learn.distributed(self.task.strategy, timeout=TIMEOUT_S):
            self.fit()

    def fit(self) -> None:
        self.learn.fit(EPOCHS)


class WithoutFlag(WithLearner):
    "The same without messages between batches; the difference is the cost of the flag."

    def fit(self) -> None:
        # of this context's world alone
        self.learn.world.exchange = lambda sends=True: None  # type: ignore[method-assign]
        super().fit()


SUBJECTS: dict[str, Callable[[Task, int, int], Any]] = {
    'raw': ByHand,
    'raw-again': ByHand,
    'learnkit-bare': partial(WithLearner, bare=True),
    'learnkit': WithLearner,
    'learnkit-no-flag': WithoutFlag,
}


def weights(model: nn.Module) -> Tensor:
    "Return all weights as one vector."
    return torch.cat(
        [
            (p.full_tensor() if hasattr(p, 'full_tensor') else p).detach().reshape(-1)
            for p in model.parameters()
        ]
    )


def in_turns(rank: int, name: str, names: list[str], rounds: int) -> dict[str, Any]:
    """Train subjects in turn in all processes, after a turn of warm-up.

    Returns wall and CPU seconds of a step for each subject and round, and the weights at the end."""
    import torch.distributed as dist

    task = TASKS[name]
    size = dist.get_world_size()
    subjects = {name: SUBJECTS[name](task, rank, size) for name in names}
    values: dict[str, list[list[float]]] = {name: [] for name in names}
    for i in range(-1, rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            subjects[name].train()
            spent = subjects[name].clock.per_step(task)
            if i >= 0:
                values[name].append(spent)
    return {'values': values, 'weights': {name: weights(s.model) for name, s in subjects.items()}}
