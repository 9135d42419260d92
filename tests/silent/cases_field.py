"""Cases of what data libraries give and keep: batches with rows, seeds, and passes that are started early."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from learnkit import DataLoaders, Learner
from learnkit.data.position import LoaderPosition
from tests.helpers.rows import Rows
from tests.silent.cases import case


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@case(
    'field',
    'weight after one step on a mapping that iterates over its rows, as a TensorDict',
    old='IndexError: tuple index out of range',
    tolerance=1e-6,
)
def train_on_rows() -> tuple[Any, Any]:
    x = torch.tensor([1.0, 2.0, 3.0])
    with TemporaryDirectory() as folder:
        dls = DataLoaders([Rows(x=x, y=torch.zeros(3))], path=Path(folder), device='cpu')
        learn = Learner(dls, Linear(), nn.MSELoss(), opt_func=torch.optim.SGD, lr=0.1)
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
    return learn.model.weight.item(), 1 - 0.1 * 2 * float((x * x).mean())


class Seeded(Sampler[int]):
    "Shuffles by a seed that is drawn when it is made."

    def __init__(self, seed: int) -> None:
        self.initial_seed = seed

    def __iter__(self) -> Iterator[int]:
        return iter(Random(self.initial_seed).sample(range(6), 6))


class Wrapper:
    "Holds torch's loader in an attribute, as accelerate's."

    def __init__(self, seed: int) -> None:
        self.base_dataloader = DataLoader(range(6), 2, sampler=Seeded(seed))

    def __iter__(self) -> Iterator[Any]:
        yield from self.base_dataloader


@case(
    'field',
    'the rest of an epoch by a seed that was drawn when the sampler was made',
    old='[0, 4, 5, 3]',
)
def resume_seed() -> tuple[Any, Any]:
    position = LoaderPosition(Wrapper(3))
    next(position.begin())
    rest = LoaderPosition.resume(Wrapper(4), position.state_dict(1)).begin()
    return [i for batch in rest for i in batch.tolist()], Random(3).sample(range(6), 6)[2:]
