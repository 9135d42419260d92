"""Row 33: fit outside the main thread. It trains as it does inside, and no signal handler is installed anywhere."""

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from learnkit import Callback, Learner
from tests.faults.fault_helpers import (
    N_EPOCH,
    At,
    Watch,
    copy_without_notes,
    digest,
    fits_like_fresh,
    fresh,
    is_clean,
    make_learner,
    notes,
    raised_by,
    rows,
    start_again,
)


def in_thread(f: Callable[[], Any]) -> Any:
    "Return the result of `f` in a new thread, or raise its exception."
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(f).result(timeout=600)


def handlers() -> dict[int, Any]:
    return {s: signal.getsignal(s) for s in signal.valid_signals()}


def fitted(learn: Learner) -> Learner:
    start_again(learn)
    learn.fit(N_EPOCH)
    return learn


def test_it_trains_as_in_the_main_thread() -> None:
    fresh()
    before, during = handlers(), list[Any]()
    learn = make_learner(
        Callback(after_batch=lambda cb: during.append((handlers(), threading.current_thread())))
    )
    in_thread(lambda: fitted(learn))
    assert digest(learn) == fresh()['digest'] and rows(learn) == fresh()['rows']
    assert handlers() == before
    assert all(h == before and t is not threading.main_thread() for h, t in during)
    assert len(during) == 10
    is_clean(learn)


@pytest.mark.parametrize(
    'error', [ValueError(1), KeyboardInterrupt(), SystemExit(3)], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize('event', ['before_fit', 'after_loss'])
def test_it_fails_as_in_the_main_thread(event: str, error: BaseException) -> None:
    error = copy_without_notes(error)
    learn = make_learner(cbs := [At(event, error), watch := Watch()])
    start_again(learn)
    e = in_thread(lambda: raised_by(lambda: learn.fit(N_EPOCH)))
    assert e is error
    assert notes(e)[0].startswith(f'in At.{event}')
    assert watch.fired == [('after_error', e), ('cleanup', e)]
    is_clean(learn)
    fits_like_fresh(learn, cbs)  # the lock is free for the main thread
    in_thread(lambda: fits_like_fresh(learn))  # and for a new one


def test_a_validation_from_another_thread_waits_for_the_fit_and_changes_nothing() -> None:
    results: list[Any] = []
    threads: list[threading.Thread] = []
    started = threading.Event()

    def other(learn: Learner) -> None:
        started.set()
        results.append(learn.validate())

    def start(cb: Any) -> None:
        threads.append(threading.Thread(target=other, args=(cb.learn,)))
        threads[0].start()
        started.wait()
        threads[0].join(0.05)  # it must be waiting by now
        assert threads[0].is_alive() and not results

    learn = make_learner(cb := At('after_step', start, nth=2))
    start_again(learn)
    learn.fit(N_EPOCH)
    state = digest(learn)
    threads[0].join(200)
    assert not threads[0].is_alive()
    assert digest(learn) == state == fresh()['digest']
    assert rows(learn) == fresh()['rows']
    assert list(results[0]) == list(learn.validate())
    is_clean(learn)
    fits_like_fresh(learn, cb)
