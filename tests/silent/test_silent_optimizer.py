"""The optimizer is what the user gave: exact steps, every parameter, modes and closures."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from learnkit import (
    Adam,
    Callback,
    Learner,
    OptimWrapper,
    TrainEvalCallback,
)
from learnkit.checkpoint.compare import learn_digest
from learnkit.optim.hyperparams import params

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


def test_an_instance_stays_as_it_is() -> None:
    model, other = net(), net()
    opt = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=1.0)
    before = layout(opt)
    learner(model, opt_func=opt).fit(1)
    train_plainly(other, torch.optim.AdamW(other.parameters(), lr=LR, weight_decay=1.0))
    assert gap(model, other) == 0
    assert layout(opt) == before


@pytest.mark.parametrize('maker', [torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam])
@pytest.mark.parametrize('given', ['partial', 'learner', 'fit', 'lambda'])
def test_a_torch_class_trains_as_by_hand(maker: Any, given: str) -> None:
    model, other = net(), net()
    make: Any = {
        'partial': partial(maker, weight_decay=1.0),
        'lambda': lambda p, lr: maker(p, lr=lr, weight_decay=1.0),
    }.get(given, maker)
    learn = learner(model, opt_func=make, lr=LR, wd=1.0 if given == 'learner' else None)
    learn.fit(1, wd=1.0 if given == 'fit' else None)
    train_plainly(other, maker(other.parameters(), lr=LR, weight_decay=1.0))
    assert gap(model, other) == 0


def test_a_rate_set_by_hand_stays() -> None:
    model, other = net(), net()
    opt, plain = (torch.optim.SGD(m.parameters(), lr=LR) for m in (model, other))
    learn = learner(model, opt_func=opt)
    for o in (opt, plain):
        learn.fit(1) if o is opt else train_plainly(other, plain)
        o.param_groups[0]['lr'] = 0.01
        learn.fit(1) if o is opt else train_plainly(other, plain)
    assert gap(model, other) == 0


# ------------------------------------------------------------------------- every parameter


def test_a_replaced_layer_is_trained() -> None:
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
    assert gap(model, other) == 0 and moved == by_hand > 0
    assert list(learn.opt.parameters()) == list(model.parameters())  # in a new process's order
    assert set(learn.opt.state) == set(model.parameters())


def test_what_is_turned_on_within_a_fit_is_trained() -> None:
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
    assert gap(model, other) == 0 and moved == by_hand > 0


def split(model: nn.Module) -> list[Any]:
    return [params(model[0]), [*params(model[1:])]]


def drop_norm(p: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(p)[:2] + list(p)[4:], lr=lr)


@pytest.mark.parametrize('how', ['splitter', 'opt_func', 'instance'])
def test_what_is_left_out_is_named_once(how: str) -> None:
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
    assert len(caught) == 1
    assert bool((model[1].weight == 1).all())


# ------------------------------------------------------------- parameters of the loss function


class Weighted(nn.Module):
    "A squared error with a learned variance (Kendall and Gal, 2017)."

    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        return mse_loss(pred, target) * torch.exp(-self.log_var) + self.log_var


@pytest.mark.parametrize('adds', [False, True])
@pytest.mark.parametrize('maker', [torch.optim.Adam, partial(torch.optim.LBFGS, max_iter=3)])
def test_a_loss_is_trained_once_whoever_adds_it(maker: Any, adds: bool) -> None:
    model, other, loss, plain_loss = net(), net(), Weighted(), Weighted()

    def make(params: Any, lr: float) -> torch.optim.Optimizer:
        return maker([*params, loss.log_var] if adds else params, lr=lr)

    learner(model, loss_func=loss, opt_func=make, lr=LR).fit(1)
    plain = maker([*other.parameters(), plain_loss.log_var], lr=LR)
    train_with_closure(other, plain, False, plain_loss)
    assert gap(model, other) == 0 and torch.equal(loss.log_var, plain_loss.log_var)
    assert loss.log_var != 0


# -------------------------------------------------------------------------------------- modes

schedulefree = pytest.importorskip('schedulefree')
library = pytest.importorskip('pytorch_optimizer')
FREE = [library.ScheduleFreeSGD, schedulefree.AdamWScheduleFree]
free = pytest.mark.parametrize('cls', FREE)


def loss_of(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(float(mse_loss(model(x), y)) for x, y in batches()) / len(batches())


@free
def test_weights_are_switched_around_training(cls: Any) -> None:
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
    assert gap(model, other) == 0
    assert [loss for loss, _ in seen] == evaluated


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
@pytest.mark.parametrize('n', [10, 14])
def test_a_fit_with_modes_is_resumed_exactly(cls: Any, n: int) -> None:
    states: list[Any] = []

    def keep(cb: Any) -> None:
        if cb.train_iter == n:
            states.append(cb.learn.checkpoint_state())

    event = 'batch_checkpoint' if n % 10 else 'epoch_checkpoint'
    whole = learner(net(), Callback(**{event: keep}), opt_func=cls, lr=LR)
    whole.fit(2)
    whole.remove_cb(whole.cbs[-1])
    again = learner(net(), opt_func=cls, lr=LR)
    again.fit(2, resume=states[0])
    assert gap(whole.model, again.model) == 0 and learn_digest(whole) == learn_digest(again)


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


def train_with_closure(model: nn.Module, opt: Any, first: bool, loss_func: Any = mse_loss) -> None:
    "Train for an epoch with closures, after a first evaluation where the optimizer wants one."
    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = loss_func(model(x), y)
            loss.backward()
            return loss

        if first:
            closure()
        opt.step(closure)
        opt.zero_grad()


def with_closure(make: Any) -> Any:
    "Return an `opt_func` that declares that the steps of `make` evaluate the loss."
    return partial(OptimWrapper, opt=make, needs_closure=True)


sam = partial(library.SAM, base_optimizer=torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize(
    ('make', 'is_declared', 'first', 'n_evaluations'),
    [
        (sam, True, True, 20),
        (partial(library.BSAM, num_data=40), True, True, 30),
        (schedulefree.SGDScheduleFreeClosure, True, False, 20),
        (Second, True, False, 20),
        (Nearby, False, False, 20),  # its class has `needs_closure`
    ],
)
def test_who_needs_a_closure_gets_one(
    make: Any, is_declared: bool, first: bool, n_evaluations: int
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
    train_with_closure(other, plain, first)
    if hasattr(plain, 'eval'):
        plain.eval()
    assert gap(model, other) == 0 and gap(model, start) > 0
    assert len(count) == n_evaluations


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


def test_the_user_declares_which_optimizers_need_a_closure() -> None:
    p = nn.Parameter(torch.ones(1))
    assert OptimWrapper(opt=Nearby([p], lr=LR)).needs_closure
    assert not OptimWrapper(opt=Second([p], lr=LR)).needs_closure
    assert OptimWrapper(opt=Second([p], lr=LR), needs_closure=True).needs_closure
    assert not OptimWrapper(opt=Nearby([p], lr=LR), needs_closure=False).needs_closure
    assert not OptimWrapper(opt=torch.optim.SGD([p], lr=LR)).needs_closure
    assert OptimWrapper(opt=torch.optim.LBFGS([p])).needs_closure


# ------------------------------------------------------------------------------ values by name


def test_hypers_are_set_by_text_and_by_a_list() -> None:
    learn = learner(net(), opt_func=Adam, splitter=split)
    learn.create_opt()
    learn.opt.hypers = [{'lr': '1e-3', 'mom': 0.5}, {'lr': 0.02}]
    learn.opt.hypers[-1]['lr'] = '3e-2'
    learn.opt.set_hyper('wd', '0.25')
    assert learn.opt.lrs == [0.001, 0.03]
    assert [h['mom'] for h in learn.opt.hypers] == [0.5, 0.9]
    assert [h['wd'] for h in learn.opt.hypers] == [0.25, 0.25]
