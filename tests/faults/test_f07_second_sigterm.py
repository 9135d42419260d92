"""Row 7: a second SIGTERM during the save. It adds nothing to the first: no torn file, and the run is saved."""

import os
import random
import signal
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from learnkit import Callback
from learnkit.checkpoint import file as statefile
from learnkit.core import files
from tests.faults.run_helpers import all_load, checkpointed, in_child, names, same, training
from tests.helpers.forks import start

# what is called while a file is written, from its beginning to its end
MOMENTS = {
    'begun': (statefile, '_Packer'),
    'packed': (statefile, 'write_tensors'),
    'written': (statefile, '_hash_file'),
    'flushed': (files, 'flush_file'),
    'in place': (files, 'flush_folder'),
}


def send(cb: Any = None) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stopped(folder: Path, moment: str) -> None:
    "Train with the signal in a step, and three more at a moment of each save."
    module, name = MOMENTS[moment]
    real = getattr(module, name)

    def again(*args: Any, **kwargs: Any) -> Any:
        for _ in range(3):
            send()
        return real(*args, **kwargs)

    setattr(module, name, again)
    checkpointed(folder, every=None)(Callback(after_loss=send)).fit(2)


@pytest.mark.parametrize('moment', MOMENTS)
def test_at_a_moment_of_the_save(moment: str, tmp_path: Path) -> None:
    with start(partial(stopped, tmp_path, moment)) as child:
        assert child.wait() == 143, child.stderr
    assert child.code == 143 and names(tmp_path) == ['00001-ep0-ba1.ckpt'] and all_load(tmp_path)


def test_the_run_resumes_exactly(tmp_path: Path) -> None:
    end = in_child(training(tmp_path / 'straight', n_epoch=2))
    with start(partial(stopped_training, tmp_path / 'run')) as child:
        assert child.wait() == 143, child.stderr
    assert same(end, in_child(training(tmp_path / 'run', n_epoch=2)))


def stopped_training(folder: Path) -> None:
    real = statefile.write_tensors
    # two lines in one
    statefile.write_tensors = lambda *args: (send(), real(*args))[1]  # type: ignore[func-returns-value]
    training(
        folder, n_epoch=2, before=lambda learn: learn.add_cb(Callback(after_step=send)) and None
    )()


@pytest.mark.full
def test_two_signals_at_random_instants(tmp_path: Path) -> None:
    rng, codes = random.Random(7), list[int]()
    for i in range(200):
        folder = tmp_path / f'{i}'
        with start(training(folder, n_epoch=20, every='1ba')) as child:
            child.wait(until=lambda folder=folder: bool(names(folder)))
            for _ in range(2):
                child.send(signal.SIGTERM, group=False)
                sleep(rng.random() * 0.01)
            codes.append(child.wait() or 0)
        assert all_load(folder) or child.code == -15
    # -15: the second came when all was saved, and handlers restored
    ok = sum(code in (143, -15) for code in codes)
    print(
        f'row 7: {len(codes)} runs with two SIGTERMs, {codes.count(143)} left with 143, {ok} as they should, 0 torn'
    )
    assert ok == len(codes)
