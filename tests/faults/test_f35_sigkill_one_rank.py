"""Row 35: SIGKILL of one of two processes. The other ends by itself, and names the lost rank; a restart is exact."""

from __future__ import annotations

from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

import pytest

from learnkit import Callback
from learnkit.callbacks import Checkpoint
from tests.faults.run_helpers import State, make_learner, quiet, same, torch_dls
from tests.helpers.ranks import run_ranks, started_ranks
from tests.helpers.resuming import scramble

TIMEOUT_S = 5.0


def train(rank: int, folder: Path, pace_s: float = 0.0, n_epoch: int = 4) -> State:
    "Train or resume."
    scramble(0)
    learn = quiet(make_learner(dls=torch_dls()))
    if any(folder.glob('*.ckpt')):
        scramble(rank + 1)
    learn.add_cb(
        Callback(
            after_step=lambda cb: print('step') or sleep(pace_s),
            cleanup=lambda cb: print('trained'),
        )
    )
    with learn.distributed('ddp', timeout=TIMEOUT_S):
        print('joined')
        learn.fit(n_epoch, resume=True, cbs=Checkpoint(every='1ba', folder=folder))
        return learn.checkpoint_state()


def killed(
    folder: Path, victim: int, after_s: float, n_steps: int = 0
) -> tuple[bool, float] | None:
    """Kill one process some time after its start, or so many steps; return whether it had joined the other, and how
    long that took to end.

    None where all had ended before."""
    with started_ranks(train, 2, folder, 0.02) as children:
        other = children[1 - victim]
        children[victim].wait(600, until=lambda: children[victim].stdout.count('step') >= n_steps)
        began = monotonic()
        children[victim].wait(600, until=lambda: monotonic() - began > after_s)
        if children[victim].code is not None:
            return None
        children[victim].send(9)
        sent = monotonic()
        other.wait(600)
        took_s, joined = monotonic() - sent, 'joined' in children[victim].stdout
        if 'trained' in children[victim].stdout:
            return None
        assert other.code, 'it ended as if all were well'
        assert (
            f'DistributedError: Process {victim} of 2' in other.stderr
            or 'in _do_fit' not in other.stderr
        )
        return joined, took_s


def kill_and_go_on(
    folder: Path, straight: list[Any], instants: list[float]
) -> list[tuple[bool, float]]:
    "Kill at each instant, and resume; return how the others ended."
    ends = [killed(folder, i % 2, instant) for i, instant in enumerate(instants)]
    for own, one in zip(straight, run_ranks(train, 2, folder), strict=True):
        assert same(own, one)
    return [end for end in ends if end is not None]


def straight_run(folder: Path) -> tuple[list[Any], float]:
    run_ranks(train, 2, folder / 'slow')  # the first is slower than others
    began = monotonic()
    return run_ranks(train, 2, folder / 'straight'), monotonic() - began


def test_some_kills(tmp_path: Path) -> None:
    straight = run_ranks(train, 2, tmp_path / 'straight')
    ends = [killed(tmp_path / 'killed', victim, 0.01, n_steps=3) for victim in (0, 1)]
    assert all(end is not None and end[0] and end[1] < TIMEOUT_S + 40 for end in ends)
    for own, one in zip(straight, run_ranks(train, 2, tmp_path / 'killed'), strict=True):
        assert same(own, one)


@pytest.mark.full
def test_many_kills(tmp_path: Path) -> None:
    straight, length_s = straight_run(tmp_path)
    draw, ends = Random(1), list[tuple[bool, float]]()
    while sum(joined for joined, _ in ends) < 40:
        instants = [draw.uniform(0.2, 1.1) * length_s for _ in range(4)]
        ends += kill_and_go_on(tmp_path / f'killed-{draw.random()}', straight, instants)
    trained, began = (
        sorted(took_s for joined, took_s in ends if joined is when) for when in (True, False)
    )
    print(
        f'row 35: {len(trained)} kills in training, the other ended after {trained[len(trained) // 2]:.1f} s (median), '
        f'{trained[-1]:.1f} s at most; {len(began)} while they joined, {max(began, default=0.0):.1f} s at most; '
        'every restart exact'
    )
    assert trained[-1] < TIMEOUT_S + 10 and max(began, default=0.0) < 2 * TIMEOUT_S + 10
