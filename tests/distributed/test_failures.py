"""Failures over ranks: what a failing rank publishes, and the error of each other rank."""

import threading
import time
from typing import Any

import pytest

from learnkit import Callback
from learnkit.distributed.failures import is_lost
from tests.helpers.distributing import make_dls, make_learner
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist

TIMEOUT_S = 2.0


def fit(rank: int, who: int, event: str, do: Any, timeout: float = 200.0) -> tuple[str, float, int]:
    "Train, and act at an event of one rank; return the error, its seconds, and the remaining threads."

    def act(cb: Any) -> None:
        if cb.world.rank == who and cb.train_iter == 3:
            do(cb)

    learn = make_learner(make_dls(101, 4), cbs=Callback(**{event: act}))
    before, began, error = threading.active_count(), time.monotonic(), ''
    try:
        with learn.distributed('ddp', timeout=timeout):
            learn.fit(2)
    except BaseException as e:
        error = f'{type(e).__name__}: {e}'
    return error, time.monotonic() - began, threading.active_count() - before


def test_ranks_that_wait_for_one_another_in_different_places_name_them() -> None:
    def ask(cb: Any) -> None:
        cb.world.gather('mine')

    for error, took_s, _ in run_ranks(fit, 2, 1, 'before_batch', ask, TIMEOUT_S):
        assert error.startswith(
            'DistributedError: The 2 processes waited for one another: process 0 waited in'
        )
        assert 'process 1 waited in Callback(before_batch=' in error and 'self.world.any(' in error
        assert took_s < TIMEOUT_S + 150


def test_errors_of_another_rank_are_distinguished_from_local_ones() -> None:
    lost = RuntimeError(
        '[x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1'
    )
    outer = ValueError('of my own')
    outer.__context__ = lost
    errors = (lost, outer, ValueError('x'), KeyboardInterrupt(), None)
    assert [is_lost(e) for e in errors] == [True, True, False, False, False]
