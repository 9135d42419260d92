"""Ctrl-C is delayed once, and handlers of users stay."""

import signal
from typing import Any

import pytest

from learnkit.core.interrupts import deferred_interrupts
from tests.helpers.interrupting import (
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
