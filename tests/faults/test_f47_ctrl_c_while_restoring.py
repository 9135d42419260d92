"""Row 47: Ctrl-C while `lr_find`, `check_resume` and others restore. All is restored, and the next fit works."""

import io
import signal
from collections import deque
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import pytest
import torch

from learnkit import Learner
from learnkit.callbacks.lr_finder import LRFinder
from learnkit.core.interrupts import run_all
from learnkit.engine.snapshot import Snapshot
from tests.faults.fault_helpers import fits_like_fresh, make_learner
from tests.helpers.interrupting import (
    Interrupter,
    interrupt,
    interrupting,
    press,
    pythons_own_handlers,  # noqa: F401  # for every test
)

# outside of `deferred_interrupts` an interrupt inside a `__del__` is only a warning
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')


def find(learn: Learner) -> None:
    learn.lr_find(num_it=6, show_plot=False)


def find_in_a_fit(learn: Learner) -> None:
    learn.fit(2, cbs=LRFinder(num_it=6))


def check(learn: Learner) -> None:
    learn.check_resume(n_batches=2)


RESTORING = {'lr_find': find, 'LRFinder': find_in_a_fit, 'check_resume': check}


def interrupted(run: Callable[[Learner], None], at: int) -> tuple[bool, str]:
    "Press Ctrl-C at an instant of restoring; return whether it was reached, and the errors."
    learn = make_learner()
    interrupter = Interrupter(at, Snapshot.undo.__code__, run.__code__)
    before = {name: id(value) for name, value in vars(learn).items() if not name.startswith('_')}
    with redirect_stdout(io.StringIO()), interrupting(interrupter):
        run(learn)
    problems = []
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        problems.append('the handler is still there')
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if run is find:
        lost = [name for name in before if name not in vars(learn)]
        problems += [f'{lost=}'] * bool(lost)
    vars(learn).pop('lr_search', None)  # the result, once all is restored
    try:
        # a fit with the finder counts as one
        learn.fit(1) if run is find_in_a_fit else fits_like_fresh(learn)
    except Exception as e:
        problems.append(f'{type(e).__name__} {e}'[:200])
    return interrupter.left <= 0, '; '.join(problems)


@pytest.mark.parametrize('name', RESTORING)
def test_at_some_instants(name: str) -> None:
    results = [interrupted(RESTORING[name], at) for at in (1, 2, 9, 40, 131, 260)]
    assert results[0][0] and not any(problem for _, problem in results), results


@pytest.mark.full
@pytest.mark.parametrize('name', RESTORING)
def test_at_many_instants(name: str) -> None:
    n, bad = 0, list[str]()
    # check_resume has 160,000 instants, each of which takes two fits
    for at in range(1, 10**6, 541 if name == 'check_resume' else 5):
        has_come, problem = interrupted(RESTORING[name], at)
        if not has_come:
            break
        n += 1
        bad += [problem] * bool(problem)
    print(f'row 47: {n} instants of the restoring of {name}, the next fit differs after {len(bad)}')
    assert n > 50 and not bad, bad[:10]


# -- the mechanism ---------------------------------------------------------------------------------


def contents() -> list[Any]:
    x = torch.zeros(2)
    return [[1, [2]], {'a': x, 'b': {'c': 3}}, deque([4, 5], maxlen=3), {6, 7}, np.zeros(2)]


def change(o: list[Any]) -> None:
    o[0][:] = []
    o[1]['a'].add_(1)
    o[1]['z'] = o[1].pop('a')
    o[1]['b'].clear()
    o[2].append(8)
    o[2].append(9)
    o[3].clear()
    o[4] += 1


@pytest.mark.parametrize('how', [press, interrupt])
def test_a_snapshot_is_written_back_as_a_whole(how: Callable[[], None]) -> None:
    for at in range(1, 500):
        o = contents()
        snapshot = Snapshot([o])
        change(o)
        interrupter = Interrupter(at, run_all.__code__, how=how)
        with interrupting(interrupter):
            snapshot.undo()
        if interrupter.left > 0:
            break
        assert torch.is_grad_enabled()
        # before the first step nothing has begun
        if at > 1:
            assert repr(o) == repr(contents())
    assert at > 20
