"""Shards of loaders that are not read by index: parts of rounds, and rows of batches."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from learnkit.core.batch import are_equal
from learnkit.distributed.shards import shard
from tests.helpers.positions import Stream
from tests.helpers.shards import Make, Together, alone, batch_list, ids, own_loader, rounds_of

pytestmark = pytest.mark.dist


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
