"""Checkpoints of several processes: one file, from which any number of processes resumes."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import Callback, GradientAccumulation, Learner
from learnkit.callbacks import EMA, Checkpoint
from learnkit.checkpoint.digest import learn_digest
from tests.helpers.distributing import expect_interrupt, make_dls, make_learner, rows, weights
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


class Break(Callback):
    "Interrupt the run after `n` training batches in every process."

    order = 2000

    def __init__(self, n: int) -> None:
        self.n = n

    def batch_checkpoint(self) -> None:
        if self.learn.time.ba == self.n:
            raise KeyboardInterrupt


class Jitter(nn.Module):
    "Add noise from a generator of its own, which differs by process."

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = torch.Generator().manual_seed(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=self.rng, dtype=x.dtype)
        return x + noise if self.training else x


def make(
    path: Path, kind: str = 'tensors', bs: int = 4, cbs: Any = (), n: int = 101, **options: Any
) -> Learner:
    dls = make_dls(
        n, bs, kind.partition('-')[0], **({'num_workers': 1} if kind == 'torch-workers' else {})
    )
    return make_learner(
        dls, path, dropout=0.2, cbs=[Checkpoint(every='1ba', keep_last=None), *cbs], **options
    )


def train(
    path: Path,
    n_ranks: int = 2,
    broken_off: int | None = None,
    resume: Any = False,
    cbs: Any = (),
    **options: Any,
) -> list[dict[str, Any]]:
    "Train three epochs in `n_ranks` processes; return each digest, weights and history."

    def job(rank: int) -> dict[str, Any]:
        torch.manual_seed(rank + 5 if resume else 1)
        warnings.filterwarnings('ignore', message='There is a state for a callback `break`')
        more = [Break(broken_off)] if broken_off else []
        learn = make(path, cbs=[make_cb() for make_cb in cbs], **options)
        learn.model.noise = torch.Generator().manual_seed(rank)
        with (
            expect_interrupt() if broken_off else nullcontext(),
            learn.distributed('ddp', timeout='20s'),
            learn.added_cbs(more),
        ):
            learn.fit_one_cycle(3, 1e-2, resume=resume)
        return {
            'digest': learn_digest(learn),
            'weights': weights(learn),
            'rows': rows(learn),
            'drawn': torch.rand(3),
        }

    return run_ranks(job, n_ranks)


def add_noise(cb: Callback) -> None:
    "Draw from the generator of the model, which differs by rank."
    noise = torch.rand(cb.x.shape, generator=cb.model.noise)
    cb.learn.xb = (cb.x + noise,)


CASES: dict[str, dict[str, Any]] = {
    'workers': {'kind': 'torch-workers'},
    'four, accumulation': {'n_ranks': 4, 'cbs': (lambda: GradientAccumulation(50),)},
    'noise': {'cbs': (lambda: Callback(before_batch=add_noise),)},
    'ema': {'cbs': (lambda: GradientAccumulation(24), lambda: EMA(0.9))},
}


@pytest.mark.parametrize('case', CASES)
def test_an_interrupted_run_resumes_exactly(case: str, tmp_path: Path) -> None:
    expected = train(tmp_path / 'whole', **CASES[case])
    for n in (2, 17):
        train(tmp_path / f'{n}', broken_off=n, **CASES[case])
        again = train(tmp_path / f'{n}', resume=True, **CASES[case])
        for got, wanted in zip(again, expected, strict=True):
            assert torch.equal(got['weights'], wanted['weights'])
            assert got['rows'] == wanted['rows'] and torch.equal(got['drawn'], wanted['drawn'])
            assert got['digest'] == wanted['digest']
