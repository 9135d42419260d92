# SPDX-License-Identifier: Apache-2.0
"""Record SIGTERM during a fit, so that the fit can stop at a point where the run can be saved."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from fastcore.basics import noop

from learnkit.data.workers import outlast_sigterm

_active_requests: list[StopRequest] = []
_before: dict[int, Any] = {}  # previous handler of each signal that is handled here now


class StopRequest:
    """Record SIGTERM, without acting on it, from `install` to `restore`.

    The handler is installed on the main thread only, and not if SIGTERM is ignored. Several
    requests share one handler, and the previous handler is restored after the last of them.
    Processes forked meanwhile have the previous handler; workers of the loaders passed to `install`
    survive the signal. A second signal has no further effect.
    """

    def __init__(self) -> None:
        self.received = False
        self._handler: Any = None  # previous handler of the signal
        self._restore_loaders: Any = noop

    def install(
        self,
        dls: Any = None,  # loaders whose workers survive the signal
    ) -> None:
        "Install the handler."
        self.received = False
        if threading.current_thread() is not threading.main_thread() or self in _active_requests:
            return
        if not _active_requests and signal.getsignal(signal.SIGTERM) in (signal.SIG_IGN, None):
            return
        _active_requests.append(self)
        try:
            _handle(signal.SIGTERM, _receive)
        except BaseException:
            self.restore()
            raise
        self._handler = _before[signal.SIGTERM]
        if dls is not None:
            self._restore_loaders = outlast_sigterm(dls)

    def restore(self) -> None:
        "Restore the previous handler; a second call does nothing."
        if self not in _active_requests:
            return
        # in this order, so that it can be done again if it was interrupted
        self._restore_loaders()
        self._restore_loaders = noop
        if len(_active_requests) == 1:
            _restore_handlers()
        _active_requests.remove(self)

    def leave(self) -> None:
        "Call the previous handler, and exit with 143, the code of a process that SIGTERM ended."
        _restore_handlers()  # of all requests: the fit is over
        self.received = False
        if callable(self._handler):
            self._handler(signal.SIGTERM, None)
        raise SystemExit(128 + signal.SIGTERM)


def _receive(signum: int, frame: FrameType | None) -> None:
    # a signal to the process group ends the loader's workers too: torch's handler would raise anywhere
    sigchld = getattr(signal, 'SIGCHLD', None)
    if sigchld is not None:
        _handle(sigchld, _ignore)
    for request in _active_requests:
        request.received = True


def _ignore(signum: int, frame: FrameType | None) -> None:
    "Do nothing: with SIG_DFL, Python would report a signal that has arrived already."


def _handle(sig: int, handler: Any) -> None:
    previous = signal.getsignal(sig)
    if sig not in _before and previous is not None:
        _before[sig] = previous  # first, so that it is restored also if this is interrupted
        signal.signal(sig, handler)


def _restore_handlers() -> None:
    "Restore the previous handlers, unless other code has replaced ours."
    for sig, handler in list(_before.items()):
        if signal.getsignal(sig) in (_receive, _ignore):
            signal.signal(sig, handler)
    _before.clear()


def _reset() -> None:
    _restore_handlers()
    _active_requests.clear()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_reset)


def in_ipython() -> bool:
    "Return True in IPython and Jupyter, where SystemExit does not end the process."
    ipython = sys.modules.get('IPython')
    return ipython is not None and ipython.get_ipython() is not None
