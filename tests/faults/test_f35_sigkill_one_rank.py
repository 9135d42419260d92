"""Row 35: SIGKILL of one of two processes. The other ends by itself, and names the lost rank; a restart is exact."""

import os
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from learnkit import Callback
from learnkit.callbacks import Checkpoint
from tests.faults.run_helpers import State, make_learner, quiet, same, torch_dls
from tests.helpers.ranks import run_ranks, started_ranks
from tests.helpers.resuming import scramble

# the other learns of the loss by its connection, long before
TIMEOUT_S = 120.0
N_EPOCH = 4  # of two batches in each process


def train(
    rank: int, folder: Path, victim: int | None = None, event: str = 'after_step', ba: int = 0
) -> State:
    "Train or resume; the victim kills itself at an event after so many batches."

    def kill(cb: Any) -> None:
        if rank == victim and cb.training and cb.learn.time.ba == ba:
            os.kill(os.getpid(), signal.SIGKILL)

    scramble(rank + 1 if any(folder.glob('*.ckpt')) else 0)
    learn = quiet(make_learner(Callback(**{event: kill}), dls=torch_dls()))
    with learn.distributed('ddp', timeout=TIMEOUT_S):
        learn.fit(N_EPOCH, resume=True, cbs=Checkpoint(every='1ba', folder=folder))
        learn.remove_cbs(Callback)
        return learn.checkpoint_state()


def check_killed(folder: Path, victim: int, event: str, ba: int) -> None:
    with started_ranks(train, 2, folder, victim, event, ba) as children:
        for child in children:
            child.wait(600)
        other = children[1 - victim]
        assert children[victim].code == -signal.SIGKILL
        assert other.code, 'it ended as if all were well'
        assert f'DistributedError: Process {victim} of 2' in other.stderr


def check_same(folder: Path, straight: list[State]) -> None:
    for own, one in zip(straight, run_ranks(train, 2, folder), strict=True):
        assert same(own, one)


def test_some_kills(tmp_path: Path) -> None:
    straight = run_ranks(train, 2, tmp_path / 'straight')
    check_killed(tmp_path / 'killed', 0, 'after_step', 2)
    check_killed(tmp_path / 'killed', 1, 'after_loss', 5)
    check_same(tmp_path / 'killed', straight)


@pytest.mark.full
def test_many_kills(tmp_path: Path) -> None:
    straight = run_ranks(train, 2, tmp_path / 'straight')
    draw = Random(1)
    events = 'before_batch after_pred after_loss before_step after_step after_batch'.split()
    for i in range(40):
        check_killed(tmp_path / f'{i}', i % 2, draw.choice(events), draw.randrange(1, 7))
        check_same(tmp_path / f'{i}', straight)
    print(
        'row 35: 40 kills in training, the other ended and named the lost rank; every restart exact'
    )
