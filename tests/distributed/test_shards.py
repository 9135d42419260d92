"""Shards of loaders: together they yield the batches of one process once each, and resume from any batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from learnkit.core.batch import are_equal
from learnkit.core.random import capture_rng
from learnkit.distributed.shards import shard
from tests.helpers.positions import (
    EpochCountSampler,
    IndexByIndex,
    OwnSeed,
    SetEpochSampler,
    Stream,
)
from tests.helpers.resuming import scramble
from tests.helpers.shards import (
    Make,
    Together,
    batch_list,
    ids,
    items,
    make_by_kind,
    own_loader,
    rounds_of,
    tensors,
)

pytestmark = pytest.mark.dist

OTHERS = ('torch', 'numpy', 'python')


def alone(make: Make, epochs: int = 2, seed: int = 1) -> tuple[list[list[Any]], Any]:
    "Return the batches of one process, and the global generators after them."
    scramble(seed)
    dl = make(seed)
    return [[ids(b) for b in dl] for _ in range(epochs)], capture_rng()


KINDS = [
    'tensors',
    'tensors shuffled',
    'tensors, seed',
    'tensors, global',
    'items',
    'items shuffled',
    'items, generator',
    'items, global',
    'weighted',
]


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('size', [1, 2, 7])
def test_rounds_are_the_batches_of_one_process(kind: str, size: int) -> None:
    make = make_by_kind(kind)
    for n in {18, 3 * size, 3 * size + 1, 6 * size - 1, 20}:
        for batch_size, bs in (('process', 3 * size), ('global', 3)):
            for drop_last in (False, True):
                if drop_last and n < bs:
                    continue
                expected, rng = alone(
                    lambda s, n=n, bs=bs, d=drop_last: make(bs, drop_last=d)(s, n=n)
                )
                ranks = Together(
                    lambda s, n=n, d=drop_last: make(3, drop_last=d)(s, n=n),
                    size,
                    batch_size=batch_size,
                )
                found = [rounds_of(ranks, ranks.epoch()) for _ in range(2)]
                assert found == expected, (n, batch_size, drop_last)
                assert are_equal(ranks.rngs[0], rng), (n, batch_size, drop_last)


def test_a_process_without_a_sample_repeats_one_that_does_not_count() -> None:
    for make in (tensors, items):
        ranks = Together(lambda s, make=make: make(s, n=9), 2)
        assert ranks.epoch() == [[[0, 1, 2, 3], [8]], [[4, 5, 6, 7], [8]]]
        assert [dl.share(1) for dl in ranks.shards] == [(0, 1), (1, 1)]


@pytest.mark.parametrize('sampler', [OwnSeed, EpochCountSampler, SetEpochSampler, IndexByIndex])
@pytest.mark.parametrize('workers', [0, 2])
def test_user_samplers(sampler: Any, workers: int) -> None:
    def made(seed: int, n: int) -> Any:
        return sampler() if sampler in (EpochCountSampler, IndexByIndex) else sampler(seed)

    def make(bs: int) -> Make:
        return lambda seed: items(seed, bs=bs, num_workers=workers, sampler=made)

    expected, rng = alone(make(8))
    ranks = Together(make(4), 2)
    assert [rounds_of(ranks, ranks.epoch()) for _ in range(2)] == expected
    assert are_equal(ranks.rngs[0], rng)


# ------------------------------------------------------------------------------ loaders of any kind


@pytest.mark.parametrize(
    'make',
    [
        batch_list,
        own_loader,
        lambda s, n=22, bs=4: tuple(batch_list(s, n, bs)),
        lambda s, n=22, bs=4: DataLoader(Stream(s), bs),
        lambda s, n=22, bs=4: DataLoader(Stream(s, own=False), bs),
        lambda s, n=22, bs=4: DataLoader(Stream(s), bs, num_workers=2),
    ],
)
@pytest.mark.parametrize('size', [1, 3, 4])
def test_any_iterable(make: Make, size: int) -> None:
    if getattr(make(1), 'num_workers', 0) and size != 3:
        return  # which takes long
    expected, rng = alone(make)
    sized = not isinstance(make(1), DataLoader)
    for batch_size in ('process', 'global'):
        per = size if batch_size == 'process' else 1
        ranks = Together(make, size, batch_size=batch_size)
        for epoch in range(2):
            ranks.take_order()
            parts = ranks.each(lambda _, dl: [ids(b) for b in dl])
            found, lists = rounds_of(ranks, parts, sized=sized), expected[epoch]
            assert found == [
                list(chain.from_iterable(lists[i : i + per])) for i in range(0, len(lists), per)
            ]
        assert are_equal(ranks.rngs[0], rng)


def test_ends_of_any_iterable() -> None:
    shards = [shard([torch.tensor([i]) for i in range(5)], rank, 2) for rank in range(2)]
    assert [[b.item() for b in dl] for dl in shards] == [[0, 2, 4], [1, 3, 4]]
    assert [len(dl) for dl in shards] == [3, 3] and shards[1].share(2) == (0, 1)


def test_rows_of_any_batch() -> None:
    batch = {
        'x': torch.arange(5),
        'y': [{'a': i} for i in range(5)],
        'scale': torch.tensor(2.0),
        'name': 'text',
    }
    shards = [shard([batch], rank, 2, 'global') for rank in range(2)]
    found = [(b['x'].tolist(), [d['a'] for d in b['y']]) for dl in shards for b in dl]
    assert found == [([0, 1], [0, 1]), ([2, 3, 4], [2, 3, 4])]
    assert all(b['scale'] == 2 and b['name'] == 'text' for dl in shards for b in dl)


def test_iterators_are_drawn_from_and_no_further() -> None:
    wholes: list[Any] = [iter([torch.tensor([i]) for i in range(9)]) for _ in range(2)]
    shards = [shard(whole, rank, 2) for rank, whole in enumerate(wholes)]
    assert all(isinstance(dl, Iterator) and iter(dl) is dl for dl in shards)
    assert [[next(dl).item() for _ in range(2)] for dl in shards] == [[0, 2], [1, 3]]
    assert [next(whole).item() for whole in wholes] == [4, 4]
    with pytest.raises(TypeError, match='not known'):
        len(shards[0])
