"""Counters, and the mode of each module in training and evaluation."""

from typing import Any

import pytest
import torch
from torch import nn

from learnkit import Callback, DataLoaders, Learner, SkipToEpoch, TrainEvalCallback
from learnkit.engine.train_eval import keep_modes
from learnkit.testing import synth_dls, synth_learner
from tests.helpers.learners import bare_learner


def quiet(*cbs: Any, **kwargs: Any) -> Learner:
    return bare_learner(cls=synth_learner, cbs=cbs, **kwargs)


def test_start_epoch_trains_only_from_there_on() -> None:
    epochs: list[int] = []
    learn = quiet(Callback(before_train=lambda cb: epochs.append(cb.epoch)), n_train=3)
    learn.fit(5, start_epoch=3)
    assert epochs == [3, 4] and learn.train_iter == 6
    assert [row['epoch'] for row in learn.history] == [3, 4]
    assert learn.pct_train == pytest.approx(1)
    assert not any(isinstance(cb, SkipToEpoch) for cb in learn.cbs)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)
    )


@pytest.mark.parametrize('valid', [True, False])
def test_a_norm_layer_that_was_set_to_eval_stays_so_in_later_epochs(valid: bool) -> None:
    model, modes, dls = net(), [], synth_dls(n_train=2)

    def freeze(cb: Any) -> None:
        if cb.epoch == 0:
            model[1].eval()

    cbs = [
        TrainEvalCallback,
        Callback(
            before_train=freeze,
            before_step=lambda cb: modes.append([m.training for m in model]),
        ),
    ]
    learn = Learner(
        dls if valid else DataLoaders(dls.train), model, nn.MSELoss(), default_cbs=False, cbs=cbs
    )
    learn.fit(3)
    assert modes == [[True, False, True, True, True]] * 6
    assert torch.equal(model[1].running_mean, torch.zeros(8))


def test_the_model_is_in_training_mode_exactly_when_the_learner_is() -> None:
    seen: list[tuple[bool, bool]] = []
    note = Callback(after_pred=lambda cb: seen.append((cb.training, cb.model.training)))
    quiet(note, model=net(), n_train=2, n_valid=1).fit(2)
    assert seen == [(True, True), (True, True), (False, False)] * 2


@pytest.mark.parametrize('keeps', [True, False])
def test_a_fit_can_keep_the_modes_that_modules_have(keeps: bool) -> None:
    model = net()
    model[1].eval()
    modes: list[list[bool]] = []
    keep = Callback(before_fit=lambda cb: keep_modes(cb.learn) if keeps else None)
    note = Callback(before_batch=lambda cb: modes.append([m.training for m in cb.model]))
    note.run_valid = False
    quiet(keep, note, model=model, n_train=1, n_valid=1).fit(2)
    assert modes == [[True, not keeps, True, True, True]] * 2
