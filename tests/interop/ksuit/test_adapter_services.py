"""The order in which callbacks of ksuit are restored on a resume."""

from pathlib import Path
from typing import Any

import pytest

from learnkit import Callback, Checkpoint, Learner
from learnkit.interop import from_ksuit
from learnkit.testing import synth_learner
from tests.peers.ksuit_callbacks import CallbackBase


def fit(learn: Learner, *args: Any, **kwargs: Any) -> Learner:
    with learn.no_bar(), learn.no_logging():
        learn.fit(*args, **kwargs)
    return learn


BEGUN: list[str] = []  # outside of the callback, whose attributes are restored


class Tracks(CallbackBase):
    "Inherits a `state_dict` that returns None, and records the order of its methods."

    every_n_updates = 1

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.total, self.at = 0.0, list[str]()

    def resume_from_checkpoint(self, resumption_paths: Any, model: Any) -> None:
        self.at.append(f'resume {self.total:g}')

    def before_training(self, *, update_counter: Any) -> None:
        c = update_counter
        self.at.append(f'before {c.cur_iteration} {c.epoch} {c.update} {c.sample} {self.total:g}')
        BEGUN[:] = self.at

    def before_epoch(self, *, update_counter: Any) -> None:
        self.epoch_begun = str(update_counter.cur_iteration)

    def periodic_callback(self, **_: Any) -> None:
        self.total += 1


def test_files_and_state_come_before_before_training(tmp_path: Path) -> None:
    def fail(cb: Callback) -> None:
        if cb.train_iter == 6:
            raise InterruptedError

    def make(*more: Any) -> Learner:
        adapter = from_ksuit(Tracks)
        return synth_learner(n_train=4, path=tmp_path, cbs=[adapter, Checkpoint('5ba'), *more])

    learn = make(Callback(before_batch=fail))
    with pytest.raises(InterruptedError):
        fit(learn, 3)
    learn = make()
    cb = next(cb.wrapped for cb in learn.cbs if hasattr(cb, 'wrapped'))
    fit(learn, 3, resume=True)
    start = 'before E0_U0_S0 0 0 0 0'
    # the state, then the files, then `before_training` with the checkpoint's progress
    assert [start, 'resume 5', 'before E1_U5_S80 1 5 80 5'] == BEGUN
    assert cb.total == 12 and cb.at == [start]  # the checkpoint's, as if it had never stopped
