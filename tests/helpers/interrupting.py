"""Press Ctrl-C at a chosen instant. CPython checks for signals at calls and when C functions return."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def pythons_own_handlers() -> Iterator[None]:
    "Handle signals as Python does, for tests in the background as well, where the shell ignores SIGINT."
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {sig: signal.signal(sig, handler) for sig, handler in handlers.items()}
    yield
    for sig, handler in before.items():
        signal.signal(sig, handler)
    torch.set_grad_enabled(True)


def press() -> None:
    "Send this process a SIGINT."
    signal.raise_signal(signal.SIGINT)


def interrupt() -> None:
    raise KeyboardInterrupt


class Interrupter:
    "A profiler that presses Ctrl-C at one instant between the first call of a function and the end of another."

    def __init__(
        self,
        at: int,  # the instant, from 1
        start: CodeType,  # the function from whose call on instants are counted
        end: CodeType | None = None,  # the function whose return is the end; None: the same
        how: Callable[[], None] = press,
    ) -> None:
        self.left, self.start, self.end, self.how = at, start, end or start, how
        self.has_begun = False

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if event == 'return' and self.has_begun and frame.f_code is self.end:
            sys.setprofile(None)
        if event not in ('call', 'c_return'):
            return
        if not self.has_begun and frame.f_code is not self.start:
            return
        self.has_begun = True
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            self.how()


@contextmanager
def interrupting(interrupter: Interrupter) -> Iterator[None]:
    "Run a context with an interrupter, and expect that it ends without KeyboardInterrupt."
    sys.setprofile(interrupter)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
