"""Row 2: SIGKILL inside a save of 50 MB. The newest whole checkpoint loads, and at most one interval is lost.

A save in the background is lost too while it is under way: with a checkpoint after every batch, that may be two."""

import random
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from learnkit import Callback, Checkpoint, Learner
from learnkit.checkpoint.folder import find
from tests.helpers.forks import start

WIDTH = 2048  # a square layer with Adam's two averages: 50 MB


def train(folder: Path, background: bool) -> None:
    batches = [(torch.randn(2, WIDTH), torch.randn(2, WIDTH))] * 1000
    learn = Learner(batches, nn.Linear(WIDTH, WIDTH), nn.MSELoss(), path=folder)
    begun = Callback(
        batch_checkpoint=lambda cb: Path(folder, 'begun').write_text(f'{cb.learn.time.ba}')
    )
    with learn.no_bar():
        learn.fit(1, cbs=[begun, Checkpoint('1ba', background=background)], resume=True)


def kill_in_saves(folder: Path, n: int, background: bool) -> int:
    "Kill a training that mostly saves; return the number of kills within a save."
    draw, within = random.Random(0), 0
    for _ in range(n):
        with start(partial(train, folder, background)) as child:
            # one is whole, and another has begun
            child.wait(600, partial(_has_passed, folder, _begun(folder) + 2))
            time.sleep(draw.uniform(0, 0.15))
            child.send(9)
            child.wait()
        within += bool(list(Path(folder, 'checkpoints').glob('.*.tmp-*')))
        found = find(True, folder / 'checkpoints')
        assert found is not None
        assert found[1]['loop']['done']['ba'] >= _begun(folder) - 1 - background
    return within


def _has_passed(folder: Path, ba: int) -> bool:
    return _begun(folder) > ba


def _begun(folder: Path) -> int:
    try:
        return int(Path(folder, 'begun').read_text() or 0)
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize('background', [False, True])
def test_some_kills(tmp_path: Path, background: bool) -> None:
    kill_in_saves(tmp_path, 1, background)


@pytest.mark.full
def test_many_kills(tmp_path: Path) -> None:
    within = [
        kill_in_saves(tmp_path / f'{background}', 50, background) for background in (False, True)
    ]
    print(
        f'row 2: 100 kills while 50 MB were saved ({sum(within)} left a temporary file, half of them in the '
        'background): the newest whole checkpoint loaded each time, at most one interval lost, or what was in '
        'flight'
    )
    assert min(within) > 10
