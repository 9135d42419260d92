"""The optimizer is what the user gave: exact steps, every parameter, modes and closures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from learnkit import (
    SGD,
    Adam,
    Callback,
    GradientAccumulation,
    Learner,
    OptimWrapper,
    TrainEvalCallback,
)
from learnkit.checkpoint.compare import learn_digest
from learnkit.core.errors import OptimizerError, OptionError
from learnkit.optim.hyperparams import params

Row = Callable[..., None]
LR = 0.1


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)
    return nn.Sequential(*layers).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=gen, dtype=torch.float64)
    return [(draw(4, 3), draw(4, 1) + 2) for _ in range(10)]


def learner(model: nn.Module, *cbs: Any, loss_func: Any = mse_loss, **kwargs: Any) -> Learner:
    options = {'default_cbs': False, 'cbs': [TrainEvalCallback, *cbs], **kwargs}
    return Learner((batches(), batches()), model, loss_func, **options)


def train_plainly(model: nn.Module, opt: torch.optim.Optimizer, loss_func: Any = mse_loss) -> None:
    "Train for an epoch as a hand-written loop does."
    for x, y in batches():
        loss_func(model(x), y).backward()
        opt.step()
        opt.zero_grad()


def gap(model: nn.Module, other: nn.Module) -> float:
    "Return the largest difference between the parameters of two models."
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def layout(opt: torch.optim.Optimizer) -> list[tuple[list[int], dict[str, Any]]]:
    "Return the parameters, by identity, and the options of each param group."
    return [
        ([id(p) for p in g['params']], {k: v for k, v in g.items() if k != 'params'})
        for g in opt.param_groups
    ]


# ------------------------------------------------------------------------------------- as given

WAS = 0.8229264792761979


@pytest.mark.silent('AdamW instance, ten steps: distance of weights to a hand-written loop')
def test_an_instance_stays_as_it_is(row: Row) -> None:
    model, other = net(), net()
    opt = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=1.0)
    before = layout(opt)
    learner(model, opt_func=opt).fit(1)
    train_plainly(other, torch.optim.AdamW(other.parameters(), lr=LR, weight_decay=1.0))
    row(was=0.798541, now=gap(model, other), independent=0.0)
    assert gap(model, other) == 0
    assert layout(opt) == before


@pytest.mark.parametrize(
    'maker',
    [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.NAdam],
)
@pytest.mark.parametrize('given', ['partial', 'learner', 'fit', 'lambda'])
@pytest.mark.silent('torch class with weight decay: distance of weights to a hand-written loop')
def test_a_torch_class_trains_as_by_hand(row: Row, maker: Any, given: str) -> None:
    model, other = net(), net()
    make: Any = {
        'partial': partial(maker, weight_decay=1.0),
        'lambda': lambda p, lr: maker(p, lr=lr, weight_decay=1.0),
    }.get(given, maker)
    learn = learner(model, opt_func=make, lr=LR, wd=1.0 if given == 'learner' else None)
    learn.fit(1, wd=1.0 if given == 'fit' else None)
    train_plainly(other, maker(other.parameters(), lr=LR, weight_decay=1.0))
    if (maker, given) == (torch.optim.AdamW, 'partial'):
        row(was=0.798541, now=gap(model, other), independent=0.0)
    assert gap(model, other) == 0


@pytest.mark.parametrize(
    'maker',
    [
        torch.optim.LBFGS,
        torch.optim.Adadelta,
        torch.optim.Rprop,
        torch.optim.Adagrad,
        torch.optim.SGD,
        partial(torch.optim.RMSprop, momentum=0.5),
    ],
)
@pytest.mark.silent('Adadelta class without lr: distance of weights to a hand-written loop')
def test_a_torch_class_without_a_rate_has_its_own(row: Row, maker: Any) -> None:
    model, other = net(), net()
    learn = learner(model, opt_func=maker)
    learn.fit(1)
    plain = maker(other.parameters())
    train_with_closure(other, plain, first=False)
    if maker is torch.optim.Adadelta:
        row(was=0.045696403728541835, now=gap(model, other), independent=0.0)
    assert gap(model, other) == 0
    assert learn.lr == plain.param_groups[0]['lr']


@pytest.mark.parametrize('given', ['fit', 'learner', 'partial'])
def test_a_rate_that_is_given_wins(given: str) -> None:
    model, other = net(), net()
    adagrad = torch.optim.Adagrad
    opt_func = partial(adagrad, lr=LR) if given == 'partial' else adagrad
    learn = learner(model, opt_func=opt_func, lr=LR if given == 'learner' else None)
    learn.fit(1, LR if given == 'fit' else None)
    train_plainly(other, adagrad(other.parameters(), lr=LR))
    assert gap(model, other) == 0


def make_adagrad(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=lr)


@pytest.mark.parametrize(
    'opt_func', [Adam, make_adagrad, partial(OptimWrapper, opt=torch.optim.Adagrad)]
)
def test_everything_else_without_a_rate_gets_the_package_default(opt_func: Any) -> None:
    learn = learner(net(), opt_func=opt_func)
    learn.create_opt()
    assert learn.opt.lrs == [1e-3]


@pytest.mark.silent("weight decay set by opt.hypers[0]['wd']: distance of SGD to the loop")
def test_decay_set_on_one_group_spares_biases(row: Row) -> None:
    model, other = net(), net()
    learn = learner(model, opt_func=SGD, lr=LR)
    learn.create_opt()
    learn.opt.hypers[0]['wd'] = 0.5
    learn.fit(1)
    train_plainly(other, DecayMatrices(other.parameters(), LR, 0.5))
    row(was=0.4019863613935142, now=gap(model, other), independent=0.0)
    assert gap(model, other) < 1e-15


class DecayMatrices:
    "SGD that decays matrices alone."

    def __init__(self, params: Any, lr: float, wd: float) -> None:
        self.params, self.lr, self.wd = list(params), lr, wd

    @torch.no_grad()
    def step(self) -> None:
        for p in self.params:
            if p.ndim == 2:
                p.mul_(1 - self.lr * self.wd)
            p.sub_(self.lr * p.grad)

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None


@pytest.mark.parametrize(
    ('opt_func', 'wd_bn_bias', 'decays'),
    [
        (Adam, None, False),
        (Adam, True, True),
        (lambda p, lr: Adam(p, lr), None, False),
        (torch.optim.AdamW, None, True),
        (torch.optim.AdamW, False, False),
        (partial(OptimWrapper, opt=torch.optim.AdamW), None, True),
    ],
)
def test_norms_and_biases_decay_as_the_kind_or_the_user_says(
    opt_func: Any, wd_bn_bias: Any, decays: bool
) -> None:
    learn = learner(net(), opt_func=opt_func, lr=LR, wd=0.5, wd_bn_bias=wd_bn_bias)
    learn.fit(1)
    decay = {p: g['weight_decay'] for g in learn.opt.param_groups for p in g['params']}
    named = dict(learn.model.named_parameters())
    expected = {n: 0.5 if decays or n in ('0.weight', '3.weight') else 0.0 for n in named}
    assert {n: decay[p] for n, p in named.items()} == expected


@pytest.mark.silent('rate of an SGD instance set by hand between two fits: distance to the loop')
def test_a_rate_set_by_hand_stays(row: Row) -> None:
    model, other = net(), net()
    opt, plain = (torch.optim.SGD(m.parameters(), lr=LR) for m in (model, other))
    learn = learner(model, opt_func=opt)
    for o in (opt, plain):
        learn.fit(1) if o is opt else train_plainly(other, plain)
        o.param_groups[0]['lr'] = 0.01
        learn.fit(1) if o is opt else train_plainly(other, plain)
    row(was=0.08788521043241593, now=gap(model, other), independent=0.0)
    assert gap(model, other) == 0


def test_what_a_schedule_leaves_is_not_where_the_next_fit_begins() -> None:
    used: list[float] = []
    model = net()
    note = Callback(before_step=lambda cb: used.append(cb.opt.hypers[0]['lr']))
    learn = learner(model, note, opt_func=torch.optim.SGD(model.parameters(), lr=LR))
    learn.fit_one_cycle(1, 0.5)
    assert used[-1] < 0.05
    used.clear()
    learn.fit(1)
    assert used == [LR] * 10


# ------------------------------------------------------------------------- every parameter


@pytest.mark.silent('layer replaced between two fits of SGD with momentum: how far it moved')
def test_a_replaced_layer_is_trained(row: Row) -> None:
    sgd = partial(torch.optim.SGD, momentum=0.9)
    model, other = net(), net()
    learn = learner(model, opt_func=sgd, lr=LR)
    learn.fit(1)
    plain = sgd(other.parameters(), lr=LR)
    train_plainly(other, plain)
    for m in (model, other):
        torch.manual_seed(5)
        m[0] = nn.Linear(3, 8).double()
    start = model[0].weight.detach().clone()
    gone, kept = plain.param_groups[0]['params'][:2], plain.param_groups[0]['params'][2:]
    for p in gone:
        del plain.state[p]
    plain.param_groups[0]['params'] = [*other[0].parameters(), *kept]
    learn.fit(1)
    train_plainly(other, plain)
    moved, by_hand = (float((m[0].weight - start).detach().abs().max()) for m in (model, other))
    row(was=0.0, now=moved, independent=by_hand)
    assert gap(model, other) == 0 and moved == by_hand > 0
    assert list(learn.opt.parameters()) == list(model.parameters())  # in a new process's order
    assert set(learn.opt.state) == set(model.parameters())


@pytest.mark.silent('requires_grad_(True) in a callback before epoch 1: how far the layer moved')
def test_what_is_turned_on_within_a_fit_is_trained(row: Row) -> None:
    def turn_on(cb: Any) -> None:
        if cb.epoch == 1:
            cb.model[0].requires_grad_(True)

    model, other = net(), net()
    start = model[0].weight.detach().clone()
    for m in (model, other):
        m[0].requires_grad_(False)
    learner(model, Callback(before_epoch=turn_on), opt_func=torch.optim.Adam, lr=LR).fit(2)
    plain = torch.optim.Adam(other[1:].parameters(), lr=LR)
    train_plainly(other, plain)
    other[0].requires_grad_(True)
    plain.param_groups[0]['params'] = list(other.parameters())
    train_plainly(other, plain)
    moved, by_hand = (float((m[0].weight - start).detach().abs().max()) for m in (model, other))
    row(was=0.0, now=moved, independent=by_hand)
    assert gap(model, other) == 0 and moved == by_hand > 0


def split(model: nn.Module) -> list[Any]:
    return [params(model[0]), [*params(model[1:])]]


def test_a_new_layer_joins_its_group_with_its_rate_and_decay() -> None:
    learn = learner(net(), opt_func=Adam, splitter=split)
    learn.fit(1, lr=[0.01, 0.1], wd=0.1)
    learn.model[0] = nn.Linear(3, 8).double()
    learn.model[3] = nn.Linear(8, 1).double()
    learn.fit(1, lr=[0.02, 0.2], wd=0.3)
    named = {p: n for n, p in learn.model.named_parameters()}
    found = {
        named[p]: (g['lr'], g['weight_decay']) for g in learn.opt.param_groups for p in g['params']
    }
    assert found == {
        '0.weight': (0.02, 0.3),
        '0.bias': (0.02, 0.0),
        '1.weight': (0.2, 0.0),
        '1.bias': (0.2, 0.0),
        '3.weight': (0.2, 0.3),
        '3.bias': (0.2, 0.0),
    }
    assert len(learn.opt.param_lists) == 2


def test_a_new_layer_of_a_frozen_group_is_frozen_and_named() -> None:
    learn = learner(net(), opt_func=Adam, lr=LR, splitter=split)
    learn.freeze()
    learn.fit(1)
    learn.model[0] = new = nn.Linear(3, 8).double()
    start = new.weight.detach().clone()
    with pytest.warns(UserWarning, match=r'0\.weight, 0\.bias.*unfreeze'):
        learn.fit(1)
    assert torch.equal(new.weight, start)
    learn.unfreeze()
    learn.fit(1)
    assert not torch.equal(new.weight, start)


def drop_norm(p: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(p)[:2] + list(p)[4:], lr=lr)


@pytest.mark.parametrize('how', ['splitter', 'opt_func', 'instance'])
@pytest.mark.silent('parameters that the splitter omits: warnings that name them, in two fits')
def test_what_is_left_out_is_named_once(row: Row, how: str) -> None:
    model = net()
    without = [*model[0].parameters(), *model[3].parameters()]
    options: dict[str, Any] = {
        'splitter': {'opt_func': torch.optim.SGD, 'splitter': lambda m: without},
        'opt_func': {'opt_func': drop_norm},
        'instance': {'opt_func': torch.optim.SGD(without, lr=LR)},
    }[how]
    learn = learner(model, **options)
    with pytest.warns(UserWarning, match=r'1\.weight, 1\.bias') as caught:
        learn.fit(2)
    learn.fit(1)  # a warning would be an error
    if how == 'splitter':
        row(was=0, now=len(caught), independent=1)
    assert len(caught) == 1
    assert bool((model[1].weight == 1).all())


def test_what_is_left_out_stays_out_when_it_is_frozen_for_a_while() -> None:
    model = net()
    learn = learner(model, opt_func=drop_norm, lr=LR)
    with pytest.warns(UserWarning, match=r'1\.weight, 1\.bias'):
        learn.fit(1)
    for trains in (False, True):
        model[1].requires_grad_(trains)
        learn.fit(1)  # a warning would be an error
    assert len(learn.opt.param_groups[0]['params']) == 4
    assert bool((model[1].weight == 1).all())


def test_of_several_optimizers_a_new_layer_is_named() -> None:
    def pair(p: Any, lr: float) -> dict[str, torch.optim.Optimizer]:
        return {
            'body': torch.optim.SGD(model[0].parameters(), lr=lr),
            'head': torch.optim.Adam(model[1:].parameters(), lr=lr),
        }

    model = net()
    learn = learner(model, opt_func=pair, lr=LR)
    learn.fit(1)
    old = set(model[3].parameters())
    model[3] = nn.Linear(8, 1).double()
    with pytest.warns(UserWarning, match=r'3\.weight, 3\.bias'):
        learn.fit(1)
    assert not old & (set(learn.opt.parameters()) | set(learn.opt.state))


# ------------------------------------------------------------- parameters of the loss function


class Weighted(nn.Module):
    "A squared error with a learned variance (Kendall and Gal, 2017)."

    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        return mse_loss(pred, target) * torch.exp(-self.log_var) + self.log_var


@pytest.mark.silent('learned log variance of a loss module after ten steps of SGD')
def test_parameters_of_the_loss_are_trained(row: Row) -> None:
    model, other, loss, plain_loss = net(), net(), Weighted(), Weighted()
    learn = learner(model, loss_func=loss, opt_func=torch.optim.SGD, lr=LR, splitter=split)
    learn.fit(1)
    plain = torch.optim.SGD([*other.parameters(), *plain_loss.parameters()], lr=LR)
    train_plainly(other, plain, plain_loss)
    row(was=0.0, now=loss.log_var.item(), independent=plain_loss.log_var.item())
    assert gap(model, other) == 0 and torch.equal(loss.log_var, plain_loss.log_var)
    assert learn.opt.param_lists[-1][-1] is loss.log_var


@pytest.mark.parametrize('adds', [False, True])
@pytest.mark.parametrize(
    'maker', [torch.optim.Adam, torch.optim.Adagrad, partial(torch.optim.LBFGS, max_iter=3)]
)
def test_a_loss_is_trained_once_whoever_adds_it(maker: Any, adds: bool) -> None:
    model, other, loss, plain_loss = net(), net(), Weighted(), Weighted()

    def make(params: Any, lr: float) -> torch.optim.Optimizer:
        return maker([*params, loss.log_var] if adds else params, lr=lr)

    learner(model, loss_func=loss, opt_func=make, lr=LR).fit(1)
    plain = maker([*other.parameters(), plain_loss.log_var], lr=LR)
    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            plain.zero_grad()
            value = plain_loss(other(x), y)
            value.backward()
            return value

        plain.step(closure)
    assert gap(model, other) == 0 and torch.equal(loss.log_var, plain_loss.log_var)
    assert loss.log_var != 0


def test_a_new_layer_of_adagrad_has_a_state() -> None:
    model = net()
    learn = learner(model, opt_func=torch.optim.Adagrad, lr=LR)
    learn.fit(1)
    model[3] = nn.Linear(8, 1).double()
    start = model[3].weight.detach().clone()
    learn.fit(1)
    assert not torch.equal(model[3].weight, start)
    assert learn.opt.state[model[3].weight]['step'] == 10


def test_a_loss_is_saved_and_resumed_with_its_parameters(tmp_path: Path) -> None:
    def made(*cbs: Any) -> Learner:
        adam = partial(torch.optim.Adam, lr=LR)
        return learner(net(), *cbs, loss_func=Weighted(), opt_func=adam, path=tmp_path)

    states: list[Any] = []

    def keep(cb: Any) -> None:
        if cb.train_iter == 13:
            states.append(cb.learn.checkpoint_state())

    whole = made(Callback(batch_checkpoint=keep))
    whole.fit(3)
    again = made()
    again.fit(3, resume=states[0])
    assert learn_digest(again) == learn_digest(whole)

    whole.save('both')
    loaded = made().load('both')
    assert torch.equal(loaded.loss_func.log_var, whole.loss_func.log_var)
    before = learn_digest(loaded)
    with torch.no_grad():
        loaded.loss_func.log_var.add_(1)
    assert learn_digest(loaded) != before


def test_a_resumed_optimizer_has_grown_too() -> None:
    states: list[Any] = []

    def turn_on(cb: Any) -> None:
        if cb.epoch == 1 and not cb.learn.resumed:
            cb.model[0].requires_grad_(True)

    def keep(cb: Any) -> None:
        if cb.train_iter == 25:
            states.append(cb.learn.checkpoint_state())

    def made(*cbs: Any) -> Learner:
        model = net()
        model[0].requires_grad_(False)
        cbs = Callback(before_epoch=turn_on), *cbs
        return learner(model, *cbs, opt_func=torch.optim.Adam, lr=LR)

    whole, again = made(Callback(batch_checkpoint=keep)), made()
    whole.fit(4)
    again.fit(4, resume=states[0])
    assert gap(whole.model, again.model) == 0 and len(again.opt.state) == 6


# -------------------------------------------------------------------------------------- modes

schedulefree = pytest.importorskip('schedulefree')
library = pytest.importorskip('pytorch_optimizer')
FREE = [
    schedulefree.SGDScheduleFree,
    library.ScheduleFreeSGD,
    library.ScheduleFreeAdamW,
    schedulefree.AdamWScheduleFree,
]
free = pytest.mark.parametrize('cls', FREE)


def loss_of(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(float(mse_loss(model(x), y)) for x, y in batches()) / len(batches())


@free
@pytest.mark.silent('ScheduleFreeSGD, two epochs: mean loss of the model after the fit')
def test_weights_are_switched_around_training(row: Row, cls: Any) -> None:
    model, other = net(), net()
    seen: list[tuple[float, float]] = []
    note = Callback(after_validate=lambda cb: seen.append((loss_of(cb.model), cb.epoch)))
    learn = learner(model, note, opt_func=cls, lr=LR)
    learn.fit(2)
    plain = cls(other.parameters(), lr=LR)
    plain.train()
    evaluated = []
    for _ in range(2):
        train_plainly(other, plain)
        trained = [p.detach().clone() for p in other.parameters()]
        plain.eval()
        evaluated.append(loss_of(other))
        plain.train()
        with torch.no_grad():
            for p, value in zip(other.parameters(), trained, strict=True):
                p.copy_(value)
    plain.eval()
    if cls is library.ScheduleFreeSGD:
        row(was=0.8056649410179519, now=loss_of(model), independent=loss_of(other))
    assert gap(model, other) == 0
    assert [loss for loss, _ in seen] == evaluated


@free
@pytest.mark.parametrize('events', [('before_eval', 'after_eval'), ('after_train', 'before_train')])
@pytest.mark.parametrize('wrapped', [True, False])
@pytest.mark.silent('opt.eval() and opt.train() by a callback, ScheduleFree: loss after the fit')
def test_a_callback_may_switch_the_weights_itself(
    row: Row, cls: Any, events: tuple[str, str], wrapped: bool
) -> None:
    def switch(mode: str) -> Any:
        return lambda cb: getattr(cb.opt if wrapped else cb.opt[0], mode)()

    model, other = net(), net()
    before, after = events
    own = Callback(**{before: switch('eval'), after: switch('train')})
    learn = learner(model, own, opt_func=cls, lr=LR)
    learn.fit(3)
    plain = cls(other.parameters(), lr=LR)
    for _ in range(3):
        plain.train()
        train_plainly(other, plain)
        plain.eval()
    if cls is library.ScheduleFreeSGD and not wrapped and before == 'before_eval':
        row(was=0.798541, now=loss_of(model), independent=loss_of(other))
    assert gap(model, other) < 1e-5


@free
def test_predictions_and_files_in_a_fit_are_evaluated(cls: Any, tmp_path: Path) -> None:
    model, found = net(), {}

    def look(cb: Any) -> None:
        if not cb.training or cb.train_iter != 5:
            return
        before = [p.detach().clone() for p in model.parameters()]
        x = batches()[0][0]
        found['preds'] = cb.learn.get_preds()[0][:4]
        found['streamed'] = next(iter(cb.learn.predict_iter()))[0]
        found['file'] = cb.learn.save('mid', with_opt=False)
        found['learner'] = cb.learn.save_learner('whole.pth')
        found['exported'] = torch.export.load(cb.learn.export()).module()(x)
        now = list(model.parameters())
        assert all(torch.equal(p, q) for p, q in zip(before, now, strict=True))
        found['trained'] = model(x).detach()

    learner(model, Callback(after_batch=look), opt_func=cls, lr=LR, path=tmp_path).fit(1)

    other = net()
    plain = cls(other.parameters(), lr=LR)
    plain.train()
    for x, y in batches()[:5]:
        mse_loss(other(x), y).backward()
        plain.step()
        plain.zero_grad()
    plain.eval()
    expected = other(batches()[0][0]).detach()
    assert torch.equal(found['preds'], expected) and torch.equal(found['streamed'], expected)
    assert torch.allclose(found['exported'], expected, rtol=0, atol=1e-14)
    assert not torch.allclose(found['trained'], expected, rtol=0, atol=1e-6)
    for state in (torch.load(found['file']), torch.load(found['learner'])['model']):
        assert all(torch.equal(state[n], p) for n, p in other.named_parameters())


@free
@pytest.mark.parametrize('n', [5, 10, 14])
def test_a_fit_with_modes_is_resumed_exactly(cls: Any, n: int) -> None:
    states: list[Any] = []

    def keep(cb: Any) -> None:
        if cb.train_iter == n:
            states.append(cb.learn.checkpoint_state())

    event = 'batch_checkpoint' if n % 10 else 'epoch_checkpoint'
    whole = learner(net(), Callback(**{event: keep}), opt_func=cls, lr=LR)
    whole.fit(2)
    again = learner(net(), opt_func=cls, lr=LR)
    again.fit(2, resume=states[0])
    assert gap(whole.model, again.model) == 0 and learn_digest(whole) == learn_digest(again)


@free
def test_evaluations_change_nothing_that_is_trained(cls: Any) -> None:
    ends = []
    for every in (None, '3ba'):
        learn = learner(model := net(), opt_func=cls, lr=LR, eval_every=every)
        learn.fit(2)
        ends.append(model)
    assert gap(*ends) == 0


# ----------------------------------------------------------------------------------- closures


class Second(torch.optim.SGD):
    "Steps only with a closure, and does nothing without."

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


class Nearby(torch.optim.SGD):
    "Steps with the gradient at a point that it sets through `data`."

    needs_closure = True

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise ValueError('closure')
        for p in self.param_groups[0]['params']:
            p.data.add_(0.01)
        loss = closure()
        for p in self.param_groups[0]['params']:
            p.data.sub_(0.01)
        super().step()
        return loss


def train_with_closure(model: nn.Module, opt: Any, first: bool) -> int:
    "Train for an epoch with closures, after a first evaluation where the optimizer wants one; count evaluations."
    count: list[int] = []
    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            count.append(1)
            return loss

        if first:
            closure()
        opt.step(closure)
        opt.zero_grad()
    return len(count)


def with_closure(make: Any) -> Any:
    "Return an `opt_func` that declares that the steps of `make` evaluate the loss."
    return partial(OptimWrapper, opt=make, needs_closure=True)


sam = partial(library.SAM, base_optimizer=torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize(
    ('make', 'is_declared', 'first', 'n_evaluations'),
    [
        (sam, True, True, 20),
        (partial(library.FriendlySAM, base_optimizer=torch.optim.SGD), True, True, 20),
        (partial(library.LookSAM, base_optimizer=torch.optim.SGD), True, True, 20),
        (partial(library.BSAM, num_data=40), True, True, 30),
        (schedulefree.SGDScheduleFreeClosure, True, False, 20),
        (Second, True, False, 20),
        (Nearby, False, False, 20),  # its class has `needs_closure`
        (torch.optim.LBFGS, False, False, None),
    ],
)
@pytest.mark.silent('optimizer that steps only with a closure: how far the weights moved')
def test_who_needs_a_closure_gets_one(
    row: Row, make: Any, is_declared: bool, first: bool, n_evaluations: int | None
) -> None:
    model, other, start = net(), net(), net()
    count: list[int] = []
    counted = Callback(after_backward=lambda cb: count.append(1))
    torch.manual_seed(3)
    opt_func = with_closure(make) if is_declared else make
    learner(model, counted, opt_func=opt_func, lr=LR).fit(1)
    torch.manual_seed(3)
    plain = make(other.parameters(), lr=LR)
    if hasattr(plain, 'train'):
        plain.train()
    n_plain = train_with_closure(other, plain, first)
    if hasattr(plain, 'eval'):
        plain.eval()
    if make is Second:
        row(was=0.0, now=gap(model, start), independent=gap(other, start))
    assert gap(model, other) == 0 and gap(model, start) > 0
    assert len(count) == (n_plain if n_evaluations is None else n_evaluations)


def test_a_closure_optimizer_is_resumed_exactly() -> None:
    states: list[Any] = []

    def keep(cb: Any) -> None:
        if cb.train_iter == 7:
            states.append(cb.learn.checkpoint_state())

    whole, again = (
        learner(net(), *cbs, opt_func=with_closure(sam))
        for cbs in ([Callback(batch_checkpoint=keep)], [])
    )
    whole.fit_one_cycle(2, LR)
    again.fit_one_cycle(2, LR, resume=states[0])
    assert gap(whole.model, again.model) == 0


def test_a_second_evaluation_is_refused_where_it_cannot_be() -> None:
    learn = learner(net(), GradientAccumulation(8), opt_func=with_closure(sam), lr=LR)
    with pytest.raises(OptionError):
        learn.fit(1)
    learner(net(), GradientAccumulation(8), opt_func=library.Lion, lr=LR).fit(1)


def test_the_user_declares_which_optimizers_need_a_closure() -> None:
    p = nn.Parameter(torch.ones(1))
    assert OptimWrapper(opt=Nearby([p], lr=LR)).needs_closure
    assert not OptimWrapper(opt=Second([p], lr=LR)).needs_closure
    assert OptimWrapper(opt=Second([p], lr=LR), needs_closure=True).needs_closure
    assert not OptimWrapper(opt=Nearby([p], lr=LR), needs_closure=False).needs_closure
    assert not OptimWrapper(opt=torch.optim.SGD([p], lr=LR)).needs_closure
    assert OptimWrapper(opt=torch.optim.LBFGS([p])).needs_closure


# ------------------------------------------------------------------------------ values by name


def test_hypers_are_set_by_group_and_for_all() -> None:
    learn = learner(net(), opt_func=Adam, splitter=split)
    learn.create_opt()
    learn.opt.hypers[0].update({'lr': 0.001, 'mom': 0.5})
    learn.opt.hypers[-1]['lr'] = 0.03
    learn.opt.set_hyper('wd', 0.25)
    assert learn.opt.lrs == [0.001, 0.03]
    assert [h['mom'] for h in learn.opt.hypers] == [0.5, 0.9]
    assert [h['wd'] for h in learn.opt.hypers] == [0.25, 0.25]


@pytest.mark.parametrize(
    ('name', 'value'), [('lr', 'fast'), ('lr', -0.1), ('wd', None), ('mom', 1.0)]
)
def test_a_value_that_no_optimizer_can_use_is_refused_by_name(name: str, value: Any) -> None:
    learn = learner(net(), opt_func=Adam)
    learn.create_opt()
    before = dict(learn.opt.hypers[0])
    with pytest.raises(OptimizerError, match=name):
        learn.opt.hypers[0][name] = value
    assert learn.opt.hypers[0] == before
