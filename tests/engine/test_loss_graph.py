"""`loss` keeps its graph within its batch, as in fastai, and holds nothing of it afterwards."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import (
    SGD,
    Callback,
    CancelBatchException,
    GradientAccumulation,
    Learner,
)
from tests.helpers.learners import bare_learner

BATCHES = [
    (torch.randn(8, 3, generator=torch.Generator().manual_seed(i)).double(), torch.arange(8) % 4)
    for i in range(4)
]


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(3, 4).double()


def make_learner(*cbs: Any, cls: type[Learner] = Learner, **options: Any) -> Learner:
    defaults = {'opt_func': SGD, 'lr': 0.5, **options}
    dls = (BATCHES, BATCHES)
    return bare_learner(dls, make_model(), F.cross_entropy, cbs=cbs, cls=cls, **defaults)


def weights_of(learn: Learner) -> Tensor:
    return nn.utils.parameters_to_vector(learn.model.parameters()).detach()


class CustomBatch(Learner):
    def train_batch(self) -> None:
        self.optimize(self.compute_loss(self.forward(self.model, self.x)))


class KeepLoss(Callback):
    "Keep the loss as each event sees it."

    def __init__(self, cancel: bool = False) -> None:
        self.kept: dict[str, list[Tensor]] = {}
        self.graphs: dict[str, bool] = {}
        self.cancel = cancel

    def run_event(self, event: str) -> None:
        if self.training and event in EVENTS:
            self.kept.setdefault(event, []).append(self.learn.loss)
            self.graphs[event] = self.learn.loss.requires_grad
        if self.training and self.cancel and event == 'after_loss':
            raise CancelBatchException


EVENTS = (
    'after_loss',
    'before_backward',
    'after_backward',
    'after_step',
    'after_cancel_batch',
    'after_batch',
)


@pytest.mark.parametrize('options', [{}, {'microbatch': 4}, {'cls': CustomBatch}])
def test_a_kept_loss_has_no_graph_after_its_batch(options: dict[str, Any]) -> None:
    keep = KeepLoss()
    make_learner(keep, **options).fit(1)
    assert keep.graphs['after_loss'] and keep.graphs['before_backward']
    assert not keep.graphs['after_batch']
    kept = [loss for losses in keep.kept.values() for loss in losses]
    assert not any(loss.requires_grad for loss in kept)


def test_a_cancelled_batch_leaves_no_graph() -> None:
    keep = KeepLoss(cancel=True)
    learn = make_learner(keep)
    learn.fit(1)
    assert keep.graphs == {'after_loss': True, 'after_cancel_batch': False, 'after_batch': False}
    assert not any(loss.requires_grad for loss in keep.kept['after_loss'])


@pytest.mark.parametrize('cancel', [False, True])
def test_a_kept_loss_keeps_no_activation(cancel: bool) -> None:
    alive: list[weakref.ref[Tensor]] = []
    keep = KeepLoss(cancel)

    def watch(cb: Any) -> None:
        alive.append(weakref.ref(cb.pred))

    make_learner(Callback(after_pred=watch), keep).fit(1)
    gc.collect()
    assert len(keep.kept['after_batch']) == 4 and not any(ref() is not None for ref in alive)


def test_a_loss_that_is_a_view_is_detached() -> None:
    def take_view(cb: Any) -> None:
        if cb.training:
            cb.learn.loss_grad = cb.loss_grad * 1
            cb.learn.loss = torch.stack([cb.loss_grad])[0]

    learn = make_learner(Callback(after_loss=take_view))
    learn.fit(1)
    assert not learn.recorder.losses[-1].requires_grad


def test_an_evaluation_has_no_graph() -> None:
    seen = []
    learn = make_learner(Callback(after_loss=lambda cb: seen.append(cb.loss.requires_grad)))
    learn.validate()
    assert seen == [False] * 4


def test_losses_of_accumulated_batches_are_their_own() -> None:
    learn = make_learner(GradientAccumulation(16), lr=0.0)
    learn.fit(1)
    with torch.no_grad():
        expected = [F.cross_entropy(make_model()(x), y).item() for x, y in BATCHES]
    assert learn.recorder.smooth_loss.raw == pytest.approx(expected, abs=1e-15)


def test_lbfgs_trains_as_in_torch() -> None:
    def lbfgs(params: Any, lr: float = 0.5) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, lr=lr, max_iter=4)

    learn = make_learner(KeepLoss(), opt_func=lbfgs)
    learn.fit(1)
    model = make_model()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    for x, y in BATCHES:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        opt.step(closure)
    expected = nn.utils.parameters_to_vector(model.parameters()).detach()
    assert (weights_of(learn) - expected).abs().max() < 1e-10
