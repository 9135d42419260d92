"""Row 34: a folder is one run's. The lock dies with its owner although forked workers live."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from learnkit import Callback
from learnkit.core.errors import FolderInUseError
from learnkit.core.files import FolderLock
from tests.faults.fault_helpers import At
from tests.faults.file_helpers import fork, result_of
from tests.faults.run_helpers import checkpointed, content, names, torch_dls
from tests.helpers.forks import start


def can_lock(folder: Path) -> bool:
    "Return True if another process can take the lock."

    def attempt() -> bool:
        try:
            with FolderLock(folder):
                return True
        except FolderInUseError:
            return False

    return result_of(attempt)


def kill(pid: int, reap: bool = True) -> None:
    os.kill(pid, signal.SIGKILL)
    if reap:
        os.waitpid(pid, 0)


def test_the_owner_is_killed_while_its_worker_lives(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    def hold_lock() -> None:
        with FolderLock(tmp_path):
            os.write(writer, fork(signal.pause).to_bytes(8, 'little'))
            signal.pause()

    owner = fork(hold_lock)
    worker = int.from_bytes(os.read(reader, 8), 'little')
    try:
        assert not can_lock(tmp_path)
        kill(owner)
        os.kill(worker, 0)  # it lives
        with FolderLock(tmp_path):
            assert not can_lock(tmp_path)
    finally:
        kill(worker, reap=False)
    os.close(reader)
    os.close(writer)


def test_a_forked_worker_does_not_own_it(tmp_path: Path) -> None:
    "Its release, by `with`, by hand, or when it ends, leaves the parent's lock alone; and it cannot lock the folder."
    with FolderLock(tmp_path) as lock:

        def work() -> list[Any]:
            held = lock.held
            lock.release()
            try:
                lock.acquire()
            except FolderInUseError as e:
                return [held, str(e)]
            return [held, '']

        held, told = result_of(work)
        assert not held and f'process {os.getpid()} on ' in told
        assert lock.held and not can_lock(tmp_path)
    assert can_lock(tmp_path)


# -- two fits --------------------------------------------------------------------------------------


def refused(folder: Path, dls: Any = None, **kwargs: Any) -> bool:
    "Fit into the folder, and expect a refusal before anything is loaded or trained."
    steps = At('before_batch', ValueError('it trains'))
    learn = checkpointed(folder)(steps, **({} if dls is None else {'dls': dls}))
    learn.create_opt()
    before = content(learn)
    with pytest.raises(FolderInUseError):
        learn.fit(2, **kwargs)
    return content(learn) == before and not steps.seen


def test_a_second_fit_in_this_process_is_refused(tmp_path: Path) -> None:
    tried: list[bool] = []

    def attempt(cb: Any) -> None:
        tried.extend([refused(tmp_path), refused(tmp_path, resume=True)])

    checkpointed(tmp_path, every='1ba')(At('batch_checkpoint', attempt, nth=3)).fit(1)
    assert tried == [True, True]
    checkpointed(tmp_path)().fit(1)
    assert names(tmp_path)[-1] == '00005-ep1-ba3.ckpt'


@pytest.mark.filterwarnings('ignore:The checkpoint was taken with num_workers=2')
def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    "However it ends: killed, with workers of its loader that live on for a moment, too."

    def train(folder: Path) -> None:
        def wait(cb: Any) -> None:
            if not cb.training or cb.iter < 2:
                return
            (folder / 'trains').touch()
            while not (folder / 'goes on').exists():
                time.sleep(0.01)

        checkpointed(folder, every='1ba')(
            Callback(before_batch=wait), dls=torch_dls(n_workers=2)
        ).fit(2)

    for kill_it in (True, False):
        folder = tmp_path / f'{kill_it}'
        with start(partial(train, folder)) as child:
            child.wait(until=(folder / 'trains').exists)
            assert refused(folder) and refused(folder, torch_dls(), resume=True)
            if kill_it:
                workers = [
                    int(p)
                    for p in Path(f'/proc/{child.pid}/task/{child.pid}/children')
                    .read_text()
                    .split()
                ]
                os.kill(child.pid, signal.SIGKILL)
                while state_of(child.pid) != 'Z':
                    time.sleep(0.005)
                fit = lambda folder=folder: checkpointed(folder)(dls=torch_dls()).fit(
                    2, resume='latest'
                )
                once_free(fit)
                assert len(workers) == 2 and all(state_of(pid) in 'SRD' for pid in workers), (
                    'they live on for a while'
                )
            else:
                (folder / 'goes on').touch()
                assert child.wait() == 0, child.stderr
                checkpointed(folder)(dls=torch_dls()).fit(3, resume=True)


def once_free(fit: Callable[[], None]) -> None:
    "Fit when the last thread of the killed process has ended, which its zombie state does not show."
    end = time.monotonic() + 600
    while time.monotonic() < end:
        try:
            return fit()
        except FolderInUseError:
            time.sleep(0.01)
    raise AssertionError('the folder is not free')


def state_of(pid: int) -> str:
    return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
