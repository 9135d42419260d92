"""Row 30: a loader's worker is killed, raises or hangs. An error in time, no orphans, and the next fit works."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from fastcore.basics import noop
from torch.utils.data import TensorDataset, get_worker_info

from learnkit import DataLoaders, Learner
from tests.faults.fault_helpers import BS, N_TRAIN, is_clean
from tests.faults.run_helpers import all_load, checkpointed, names, torch_dls
from tests.helpers.forks import start

TIMEOUT_S = 2
LIMIT_S = TIMEOUT_S + 200  # generous, because a loaded machine takes seconds to start workers


class Faulty(TensorDataset):
    "A data set in which one sample makes its worker fail, while that is asked for by a file."

    what: str
    flag: Path

    def __getitem__(self, i: int) -> Any:
        if i == 9 and get_worker_info() is not None and self.flag.exists():
            if self.what == 'killed':
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == 'raises':
                raise KeyError('sample 9 is broken')
            if self.what == 'hangs':
                sleep(600)
        return super().__getitem__(i)


def dls(what: str, flag: Path, persistent: bool) -> DataLoaders:
    found = torch_dls(n_workers=2, timeout=TIMEOUT_S, persistent_workers=persistent)
    for loader in found:
        x, y = loader.dataset.tensors
        n = max(BS * N_TRAIN, len(x))
        loader.dataset.__class__ = Faulty
        loader.dataset.tensors = (x.repeat(2, 1)[:n], y.repeat(2, 1)[:n])
        loader.dataset.what, loader.dataset.flag = what, flag
    return found


ERRORS = {
    'killed': (RuntimeError, 'is killed by signal: Killed|exited unexpectedly'),
    'raises': (KeyError, 'sample 9'),
    'hangs': (RuntimeError, f'timed out after {TIMEOUT_S} seconds'),
}


PERSISTENT = 'The random generators of persistent workers'


def children() -> list[int]:
    "The processes that have this one as their parent, dead ones that nobody has waited for among them."
    found = []
    for stat in Path('/proc').glob('[0-9]*/stat'):
        try:
            state, ppid = stat.read_text().rpartition(')')[2].split()[:2]
        except OSError:
            continue
        if int(ppid) == os.getpid() and state != 'Z':
            found.append(int(stat.parent.name))
    return found


def fails(learn: Learner, what: str) -> float:
    "Fit, which has to fail, and return how long that took."
    error, match = ERRORS[what]
    began = monotonic()
    with pytest.raises(error, match=match) as caught:
        learn.fit(2)
    assert any('epoch 0, batch' in note for note in caught.value.__notes__)
    return monotonic() - began


def job(what: str, folder: Path, persistent: bool) -> float:
    warnings.filterwarnings('ignore', PERSISTENT)
    flag = folder / 'fault'
    flag.touch()
    learn = checkpointed(folder / 'run', every='1ba')(dls=dls(what, flag, persistent))
    took = fails(learn, what)
    gc.collect()  # the traceback, which has the workers
    if not persistent:
        assert not children() and not multiprocessing.active_children(), 'no orphans'
    learn.logger = print
    is_clean(learn)
    learn.logger = noop
    flag.unlink()
    learn.fit(2, resume=bool(names(folder / 'run')))
    assert len(learn.history) == 2 and all_load(folder / 'run')
    if not persistent:
        assert not children()
    return took


@pytest.mark.parametrize('persistent', [False, True], ids=['', 'persistent'])
@pytest.mark.parametrize('what', ['killed', 'raises'])
def test_the_error_comes_in_time_and_the_next_fit_works(
    what: str, persistent: bool, tmp_path: Path
) -> None:
    with start(partial(job, what, tmp_path, persistent)) as child:
        assert child.wait() == 0, child.stderr
        assert child.result < LIMIT_S, f'{child.result:.2f} s'


def test_a_hanging_worker_raises_in_time_and_the_next_fit_works(tmp_path: Path) -> None:
    "Both kinds of workers at once, as each waits for its timeout."
    with ExitStack() as stack:
        children = []
        for persistent in (False, True):
            (folder := tmp_path / f'{persistent}').mkdir()
            children.append(stack.enter_context(start(partial(job, 'hangs', folder, persistent))))
        for child in children:
            assert child.wait() == 0, child.stderr
            assert child.result < LIMIT_S, f'{child.result:.2f} s'


@pytest.mark.full
def test_again_and_again(tmp_path: Path) -> None:
    took: dict[str, list[float]] = {what: [] for what in ERRORS}
    for i in range(10):
        for what, seconds in took.items():
            torch.manual_seed(i)
            (tmp_path / f'{what}{i}').mkdir()
            with start(partial(job, what, tmp_path / f'{what}{i}', bool(i % 2))) as child:
                assert child.wait() == 0, child.stderr
                seconds.append(child.result)
    slowest = ', '.join(f'{what} {max(seconds):.2f} s' for what, seconds in took.items())
    print(
        f'row 30: {sum(map(len, took.values()))} failing workers, the slowest error: {slowest}, no orphans'
    )
    assert max(map(max, took.values())) < LIMIT_S
