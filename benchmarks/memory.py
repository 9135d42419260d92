"""Mebibytes of tensors that are alive when a forward pass starts: what a loop holds of the step before.

The prediction has 64 MiB, the batch and the parameters 5 each, and every batch is new. So 10 are needed; a loop that
still has the prediction of the step before in a variable is at 74. Counted is every storage that torch has made, also
one that only the autograd graph knows. `raw-freed` is the hand-written loop with `del pred, loss` in it.

    python -m benchmarks.memory
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.cli import command_line
from benchmarks.harness import Workload
from benchmarks.peers import PEERS
from benchmarks.step import library
from benchmarks.subjects import LR, SUBJECTS, Batch, Fit, Task

__all__ = ['WORKLOADS', 'Alive', 'WideTask', 'build', 'main']

# samples, inputs: 5 MiB; predictions of N classes: 64 MiB
N = 4096
WIDTH = 320
STEPS = 3

WORKLOADS = {
    'memory': Workload(
        'memory',
        'alive when a forward starts; prediction 64 MiB, batch and parameters 10',
        'benchmarks.memory',
        {
            s: library(s)
            for s in ['raw-freed', 'raw', 'learnkit-bare', 'learnkit', 'fastai', *PEERS]
        },
        unit='MiB',
        reference='raw-freed',
        never_run=frozenset({'composer'}),
    )
}


class Alive(TorchDispatchMode):
    "Know every storage that an operation has made since this context was entered, as long as it is alive."

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.add(t)
        return out

    def add(self, t: Tensor) -> None:
        "Count the storage of `t` too."
        storage = t.untyped_storage()
        ref = StorageWeakRef(storage)
        self.storages[ref.cdata] = ref, storage.nbytes()

    def nbytes(self) -> int:
        "Return the size of all that are alive."
        self.storages = {
            key: (ref, n) for key, (ref, n) in self.storages.items() if not ref.expired()
        }
        return sum(n for _, n in self.storages.values())


class Fresh:
    "A loader that makes each of its batches when it is asked for it."

    def __init__(self, make: Callable[[], Batch]) -> None:
        self.make = make

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(STEPS):
            yield self.make()


class WideTask(Task):
    "A linear layer with as many classes as a batch has samples."

    loss_func = staticmethod(F.cross_entropy)

    def __init__(self) -> None:
        super().__init__(n_train=1, n_valid=0, skip=0)
        self.train = Fresh(self.batch)  # type: ignore[assignment]  # no times are needed here

    def batch(self) -> Batch:
        return torch.randn(N, WIDTH), torch.randint(N, (N,))

    def make_model(self) -> nn.Module:
        return nn.Linear(WIDTH, N)


def raw_freed(task: Task) -> Fit:
    "The hand-written loop, which forgets prediction and loss as soon as it can."
    model = task.model
    loss_func = task.loss_func
    opt = torch.optim.SGD(model.parameters(), lr=LR)

    def fit(n_epoch: int) -> None:
        for _ in range(n_epoch):
            model.train()
            for xb, yb in task.train:
                pred = model(xb)
                loss = loss_func(pred, yb)
                loss.backward()
                opt.step()
                opt.zero_grad()
                del pred, loss, xb, yb

    return fit


def build(workload: str, subject: str) -> Callable[[], float]:
    "Return a function that trains for an epoch and returns the median of what its forward passes, but the first, met."
    task = WideTask()
    fit = raw_freed(task) if subject == 'raw-freed' else SUBJECTS['a'][subject](task)
    found: list[int] = []

    def once() -> float:
        found.clear()
        with Alive() as alive:
            for p in task.model.parameters():
                alive.add(p)
            hook = task.model.register_forward_pre_hook(
                lambda module, args: found.append(alive.nbytes())
            )
            try:
                fit(1)
            finally:
                hook.remove()
        return median(found[1:]) / 2**20

    return once


def main(argv: list[str] | None = None) -> int:
    "Measure what the command line asks for, print the table, and return the exit status."
    return command_line('memory', __doc__, WORKLOADS, argv, rounds=1)


if __name__ == '__main__':
    sys.exit(main())
