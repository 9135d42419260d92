"""The kill harness: children, how they end, clean-up, and the guarantees of its runs."""

from __future__ import annotations

import atexit
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from learnkit import EMA, Callback, DataLoaders, Learner
from learnkit.core.errors import OptionError
from learnkit.testing import synth_learner
from learnkit.testing.forks import start
from learnkit.testing.harness import (
    HarnessError,
    kill_and_resume,
    random_instants,
    reached,
    run_until_done,
)

pytestmark = pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs os.fork')


def children() -> set[int]:
    "Return the processes that this process has started or adopted, including zombies."
    out = subprocess.run(
        ['ps', '-o', 'pid=', '--ppid', str(os.getpid())], capture_output=True, text=True
    ).stdout
    # but not ps itself
    return {pid for pid in map(int, out.split()) if Path(f'/proc/{pid}').exists()}


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def count_up(file: Path, n: int = 5, at: str = 'step') -> Callable[[], list[int]]:
    "A job that writes a line at a time, and resumes where it was killed."

    def job() -> list[int]:
        for i in range(len(file.read_text().split()) if file.exists() else 0, n):
            with file.open('a') as f:
                f.write(f'{i}\n')
            reached(at)
        return [int(line) for line in file.read_text().split()]

    return job


def sleep_beside_another(file: Path) -> None:
    "A job that starts a process and does not end."
    pid = os.fork()
    if pid:
        file.with_suffix('.tmp').write_text(str(pid))
        file.with_suffix('.tmp').rename(file)
    time.sleep(30)


# ---------------------------------------------------------------------------------- killed and done


def test_a_job_is_killed_and_started_again_until_it_is_done(tmp_path: Path) -> None:
    before = children()
    lives = run_until_done(count_up(tmp_path / 'n'), ['step', ('step', 2), None])
    assert lives.result == [0, 1, 2, 3, 4] and lives.codes == [-9, -9, 0] and lives.kills == 2
    assert len(lives.seconds) == len(lives.stdout) == 3 and children() == before
    again = run_until_done(count_up(tmp_path / 'n'), ['step', 0.2])
    assert again.codes == [0] and again.result == lives.result


def test_kills_by_time_by_a_file_and_by_a_function(tmp_path: Path) -> None:
    def wait() -> None:
        (tmp_path / 'here').touch()
        if not (tmp_path / 'done').exists():
            time.sleep(30)

    def kill(n: int) -> Any:
        if n == 2:
            (tmp_path / 'done').touch()
        return [0.05, tmp_path / 'here', None][n]

    lives = run_until_done(wait, kill)
    assert lives.codes == [-9, -9, 0] and lives.seconds[0] >= 0.05 and max(lives.seconds) < 30
    assert random_instants(4, 2.0, 1) == random_instants(4, 2.0, 1) != random_instants(4, 2.0, 2)
    assert all(0 <= t <= 2 for t in random_instants(100, 2.0))


def test_a_signal_that_is_caught(tmp_path: Path) -> None:
    def job() -> int:
        if (tmp_path / 'told').exists():
            return 7
        signal.signal(signal.SIGTERM, lambda *_: (tmp_path / 'told').touch() or sys.exit(143))
        (tmp_path / 'ready').touch()
        time.sleep(30)
        return 0

    lives = run_until_done(job, [tmp_path / 'ready'], signal.SIGTERM)
    assert lives.codes == [143, 0] and lives.result == 7


@pytest.mark.parametrize('group', [True, False])
def test_no_process_of_a_killed_job_is_left(tmp_path: Path, group: bool) -> None:
    before, (file, done) = children(), (tmp_path / 'pid', tmp_path / 'done')

    def kill(n: int) -> Any:
        if n:
            done.touch()
        return None if n else file

    job = lambda: None if done.exists() else sleep_beside_another(file)
    lives = run_until_done(job, kill, group=group)
    assert lives.codes == [-9, 0] and is_gone(int(file.read_text())) and children() == before


def test_loader_workers_end_with_the_job(tmp_path: Path) -> None:
    before, file = children(), tmp_path / 'pids'

    def job() -> int:
        batches = iter(DataLoader(list(range(64)), batch_size=2, num_workers=2))
        next(batches)
        if not file.exists():
            file.write_text(' '.join(str(w.pid) for w in batches._workers))  # type: ignore[attr-defined]
            reached('batch')
        return sum(1 for _ in batches)

    lives = run_until_done(job, ['batch'], group=False)
    assert lives.result == 31 and lives.codes == [-9, 0] and children() == before
    assert len(file.read_text().split()) == 2
    assert all(is_gone(int(pid)) for pid in file.read_text().split())


@pytest.mark.skipif(
    sys.platform != 'linux', reason="only Linux tells a child of its parent's death"
)
def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    def parent() -> None:
        with start(lambda: time.sleep(30)) as inner:
            (tmp_path / 'tmp').write_text(str(inner.pid))
            (tmp_path / 'tmp').rename(tmp_path / 'pid')
            time.sleep(30)

    with start(parent) as child:
        assert child.wait(60, (tmp_path / 'pid').exists) is None
        child.send(signal.SIGKILL, group=False)
        child.wait()
        # its parent is dead, so it is ours
        _, status = os.waitpid(int((tmp_path / 'pid').read_text()), 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


# --------------------------------------------------------------------------------------- what fails


def test_a_job_that_fails_shows_its_traceback() -> None:
    def fail() -> None:
        raise KeyError('planned')

    with pytest.raises(HarnessError, match=r"(?s)exit code 1\..*in fail.*KeyError: 'planned'"):
        run_until_done(fail)
    with pytest.raises(HarnessError, match=r'(?s)exit code 1.*would not load safely'):
        run_until_done(lambda: object())
    with pytest.raises(HarnessError, match=r'SIGKILL'):
        run_until_done(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_job_that_does_not_end_is_killed_and_shows_where_it_is(tmp_path: Path) -> None:
    before = children()
    for timeout_s in (0.3, 3, 30):  # a loaded machine may take seconds to begin
        with pytest.raises(HarnessError, match=f'did not end within {timeout_s} s') as e:
            run_until_done(lambda: sleep_beside_another(tmp_path / 'pid'), timeout_s=timeout_s)
        if (tmp_path / 'pid').exists():
            break
    assert 'in sleep_beside_another' in str(e.value)
    assert is_gone(int((tmp_path / 'pid').read_text())) and children() == before
    with pytest.raises(HarnessError, match='killed 3 times'):
        run_until_done(lambda: reached('x'), lambda n: 'x', max_lives=3)


def test_obstacles_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait, name='old-saver')
    thread.start()
    with pytest.raises(HarnessError, match=r'while the threads .*old-saver'):
        run_until_done(lambda: time.sleep(30), timeout_s=0.1)
    ends.set()
    thread.join()
    with pytest.raises(OptionError, match='kill=b'):
        run_until_done(lambda: 1, [b'1'])  # type: ignore[list-item]
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    with pytest.raises(HarnessError, match='CUDA'):
        start(lambda: 1)


# --------------------------------------------------------------------------------------- what it is


@pytest.mark.parametrize(
    ('code', 'expected'), [(None, 0), (0, 0), (3, 3), (263, 7), ('text', 1), (True, 1)]
)
def test_exit_codes_match_the_interpreter(code: Any, expected: int) -> None:
    def job() -> None:
        sys.exit(code)

    with start(job) as child:
        assert child.wait() == expected
        assert child.stderr == ('' if code is None or isinstance(code, int) else f'{code}\n')


def test_ctrl_c_ends_it_as_it_ends_an_interpreter() -> None:
    with start(lambda: time.sleep(30)) as child:
        child.send(signal.SIGINT)
        assert child.wait() == -signal.SIGINT
        assert child.stderr.rstrip().endswith('KeyboardInterrupt')


def test_output_is_the_childs_own(capfd: pytest.CaptureFixture[str]) -> None:
    def job() -> None:
        print('ä from Python')
        os.write(1, b'from the system\n')
        print('an error', file=sys.stderr)
        assert sys.stdin.read() == ''

    with start(job) as child:
        assert child.wait() == 0
        assert child.stdout == 'ä from Python\nfrom the system\n' and child.stderr == 'an error\n'
    assert capfd.readouterr() == ('', '')


def test_the_child_runs_its_own_exit_handlers_and_none_of_the_parent(tmp_path: Path) -> None:
    touch: Any = (tmp_path / 'parent').touch
    atexit.register(touch)

    def job() -> None:
        atexit.register((tmp_path / 'child').touch)
        threading.Thread(target=lambda: (time.sleep(0.05), (tmp_path / 'thread').touch())).start()
        synth_learner(cbs=Callback(close=lambda cb: (tmp_path / 'closed').touch())).fit(1)

    left = synth_learner(cbs=Callback(close=lambda cb: (tmp_path / 'learner').touch()))
    try:
        with start(job) as child:
            assert child.wait() == 0, child.stderr
    finally:
        atexit.unregister(touch)
    assert {p.name for p in tmp_path.iterdir()} == {'child', 'thread', 'closed'} and left


def test_a_process_that_only_an_exit_function_of_the_parent_holds_gives_no_warning() -> None:
    sleeper = subprocess.Popen(['sleep', '60'])
    kill = weakref.WeakMethod(sleeper.kill)
    atexit.register(sleeper.kill)
    del sleeper
    try:
        with start(lambda: None) as child:
            assert (child.wait(), child.stderr) == (0, '')
    finally:
        stop = kill()
        assert stop is not None
        atexit.unregister(stop)
        stop()
        stop.__self__.wait()


def test_it_has_the_parents_generators_its_own_handlers_and_one_thread() -> None:
    def draw() -> Any:
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    def job() -> Any:
        handlers = [signal.getsignal(s) is signal.SIG_DFL for s in (signal.SIGTERM, signal.SIGUSR1)]
        masked = list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        return (
            draw(),
            handlers,
            masked,
            torch.get_num_threads(),
            os.getpgid(0) == os.getpid(),
            threading.active_count(),
        )

    n = torch.get_num_threads()
    old = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGTERM, signal.SIGUSR1)}
    torch.set_num_threads(2)
    try:
        with start(job) as child:
            assert child.wait() == 0, child.stderr
        assert child.code == 0
        assert torch.get_num_threads() == 2
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
        with start(job) as child:
            child.wait()
            result = child.result
    finally:
        torch.set_num_threads(n)
        for s, handler in old.items():
            signal.signal(s, handler)
    assert result == (draw(), [True, True], [], 1, True, 1)


def test_tensors_are_returned_and_files_removed() -> None:
    with start(lambda: {'w': torch.arange(3), 'n': (1, None)}) as child:
        child.wait()
        folder, result = child._folder, child.result
        assert folder.is_dir()
    assert result['w'].tolist() == [0, 1, 2] and result['n'] == (1, None) and not folder.exists()


# ----------------------------------------------------------------------------------- what it proves


def make_learner(cbs: Any = ()) -> Learner:
    torch.manual_seed(0)
    x = torch.randn(48, 3)
    train = (x, x.sum(1, keepdim=True))
    dls = DataLoaders.from_tensors(train, (x[:8], x[:8, :1]), bs=4, device='cpu')
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    return Learner(dls, model, nn.MSELoss(), cbs=[EMA(), *cbs])


def forgetful() -> Learner:
    "Return a Learner that scales gradients by a count that is not in a checkpoint."
    seen = [1.0]

    def scale(cb: Callback) -> None:
        seen[0] += 0.1
        for p in cb.learn.model.parameters():
            p.grad *= seen[0]

    return make_learner([Callback(after_backward=scale)])


def test_training_that_is_killed_ends_as_if_it_was_not(tmp_path: Path) -> None:
    report = kill_and_resume(make_learner, n_epoch=2, kills=2, folder=tmp_path)
    assert report.exact and report.differences == []
    assert report.kills >= report.resumes >= 2 and report.runs >= 1 and len(report.digest) == 64
    assert {p.name for p in tmp_path.iterdir()} >= {'straight-0', 'straight-1', 'killed-0'}


def test_what_no_checkpoint_has_is_found_out() -> None:
    report = kill_and_resume(forgetful, n_epoch=2, kills=8)
    assert not report and report.differences[0].startswith('model.')


def test_a_learner_that_differs_each_time_or_fails_is_reported() -> None:
    def another() -> Learner:
        learn = make_learner()
        learn.model[0].bias.data.fill_(os.getpid())
        return learn

    with pytest.raises(HarnessError, match=r'(?s)nothing has killed differ.*model\.0'):
        kill_and_resume(another, 1)
    with pytest.raises(HarnessError, match='ZeroDivisionError'):
        kill_and_resume(lambda: 1 / 0, 1)


@pytest.mark.full
def test_two_hundred_kills_change_nothing() -> None:
    assert kill_and_resume(make_learner, n_epoch=3, kills=200, seed=7)
