# SPDX-License-Identifier: Apache-2.0
"""Handling of Ctrl-C: the interrupt is raised only after a run has been set up or ended completely.

A signal can arrive between any two instructions of Python. If it arrives inside the `__exit__` of a context, the rest
of this method is skipped. `deferred_interrupts` delays `KeyboardInterrupt` until all contexts of a run are entered, or
left. Its handler stays installed for the whole context, and one assignment changes what it does: no signal comes in
the middle of it. `run_all` runs all steps of a list even if some raise."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

Handler = Callable[[int, FrameType | None], object]

_ATTEMPTS = 10  # maximum number of times that an interrupted step is run


class UserCode:
    "Whether code of users runs while a run is being ended: it may take long, so Ctrl-C interrupts it at once."

    is_running = False


user_code = UserCode()


class deferred_interrupts:
    """Delay Ctrl-C within a context, except while it is paused.

    The first Ctrl-C raises `KeyboardInterrupt` when the context is paused or left, the second one immediately. This
    context has an effect only in the main thread, and only if Python's default signal handler is installed, or that of
    an outer context. A delayed Ctrl-C is then handled as the outer context handles it.

    >>> with deferred_interrupts() as deferred:
    ...     signal.raise_signal(signal.SIGINT)
    ...     print('set up')
    ...     try:
    ...         with deferred.paused(): pass
    ...     except KeyboardInterrupt: print('interrupted')
    set up
    interrupted
    """

    def __init__(self) -> None:
        # the context whose handler is installed; None: no effect
        self._owner: deferred_interrupts | None = None
        self._handler: Handler | None = None  # None: an interrupt is delayed
        self._outer: Handler | None = signal.default_int_handler  # handler outside of this context
        self._is_waiting = False  # True while an interrupt is delayed
        self._is_leaving = False  # True from the moment on when nothing may raise before the end

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        found = signal.getsignal(signal.SIGINT)
        owner = getattr(found, '__self__', None)
        if isinstance(owner, deferred_interrupts):
            self._owner = owner
            self._outer = owner._handler
            owner._handler = None
        elif found is signal.default_int_handler:
            self._owner = self
            signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, *exc_info: object) -> None:
        owner = self._owner
        if owner is None:
            return
        if owner is self:
            self._is_leaving = True
            # a handler that other code has installed stays
            if signal.getsignal(signal.SIGINT) == self._receive:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        owner._handler = self._outer
        owner._handle_delayed()

    @contextmanager
    def paused(
        self,
        handler: Handler = signal.default_int_handler,  # handler in the context; an outer one has priority
    ) -> Iterator[None]:
        "Handle Ctrl-C at once within a context, which must be the innermost one."
        owner = self._owner
        if owner is None:
            yield
            return
        owner._handler = handler if owner is self else self._outer
        try:
            owner._handle_delayed()
            yield
        finally:
            owner._handler = None

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        handler = self._handler
        if self._is_waiting or user_code.is_running:
            handler = signal.default_int_handler
        if handler is None or self._is_leaving:
            self._is_waiting = True
        else:
            self._is_waiting = False
            handler(signum, frame)

    def _handle_delayed(self) -> None:
        handler = self._handler
        if self._is_waiting and handler is not None:
            self._is_waiting = False
            handler(signal.SIGINT, None)


def run_all(steps: Iterable[Callable[[], object]]) -> None:
    """Run all steps, even if some fail, and raise the first error at the end.

    A step that Ctrl-C interrupts is run again, so steps must be repeatable.

    >>> done = []
    >>> try: run_all([lambda: done.append(1), lambda: 1 / 0, lambda: done.append(3)])
    ... except ZeroDivisionError: print(done)
    [1, 3]
    """
    first: BaseException | None = None
    for step in steps:
        for _ in range(_ATTEMPTS):
            try:
                step()
                break
            except KeyboardInterrupt as e:
                first = first or e
            except Exception as e:
                first = first or e
                break
    if first is not None:
        raise first
