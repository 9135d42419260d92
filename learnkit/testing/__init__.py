# SPDX-License-Identifier: Apache-2.0
"""Tools for tests: small Learners, digests of states, and a harness that kills training and resumes it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from learnkit.checkpoint.compare import learn_digest, learn_state
from learnkit.checkpoint.digest import differences, digest
from learnkit.data.dataloaders import DataLoaders
from learnkit.learner import Learner
from learnkit.optim.optimizers import SGD
from learnkit.testing.harness import HarnessError, KillReport, kill_and_resume

__all__ = [
    'HarnessError',
    'KillReport',
    'RegModel',
    'differences',
    'digest',
    'kill_and_resume',
    'learn_digest',
    'learn_state',
    'synth_dls',
    'synth_learner',
]


class RegModel(nn.Module):
    "Linear model `a*x + b` with learned scalars `a` and `b`."

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(1))
        self.b = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        "Return `a*x + b`, of the shape of `x`."
        return x * self.a + self.b


def synth_dls(
    a: float = 2,  # slope of the line
    b: float = 3,  # intercept of the line
    bs: int = 16,  # batch size
    n_train: int = 10,  # number of training batches
    n_valid: int = 2,  # number of validation batches
) -> DataLoaders:
    "Return loaders of points `(x, y)`, each `[bs, 1]`, on a noisy line."

    def make_points(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(bs * n, 1)
        return x, a * x + b + 0.1 * torch.randn(bs * n, 1)

    return DataLoaders.from_tensors(make_points(n_train), make_points(n_valid), bs=bs)


def synth_learner(
    n_train: int = 10,  # number of training batches
    n_valid: int = 2,  # number of validation batches
    lr: float = 1e-3,  # learning rate
    dls: Any = None,  # data; None: `synth_dls`
    model: nn.Module | None = None,  # model; None: `RegModel`
    **kwargs: Any,  # further arguments of `Learner`
) -> Learner:
    """Return a Learner that fits a line to noisy points.

    >>> learn = synth_learner(lr=0.1, default_cbs=False)
    >>> learn
    Learner(RegModel, loss_func=MSELoss, valid=['valid'], cbs=[])
    """
    options = {'loss_func': nn.MSELoss(), 'opt_func': partial(SGD, mom=0.9), **kwargs}
    if dls is None:
        dls = synth_dls(n_train=n_train, n_valid=n_valid)
    if model is None:  # a compiled module has no truth value
        model = RegModel()
    return Learner(dls, model, lr=lr, **options)
