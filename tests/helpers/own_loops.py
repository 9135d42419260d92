"""Learners with user-written training loops, and the same training in plain torch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import Learner
from tests.helpers.learners import bare_learner


class Pair(nn.Module):
    "A generator of points, and a critic of points."

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5)).to(dtype)
        self.critic = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)


class Duel(Learner):
    "Train the critic, then the generator, with each batch of real points."

    def train_batch(self) -> None:
        critic = self.model.critic
        fake = self.forward(self.model.generator, self.x.flip(1))
        real_score = self.forward(critic, self.x)
        fake_score = self.forward(critic, fake.detach())
        self.optimize(F.softplus(-real_score).mean() + F.softplus(fake_score).mean(), only='critic')
        self.optimize(F.softplus(-self.forward(critic, fake)).mean(), only='generator')

    def evaluate_batch(self) -> None:
        self.report_loss(F.softplus(-self.forward(self.model.critic, self.x)).mean())


def two_opts(params: Any, lr: float, model: Pair) -> dict[str, torch.optim.Optimizer]:
    return {
        'critic': torch.optim.Adam(model.critic.parameters(), lr=lr),
        'generator': torch.optim.SGD(model.generator.parameters(), lr=10 * lr, momentum=0.5),
    }


def points(n: int = 6, bs: int = 4, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor]]:
    gen = torch.Generator().manual_seed(1)
    return [(torch.randn(bs, 5, generator=gen, dtype=torch.float64).to(dtype),) for _ in range(n)]


def make_duel(
    *cbs: Any,
    cls: type[Learner] = Duel,
    dtype: torch.dtype = torch.float64,
    n: int = 6,
    **options: Any,
) -> Any:
    options = {'opt_func': two_opts, 'lr': 1e-2, 'wd_bn_bias': True, **options}
    return bare_learner(points(n, dtype=dtype), Pair(dtype), None, cbs=cbs, cls=cls, **options)


def fit(learn: Learner, n: int = 1, **options: Any) -> Learner:
    with learn.no_logging():
        learn.fit(n, **options)
    return learn


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_by_hand(
    lrs: tuple[float, float] = (1e-2, 1e-1),
) -> Pair:
    "Train as `Duel` does, in plain torch."
    model = Pair()
    opts = two_opts(None, 1e-2, model)
    for opt, lr in zip(opts.values(), lrs, strict=True):
        opt.param_groups[0]['lr'] = lr

    def step(name: str, loss: Tensor) -> None:
        model.zero_grad()
        loss.backward()
        opts[name].step()

    for (real,) in points():
        fake = model.generator(real.flip(1))
        critic_loss = F.softplus(-model.critic(real)).mean()
        step('critic', critic_loss + F.softplus(model.critic(fake.detach())).mean())
        step('generator', F.softplus(-model.critic(fake)).mean())
    return model


def make_labeled_batches(n: int = 4) -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(6, 5, generator=gen, dtype=torch.float64),
            torch.randint(3, (6,), generator=gen),
        )
        for _ in range(n)
    ]


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def make_classifier_learner(cls: type[Learner], *cbs: Any, **options: Any) -> Any:
    return bare_learner(
        make_labeled_batches(),
        classifier(),
        nn.CrossEntropyLoss(),
        cbs=cbs,
        cls=cls,
        **{'opt_func': torch.optim.SGD, 'lr': 0.1, **options},
    )


class Bare(Learner):
    "A loop that calls model, backward and step directly."

    def _do_one_batch(self) -> None:
        self.pred = self.model(self.x)
        self.loss_grad = self.loss_func(self.pred, *self.yb)
        self.loss = self.loss_grad.detach()
        if not self.training:
            return
        self.loss_grad.backward()
        self.opt.step()
        self.opt.zero_grad()
