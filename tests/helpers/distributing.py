"""Shared by tests of several processes: a small float64 training for one or many processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnkit import DataLoaders, Learner, accuracy
from learnkit.comm.ranks import SINGLE_RANK
from learnkit.core.errors import DistributedError
from tests.helpers.learners import quiet_learner
from tests.helpers.ranks import run_ranks


def make_data(n: int, seed: int = 1, classes: int = 3) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=g, dtype=torch.float64)
    return x, (x @ torch.randn(5, classes, generator=g, dtype=torch.float64)).argmax(1)


def make_dls(
    n: int = 104, bs: int = 8, kind: str = 'tensors', n_valid: int = 37, **options: Any
) -> DataLoaders:
    train, valid = make_data(n), make_data(n_valid, seed=2)
    if kind == 'tensors':
        return DataLoaders.from_tensors(train, valid, bs=bs, seed=3, device='cpu', **options)
    g = torch.Generator().manual_seed(3)
    return DataLoaders(
        DataLoader(TensorDataset(*train), bs, shuffle=True, generator=g, **options),
        DataLoader(TensorDataset(*valid), bs),
        device='cpu',
    )


def make_model(seed: int = 0, width: int = 16, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 3)
    ).double()


def make_learner(
    dls: DataLoaders | None = None, path: str | Path = '.', dropout: float = 0.0, **options: Any
) -> Learner:
    defaults = {
        'loss_func': F.cross_entropy,
        'opt_func': torch.optim.Adam,
        'lr': 1e-2,
        'metrics': accuracy,
    }
    return quiet_learner(
        dls or make_dls(),
        make_model(dropout=dropout),
        path=path,
        has_bar=False,
        **{**defaults, **options},
    )


def weights(learn: Learner) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in learn.model.parameters()])


def rows(learn: Learner) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != 'time'} for row in learn.history]


def same_rows(a: list[dict[str, Any]], b: list[dict[str, Any]], tolerance: float = 1e-10) -> bool:
    "Return True if histories are equal, floats within `tolerance`; `accuracy` is a float32 mean over batches."

    def same(k: str, v: Any, w: Any) -> bool:
        if not isinstance(v, float):
            return bool(v == w)
        return abs(v - w) <= (max(tolerance, 1e-8) if k == 'accuracy' else tolerance)

    return len(a) == len(b) and all(
        r.keys() == s.keys() and all(same(k, r[k], s[k]) for k in r)
        for r, s in zip(a, b, strict=True)
    )


@contextmanager
def expect_interrupt() -> Iterator[None]:
    "Expect a Ctrl-C in every process; a process may see the error of another process first."
    with pytest.raises((KeyboardInterrupt, DistributedError)) as e:
        yield
    assert 'KeyboardInterrupt' in repr(e.value)


def summarize_run(learn: Learner) -> dict[str, Any]:
    "Return the results of a training as plain values."
    return {
        'weights': weights(learn),
        'rows': rows(learn),
        'train_iter': learn.train_iter,
        'time': {k: v for k, v in learn.time.state_dict().items() if k not in ('sec', 'dur')},
        'losses': torch.tensor(learn.recorder.smooth_loss.smooth, dtype=torch.float64),
        'preds': learn.get_preds()[0],
    }


def compare(
    make: Callable[[int], Learner],  # by the batch size of the loaders
    fit: Callable[[Learner], Any],
    n: int = 2,
    tolerance: float = 1e-10,
    bs: int = 4,
    **options: Any,
) -> list[dict[str, Any]]:
    "Train in `n` processes, and in one process with `n` times the batch size; compare and return the results."

    def job(rank: int) -> dict[str, Any]:
        learn = make(bs if options.get('batch_size') != 'global' else n * bs)
        with learn.distributed('ddp', timeout='200s', **options):
            fit(learn)
            learn.check_replicas()
            res = summarize_run(learn)
        assert learn.world is SINGLE_RANK
        return res

    alone = make(n * bs)
    fit(alone)
    expected, ranks = summarize_run(alone), run_ranks(job, n)
    for got in ranks:
        assert (got['weights'] - expected['weights']).abs().max() < tolerance
        assert got['train_iter'] == expected['train_iter'] and got['time'] == expected['time']
        assert same_rows(got['rows'], expected['rows'], tolerance)
        assert (got['losses'] - expected['losses']).abs().max() < tolerance
        assert (got['preds'] - expected['preds']).abs().max() < tolerance
        assert torch.equal(got['weights'], ranks[0]['weights']) and got['rows'] == ranks[0]['rows']
    return ranks
