# SPDX-License-Identifier: Apache-2.0
"""Batch size finder: the largest batch with which a training step fits in memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from learnkit.callbacks.accumulation import GradientAccumulation
from learnkit.callbacks.lr_finder import NoEvaluations
from learnkit.core.batch import batch_counter, slice_batch
from learnkit.core.device import empty_cache
from learnkit.core.errors import CancelFitException, FitError, add_note
from learnkit.core.interrupts import deferred_interrupts
from learnkit.core.validation import check_count
from learnkit.data.dataloaders import n_batches
from learnkit.data.show import first_batch
from learnkit.distributed.callback import DistributedTraining
from learnkit.engine.budget import check_not_running
from learnkit.engine.callback import Callback
from learnkit.engine.microbatch import is_out_of_memory
from learnkit.engine.positions import TrainingPositions
from learnkit.engine.snapshot import initialize_lazy, restored
from learnkit.engine.traits import trait_of

if TYPE_CHECKING:
    from learnkit.learner import Learner

N_STEPS = 2  # the optimizer creates its state in the first step
MAX_SIZE = 8192  # largest size to try if the number of training samples is not known


def find_batch_size(
    learn: Learner,
    *,
    max_size: int | None,
    exact: bool,
) -> int:
    "Return the largest batch size with which a training step fits in memory."
    check_not_running(learn)
    _check_one_process(learn)
    if max_size is None:
        max_size = n_batches(getattr(learn.dls.train, 'dataset', None)) or MAX_SIZE
    max_size = check_count('max_size', max_size)
    initialize_lazy(learn)
    batch = first_batch(learn.dls.train)
    trial = _Trial(batch_counter(learn)(batch))
    left_out = [
        cb
        for cb in learn.cbs
        if trait_of(cb, 'remove_on_find') or isinstance(cb, GradientAccumulation)
    ]
    with (
        deferred_interrupts() as deferred,
        learn.run.lock,
        learn.removed_cbs(left_out),
        learn.no_bar(),
        restored(learn, on_host=True),
        learn.no_logging(),
        deferred.paused(),
    ):
        learn.parts.positions = _SameBatch(batch)
        learn.parts.evaluations = NoEvaluations()
        learn.microbatch = None
        learn.seams.features = []
        return _search(learn, trial, max_size, exact)


def _check_one_process(learn: Learner) -> None:
    "Raise `FitError` in several processes, of which only one may run out of memory."
    if any(isinstance(cb, DistributedTraining) for cb in learn.cbs):
        raise FitError(
            'find_batch_size: one of several processes that runs out of memory would leave the others '
            'waiting. Call it in one process.'
        )


def _search(learn: Learner, trial: _Trial, max_size: int, exact: bool) -> int:
    "Double the size until memory runs out, and with `exact` bisect between the last two sizes."
    largest = 0
    failed = max_size + 1
    size = min(2, max_size)  # batch norm cannot train on a single sample
    while size < failed:
        if _fits(learn, trial, size):
            largest = size
            size = 2 * size
        else:
            failed = size
    if not largest:
        _fits(learn, trial, 1)  # raises if it does not
        return 1
    while exact and failed - largest > 1:
        size = (largest + failed) // 2
        if _fits(learn, trial, size):
            largest = size
        else:
            failed = size
    return largest


def _fits(learn: Learner, trial: _Trial, size: int) -> bool:
    "Return True if training steps with a batch of this size fit in memory; raise an error if one sample does not."
    try:
        trial.run_steps(learn, size)
        return True
    except (RuntimeError, MemoryError) as e:
        if not isinstance(e, MemoryError) and not is_out_of_memory(e):
            raise
        if size == 1:
            add_note(e, 'find_batch_size: not even one sample fits')
            raise
    # only here is the exception gone, and with it the frames that hold the failed step's tensors
    gc.collect()
    empty_cache()
    return False


class _Trial(Callback):
    "Train a few steps with a batch of another size, made of the samples of one batch."

    order = -1000  # batches have their size before other callbacks change them
    run_valid = False

    def __init__(self, n_known: int) -> None:
        self.n_known = n_known
        self.rows: list[int] = []
        self.n_steps = 0

    def run_steps(self, learn: Learner, size: int) -> None:
        "Train with batches of a size."
        self.rows = [i % self.n_known for i in range(size)]
        self.n_steps = 0
        # with a rate of 0 the weights stay finite, however many sizes are tried
        learn.fit(1, lr=0.0, cbs=self)

    def before_batch(self) -> None:
        learn = self.learn
        learn.xb, learn.yb = slice_batch(learn.xb, learn.yb, self.n_known, [self.rows])[0]

    def after_batch(self) -> None:
        self.n_steps += 1
        if self.n_steps == N_STEPS:
            raise CancelFitException


class _SameBatch(TrainingPositions):
    "Training passes that consist of one batch, so that no loader is read."

    def __init__(self, batch: Any) -> None:
        super().__init__()
        self.batch = batch

    @override
    def open(self, learn: Learner, continued: bool = False) -> Iterator[Any]:
        "Return the batch, as often as requested."
        return repeat(self.batch)
