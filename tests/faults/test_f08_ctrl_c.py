"""Row 8: Ctrl-C at every event, at instants of all kinds, and a second one that aborts the cleanup.

While a training batch is drawn or trained, the first one arrives after `batch_checkpoint`, a second one at once.
Workers of loaders, to which a terminal sends it too, live through it."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import Callback, DataLoaders, Learner
from tests.faults.fault_helpers import (
    CANCEL_EVENTS,
    FIT_EVENTS,
    N_EPOCH,
    At,
    Watch,
    digest,
    fits_like_fresh,
    is_clean,
    make_learner,
    notes,
    others_in_full,
    raised_by,
    rows,
    seed_torch,
    start_again,
    trigger,
)
from tests.faults.run_helpers import in_child, quiet, torch_dls
from tests.helpers.interrupting import Interrupter, interrupting, pythons_own_handlers  # noqa: F401
from tests.helpers.learners import quiet_learner


def press(cb: Any = None) -> None:
    "Send this process a real SIGINT."
    signal.raise_signal(signal.SIGINT)
    raise AssertionError('no KeyboardInterrupt came')


def press_twice(cb: Any = None) -> None:
    "Send this process two real SIGINTs; within a pass, the second one interrupts it."
    signal.raise_signal(signal.SIGINT)
    press()


def interrupt(cb: Any) -> None:
    raise KeyboardInterrupt


IN_BATCH = [
    'before_draw',
    'after_draw',
    'before_batch',
    'before_pred',
    'after_pred',
    'after_loss',
    'before_backward',
    'after_cancel_backward',
    'after_backward',
    'before_step',
    'after_cancel_step',
    'after_step',
    'after_cancel_batch',
    'after_batch',
    'batch_checkpoint',
]


@pytest.mark.parametrize('event', IN_BATCH)
def test_the_first_one_in_a_batch_ends_the_fit_behind_it(event: str) -> None:
    fired: list[str] = []

    def press_once(cb: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    last = Callback(
        batch_checkpoint=lambda cb: fired.append('batch_checkpoint'),
        after_train=lambda cb: fired.append('after_train'),
        cleanup=lambda cb: fired.append('cleanup'),
    )
    learn = make_learner([*trigger(event), bad := At(event, press_once), last, watch := Watch()])
    start_again(learn)
    e = raised_by(lambda: learn.fit(N_EPOCH, iteration=1))
    assert type(e) is KeyboardInterrupt and 'epoch 0' in str(e) and 'learn.resume()' in str(e)
    assert fired == ['batch_checkpoint'] * learn.time.ba + ['cleanup']
    assert watch.fired == [('after_error', e), ('cleanup', e)]
    assert signal.getsignal(signal.SIGINT) is handler
    assert learn.paused is not None and learn.paused.time.ba == learn.time.ba
    is_clean(learn)
    fits_like_fresh(learn, [bad, last, watch, *trigger(event)])


BATCHES = [(torch.full((2, 1), float(i)), torch.ones(2, 1)) for i in range(5)]


class Pressing:
    "A loader in whose third batch of the first epoch Ctrl-C comes `n` times."

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        for i, batch in enumerate(BATCHES):
            if i == 2:
                n, self.n = self.n, 0
                for _ in range(n):
                    signal.raise_signal(signal.SIGINT)
            yield batch

    def __len__(self) -> int:
        return len(BATCHES)


@pytest.mark.parametrize(('n', 'n_trained'), [(1, 3), (2, 2)])
def test_a_batch_that_is_drawn_is_trained_unless_it_comes_twice(n: int, n_trained: int) -> None:
    def make(loader: Any) -> Learner:
        torch.manual_seed(0)
        learn: Learner = quiet_learner(DataLoaders(loader), nn.Linear(1, 1), nn.MSELoss())
        return learn

    straight, learn = make(BATCHES), make(Pressing(n))
    straight.fit(2)
    e = raised_by(lambda: learn.fit(2))
    assert type(e) is KeyboardInterrupt and f'{n_trained}ba: `learn.resume()`' in str(e)
    assert learn.time.ba == n_trained
    is_cut = pytest.warns(UserWarning, match='first 2 batches are skipped')
    with nullcontext() if n == 1 else is_cut:
        learn.resume()
    assert learn.time.ba == 10
    assert all(map(torch.equal, learn.model.parameters(), straight.model.parameters()))


def press_in_group(cb: Any) -> None:
    "Send a real SIGINT to this process and the workers of its loaders, as a terminal does."
    os.killpg(0, signal.SIGINT)


def train_with_workers(event: str, is_pressed: bool, persistent: bool) -> list[Any]:
    "Train in a process group, and continue in memory after Ctrl-C in the second batch."
    learn = quiet(make_learner(dls=torch_dls(2, persistent_workers=persistent)))
    bad = At(event, press_in_group, nth=2)
    if is_pressed:
        learn.add_cb(bad)
    seed_torch(5)
    stopped = []
    try:
        learn.fit(2)
    except KeyboardInterrupt as e:
        stopped = [str(e)]
        learn.remove_cb(bad)
        learn.validate()
        learn.resume()
    result = [len(stopped), digest(learn), rows(learn)]
    learn.close()
    return result


@pytest.mark.parametrize(
    ('event', 'persistent'),
    others_in_full(
        product([e for e in IN_BATCH if not e.startswith('after_cancel_')], [False, True]),
        lambda event, persistent: event == 'after_loss',
    ),
)
def test_workers_live_through_it(event: str, persistent: bool) -> None:
    expected = in_child(partial(train_with_workers, event, False, persistent))
    found = in_child(partial(train_with_workers, event, True, persistent))
    assert (expected[0], found[0]) == (0, 1) and found[1:] == expected[1:]


@pytest.mark.parametrize('event', [*FIT_EVENTS, *CANCEL_EVENTS])
def test_at_every_event(event: str) -> None:
    handler = signal.getsignal(signal.SIGINT)
    how = press_twice if event in IN_BATCH else press
    learn = make_learner([*trigger(event), At(event, how), watch := Watch()])
    start_again(learn)
    e = raised_by(lambda: learn.fit(N_EPOCH, iteration=1))
    assert type(e) is KeyboardInterrupt
    assert str(e).startswith('stopped') == (event != 'cleanup')  # after which the fit is over
    assert ('learn.resume()' in str(e)) == (learn.paused is not None)
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


@pytest.mark.parametrize('where', ['after_loss', 'before_validate'])
@pytest.mark.parametrize('event', ['after_error', 'cleanup'])
@pytest.mark.parametrize('how', [interrupt, press])
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


def interrupted(run: Callable[[Learner], Any], at: int) -> tuple[bool, str]:
    "Interrupt a run at an instant, and fit once more; return whether the run reached it, and the errors."
    torch.set_grad_enabled(True)
    learn, interrupter = make_learner(), Interrupter(at, run.__code__)
    with interrupting(interrupter):
        run(learn)
    try:
        fits_like_fresh(learn)
    except Exception as e:
        return interrupter.left <= 0, f'{type(e).__name__} {e}'[:200]
    return interrupter.left <= 0, ''


def fit(learn: Learner) -> None:
    learn.fit(1, cbs=Callback())


RUNS = [fit, Learner.validate, Learner.get_preds]


# an interrupt inside a `__del__` is only a warning
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize('run', RUNS)
def test_at_some_instants(run: Callable[[Learner], Any]) -> None:
    "Entering or leaving a context completes before the interrupt is raised."
    results = [interrupted(run, at) for at in (1, 8, 60, 150, 333, 600)]
    torch.set_grad_enabled(True)
    assert results[0][0] and not any(problem for _, problem in results), results


@pytest.mark.full
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_at_every_instant() -> None:
    n, bad = 0, list[str]()
    for run in RUNS:
        for at in range(1, 10**6, 5):
            reached, problem = interrupted(run, at)
            if not reached:
                break
            n += 1
            bad += [problem] * bool(problem)
    print(f'row 8: {n} instants of three runs, the next fit differs after {len(bad)}')
    torch.set_grad_enabled(True)
    assert n > 1000 and not bad, bad[:10]
