"""`learn.launch`: processes started from a notebook, their results, and their ends."""

import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from threading import Timer
from time import monotonic, sleep
from typing import Any

import pytest
import torch

from learnkit import EMA, SGD, Callback, Learner, mae
from learnkit.checkpoint.compare import learn_digest
from learnkit.checkpoint.digest import differences
from learnkit.core.errors import DistributedError, OptionError
from learnkit.distributed.launch import environment
from learnkit.testing import synth_learner
from tests.helpers.forks import start
from tests.helpers.ranks import run_ranks

pytest.importorskip('cloudpickle')
pytestmark = pytest.mark.dist


@pytest.mark.parametrize('fn', [lambda: 3, lambda learn, n: n, lambda *, n: n])
def test_a_function_that_does_not_take_the_learner_is_refused(fn: Any) -> None:
    with pytest.raises(OptionError, match=r'launch\(<lambda>\).*`lambda learn: learn.fit\(3\)`'):
        line().launch(fn, nproc=2)
    with pytest.raises(OptionError, match=r'launch\(3\)'):
        line().launch(3, nproc=2)  # type: ignore[arg-type]


def line() -> Learner:
    torch.manual_seed(3)
    halved = lambda params, lr: SGD(params, lr=lr / 2, mom=0.9)  # a notebook's function
    metrics = [mae, lambda p, y: (p - y).mean()]
    return synth_learner(n_train=6, lr=0.05, opt_func=halved, cbs=EMA(0.9), metrics=metrics)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return (
        Path(f'/proc/{pid}/stat').read_text().split(') ')[1][0] != 'Z'
        if sys.platform == 'linux'
        else True
    )


def wait_until_ended(pids: list[int], within_s: float = 4.0) -> bool:
    end = monotonic() + within_s
    while any(map(alive, pids)) and monotonic() < end:
        sleep(0.02)
    return not any(map(alive, pids))


def write_pid(folder: Path, learn: Any) -> None:
    "Write the id of this process to a file for the test."
    rank = learn.world.rank
    (folder / f'{rank}.new').write_text(str(os.getpid()))
    (folder / f'{rank}.new').rename(folder / f'{rank}.pid')


def wait_for_ever(folder: Path, learn: Any) -> None:
    write_pid(folder, learn)
    while True:
        sleep(0.01)


def pids(folder: Path, n: int = 2, within_s: float = 40.0) -> list[int]:
    end = monotonic() + within_s
    while len(list(folder.glob('*.pid'))) < n and monotonic() < end:
        sleep(0.01)
    return [int(path.read_text()) for path in sorted(folder.glob('*.pid'))]


# -- what comes back


def _trained(rank: int) -> Any:
    "Train in one of two processes that were not started by `launch`."
    learn = line()
    with learn.no_bar(), pytest.warns(UserWarning, match='this one trains alone'):
        learn.fit(1)
    with learn.no_bar(), learn.distributed('ddp', batch_size='global'):
        learn.fit(2)
    return learn.checkpoint_state()


def test_everything_is_brought_back(capsys: pytest.CaptureFixture[str]) -> None:
    learn = line()
    with learn.no_bar():
        learn.fit(1)
    capsys.readouterr()

    class Printing(Callback):
        "A class defined in the notebook."

        def after_fit(self) -> None:
            print(f'process {self.world.rank} of {self.world.size}')

    def train(learn: Learner) -> Any:
        learn.fit(2, cbs=Printing())
        return {'ranks': learn.world.gather(learn.world.rank), 'x': torch.ones(2)}

    model = learn.model
    result = learn.launch(train, 2, strategy='ddp', batch_size='global')
    assert result['ranks'] == [0, 1] and torch.equal(result['x'], torch.ones(2))
    written = capsys.readouterr()
    assert written.out.count('process 0 of 2') == 1 and 'process 1' not in written.out
    # heading, two rows, and what Tell has said
    assert len(written.out.splitlines()) == 4 and written.err == ''

    assert not differences(run_ranks(_trained, 2)[0], learn.checkpoint_state())
    assert learn.model is model and learn.world.size == 1 and len(learn.history) == 3
    assert learn.time.ep == 3 and learn.opt.n_steps == 6 * 3
    with learn.no_bar():
        learn.fit(1)  # and it trains on


# -- how they end


def test_the_first_that_fails_shows_its_traceback_and_nothing_changes(tmp_path: Path) -> None:
    learn = line()
    before = learn_digest(learn)

    class Boom(Callback):
        def after_loss(self) -> None:
            if self.world.rank == 1 and self.train_iter == 2:
                raise ValueError('boom in a notebook')

    def train(learn: Learner) -> None:
        write_pid(tmp_path, learn)
        learn.fit(1, cbs=Boom())

    with pytest.raises(DistributedError, match=r'Process 1 of 2 .*ValueError: boom') as error:
        learn.launch(train, 2)
    assert 'Boom.after_loss (epoch 0, batch 2)' in str(error.value)
    assert wait_until_ended(pids(tmp_path)) and learn_digest(learn) == before


@pytest.mark.full
def test_a_process_that_is_killed_is_named(tmp_path: Path) -> None:
    def die(learn: Learner) -> None:
        write_pid(tmp_path, learn)
        if learn.world.rank == 1:
            print('last words', file=sys.stderr)
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(DistributedError, match=r'Process 1 of 2 .* SIGKILL') as error:
        line().launch(die, 2)
    assert error.value.args[0].endswith('SIGKILL.\nlast words\n')
    assert wait_until_ended(pids(tmp_path))


def test_an_interrupt_ends_them(tmp_path: Path) -> None:
    learn = line()
    before = learn_digest(learn)

    def stop_button() -> None:
        if len(pids(tmp_path)) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    button = Timer(0.1, stop_button)
    button.start()
    with pytest.raises(KeyboardInterrupt):
        learn.launch(partial(wait_for_ever, tmp_path), 2)
    button.join()
    assert wait_until_ended(pids(tmp_path), 0.2) and learn_digest(learn) == before


def test_they_die_with_their_parent(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp('temporary')
    monkeypatch.setattr(tempfile, 'tempdir', str(folder))  # others launch at the same time
    with start(lambda: line().launch(partial(wait_for_ever, tmp_path), 2)) as parent:
        running = pids(tmp_path)
        assert len(running) == 2 and all(map(alive, running)), parent.stderr
        parent.send(signal.SIGKILL, group=False)
        assert wait_until_ended(running)
    assert not list(folder.glob('learnkit-launch-*'))


# -- what is refused, before anything is started


def test_what_cannot_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('subprocess.Popen', None)
    learn = line()
    with pytest.raises(OptionError, match='nproc=0: pass a whole number'):
        learn.launch(print, 0)
    with pytest.raises(DistributedError, match='inside a run'), learn.no_bar():
        learn.fit(1, cbs=Callback(before_batch=lambda cb: learn.launch(print, 2)))


def test_what_cannot_be_sent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('subprocess.Popen', None)
    with open(tmp_path / 'log', 'w') as file:
        with pytest.raises(DistributedError, match=r'another process: .* pickle files'):
            line().launch(lambda learn: file.write('x'))


def test_processes_share_the_cores_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    assert environment(1, 10_000, 5)['OMP_NUM_THREADS'] == '1'
    monkeypatch.setenv('OMP_NUM_THREADS', '5')
    assert environment(0, 2, 5)['OMP_NUM_THREADS'] == '5'
