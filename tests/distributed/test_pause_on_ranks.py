"""Several processes pause at the same batch, and continue bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from learnkit import Callback
from tests.faults.fault_helpers import digest, make_learner, rows, seed_torch
from tests.faults.run_helpers import torch_dls
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


def run(how: str) -> list[Any]:
    with started_ranks(train, 2, how) as children:
        for child in children:
            assert child.wait() == 0, child.stderr
        return [child.result for child in children]


@pytest.mark.parametrize('how', ['time', 'request'])
def test_all_ranks_pause_at_the_same_batch(how: str) -> None:
    straight, paused = run('straight'), run(how)
    places = [result[0] for result in paused]
    assert places[0] == places[1] and places[0] is not None
    assert [result[1:] for result in paused] == [result[1:] for result in straight]
