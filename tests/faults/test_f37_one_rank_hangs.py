"""Row 37: one of two processes hangs. The other ends at the timeout and names it."""

from itertools import product
from time import sleep

import pytest

from learnkit import Callback
from tests.faults.fault_helpers import make_learner
from tests.faults.run_helpers import quiet
from tests.helpers.ranks import started_ranks


class Hangs(Callback):
    order = 70

    def __init__(self, event: str, how: str) -> None:
        self.event, self.how = event, how

    def run_event(self, event: str) -> None:
        if event != self.event or self.learn.train_iter < 1:
            return
        if self.how == 'sleeps':
            sleep(1000)
        while True:
            pass


def train(rank: int, who: int, event: str, how: str, timeout_s: float) -> None:
    learn = quiet(make_learner([Hangs(event, how)] if rank == who else []))
    with learn.distributed('ddp', timeout=timeout_s):
        learn.fit(2)


def other_ends(timeout_s: float, who: int, event: str, how: str) -> None:
    "Make one of two processes hang: the other ends, and names it."
    with started_ranks(train, 2, who, event, how, timeout_s) as children:
        hanging, other = children[who], children[1 - who]
        other.wait(timeout_s + 600)
        assert other.code == 1 and hanging.poll() is None, other.stderr
        told = f'DistributedError: Process {who} of 2 hangs, or was stopped, for {timeout_s:g} s: '
        assert told in other.stderr
        assert f'process {1 - who} waited in' in other.stderr
        assert '(epoch 0, batch ' in other.stderr


def test_one_hangs() -> None:
    other_ends(2, 1, 'after_loss', 'sleeps')


@pytest.mark.full
def test_hangs_at_several_places() -> None:
    events = 'after_draw before_pred before_backward after_step after_validate'.split()
    for who, how, event in product(range(2), ('sleeps', 'loops'), events):
        other_ends(5, who, event, how)
    print('row 37: 20 hangs with a timeout of 5 s: the other ended, and named the one that hangs')
