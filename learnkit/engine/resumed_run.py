# SPDX-License-Identifier: Apache-2.0
"""Points of the loop at which checkpoints are taken, and how a resumed fit reaches them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from learnkit.core.errors import CheckpointError
from learnkit.engine.dispatch import list_running
from learnkit.engine.positions import (
    Source,
    TrainingPositions,
    draw,
    end_iteration,
    ends_iteration,
    set_length,
)

if TYPE_CHECKING:
    from learnkit.engine.callback import Callback
    from learnkit.learner import Learner

# point of a checkpoint, and the point of the loop at which it is restored
SAVE_POINTS = {
    'batch': 'batch',  # after a training batch
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
    is_owner: bool = False  # whether nothing else refers to the tensors of the state
    before: Any = None  # restores the Learner as it was, until the first batch is trained
    next_batch: int = 0  # number of the next batch, in the epoch of the checkpoint

    @property
    def loop(self) -> Mapping[str, Any]:
        "State of the loop."
        loop: Mapping[str, Any] = self.state['loop']
        return loop

    @property
    def point(self) -> str:
        "Point of the loop at which the checkpoint is restored."
        return SAVE_POINTS[self.loop['point']]

    def make_source(self, positions: TrainingPositions) -> ResumedRun:
        "Return the epochs and batches that remain."
        return ResumedRun(positions, self)

    def find_state(self, cb: Callback) -> Any:
        "Return the state that the checkpoint has for a callback of the Learner, or None."
        return self.state['callbacks'].get(cb.learn.parts.callbacks.keys[id(cb)])

    def finished(self, unit: str) -> int:
        "Return how much had finished in one unit of `learn.time`, as `learn.finished` does."
        n: int = self.loop['done'][unit]
        return n + self.loop['n_steps'] if unit == 'st' else n

    def keep(self) -> None:
        "Keep what is restored, whatever happens from here on."
        if self.before is not None:
            self.before.pop_all()
            self.before = None

    @property
    def stage(self) -> int:
        "Index of the fit of `fine_tune` in which the checkpoint was taken; raise `CheckpointError` for other fits."
        stage: int | None = self.loop['stage']
        if stage is not None:
            return stage
        name = self.path or 'The checkpoint'
        raise CheckpointError(f'{name} belongs to a separate fit, not to `fine_tune`.')


class CheckpointWriter(ABC):
    "Base of callbacks that write checkpoints: `fit(resume=True)` resumes from their folder."

    mirror: Any = None  # store from which newer checkpoints are fetched

    @property
    @abstractmethod
    def run_id(self) -> str:
        "Id of the run that writes; '' outside of a fit."

    @property
    @abstractmethod
    def has_own_folder(self) -> bool:
        "True if the folder does not follow `learn.path`."

    @abstractmethod
    def checkpoint_folder(self) -> Path:
        "Return the folder of the checkpoints."

    @abstractmethod
    def save_pause(self, point: str) -> None:
        "Write a checkpoint of a fit that pauses at a point, 'batch' or 'epoch', if that was asked for."


def list_checkpoint_writers(learn: Learner) -> list[CheckpointWriter]:
    "Return the callbacks that write checkpoints."
    return [cb for cb in learn.cbs if isinstance(cb, CheckpointWriter)]


def list_checkpoint_folders(learn: Learner) -> list[Path]:
    "Return the folders in which callbacks keep checkpoints: where a fit is resumed from."
    return [cb.checkpoint_folder() for cb in list_checkpoint_writers(learn)]


def find_checkpoint_folder(learn: Learner) -> Path:
    "Return the folder in which a fit looks for its checkpoint."
    return next(iter(list_checkpoint_folders(learn)), learn.path / 'checkpoints')


def check_rewound(learn: Learner, resume: Any) -> None:
    """Raise `CheckpointError` for a new fit that would write into the folder of the run that was rewound.

    A fit that resumes replaces the state that `rewind` has set, and ends the check."""
    positions = learn.parts.positions
    folder = positions.rewound
    if folder is None:
        return
    if resume is not None and resume is not False:
        positions.rewound = None
        return
    if folder in [place.absolute() for place in list_checkpoint_folders(learn)]:
        raise CheckpointError(
            f'`rewind` has moved this Learner to a batch of the run in {folder}, and a new fit would write there: '
            'pass `resume=moment` to continue in a separate folder, or set `learn.path`.'
        )


def checkpoint_point(learn: Learner) -> str:
    "Return the point of the checkpoint event that is running, 'batch', 'epoch' or 'iteration', or ''."
    for _, event in list_running(learn):
        if event.endswith('_checkpoint'):
            return event.removesuffix('_checkpoint')
    return ''


class ResumedRun(Source):
    """Epochs and batches that remain of a resumed fit; it takes the place of the fit's own passes.

    The checkpoint is restored where it was taken: before the first remaining epoch, or in its epoch
    before the first remaining batch.
    """

    def __init__(self, positions: TrainingPositions, resume: ResumeState) -> None:
        self.positions = positions
        self.resume = resume

    @override
    def epochs(self, learn: Learner, first: int = 0) -> Iterator[int]:
        "Return the epochs that remain. A checkpoint taken after an epoch is restored here."
        r = learn.run.resuming
        epoch: int = r.loop['epoch']
        if r.point == 'epoch':
            self._restore_after_epoch(learn)
            if learn.run.stopping:
                r.keep()
                return iter(())  # the checkpoint is of a fit that was stopped
            epoch += 1
        return self.positions.epochs(learn, epoch)

    def _restore_after_epoch(self, learn: Learner) -> None:
        r = learn.run.resuming
        epoch: int = r.loop['epoch']
        learn.epoch = epoch
        per_iteration = learn.epochs_per_iteration
        if per_iteration is not None and (epoch + 1) % per_iteration:
            learn('before_iteration')
        resume_at(learn, 'epoch')
        self._restore_between_epochs(learn)
        if r.loop['point'] == 'epoch' and ends_iteration(learn):
            end_iteration(learn)

    @override
    def batches(self, learn: Learner) -> tuple[Iterable[int], Iterator[Any]]:
        "Return the remaining batches of the resumed epoch, and every batch of later epochs."
        r = learn.run.resuming
        if not (learn.training and learn.fitting):
            return self.positions.batches(learn)
        if r is None:
            numbers, drawn = self.positions.batches(learn)
            return numbers, self._keep_after_first(drawn)
        self.positions.prepare(learn)
        self._select_loader(learn)
        set_length(learn)
        resume_at(learn, 'batch')
        batches = self._open_pass(learn)
        if learn.run.stopping:
            return range(0), iter(())
        numbers = set_length(learn, r.loop['n_drawn'])
        return numbers, self._keep_after_first(draw(learn, batches))

    def _select_loader(self, learn: Learner) -> None:
        "Set the loader of the rest of the epoch: that of the fit."

    def _open_pass(self, learn: Learner) -> Iterator[Any]:
        "Return the remaining batches of the resumed epoch."
        self.positions.resume(learn.dls, self.resume.state['position'])
        return self.positions.open(learn, continued=True)

    def _restore_between_epochs(self, learn: Learner) -> None:
        "Restore the position in the data after an epoch."
        self.positions.resume(learn.dls, self.resume.state['position'])

    def _keep_after_first(self, batches: Iterator[Any]) -> Iterator[Any]:
        "Return the batches; after the first of the fit was trained, the checkpoint is kept, whatever happens."
        return (
            batches if self.resume.before is None else _call_after_first(batches, self.resume.keep)
        )

    @override
    def end(self, learn: Learner) -> None:
        self.positions.end(learn)


def _call_after_first(items: Iterator[Any], call: Callable[[], None]) -> Iterator[Any]:
    "Yield all items, and call a function after the first."
    for item in items:
        yield item
        break
    call()
    yield from items


def resume_at(learn: Learner, point: str) -> None:
    "Restore the checkpoint if it was taken at this point; raise `CheckpointError` if the fit went past it."
    r = learn.run.resuming
    loop = r.loop
    is_its_epoch = learn.epoch == loop['epoch']
    if is_its_epoch and r.point == point:
        r.restore(learn, r)
        return
    if not is_its_epoch:
        raise CheckpointError(
            f'The checkpoint was taken after batch {loop["iter"]} of epoch {loop["epoch"]}, and '
            'this fit did not get there: the epoch, or its training, was cancelled, or '
            f'{type(learn).__name__} trains epochs in its own way. Nothing was trained; '
            "resume from a checkpoint of an epoch's end."
        )
