"""State of single callbacks that the next step, or the end of the fit, depends on after a resume."""

from pathlib import Path
from typing import Any

import pytest

from learnkit import EMA, Callback, GradientAccumulation, Learner
from learnkit.callbacks import BnFreeze, Checkpoint, FixedStopper, LoadWeights, SaveModelCallback
from learnkit.checkpoint.digest import differences
from learnkit.core.errors import WeightsError
from tests.helpers.every_callback import learner
from tests.helpers.resuming import check_every_place, through_a_file, train_without_stop


def saved(learn: Learner, ba: int) -> list[Any]:
    "Return a list that receives a Learner's checkpoint after `ba` batches, saved to and loaded from a file."
    kept: list[Any] = []

    def keep(cb: Callback) -> None:
        if cb.learn.time.ba == ba:
            kept.append(through_a_file(cb.learn.checkpoint_state()))

    last = Callback(batch_checkpoint=keep)
    last.order = 3000
    learn.add_cb(last)
    return kept


def test_layers_that_were_frozen_are_trained_again(tmp_path: Path) -> None:
    def freeze(cb: Any) -> None:
        cb.model.norm.requires_grad_(cb.epoch != 0)

    check_every_place(lambda: learner(tmp_path, BnFreeze(), Callback(before_epoch=freeze)))
    learn = learner(tmp_path, BnFreeze(), Callback(before_epoch=freeze))
    learn.fit(2)
    assert learn.bn_freeze.state_dict() == {'frozen': []}
    assert learn.model.norm.num_batches_tracked == 4


def test_best_weights_are_found_where_the_folder_is_now(tmp_path: Path) -> None:
    def make(folder: str) -> Learner:  # the first epoch is the best
        return learner(
            tmp_path / folder, SaveModelCallback(comp=lambda new, best: best == float('-inf'))
        )

    end, kept = train_without_stop(lambda: make('before'), lambda learn, _: learn.fit(2))
    sd = kept[-1]['callbacks']['save_model']
    assert sd['has_best'] is True and sd['compared'] is True
    (tmp_path / 'before').rename(tmp_path / 'after')
    learn = make('after')
    # the first epoch is the best, from before the move
    learn.fit(2, resume=through_a_file(kept[5]))
    assert not differences(end['model'], learn.model.state_dict())


def test_a_stopper_counts_from_the_checkpoint(tmp_path: Path) -> None:
    learn = learner(tmp_path, FixedStopper('8ba'))
    kept = saved(learn, 5)
    learn.fit(3)
    assert learn.time.ba == 8
    learn.fit(3, resume=kept[0])  # in the Learner that is through
    assert learn.time.ba == 8 and len(learn.history) == 2


def test_weights_are_loaded_once(tmp_path: Path) -> None:
    learn = learner(tmp_path, Checkpoint(folder=tmp_path / 'c', background=False, keep_last=None))
    learn.fit(1)
    file = next((tmp_path / 'c').glob('*.ckpt'))
    weights = {k: v.clone() for k, v in learn.model.state_dict().items()}
    loaded: list[float] = []

    def make(at: str) -> Learner:
        watcher = Callback(after_load=lambda cb: loaded.append(cb.learn.time.ba))
        return learner(tmp_path, LoadWeights(file, at), watcher)

    learn = make('before_fit')
    kept = saved(learn, 2)
    learn.fit(0)
    # the weights alone
    assert not differences(weights, learn.model.state_dict()) and learn.opt.n_steps == 0
    learn.fit(1)
    loaded.clear()
    make('before_fit').fit(1, resume=kept[0])
    assert loaded == [0]  # the checkpoint's own

    learn = make('before_epoch')
    kept = saved(learn, 2)
    learn.fit(2)
    loaded.clear()
    make('before_epoch').fit(2, resume=kept[0])
    assert loaded == [0, 4]  # and at the next epoch
    with pytest.raises(WeightsError, match='there is no file'):
        learner(tmp_path, LoadWeights('other', 'before_epoch')).fit(2, resume=kept[0])


def test_leftover_samples_have_their_step_after_a_resume(tmp_path: Path) -> None:
    steps: list[int] = []

    def make() -> Learner:
        watcher = Callback(after_step=lambda cb: steps.append(cb.learn.opt.n_steps))
        return learner(tmp_path, GradientAccumulation(30), EMA(), watcher)

    kept = check_every_place(make)
    steps.clear()
    make().fit(2, resume=through_a_file(kept[3]))  # the last batch of the first epoch
    assert steps == [2, 3, 4]


def test_a_callback_can_read_its_state_before_it_is_restored(tmp_path: Path) -> None:
    found: list[Any] = []

    class Reader(Callback):
        n = 0

        def before_fit(self) -> None:
            checkpoint = self.learn.run.resuming
            if checkpoint is None:
                found.append(None)
            else:
                finished = [checkpoint.finished(unit) for unit in ('ep', 'ba', 'st', 'sp')]
                found.append((checkpoint.find_state(self), self.n, finished))

        def after_batch(self) -> None:
            self.n += self.training
            found.append(self.learn.run.resuming)

        def state_dict(self) -> dict[str, Any]:
            return {'n': self.n}

        def load_state_dict(self, sd: dict[str, Any]) -> None:
            self.n = sd['n']

    first = learner(tmp_path, Reader())
    kept = saved(first, 3)
    first.fit(2)
    assert set(found) == {None}
    found.clear()
    learner(tmp_path, Reader()).fit(2, resume=kept[0])
    state, n, finished = found[0]
    assert state == {'n': 3} and n == 0
    assert finished == [0, 3, 3, 36]
    assert set(found[1:]) == {None}
