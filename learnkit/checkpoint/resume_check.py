# SPDX-License-Identifier: Apache-2.0
"""Check that a Learner resumes exactly: compare an uninterrupted run with a resumed one, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch

from learnkit.checkpoint.digest import differences, digest
from learnkit.checkpoint.file import read_state, write_state
from learnkit.checkpoint.rehearsal import SUMMARY, Inventory, find_lost, take_inventory
from learnkit.core.errors import CancelFitException, FitError
from learnkit.core.interrupts import deferred_interrupts
from learnkit.core.random import preserved_generators
from learnkit.core.validation import check_count
from learnkit.data.loader_state import capture_loader_state, restore_loader_state
from learnkit.engine.budget import check_not_running
from learnkit.engine.callback import Callback
from learnkit.engine.lengths import epoch_length
from learnkit.engine.snapshot import initialize_lazy, restored
from learnkit.engine.traits import trait_of

if TYPE_CHECKING:
    from learnkit.learner import Learner

_MOST, _FEWEST = 50, 8  # batches of a run: at most, and for a loader without a length


@dataclass(frozen=True)
class ResumeCheck:
    """Result of `learn.check_resume`; true if the resumed run was exact, and nothing would be lost.

    >>> ResumeCheck(8, 4, 'ab12' * 16)
    Exact: 8 batches without a stop and with one after 4 end in the same state (SHA-256 ab12ab12ab12...).
    """

    n_batches: int  # number of training batches of each run
    stopped_after: int  # number of batches before the stop
    digest: str  # digest of the uninterrupted run's final state
    differences: list[str] = field(default_factory=list)  # differences of the resumed run's state
    lost: list[str] = field(default_factory=list)  # what has changed and no checkpoint holds

    def __bool__(self) -> bool:
        return not self.differences and not self.lost

    def __repr__(self) -> str:
        if self:
            return (
                f'Exact: {self.n_batches} batches without a stop and with one after {self.stopped_after} end in '
                f'the same state (SHA-256 {self.digest[:12]}...).'
            )
        lines = []
        if self.differences:
            summary = (
                f'Not exact: {self.n_batches} batches without a stop (first) and with one after '
                f'{self.stopped_after} (second) end in states that differ:'
            )
            lines += [summary, *(f'  {line}' for line in self.differences)]
        if self.lost:
            lines += [SUMMARY, *(f'  {line}' for line in self.lost)]
        return '\n'.join(lines)


class _StopAt(Callback):
    "Callback that keeps the checkpoint state after one batch, and ends the fit."

    order = 10_000
    state_key = '_stop_at'

    def __init__(self, n: int) -> None:
        self._n = n
        self.kept = dict[str, Any]()
        self.lost = list[str]()
        self._inventory: Inventory | None = None

    def before_train(self) -> None:
        if self._inventory is None:
            self._inventory = take_inventory(self.learn)

    def batch_checkpoint(self) -> None:
        if self.learn.train_iter < self._n:
            return
        self.lost = find_lost(self._inventory or {}, take_inventory(self.learn))
        self.kept = self.learn.checkpoint_state()
        raise CancelFitException


def check_resume(
    learn: Learner,
    *,
    n_batches: int | None,
    stop_after: int | None,
) -> ResumeCheck:
    "Compare an uninterrupted run with a resumed one, bit by bit."
    per_epoch = epoch_length(learn, learn.dls.train)[0]
    if n_batches is None:
        n_batches = min(2 * per_epoch + 2, _MOST) if per_epoch else _FEWEST
    n = check_count('n_batches', n_batches, 2, FitError)
    middle = n // 2 if stop_after is None else check_count('stop_after', stop_after, 1, FitError)
    if middle >= n:
        raise FitError(f'stop_after={stop_after} does not lie within {n_batches} batches.')
    check_not_running(learn)
    initialize_lazy(learn)
    n_epoch = n // per_epoch + 1 if per_epoch else n

    lost = list[str]()

    def train(until: int, resume: Any = False) -> dict[str, Any]:
        stop = _StopAt(until)
        with _as_new_process(learn), deferred.paused():
            if resume is not False:
                torch.seed()
                random.seed()
                np.random.seed()
            learn.fit(n_epoch, cbs=stop, resume=resume)
        if not stop.kept:
            raise FitError(f'The loader ended before batch {until}: lower n_batches={n_batches}.')
        lost[:] = lost or stop.lost
        return stop.kept

    with deferred_interrupts() as deferred, learn.run.lock, silenced(learn):
        uninterrupted = train(n)
        file = learn.path / 'state.ckpt'
        write_state(file, train(middle), {})
        resumed = train(n, read_state(file)[0])
    found = differences(uninterrupted, resumed)
    return ResumeCheck(n, middle, digest(uninterrupted), found, lost)


@contextmanager
def silenced(learn: Learner) -> Iterator[None]:
    """Return a context in which training leaves no trace outside of the Learner.

    Callbacks with `writes_files` are left out, no rows are printed, and `learn.path` is a temporary folder.
    """
    writers = [cb for cb in learn.cbs if trait_of(cb, 'writes_files')]
    with (
        learn.removed_cbs(writers),
        TemporaryDirectory() as folder,
        patch.object(learn, 'path', Path(folder)),
        learn.no_logging(),
    ):
        yield


@contextmanager
def _as_new_process(learn: Learner) -> Iterator[None]:
    """Restore the Learner at the end of the block, and what only a new process would reset.

    These are the loader's state, and the random generators in objects of callbacks.
    """
    state = capture_loader_state(learn.dls.train)
    with ExitStack() as stack:
        stack.callback(restore_loader_state, learn.dls.train, state)
        for cb in learn.cbs:
            stack.enter_context(preserved_generators(cb))
        stack.enter_context(restored(learn))
        yield
