"""Learners whose whole step is compiled, with a backend that counts its compilations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from learnkit import DataLoaders, Learner

needs_whole_step = pytest.mark.skipif(
    not hasattr(torch._dynamo.config, 'trace_autograd_ops'),
    reason='this torch cannot compile a whole step',
)


class Backend:
    "A backend that runs traced graphs uncompiled, and counts graphs and calls."

    def __init__(self) -> None:
        self.graphs, self.calls = 0, 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph(*args)

        return run


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)
    )


momentum = partial(torch.optim.SGD, momentum=0.9)


def learner(
    make_model: Callable[[], nn.Module] = mlp,
    loss_func: Any = F.mse_loss,
    opt_func: Any = momentum,
    n: int = 80,
    batches: Any = None,
    cls: type[Learner] = Learner,
    **kwargs: Any,
) -> Any:
    "Return a Learner on 10 batches of 8 or the given batches, always with the same model and data."
    torch.manual_seed(0)
    x = torch.randn(n, 8)
    dls = (
        DataLoaders(batches)
        if batches
        else DataLoaders.from_tensors((x, x.sum(1, keepdim=True)), bs=8)
    )
    learn = cls(dls, make_model(), loss_func, opt_func=opt_func, lr=0.01, **kwargs)
    learn.logger = lambda row: None
    learn.create_mbar = False
    return learn


def compiled(learn: Any, **options: Any) -> tuple[Any, Backend]:
    "Compile a Learner's step with a counting backend."
    backend = Backend()
    return learn.compile(step=True, backend=backend, **options), backend


def distance(a: Any, b: Any) -> float:
    "Return the distance of the models' parameters and buffers, relative to their norm."
    ours, theirs = (
        [t.detach().double().flatten() for t in learn.model.state_dict().values()]
        for learn in (a, b)
    )
    return float((torch.cat(ours) - torch.cat(theirs)).norm() / torch.cat(ours).norm())


def fit_both(make: Callable[[], Any], n_epoch: int = 2, **kwargs: Any) -> tuple[Any, Any, Backend]:
    "Train two Learners, one with a compiled step; return both and the executed step."
    plain = make()
    torch.manual_seed(1)
    plain.fit(n_epoch, **kwargs)
    learn, backend = compiled(make())
    torch.manual_seed(1)
    learn.fit(n_epoch, **kwargs)
    return plain, learn, backend
