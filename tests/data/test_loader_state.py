"""State of loaders: a loader made alike gives the batches that come next."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
)

from learnkit import TensorLoader
from learnkit.data.loader_state import capture_loader_state, drop_seeds, restore_loader_state


class Rotating(Sampler[int]):
    "Begins each pass one sample later."

    n_passes = 0

    def __iter__(self) -> Iterator[int]:
        self.n_passes += 1
        return iter([(i + self.n_passes) % 5 for i in range(5)])


class Stage:
    "A stage of a pipeline, which shuffles by the number of its pass, as a stage of webdataset."

    def __init__(self, epoch: int = -1) -> None:
        self.epoch = epoch

    def run(self, source: list[int]) -> list[int]:
        self.epoch += 1
        return Random(self.epoch).sample(source, len(source))


class Pipeline(IterableDataset[int]):
    "A stream that runs stages in a list."

    def __init__(self) -> None:
        self.pipeline = [list(range(9)), Stage(), Stage(7)]

    def __iter__(self) -> Iterator[int]:
        source, *stages = self.pipeline
        for stage in stages:
            source = stage.run(source)
        return iter(source)


class Shared(IterableDataset[int]):
    "A stream that keeps the number of its next pass in shared memory, as Mosaic's data sets."

    def __init__(self) -> None:
        self._next_epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def next_epoch(self) -> int:
        return int(self._next_epoch)

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self._next_epoch.fill_(epoch)

    def __iter__(self) -> Iterator[int]:
        epoch = self.next_epoch
        self.next_epoch = epoch + 1
        return iter(Random(epoch).sample(range(9), 9))


class Counting(Dataset[int]):
    "A data set whose samples depend on the number of reads."

    def __init__(self) -> None:
        self.n_reads = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> int:
        self.n_reads += 1
        return 10 * i + self.n_reads


class Holding:
    "A loader that holds another one in an attribute."

    def __init__(self, source: DataLoader[int]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


class Seeded(Sampler[int]):
    "Shuffles in the same order each time."

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        return iter(Random(self.seed).sample(range(5), 5))


SEEDS = count()  # another one for each sampler


@pytest.mark.parametrize(
    'make',
    [
        lambda: DataLoader(range(5), sampler=Rotating()),
        lambda: DataLoader(Pipeline(), 3),
        lambda: DataLoader(Shared(), 3),
        lambda: Holding(DataLoader(range(5), sampler=Rotating())),
        lambda: DataLoader(range(5), sampler=Seeded(next(SEEDS))),
        lambda: DataLoader(ConcatDataset([Counting(), Counting()]), 2),
        lambda: DataLoader(range(5), shuffle=True, generator=torch.Generator()),
        lambda: DataLoader(range(5), sampler=DistributedSampler(range(5), 2, 0)),
        lambda: TensorLoader(torch.arange(9), bs=2, shuffle=True, seed=1),
    ],
)
def test_the_next_pass_is_as_of_the_saved_loader(make: Callable[[], Any], tmp_path: Path) -> None:
    dl, other = make(), make()
    capture_loader_state(dl), capture_loader_state(other)  # counts are compared with the first
    for epoch in range(3):
        getattr(getattr(dl, 'sampler', None), 'set_epoch', lambda n: None)(epoch)
        list(dl)
    torch.save(capture_loader_state(dl), tmp_path / 'a.pt')
    expected = repr(list(dl))
    assert restore_loader_state(other, torch.load(tmp_path / 'a.pt')) == []
    assert repr(list(other)) == expected


def test_another_rank_keeps_its_seed() -> None:
    dl, other = (DataLoader(range(5), sampler=Seeded(seed)) for seed in (1, 2))
    restore_loader_state(other, drop_seeds(capture_loader_state(dl)))
    assert list(other.sampler) == Random(2).sample(range(5), 5)
    restore_loader_state(other, capture_loader_state(dl))
    assert list(other.sampler) == Random(1).sample(range(5), 5)
