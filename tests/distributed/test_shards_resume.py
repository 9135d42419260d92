"""Shards of loaders resume from any batch, with the same or another number of processes."""

import io
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from learnkit import TensorLoader
from learnkit.core.errors import CheckpointError
from learnkit.core.random import capture_rng, restore_rng
from learnkit.data.position import LoaderPosition, check_position
from tests.helpers.positions import (
    EpochCountSampler,
    IndexByIndex,
    Items,
    OwnSeed,
    Stream,
    draw_from_global_generators,
)
from tests.helpers.shards import Make, Together, batch_list, ids, make_by_kind, own_loader

pytestmark = pytest.mark.dist

Saved = dict[int, bytes]


def values(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else ids(batch)


def pass_over(drawing: LoaderPosition, n: int = 0) -> tuple[list[Any], Saved]:
    "Draw the rest of an epoch, with other random draws between batches; return it, and checkpoints."
    seen, saved = [], {}
    for batch in drawing.begin():
        n += 1
        draw_from_global_generators()
        seen.append(
            (
                values(batch),
                getattr(drawing.dl, 'share', lambda i: None)(n - 1),
                torch.rand(1).item(),
            )
        )
        file = io.BytesIO()
        torch.save({'position': drawing.state_dict(n), 'rng': capture_rng()}, file)
        saved[n] = file.getvalue()
    return seen, saved


def loaded(saved: bytes) -> Any:
    return torch.load(io.BytesIO(saved), weights_only=True)


def resume_epoch(dl: Any, saved: bytes) -> tuple[list[Any], Saved]:
    state = loaded(saved)
    restore_rng(state['rng'])
    return pass_over(LoaderPosition.resume(dl, state['position']), state['position']['n'])


def check(make: Make, size: int = 2, batch_size: str = 'process', places: Any = None) -> None:
    "Compare the rest of the second epoch, and the third, with uninterrupted processes."
    ranks = Together(make, size, batch_size=batch_size)
    epochs = []
    for _ in range(3):
        ranks.take_order()
        epochs.append(ranks.each(lambda _, dl: pass_over(LoaderPosition(dl))))
    for n in places or sorted({1, 2, len(epochs[1][0][0]) - 1, len(epochs[1][0][0])}):
        anew = Together(make, size, seed=7, batch_size=batch_size)
        anew.take_order()
        rest = anew.each(lambda r, dl, n=n: resume_epoch(dl, epochs[1][r][1][n])[0])
        assert rest == [seen[n:] for seen, _ in epochs[1]], n
        anew.take_order()
        assert anew.each(lambda _, dl: pass_over(LoaderPosition(dl))[0]) == [
            seen for seen, _ in epochs[2]
        ], n


LOADERS: dict[str, Make] = {
    **{
        kind: make_by_kind(kind)(3)
        for kind in (
            'tensors',
            'tensors shuffled',
            'tensors, global',
            'items shuffled',
            'items, generator',
            'items, global',
            'weighted',
        )
    },
    'noise': lambda s: DataLoader(Items('torch'), 3, shuffle=True),
    'own noise': lambda s: DataLoader(Items('own', s), 3, shuffle=True),
    'own seed': lambda s: DataLoader(Items(), 3, sampler=OwnSeed(s)),
    'counting': lambda s: DataLoader(Items(), 3, sampler=EpochCountSampler()),
    'index by index': lambda s: DataLoader(Items(), 3, sampler=IndexByIndex()),
    'list': lambda s: batch_list(s, bs=3),
    'any': lambda s: own_loader(s, bs=3),
    'stream': lambda s: DataLoader(Stream(s), 3),
    'stream, global': lambda s: DataLoader(Stream(s, own=False), 3),
}


@pytest.mark.parametrize('kind', LOADERS)
@pytest.mark.parametrize('batch_size', ['process', 'global'])
def test_resume_from_any_batch(kind: str, batch_size: str) -> None:
    check(LOADERS[kind], batch_size=batch_size)


@pytest.mark.parametrize('persistent', [False, True])
def test_resume_with_workers(persistent: bool) -> None:
    options = {'num_workers': 2, 'persistent_workers': persistent}
    check(lambda s: make_by_kind('items, generator')(4)(s, **options), places=[1, 3])


# ---------------------------------------------------------------------- another number of processes

CHANGES = [(2, 'process', 4), (2, 'global', 8), (4, 'process', 2)]
ONE = [
    'tensors shuffled',
    'tensors, global',
    'items shuffled',
    'items, generator',
    'items, global',
    'weighted',
]


@pytest.mark.parametrize('kind', ONE)
@pytest.mark.parametrize('workers', [0, pytest.param(2, marks=pytest.mark.full)])
def test_two_processes_become_one_and_one_becomes_two_or_four(kind: str, workers: int) -> None:
    if workers and kind != 'items shuffled':
        return
    options = {'num_workers': workers} if workers else {}

    def made(bs: int) -> Make:
        return lambda s: make_by_kind(kind)(bs)(s, n=44, **options)

    runs: list[tuple[Any, Any, Any]] = []
    for size, batch_size, bs in [(1, 'alone', 8), *CHANGES[: 1 if workers else None]]:
        ranks = together(made(bs), size, batch_size)
        for _ in range(2):
            if batch_size != 'alone':
                ranks.take_order()
            parts = ranks.each(lambda _, dl: pass_over(LoaderPosition(dl)))
        runs.append(((size, batch_size, bs), parts, joined([p for p, _ in parts])))
    for (_, was, _), parts, rounds in runs:
        assert sorted(chain.from_iterable(rounds)) == list(range(44)) or kind == 'weighted'
        for (size, batch_size, bs), *_ in runs:
            for n in (2, 5):
                ranks = together(made(bs), size, batch_size, 9)
                rest = ranks.each(
                    lambda r, dl, n=n, parts=parts: resume_epoch(
                        dl, parts[min(r, len(parts) - 1)][1][n]
                    )[0]
                )
                assert joined(rest) == rounds[n:], (was, batch_size, n)


def together(make: Make, size: int, batch_size: str, seed: int = 1) -> Together:
    ranks = Together(
        make, size, seed, batch_size='process' if batch_size == 'alone' else batch_size
    )
    if batch_size == 'alone':
        ranks.shards = ranks.wholes
    return ranks


def joined(parts: list[list[Any]]) -> list[list[int]]:
    "Join the processes' parts of each round."
    numbers = [[[int(i[0]) if isinstance(i, list) else i for i in b] for b, *_ in p] for p in parts]
    counts = [[share is None or share[0] > 0 for _, share, _ in p] for p in parts]
    return [
        list(chain.from_iterable(b for b, k in zip(bs, ks, strict=True) if k))
        for bs, ks in zip(zip(*numbers, strict=True), zip(*counts, strict=True), strict=True)
    ]


def test_other_numbers_are_refused_with_what_they_are() -> None:
    ranks = Together(lambda s: TensorLoader(torch.arange(64), bs=8), 2)
    drawing = LoaderPosition(ranks.shards[0])
    next(drawing.begin())
    state = drawing.state_dict(1)
    with pytest.raises(CheckpointError, match='batches 4, now 8; batch size 16, now 8'):
        check_position(TensorLoader(torch.arange(64), bs=8), state)
    with pytest.raises(CheckpointError, match='batch size 16, now 32'):
        check_position(Together(lambda s: TensorLoader(torch.arange(64), bs=8), 4).shards[0], state)
    check_position(TensorLoader(torch.arange(64), bs=16), state)
