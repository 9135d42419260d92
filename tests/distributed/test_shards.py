"""Shards of loaders: together they yield the batches of one process once each, and resume from any batch."""

from typing import Any

import pytest

from learnkit.core.batch import are_equal
from tests.helpers.positions import EpochCountSampler, IndexByIndex, OwnSeed, SetEpochSampler
from tests.helpers.shards import Make, Together, alone, items, make_by_kind, rounds_of, tensors

pytestmark = pytest.mark.dist


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
