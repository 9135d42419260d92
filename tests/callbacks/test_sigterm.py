"""`StopRequest`: one handler for all listeners, removed by the last; row 6 of the faults tests whole runs."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from learnkit.callbacks.sigterm import StopRequest

TERM, CHLD = signal.SIGTERM, signal.SIGCHLD


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[list[int]]:
    "Install a handler that records signals, so that no signal ends the tests."
    got: list[int] = []
    before = signal.signal(TERM, lambda signum, frame: got.append(signum))
    child = signal.getsignal(CHLD)
    try:
        yield got
    finally:
        signal.signal(TERM, before)
        signal.signal(CHLD, child)


def send() -> None:
    os.kill(os.getpid(), TERM)


def now() -> list[Any]:
    return [signal.getsignal(s) for s in (TERM, CHLD)]


def test_it_records_the_signal_and_restores_the_handler(own_handler: list[int]) -> None:
    before, request = now(), StopRequest()
    request.install()
    request.install()
    assert not request.received and now()[0] is not before[0] and now()[1] is before[1]
    send()
    send()
    assert request.received and own_handler == []
    request.restore()
    request.restore()
    assert now() == before and request.received
    send()
    assert own_handler == [TERM]
    request.install()
    assert not request.received, 'a new one begins anew'
    request.restore()


@pytest.mark.parametrize('first_leaves_first', [True, False])
def test_two_at_a_time(first_leaves_first: bool, own_handler: list[int]) -> None:
    before, a, b = now(), StopRequest(), StopRequest()
    for r in (a, b):
        r.install()
    send()
    assert a.received and b.received
    first, second = (a, b) if first_leaves_first else (b, a)
    first.restore()
    assert now() != before
    second.restore()
    assert now() == before and own_handler == []


def test_leaving_hands_the_signal_on(own_handler: list[int]) -> None:
    before, request, other = now(), StopRequest(), StopRequest()
    for r in (request, other):
        r.install()
    send()
    with pytest.raises(SystemExit) as caught:
        request.leave()
    assert caught.value.code == 143
    assert own_handler == [TERM]
    assert now() == before
    assert not request.received
    other.restore()
    request.restore()
    assert now() == before


@pytest.mark.parametrize('handler', [signal.SIG_DFL, signal.SIG_IGN])
def test_what_is_not_a_function(handler: Any) -> None:
    signal.signal(TERM, handler)
    request = StopRequest()
    request.install()
    assert (signal.getsignal(TERM) is signal.SIG_IGN) == (handler is signal.SIG_IGN)
    with pytest.raises(SystemExit):
        request.leave()
    assert signal.getsignal(TERM) is handler
    request.restore()


def test_a_handler_that_somebody_else_has_set_stays() -> None:
    request, mine = StopRequest(), lambda *_: None
    request.install()
    signal.signal(TERM, mine)
    request.restore()
    assert signal.getsignal(TERM) is mine


def test_a_worker_that_ends_is_not_an_error_once_the_signal_has_come() -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError('DataLoader worker is killed')

    signal.signal(CHLD, fails)
    request = StopRequest()
    request.install()
    send()
    os.kill(os.getpid(), CHLD)
    request.restore()
    assert signal.getsignal(CHLD) is fails
    with pytest.raises(RuntimeError):
        os.kill(os.getpid(), CHLD)


def test_outside_the_main_thread_nothing_is_installed() -> None:
    before, request = now(), StopRequest()
    for act in (request.install, request.restore):
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
        assert now() == before
