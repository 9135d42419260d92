"""Row 42: a killed run is resumed with another number of ranks. It ends as one process would, or is refused."""

import os
import signal
import warnings
from collections.abc import Iterator
from functools import cache, partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from learnkit import Callback, DataLoaders, GradientAccumulation, TensorLoader
from learnkit.callbacks import Checkpoint
from learnkit.core.errors import CheckpointError
from tests.faults.fault_helpers import others_in_full
from tests.helpers.distributing import make_data, make_learner
from tests.helpers.ranks import run_ranks, started_ranks

pytestmark = pytest.mark.dist

N, STEP, EPOCHS = 37, 8, 3  # samples of an epoch and of a step; five steps an epoch
X, Y = make_data(N)
DATA = list(zip(X, Y, strict=True))


def shuffled(bs: int, **options: Any) -> Any:
    return DataLoader(DATA, bs, shuffle=True, **options)


def by_generator(bs: int, **options: Any) -> Any:
    return shuffled(bs, generator=torch.Generator().manual_seed(3), **options)


def weighted(bs: int) -> Any:
    return DataLoader(DATA, bs, sampler=WeightedRandomSampler(torch.arange(1.0, N + 1), N))


def batches(bs: int) -> Any:
    rng = torch.Generator().manual_seed(3)
    return DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA, generator=rng), bs, False)
    )


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
        return iter([DATA[i] for i in torch.randperm(N)])


def stateful(bs: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # it calls a deprecated function of torch
        return StatefulDataLoader(DATA, bs, shuffle=True)


LOADERS: dict[str, Any] = {
    'tensors': lambda bs: TensorLoader(X, Y, bs=bs, shuffle=True),
    'tensors, seed': lambda bs: TensorLoader(X, Y, bs=bs, shuffle=True, seed=3),
    'torch': shuffled,
    'torch, generator': by_generator,
    'weighted': weighted,
    'batch sampler': batches,
    'workers': partial(by_generator, num_workers=1),
    'sampler': lambda bs: DataLoader(DATA, bs, sampler=Permuted()),
    'list': lambda bs: list(DataLoader(DATA, bs)),
    'stream': lambda bs: DataLoader(Stream(), bs),
    'stateful': stateful,
}
OF_ONE_SIZE = ('batch sampler', 'list', 'stream', 'stateful')  # batches cannot change their size


def train(
    rank: int,
    kind: str,
    n: int,  # number of ranks
    accumulated: int = 1,  # batches of a step
    folder: Path | None = None,  # of the checkpoints
    until: int | None = None,  # batch after which all ranks are killed
    bs: int = 0,  # batch size, if not of equal steps
    every: str = '1ba',
    strategy: str = 'ddp',
    **options: Any,  # of `learn.distributed`
) -> Any:
    "Train; return the numbers of the samples of each batch on this rank and the weights, or an error's message."
    warnings.filterwarnings('ignore', message='The checkpoint is of')
    seen: list[list[int]] = []
    numbers = {float(x): i for i, x in enumerate(X[:, 0])}

    def note(cb: Any) -> None:
        if cb.training:
            own = cb.dl.share(cb.iter)[0] if hasattr(cb.dl, 'share') else len(cb.x)
            seen.append([numbers[float(x)] for x in cb.x[:own, 0]])

    def kill(cb: Any) -> None:
        if cb.learn.time.ba == until:
            os.kill(os.getpid(), signal.SIGKILL)

    late = Callback(batch_checkpoint=kill)
    late.order = 2000  # after the checkpoint was written
    cbs = [Callback(before_batch=note), late, GradientAccumulation(STEP)]
    if folder is not None:
        cbs.append(Checkpoint(every, folder, background=False))
    shares = 1 if options.get('batch_size') == 'global' else n
    learn = make_learner(
        DataLoaders(LOADERS[kind](bs or STEP // shares // accumulated), device='cpu'), cbs=cbs
    )
    torch.manual_seed(rank if until or folder is None else rank + 50)
    with learn.distributed(strategy, timeout='300s', **options):
        try:
            learn.fit(EPOCHS, resume=folder is not None)
        except CheckpointError as e:
            return str(e)
        parameters = [p.detach() for p in learn.model.parameters()]
        full = [p.full_tensor() if hasattr(p, 'full_tensor') else p for p in parameters]
        return seen, torch.cat([p.reshape(-1) for p in full])


@cache
def unbroken(kind: str) -> tuple[list[int], Any]:
    "Return the samples in their order, and the weights, of one process that is not killed."
    [(seen, trained)] = run_ranks(train, 1, kind, 1)
    return list(chain.from_iterable(seen)), trained


def kill(n: int, kind: str, folder: Path, **options: Any) -> None:
    "Train in `n` processes that kill themselves."

    def job(rank: int) -> None:
        train(rank, kind, n, folder=folder, **options)

    with started_ranks(job, n) as children:
        codes = [child.wait(300.0) for child in children]
    assert codes == [-signal.SIGKILL] * n


def check(
    kind: str,
    before: int,  # number of ranks of the killed run
    after: int,  # number of ranks of the resumed run
    accumulated: tuple[int, int],  # batches of a step of both
    until: int,  # batch after which the first run is killed
    folder: Path,
    **options: Any,
) -> None:
    "Kill a run after a batch, and resume it: the rest is that of one process."
    kill(before, kind, folder, accumulated=accumulated[0], until=until, **options)
    job = partial(train, kind=kind, n=after, accumulated=accumulated[1], folder=folder, **options)
    ranks = run_ranks(job, after)
    expected, trained = unbroken(kind)
    rounds = zip(*(seen for seen, _ in ranks), strict=True)
    samples = list(chain.from_iterable(chain.from_iterable(rounds)))
    epochs, n_drawn = divmod(until, -(-N * accumulated[0] // STEP))
    assert samples == expected[epochs * N + n_drawn * STEP // accumulated[0] :]
    for _, w in ranks:
        assert (w - trained).abs().max() < 1e-6


PAIRS = list(product((1, 2, 4), repeat=2))
SOME = [
    ('torch, generator', 1, 2, (1, 1), 4),
    ('weighted', 2, 1, (2, 2), 13),  # between two batches of a step
    ('tensors', 2, 1, (1, 2), 7),
    ('torch', 1, 2, (2, 1), 14),
    ('stateful', 1, 2, (1, 1), 7),
]
OTHERS = [
    (kind, *pair, accumulated, 9 * accumulated[0] - (accumulated == (2, 2)))
    for kind in LOADERS
    for pair in PAIRS
    for accumulated in ((1, 1), (2, 2), (1, 2), (2, 1))
    if kind != 'workers' or accumulated == (1, 1)
    if kind not in OF_ONE_SIZE or accumulated[0] == accumulated[1]
]


@pytest.mark.parametrize(
    ('kind', 'before', 'after', 'accumulated', 'until'),
    others_in_full([*SOME, *OTHERS], lambda *case: case in SOME),
)
def test_the_rest_is_that_of_one_process(
    kind: str, before: int, after: int, accumulated: tuple[int, int], until: int, tmp_path: Path
) -> None:
    check(kind, before, after, accumulated, until, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize('pair', PAIRS)
@pytest.mark.parametrize('options', [{'strategy': 'fsdp'}, {'batch_size': 'global'}])
def test_shards_and_batches_of_all_ranks(
    pair: tuple[int, int], options: dict[str, Any], tmp_path: Path
) -> None:
    check('torch, generator', *pair, (2, 2), 13, tmp_path, **options)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    'other steps': ({'until': 3}, {'bs': 3}, 'batches 5, now 13; batch size 8, now 3'),
    'within a batch': ({'until': 3, 'accumulated': 2}, {}, 'after 3 batches of 4 samples, within'),
    'within a step': ({'until': 2, 'accumulated': 4}, {'accumulated': 2}, 'batches of one step'),
    'own data': ({'until': 3, 'sharded_already': True}, {}, 'epoch of 2 processes, now 1'),
}


@pytest.mark.parametrize('case', REFUSED)
def test_what_differs_is_refused_before_the_first_batch(case: str, tmp_path: Path) -> None:
    first, then, message = REFUSED[case]
    kill(2, 'torch', tmp_path, **first)
    [text] = run_ranks(lambda rank: train(rank, 'torch', 1, folder=tmp_path, **then), 1)
    assert message in text
