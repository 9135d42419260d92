"""Weights on a noisy bowl, and a small training, for tests of optimizers."""

from typing import Any

import torch
from torch import Tensor, nn

from learnkit import Learner
from tests.helpers.learners import bare_learner


def weights(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    gen = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=gen, dtype=dtype))
        for shape in ((5, 3), (5,), (2, 5))
    ]


def weights_after(make: Any, n: int = 20, ps: list[nn.Parameter] | None = None) -> Tensor:
    "Return the weights after `n` steps on a noisy bowl."
    ps = weights() if ps is None else ps
    opt, gen = make(ps), torch.Generator().manual_seed(1)
    for _ in range(n):
        for p in ps:
            p.grad = torch.randn(p.shape, generator=gen, dtype=p.dtype) * 3 + p.detach()
        opt.step()
    return torch.cat([p.detach().flatten() for p in ps])


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 1)).double()


def data(n: int = 5, bs: int = 4) -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(bs, 3, generator=gen, dtype=torch.float64),
            torch.randn(bs, 1, generator=gen, dtype=torch.float64),
        )
        for _ in range(n)
    ]


def learner(model: nn.Module, *cbs: Any, **kwargs: Any) -> Learner:
    return bare_learner(
        data(), model, nn.MSELoss(), cbs=cbs, recorder=None, **{'lr': 0.05, **kwargs}
    )
