"""Points of the loop at which checkpoints are taken, and how a resumed fit reaches them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from learnkit.core.errors import CheckpointError
from learnkit.core.learner_type import LoopLike
from learnkit.engine.callback import Callback
from learnkit.engine.evaluation import EvaluateWithinEpochs

__all__ = [
    'SAVE_POINTS',
    'ResumeState',
    'list_checkpoint_folders',
    'open_resumed',
    'resume_at',
    'resumed_epochs',
]

# point of a checkpoint, and the point of the loop at which it is restored
SAVE_POINTS = {
    'batch': 'batch',  # after a training batch
    'within': 'batch',  # after a training batch, before an evaluation that is due
    'evaluation': 'evaluation',  # after an epoch's training, before an evaluation that is due
    'epoch': 'epoch',  # after an epoch
    'iteration': 'epoch',  # after an epoch that ended an iteration
}


@dataclass
class ResumeState:
    """Checkpoint that a fit resumes from, until it is completely restored.

    A resumed fit fires `before_fit`, and within an epoch also `before_epoch` and `before_train`
    (within an iteration `before_iteration`), with `resumed` True. The checkpoint is restored after
    these events, so that it replaces the state that their handlers set up.
    """

    state: Mapping[str, Any]
    restore: Callable[[Any, ResumeState], None]  # f(learn, self): restores it in a Learner
    path: Path | None = None  # file of the checkpoint
    info: dict[str, Any] = field(default_factory=dict)  # metadata of the file
    before: dict[str, Any] | None = None  # weights and optimizers that the checkpoint replaces

    @property
    def loop(self) -> Mapping[str, Any]:
        "State of the loop."
        loop: Mapping[str, Any] = self.state['loop']
        return loop

    @property
    def at(self) -> str:
        "Point of the loop at which the checkpoint is restored."
        return SAVE_POINTS[self.loop['place']]

    @property
    def stage(self) -> int:
        "Index of the fit of `fine_tune` in which the checkpoint was taken; raise `CheckpointError` for other fits."
        stage: int | None = self.loop['stage']
        if stage is not None:
            return stage
        name = self.path or 'The checkpoint'
        raise CheckpointError(f'{name} belongs to a separate fit, not to `fine_tune`.')


def list_checkpoint_folders(learn: LoopLike) -> list[Path]:
    "Return the folders in which callbacks keep checkpoints: where a fit is resumed from."
    folders = [cb.checkpoint_folder() for cb in learn.cbs if isinstance(cb, Callback)]
    return [folder for folder in folders if folder is not None]


def resumed_epochs(learn: LoopLike) -> Iterable[int]:
    "Return the indices of the epochs that remain. A checkpoint taken after an epoch is restored here."
    r = learn.run.resume
    epoch: int = r.loop['epoch']
    if r.at == 'epoch':
        learn.epoch = epoch
        per_iteration = learn.epochs_per_iteration
        if per_iteration is not None and (epoch + 1) % per_iteration:
            learn('before_iteration')
        resume_at(learn, 'epoch')
        learn.passes.resume(learn.dls, r.state['position'])
        if r.loop['place'] == 'epoch' and learn.ends_iteration():
            learn.end_iteration()
        if learn.run.stopping:
            return ()  # the checkpoint is of a fit that was stopped
        epoch += 1
    return count(epoch) if learn.n_epoch is None else range(epoch, learn.n_epoch)


def resume_at(learn: LoopLike, point: str) -> None:
    "Restore the checkpoint if it was taken at this point; raise `CheckpointError` if the fit went past it."
    r = learn.run.resume
    loop = r.loop
    is_its_epoch = learn.epoch == loop['epoch']
    if is_its_epoch and r.at == point:
        if point == 'evaluation':
            learn.passes.resume(learn.dls, r.state['position'])  # position of the next epoch
        r.restore(learn, r)
        return
    if point == 'evaluation' or not is_its_epoch:
        raise CheckpointError(
            f'The checkpoint was taken after batch {loop["iter"]} of epoch {loop["epoch"]}, and '
            'this fit did not get there: the epoch, or its training, was cancelled, or '
            f'{type(learn).__name__} trains epochs in its own way. Nothing was trained; '
            "resume from a checkpoint of an epoch's end."
        )


def open_resumed(learn: LoopLike) -> tuple[int, Iterator[Any] | None]:
    """Return the index of the next batch, and the remaining batches, or None if no batch is left.

    An interrupted evaluation after a batch is repeated first, followed by the checkpoint event of the batch.
    """
    r = learn.run.resume
    if r.at == 'evaluation':
        return 0, None
    resume_at(learn, 'batch')
    learn.passes.resume(learn.dls, r.state['position'])
    batches = learn.passes.open(learn, continued=True)
    if r.loop['place'] == 'within':
        for cb in learn.cbs:
            if isinstance(cb, EvaluateWithinEpochs):
                cb.after_batch()
        learn.fire_checkpoint('batch')
    return r.loop['n_drawn'], None if learn.run.stopping else batches
