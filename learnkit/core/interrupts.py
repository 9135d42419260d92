# SPDX-License-Identifier: Apache-2.0
"""Handling of Ctrl-C: the interrupt is raised only after a run has been set up or ended completely.

A signal can arrive between any two instructions of Python. If it arrives inside the `__exit__` of a context, the rest
of this method is skipped. `deferred_interrupts` delays `KeyboardInterrupt` until all contexts of a run are entered, or
left. `run_all` runs all steps of a list even if some raise."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

Handler = Callable[[int, FrameType | None], object]

_ATTEMPTS = 10  # maximum number of times that an interrupted step is run
# a token for each running `allow_interrupts`
_allowed: list[object] = []


@contextmanager
def allow_interrupts() -> Iterator[None]:
    "Let Ctrl-C interrupt user code, which may take long, at once although a run is being ended."
    token = object()
    _allowed.append(token)
    try:
        yield
    finally:
        _allowed.remove(token)


class deferred_interrupts:
    """Delay Ctrl-C within a context, except while it is paused.

    The first Ctrl-C raises `KeyboardInterrupt` when the context is paused or left, the second one immediately. This
    context has an effect only in the main thread, and only if Python's default signal handler is installed. That
    handler is restored in the block of `with deferred.paused()` and at the end.

    >>> handler = signal.getsignal(signal.SIGINT)
    >>> with deferred_interrupts() as deferred, deferred.paused():
    ...     print(signal.getsignal(signal.SIGINT) is handler)
    True
    """

    def __init__(self) -> None:
        self._is_active = False
        self._is_waiting = False  # True while an interrupt is delayed

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._is_active = True
            self._install()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._uninstall()
        self._is_active = False
        self._raise_delayed()

    @contextmanager
    def paused(
        self,
        handler: Handler = signal.default_int_handler,  # handler in the context
    ) -> Iterator[None]:
        "Install Python's default handler, or another one, within a context, which must be the innermost one."
        self._uninstall(handler)
        try:
            self._raise_delayed()
            yield
        finally:
            self._install(handler)

    def _install(self, before: Handler = signal.default_int_handler) -> None:
        if self._is_active:
            _exchange_handler(before, self._receive)

    def _uninstall(self, after: Handler = signal.default_int_handler) -> None:
        if self._is_active:
            _exchange_handler(self._receive, after)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._is_waiting or _allowed:
            self._is_waiting = False
            raise KeyboardInterrupt
        self._is_waiting = True

    def _raise_delayed(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            raise KeyboardInterrupt


def _exchange_handler(old: Handler, new: Handler) -> None:
    "Replace a handler of Ctrl-C; a handler that other code has installed stays."
    found = signal.signal(signal.SIGINT, new)
    if found != old:
        signal.signal(signal.SIGINT, found)


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
