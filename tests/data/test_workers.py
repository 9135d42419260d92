"""Loader workers outlive a SIGTERM and end with their process."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from learnkit import DataLoaders
from learnkit.data.workers import outlast_sigterm
from tests.helpers.forks import start

pytestmark = pytest.mark.skipif(
    sys.platform != 'linux', reason='a worker cannot tell who has sent a signal'
)


class Pids(Dataset[int]):
    "A data set of process ids, whose last sample never returns."

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> int:
        if i == 7 and self.folder:
            (self.folder / 'stuck').touch()
            sleep(600)
        return os.getpid()


def loader(method: str, folder: Path | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Pids(folder), 2, num_workers=1, multiprocessing_context=method, **options)


@contextmanager
def lasting(dl: DataLoader[Any]) -> Iterator[Any]:
    "Start a pass with SIGTERM-proof workers; return its iterator."
    restore = outlast_sigterm(DataLoaders(dl))
    try:
        batches: Any = iter(dl)
    finally:
        restore()
    try:
        yield batches
    finally:
        batches._shutdown_workers()


def send_from_elsewhere(pid: int) -> None:
    subprocess.run(['kill', '-TERM', str(pid)], check=True)


def comes(what: Callable[[], bool], within_s: float = 60.0) -> bool:
    end = monotonic() + within_s
    while not what() and monotonic() < end:
        sleep(0.01)
    return what()


def state(pid: int) -> list[str]:
    "Return a process's entries of /proc from its state and parent on, or nothing if it has ended."
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    except FileNotFoundError:
        return []


def has_ended(pid: int) -> bool:
    "Return True if a process has ended, even if its parent has not waited for it."
    return state(pid)[:1] in ([], ['Z'])


def is_orphan(pid: int, parent: int) -> bool:
    "Return True if a process has another parent, which requires that its last thread has ended."
    return state(pid)[1] != str(parent)


@pytest.mark.parametrize(
    'method',
    [
        'fork',
        pytest.param('spawn', marks=pytest.mark.full),
        pytest.param('forkserver', marks=pytest.mark.full),
    ],
)
def test_workers_ignore_the_signal_of_others_and_end_with_their_process(method: str) -> None:
    with lasting(loader(method)) as batches:
        worker = batches._workers[0]
        send_from_elsewhere(worker.pid)  # perhaps before it has begun
        assert next(batches).tolist() == [worker.pid] * 2
        send_from_elsewhere(worker.pid)
        assert torch.cat(list(batches)).tolist() == [worker.pid] * 6
    with lasting(loader(method, persistent_workers=True)) as batches:
        worker = batches._workers[0]
        next(batches)
        worker.terminate()
        worker.join(600)
        assert worker.exitcode == 0, 'torch takes any other code for a failure'


def stuck(folder: Path, batches: Any) -> Any:
    "Return a worker that is fetching the last sample."
    for _ in range(2):
        next(batches)  # as long as some are to be fetched ahead
    assert comes((folder / 'stuck').exists)
    return batches._workers[0]


def test_one_that_is_stuck_ends_too(tmp_path: Path) -> None:
    with lasting(loader('fork', tmp_path)) as batches:
        worker = stuck(tmp_path, batches)
        worker.terminate()
        worker.join(600)
        assert worker.exitcode == 0


def test_without_its_process_any_signal_ends_it(tmp_path: Path) -> None:
    def job() -> None:
        with lasting(loader('fork', tmp_path)) as batches:
            (tmp_path / 'new').write_text(str(stuck(tmp_path, batches).pid))
            (tmp_path / 'new').rename(tmp_path / 'pid')  # there with its content, or not at all
            sleep(60)

    with start(job) as child:
        child.wait(until=(tmp_path / 'pid').exists)
        pid = int((tmp_path / 'pid').read_text())
        send_from_elsewhere(pid)
        assert not comes(lambda: has_ended(pid), 0.2)
        child.send(signal.SIGKILL, group=False)
        assert comes(lambda: is_orphan(pid, child.pid))
        send_from_elsewhere(pid)
        assert comes(lambda: has_ended(pid))


def test_loaders_are_as_they_were_afterwards() -> None:
    fork = loader('fork')
    default = DataLoader(Pids(), 2, num_workers=1)
    alone = DataLoader(Pids(), 2)
    before = [dl.multiprocessing_context for dl in (fork, default, alone)]
    dls = DataLoaders(fork, default, alone)
    first, second = outlast_sigterm(dls), outlast_sigterm(dls)
    assert 'Lasting' in fork.multiprocessing_context.Process.__name__
    first()
    second()
    assert [dl.multiprocessing_context for dl in (fork, default, alone)] == before
