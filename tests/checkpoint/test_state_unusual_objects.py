"""Exact resume with unusual models, optimizers, loaders and Learners."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, DataLoaders, Learner
from learnkit.core.errors import FitError
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


class Counting(nn.Module):
    "A model with a count missing from its state dict, and a running mean created at the first batch."

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3)
        self.register_buffer('n', torch.zeros(()), persistent=False)
        self.register_buffer('mean', None, persistent=False)
        self.n: Tensor
        self.mean: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.n += 1
            self.mean = (
                x.mean(0).detach() if self.mean is None else (self.mean + x.mean(0).detach()) / 2
            )
        return self.line(x + (0 if self.mean is None else self.mean)) * (1 + self.n / 10)


def test_buffers_that_a_state_dict_leaves_out() -> None:
    check_every_place(lambda: make(Counting()), places=some)


def test_a_constant_that_is_shared_stays_shared() -> None:
    model, constant = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), torch.ones(2).expand(3, 2)
    for layer in model:
        layer.register_buffer('mask', constant, persistent=False)
    learn = make(model)
    learn.load_checkpoint_state(learn.checkpoint_state())
    assert model[0].mask is constant and model[1].mask is constant


def test_lazy_modules() -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))

    check_every_place(lambda: make(lazy()), places=some)


# What no checkpoint holds


class InModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.calls = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.line(x) / (1 + self.calls)


class InLearner(Callback):
    def before_batch(self) -> None:
        self.learn.calls = getattr(self.learn, 'calls', 0) + 1
        self.learn.opt.set_hypers(lr=0.1 / self.learn.calls)


@pytest.mark.parametrize(
    ('options', 'owner'), [({'model': InModel}, 'InModel'), ({'cbs': InLearner}, 'Learner')]
)
def test_the_check_names_attributes_that_no_checkpoint_holds(options: Any, owner: str) -> None:
    found = make(**{name: made() for name, made in options.items()}).check_resume()
    assert not found
    assert [h for h in found.hints if h.startswith(f'`calls` of {owner} differs as well')]


def test_the_check_needs_values() -> None:
    learn = make(model=nn.Sequential(nn.LazyLinear(1)))
    with pytest.raises(FitError, match='Sequential has parameters without values'):
        learn.check_resume()
