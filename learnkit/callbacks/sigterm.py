"""SIGTERM during a fit: noticed, and acted on where the run can be saved."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from fastcore.basics import noop

from learnkit.data.workers import outlast_sigterm

__all__ = ['StopRequest', 'in_ipython']

_listening: list[StopRequest] = []
_before: dict[int, Any] = {}  # how a signal was handled that is handled here now
_watching_forks = False


class StopRequest:
    """Notice SIGTERM, without acting on it, from `install` to `restore`.

    It is installed on the main thread only, and not where SIGTERM is ignored. Several at a time share one handler, and
    the one of before is back when the last of them ends. Processes that are forked meanwhile handle the signal as it
    was handled before; workers of loaders that `install` is given go on. A second signal adds nothing to the first.
    """

    def __init__(self) -> None:
        self.received = False
        self._handler: Any = None  # what handled the signal before
        self._put_back: Any = noop  # the loaders

    def install(
        self,
        dls: Any = None,  # loaders that go on giving batches after the signal
    ) -> None:
        "Begin to listen."
        self.received = False
        if threading.current_thread() is not threading.main_thread() or self in _listening:
            return
        if not _listening and signal.getsignal(signal.SIGTERM) in (signal.SIG_IGN, None):
            return
        _watch_forks()
        _listening.append(self)
        _handle(signal.SIGTERM, _receive)
        self._handler = _before[signal.SIGTERM]
        if dls is not None:
            self._put_back = outlast_sigterm(dls)

    def restore(self) -> None:
        "Listen no more; a second call does nothing."
        if self not in _listening:
            return
        if len(_listening) == 1:
            _handle_as_before()
        _listening.remove(self)
        self._put_back()
        self._put_back = noop

    def leave(self) -> None:
        "Hand the signal on to the handler of before, and exit with 143, the code of a process that SIGTERM ended."
        _handle_as_before()  # also for others: the fit is over
        self.received = False
        if callable(self._handler):
            self._handler(signal.SIGTERM, None)
        raise SystemExit(128 + signal.SIGTERM)


def _receive(signum: int, frame: FrameType | None) -> None:
    # a signal to the whole group ends the loader's workers too, of which torch's handler would raise in any line
    if (sigchld := getattr(signal, 'SIGCHLD', None)) is not None:
        _handle(sigchld, _nothing)
    for request in _listening:
        request.received = True


def _nothing(signum: int, frame: FrameType | None) -> None:
    "Handle a signal: SIG_DFL would make Python complain of one that has arrived already."


def _handle(sig: int, handler: Any) -> None:
    if sig not in _before and signal.getsignal(sig) is not None:
        _before[sig] = signal.signal(sig, handler)


def _handle_as_before() -> None:
    "Put handlers back, unless somebody has put others in their place."
    for sig, before in list(_before.items()):
        if signal.getsignal(sig) in (_receive, _nothing):
            signal.signal(sig, before)
    _before.clear()


def _watch_forks() -> None:
    global _watching_forks
    if not _watching_forks and hasattr(os, 'register_at_fork'):
        os.register_at_fork(after_in_child=_forget_all)
    _watching_forks = True


def _forget_all() -> None:
    _handle_as_before()
    _listening.clear()


def in_ipython() -> bool:
    "Tell whether this runs in IPython or Jupyter, where SystemExit ends nothing."
    ipython = sys.modules.get('IPython')
    return ipython is not None and ipython.get_ipython() is not None
