"""Row 37: one of two processes hangs. The other ends at the timeout and names it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep

import pytest

from learnkit import Callback
from tests.faults.fault_helpers import make_learner
from tests.faults.run_helpers import quiet
from tests.helpers.ranks import started_ranks

ROOT = Path(__file__).resolve().parents[2]


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


def others_end(timeout_s: float, *hangs: tuple[int, str, str]) -> float:
    "Make one of two processes hang, in several pairs at a time; return the seconds until the others ended."
    began = monotonic()
    with ExitStack() as stack:
        pairs = [stack.enter_context(started_ranks(train, 2, *hang, timeout_s)) for hang in hangs]
        for children, (who, _, _) in zip(pairs, hangs, strict=True):
            hanging, other = children[who], children[1 - who]
            other.wait(timeout_s + 600)
            took_s = monotonic() - began
            assert other.code == 1 and hanging.poll() is None, other.stderr
            assert (
                f'DistributedError: Process {who} of 2 hangs, or was stopped, for {timeout_s:g} s: '
                in other.stderr
            )
            assert f'process {1 - who} waited in' in other.stderr
            assert '(epoch 0, batch ' in other.stderr
    return took_s


def test_either_hangs() -> None:
    others_end(2, (1, 'after_loss', 'sleeps'), (0, 'after_batch', 'loops'))


@pytest.mark.full
def test_hangs_at_several_places() -> None:
    took_s = [
        others_end(5, (who, event, how))
        for who in range(2)
        for how in ('sleeps', 'loops')
        for event in 'after_draw before_pred before_backward after_step after_validate'.split()
    ]
    print(
        f'row 37: {len(took_s)} hangs with a timeout of 5 s: the other ended after {max(took_s):.1f} s at most'
    )
