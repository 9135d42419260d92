"""A small Learner whose weights are saved, and a comparison of its state before and after loading."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from learnkit import DataLoaders, Learner
from tests.helpers.learners import quiet_learner


def net(hidden: int = 5) -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 1)
    )


def learner(path: Path, model: nn.Module | None = None, **kwargs: Any) -> Learner:
    x = torch.linspace(-1, 1, 96).reshape(32, 3)
    train = (x, x.sum(1, keepdim=True))
    dls = DataLoaders.from_tensors(train, (x, x.sum(1, keepdim=True)), bs=8, shuffle=False)
    loss_func = nn.MSELoss()
    return quiet_learner(
        dls, net() if model is None else model, loss_func, path=path, lr=0.01, **kwargs
    )


def digest(learn: Learner) -> list[Any]:
    "Return everything that a load may change."
    state = {} if learn.opt is None else learn.opt.state_dict()
    return pickle.loads(pickle.dumps([learn.model.state_dict(), state, learn.lr]))  # own bytes
