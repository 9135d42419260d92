"""What the error for a NaN names: the batch, its samples, and the parameters that are not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fastcore.basics import noop
from torch import nn

from learnkit import Callback, DataLoaders, Learner
from learnkit.callbacks.nan_guard import GuardNonFinite
from learnkit.core.errors import LossError
from learnkit.testing import synth_learner


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
    learn = Learner(dls, model, nn.MSELoss(), opt_func=torch.optim.Adam, lr=0.1, cbs=cbs, **kwargs)
    learn.logger = noop
    return learn


def test_raise_names_the_batch_and_what_is_not_finite() -> None:
    learn = learner(2, math.inf, GuardNonFinite('raise'))
    with pytest.raises(LossError, match=r'batch 2 of epoch 0.* input 0 in sample 10 of'):
        learn.fit(1)
    assert learn.opt.n_steps == 2
    learn = learner(None, cbs=GuardNonFinite('raise'))
    learn.model.bias.data.fill_(math.nan)
    with pytest.raises(LossError, match=r'Not finite: parameter bias\.'):
        learn.fit(1)


def test_large_gradients_are_finite() -> None:
    learn = synth_learner(lr=0.0, cbs=GuardNonFinite('raise', grads=True))
    learn.logger = noop
    learn.add_cb(
        Callback(
            before_backward=lambda cb: setattr(cb.learn, 'loss_grad', cb.learn.loss_grad * 1e36)
        )
    )
    learn.fit(1)
