"""Worker processes of loaders that survive a SIGTERM sent to the whole group of processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import parent_process
from threading import Thread
from typing import Any

from fastcore.basics import noop
from torch.utils.data import DataLoader

from learnkit.data.dataloaders import evaluation_loaders


class OutlastSigterm:
    "Function for a worker to call first, after which only a SIGTERM of its living parent ends the worker."

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self.init = init  # the loader's own `worker_init_fn`

    def __call__(self, worker_id: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        Thread(target=_await_sigterm, daemon=True).start()
        if self.init is not None:
            self.init(worker_id)


def _await_sigterm() -> None:
    parent = parent_process()
    assert parent is not None  # only workers run this function
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid and parent.is_alive():
        pass
    os._exit(0)  # torch reports any other exit code as a failure


def outlast_sigterm(
    dls: Any,  # `DataLoaders` or a similar object
) -> Callable[[], None]:
    """Make workers that these loaders start ignore every SIGTERM that does not come from their parent process.

    A run that SIGTERM stops needs its batches until it has reached a point where it can be saved. Returns the function
    that restores the loaders. Does nothing on systems other than Linux, on which a worker cannot read the sender of a
    signal.

    >>> from learnkit import DataLoaders
    >>> dl = DataLoader(range(4), num_workers=1)
    >>> restore = outlast_sigterm(DataLoaders(dl))
    >>> restore(), dl.worker_init_fn
    (None, None)
    """
    if sys.platform != 'linux':
        return noop
    changed = []
    for dl in (dls.train, *(dl for _, dl in evaluation_loaders(dls))):
        while dl is not None:  # a loader, then the loaders that it is a shard of
            if isinstance(dl, DataLoader) and not isinstance(dl.worker_init_fn, OutlastSigterm):
                changed.append((dl, dl.worker_init_fn))
                dl.worker_init_fn = OutlastSigterm(dl.worker_init_fn)
            dl = getattr(dl, '__dict__', {}).get('source')

    def restore() -> None:
        for loader, init in changed:
            loader.worker_init_fn = init

    return restore
