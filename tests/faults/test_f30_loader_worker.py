"""Row 30: a loader's worker is killed, raises or hangs. An error, no orphans, and the next fit works."""

import gc
import itertools
import multiprocessing
import os
import signal
import warnings
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from fastcore.basics import noop
from torch.utils.data import TensorDataset, get_worker_info

from learnkit import DataLoaders
from tests.faults.fault_helpers import BS, is_clean, others_in_full
from tests.faults.run_helpers import all_load, checkpointed, in_child, names, torch_dls

TIMEOUT_S = 2  # for a worker that hangs


class Faulty(TensorDataset):
    """A data set that makes its worker fail in the third batch of that worker, while a file asks for it.

    By then the fit runs, and with `prefetch_factor=1` the worker's earlier batches have arrived. torch raises the death
    of a worker from a signal handler: in the start of a thread or the transfer of a batch it would be another error.
    """

    what: str
    flag: Path
    n_read = 0

    def __getitem__(self, i: int) -> Any:
        self.n_read += 1
        if self.n_read == 2 * BS + 1 and get_worker_info() is not None and self.flag.exists():
            if self.what == 'killed':
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == 'raises':
                raise KeyError('a sample is broken')
            if self.what == 'hangs':
                sleep(600)
        return super().__getitem__(i)


def dls(what: str, flag: Path, persistent: bool) -> DataLoaders:
    timeout = TIMEOUT_S if what == 'hangs' else 600
    options = {'timeout': timeout, 'persistent_workers': persistent, 'prefetch_factor': 1}
    found = torch_dls(n_workers=2, n_train=8, **options)
    for loader in found:
        loader.dataset.__class__ = Faulty
        loader.dataset.what, loader.dataset.flag = what, flag
    return found


ERRORS = {
    'killed': (RuntimeError, 'is killed by signal: Killed|exited unexpectedly'),
    'raises': (KeyError, 'a sample is broken'),
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


def wait_for_workers() -> None:
    "Wait until no worker is left: the threads of one that was killed may end after its main thread."
    end = monotonic() + 60
    while (found := [*children(), *multiprocessing.active_children()]) and monotonic() < end:
        sleep(0.01)
    assert not found, 'no orphans'


def job(what: str, folder: Path, persistent: bool) -> None:
    "Fit, which has to fail, and fit again without the fault."
    warnings.filterwarnings('ignore', PERSISTENT)
    flag = folder / 'fault'
    flag.touch()
    learn = checkpointed(folder / 'run', every='1ba')(dls=dls(what, flag, persistent))
    error, match = ERRORS[what]
    with pytest.raises(error, match=match) as caught:
        learn.fit(2)
    assert any('epoch 0, batch' in note for note in caught.value.__notes__)
    del caught
    gc.collect()  # the traceback, which has the workers
    if not persistent:
        wait_for_workers()
    learn.logger = print
    is_clean(learn)
    learn.logger = noop
    flag.unlink()
    for loader in learn.dls:
        loader.timeout = 0
    learn.fit(2, resume=bool(names(folder / 'run')))
    assert len(learn.history) == 2 and all_load(folder / 'run')
    if not persistent:
        assert not children()


@pytest.mark.parametrize(
    ('what', 'persistent'),
    others_in_full(
        itertools.product(['killed', 'raises'], [False, True]),
        lambda what, persistent: persistent == (what == 'raises'),
    ),
)
def test_the_error_comes_and_the_next_fit_works(
    what: str, persistent: bool, tmp_path: Path
) -> None:
    in_child(partial(job, what, tmp_path, persistent))


def test_a_hanging_worker_raises_after_its_timeout_and_the_next_fit_works(tmp_path: Path) -> None:
    in_child(partial(job, 'hangs', tmp_path, False))


@pytest.mark.full
def test_again_and_again(tmp_path: Path) -> None:
    for i, what in enumerate([*ERRORS] * 10):
        (tmp_path / f'{i}').mkdir()
        in_child(partial(job, what, tmp_path / f'{i}', bool(i % 2)))
    print('row 30: 30 failing workers, each named by an error, no orphans')
