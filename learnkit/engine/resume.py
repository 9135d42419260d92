"""How a fit continues from a checkpoint: where a run can be saved, and how the loop gets there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from learnkit.core.errors import CheckpointError
from learnkit.core.learner_type import LoopLike
from learnkit.engine.evaluation import EvaluateWithinEpochs

__all__ = ['LOOP_PLACES', 'ResumeState', 'open_resumed', 'resume_at', 'resumed_epochs']

# the place of a checkpoint, and the place of the loop at which it is restored
LOOP_PLACES = {
    'batch': 'batch',  # after a training batch
    'within': 'batch',  # the same, with an evaluation that is due
    'evaluation': 'evaluation',  # after an epoch's training, with an evaluation that is due
    'epoch': 'epoch',  # after an epoch
    'iteration': 'epoch',  # after an epoch that ended an iteration
}


@dataclass
class ResumeState:
    """A checkpoint that a fit continues from, until all of it is restored.

    A resumed fit fires `before_fit`, and within an epoch also `before_epoch` and `before_train`
    (within an iteration `before_iteration`), with `resumed` True. Only then is everything restored,
    so that what those handlers set up is replaced.
    """

    state: Mapping[str, Any]
    restorer: Callable[[Any, ResumeState], None]  # restores it in a Learner
    path: Path | None = None  # its file
    info: dict[str, Any] = field(default_factory=dict)  # metadata of its file
    before: dict[str, Any] | None = None  # the weights and optimizers that it replaces

    @property
    def loop(self) -> Mapping[str, Any]:
        "The loop's part of the state."
        loop: Mapping[str, Any] = self.state['loop']
        return loop

    @property
    def at(self) -> str:
        "The place of the loop at which it is restored."
        return LOOP_PLACES[self.loop['place']]

    @property
    def stage(self) -> int:
        "Which of the fits of `fine_tune` it is of."
        stage: int | None = self.loop['stage']
        if stage is not None:
            return stage
        name = self.path or 'The checkpoint'
        raise CheckpointError(f'{name} belongs to a separate fit, not to `fine_tune`.')

    def restore(self, learn: LoopLike) -> None:
        "Restore everything in a Learner."
        self.restorer(learn, self)


def resumed_epochs(learn: LoopLike) -> Iterable[int]:
    "Return the numbers of the epochs that are still to be trained."
    r = learn.run.resume
    first = first_epoch(learn, r)
    if r.at == 'epoch' and learn.run.stopping:
        return ()  # the checkpoint is of a fit that was stopped
    return count(first) if learn.n_epoch is None else range(first, learn.n_epoch)


def first_epoch(learn: LoopLike, r: ResumeState) -> int:
    "Return the epoch that a resumed fit begins with: the one that was under way, or the next."
    epoch: int = r.loop['epoch']
    per_iteration = learn.epochs_per_iteration
    if r.at != 'epoch':
        return epoch
    learn.epoch = epoch
    if per_iteration is not None and (epoch + 1) % per_iteration:
        learn('before_iteration')
    resume_at(learn, 'epoch')
    learn.passes.resume(learn.dls, r.state['position'])
    if r.loop['place'] == 'epoch' and learn.ends_iteration():
        learn.end_iteration()
    return epoch + 1


def resume_at(learn: LoopLike, place: str) -> None:
    "Restore the checkpoint if it was taken at this place; raise if its own place was passed over."
    r = learn.run.resume
    loop = r.loop
    is_its_epoch = learn.epoch == loop['epoch']
    if is_its_epoch and r.at == place:
        if place == 'evaluation':
            learn.passes.resume(learn.dls, r.state['position'])  # of the epoch that comes next
        r.restore(learn)
        return
    if place == 'evaluation' or not is_its_epoch:
        raise CheckpointError(
            f'The checkpoint was taken after batch {loop["iter"]} of epoch {loop["epoch"]}, and '
            'this fit did not get there: the epoch, or its training, was cancelled, or '
            f'{type(learn).__name__} trains epochs in its own way. Nothing was trained; '
            "resume from a checkpoint of an epoch's end."
        )


def open_resumed(learn: LoopLike) -> tuple[int, Iterator[Any] | None]:
    "Return the number of the next batch and the rest of the batches, None if no batch is to come."
    r = learn.run.resume
    if r.at == 'evaluation':
        return 0, None
    resume_at(learn, 'batch')
    learn.passes.resume(learn.dls, r.state['position'])
    batches = learn.passes.open(learn, continued=True)
    if r.loop['place'] == 'within':
        evaluate_as_due(learn)
    return r.loop['n_drawn'], None if learn.run.stopping else batches


def evaluate_as_due(learn: LoopLike) -> None:
    "Do the evaluation that was broken off after a batch, and what comes after it."
    for cb in learn.cbs:
        if isinstance(cb, EvaluateWithinEpochs):
            cb.after_batch()
    learn.fire_checkpoint('batch')
