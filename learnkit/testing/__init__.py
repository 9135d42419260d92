"""Ready-made parts for tests: small learners, digests of states, and the harness that kills training and resumes it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from learnkit.checkpoint.digest import differences, digest, learn_digest, learn_state
from learnkit.data.dataloaders import DataLoaders
from learnkit.learner import Learner
from learnkit.optim.optimizers import SGD
from learnkit.testing.forks import Child, start
from learnkit.testing.harness import (
    HarnessError,
    KillReport,
    Lives,
    kill_and_resume,
    random_instants,
    reached,
    run_until_done,
)

__all__ = [
    'Child',
    'HarnessError',
    'Lives',
    'RegModel',
    'KillReport',
    'differences',
    'digest',
    'kill_and_resume',
    'learn_digest',
    'learn_state',
    'random_instants',
    'reached',
    'run_until_done',
    'start',
    'synth_dls',
    'synth_learner',
]


class RegModel(nn.Module):
    "A line: `a*x + b` with learned `a` and `b`."

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        "Return `a*x + b`, of the shape of `x`."
        return x * self.a + self.b


def synth_dls(
    a: float = 2,  # slope of the line
    b: float = 3,  # its value at 0
    bs: int = 16,  # samples a batch
    n_train: int = 10,  # training batches
    n_valid: int = 2,  # validation batches
) -> DataLoaders:
    "Return loaders of points `(x, y)`, each `[bs, 1]`, on a noisy line."

    def points(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(bs * n, 1)
        return x, a * x + b + 0.1 * torch.randn(bs * n, 1)

    return DataLoaders.from_tensors(points(n_train), points(n_valid), bs=bs)


def synth_learner(
    n_train: int = 10,  # training batches
    n_valid: int = 2,  # validation batches
    lr: float = 1e-3,
    dls: Any = None,  # other loaders
    model: nn.Module | None = None,  # another model
    **kwargs: Any,  # more for the Learner
) -> Learner:
    """Return a Learner that fits a line to noisy points.

    >>> learn = synth_learner(lr=0.1, default_cbs=False)
    >>> learn
    Learner(RegModel, loss_func=MSELoss, valid=['valid'], cbs=[])
    """
    options = {'loss_func': nn.MSELoss(), 'opt_func': partial(SGD, mom=0.9), **kwargs}
    # tested for None: a compiled module has no truth value
    dls = synth_dls(n_train=n_train, n_valid=n_valid) if dls is None else dls
    return Learner(dls, RegModel() if model is None else model, lr=lr, **options)
