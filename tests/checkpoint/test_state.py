"""Checkpoints in memory: resuming from every place of a run equals an uninterrupted run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from learnkit import (
    EMA,
    Callback,
    DataLoaders,
    Learner,
    accuracy,
)
from learnkit.callbacks import EarlyStoppingCallback
from learnkit.checkpoint.compare import differences
from learnkit.core.errors import CheckpointError
from tests.helpers.resuming import Keep, check_every_place, scramble, train_without_stop


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def dls() -> DataLoaders:
    x, y = torch.randn(24, 4), torch.randint(3, (24,))
    return DataLoaders.from_tensors((x, y), (x[:8], y[:8]), bs=4)


def make(*cbs: Any, **kwargs: Any) -> Learner:
    torch.manual_seed(0)
    loss_func = nn.CrossEntropyLoss()
    return Learner(dls(), net(), loss_func, metrics=accuracy, cbs=list(cbs), lr=0.05, **kwargs)


def test_with_iterations_and_evaluations_in_the_middle_of_epochs() -> None:
    def fit(learn: Learner, resume: Any) -> None:
        learn.fit(3, iteration=2, resume=resume)

    def some(kept: list[Any]) -> list[Any]:
        return [s for i, s in enumerate(kept) if i % 6 == 3 or s['loop']['place'] != 'batch']

    kept = check_every_place(lambda: make(eval_every='4ba', microbatch=2), fit, some)
    assert [s['loop']['place'] for s in kept].count('iteration') == 1


def test_a_fit_can_be_longer_than_the_one_of_the_checkpoint() -> None:
    _, kept = train_without_stop(make, lambda learn, r: learn.fit(1))
    end, _ = train_without_stop(make, lambda learn, r: learn.fit(3))
    learn = make()
    learn.add_cb(Keep())
    learn.fit(3, resume=kept[-1])
    found = differences(end, learn.checkpoint_state())
    assert not found, found
    learn = make()
    with pytest.warns(UserWarning, match=r' 1 epochs, .* 3'):
        learn.fit(3, resume=kept[2])


def test_a_stopped_fit_stays_stopped() -> None:
    def stop(cb: Any) -> None:
        if cb.epoch == 1 and cb.iter == 2 and cb.training:
            cb.learn.stop()

    def some(kept: list[Any]) -> list[Any]:
        return kept[-4::2]

    fit = lambda learn, r: learn.fit(4, resume=r)
    check_every_place(lambda: make(Callback(after_batch=stop)), fit, some)
    check_every_place(
        lambda: make(EarlyStoppingCallback(monitor='accuracy', patience=1)),
        lambda learn, r: learn.fit(6, resume=r),
        some,
    )


def test_frozen_layers_and_modes_stay() -> None:
    def freeze(cb: Any) -> None:
        if cb.epoch == 0 and cb.iter == 3 and cb.training:
            cb.model[1].eval()
            cb.model[0].requires_grad_(False)

    check_every_place(lambda: make(Callback(after_batch=freeze)), places=lambda kept: kept[2::4])


def test_a_state_can_be_restored_outside_of_a_fit() -> None:
    end, _ = train_without_stop(lambda: make(EMA()), lambda learn, r: learn.fit(2))
    learn = make(EMA())
    learn.add_cb(Keep())
    learn.load_checkpoint_state(end)
    # of the last epoch
    found = [d for d in differences(end, learn.checkpoint_state()) if '.open.' not in d]
    assert not found, found


def test_what_is_no_state_of_a_fit_is_refused() -> None:
    end, _ = train_without_stop(make, lambda learn, r: learn.fit(1))
    with pytest.raises(CheckpointError, match='not a checkpoint'):
        make().fit(1, resume={'a': 1})
    with pytest.raises(CheckpointError, match='outside of a fit'):
        make().fit(2, resume=end)
    with pytest.raises(CheckpointError, match='in the middle of a run'):
        make(Callback(after_batch=lambda cb: cb.learn.checkpoint_state())).fit(1)
    scramble(0)


def test_fine_tune_resumes_in_either_of_its_fits() -> None:
    def split(model: Any) -> Any:
        return [list(model[:2].parameters()), list(model[2:].parameters())]

    def fit(learn: Learner, resume: Any) -> None:
        learn.fine_tune(2, 0.05, resume=resume)

    kept = check_every_place(lambda: make(EMA(), splitter=split), fit, lambda kept: kept[3::6])
    assert [s['loop']['stage'] for s in kept] == [0] * 7 + [1] * 14
    with pytest.raises(CheckpointError, match='fine_tune'):
        make(splitter=split).fine_tune(
            2, resume=train_without_stop(make, lambda learn, r: learn.fit(1))[1][0]
        )


def test_a_loss_with_its_own_weights() -> None:
    class Centre(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centre = nn.Parameter(torch.randn(3))
            self.register_buffer('n', torch.zeros(()))

        def forward(self, pred: Any, targ: Any) -> Any:
            self.n += 1
            return nn.functional.cross_entropy(pred - self.centre, targ) + self.n * 0.01

    def learner() -> Learner:
        learn = make()
        learn.loss_func = Centre()
        learn.opt_func = lambda params, lr: torch.optim.Adam(
            [*params, *learn.loss_func.parameters()], lr
        )
        return learn

    check_every_place(learner, places=lambda kept: kept[1::6])


def test_a_budget_can_be_extended_and_an_early_stop_stays_in_effect() -> None:
    _, kept = train_without_stop(make, lambda learn, r: learn.fit('7ba'))
    learn = make()
    # its epoch had ended with its evaluation, and the next one begins
    learn.fit('9ba', resume=kept[-1])
    assert learn.time.ba == 9 and learn.history[-1]['epoch'] == 2
    stop = [Callback(after_batch=lambda cb: cb.learn.stop())]
    _, kept = train_without_stop(lambda: make(*stop), lambda learn, r: learn.fit(2))
    learn = make()
    with pytest.warns(UserWarning, match='was stopped in epoch 0'):
        learn.fit(5, resume=kept[-1])
    assert learn.time.ba == 1
