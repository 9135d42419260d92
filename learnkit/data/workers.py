"""Loaders' worker processes that go on working when SIGTERM is sent to a whole group of processes, theirs among it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from copy import copy
from multiprocessing import context, get_context, resource_tracker
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

from torch.utils.data import DataLoader

from learnkit.data.dataloaders import evaluation_loaders

__all__ = ['outlast_sigterm']

_KINDS: dict[Any, type[Lasting]] = {}  # what takes the place of which kind of process


def outlast_sigterm(
    dls: Any,  # `DataLoaders`, or what works like one
) -> Callable[[], None]:
    """Let the workers that these loaders start from now on last as long as their process, whoever else sends SIGTERM.

    Processes that train together stop only when all have agreed to, and until then each of them needs its batches.
    A worker that its own process terminates ends as before, and so does one whose process is gone. Return the function
    that puts the loaders back. Where a worker cannot tell who has sent a signal (on Linux it can), this does nothing.

    >>> from learnkit import DataLoaders
    >>> dl = DataLoader(range(4), num_workers=1)
    >>> put_back = outlast_sigterm(DataLoaders(dl))
    >>> put_back(), dl.multiprocessing_context
    (None, None)
    """
    before = []
    for dl in (dls.train, *(dl for _, dl in evaluation_loaders(dls))):
        for loader in _with_workers(dl):
            ctx = loader.multiprocessing_context or get_context()
            if (kind := _KINDS.get(ctx.Process)) is None:
                continue
            before.append((loader, loader.multiprocessing_context))
            loader.multiprocessing_context = copy(ctx)
            loader.multiprocessing_context.Process = kind

    def put_back() -> None:
        for loader, ctx in before:
            loader.multiprocessing_context = ctx

    return put_back


def _with_workers(dl: Any) -> Iterator[DataLoader[Any]]:
    "Yield torch's loaders that have workers: this one, or those that it is a share of."
    while dl is not None:
        if isinstance(dl, DataLoader) and dl.num_workers:
            yield dl
        dl = getattr(dl, '__dict__', {}).get('whole')


class Lasting(BaseProcess):
    """A process that its parent's SIGTERM ends, and nobody else's while the parent lives.

    The signal stays blocked, as torch sets its own handler in workers, and so it is in programs that they start."""

    def start(self) -> None:
        "Start it with the signal blocked, so that there is no moment at which it is not."
        if not isinstance(self, context.ForkProcess):
            resource_tracker.ensure_running()  # its start would unblock it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def run(self) -> None:
        "Work, beside a thread that waits for the signal."
        # a fork server may have been there before
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        Thread(target=_await_end, args=(self._parent_pid, os.getppid()), daemon=True).start()  # type: ignore[attr-defined]
        super().run()


def _await_end(parent: int, above: int) -> None:
    "End this process at a signal from its parent; `above` is that, or the fork server."
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent and os.getppid() == above:
        pass
    os._exit(0)  # torch takes any other code for a failure


if sys.platform == 'linux':

    class LastingFork(Lasting, context.ForkProcess):
        "One that is forked."

    class LastingSpawn(Lasting, context.SpawnProcess):
        "One that is a new interpreter."

    class LastingForkServer(Lasting, context.ForkServerProcess):
        "One that is forked from a server of its own."

    _KINDS |= {kind.__bases__[1]: kind for kind in (LastingFork, LastingSpawn, LastingForkServer)}
