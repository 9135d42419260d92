# SPDX-License-Identifier: Apache-2.0
"""Order of draws and evaluations as in Lightning's Trainer: what a Learner of a `Trainer` has in place of its own.

Lightning restores no generator around an evaluation, begins a pass before the hooks of its start, never asks a loader
with a length for its end, and draws one batch ahead from a loader without a length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from learnkit.callbacks.mixed_precision import MixedPrecision
from learnkit.core.errors import CheckpointError
from learnkit.core.model import model_device
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.data.last_batch import hold_batch
from learnkit.data.position import LoaderPosition
from learnkit.data.prefetch import read_ahead
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import without_callbacks
from learnkit.engine.evaluation_schedule import EvaluateWithinEpochs, EvaluationSchedule
from learnkit.engine.lengths import Lengths, find_length
from learnkit.engine.parts import replace_flow
from learnkit.engine.positions import TrainingPositions, draw, set_length
from learnkit.engine.run import preserved_state
from learnkit.engine.train_eval import TrainEvalCallback
from learnkit.interop.lightning.options import limit_batches

if TYPE_CHECKING:
    from learnkit.interop.lightning.host import LightningHost
    from learnkit.learner import Learner

# callbacks that act in the evaluation before a fit
TAKING_PART = (MixedPrecision, TrainEvalCallback)
_END = object()  # marks the end of a loader, as the default of `next`


def flow_as_lightning(learn: Learner, host: LightningHost) -> None:
    "Have a Learner draw and evaluate in Lightning's order."
    host.positions = LightningPositions(host)
    replace_flow(learn, LightningEvaluations(host), LightningLengths(host), host.positions)


class LightningEvaluations(EvaluationSchedule):
    "Evaluations at the batches at which Lightning's Trainer evaluates, with its generators."

    is_independent = False

    def __init__(self, host: LightningHost) -> None:
        super().__init__()
        self.host = host
        self.timed = monotonic()  # time of the last evaluation

    @override
    def begin(self, learn: Learner, per_iteration: int | None) -> list[Callback]:
        self.timed = monotonic()
        return [EvaluateWithinEpochs()] if self.host.trainer.enable_validation else []

    @override
    def list_due(self, learn: Learner, at_epoch_end: bool) -> list[tuple[str, Any]]:
        now, loaders = learn.time, list(evaluation_loaders(learn.dls))
        is_evaluated = any(time.ba == now.ba for time in self.evaluated.values())
        ends = self.host.is_last_batch or learn.run.stopping
        if at_epoch_end != ends or is_evaluated or not self._is_batch_due(learn):
            return []
        self.evaluated = {name: now for name, _ in loaders}
        self.timed = monotonic()
        self.host.trainer.reload_validation()
        return list(evaluation_loaders(learn.dls))

    def _is_batch_due(self, learn: Learner) -> bool:
        "Return True if Lightning evaluates after the current batch."
        trainer, is_last = self.host.trainer, self.host.is_last_batch
        every_epoch = trainer.check_val_every_n_epoch
        if not trainer.enable_validation or (every_epoch and (learn.epoch + 1) % every_epoch):
            return False
        every = trainer.val_check_batch
        if (is_last and every == float('inf')) or trainer.is_stop_due:
            return True
        if trainer.val_check_seconds is not None:
            return monotonic() - self.timed >= trainer.val_check_seconds
        limit = trainer.limit_train_batches
        if every == float('inf'):
            return isinstance(limit, int) and (learn.iter + 1) % limit == 0
        n = self.host.n_begun if every_epoch is None else learn.iter + 1
        return n % every == 0


class LightningLengths(Lengths):
    "Lengths of loaders, within the limits of the Trainer."

    def __init__(self, host: LightningHost) -> None:
        super().__init__()
        self.host = host

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), 'host': self.host}

    @override
    def find(self, dl: Any) -> int | None:
        n = super().find(dl)
        name, limit = self.host.find_limit(dl)
        n_limited = limit_batches(name, float('inf') if n is None else n, limit)
        if self.host.trainer.sanity_checking:
            n_limited = min(n_limited, self.host.trainer.num_sanity_val_steps)
        return None if n_limited == float('inf') else int(n_limited)

    @override
    def limit(self, learn: Learner, dl: Any) -> int | None:
        return self.find(dl)


class LightningPositions(TrainingPositions):
    """Passes that begin where Lightning's do, and draw one batch ahead from loaders without a length.

    The batch that was drawn ahead is not in a checkpoint: a resumed pass draws it again."""

    def __init__(self, host: LightningHost) -> None:
        super().__init__()
        self.host = host
        self.ahead: ReadAhead | None = None  # the training pass of a loader without a length
        self.begun: Iterator[Any] | None = None  # training pass that began before its first epoch
        # loader and batches of an evaluation that began before its hooks
        self.evaluation: tuple[Any, Iterator[Any]] | None = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), 'ahead': None, 'begun': None, 'evaluation': None}

    @override
    def epochs(self, learn: Learner, first: int = 0) -> Iterator[int]:
        return super().epochs(learn, max(first, self.host.trainer.first_epoch))

    def begin_training(self, learn: Learner, twice: bool) -> None:
        "Begin the pass of the first epoch; Lightning begins that of a later fit twice."
        learn.run.batch_device = model_device(learn.model, learn.dls)
        learn.dl = learn.dls.train
        if twice:
            self.open(learn)
        self.begun = self.open(learn)

    def begin_evaluation(self, learn: Learner) -> None:
        "Begin the pass over `learn.dl`, which is evaluated next."
        device = model_device(learn.model, learn.dls)
        self.evaluation = learn.dl, self._read(learn, device)

    def _read(self, learn: Learner, device: torch.device) -> Iterator[Any]:
        "Return the batches of a pass of an evaluation or a prediction."
        batches = read_ahead(learn.dl, device)
        return batches if find_length(learn, learn.dl) is not None else ReadAhead(batches)

    @override
    def batches(self, learn: Learner) -> tuple[Iterable[int], Iterator[Any]]:
        if learn.training and learn.fitting:
            return super().batches(learn)
        begun, self.evaluation = self.evaluation, None
        is_begun = begun is not None and begun[0] is learn.dl
        device = learn.run.batch_device
        assert device is not None  # `draw_batches` has set it
        batches = begun[1] if is_begun and begun is not None else self._read(learn, device)
        return set_length(learn), draw(learn, batches)

    @override
    def open(self, learn: Learner, continued: bool = False) -> Iterator[Any]:
        begun, self.begun = self.begun, None
        if begun is not None and not continued:
            return begun
        batches = super().open(learn, continued)
        self.ahead = None
        if find_length(learn, learn.dl) is not None:
            return batches
        position = self.position
        assert position is not None  # a Trainer cuts no loader into epochs
        first = position.last_drawn if continued else None
        self._current = self.ahead = ReadAhead(batches, first)
        return self.ahead

    @property
    def is_last(self) -> bool:
        "True if the training pass of a loader without a length has no further batch."
        return self.ahead is not None and self.ahead.batch is _END

    @override
    def continue_pass(self, batches: Iterator[Any], iterator: Any) -> Iterator[Any]:
        self.ahead = batches if isinstance(batches, ReadAhead) else None
        return super().continue_pass(batches, iterator)

    @override
    def state_dict(self, learn: Learner, within_epoch: bool) -> dict[str, Any] | None:
        position, ahead = self.position, self.ahead
        if not within_epoch or ahead is None or position is None:
            return super().state_dict(learn, within_epoch)
        if self.is_last:
            return position.state_dict(learn.iter + 1, self.last, is_ended=True)
        if type(position) is not LoaderPosition:
            raise CheckpointError(
                'Several training loaders, of which one has no length, cannot be resumed within an epoch: take '
                'checkpoints at its end, `Checkpoint()`.'
            )
        state = position.state_dict(learn.iter + 2, hold_batch(ahead.batch))
        return {**state, 'holds_last': True}

    @override
    def close(self) -> None:
        super().close()
        self.ahead = self.begun = self.evaluation = None

    @override
    def forget(self) -> None:
        super().forget()
        self.ahead = self.begun = self.evaluation = None


class ReadAhead(Iterator[Any]):
    """Iterate with one batch drawn ahead, so that the last batch is known to be the last.

    >>> batches = ReadAhead(iter([1, 2]))
    >>> next(batches), batches.batch, [*batches]
    (1, 2, [2])
    """

    def __init__(
        self,
        batches: Iterator[Any],
        first: Any = None,  # first batch, which was drawn already; None: it is drawn now
    ) -> None:
        self.batches = batches
        self.batch: Any = next(batches, _END) if first is None else first  # the next batch

    def __next__(self) -> Any:
        batch = self.batch
        if batch is _END:
            raise StopIteration
        self.batch = next(self.batches, _END)
        return batch


@contextmanager
def checking_sanity(learn: Learner, host: LightningHost) -> Iterator[None]:
    """Restore everything but the generators of loaders at the end of a context, without other callbacks.

    Lightning evaluates some batches before a fit, and isolates the global generators."""
    others = [cb for cb in learn.cbs if not isinstance(cb, (type(host), *TAKING_PART))]
    host.trainer.sanity_checking = True
    try:
        with without_callbacks(learn, others), preserved_state(learn):
            yield
    finally:
        host.trainer.sanity_checking = False
