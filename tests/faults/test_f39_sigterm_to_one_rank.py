"""Row 39: SIGTERM to one of two processes, or both and their workers. They end once they agree; a restart is exact."""

import os
import random
import signal
import warnings
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from learnkit import Callback
from learnkit.callbacks import Checkpoint
from tests.faults.run_helpers import State, make_learner, names, quiet, same, torch_dls
from tests.helpers.ranks import run_ranks, started_ranks

EVENTS = 'before_batch after_pred after_loss before_step after_step'.split()


def train(rank: int, folder: Path, callback: Callback | None = None, **options: Any) -> State:
    learn = quiet(make_learner(callback, dls=torch_dls(**options)))
    with learn.distributed('ddp', timeout=300):
        learn.fit(3, resume=True, cbs=Checkpoint(every=None, folder=folder))
        learn.remove_cbs(Callback)
        return learn.checkpoint_state()


def train_with_workers(
    rank: int, folder: Path, method: str, persistent: bool, ba: int = -1
) -> State:
    "Train or resume; after so many batches, wait until the parent has sent a signal to each process and worker."
    warnings.filterwarnings('ignore', 'The random generators of persistent workers')

    def wait(cb: Any) -> None:
        if cb.learn.time.ba == ba:
            print('waits', flush=True)
            while not (folder / 'sent').exists():
                sleep(0.01)

    options = {'persistent_workers': persistent, 'multiprocessing_context': method}
    return train(rank, folder, Callback(after_step=wait), n_workers=2, n_train=24, **options)


def check_all_end(folder: Path, method: str, persistent: bool, ba: int) -> None:
    "Send a signal to both processes and their workers, which end when all agree."
    with started_ranks(train_with_workers, 2, folder, method, persistent, ba) as children:
        children[0].wait(until=lambda: all('waits' in child.stdout for child in children))
        for child in children:
            child.send(signal.SIGTERM)
        (folder / 'sent').touch()
        assert [child.wait() for child in children] == [143, 143], [c.stderr for c in children]
    (folder / 'sent').unlink()


def train_signalled(rank: int, folder: Path, victim: int, event: str, ba: int) -> State:
    "Train; the victim gets a signal at an event after so many batches."

    def send(cb: Any) -> None:
        if rank == victim and cb.training and cb.learn.time.ba == ba:
            os.kill(os.getpid(), signal.SIGTERM)

    return train(rank, folder, Callback(**{event: send}))


def check_both_end(folder: Path, victim: int, event: str, ba: int) -> None:
    with started_ranks(train_signalled, 2, folder, victim, event, ba) as children:
        assert [child.wait() for child in children] == [143, 143], [c.stderr for c in children]
    assert len(names(folder)) == 1


def check_same(straight: list[State], job: Any, *arguments: Any) -> None:
    for got, expected in zip(run_ranks(job, 2, *arguments), straight, strict=True):
        assert same(got, expected)


def test_both_save_once_and_go_on_exactly(tmp_path: Path) -> None:
    straight = run_ranks(train, 2, tmp_path / 'straight')
    check_both_end(tmp_path / 'run', 1, 'after_step', 1)
    check_same(straight, train, tmp_path / 'run')


def test_workers_go_on_until_all_agree(tmp_path: Path) -> None:
    "The signal comes in the first of 12 batches; the next agreement is after 8 of them."
    straight = run_ranks(train_with_workers, 2, tmp_path / 'straight', 'fork', True)
    check_all_end(tmp_path / 'run', 'fork', True, 1)
    assert names(tmp_path / 'run') == ['00001-ep0-ba9.ckpt']
    check_same(straight, train_with_workers, tmp_path / 'run', 'fork', True)


@pytest.mark.full
@pytest.mark.parametrize('method', ['fork', 'spawn', 'forkserver'])
def test_workers_at_random_batches(method: str, tmp_path: Path) -> None:
    rng, n = random.Random(5), 20 if method == 'fork' else 3
    straight = [
        run_ranks(train_with_workers, 2, tmp_path / f's{i}', method, bool(i)) for i in range(2)
    ]
    for i in range(n):
        options = tmp_path / f'{i}', method, bool(i % 2)
        check_all_end(*options, rng.randrange(1, 20))
        check_same(straight[i % 2], train_with_workers, *options)
    print(f'row 39: {n} signals to both and their workers ({method}), exact after each')


@pytest.mark.full
def test_at_random_events(tmp_path: Path) -> None:
    rng, straight = random.Random(3), run_ranks(train, 2, tmp_path / 'straight')
    for i in range(20):
        folder = tmp_path / f'{i}'
        check_both_end(folder, i % 2, rng.choice(EVENTS), rng.randrange(1, 4))
        check_same(straight, train, folder)
    print('row 39: 20 signals to one process: one checkpoint each, exact after it')
