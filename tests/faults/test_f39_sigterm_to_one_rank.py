"""Row 39: SIGTERM to one of two processes, or both and their workers. They end once they agree; a restart is exact."""

from __future__ import annotations

import random
import signal
import warnings
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from learnkit import Callback
from learnkit.callbacks import Checkpoint
from learnkit.checkpoint.folder import entries
from tests.faults.run_helpers import State, make_learner, names, quiet, same, torch_dls
from tests.helpers.ranks import run_ranks, started_ranks


def train(rank: int, folder: Path, pace_s: float = 0.0, n_epoch: int = 3, **options: Any) -> State:
    learn = quiet(make_learner(dls=torch_dls(**options)))
    learn.add_cb(
        Callback(
            after_step=lambda cb: sleep(pace_s), before_train=lambda cb: print('trains', flush=True)
        )
    )
    with learn.distributed('ddp', timeout='20s'):
        learn.fit(n_epoch, resume=True, cbs=Checkpoint(every=None, folder=folder))
        return learn.checkpoint_state()


def with_workers(
    rank: int, folder: Path, method: str, persistent: bool, pace_s: float = 0.0, n_epoch: int = 3
) -> State:
    warnings.filterwarnings('ignore', 'The random generators of persistent workers')
    return train(
        rank,
        folder,
        pace_s,
        n_epoch,
        n_workers=2,
        n_train=24,
        persistent_workers=persistent,
        multiprocessing_context=method,
    )


def signalled(folder: Path, victim: int, after_s: float) -> bool:
    "Send the signal to one process while both train; return whether it came before their end."
    with started_ranks(train, 2, folder, 0.01) as children:
        children[victim].wait(600, until=lambda: 'trains' in children[victim].stdout)
        until = monotonic() + after_s
        children[victim].wait(600, until=lambda: monotonic() > until)
        children[victim].send(signal.SIGTERM, group=False)
        for child in children:
            child.wait(600)
        codes = [child.code for child in children]
        # it came after the last batch, or, where it ends a process as if nobody listened, after the fit
        if (0 in codes and set(codes) <= {0, 143}) or codes[victim] == -signal.SIGTERM:
            return False
        assert codes == [143, 143], [c.stderr for c in children]
        # none where it came with the last batch
        assert sum('the run is saved in' in c.stderr for c in children) <= 1
        return True


def test_both_save_once_and_go_on_exactly(tmp_path: Path) -> None:
    straight: list[Any] = run_ranks(train, 2, tmp_path / 'straight')
    for victim in (0, 1):
        folder = tmp_path / f'{victim}'
        assert signalled(folder, victim, 0.03)
        assert len(names(folder)) == 1
        for got, expected in zip(run_ranks(train, 2, folder), straight, strict=True):
            assert same(got, expected)


def all_signalled(
    folder: Path, method: str, persistent: bool, after_s: float, n_epoch: int = 3
) -> float:
    "Send the signal to both and their workers; return the seconds until they ended."
    with started_ranks(with_workers, 2, folder, method, persistent, 0.02, n_epoch) as children:
        children[0].wait(600, until=lambda: all('trains' in c.stdout for c in children))
        sleep(after_s)
        began = monotonic()
        for child in children:
            child.send(signal.SIGTERM)
        for child in children:
            child.wait(600)
        assert [child.code for child in children] == [143, 143], [c.stderr for c in children]
        return monotonic() - began


@pytest.mark.parametrize(
    'persistent', [pytest.param(False, marks=pytest.mark.full), True], ids=['', 'persistent']
)
def test_workers_go_on_until_all_agree(persistent: bool, tmp_path: Path) -> None:
    "The signal comes with the first of 12 batches; the next agreement is after 8 of them."
    straight: list[Any] = run_ranks(
        with_workers, 2, tmp_path / 'straight', 'fork', persistent, 0.0, 2
    )
    all_signalled(tmp_path / 'run', 'fork', persistent, 0.0, 2)
    assert names(tmp_path / 'run') == ['00001-ep0-ba9.ckpt']
    resumed = run_ranks(with_workers, 2, tmp_path / 'run', 'fork', persistent, 0.0, 2)
    for got, expected in zip(resumed, straight, strict=True):
        assert same(got, expected)


@pytest.mark.full
@pytest.mark.parametrize('method', ['fork', 'spawn', 'forkserver'])
def test_workers_at_random_instants(method: str, tmp_path: Path) -> None:
    rng, n, took = random.Random(5), 20 if method == 'fork' else 3, []
    straight: list[Any] = [
        run_ranks(with_workers, 2, tmp_path / f's{i}', method, bool(i)) for i in range(2)
    ]
    for i in range(n):
        took.append(all_signalled(tmp_path / f'{i}', method, bool(i % 2), rng.uniform(0.0, 0.6)))
        resumed = run_ranks(with_workers, 2, tmp_path / f'{i}', method, bool(i % 2))
        for got, expected in zip(resumed, straight[i % 2], strict=True):
            assert same(got, expected)
    print(
        f'row 39: {n} signals to both and their workers ({method}), exact after each; the longest end took '
        f'{max(took):.1f} s'
    )


@pytest.mark.full
def test_at_random_instants(tmp_path: Path) -> None:
    rng, n_sent, straight = random.Random(3), 0, run_ranks(train, 2, tmp_path / 'straight')
    for i in range(20):
        folder = tmp_path / f'{i}'
        n_sent += signalled(folder, i % 2, rng.uniform(0.0, 0.3))
        assert len({e.info['run'] for e in entries(folder)}) == 1
        for got, expected in zip(run_ranks(train, 2, folder), straight, strict=True):
            assert same(got, expected)
    print(
        f'row 39: 20 signals, {n_sent} of them before the end of the training: one checkpoint each, exact after it'
    )
