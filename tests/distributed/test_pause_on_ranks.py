"""Several processes pause at the same batch, and continue bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from learnkit import Callback
from learnkit.core.errors import FitError
from tests.faults.fault_helpers import digest, make_learner, rows, seed_torch
from tests.faults.run_helpers import torch_dls
from tests.helpers.fsdp import learner, state_values
from tests.helpers.ranks import started_ranks

pytestmark = pytest.mark.dist


def train(rank: int, how: str) -> list[Any]:
    learn = make_learner(dls=torch_dls(0, n_train=16))
    learn.remove_cb(learn.progress)
    learn.logger = lambda row: None
    seed_torch(5)

    def ask(cb: Any) -> None:
        if how == 'request' and rank == 1 and cb.training and cb.time.ba == 2:
            cb.learn.pause()

    paused_at = None
    with learn.distributed():
        learn.fit(2, cbs=Callback(after_loss=ask), pause_at='3ba' if how == 'time' else None)
        if learn.paused is not None:
            paused_at = learn.time.ba
            learn.validate()
            learn.resume()
    return [paused_at, digest(learn), rows(learn), learn.time.ba]


def train_sharded(rank: int, how: str) -> list[Any]:
    "Train with shards of the weights on every rank."
    learn = learner()
    torch.manual_seed(3)
    paused_at = None
    with learn.no_bar(), learn.no_logging(), learn.distributed('fsdp'):
        learn.fit(2, pause_at='3ba' if how == 'time' else None)
        if learn.paused is not None:
            paused_at = learn.time.ba
            learn.validate()
            learn.resume()
    return [paused_at, [t.tolist() for t in state_values(learn)], rows(learn), learn.time.ba]


@pytest.mark.parametrize('is_early', [False, True])
def test_an_error_on_ranks_is_refused(is_early: bool) -> None:
    with started_ranks(fail, 2, is_early) as children:
        for child in children:
            assert child.wait() == 0, child.stderr
        assert all('several processes' in child.result for child in children)


def fail(rank: int, is_early: bool) -> str:
    learn = make_learner(dls=torch_dls(0, n_train=16))
    learn.remove_cb(learn.progress)
    learn.logger = lambda row: None

    def raise_error(cb: Any) -> None:
        if rank == 1 and cb.training:
            raise ValueError('a bug')

    event = 'before_batch' if is_early else 'after_step'
    try:
        with learn.distributed():
            learn.fit(1, cbs=Callback(**{event: raise_error}))
    except Exception:
        assert learn.paused is None
    try:
        learn.resume()
    except FitError as e:
        return str(e)
    return 'resumed'


def run(how: str, train: Any = train) -> list[Any]:
    with started_ranks(train, 2, how) as children:
        for child in children:
            assert child.wait() == 0, child.stderr
        return [child.result for child in children]


@pytest.mark.parametrize(
    ('how', 'train'), [('time', train), ('request', train), ('time', train_sharded)]
)
def test_all_ranks_pause_at_the_same_batch(how: str, train: Any) -> None:
    straight, paused = run('straight', train), run(how, train)
    places = [result[0] for result in paused]
    assert places[0] == places[1] and places[0] is not None
    assert [result[1:] for result in paused] == [result[1:] for result in straight]
