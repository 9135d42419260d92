"""Callbacks added or removed during a fit start there, and leave gradients, rates and losses right."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as torch_lr

from learnkit import Callback, DataLoaders, Learner, MixUp, TensorLoader
from learnkit.callbacks.early_stopping import EarlyStoppingCallback
from learnkit.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from learnkit.callbacks.save_model import SaveModelCallback
from learnkit.callbacks.schedule import LRScheduler, ParamScheduler, SchedLin
from learnkit.testing import synth_learner


def quiet(learn: Learner) -> Learner:
    learn.remove_cb(learn.progress)
    learn.logger = lambda row: None
    return learn


def at(event: str, epoch: int, act: Any) -> Callback:
    done: list[bool] = []

    def run(cb: Any) -> None:
        if cb.fitting and cb.epoch == epoch and not done:
            done.append(True)
            act(cb.learn)

    handler = Callback(**{event: run})
    handler.order = -5
    return handler


# mixed precision that leaves


def trained(*cbs: Any, fp16: bool = True) -> Learner:
    gen = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 6, generator=gen), torch.randn(8, 3, generator=gen)) for _ in range(6)
    ]
    torch.manual_seed(4)
    learn = quiet(
        Learner(batches, nn.Linear(6, 3), F.mse_loss, opt_func=torch.optim.SGD, lr=0.1, cbs=cbs)
    )
    if fp16:
        learn.to_fp16(init_scale=2.0**12)
    learn.fit(1)
    return learn


@pytest.mark.parametrize('leave', ['to_fp32', 'to_fp16'])
def test_mixed_precision_leaves_in_the_middle_of_a_fit(leave: str) -> None:
    def change(cb: Any) -> None:
        if cb.train_iter == 2 and cb.training:
            getattr(cb.learn, leave)()

    changer = Callback(before_backward=change)
    changer.order = 20
    got, plain = trained(changer), trained(fp16=False)
    torch.testing.assert_close(got.model.weight, plain.model.weight, rtol=0.02, atol=0.01)
    assert got.opt.n_steps == plain.opt.n_steps and all(loss < 10 for loss in got.recorder.losses)


# trackers and schedulers that come


@pytest.mark.parametrize(
    'event',
    ['before_batch', 'after_train', 'after_validate'],
)
@pytest.mark.parametrize(
    'cls',
    [
        EarlyStoppingCallback,
        partial(SaveModelCallback, every_epoch=True),
        SaveModelCallback,
    ],
)
def test_a_tracker_that_comes_in_the_middle_of_a_fit_begins_there(
    cls: Any, event: str, tmp_path: Path
) -> None:
    learn, tracker = quiet(synth_learner(lr=0.02, path=tmp_path)), cls()
    learn.fit(3, cbs=at(event, 1, lambda learn: learn.add_cb(tracker)))
    if getattr(tracker, 'every_epoch', False):
        assert (tmp_path / 'models' / 'model_2.pth').exists()
    else:
        if cls is SaveModelCallback:  # the best weights are loaded
            assert learn.validate()[0] == pytest.approx(tracker.best)
        assert tracker.best == min(row['valid_loss'] for row in learn.history[1:])
    learn.fit(1)


@pytest.mark.parametrize(
    'other', [lambda: LRScheduler(partial(torch_lr.StepLR, step_size=1)), ReduceLROnPlateau]
)
def test_two_callbacks_that_set_the_rate_raise_a_warning(other: Any) -> None:
    learn = quiet(synth_learner(cbs=other()))
    with pytest.warns(UserWarning, match='set the learning rate'):
        learn.fit_one_cycle(1, 0.01)
    learn.fit(1, cbs=ParamScheduler({'mom': SchedLin(0.9, 0.8)}))


# MixUp that goes


def test_the_loss_is_blended_to_the_end_of_a_batch_in_which_mixup_goes() -> None:
    def losses(act: Any) -> list[Tensor]:
        torch.manual_seed(0)
        train = TensorLoader(torch.randn(32, 4), torch.randint(3, (32,)), bs=8, shuffle=False)
        dls = DataLoaders(train, TensorLoader(torch.randn(8, 4), torch.randint(3, (8,)), bs=8))
        learn = quiet(Learner(dls, nn.Linear(4, 3), nn.CrossEntropyLoss(), lr=0.1, cbs=MixUp()))
        torch.manual_seed(1)
        learn.fit(1, cbs=Callback(after_pred=lambda cb: act(cb.learn) if cb.training else None))
        return learn.recorder.losses

    def evaluate(learn: Learner) -> None:
        with learn.removed_cbs(MixUp):
            learn.validate()

    plain = losses(lambda learn: None)
    assert losses(evaluate) == plain
    assert losses(lambda learn: learn.remove_cb(MixUp))[0] == plain[0]


# a loader without a length


class Endless:
    def __iter__(self) -> Any:
        return iter([(torch.ones(2, 1), torch.ones(2, 1))] * 3)


def test_a_schedule_that_cannot_move_inside_an_epoch_is_reported() -> None:
    learn = quiet(Learner(DataLoaders(Endless()), nn.Linear(1, 1), F.mse_loss, lr=0.01))
    with pytest.warns(UserWarning, match='n_iter'):
        learn.fit_one_cycle(2)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learn.fit_one_cycle('5ba')
        learn.fit_one_cycle(0)
        learn.dls = DataLoaders(Endless(), n_iter=3)
        learn.fit_one_cycle(1)
    assert len(set(learn.recorder.lrs)) == 3
