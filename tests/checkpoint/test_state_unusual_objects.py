"""Exact resume with unusual models, optimizers, loaders and Learners."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from learnkit import Callback, DataLoaders, GradientAccumulation, Learner
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


# Random generators


class Langevin(torch.optim.SGD):
    "Adds noise from a generator of its own to each weight."

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.rngs = [torch.Generator().manual_seed(3), random.Random(4)]
        # replaces `step` by a method of the optimizer, whose state is not searched
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self, 1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group['params']:
                noise = torch.randn(p.shape, generator=self.rngs[0])
                p.add_(noise, alpha=0.01 * self.rngs[1].random())


class RandomLoss:
    "Weighs the loss by a random number of its own; it is no module."

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __call__(self, pred: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(pred, y) * float(self.rng.random())


def test_generators_of_optimizers_and_of_any_loss() -> None:
    def two() -> Learner:
        model = net()
        opts = {
            'a': Langevin(model[:2].parameters(), 0.05),
            'b': Langevin(model[4:].parameters(), 1),
        }
        learn = make(model, opt_func=opts)
        learn.loss_func = RandomLoss()
        return learn

    check_every_place(lambda: make(opt_func=Langevin), places=some)
    kept = check_every_place(two, places=some)
    names = ['model', 'loss_func', 'optimizer a', 'optimizer b']
    assert [*kept[0]['generators']] == names


# Frozen parameters


class UnfreezeNext(Callback):
    "Unfreezes one more layer after each epoch; it is trained from the next epoch on."

    def after_epoch(self) -> None:
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        for p in frozen[-2:]:
            p.requires_grad_(True)


def test_layers_that_are_unfrozen_after_an_epoch() -> None:
    def frozen_net() -> nn.Module:
        model = net()
        model[:2].requires_grad_(False)
        return model

    fit = lambda learn, resume: learn.fit(3, resume=resume)
    check_every_place(lambda: make(frozen_net(), cbs=UnfreezeNext()), fit)


# Rates


def test_the_next_fit_of_a_loaded_optimizer_has_its_own_rate() -> None:
    def make_adam() -> Learner:
        model = net()
        return make(model, opt_func=torch.optim.Adam(model.parameters(), lr=0.01))

    learn, loaded = make_adam(), make_adam()
    with learn.no_logging():
        learn.fit_one_cycle(1)
    loaded.load_checkpoint_state(learn.checkpoint_state())
    assert loaded.opt.lrs == learn.opt.lrs != [0.01]
    for each in (learn, loaded):
        with each.no_logging():
            each.fit(1)
        assert each.opt.lrs == [0.01]
