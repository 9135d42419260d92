"""Replicas do not drift: tokens, clocks, line searches, sharded loaders, and ends of fits."""

from contextlib import nullcontext
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from learnkit import Callback, DataLoaders, GradientAccumulation, Learner, TensorLoader
from learnkit.callbacks import Checkpoint
from learnkit.core.errors import DistributedError
from learnkit.distributed import DistributedTraining
from tests.helpers.distributing import (
    compare,
    expect_interrupt,
    make_data,
    make_dls,
    make_learner,
    rows,
    weights,
)
from tests.helpers.learners import quiet_learner
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


class Reader(nn.Module):
    "A model that takes dicts and computes its loss."

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3).double()

    def forward(self, input_ids: Any, labels: Any) -> dict[str, Any]:
        logits = self.layer(input_ids)
        return {'loss': F.cross_entropy(logits, labels), 'logits': logits}


class Uneven(Callback):
    "Make each batch slower in the second process."

    order = 60

    def after_batch(self) -> None:
        if self.training:
            sleep(0.005 + 0.01 * self.world.rank)


def with_dicts(bs: int) -> Learner:
    train, valid = (
        [{'input_ids': x, 'labels': y} for x, y in zip(*make_data(n), strict=True)] for n in (51, 9)
    )
    dls = DataLoaders(DataLoader(train, bs), DataLoader(valid, bs), device='cpu')
    return quiet_learner(dls, Reader(), None, has_bar=False)


def test_tokens_are_counted_over_all_processes() -> None:
    compare(with_dicts, lambda learn: learn.fit(2))


def test_a_budget_of_tokens_ends_at_the_same_batch() -> None:
    def tokens(xb: Any, yb: Any) -> int:
        return int((yb[0] + 1).sum())

    make = lambda bs: make_learner(
        make_dls(101, bs), token_func=tokens, cbs=GradientAccumulation(24)
    )
    compare(make, lambda learn: learn.fit('301tok'))


def test_the_clock_continues_from_the_checkpoint(tmp_path: Path) -> None:
    class Broken(Callback):
        order = 2000

        def batch_checkpoint(self) -> None:
            if self.learn.time.ba == 18:
                raise KeyboardInterrupt

    def job(rank: int, resume: bool, path: Path) -> Any:
        learn = make_learner(
            make_dls(101, 4), path, cbs=[Checkpoint(every='0.1s', keep_last=None), Uneven()]
        )
        learn.add_cbs([] if resume else [Broken()])
        with (
            nullcontext() if resume else expect_interrupt(),
            learn.distributed('ddp', timeout='20s'),
        ):
            learn.fit(2, 1e-2, resume=resume)
        return weights(learn), rows(learn), learn.time.ba

    run_ranks(job, 2, False, tmp_path)
    for got, wanted in zip(
        run_ranks(job, 2, True, tmp_path), run_ranks(job, 2, True, tmp_path / 'none'), strict=True
    ):
        assert torch.equal(got[0], wanted[0]) and got[1:] == wanted[1:]


def test_loaders_with_their_own_shares_count_all_samples() -> None:
    x, y = make_data(48)

    def make(parts: list[slice], bs: list[int], rank: int) -> Learner:
        own = TensorLoader(x[parts[rank]], y[parts[rank]], bs=bs[rank], shuffle=False)
        return make_learner(
            DataLoaders(own, device='cpu'), cbs=GradientAccumulation(30), metrics=None
        )

    def job(rank: int) -> Any:
        learn = make([slice(0, 16), slice(16, 48)], [4, 8], rank)
        with learn.distributed('ddp', timeout='20s', sharded_already=True):
            learn.fit('150sp')
            learn.check_replicas()
        return weights(learn), learn.time.sp, learn.time.st

    order = torch.cat(
        [
            torch.cat([torch.arange(4 * i, 4 * i + 4), torch.arange(16 + 8 * i, 24 + 8 * i)])
            for i in range(4)
        ]
    )
    alone = make_learner(
        DataLoaders(TensorLoader(x[order], y[order], bs=12, shuffle=False), device='cpu'),
        cbs=GradientAccumulation(30),
        metrics=None,
    )
    alone.fit('150sp')
    for got, *counts in run_ranks(job):
        assert (got - weights(alone)).abs().max() < 1e-10
        assert counts == [alone.time.sp, alone.time.st]


def test_a_second_context_inside_the_first_is_refused_and_leaves_it() -> None:
    def job(rank: int) -> Any:
        learn = make_learner()
        with learn.distributed('ddp', timeout='20s'):
            with pytest.raises(DistributedError, match='already'), learn.distributed('ddp'):
                pass
            learn.fit(1)
            learn.check_replicas()
            inside = learn.world.size, len(learn.dls.train)
        return [
            *inside,
            learn.world.size,
            [cb for cb in learn.cbs if isinstance(cb, DistributedTraining)],
        ]

    assert run_ranks(job) == [[2, 7, 1, []]] * 2
