# SPDX-License-Identifier: Apache-2.0
"""Worker processes of loaders that survive a SIGTERM or a Ctrl-C sent to the whole group of processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from multiprocessing import context, get_context, resource_tracker
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

from torch.utils.data import DataLoader

from learnkit.data.dataloaders import evaluation_loaders
from learnkit.data.shard import Shard
from learnkit.data.torch_loader import list_combined

_KINDS: dict[Any, type[Lasting]] = {}  # process class -> its replacement


@contextmanager
def starting_workers(
    dl: Any,  # the loader whose pass begins in the context
) -> Iterator[None]:
    """Block Ctrl-C within a context, so that workers that start there never receive it.

    A terminal sends Ctrl-C to them too, and a fit that is interrupted needs their batches later. This process receives
    the signal at the end of the context. A worker of a fork server that was already running is not protected.
    """
    if not getattr(dl, 'num_workers', 0) or not hasattr(signal, 'pthread_sigmask'):
        yield
        return
    ctx = getattr(dl, 'multiprocessing_context', None) or get_context()
    if ctx.get_start_method() != 'fork':
        resource_tracker.ensure_running()  # starting the tracker later would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlast_sigterm(
    dls: Any,  # `DataLoaders` or a similar object
) -> Callable[[], None]:
    """Make workers started by these loaders ignore every SIGTERM that does not come from their parent process.

    A run that SIGTERM stops needs its batches until it has reached a point where it can be saved. A worker still ends
    when its parent terminates it or has ended. Returns the function that restores the loaders. Does
    nothing on systems other than Linux, on which a worker cannot read the sender of a signal.

    >>> from learnkit import DataLoaders
    >>> dl = DataLoader(range(4), num_workers=1)
    >>> restore = outlast_sigterm(DataLoaders(dl))
    >>> restore(), dl.multiprocessing_context
    (None, None)
    """
    contexts = []
    loaders = [dls.train, *(dl for _, dl in evaluation_loaders(dls))]
    for loader in loaders:
        if isinstance(loader, Shard):
            loaders.append(loader.source)
        loaders += list_combined(loader)
        if not isinstance(loader, DataLoader) or not loader.num_workers:
            continue
        before = loader.multiprocessing_context
        ctx = before or get_context()
        if ctx.Process in _KINDS:
            contexts.append((loader, before))
            loader.multiprocessing_context = copy(ctx)
            loader.multiprocessing_context.Process = _KINDS[ctx.Process]

    def restore() -> None:
        for loader, ctx in contexts:
            loader.multiprocessing_context = ctx

    return restore


class Lasting(BaseProcess):
    """Process that only a SIGTERM of its living parent ends.

    SIGTERM stays blocked, because torch sets its own handler in workers. Programs started by a worker inherit the
    blocked signal."""

    def start(self) -> None:
        "Start the process with SIGTERM blocked from its first instruction."
        if not isinstance(self, context.ForkProcess):
            resource_tracker.ensure_running()  # starting the tracker later would unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def run(self) -> None:
        "Run the process, with a thread that waits for SIGTERM."
        # a fork server that was already running has not inherited the mask
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pids = (self._parent_pid, os.getppid())  # type: ignore[attr-defined]
        Thread(target=_await_sigterm, args=pids, daemon=True).start()
        super().run()


def _await_sigterm(
    parent: int,  # process that created the worker
    starter: int,  # process that forked the worker: `parent` or the fork server
) -> None:
    "Exit at a SIGTERM of the parent, or at any SIGTERM once the starter has ended."
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent and os.getppid() == starter:
        pass
    os._exit(0)  # torch reports any other exit code as a failure


if sys.platform == 'linux':

    class LastingFork(Lasting, context.ForkProcess):
        "Forked process."

    class LastingSpawn(Lasting, context.SpawnProcess):
        "Process in a new interpreter."

    class LastingForkServer(Lasting, context.ForkServerProcess):
        "Process forked from a fork server."

    _KINDS |= {kind.__bases__[1]: kind for kind in (LastingFork, LastingSpawn, LastingForkServer)}
