"""ksuit callbacks constructed from their classes, the services passed to them, and the order of a resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import Callback, Checkpoint, Learner
from learnkit.interop import from_ksuit
from learnkit.testing import synth_learner
from tests.peers import ksuit_bench as bench, ksuit_callbacks as ks
from tests.peers.ksuit_callbacks import CallbackBase
from tests.peers.rows import EQUAL


def fit(learn: Learner, *args: Any, **kwargs: Any) -> Learner:
    with learn.no_bar(), learn.no_logging():
        learn.fit(*args, **kwargs)
    return learn


# -- against a loop in plain torch -----------------------------------------------------------------

SOME = [
    case
    for case in bench.CASES
    if case.cls
    in (ks.BestCheckpointCallback, ks.BestMetricCallback, ks.EmaCallback, ks.OfflineLossCallback)
    and not case.refuses
]


@pytest.mark.parametrize('run', [bench.run_learner, bench.run_killed])
@pytest.mark.parametrize('case', SOME, ids=bench.name_of)
def test_logs_files_and_weights_equal_the_plain_loop(
    case: bench.Case, run: Callable[..., Any], tmp_path: Path
) -> None:
    folders = tmp_path / 'learner', tmp_path / 'plain'
    for folder in folders:
        folder.mkdir()
    ours, theirs = run(case, folders[0]), bench.run_plain(case, folders[1])
    assert bench.compare(case, ours, theirs) == (True, EQUAL)
    assert theirs.entries or theirs.files


# -- construction ----------------------------------------------------------------------------------


@dataclass
class Options:
    every_n_epochs: int
    scale: float = 2.0


class Periodic(CallbackBase):
    def __init__(self, callback_config: Options, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.every_n_epochs, self.scale = callback_config.every_n_epochs, callback_config.scale
        self.sizes = [len(ds) for ds in self.data_container.datasets.values()]
        self.count, self.seen = self.model.trainable_param_count, list[float]()

    def periodic_callback(self, *, update_counter: Any, **_: Any) -> None:
        self.seen.append(self.scale * update_counter.cur_iteration.epoch)
        self.writer.add_scalar('seen', self.seen[-1])


def test_a_class_is_constructed_when_it_is_added() -> None:
    adapter = from_ksuit(Periodic, every_n_epochs=2, name='mine')
    assert adapter.wrapped is None
    assert repr(adapter) == "from_ksuit(Periodic, every_n_epochs=2, name='mine')"
    learn = synth_learner(n_train=3, n_valid=1, cbs=adapter)
    cb = adapter.wrapped
    assert (cb.name, cb.every_n_epochs, cb.scale, cb.count) == ('mine', 2, 2.0, 2)
    assert cb.sizes == [48, 16]
    fit(learn, 4)
    assert cb.seen == [4.0, 8.0] and [row.get('seen') for row in learn.history][1::2] == [4.0, 8.0]
    other = synth_learner(n_train=3)
    learn.remove_cb(adapter)
    fit(other.add_cb(adapter), 2)
    assert adapter.wrapped is cb and cb.seen == [4.0, 8.0, 4.0]
    assert cb.model.a is other.model.a and isinstance(cb.model, type(other.model))


# -- services --------------------------------------------------------------------------------------


def test_train_step_returns_the_loss_of_a_plain_step() -> None:
    class Train(CallbackBase):
        def after_training(self, *, update_counter: Any) -> None:
            self.result = self.trainer.train_step(self.batch, self.model)

        def __init__(self, batch: Any, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.batch = batch

    torch.manual_seed(0)
    x, y = batch = torch.randn(4, 1), torch.randn(4, 1)
    adapter = from_ksuit(Train, batch=batch)
    learn = synth_learner(n_train=2, cbs=adapter)
    fit(learn, 0)
    loss = nn.functional.mse_loss(learn.model(x), y)
    assert adapter.wrapped.result.total_loss.item() == loss.item()
    assert list(adapter.wrapped.result.losses_to_log) == ['loss']


# -- resume ----------------------------------------------------------------------------------------


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
