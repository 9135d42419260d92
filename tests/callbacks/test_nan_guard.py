"""The guard against NaN and infinity keeps both out of the weights and the recorded losses."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, DataLoaders, Learner
from learnkit.callbacks.nan_guard import GuardNonFinite, TerminateOnNaNCallback
from learnkit.core.errors import LossError, OptionError
from tests.helpers.learners import quiet_learner

BAD = [math.nan, -math.inf]


def learner(
    bad_at: int | None, value: float = math.nan, cbs: Any = (), norm: bool = False, **kwargs: Any
) -> Learner:
    "Return a Learner on eight batches of four samples, one with a bad input."
    torch.manual_seed(0)
    x = torch.randn(32, 2)
    y = x.sum(1, keepdim=True)
    if bad_at is not None:
        x[4 * bad_at + 2, 1] = value
    dls = DataLoaders.from_tensors((x, y), (x[:4], y[:4]), bs=4, shuffle=False)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)) if norm else nn.Linear(2, 1)
    return quiet_learner(
        dls, model, nn.MSELoss(), opt_func=torch.optim.Adam, lr=0.1, cbs=cbs, **kwargs
    )


def weights(learn: Learner) -> list[Tensor]:
    return [t.detach().clone() for t in learn.model.state_dict().values()]


class Snapshots(Callback):
    "Record the weights after each batch."

    order = 80

    def __init__(self) -> None:
        self.kept: list[list[Tensor]] = []

    def after_step(self) -> None:
        self.kept.append(weights(self.learn))


@pytest.mark.parametrize('value', BAD)
@pytest.mark.parametrize('make', [TerminateOnNaNCallback, partial(GuardNonFinite, 'stop')])
def test_stop_ends_the_fit_before_the_step(make: Any, value: float) -> None:
    learn = learner(3, value, [make(), Snapshots()])
    learn.fit(2)
    assert learn.opt.n_steps == 3 == len(learn.recorder.losses) and not learn.history
    assert all(map(torch.equal, weights(learn), learn.snapshots.kept[-1]))
    assert all(loss.isfinite() for loss in learn.recorder.losses)


def test_skip_is_training_without_that_batch() -> None:
    learn = learner(3, cbs=GuardNonFinite('skip'), norm=True)
    match = r'loss is nan at batch 3 of epoch 0. Not finite: input 0 in sample 14 of the data'
    with pytest.warns(UserWarning, match=match):
        learn.fit(2)
    assert learn.guard_non_finite.n_skipped == 2
    assert learn.opt.n_steps == 14 == len(learn.recorder.losses)

    clean = learner(None, norm=True)
    batches = [b for i, b in enumerate(clean.dls.train) if i != 3]
    dls = DataLoaders(batches)
    other = quiet_learner(dls, clean.model, nn.MSELoss(), opt_func=torch.optim.Adam, lr=0.1)
    other.fit(2)
    assert all(map(torch.equal, weights(learn), weights(other)))


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * math.nan  # type: ignore[override]


def spoil(cb: Any) -> None:
    if cb.training and cb.iter == 4:
        cb.learn.loss_grad = BadGradient.apply(cb.learn.loss_grad)


@pytest.mark.parametrize('policy', ['stop', 'skip', 'raise'])
def test_gradients_are_looked_at_when_asked(policy: str) -> None:
    cbs = [GuardNonFinite(policy, grads=True), Callback(after_loss=spoil), Snapshots()]
    learn = learner(None, cbs=cbs)
    match = 'gradient of weight, bias is not finite at batch 4 of epoch 0'
    if policy == 'stop':
        learn.fit(1)
    elif policy == 'raise':
        with pytest.raises(LossError, match=match):
            learn.fit(1)
    else:
        with pytest.warns(UserWarning, match=match):
            learn.fit(1)
        assert len(learn.recorder.losses) == 8  # the loss itself was fine
    assert learn.opt.n_steps == (7 if policy == 'skip' else 4)
    assert all(p.isfinite().all() for p in learn.model.parameters())


def test_finite_training_is_not_changed_and_evaluation_not_looked_at() -> None:
    learn, plain = learner(None, cbs=GuardNonFinite('raise', grads=True)), learner(None)
    for it in (learn, plain):
        it.fit(2)
    assert all(map(torch.equal, weights(learn), weights(plain)))
    learn.validate(dl=[(torch.full((1, 2), math.nan), torch.zeros(1, 1))])


def test_an_unknown_policy() -> None:
    with pytest.raises(OptionError, match='Did you mean `stop`'):
        GuardNonFinite('stopp')
