"""Loader positions: from any place of an epoch, the same batches and random numbers as without a stop."""

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from tests.helpers.positions import (
    BS,
    Eager,
    EpochCountSampler,
    N,
    OwnSeed,
    SetEpochSampler,
    check,
    loader,
    seeded_generator,
)

STOP_POINTS = [0, 1, 3, 'last', 'end']
NOISE = ['', 'torch', 'numpy', 'python', 'own', 'own python']


def weighted(seed: int, **options: Any) -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1.0, N + 1), N, **options)


SAMPLERS: dict[str, dict[str, Any]] = {
    'in order': {},
    'shuffle': {'shuffle': True},
    'shuffle, drop_last': {'shuffle': True, 'drop_last': True},
    'generator': {'shuffle': True, 'generator': seeded_generator},
    'weighted': {'sampler': weighted},
    'weighted, generator': {
        'sampler': lambda seed: weighted(seed, generator=seeded_generator(seed))
    },
    'replacement': {
        'sampler': lambda seed: RandomSampler(range(N), replacement=True, num_samples=90)
    },
    'replacement, generator': {
        'generator': seeded_generator,
        'sampler': lambda seed: RandomSampler(
            range(N), replacement=True, num_samples=90, generator=seeded_generator(seed)
        ),
    },
    'subset': {
        'sampler': lambda seed: SubsetRandomSampler(range(3, N), generator=seeded_generator(seed))
    },
    'seed of its own': {'sampler': OwnSeed},
    'counts epochs': {'sampler': lambda seed: EpochCountSampler()},
    'is told epochs': {'sampler': SetEpochSampler},
    'batch_sampler': {
        'batch_sampler': lambda seed: BatchSampler(RandomSampler(range(N)), BS, True)
    },
    'eager batch_sampler': {'batch_sampler': lambda seed: Eager()},
    'eager, generator': {'batch_sampler': lambda seed: Eager(), 'generator': seeded_generator},
    'a list of batches': {'batch_sampler': [[0, 1], [5], [3, 2, 4], [6, 7], [8, 9], [10]]},
    'no batches': {'batch_size': None, 'shuffle': True},
}


@pytest.mark.parametrize('sampler', SAMPLERS)
def test_every_sampler_in_this_process(sampler: str) -> None:
    check(loader(**SAMPLERS[sampler]), STOP_POINTS)


@pytest.mark.parametrize(
    ('sampler', 'noise'),
    [
        *[('shuffle', noise) for noise in NOISE],
        ('replacement, generator', 'own python'),
        ('seed of its own', 'python'),
    ],
)
def test_random_samples_in_this_process(sampler: str, noise: str) -> None:
    check(loader(noise, **SAMPLERS[sampler]), STOP_POINTS)


@pytest.mark.parametrize(
    ('sampler', 'epochs'),
    [
        ('generator', 1),
        ('seed of its own', 1),
        ('batch_sampler', 1),
        ('no batches', 1),
        *(pytest.param(sampler, 2, marks=pytest.mark.full) for sampler in SAMPLERS),
    ],
)
def test_every_sampler_with_workers(sampler: str, epochs: int) -> None:
    check(loader(workers=2, **SAMPLERS[sampler]), [3], epochs=epochs)


@pytest.mark.parametrize(
    'places', [[0, 'last', 'end'], pytest.param(STOP_POINTS, marks=pytest.mark.full)]
)
def test_every_place_with_workers(places: list[Any]) -> None:
    check(loader(workers=2, shuffle=True), places)


@pytest.mark.parametrize('noise', ['torch', 'numpy', 'own python'])
def test_random_samples_with_workers(noise: str) -> None:
    make = loader(noise, workers=2, shuffle=True)
    check(make, [1] if noise == 'torch' else [3], epochs=2 if noise == 'torch' else 1)
