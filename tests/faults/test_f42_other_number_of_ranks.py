"""Row 42: a run is resumed with another number of ranks. It ends with the weights of one process, or is refused."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler as Weighted,
)

from learnkit import Callback, DataLoaders, Learner, TensorLoader
from learnkit.callbacks import Checkpoint, GradientAccumulation
from learnkit.core.errors import CheckpointError
from tests.helpers.ranks import run_ranks, started_ranks

N, PER_STEP = 40, 8  # samples of an epoch, and of a step over all ranks
G = torch.Generator().manual_seed(1)
X = torch.randn(N, 5, generator=G)
X[:, 0] = torch.arange(N) / 10  # the number of the sample
ROWS = TensorDataset(X, (X.sum(1) > 0).long())


class Permuted(Sampler[int]):
    "Draws from a generator of NumPy, and counts its passes."

    def __init__(self) -> None:
        self.rng, self.n_passes = np.random.default_rng(4), 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        self.n_passes += 1
        yield from np.roll(self.rng.permutation(N), self.n_passes).tolist()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([ROWS[i] for i in torch.randperm(N)])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


WEIGHTS = torch.arange(1.0, N + 1)
LOADERS: dict[str, Callable[[int], Any]] = {
    'tensors': lambda bs: TensorLoader(*ROWS.tensors, bs=bs, shuffle=True, seed=3),
    'torch': lambda bs: DataLoader(ROWS, bs, shuffle=True),
    'generator': lambda bs: DataLoader(ROWS, bs, shuffle=True, generator=seeded()),
    'weighted': lambda bs: DataLoader(ROWS, bs, sampler=Weighted(WEIGHTS, N)),
    'weighted by a generator': lambda bs: DataLoader(
        ROWS, bs, sampler=Weighted(WEIGHTS, N, generator=seeded())
    ),
    'a sampler': lambda bs: DataLoader(ROWS, bs, sampler=Permuted()),
    'workers': lambda bs: DataLoader(ROWS, bs, shuffle=True, num_workers=1),
    'a list': lambda bs: list(DataLoader(ROWS, bs)),
    'a stream': lambda bs: DataLoader(Stream(), bs),
    'stateful': lambda bs: make_stateful(bs),
}


def make_stateful(bs: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # it calls a deprecated function of torch
        return StatefulDataLoader(ROWS, bs, shuffle=True)


def train(
    rank: int,
    folder: Path | None,
    kind: str,
    bs: int,
    n_batches: int = 1,  # batches of a step
    until: int | None = None,  # batch after which the process kills itself
    **options: Any,
) -> Any:
    "Train to the end or to the kill, and return the weights and the samples of this run's batches."
    warnings.filterwarnings('ignore', message='The checkpoint is of')
    seen: list[list[int]] = []

    def note(cb: Any) -> None:
        if cb.training:
            own = len(cb.x) if cb.world.size == 1 else cb.dl.share(cb.iter)[0]
            seen.append(cb.x[:own, 0].mul(10).round().int().tolist())

    def die(cb: Any) -> None:
        if cb.learn.time.ba == until:
            os.kill(os.getpid(), signal.SIGKILL)

    killer = Callback(batch_checkpoint=die)
    killer.order = 2000  # after the checkpoint
    cbs = [Callback(before_batch=note), killer, GradientAccumulation(PER_STEP)]
    if folder is not None:
        cbs.append(Checkpoint('1ba', folder))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2))
    dls = DataLoaders(LOADERS[kind](bs // n_batches), DataLoader(ROWS, 16), device='cpu')
    learn = Learner(dls, model, F.cross_entropy, torch.optim.AdamW, lr=1e-2, cbs=cbs)
    learn.remove_cb(learn.progress)
    learn.logger = lambda row: None
    with learn.distributed(options.pop('strategy', 'ddp'), timeout='300s', **options):
        try:
            learn.fit(3, resume=folder is not None)
        except CheckpointError as e:
            return str(e)
        weights = learn.model.state_dict().values()
        full = [getattr(w, 'full_tensor', lambda w=w: w)().detach().reshape(-1) for w in weights]
    return torch.cat(full), seen


def compare(
    folder: Path, before: int, after: int, kind: str, until: int, n_batches: int = 1, **options: Any
) -> float:
    "Kill ranks, resume with others, check the samples, and return the largest difference of a weight."
    expected, order = run_ranks(lambda r: train(r, None, kind, PER_STEP, n_batches), 1)[0]

    def job(rank: int, n: int, until: int | None) -> Any:
        return train(rank, folder, kind, PER_STEP // n, n_batches, until, **options)

    with started_ranks(job, before, before, until) as children:
        while all(child.poll() is None for child in children):
            time.sleep(0.01)
        assert -signal.SIGKILL in [child.poll() for child in children]
    results = run_ranks(job, after, after, None)
    n_resumed = len(results[0][1])
    batches = zip(*(seen for _, seen in results), strict=True)
    found = [sorted(itertools.chain(*parts)) for parts in batches]
    per_step = list(map(sorted, order))[-n_resumed:]
    assert found == per_step and 0 < n_resumed < len(order)
    difference: Tensor = (results[0][0] - expected).abs().max()
    return difference.item()


@pytest.mark.parametrize(
    ('before', 'after', 'kind', 'n_batches'),
    [(2, 1, 'generator', 2), (1, 2, 'torch', 1), (2, 1, 'a sampler', 1), (1, 2, 'stateful', 2)],
)
def test_it_ends_as_one_process(
    before: int, after: int, kind: str, n_batches: int, tmp_path: Path
) -> None:
    assert compare(tmp_path, before, after, kind, 7, n_batches) < 1e-6


def test_shards_of_another_number(tmp_path: Path) -> None:
    assert compare(tmp_path, 2, 1, 'generator', 7, strategy='fsdp') < 1e-6


def test_batches_of_another_size_are_refused(tmp_path: Path) -> None:
    with started_ranks(train, 1, tmp_path, 'tensors', 8, 1, 3) as (child,):
        child.wait(300)
    (text,) = run_ranks(train, 1, tmp_path, 'tensors', 4)
    assert 'batch size' in text and '8' in text and '4' in text


@pytest.mark.full
@pytest.mark.parametrize('strategy', ['ddp', 'fsdp'])
def test_every_pair_and_loader(strategy: str, tmp_path: Path) -> None:
    rng, n_kills, largest = random.Random(0), 0, 0.0
    pairs = list(itertools.product((1, 2, 4), repeat=2))
    kinds = LOADERS if strategy == 'ddp' else ['tensors', 'generator']
    for (before, after), kind in itertools.product(pairs, kinds):
        n_batches = rng.choice([1, 2])
        until = rng.randrange(2, 14 * n_batches)
        path = tmp_path / str(n_kills)
        difference = compare(path, before, after, kind, until, n_batches, strategy=strategy)
        n_kills += 1
        largest = max(largest, difference)
        assert difference < 1e-6, (before, after, kind, until, n_batches)
    print(
        f'row 42: {n_kills} kills from and to 1, 2 and 4 processes ({strategy}), '
        f'largest difference of a weight {largest:.1e}'
    )
