"""Several optimizers in one Learner, two networks trained against each other, and shared parts."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import EMA, Learner, OptimWrapper, TrainEvalCallback
from learnkit.core.errors import OptimizerError
from tests.helpers.comparing import same
from tests.helpers.learners import bare_learner
from tests.helpers.optimizing import data


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def learner(model: nn.Module, opt_func: Any, *cbs: Any, **kwargs: Any) -> Learner:
    options = {'lr': 0.1, 'wd_bn_bias': True, **kwargs}
    return bare_learner(
        data(), model, nn.MSELoss(), opt_func=opt_func, cbs=cbs, recorder=None, **options
    )


def pair(
    model: nn.Sequential, lr: float = 0.1, head_lr: float | None = None
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return (
        torch.optim.SGD(model[0].parameters(), lr=lr, momentum=0.9),
        torch.optim.Adam(model[2].parameters(), lr=lr if head_lr is None else head_lr),
    )


def pair_by_hand(n_epoch: int = 2, **rates: float) -> list[Tensor]:
    model = net()
    opts = pair(model, **rates)
    for x, y in data() * n_epoch:
        F.mse_loss(model(x), y).backward()
        for o in opts:
            o.step()
            o.zero_grad()
    return weights(model)


@pytest.mark.parametrize(
    'form',
    [list, tuple, lambda two: dict(zip(('body', 'head'), two, strict=True))],
    ids=['list', 'tuple', 'dict'],
)
def test_a_list_or_dict_of_optimizers_steps_them_all(form: Any) -> None:
    model = net()
    learn = learner(model, lambda params, lr: form(pair(model, lr)))
    learn.fit(2)
    assert same(weights(model), pair_by_hand()) and learn.time.st == 10
    assert isinstance(learn.opt[0], torch.optim.SGD) and isinstance(learn.opt[1], torch.optim.Adam)
    if isinstance(learn.opt.opt, dict):
        assert isinstance(learn.opt['head'], torch.optim.Adam)


def test_hypers_reach_every_optimizer_by_fastais_names() -> None:
    model = net()
    learn = learner(model, lambda params, lr: pair(model, lr))
    learn.fit(2, lr=[0.05, 0.002], wd=0.0)
    assert same(weights(model), pair_by_hand(lr=0.05, head_lr=0.002))
    learn.opt.set_hyper('mom', 0.5)
    assert learn.opt[0].param_groups[0]['momentum'] == 0.5
    assert learn.opt[1].param_groups[0]['betas'] == (0.5, 0.999)


def test_decay_spares_biases_in_each() -> None:
    model = net()
    learn = learner(model, lambda params, lr: pair(model, lr), wd_bn_bias=False)
    learn.fit(1, wd=0.2)
    for o, layer in ((learn.opt[0], model[0]), (learn.opt[1], model[2])):
        decay = {id(p): g['weight_decay'] for g in o.param_groups for p in g['params']}
        assert decay == {id(layer.weight): 0.2, id(layer.bias): 0.0}
    assert len(learn.opt.hypers) == 2


def test_zero_grad_clears_all_and_state_goes_over() -> None:
    model = net()
    learn = learner(model, lambda params, lr: dict(zip('ab', pair(model, lr), strict=True)))
    learn.fit(1)
    assert all(p.grad is None for p in model.parameters())
    state = learn.opt.state_dict()
    assert list(state) == ['a', 'b'] and len(learn.opt.state) == 4
    learn.create_opt()
    learn.opt.load_state_dict(state)
    learn.fit(1)
    assert same(weights(model), pair_by_hand())


def test_a_closure_goes_to_the_one_that_needs_it() -> None:
    def two(model: nn.Sequential) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        body = torch.optim.LBFGS(model[0].parameters(), lr=0.5, max_iter=3)
        return body, torch.optim.SGD(model[2].parameters(), lr=0.1)

    model = net()
    learn = learner(model, lambda params, lr: two(model), lr=None)
    learn.create_opt()
    learn.fit(2)

    other = net()
    lbfgs, sgd = two(other)
    for x, y in data() * 2:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            lbfgs.zero_grad()
            sgd.zero_grad()
            loss = F.mse_loss(other(x), y)
            loss.backward()
            return loss

        lbfgs.step(closure)
        sgd.step()
    assert same(weights(model), weights(other))


# Two networks against each other


class Duel(nn.Module):
    "A generator, a critic, and an embedding that both use."

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Linear(3, 4)
        self.generator = nn.Linear(4, 3)
        self.critic = nn.Sequential(self.embed, nn.ReLU(), nn.Linear(4, 1))

    def fake(self, z: Tensor) -> Tensor:
        return self.generator(torch.tanh(self.embed(z)))


def duel_opts(model: Duel) -> dict[str, torch.optim.Optimizer]:
    critic = list(model.critic.parameters())
    return {
        'critic': torch.optim.Adam(critic, lr=0.01),
        'generator': torch.optim.SGD(model.generator.parameters(), lr=0.02, momentum=0.5),
    }


def test_an_alternating_gan_by_step() -> None:
    "The critic learns in even batches, the generator in odd ones."

    class Alternating(Learner):
        def _step(self) -> None:
            self.opt.step(only='critic' if self.iter % 2 == 0 else 'generator')

    def loss(pred: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(pred, y)

    class Chain(Duel):
        def forward(self, x: Tensor) -> Tensor:
            return self.critic(self.fake(x))

    real = [(torch.randn(6, 3), torch.randn(6, 1)) for _ in range(4)]
    model = Chain()
    opt_func = lambda params, lr: duel_opts(model)
    cbs = [TrainEvalCallback, EMA(0.5)]
    learn = Alternating(
        real, model, loss, opt_func=opt_func, wd_bn_bias=True, cbs=cbs, default_cbs=False
    )
    learn.fit(2)
    assert learn.time.st == learn.opt.n_steps == learn.ema.state_dict()['n_steps'] == 8

    other = Chain()
    opts = duel_opts(other)
    for _ in range(2):
        for i, (x, y) in enumerate(real):
            loss(other(x), y).backward()
            opts[('critic', 'generator')[i % 2]].step()
            for o in opts.values():
                o.zero_grad()
    assert same(weights(model), weights(other))


@pytest.mark.parametrize('only', ['critik', 2])
def test_one_that_is_not_there_cannot_step(only: Any) -> None:
    model = Duel()
    opt = OptimWrapper(opt=duel_opts(model))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = weights(model)
    with pytest.raises(OptimizerError, match="the optimizers are 'critic', 'generator'"):
        opt.step(only=only)
    assert same(weights(model), before) and opt.n_steps == 0
