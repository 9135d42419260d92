"""Row 8: Ctrl-C at every event, real ones at random instants, and a second one that aborts the cleanup."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import pytest
import torch

from learnkit import Callback, Learner
from tests.faults.fault_helpers import (
    CANCEL_EVENTS,
    FIT_EVENTS,
    N_EPOCH,
    At,
    Watch,
    fits_like_fresh,
    fresh,
    is_clean,
    make_learner,
    notes,
    others_in_full,
    raised_by,
    start_again,
    trigger,
)
from tests.faults.file_helpers import fork
from tests.helpers.forks import start


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    "Make SIGINT raise KeyboardInterrupt in tests in the background as well, where the shell ignores it."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press(cb: Any = None) -> None:
    "Send this process a real SIGINT, and wait until it arrives."
    signal.raise_signal(signal.SIGINT)
    time.sleep(1)
    raise AssertionError('no KeyboardInterrupt came')


def interrupt(cb: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ('event', 'how'),
    others_in_full(
        itertools.product([*FIT_EVENTS, *CANCEL_EVENTS], [interrupt, press]),
        lambda event, how: how is press or event in ('before_fit', 'after_loss', 'cleanup'),
    ),
)
def test_at_every_event(event: str, how: Callable[[Any], None]) -> None:
    handler = signal.getsignal(signal.SIGINT)
    learn = make_learner([*trigger(event), At(event, how), watch := Watch()])
    start_again(learn)
    e = raised_by(lambda: learn.fit(N_EPOCH, iteration=1))
    assert type(e) is KeyboardInterrupt
    if event != 'cleanup':
        assert notes(e)[0].startswith(f'in At.{event} (epoch {int(event == "after_fit")}, batch ')
        assert watch.fired == [('after_error', e), ('cleanup', e)]
    assert signal.getsignal(signal.SIGINT) is handler
    is_clean_but_for_display(learn) if event == 'cleanup' else is_clean(learn)
    fits_like_fresh(learn, [cb for cb in learn.cbs if isinstance(cb, (At, Watch))])


def is_clean_but_for_display(learn: Learner) -> None:
    "The user aborts a cleanup, and the loop's state is restored nevertheless."
    assert learn.run.depth == 0
    assert learn.run.levels == ()
    assert learn.fitting is False
    assert learn.run.stopping is False
    assert learn.error is None
    assert learn.loss is None and learn.xb == (None,) and 'loss_grad' not in vars(learn)


@pytest.mark.parametrize(
    ('where', 'event', 'how'),
    others_in_full(
        itertools.product(
            ['before_fit', 'after_loss', 'before_validate', 'after_epoch'],
            ['after_error', 'cleanup'],
            [interrupt, press],
        ),
        lambda where, event, how: where == 'after_loss' or (event, how) == ('cleanup', press),
    ),
)
def test_a_second_one_aborts_the_cleanup(
    where: str, event: str, how: Callable[[Any], None]
) -> None:
    first = KeyboardInterrupt('first')
    ran: list[str] = []
    cbs = [
        At(where, first),
        Callback(**{event: lambda cb: ran.append('before')}),
        At(event, how),
        Callback(**{event: lambda cb: ran.append('behind')}),
        Callback(cleanup=lambda cb: ran.append('cleanup')),
    ]
    learn = make_learner(cbs)
    start_again(learn)
    e = raised_by(lambda: learn.fit(N_EPOCH))
    assert type(e) is KeyboardInterrupt and e is not first and e.__context__ is first
    assert ran == ['before']
    is_clean_but_for_display(learn)
    fits_like_fresh(learn, cbs)


@pytest.mark.parametrize('how', ['validate', 'get_preds'])
@pytest.mark.parametrize('outer', ['after_batch', 'before_validate', 'after_fit'])
def test_in_a_nested_run(outer: str, how: str) -> None:
    cbs = [
        At(outer, lambda cb: getattr(cb.learn, how)()),
        At('after_pred', press, depth=2),
        watch := Watch(),
    ]
    learn = make_learner(cbs)
    start_again(learn)
    e = raised_by(lambda: learn.fit(N_EPOCH))
    assert type(e) is KeyboardInterrupt
    assert [x[0] for x in watch.fired] == ['after_error', 'cleanup']
    fits_like_fresh(learn, cbs)


def test_in_the_model_and_in_the_loader() -> None:
    class Loader(list[Any]):
        def __iter__(self) -> Any:
            for i, batch in enumerate(list.__iter__(self)):
                if i == 1:
                    press()
                yield batch

    learn = make_learner(watch := Watch())
    learn.dls.train = Loader(learn.dls.train)
    e = raised_by(lambda: learn.fit(1))
    assert type(e) is KeyboardInterrupt and notes(e) == ['in train (epoch 0, batch 1)']
    assert [x[0] for x in watch.fired] == ['after_error', 'cleanup']
    fits_like_fresh(learn, watch)

    hook = learn.model[0].register_forward_hook(lambda *_: press())
    assert type(raised_by(lambda: learn.fit(1))) is KeyboardInterrupt
    hook.remove()
    fits_like_fresh(learn)


# -- real signals from another process, at random instants -----------------------------------------


def run_children(n: int, seed: int, longest_s: float) -> list[dict[str, Any]]:
    "Start a process that forks a child for each interrupt, so that no interrupt reaches the tests."
    with start(partial(interrupt_children, n, seed, longest_s)) as child:
        assert child.wait(560) == 0, child.stderr
        return [json.loads(line) for line in child.stdout.splitlines() if line.startswith('{')]


def test_at_random_instants() -> None:
    results = run_children(10, seed=0, longest_s=0.04)
    assert len(results) == 10 and all(r['ok'] for r in results), [r for r in results if not r['ok']]


@pytest.mark.full
def test_at_many_random_instants() -> None:
    results = run_children(1000, seed=1, longest_s=0.06)
    bad = [r for r in results if not r['ok']]
    places = {r['where'] for r in results}
    print(
        f'row 8: {len(results)} real SIGINTs at random instants, {len(places)} different places, {len(bad)} not clean'
    )
    assert not bad, bad[:5]


def fit_until_interrupted() -> dict[str, Any]:
    "Fit repeatedly; after the signal check the remaining state and fit once more."
    watch, learn = Watch(), make_learner()
    learn.add_cb(watch)
    at = 0
    try:
        os.write(1, b'.')
        while True:
            watch.fired = []
            at += 1
            learn.fit(N_EPOCH)
    except KeyboardInterrupt as e:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        tb, where = e.__traceback__, ''
        while tb:
            where, tb = (
                f'{tb.tb_frame.f_code.co_filename.rsplit("/", 1)[-1]}:{tb.tb_lineno}',
                tb.tb_next,
            )
        notes_seen = notes(e)
    fired = [x[0] for x in watch.fired]
    problems = []
    if learn.run.depth or learn.run.levels or learn.fitting:
        problems.append(f'{learn.run.depth=} {learn.run.levels=} {learn.fitting=}')
    if fired not in ([], ['cleanup'], ['after_error', 'cleanup']):
        problems.append(f'{fired=}')
    # between a context's `__enter__` and its block the run is ended by its generator, which has no note for this one
    if fired == ['after_error', 'cleanup'] and not notes_seen and 'contextlib' not in where:
        problems.append('no note')
    try:
        fits_like_fresh(learn, watch)
    except BaseException as e:
        problems.append(f'next fit: {type(e).__name__} {str(e)[:300]}')
    return {
        'ok': not problems,
        'problems': problems,
        'where': where,
        'notes': notes_seen,
        'fired': fired,
        'fit': at,
    }


def interrupt_children(n: int, seed: int, longest_s: float) -> None:
    rng = random.Random(seed)
    with redirect_stdout(io.StringIO()):
        fresh()
    for _ in range(n):
        (read, write), (ready, go) = os.pipe(), os.pipe()
        pid = fork(partial(report_interrupted_fit, go, write))
        os.close(write)
        os.close(go)
        os.read(ready, 1)
        time.sleep(rng.random() * longest_s)
        os.kill(pid, signal.SIGINT)
        with os.fdopen(read) as f:
            text = f.read()
        os.close(ready)
        os.waitpid(pid, 0)
        print(
            text or json.dumps({'ok': False, 'problems': ['the child died'], 'where': ''}),
            flush=True,
        )


def report_interrupted_fit(go: int, write: int) -> None:
    os.dup2(go, 1)
    with redirect_stdout(io.StringIO()):
        result = fit_until_interrupted()
    os.write(write, json.dumps(result).encode())


def test_it_came_while_torch_had_gradients_switched_off() -> None:
    "A signal inside `no_grad.__exit__` leaves gradients off for the thread; a run restores the mode."

    def off(cb: Any) -> None:
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    try:
        for run in (
            lambda learn: learn.fit(1),
            lambda learn: learn.validate(),
            lambda learn: learn.get_preds(),
        ):
            learn = make_learner(bad := At('after_batch', off))
            start_again(learn)
            assert type(raised_by(lambda run=run, learn=learn: run(learn))) is KeyboardInterrupt
            assert torch.is_grad_enabled()
            fits_like_fresh(learn, bad)
    finally:
        torch.set_grad_enabled(True)


class Interrupter:
    "A profiler that presses Ctrl-C at the n-th call or return, where CPython checks for signals."

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if event not in ('call', 'c_return'):
            return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)


def interrupted(run: Callable[[Learner], Any], at: int) -> tuple[bool, str]:
    "Interrupt a run at an instant, and fit once more; return whether the run reached it, and the errors."
    torch.set_grad_enabled(True)
    learn, interrupter = make_learner(), Interrupter(at)
    sys.setprofile(interrupter)
    try:
        run(learn)
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    try:
        fits_like_fresh(learn)
    except Exception as e:
        return interrupter.left <= 0, f'{type(e).__name__} {e}'[:200]
    return interrupter.left <= 0, ''


@pytest.mark.full
# an interrupt inside a `__del__` is only a warning
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_at_every_instant() -> None:
    "Entering or leaving a context completes before the interrupt is raised."
    n = 0
    bad = list[str]()
    runs = (lambda learn: learn.fit(1, cbs=Callback()), Learner.validate, Learner.get_preds)
    for run in runs:
        for at in range(1, 10**6, 5):
            reached, problem = interrupted(run, at)
            if not reached:
                break
            n += 1
            if problem:
                bad.append(problem)
    print(f'row 8: {n} instants of three runs, the next fit differs after {len(bad)}')
    torch.set_grad_enabled(True)
    assert n > 1000 and not bad, bad[:10]
