"""Exact resume with unusual models, optimizers, loaders and Learners."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from learnkit import DataLoaders, GradientAccumulation, Learner
from tests.helpers.resuming import check_every_place

Batch = tuple[Tensor, Tensor]


def points() -> Batch:
    torch.manual_seed(1)
    return torch.randn(24, 4), torch.randint(3, (24,))


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def make(
    model: nn.Module | None = None, dls: Any = None, kind: type[Learner] = Learner, **kwargs: Any
) -> Learner:
    x, y = points()
    torch.manual_seed(0)
    dls = DataLoaders.from_tensors((x, y), (x[:8], y[:8]), bs=4) if dls is None else dls
    return kind(dls, net() if model is None else model, nn.CrossEntropyLoss(), lr=0.05, **kwargs)


def some(kept: list[Any]) -> list[Any]:
    return kept[::4]


# Models


def test_lazy_modules() -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))

    check_every_place(lambda: make(lazy()), places=some)
    accumulating = lambda: make(lazy(), cbs=GradientAccumulation(12))
    check_every_place(accumulating, places=some)
