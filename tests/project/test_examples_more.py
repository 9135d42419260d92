"""The project scripts with a table and with a stream run, resume after a kill, and equal a plain loop."""

import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from learnkit import Callback, Checkpoint, Learner
from learnkit.checkpoint.digest import differences
from tests.helpers.forks import start
from tests.helpers.libraries import require

require('pandas', 'sklearn', 'gymnasium')

from examples import reinforcement, tabular  # noqa: E402  # only where these are installed


def run_script(script: ModuleType, folder: Path, *arguments: str) -> str:
    "Run a script in a fork, and return its output."

    def job() -> None:
        os.chdir(folder)
        sys.argv = ['script', *arguments]
        script.main()

    with start(job) as child:
        assert child.wait() == 0, child.stderr
        return child.stdout


def test_the_table_is_learned_reported_and_exported(tmp_path: Path) -> None:
    printed = run_script(tabular, tmp_path, '--quick')
    assert 'network: test' in printed and 'boosting: validation' in printed
    assert {'rents.pt2', 'encoder.json'} < {path.name for path in (tmp_path / 'rents').iterdir()}


def test_the_pole_script_runs_and_resumes(tmp_path: Path) -> None:
    printed = run_script(reinforcement, tmp_path, '--quick')
    assert '20 episodes: mean' in printed
    resumed = run_script(reinforcement, tmp_path, '--quick', '--resume')
    assert resumed.splitlines()[-1] == printed.splitlines()[-1]


SMALL = {'epoch': 40, 'update': 30, 'warmup': 100, 'capacity': 300, 'explore': 300}


class KillAt(Callback):
    "Kill the process after a batch."

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def state_dict(self) -> None:
        return None  # not in checkpoints

    def after_batch(self) -> None:
        if self.learn.time.ba == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)


def finish(folder: Path, *cbs: Callback, **kwargs: Any) -> Learner:
    learn = reinforcement.make_learner(folder, **SMALL)
    with learn.no_bar():
        learn.fit('100ba', cbs=[Checkpoint('30ba'), *cbs], **kwargs)
    return learn


def test_a_killed_stream_resumes_exactly(tmp_path: Path) -> None:
    straight = finish(tmp_path / 'straight')
    with start(lambda: finish(tmp_path / 'killed', KillAt(75)) and None) as child:
        assert child.wait() == -signal.SIGKILL
    resumed = finish(tmp_path / 'killed', resume=True)

    stream, other = straight.dls.train, resumed.dls.train
    assert stream.n_steps > stream.capacity  # old steps were overwritten
    assert not differences(stream.state_dict(), other.state_dict())
    for name, weight in straight.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name])
    columns = [[{**row, 'time': 0} for row in learn.history] for learn in (straight, resumed)]
    assert columns[0] == columns[1]


def test_the_stream_trains_as_a_plain_loop() -> None:
    assert reinforcement.compare(60, update=20, warmup=100, explore=300)
