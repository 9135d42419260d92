"""Callback objects of fastai itself, in a Learner of learnkit."""

import pytest
import torch
from torch import nn

from learnkit import Callback, CancelError, Learner
from learnkit.testing import synth_learner

core = pytest.importorskip('fastai.callback.core')


def test_it_runs_reads_and_writes() -> None:
    class Watch(core.Callback):
        def before_fit(self) -> None:
            self.seen = []

        def after_loss(self) -> None:
            if self.training:
                self.learn.loss_grad = 2 * self.loss_grad

        def after_batch(self) -> None:
            self.seen.append((self.training, self.iter))

    ends = []
    for cb, loss in (
        (Watch(), nn.MSELoss()),
        (None, lambda p, y: 2 * nn.functional.mse_loss(p, y)),
    ):
        torch.manual_seed(0)
        learn = synth_learner(n_train=3, n_valid=1, cbs=cb, loss_func=loss)
        learn.fit(2)
        ends.append([p.item() for p in learn.model.parameters()])
        if cb:
            assert learn.watch is cb
            assert cb.seen == [(True, 0), (True, 1), (True, 2), (False, 0)] * 2
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)


@pytest.mark.parametrize(
    ('event', 'cancel', 'batches'),
    [
        ('before_batch', 'CancelBatchException', 0),
        ('after_step', 'CancelTrainException', 1),
        ('after_step', 'CancelFitException', 1),
    ],
)
def test_its_cancels_are_ours(event: str, cancel: str, batches: int) -> None:
    def stop(self: object) -> None:
        raise getattr(core, cancel)()

    steps: list[int] = []
    count = Callback(before_step=lambda cb: steps.append(cb.iter))
    learn = synth_learner(n_train=3, cbs=[core.Callback(**{event: stop}), count])
    learn.fit(1)
    assert len(steps) == batches


def test_a_stray_one_is_an_error() -> None:
    def stop(self: object) -> None:
        raise core.CancelBatchException()

    with pytest.raises(CancelError, match='before_fit'):
        synth_learner(cbs=core.Callback(before_fit=stop)).fit(1)


def test_a_class_of_it_and_its_name() -> None:
    learn: Learner = synth_learner(cbs=core.GatherPredsCallback)
    assert type(learn.gather_preds) is core.GatherPredsCallback
    learn.remove_cb(core.GatherPredsCallback)
    assert not hasattr(learn, 'gather_preds')
