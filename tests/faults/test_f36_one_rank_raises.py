"""Row 36: one of two processes raises, at every event. Both fail, and the other shows the first traceback."""

import pytest

from learnkit import Callback
from tests.faults.fault_helpers import FIT_EVENTS, make_learner
from tests.faults.run_helpers import quiet
from tests.helpers.ranks import started_ranks

FEW = ('before_draw', 'after_loss', 'after_eval', 'cleanup')


class Fails(Callback):
    order = 70

    def __init__(self, event: str) -> None:
        self.event = event

    def run_event(self, event: str) -> None:
        if event == self.event and (self.learn.train_iter or event.startswith('before_')):
            raise ValueError('planned')


def train(rank: int, who: int, event: str) -> None:
    learn = quiet(make_learner([Fails(event)] if rank == who else []))
    with learn.distributed('ddp', timeout=300):
        learn.fit(2, iteration=1)


def both_fail(event: str, who: int) -> None:
    with started_ranks(train, 2, who, event) as children:
        for child in children:
            child.wait(250)
        failed, other = children[who], children[1 - who]
        assert failed.code == other.code == 1, (failed.stderr, other.stderr)
        assert failed.stderr.rstrip().split('\n')[-2:] == other.stderr.rstrip().split('\n')[-2:]
        assert 'ValueError: planned' in failed.stderr and 'DistributedError' not in failed.stderr
        told = other.stderr.index(
            f'DistributedError: Process {who} of 2 failed in Fails.{event} (epoch '
        )
        assert other.stderr.index('ValueError: planned\nTraceback (most recent call last):') > told
        assert 'in run_event\n' in other.stderr[told:]


@pytest.mark.parametrize('event', FEW)
def test_at_some_events(event: str) -> None:
    both_fail(event, FEW.index(event) % 2)


@pytest.mark.full
def test_at_every_event() -> None:
    for event in FIT_EVENTS:
        for who in range(2):
            both_fail(event, who)
    print(
        f'row 36: {len(FIT_EVENTS)} events, in either process: both failed, with the first traceback'
    )
