"""Row 48: Ctrl-C twice, in a save or a slow cleanup. SIGTERM ends the process, and its folder is free."""

import os
import signal
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from learnkit import Callback, Learner
from learnkit.callbacks import Checkpoint, sigterm
from learnkit.engine import run as runs
from tests.faults.fault_helpers import make_learner, raised_by
from tests.helpers.forks import start
from tests.helpers.interrupting import (
    Interrupter,
    interrupting,
    press,
    pythons_own_handlers,  # noqa: F401  # for every test
)

# outside of `deferred_interrupts` an interrupt inside a `__del__` is only a warning
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')


def press_slowly(cb: Any = None) -> None:
    press()
    press()  # in a training batch, the first one waits for its end
    sleep(1)
    raise AssertionError('no KeyboardInterrupt came')


def learner(folder: Path, *cbs: Any, **options: Any) -> Learner:
    return make_learner([*cbs, Checkpoint(folder=folder, **options)])


def problems_in(folder: Path) -> list[str]:
    "Return what is still held: signal handlers, requests, locks."
    found = []
    for sig, own in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(sig) != own:
            found.append(f'{sig.name} is handled by {signal.getsignal(sig)}')
            signal.signal(sig, own)
    if sigterm._active_requests or sigterm._before:
        found.append(f'{sigterm._active_requests} {sigterm._before}')
        sigterm._reset()
    if not found:
        learner(folder).fit(1)
    return found


@pytest.mark.parametrize('background', [False, True])
@pytest.mark.parametrize('where', ['save', 'cleanup'])
def test_in_a_save_and_in_a_slow_cleanup(
    where: str, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Callback(cleanup=press_slowly)
    cbs = [slow] if where == 'save' else [Callback(after_loss=press_slowly), slow]
    options: dict[str, Any] = {'background': background, 'every': '1ba'}
    if where == 'save':
        name = '_collect_state' if background else '_write'
        monkeypatch.setattr(Checkpoint, name, lambda *_: press_slowly())
    learn = learner(tmp_path, *cbs, **options)
    e = raised_by(lambda: learn.fit(2))
    monkeypatch.undo()
    assert type(e) is KeyboardInterrupt
    assert problems_in(tmp_path) == []
    # and the Learner itself
    learn.remove_cbs(cbs)
    learn.fit(1)
    assert problems_in(tmp_path) == []


def test_the_process_is_ended_by_sigterm(tmp_path: Path) -> None:
    def job() -> None:
        slow = Callback(cleanup=press_slowly)
        learn = learner(tmp_path, Callback(after_loss=press_slowly), slow)
        assert type(raised_by(lambda: learn.fit(1))) is KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGTERM)
        sleep(5)

    with start(job) as child:
        assert child.wait() == -signal.SIGTERM, child.stderr


def second_at(at: int, folder: Path) -> tuple[bool, list[str]]:
    "Interrupt a fit, and its end at an instant; return whether it was reached, and what is still held."
    learn = learner(folder, Callback(after_loss=interrupt_fit))
    interrupter = Interrupter(at, runs.end_run.__code__, Learner.fit.__code__)
    # within the end of the run, so that no context around the fit is in the way
    with interrupting(interrupter):
        learn.fit(1)
    return interrupter.left <= 0, problems_in(folder)


def interrupt_fit(cb: Any) -> None:
    raise KeyboardInterrupt


def test_the_second_at_some_instants_of_the_end(tmp_path: Path) -> None:
    results = [second_at(at, tmp_path) for at in (1, 5, 20, 50, 90, 140)]
    assert results[0][0] and not any(problems for _, problems in results), results


@pytest.mark.full
def test_the_second_at_many_instants_of_the_end(tmp_path: Path) -> None:
    n, bad = 0, list[Any]()
    for at in range(1, 10**5, 5):
        has_come, problems = second_at(at, tmp_path)
        if not has_come:
            break
        n += 1
        bad += problems
    print(f'row 48: {n} instants of the end of an interrupted fit, {len(bad)} left something taken')
    assert n > 50 and not bad, bad[:5]


# -- what fails ------------------------------------------------------------------------------------


def test_what_fails_does_not_keep_others_from_giving_back(tmp_path: Path) -> None:
    class Holds(Callback):
        def before_fit(self) -> None:
            self.learn.run.releases.append(self.release)

        def release(self) -> None:
            raise OSError('cannot be given back')

    learn = learner(tmp_path, Holds())
    with pytest.raises(OSError, match='cannot be given back'):
        learn.fit(1)
    assert problems_in(tmp_path) == []
    learn.add_cb(Callback(after_loss=_fail))
    e = raised_by(lambda: learn.fit(1))
    assert type(e) is ValueError and 'cannot be given back' in ''.join(e.__notes__)


def _fail(cb: Any) -> None:
    raise ValueError('first')
