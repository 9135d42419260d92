"""The callbacks about training on batches and epochs."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, FitError, Learner, Recorder, SkipToEpoch, TrainEvalCallback, before_batch_cb
from learnkit.testing import RegModel, synth_dls, synth_learner


def quiet(*cbs: Any, **kwargs: Any) -> Learner:
    learn = synth_learner(cbs=[TrainEvalCallback, Recorder, *cbs], default_cbs=False, **kwargs)
    learn.logger = lambda row: None
    return learn


def test_start_epoch_trains_only_from_there_on() -> None:
    epochs: list[int] = []
    learn = quiet(Callback(before_train=lambda cb: epochs.append(cb.epoch)), n_train=3)
    learn.fit(5, start_epoch=3)
    assert epochs == [3, 4] and learn.train_iter == 6
    assert [row['epoch'] for row in learn.history] == [3, 4]
    assert learn.pct_train == pytest.approx(1) and not any(isinstance(cb, SkipToEpoch) for cb in learn.cbs)


def test_start_epoch_at_the_end_leaves_the_weights() -> None:
    learn = quiet()
    start = learn.model.a.item(), learn.model.b.item()
    learn.fit(2, start_epoch=2)
    assert (learn.model.a.item(), learn.model.b.item()) == start and learn.history == []
    with pytest.raises(FitError, match='start_epoch=3'): learn.fit(2, start_epoch=3)


def test_two_halves_with_start_epoch_are_a_whole() -> None:
    batches = list(synth_dls(n_train=4).train)
    ends = []
    for fits in ([(4, 0)], [(2, 0), (4, 2)]):
        torch.manual_seed(6)
        learn = Learner(batches, RegModel(), nn.MSELoss(), lr=0.05, cbs=TrainEvalCallback, default_cbs=False)
        for n, start in fits: learn.fit(n, start_epoch=start)
        ends.append(torch.cat([learn.model.a, learn.model.b]).detach())
    assert torch.equal(*ends)


def test_a_skipped_epoch_fires_its_cancel_and_no_batch() -> None:
    seen: list[str] = []
    events = 'before_epoch', 'after_cancel_epoch', 'after_epoch', 'before_train'
    learn = quiet(Callback(**{e: lambda cb, e=e: seen.append(e) for e in events}))
    learn.fit(2, cbs=SkipToEpoch(1))
    assert seen == ['before_epoch', 'after_cancel_epoch', 'after_epoch', 'before_epoch', 'before_train', 'after_epoch']


def test_before_batch_cb_changes_batches_in_training_and_evaluation() -> None:
    @before_batch_cb
    def shift(cb: Callback, xb: tuple[Tensor, ...], yb: tuple[Tensor, ...]) -> Any:
        assert isinstance(cb.learn, Learner)
        return tuple(x + 100 for x in xb), tuple(y - 100 for y in yb)
    seen: list[tuple[bool, float, float]] = []
    look = Callback(before_pred=lambda cb: seen.append((cb.training, cb.x.mean().item(), cb.y.mean().item())))
    learn = quiet(shift, look, n_train=1, n_valid=1, lr=0.)
    (x, y), (xv, yv) = learn.dls.train.tensors, learn.dls.valid.tensors
    learn.fit(1)
    near = lambda mean, by: pytest.approx(mean.mean().item() + by, abs=1e-3)
    assert seen == [(True, near(x, 100), near(y, -100)), (False, near(xv, 100), near(yv, -100))]
    assert repr(shift) == 'Callback(before_batch=shift)'


def test_a_two_way_callback_mixes_inputs_and_targets() -> None:
    "What the readme's example does: read the batch, write another, and change the loss."
    class MixUp(Callback):
        run_valid = False
        def before_batch(self) -> None:
            self.order_of_batch = torch.arange(len(self.x)).flip(0)
            self.learn.xb = (0.7 * self.x + 0.3 * self.x[self.order_of_batch],)
            self.learn.yb = (self.y, self.y[self.order_of_batch])
        def after_pred(self) -> None: self.learn.loss_func = lambda pred, a, b: 0.7 * mse(pred, a) + 0.3 * mse(pred, b)
        def after_loss(self) -> None: self.learn.loss_func = mse
    mse = nn.MSELoss()
    batches = [(torch.randn(4, 1), torch.randn(4, 1)) for _ in range(3)]
    torch.manual_seed(1)
    learn = Learner((batches, batches), model := RegModel(), mse, opt_func=torch.optim.SGD, lr=0.1,
                    cbs=[TrainEvalCallback, MixUp], default_cbs=False)
    learn.fit(2)
    torch.manual_seed(1)
    other = RegModel()
    opt = torch.optim.SGD(other.parameters(), lr=0.1)
    for x, y in batches * 2:
        out = other(0.7 * x + 0.3 * x.flip(0))
        (0.7 * mse(out, y) + 0.3 * mse(out, y.flip(0))).backward()
        opt.step()
        opt.zero_grad()
    assert torch.equal(model.a, other.a) and torch.equal(model.b, other.b)
