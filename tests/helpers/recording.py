"""Learners whose rows and losses are recorded."""

from typing import Any

import torch
from torch import Tensor, nn

from learnkit import SGD, Learner, Recorder
from tests.helpers.learners import bare_learner

GEN = torch.Generator().manual_seed(2)


def points(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, generator=GEN), torch.randn(n, 1, generator=GEN)


def linear() -> nn.Linear:
    torch.manual_seed(4)
    return nn.Linear(3, 1)


def learner(
    dls: Any,
    *cbs: Any,
    model: Any = None,
    recorder: Recorder | None = None,
    lr: float = 0.1,
    **kwargs: Any,
) -> Learner:
    options = {'loss_func': nn.MSELoss(), 'opt_func': SGD, **kwargs}
    learn = bare_learner(
        dls, model or linear(), lr=lr, cbs=cbs, recorder=recorder or Recorder, **options
    )
    learn.rows = []
    learn.logger = learn.rows.append
    return learn


# an uneven last batch
TRAIN, VALID = [points(4) for _ in range(5)], [points(4), points(4), points(1)]
