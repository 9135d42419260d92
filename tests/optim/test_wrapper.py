"""Compare optimizers with closed forms and torch: weight decay, hyperparameters, closures, override points."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import (
    SGD,
    Callback,
    CancelStepException,
    Learner,
    OptimizerError,
    OptimWrapper,
    Recorder,
    defaults,
    mse,
)
from learnkit.optim.hyperparams import norm_bias_params
from learnkit.testing import RegModel, synth_learner
from tests.helpers.learners import bare_learner
from tests.helpers.optimizing import data, net


def learner(model: nn.Module, *cbs: Any, **kwargs: Any) -> Learner:
    options = {'opt_func': SGD, 'lr': 0.1, 'wd_bn_bias': True, **kwargs}
    return bare_learner(data(), model, nn.MSELoss(), cbs=cbs, recorder=None, **options)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def by_hand(opt: torch.optim.Optimizer, model: nn.Module, n_epoch: int = 2) -> list[Tensor]:
    "Return the weights after a plain loop."
    for _ in range(n_epoch):
        for x, y in data():
            nn.functional.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return weights(model)


def same(a: list[Tensor], b: list[Tensor], tol: float = 0.0) -> bool:
    return all(torch.allclose(p, q, rtol=0, atol=tol) for p, q in zip(a, b, strict=True))


# Against torch and closed forms


def test_sgd_with_decoupled_decay_is_its_formula() -> None:
    w = nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.float64))
    idle = nn.Parameter(torch.tensor([5.0]))
    opt = SGD([w, idle], lr=0.1, mom=0.5, wd=0.2)
    expected, velocity = w.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for g in ([1.0, 2.0], [-3.0, 0.5], [0.0, 1.0]):
        w.grad = torch.tensor(g, dtype=torch.float64)
        velocity = 0.5 * velocity + w.grad
        expected = expected * (1 - 0.1 * 0.2) - 0.1 * velocity
        opt.step()
        assert torch.allclose(w, expected, rtol=0, atol=1e-14)
    assert idle.item() == 5  # without a gradient nothing moves
    assert opt.hypers[0]['wd'] == 0.2


def test_hooks_of_a_decoupled_step_run_once() -> None:
    seen: list[str] = []
    learn = learner(net(), opt_func=partial(SGD, wd=0.1))
    learn.create_opt()
    learn.opt.opt.register_step_pre_hook(lambda *_: seen.append('before'))
    learn.opt.opt.register_step_post_hook(lambda *_: seen.append('after'))
    learn.fit(1)
    assert seen == ['before', 'after'] * len(data())


# Weight decay


def moved_by_decay(model: nn.Module, learn: Learner, **fit: Any) -> dict[str, bool]:
    "Return the parameters that weight decay changed with zero gradients."

    def nothing(cb: Any) -> None:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)

    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    with learn.added_cbs(Callback(before_step=nothing)):
        learn.fit(1, **fit)
    return {n: not torch.equal(p, torch.ones_like(p)) for n, p in model.named_parameters()}


LINEAR_WEIGHTS = {
    '0.weight': True,
    '0.bias': False,
    '1.weight': False,
    '1.bias': False,
    '3.weight': True,
    '3.bias': False,
}


@pytest.mark.parametrize('wd', [{'constructor': 0.1}, {'fit': 0.1}])
def test_decay_given_by_the_learner_or_fit_leaves_them_alone_too(wd: dict[str, float]) -> None:
    model = net()
    learn = learner(model, opt_func=SGD, wd_bn_bias=False, wd=wd.get('constructor'))
    assert moved_by_decay(model, learn, wd=wd.get('fit')) == LINEAR_WEIGHTS
    assert moved_by_decay(model, learn, wd=0.3) == LINEAR_WEIGHTS
    assert not any(moved_by_decay(model, learn, wd=0.0).values())


def test_decay_of_the_spared_is_an_exact_split_of_the_groups() -> None:
    model = net()
    splitter = lambda m: [list(m[0].parameters()), list(m[1:].parameters())]
    learn = learner(model, opt_func=torch.optim.AdamW, wd_bn_bias=False, splitter=splitter)
    learn.fit(1, lr=slice(1e-3, 1e-1), wd=0.1)
    assert len(learn.opt.hypers) == 2
    assert [h['lr'] for h in learn.opt.hypers] == pytest.approx([1e-3, 1e-1])
    for g in learn.opt.param_groups:
        own = {n for n, p in model.named_parameters() for q in g['params'] if p is q}
        assert g['weight_decay'] == (0.1 if own <= {'0.weight', '3.weight'} else 0.0)
        assert g['lr'] == pytest.approx(1e-3 if all(n.startswith('0') for n in own) else 1e-1)
    assert len(list(learn.opt.parameters())) == 6


def test_norm_and_bias_parameters_are_found() -> None:
    model = net()
    spared = model[0].bias, model[1].weight, model[1].bias, model[3].bias
    assert [id(p) for p in norm_bias_params(model)] == [id(p) for p in spared]
    expected = [id(model[1].weight), id(model[1].bias)]
    assert [id(p) for p in norm_bias_params(model, with_bias=False)] == expected


def test_decay_set_in_the_middle_of_a_run_keeps_the_momenta() -> None:
    ends = []
    for late in (False, True):
        model = net()
        learn = learner(model, opt_func=partial(SGD, mom=0.9), wd_bn_bias=False)
        learn.fit(1)
        if late:
            learn.opt.set_hyper('wd', 0.1)
            learn.opt.set_hyper('wd', 0.0)
        learn.fit(1)
        ends.append(weights(model))
    assert same(*ends)


# Hyperparameters by name


def split_opt(opt: Any = torch.optim.Adam, n: int = 3, **hypers: Any) -> OptimWrapper:
    params = [[nn.Parameter(torch.ones(2))] for _ in range(n)]
    return OptimWrapper(params, opt=opt, lr=0.1, **hypers)


def test_hypers_read_and_write_by_either_name() -> None:
    opt = split_opt(mom=0.8, sqr_mom=0.9, wd=0.3)
    h = opt.hypers[0]
    assert dict(h) == {'lr': 0.1, 'mom': 0.8, 'sqr_mom': 0.9, 'wd': 0.3, 'eps': 1e-8}
    h['mom'], h['weight_decay'] = 0.7, 0.2
    assert opt.opt.param_groups[0]['betas'] == (0.7, 0.9)
    assert opt.opt.param_groups[0]['weight_decay'] == h['wd'] == 0.2
    assert opt.hypers[1]['mom'] == 0.8 and opt.hypers[-1]['weight_decay'] == 0.3
    assert 'momentum' not in h and 'nonsense' not in h and h.get('nonsense', 4) == 4
    assert split_opt(torch.optim.SGD, mom=0.9).hypers[0]['mom'] == 0.9
    assert split_opt(torch.optim.RMSprop).hypers[0]['sqr_mom'] == 0.99  # alpha


@pytest.mark.parametrize(
    ('value', 'expected'),
    [
        (0.5, [0.5] * 3),
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
        (slice(1e-4, 1e-2), [1e-4, 1e-3, 1e-2]),
        (slice(0.1), [0.01, 0.01, 0.1]),
        (torch.tensor([1.0, 2.0, 3.0]), [1.0, 2.0, 3.0]),
    ],
)
def test_one_value_a_list_or_a_slice_over_the_groups(value: Any, expected: list[float]) -> None:
    opt = split_opt()
    opt.set_hyper('lr', value)
    assert [float(g['lr']) for g in opt.param_groups] == pytest.approx(expected)


def test_a_rate_in_a_tensor_is_filled_in_place() -> None:
    rate = torch.tensor(0.1)
    opt = OptimWrapper(opt=torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=rate))
    opt.set_hyper('lr', 0.02)
    assert opt.param_groups[0]['lr'] is rate and rate.item() == pytest.approx(0.02)


@pytest.mark.parametrize(
    ('name', 'value', 'text'),
    [
        ('lr', [1.0, 2.0], r'lr: 2 values for 3 param groups\. Pass one, 3, or a slice'),
        ('wdd', 0.1, 'wdd is not a hyperparameter of Adam: it has lr, mom, sqr_mom, wd, eps.*`wd`'),
        ('alpha', 0.1, 'alpha is not a hyperparameter of Adam'),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(name: str, value: Any, text: str) -> None:
    opt = split_opt()
    before = [dict(g) for g in opt.param_groups]
    with pytest.raises(OptimizerError, match=text):
        opt.set_hypers(**{name: value})
    expected = [{k: v for k, v in g.items() if k != 'params'} for g in before]
    assert [{k: v for k, v in g.items() if k != 'params'} for g in opt.param_groups] == expected


def test_fit_with_rates_over_groups_moves_each_group_by_its_own() -> None:
    model = RegModel()
    learn = bare_learner(
        model=model,
        opt_func=SGD,
        splitter=lambda m: [[m.a], [m.b]],
        recorder=None,
        n_train=1,
        cls=synth_learner,
    )
    start, grads = (model.a.item(), model.b.item()), []
    learn.add_cb(
        Callback(before_step=lambda cb: grads.extend((model.a.grad.item(), model.b.grad.item())))
    )
    learn.fit(1, lr=[0.0, 0.5])
    assert model.a.item() == start[0] and model.b.item() == pytest.approx(start[1] - 0.5 * grads[1])
    with pytest.raises(OptimizerError, match='3 values for 2'):
        learn.fit(1, lr=[1.0, 2.0, 3.0])


# Groups that come later


def add_to_wrapper(opt: OptimWrapper, group: dict[str, Any]) -> None:
    opt.add_param_group(group)


def add_to_inner(opt: OptimWrapper, group: dict[str, Any]) -> None:
    opt.opt.add_param_group(group)


@pytest.mark.parametrize('add', [add_to_wrapper, add_to_inner])
def test_a_group_that_is_added_later_trains_and_has_hypers(add: Any) -> None:
    model, used = net(), []
    read = Callback(before_step=lambda cb: used.append([h['lr'] for h in cb.opt.hypers]))
    learn = learner(model, read, opt_func=torch.optim.SGD, splitter=lambda m: m[0].parameters())
    with pytest.warns(UserWarning, match=r'1\.weight, 1\.bias, 3\.weight, 3\.bias'):
        learn.fit(1)
    before = weights(model)
    add(learn.opt, {'params': list(model[3].parameters()), 'lr': 0.7})
    if add is add_to_wrapper:
        assert learn.opt.last_group['lr'] == 0.7  # at once
    assert [h['lr'] for h in learn.opt.hypers] == [0.1, 0.7] and learn.opt.last_group['lr'] == 0.7
    assert len(learn.opt.param_groups) == 2 and len(list(learn.opt.parameters())) == 4
    learn.opt.set_hyper('mom', [0.5, 0.6])
    assert [g['momentum'] for g in learn.opt.opt.param_groups] == [0.5, 0.6]
    learn.opt.set_hyper('mom', 0.0)
    learn.fit(1, lr=slice(0.01, 0.02))
    assert used == [[0.1]] * 5 + [[pytest.approx(0.01), pytest.approx(0.02)]] * 5

    other = net()
    for p, q in zip(other.parameters(), before, strict=True):
        p.data.copy_(q)
    opt = torch.optim.SGD(
        [{'params': other[0].parameters(), 'lr': 0.01}, {'params': other[3].parameters()}], lr=0.02
    )
    by_hand(opt, other, 1)
    assert same(weights(model), weights(other), tol=1e-15)
    assert not torch.equal(model[3].weight, before[4])


def test_a_group_is_added_to_one_of_several_optimizers() -> None:
    a, b, c = (nn.Parameter(torch.ones(1)) for _ in range(3))
    opt = OptimWrapper(opt={'a': torch.optim.SGD([a], lr=0.1), 'b': torch.optim.Adam([b], lr=0.2)})
    with pytest.raises(OptimizerError, match=r'opt\[name\]'):
        opt.add_param_group({'params': [c]})
    opt['a'].add_param_group({'params': [c], 'lr': 0.3})
    assert [h['lr'] for h in opt.hypers] == [0.1, 0.2, 0.3]
    opt.set_hyper('lr', [1.0, 2.0, 3.0])
    assert [g['lr'] for g in opt['a'].param_groups] == [1.0, 3.0]
    assert opt['b'].param_groups[0]['lr'] == 2.0


# Making it


def test_the_default_rate_and_optimizer() -> None:
    learn = Learner(data(), net(), nn.MSELoss())
    learn.create_opt()
    assert learn.lr == defaults.lr == 1e-3 and isinstance(learn.opt.opt, torch.optim.AdamW)
    expected = {'lr': 1e-3, 'mom': 0.9, 'sqr_mom': 0.99, 'wd': 0.01, 'eps': 1e-5}
    assert dict(learn.opt.hypers[0]) == expected


def test_a_user_factory_brings_its_rate_once() -> None:
    learn = learner(net(), opt_func=lambda params, lr: torch.optim.SGD(params, lr=lr * 10), lr=0.01)
    for _ in range(3):
        learn.fit(1, reset_opt=True)
    assert learn.opt.hypers[0]['lr'] == pytest.approx(0.1)


def test_an_optimizer_may_be_assigned() -> None:
    learn = learner(model := net())
    learn.opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    learn.fit(2)
    other = net()
    expected = by_hand(torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.5), other)
    assert same(weights(model), expected)


def test_reset_opt_starts_with_fresh_momenta() -> None:
    learn = learner(model := net(), opt_func=partial(SGD, mom=0.9))
    learn.fit(1)
    first = learn.opt
    learn.fit(1)
    assert learn.opt is first
    learn.fit(1, reset_opt=True)
    assert learn.opt is not first
    other = net()
    by_hand(torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), other, 2)
    expected = by_hand(torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), other, 1)
    assert same(weights(model), expected)
    assert learn.time.st == 15  # steps of both optimizers


def test_torchs_schedulers_take_it() -> None:
    rates: list[float] = []
    watcher = Callback(before_step=lambda cb: rates.append(cb.opt.hypers[0]['lr']))
    learn = learner(net(), watcher, wd_bn_bias=False, wd=0.1)
    learn.create_opt()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(learn.opt, gamma=0.5)
    learn.add_cb(Callback(after_step=lambda cb: scheduler.step()))
    learn.fit(1)
    assert rates == pytest.approx([0.1 * 0.5**i for i in range(5)])


@pytest.mark.parametrize(
    ('opt_func', 'text'),
    [
        (lambda params, lr: 3, '3, not a ready optimizer'),
        (7, 'cannot be called'),
        (
            lambda params, lr: {'a': torch.optim.SGD(params, lr=lr), 'b': 'adam'},
            r"\[b\].*'adam', not a ready",
        ),
        (
            lambda params, lr: [torch.optim.SGD(list(params), lr=lr) for _ in 'ab'],
            'share a parameter',
        ),
    ],
)
def test_what_is_not_an_optimizer_is_refused(opt_func: Any, text: str) -> None:
    learn = learner(model := net(), opt_func=opt_func)
    start = weights(model)
    with pytest.raises(OptimizerError, match=text):
        learn.fit(1)
    assert same(start, weights(model))


# Closures


@pytest.mark.parametrize('options', [{}, {'line_search_fn': 'strong_wolfe', 'max_iter': 8}])
def test_lbfgs_is_the_hand_written_loop_bit_for_bit(options: dict[str, Any]) -> None:
    forwards = []
    watcher = Callback(before_pred=lambda cb: forwards.append(1))
    learn = learner(model := net(), watcher, opt_func=partial(torch.optim.LBFGS, **options), lr=0.5)
    learn.fit(2)
    assert same(weights(model), lbfgs_by_hand(other := net(), calls := [], **options))
    assert len(forwards) == len(calls) > 20
    assert next(other.parameters()).grad is not None
    assert all(p.grad is None for p in model.parameters())


def lbfgs_by_hand(
    model: nn.Module, calls: list[int], n_epoch: int = 2, **options: Any
) -> list[Tensor]:
    opt = torch.optim.LBFGS(model.parameters(), lr=0.5, **options)
    for x, y in data() * n_epoch:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            calls.append(1)
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        opt.step(closure)
    return weights(model)


def test_lbfgs_in_pieces_is_lbfgs_of_the_whole_batch() -> None:
    opt_func = partial(torch.optim.LBFGS, max_iter=4)
    learn = learner(model := net(), opt_func=opt_func, lr=0.5, microbatch=3)
    learn.fit(1)
    assert same(weights(model), lbfgs_by_hand(net(), [], n_epoch=1, max_iter=4), tol=1e-10)


@pytest.mark.parametrize('size', [None, 3])
def test_a_training_metric_of_a_closure_step_is_that_before_it_and_counts_once(
    size: int | None,
) -> None:
    learn = learner(
        model := net(),
        Recorder(train_metrics=True, valid_metrics=False),
        opt_func=torch.optim.LBFGS,
        lr=0.5,
        microbatch=size,
        metrics=mse,
    )
    learn.dls.train, learn.logger = data(1), print
    [(x, y)] = data(1)
    first = nn.functional.mse_loss(model(x), y).item()
    learn.fit(1)
    row = learn.history[0]
    assert row['train_loss'] == pytest.approx(first, rel=1e-6)
    assert row['mse'] == pytest.approx(first, abs=1e-12)


def test_lbfgs_trains_on_after_an_exception_in_a_repeated_evaluation() -> None:
    def fail(cb: Any) -> None:
        if cb.learn.run.repeating:
            raise ZeroDivisionError

    learn = learner(model := net(), opt_func=torch.optim.LBFGS, lr=0.5)
    start = deepcopy(model.state_dict())
    learn.fit(1)  # it has a history of directions now
    with pytest.raises(ZeroDivisionError):
        learn.fit(1, cbs=Callback(before_pred=fail))
    assert not learn.run.repeating and not learn.opt.state
    model.load_state_dict(start)
    learn.fit(2)
    assert same(weights(model), lbfgs_by_hand(net(), []))


class Probing(torch.optim.SGD):
    "Evaluates the loss within a step that runs without gradients, unlike torch's optimizers."

    needs_closure = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step()


def test_a_closure_computes_gradients_where_they_are_disabled() -> None:
    learn = learner(model := net(), opt_func=Probing, lr=0.1, wd_bn_bias=True)
    learn.fit(2)
    plain = net()
    assert same(weights(model), by_hand(torch.optim.SGD(plain.parameters(), 0.1), plain))
    assert torch.is_grad_enabled()


class SharpnessAware(Learner):
    "Takes the gradient after a step uphill."

    rho = 0.05

    def _do_grad_opt(self) -> None:
        self._backward()
        params = list(self.model.parameters())
        scale = self.rho / torch.stack([p.grad.norm() for p in params]).norm()
        moves = [p.grad * scale for p in params]
        with torch.no_grad():
            torch._foreach_add_(params, moves)
        self.opt.zero_grad()
        self._do_pred_loss()
        self._backward()
        with torch.no_grad():
            torch._foreach_sub_(params, moves)
        self._with_events(self._step, 'step', CancelStepException)
        self.opt.zero_grad()


def test_an_override_of_do_grad_opt_is_its_hand_written_loop_bit_for_bit() -> None:
    learn = bare_learner(
        data(),
        model := net(),
        nn.MSELoss(),
        opt_func=torch.optim.SGD,
        lr=0.1,
        recorder=None,
        cls=SharpnessAware,
    )
    learn.fit(2)

    other = net()
    opt, params = torch.optim.SGD(other.parameters(), lr=0.1), list(other.parameters())
    for x, y in data() * 2:
        nn.functional.mse_loss(other(x), y).backward()
        scale = 0.05 / torch.stack([p.grad.norm() for p in params]).norm()
        moves = [p.grad * scale for p in params]
        with torch.no_grad():
            torch._foreach_add_(params, moves)
        opt.zero_grad()
        nn.functional.mse_loss(other(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(params, moves)
        opt.step()
        opt.zero_grad()
    assert same(weights(model), weights(other))
