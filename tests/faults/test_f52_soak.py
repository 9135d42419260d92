"""Row 52: many fits in one process, most of which fail. Threads, files, processes and memory stay as they were."""

import gc
import os
import random
import shutil
import signal
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit import EMA, Learner
from learnkit.callbacks import Checkpoint, GradientAccumulation, SaveModelCallback
from learnkit.core.errors import CancelEpochException, CancelFitException
from learnkit.loggers import CSVLogger, JSONLinesLogger
from tests.faults.fault_helpers import FIT_EVENTS, At, fits_like_fresh
from tests.faults.run_helpers import BS, make_learner, quiet, torch_dls


class Planned(Exception):
    "The exception of these tests."


def interrupt(cb: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def spoil_weights(cb: Any) -> None:
    next(cb.learn.model.parameters()).data.fill_(torch.nan)


def remove_folder(cb: Any) -> None:
    shutil.rmtree(cb.learn.path / 'checkpoints', ignore_errors=True)


def cut_checkpoints(cb: Any) -> None:
    for path in (cb.learn.path / 'checkpoints').glob('*.ckpt'):
        os.truncate(path, 100)


def nest_fit(cb: Any) -> None:
    "A fit of another Learner, which fails."
    with pytest.raises(Planned):
        quiet(make_learner(At('after_loss', Planned()))).fit(1)


# what is raised or done, and the event of it; None: any event of a fit
FAULTS: dict[str, tuple[Any, str | None]] = {
    'an error': (Planned(), None),
    'Ctrl-C': (interrupt, None),
    'no memory': (torch.OutOfMemoryError('planned'), 'before_backward'),
    'weights of NaN': (spoil_weights, 'before_batch'),
    'CancelEpoch': (CancelEpochException(), 'before_batch'),
    'CancelFit': (CancelFitException(), 'after_step'),
    'a folder that goes': (remove_folder, 'after_batch'),
    'checkpoints that are cut': (cut_checkpoints, 'after_batch'),
    'another fit that fails': (nest_fit, 'before_epoch'),
}
EXPECTED = (Planned, KeyboardInterrupt, torch.OutOfMemoryError, OSError)


def use_once(folder: Path, rng: random.Random) -> str:
    "Train once with a fault at a random place, in a folder that earlier fits may have used; return the fault's name."
    name, (fault, event) = rng.choice([*FAULTS.items()])
    n_workers = 2 if rng.random() < 0.05 else 0
    more = rng.sample(
        [
            lambda: EMA(0.9),
            lambda: GradientAccumulation(2 * BS),
            lambda: JSONLinesLogger(every='1ba'),
            lambda: CSVLogger(),
            lambda: SaveModelCallback(),
        ],
        rng.randrange(4),
    )
    saver = Checkpoint('1ba', folder / 'checkpoints', background=rng.random() < 0.5)
    if isinstance(fault, BaseException):
        fault = type(fault)(*fault.args)  # without notes of earlier fits
    at = At(event or rng.choice(FIT_EVENTS), fault, nth=rng.randrange(1, 4), order=50)
    learn: Learner = quiet(
        make_learner([*(make() for make in more), saver, at], dls=torch_dls(n_workers), path=folder)
    )
    resume = rng.random() < 0.5
    try:
        learn.fit(2, resume=resume)
    except EXPECTED:
        pass
    finally:
        learn.close()
    return name


def measure() -> dict[str, int]:
    "Return the resources that this process holds."
    gc.collect()
    status = Path('/proc/self/status').read_text()
    return {
        'threads': threading.active_count(),
        'system threads': len(os.listdir('/proc/self/task')),
        'files': len(os.listdir('/proc/self/fd')),
        'processes': len(children()),
        'handlers': sum(signal.getsignal(s) is not signal.SIG_DFL for s in (1, 2, 15)),
        'MB': int(status.split('VmRSS:')[1].split()[0]) >> 10,
    }


def children() -> list[str]:
    pids = []
    for task in Path('/proc/self/task').iterdir():
        pids += (task / 'children').read_text().split()
    return pids


def soak(tmp_path: Path, n: int, n_warm: int, seed: int) -> tuple[Counter[str], dict[str, Any]]:
    "Train n times after a warm-up; return the faults, and the resources held before and after."
    rng, done = random.Random(seed), Counter[str]()
    before: dict[str, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for i in range(n_warm + n):
            if i == n_warm:
                before = measure()
            if i % 20 == 0:
                shutil.rmtree(tmp_path / 'run', ignore_errors=True)
            done[use_once(tmp_path / 'run', rng)] += 1
    after = measure()
    expected = {k: v for k, v in before.items() if k != 'MB'}
    assert {k: v for k, v in after.items() if k != 'MB'} == expected
    return done, {'before': before, 'after': after}


def test_some(tmp_path: Path) -> None:
    soak(tmp_path, 9, 5, 0)
    fits_like_fresh(make_learner())


@pytest.mark.full
def test_many(tmp_path: Path) -> None:
    done, held = soak(tmp_path, 500, 60, 1)
    before, after = held['before'], held['after']
    fits_like_fresh(make_learner())
    print(
        f'row 52: 500 fits with {len(done)} kinds of faults in one process: {after["threads"]} threads, '
        f'{after["files"]} files and {after["processes"]} processes as before, '
        f'{before["MB"]} MB before and {after["MB"]} after'
    )
    assert after['MB'] < before['MB'] + 30
