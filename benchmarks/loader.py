"""Batches a second of a shuffled loader of tensors that are in memory, without any training.

torch            torch's DataLoader of a TensorDataset: what most people write.
torch-getitems   the same loader, of a data set whose `__getitems__` gives a whole batch, which is then not collated.
learnkit         `DataLoaders.from_tensors`, a TensorLoader.
fastai           its `TfmdDL` of a list of samples.

    python -m benchmarks.loader
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.cli import command_line
from benchmarks.harness import Workload
from benchmarks.step import library

__all__ = ['WORKLOADS', 'build', 'main']

SAMPLES = 60_000
WINDOW_S = 0.3  # passes are repeated for as long: one alone may take 5 ms
# floats a sample, samples a batch
SHAPES = {'rows': (16, 64), 'images': (784, 64), 'images-1024': (784, 1024)}


class Whole(Dataset[Any]):
    "Samples of two tensors, a whole batch of them in one call."

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x = x
        self.y = y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.x[indices], self.y[indices]


def as_it_is(batch: Any) -> Any:
    return batch


def torch_loader(x: Tensor, y: Tensor, bs: int) -> Iterable[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=bs, shuffle=True)


def torch_getitems(x: Tensor, y: Tensor, bs: int) -> Iterable[Any]:
    return DataLoader(Whole(x, y), batch_size=bs, shuffle=True, collate_fn=as_it_is)


def learnkit(x: Tensor, y: Tensor, bs: int) -> Iterable[Any]:
    from learnkit import DataLoaders

    return DataLoaders.from_tensors((x, y), bs=bs, device='cpu').train


def fastai(x: Tensor, y: Tensor, bs: int) -> Iterable[Any]:
    from fastai.data.core import TfmdDL

    return TfmdDL(
        list(zip(x, y, strict=True)), bs=bs, shuffle=True, num_workers=0, device=torch.device('cpu')
    )


LOADERS: dict[str, Callable[[Tensor, Tensor, int], Iterable[Any]]] = {
    'torch': torch_loader,
    'torch-getitems': torch_getitems,
    'learnkit': learnkit,
    'fastai': fastai,
}

WORKLOADS = {
    name: Workload(
        name,
        f'{SAMPLES} shuffled samples of {width} floats and a class, batches of {bs}',
        'benchmarks.loader',
        {s: library(s) for s in LOADERS},
        unit='batches/s',
        reference='torch',
    )
    for name, (width, bs) in SHAPES.items()
}


def build(workload: str, subject: str) -> Callable[[], float]:
    "Return a function that goes through the loader, once or more, and returns how many batches a second it gave."
    width, bs = SHAPES[workload]
    loader = LOADERS[subject](torch.randn(SAMPLES, width), torch.randint(10, (SAMPLES,)), bs)

    def once() -> float:
        began = time.process_time()
        n = 0
        while (spent_s := time.process_time() - began) < WINDOW_S:
            n += sum(1 for _ in loader)
        return n / spent_s

    return once


def main(argv: list[str] | None = None) -> int:
    "Measure what the command line asks for, print the tables, and return the exit status."
    return command_line('loader', __doc__, WORKLOADS, argv, rounds=7)


if __name__ == '__main__':
    sys.exit(main())
