"""What the error for a NaN names: the batch, its samples, and the parameters that are not finite."""

import math

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, DataLoaders, Learner
from learnkit.callbacks.nan_guard import GuardNonFinite
from learnkit.core.errors import LossError
from tests.helpers.learners import quiet_learner, quiet_synth_learner


def learner(x: Tensor) -> Learner:
    dls = DataLoaders.from_tensors((x, x.sum(1, keepdim=True)), bs=4, shuffle=False)
    return quiet_learner(dls, nn.Linear(2, 1), nn.MSELoss(), lr=0.1, cbs=GuardNonFinite('raise'))


def test_raise_names_the_batch_and_what_is_not_finite() -> None:
    x = torch.randn(32, 2)
    x[10, 1] = math.inf
    learn = learner(x)
    with pytest.raises(LossError, match=r'batch 2 of epoch 0.* input 0 in sample 10 of'):
        learn.fit(1)
    assert learn.opt.n_steps == 2
    learn = learner(torch.randn(32, 2))
    learn.model.bias.data.fill_(math.nan)
    with pytest.raises(LossError, match=r'Not finite: parameter bias\.'):
        learn.fit(1)


def test_large_gradients_are_finite() -> None:
    learn = quiet_synth_learner(lr=0.0, cbs=GuardNonFinite('raise', grads=True))
    scale = lambda cb: setattr(cb.learn, 'loss_grad', cb.learn.loss_grad * 1e36)
    learn.fit(1, cbs=Callback(before_backward=scale))
