"""Row 37: one of two processes hangs. Both end at the timeout, and say which one, where, and with its stack."""
from __future__ import annotations

from time import monotonic, sleep

import pytest
from fault_helpers import make_learner
from run_helpers import quiet

from learnkit import Callback
from tests.ranks import started_ranks


class Hangs(Callback):
    order = 70

    def __init__(self, event: str, how: str) -> None: self.event, self.how = event, how

    def run_event(self, event: str) -> None:
        if event != self.event or self.learn.train_iter < 1: return
        if self.how == 'sleeps': sleep(1000)
        while True: pass


def train(rank: int, who: int, event: str, how: str, timeout_s: float) -> None:
    learn = quiet(make_learner([Hangs(event, how)] if rank == who else []))
    with learn.distributed('ddp', timeout=timeout_s): learn.fit(2)


def both_end(who: int, event: str, how: str, timeout_s: float) -> float:
    began, where = monotonic(), f'Process {who} of 2 has been in {event} of Hangs (epoch 0, batch '
    with started_ranks(train, 2, who, event, how, timeout_s) as children:
        for child in children: child.wait(timeout_s + 20)
        took_s = monotonic() - began
        for child in children:
            assert child.code == 1, child.stderr
            assert f'DistributedError: {where}' in child.stderr
            assert f's, while process {1 - who} waits for it in ' in child.stderr and 'in run_event\n' in child.stderr
        assert children[0].stderr.startswith(where)
    return took_s


def test_one_hangs() -> None:
    assert both_end(1, 'after_loss', 'sleeps', timeout_s=2) < 2 + 4


def test_the_first_hangs() -> None:
    assert both_end(0, 'after_batch', 'loops', timeout_s=2) < 2 + 4


@pytest.mark.full
def test_hangs_at_several_places() -> None:
    took_s = [both_end(who, event, how, timeout_s=5) for who in range(2) for how in ('sleeps', 'loops')
              for event in ('after_draw', 'before_pred', 'before_backward', 'after_step', 'after_validate')]
    print(f'row 37: {len(took_s)} hangs with a timeout of 5 s: both ended after {max(took_s):.1f} s at most')
    assert max(took_s) < 5 + 3
