"""Loaders of torch in the order of their data set: options, samplers, and loaders that stay as they are."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from learnkit.data.dataloaders import TensorLoader, make_unshuffled

X, Y = torch.arange(20.0).view(10, 2), torch.arange(10)


BATCHES = [(X[:5], Y[:5]), (X[5:], Y[5:])]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


class Endless:
    "A user's loader without a length."

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield BATCHES[0]


class FastaiLike:
    "A loader like fastai's, with a method `new` that copies it with other options."

    def __init__(self, shuffle: bool = True, drop_last: bool = True):
        self.shuffle, self.drop_last = shuffle, drop_last

    def __iter__(self) -> Iterator[Any]:
        return iter(BATCHES)

    def new(self, **options: Any) -> 'FastaiLike':
        return FastaiLike(**options)


def targets(loader: Any) -> list[int]:
    return [int(i) for _, y in loader for i in y]


def test_in_order_undoes_shuffling_and_dropping() -> None:
    ds = TensorDataset(X, Y)
    for loader in (
        DataLoader(ds, 4, shuffle=True, drop_last=True),
        DataLoader(ds, 4, drop_last=True),
        DataLoader(ds, 4, shuffle=True),
        TensorLoader(X, Y, bs=4, shuffle=True, drop_last=True),
    ):
        ordered: Any = make_unshuffled(loader)
        assert targets(ordered) == list(range(10)) and len(ordered) == 3
        assert make_unshuffled(ordered) is ordered
    other = make_unshuffled(FastaiLike())
    assert (other.shuffle, other.drop_last) == (False, False)


def test_in_order_keeps_the_loaders_options() -> None:
    def collate(samples: list[Any]) -> list[int]:
        return [int(y) for _, y in samples]

    g = torch.Generator().manual_seed(1)
    loader = DataLoader(
        TensorDataset(X, Y),
        4,
        shuffle=True,
        collate_fn=collate,
        num_workers=2,
        timeout=5,
        generator=g,
        multiprocessing_context='fork',
        prefetch_factor=3,
        persistent_workers=True,
    )
    ordered = make_unshuffled(loader)
    assert ordered.collate_fn == collate
    assert (ordered.num_workers, ordered.timeout, ordered.prefetch_factor) == (2, 5, 3)
    state = g.get_state()
    shuffled = DataLoader(loader.dataset, 4, shuffle=True, collate_fn=collate, generator=g)
    assert list(make_unshuffled(shuffled)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert torch.equal(g.get_state(), state)  # the training order is as it would have been


def test_in_order_keeps_samplers_that_choose() -> None:
    ds = TensorDataset(X, Y)
    weighted = WeightedRandomSampler([1.0] + [0.0] * 9, 7)
    loader = make_unshuffled(DataLoader(ds, 4, sampler=weighted, drop_last=True))
    assert loader.sampler is weighted and targets(loader) == [0] * 7
    kept = DataLoader(ds, 4, sampler=weighted)
    assert make_unshuffled(kept) is kept


def test_in_order_returns_what_cannot_be_recreated() -> None:
    ds = TensorDataset(X, Y)
    for loader in (
        BATCHES,
        Endless(),
        DataLoader(Stream(), 4, drop_last=True),
        DataLoader(ds, 4),
        DataLoader(ds, batch_sampler=BatchSampler(SequentialSampler(ds), 3, drop_last=True)),
    ):
        assert make_unshuffled(loader) is loader
