"""Ctrl-C is delayed once, and handlers of users stay."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from learnkit.core.interrupts import deferred_interrupts
from tests.helpers.interrupting import (
    Interrupter,
    interrupting,
    press,
    pythons_own_handlers,  # noqa: F401  # for every test
)

# outside of `deferred_interrupts` an interrupt inside a `__del__` is only a warning
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')


def test_a_second_one_is_raised_at_once() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        press()
        press()
        done.append('set up')
    assert done == []


def test_another_handler_stays() -> None:
    def own(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt('own')

    signal.signal(signal.SIGINT, own)
    with deferred_interrupts():
        assert signal.getsignal(signal.SIGINT) is own
    assert signal.getsignal(signal.SIGINT) is own


def test_a_nested_context_delays_it_for_the_outer_one() -> None:
    seen: list[str] = []

    def note(signum: int, frame: Any) -> None:
        seen.append('outer handler')

    with deferred_interrupts() as deferred, deferred.paused(note):
        with deferred_interrupts() as inner:
            press()
            seen.append('set up')
            with inner.paused():
                press()
                seen.append('body')
        press()
    assert seen == ['set up', 'outer handler', 'outer handler', 'body', 'outer handler']


def enter_and_leave() -> None:
    with deferred_interrupts() as deferred, deferred.paused():
        pass


def enter_and_leave_nested() -> None:
    with deferred_interrupts() as outer, outer.paused():
        with deferred_interrupts() as deferred, deferred.paused():
            pass


@pytest.mark.parametrize('run', [enter_and_leave, enter_and_leave_nested])
def test_the_handler_is_restored_after_every_instant(run: Callable[[], None]) -> None:
    for n in range(1, 10**3):
        interrupter = Interrupter(n, run.__code__)
        with interrupting(interrupter):
            run()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, n
        if interrupter.left > 0:
            break
    assert n > 20
