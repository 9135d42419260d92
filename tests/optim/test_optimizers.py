"""Compare optimizers with fastai's names with fastai, torch and closed forms, and check refusals."""

import sys
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import OptimizerError, OptimWrapper
from learnkit.core.errors import MissingExtraError
from learnkit.optim.hyperparams import params
from learnkit.optim.optimizers import (
    SGD,
    Adam,
    Lamb,
    Lookahead,
    QHAdam,
    RAdam,
    RMSProp,
    ranger,
)
from tests.helpers.optimizing import learner, net, weights, weights_after

# Against fastai 2.8, where it is installed


@pytest.mark.parametrize(
    ('make', 'options', 'tol'),
    [
        (SGD, {'mom': 0.9, 'wd': 0.1}, 1e-14),
        (SGD, {'mom': 0.9, 'wd': 0.1, 'decouple_wd': False}, 1e-14),
        (RMSProp, {'wd': 0.1}, 1e-14),
        (RMSProp, {'sqr_mom': 0.9, 'wd': 0.1, 'decouple_wd': False}, 1e-14),
        (Adam, {}, 1e-14),
        (Adam, {'mom': 0.8, 'sqr_mom': 0.95, 'eps': 1e-3, 'wd': 0.1, 'decouple_wd': False}, 1e-14),
        (RAdam, {}, 1e-6),
        (RAdam, {'sqr_mom': 0.9, 'eps': 0.0, 'wd': 0.1}, 1e-14),
        (RAdam, {'eps': 0.0, 'wd': 0.1, 'decouple_wd': False}, 1e-14),
        (ranger, {}, 1e-6),
        (ranger, {'eps': 0.0, 'k': 4, 'alpha': 0.3}, 1e-14),
        (QHAdam, {}, 1e-7),
        (QHAdam, {'wd': 0.1, 'nu_2': 0.8}, 1e-7),
        (Lamb, {'eps': 1e-12, 'wd': 0.1}, 1e-9),
    ],
)
def test_twenty_steps_are_fastais(make: Any, options: dict[str, Any], tol: float) -> None:
    theirs = getattr(pytest.importorskip('fastai.optimizer'), make.__name__)
    if make in (QHAdam, Lamb):
        pytest.importorskip('pytorch_optimizer')
    assert (
        weights_after(partial(make, lr=0.05, **options))
        - weights_after(partial(theirs, lr=0.05, **options))
    ).abs().max() < tol


# Against torch and closed forms


@pytest.mark.parametrize(
    ('ours', 'torchs'),
    [
        (
            partial(RMSProp, mom=0.9, wd=0.1, decouple_wd=False),
            partial(torch.optim.RMSprop, momentum=0.9, weight_decay=0.1),
        ),
        (
            partial(RAdam, wd=0.1, decouple_wd=False),
            partial(torch.optim.RAdam, betas=(0.9, 0.99), eps=1e-5, weight_decay=0.1),
        ),
        (
            partial(SGD, mom=0.9, wd=0.1, decouple_wd=False),
            partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
        ),
        (
            partial(Adam, mom=0.8, sqr_mom=0.95, eps=1e-3, wd=0.2, decouple_wd=False, fused=False),
            partial(torch.optim.Adam, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.2),
        ),
        (
            partial(OptimWrapper, opt=torch.optim.SGD, mom=0.9, wd=0.1),
            partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
        ),
    ],
)
def test_they_are_torchs_with_other_names(ours: Any, torchs: Any) -> None:
    expected = weights_after(partial(torchs, lr=0.05))
    assert torch.equal(weights_after(partial(ours, lr=0.05)), expected)


def test_rmsprop_with_decoupled_decay_and_momentum_is_its_formula() -> None:
    w = nn.Parameter(torch.tensor([3.0], dtype=torch.float64))
    opt = RMSProp([w], lr=0.1, mom=0.5, sqr_mom=0.9, eps=1e-3, wd=0.2)
    x, v, b = 3.0, 0.0, 0.0
    for g in (1.0, -2.0, 0.5):
        w.grad = torch.tensor([g], dtype=torch.float64)
        opt.step()
        v = 0.9 * v + 0.1 * g * g
        b = 0.5 * b + g / (v**0.5 + 1e-3)
        x = x * (1 - 0.1 * 0.2) - 0.1 * b
        assert w.item() == pytest.approx(x, abs=1e-12)
    assert dict(opt.hypers[0]) == {'lr': 0.1, 'mom': 0.5, 'sqr_mom': 0.9, 'wd': 0.2, 'eps': 1e-3}


def test_lookahead_is_its_formula() -> None:
    w = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    opt = Lookahead(SGD([w], lr=0.1), k=3, alpha=0.25)
    fast = slow = 1.0
    for t in range(1, 8):
        w.grad = torch.tensor([float(t)], dtype=torch.float64)
        opt.step()
        fast -= 0.1 * t
        if t % 3 == 0:
            fast = slow = slow + 0.25 * (fast - slow)
        assert w.item() == pytest.approx(fast, abs=1e-12)


def test_qhadam_is_its_formula() -> None:
    pytest.importorskip('pytorch_optimizer')
    w = nn.Parameter(torch.tensor([3.0], dtype=torch.float64))
    opt = QHAdam([w], lr=0.1, mom=0.9, sqr_mom=0.8, nu_1=0.7, nu_2=0.6, wd=0.2)
    x, m, v = 3.0, 0.0, 0.0
    for t, g in enumerate([1.0, -2.0, 0.5, 3.0], 1):
        w.grad = torch.tensor([g], dtype=torch.float64)
        opt.step()
        m, v = 0.9 * m + 0.1 * g, 0.8 * v + 0.2 * g * g
        top = 0.3 * g + 0.7 * m / (1 - 0.9**t)
        x = x * (1 - 0.1 * 0.2) - 0.1 * top / ((0.4 * g * g + 0.6 * v / (1 - 0.8**t)) ** 0.5 + 1e-8)
        # the library keeps the weights of its averages in fp32
        assert w.item() == pytest.approx(x, abs=1e-6)


def test_lamb_makes_steps_as_long_as_the_weights_are() -> None:
    pytest.importorskip('pytorch_optimizer')
    # a norm of 200, for which the library takes 10
    w = nn.Parameter(torch.full((100, 100), 2.0, dtype=torch.float64))
    opt = Lamb([w], lr=0.1, eps=0.0)
    w.grad = torch.randn(100, 100, dtype=torch.float64)
    before = w.detach().clone()
    opt.step()
    assert (w - before).norm().item() == pytest.approx(0.1 * 200)


# States


@pytest.mark.parametrize(
    'opt_func',
    [
        ranger,
        lambda p, lr: Lookahead(Adam(p, lr=lr), k=2),
        QHAdam,
        Lamb,
        RAdam,
        partial(RMSProp, mom=0.5),
        Adam,
        partial(SGD, mom=0.9),
    ],
)
def test_training_resumes_from_a_state_as_if_it_had_not_stopped(opt_func: Any) -> None:
    if opt_func in (QHAdam, Lamb):
        pytest.importorskip('pytorch_optimizer')
    learn = learner(model := net(), opt_func=opt_func, wd=0.1)
    learn.fit(1)
    saved, there = deepcopy((learn.opt.state_dict(), model.state_dict()))
    learn.fit(2)

    other = learner(second := net(), opt_func=opt_func, wd=0.1)
    second.load_state_dict(there)
    other.create_opt()
    other.opt.load_state_dict(saved)
    other.fit(2)
    # the library keeps numbers in fp32, torch loads them as the weights' fp64
    tol = 1e-7 if opt_func is QHAdam else 0.0
    for a, b in zip(model.parameters(), second.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=tol)


def test_a_loaded_state_is_a_copy() -> None:
    first, second = (learner(net(), opt_func=Adam) for _ in 'ab')
    first.fit(1)
    second.create_opt()
    second.opt.load_state_dict(first.opt.state_dict())
    before = deepcopy(first.opt.state_dict()['state'])
    second.fit(1)
    for i, state in first.opt.state_dict()['state'].items():
        assert all(torch.equal(value, before[i][key]) for key, value in state.items())


def test_a_state_with_decay_fits_an_optimizer_without() -> None:
    "SGD has no decay by default; with decay, norms and biases get a separate param group."
    learn = learner(model := net(), opt_func=partial(SGD, mom=0.9), wd=0.1)
    learn.fit(1)
    saved = deepcopy(learn.opt.state_dict())
    other = learner(second := net(), opt_func=partial(SGD, mom=0.9))
    other.create_opt()
    assert (len(other.opt.param_groups), len(saved['param_groups'])) == (1, 2)
    other.opt.load_state_dict(saved)
    for p, q in zip(model.parameters(), second.parameters(), strict=True):
        there, here = (it.opt.state[r]['momentum_buffer'] for it, r in ((learn, p), (other, q)))
        assert torch.equal(there, here)
    other.fit(1, wd=0.2)
    decay = {p: g['weight_decay'] for g in other.opt.param_groups for p in g['params']}
    expected = {'0.weight': 0.2, '3.weight': 0.2}
    assert {n: decay[p] for n, p in second.named_parameters() if decay[p]} == expected


def test_a_state_without_decay_is_refused_by_an_optimizer_with_decay() -> None:
    learn = learner(net(), opt_func=partial(SGD, mom=0.9))
    learn.fit(1)
    other = learner(net(), opt_func=partial(SGD, mom=0.9), wd=0.1)
    other.fit(1)
    with pytest.raises(
        OptimizerError, match=r'\[2, 4\] parameters, in the file \[6\].*weight decay'
    ):
        other.opt.load_state_dict(learn.opt.state_dict())


def halves(m: nn.Sequential) -> list[list[nn.Parameter]]:
    return [params(m[:2]), params(m[2:])]


@pytest.mark.parametrize(
    ('other', 'text'),
    [
        (
            lambda: learner(net(), opt_func=partial(SGD, mom=0.9, wd=0.1)),
            'Adam: group 0 has betas, eps, momentum only here',
        ),
        (
            lambda: learner(net()[:1], opt_func=Adam),
            r'Adam: param groups of .* parameters, in the file \[1, 1\]',
        ),
        (
            lambda: learner(net(), opt_func=Adam, splitter=halves, wd_bn_bias=True),
            'another.*model, splitter',
        ),
        (
            lambda: learner(
                nn.Sequential(nn.Linear(3, 7), nn.LayerNorm(7), nn.Linear(7, 1)).double(),
                opt_func=Adam,
            ),
            r'exp_avg of parameter 0 is \[6, 3\], in the file \[7, 3\]',
        ),
    ],
)
def test_the_state_of_another_optimizer_is_refused_and_nothing_changes(
    other: Any, text: str
) -> None:
    learn = learner(net(), opt_func=Adam)
    learn.fit(1)
    before = deepcopy(learn.opt.state_dict())
    other = other()
    other.model.forward = lambda x: sum(p.sum() for p in other.model.parameters()) + 0 * x[:, :1]
    other.fit(1)
    with pytest.raises(OptimizerError, match=text):
        learn.opt.load_state_dict(other.opt.state_dict())
    now = learn.opt.state_dict()
    assert now['param_groups'] == before['param_groups']
    for i, state in now['state'].items():
        assert all(torch.equal(state[k], v) for k, v in before['state'][i].items())


def test_what_is_not_a_state_is_refused() -> None:
    opt = SGD(weights())
    with pytest.raises(OptimizerError, match="torch's optimizers"):
        opt.load_state_dict({'a': 1})
    two = OptimWrapper(opt={'a': torch.optim.SGD(weights()), 'b': torch.optim.SGD(weights())})
    a, b = two.state_dict().values()
    with pytest.raises(OptimizerError, match=r"there are \['a', 'b'\], in the file \['a', 'c'\]"):
        two.load_state_dict({'a': a, 'c': b})


# Groups


def test_every_optimizer_has_fastais_hypers_over_groups() -> None:
    for opt_func in (SGD, RMSProp, Adam, RAdam, ranger):
        learn = learner(net(), opt_func=opt_func, splitter=halves, wd=0.1)
        learn.create_opt()
        learn.opt.set_hyper('lr', slice(1e-5, 1e-3))
        learn.opt.set_hypers(mom=0.3, wd=[0.1, 0.2])
        assert [h['lr'] for h in learn.opt.hypers] == pytest.approx([1e-5, 1e-3])
        assert [(h['mom'], h['wd']) for h in learn.opt.hypers] == [(0.3, 0.1), (0.3, 0.2)]
        assert [len(ps) for ps in learn.opt.param_lists] == [4, 2]


# Bad input


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head.weight = self.body.weight


@pytest.mark.parametrize(
    ('model', 'options', 'text'),
    [
        (net, {'lr': -0.1}, r'lr=-0\.1: pass a number, 0 or more'),
        (net, {'lr': 'fast'}, "lr='fast': pass a number"),
        (net, {'lr': [1.0, 2.0, 3.0], 'splitter': halves}, 'lr: 3 values for 2 param groups'),
        (net, {'opt_func': nn.Linear}, r'Linear is not a torch\.optim\.Optimizer'),
        (net, {'opt_func': partial(RAdam, beta=0.5)}, 'no SAdam'),
        (
            net,
            {'splitter': lambda m: [m[0], m[3]]},
            'has a Linear, which is not a parameter.*splitter',
        ),
        (net, {'splitter': lambda m: []}, 'no parameters to optimize.*splitter'),
        (
            Tied,
            {'splitter': lambda m: [params(m.body), params(m.head)]},
            r'parameter body\.weight twice.*one group',
        ),
        (
            net,
            {'opt_func': lambda p, lr: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=lr)},
            r'No parameter of this Sequential is in the optimizer.*learn\.model\.parameters',
        ),
    ],
)
def test_bad_input_is_refused_with_the_fix(model: Any, options: dict[str, Any], text: str) -> None:
    learn = learner(made := model(), **options)
    before = deepcopy(made.state_dict())
    with pytest.raises(OptimizerError, match=text):
        learn.fit(1)
    assert all(torch.equal(v, before[k]) for k, v in made.state_dict().items())


def test_a_ready_optimizer_with_extra_parameters_is_refused() -> None:
    opt = torch.optim.SGD(ps := weights(), lr=0.1)
    for args, kwargs in (((ps,), {}), ((), {'lr': 0.2})):
        with pytest.raises(OptimizerError, match='pass `opt=` alone'):
            OptimWrapper(*args, opt=opt, **kwargs)


def test_what_no_installed_library_has_is_refused_with_what_to_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, 'pytorch_optimizer', None)
    for make in (Lamb, QHAdam):
        with pytest.raises(
            MissingExtraError, match=rf'{make.__name__}.*pip install pytorch_optimizer;.*`Adam`'
        ):
            make(weights(), lr=0.1)


class KeepsItsRates(torch.optim.SGD):
    "An optimizer that reads the rates of its groups when it is made."

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.base_lrs = [group['lr'] for group in self.param_groups]


def test_groups_are_made_with_their_own_rates() -> None:
    learn = learner(net(), opt_func=KeepsItsRates, splitter=halves, lr=[0.01, 0.1])
    learn.create_opt()
    assert learn.opt.base_lrs == [0.01, 0.1]
    learn.lr = slice(0.2, 0.4)
    learn.create_opt()
    assert learn.opt.base_lrs == pytest.approx([0.2, 0.4])
