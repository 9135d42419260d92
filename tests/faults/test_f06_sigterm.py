"""Row 6: SIGTERM, to the process or its group. The step is finished, the run saved, the code 143, and resume exact."""

import os
import random
import signal
import sys
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest

from learnkit import Callback
from learnkit.callbacks import checkpoint
from learnkit.engine.pause import PauseRequest
from tests.faults.fault_helpers import At, make_learner
from tests.faults.run_helpers import (
    State,
    all_load,
    checkpointed,
    in_child,
    names,
    same,
    torch_dls,
    training,
)
from tests.helpers.forks import reached, start
from tests.helpers.harness import run_until_done

# of 3 batches and 2 of validation an epoch; a life ends with its batch, or after the evaluation
SIGNAL_POINTS = [
    'before_fit',
    'train before_batch',
    'train after_loss',
    'train after_batch',
    'batch_checkpoint',
    'before_eval',
    'valid after_pred',
    'after_eval',
    'before_epoch',
    'after_epoch',
    'epoch_checkpoint',
]


@pytest.fixture(scope='module')
def straight(tmp_path_factory: pytest.TempPathFactory) -> State:
    return in_child(training(tmp_path_factory.mktemp('straight'), preemption=False))  # type: ignore[no-any-return]


@pytest.fixture(scope='module')
def straight_3(tmp_path_factory: pytest.TempPathFactory) -> State:
    "Return the state after three epochs, for slow saves."
    folder = tmp_path_factory.mktemp('straight')
    return in_child(training(folder, n_epoch=3, preemption=False))  # type: ignore[no-any-return]


def check(lives: Any, folder: Path, end: State, kills: int) -> None:
    assert lives.codes == [143] * kills + [0], (lives.codes, lives.stderr)
    assert all('SIGTERM: the run is saved in' in text for text in lives.stderr[:-1])
    assert same(end, lives.result) and all_load(folder)


def test_at_events_of_all_kinds(straight: State, tmp_path: Path) -> None:
    lives = run_until_done(training(tmp_path), SIGNAL_POINTS, signal.SIGTERM, group=False)
    check(lives, tmp_path, straight, len(SIGNAL_POINTS))


def test_to_a_group_with_workers(straight_3: State, tmp_path: Path) -> None:
    "The workers give their batches until the run is saved."
    places = ['train after_loss', 'valid before_batch', 'before_epoch']
    make = lambda: make_learner(dls=torch_dls(n_workers=2))
    lives = run_until_done(training(tmp_path, make, n_epoch=3), places, signal.SIGTERM, group=True)
    check(lives, tmp_path, straight_3, len(places))


def test_during_a_save_in_the_background(
    straight_3: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoint.write_state

    def slowly(*args: Any) -> None:
        reached('saving')
        sleep(0.05)
        real(*args)
        reached('saved')

    monkeypatch.setattr(checkpoint, 'write_state', slowly)
    places: list[Any] = [('saving', 2), ('saved', 3)]
    job = training(tmp_path, every='1ba', n_epoch=3)
    lives = run_until_done(job, places, signal.SIGTERM, group=False)
    check(lives, tmp_path, straight_3, len(places))


# -- handlers --------------------------------------------------------------------------------------


def send(cb: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_handler_of_before_is_called_after_the_save(tmp_path: Path) -> None:
    def job() -> None:
        signal.signal(
            signal.SIGTERM, lambda signum, frame: print('told', signum, len(names(tmp_path)))
        )
        checkpointed(tmp_path)(Callback(after_loss=send)).fit(1)

    with start(job) as child:
        assert (child.wait(), child.stdout) == (143, 'told 15 1\n'), child.stderr


@pytest.mark.filterwarnings('ignore:These attributes changed since the fit began')
def test_handlers_are_there_only_during_the_fit(tmp_path: Path) -> None:
    def own_handler(signum: int, frame: Any) -> None:
        "Never called."

    seen: list[Any] = []
    watched = (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT)
    now = lambda: [signal.getsignal(s) for s in watched]

    def handling_ctrl_c() -> Any:
        "Return what the handler of the run calls at this moment."
        owner = signal.getsignal(signal.SIGINT).__self__  # type: ignore[union-attr]
        return owner._handler

    kept = signal.signal(signal.SIGTERM, own_handler)
    try:
        before = now()
        learn = checkpointed(tmp_path)(
            Callback(
                after_batch=lambda cb: seen.append([*now(), handling_ctrl_c()]),
                cleanup=lambda cb: 1 / 0,
            )
        )
        for run in (lambda: learn.fit(1), lambda: learn.fit(1), learn.validate, learn.get_preds):
            with pytest.raises(ZeroDivisionError):
                run()
            assert now() == before
        # Ctrl-C in a batch is handled by the fit, and outside of fits as before
        assert seen[0][0] is not own_handler and seen[0][1] == before[1]
        assert seen[0][3].__func__ is PauseRequest.receive_interrupt
        assert seen[-1][:2] == before[:2] and seen[-1][3] is before[2]
    finally:
        signal.signal(signal.SIGTERM, kept)


def test_in_ipython_the_fit_ends_and_the_learner_trains_on(tmp_path: Path) -> None:
    def job() -> list[Any]:
        sys.modules['IPython'] = SimpleNamespace(get_ipython=lambda: 'a shell')  # type: ignore[assignment]
        learn = checkpointed(tmp_path)(At('after_loss', send))
        learn.fit(2)
        first = learn.opt.n_steps, names(tmp_path)
        learn.fit(2, resume=True)
        is_restored = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        return [*first, learn.opt.n_steps, len(learn.history), is_restored]

    assert in_child(job) == [1, ['00001-ep0-ba1.ckpt'], 6, 2, True]


def test_an_error_that_comes_first_stays_and_the_signal_is_handed_on(tmp_path: Path) -> None:
    def fail(cb: Any) -> None:
        if cb.training:
            send(cb)
        if cb.training:
            raise ValueError('a bug')

    def job() -> None:
        signal.signal(signal.SIGTERM, lambda *_: print('told'))
        learn = checkpointed(tmp_path)(Callback(after_loss=fail))
        with pytest.raises(ValueError, match='a bug'):
            learn.fit(1)
        learn.validate()  # the request is over
        print('on')

    with start(job) as child:
        assert (child.wait(), child.stdout) == (0, 'told\non\n'), child.stderr


@pytest.mark.full
def test_at_random_instants(tmp_path: Path) -> None:
    "The parent sends signals at any time, to the process or its group, with and without workers."
    rng, kills, saved = random.Random(6), 0, 0
    for workers in (0, 2):
        make = lambda workers=workers: make_learner(dls=torch_dls(workers))
        for n in range(12):
            folder = tmp_path / f'{workers}-{n}'
            if n == 0:
                end = in_child(training(tmp_path / f'straight-{workers}', make, n_epoch=8))
            instants = [rng.uniform(0.02, 0.4 + 0.4 * workers) for _ in range(6)]
            job = training(folder, make, n_epoch=8)
            lives = run_until_done(job, instants, signal.SIGTERM, group=bool(n % 2))
            assert same(end, lives.result) and all_load(folder)
            kills += lives.kills
            saved += lives.codes.count(143)
    print(
        f'row 6: {kills} SIGTERMs at random instants, {saved} saved and left with 143, 0 runs differ'
    )
