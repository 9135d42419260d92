"""Steps under mixed precision are those of a loop by hand in which each forward pass has its own autocast block."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fastcore.basics import noop
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import EMA, SAM, Callback, CancelStepException, Learner, MixedPrecision
from tests.helpers.comparing import same
from tests.helpers.learners import quiet_learner

LR, N_STEPS, RHO = 0.1, 3, 0.05
G = torch.Generator().manual_seed(1)
BATCHES = [(torch.randn(8, 6, generator=G), torch.randn(8, 1, generator=G)) for _ in range(3)]
bf16 = partial(torch.autocast, 'cpu', dtype=torch.bfloat16)


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def train(kind: type[Learner] = Learner, *cbs: Any, **options: Any) -> Learner:
    options = {'opt_func': torch.optim.SGD, 'lr': LR, **options}
    learn = kind((BATCHES, BATCHES[:1]), net(), nn.MSELoss(), **options)
    learn.add_cbs([MixedPrecision('bf16'), *cbs])
    learn.logger = noop
    learn.fit(1)
    return learn


# -- loops by hand ---------------------------------------------------------------------------------


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with bf16():
        return F.mse_loss(model(x).float(), y)


def step(model: nn.Module, opt: torch.optim.Optimizer, *batch: Tensor) -> None:
    opt.zero_grad()
    loss_of(model, *batch).backward()
    opt.step()


def step_often(model: nn.Module, opt: torch.optim.Optimizer, *batch: Tensor) -> None:
    for _ in range(N_STEPS):
        step(model, opt, *batch)


def step_lbfgs(model: nn.Module, opt: torch.optim.Optimizer, *batch: Tensor) -> None:
    def evaluate() -> Tensor:
        opt.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        return loss

    opt.step(evaluate)


def step_sam(model: nn.Module, opt: torch.optim.Optimizer, *batch: Tensor) -> None:
    opt.zero_grad()
    loss_of(model, *batch).backward()
    grads = [p.grad for p in model.parameters()]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    before = weights(model)
    with torch.no_grad():
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.add_(grad * (RHO / (norm + 1e-12)))
    opt.zero_grad()
    loss_of(model, *batch).backward()
    with torch.no_grad():
        for p, value in zip(model.parameters(), before, strict=True):
            p.copy_(value)
    opt.step()


def step_parts(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    opt.zero_grad()
    for part in zip(x.split(4), y.split(4), strict=True):
        (loss_of(model, *part) / 2).backward()
    opt.step()


# -- custom loops ----------------------------------------------------------------------------------


class Verbs(Learner):
    def train_batch(self) -> None:
        for _ in range(N_STEPS):
            self.optimize(self.compute_loss(self.forward(self.model, self.x)))


class Functions(Learner):
    def train_batch(self) -> None:
        for _ in range(N_STEPS):
            self.optimize(lambda: self.compute_loss(self.forward(self.model, self.x)))


class OneFunction(Learner):
    def train_batch(self) -> None:
        self.optimize(lambda: self.compute_loss(self.forward(self.model, self.x)))


class OneBlock(Learner):
    "Steps inside one block of the callbacks' contexts."

    n_steps = N_STEPS

    def train_batch(self) -> None:
        with self.contexts('forward'):
            for _ in range(self.n_steps):
                self.optimize(lambda: self.compute_loss(self.forward(self.model, self.x)))


class OneStepInBlock(OneBlock):
    n_steps = 1


class InForward(Learner):
    "Steps inside one forward pass."

    def train_batch(self) -> None:
        self.forward(self.train_often)

    def train_often(self) -> Tensor:
        for _ in range(N_STEPS):
            pred = self.model(self.x)
            self.optimize(self.loss_func(pred.float(), self.y))
        return pred


LBFGS = partial(torch.optim.LBFGS, max_iter=4)
CASES: dict[str, tuple[Callable[[], Learner], Callable[..., None], Any]] = {
    'one block for several steps': (partial(train, OneBlock), step_often, torch.optim.SGD),
    'ordinary batches': (train, step, torch.optim.SGD),
    'verbs': (partial(train, Verbs), step_often, torch.optim.SGD),
    'functions': (partial(train, Functions), step_often, torch.optim.SGD),
    'steps in a forward pass': (partial(train, InForward), step_often, torch.optim.SGD),
    'LBFGS': (partial(train, opt_func=LBFGS), step_lbfgs, LBFGS),
    'LBFGS by a function': (partial(train, OneFunction, opt_func=LBFGS), step_lbfgs, LBFGS),
    'LBFGS in one block': (partial(train, OneStepInBlock, opt_func=LBFGS), step_lbfgs, LBFGS),
    'SAM': (lambda: train(Learner, SAM(RHO)), step_sam, torch.optim.SGD),
    'SAM by a function': (lambda: train(OneFunction, SAM(RHO)), step_sam, torch.optim.SGD),
    'SAM in one block': (lambda: train(OneStepInBlock, SAM(RHO)), step_sam, torch.optim.SGD),
    'microbatches': (partial(train, microbatch=4), step_parts, torch.optim.SGD),
}


@pytest.mark.parametrize('name', CASES)
def test_weights_are_those_of_a_loop_by_hand(name: str) -> None:
    run, take_step, opt_func = CASES[name]
    model = net()
    opt = opt_func(model.parameters(), lr=LR)
    for batch in BATCHES:
        take_step(model, opt, *batch)
    assert same(weights(run().model), weights(model))


class Repeating(Learner):
    "Computes the loss before and after a step, in one block."

    def train_batch(self) -> None:
        with self.contexts('forward'):
            before = self.compute()
            self.optimize(self.compute)
            self.difference = (self.compute() - before).item()

    def compute(self) -> Tensor:
        return self.compute_loss(self.forward(self.model, self.x))


def test_a_cancelled_step_in_a_block_changes_nothing() -> None:
    def cancel(cb: Callback) -> None:
        raise CancelStepException

    assert train(Repeating, SAM(5.0)).difference != 0
    cancelled = train(Repeating, SAM(5.0), Callback(before_step=cancel, order=6))
    assert cancelled.difference == 0


def test_a_block_of_the_user_around_the_fit() -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=LR)
    for batch in BATCHES:
        step(model, opt, *batch)
    learn = quiet_learner(BATCHES, net(), nn.MSELoss(), opt_func=torch.optim.SGD, lr=LR)
    with bf16():
        learn.fit(1)
    assert same(weights(learn.model), weights(model))


def test_loaded_weights_within_a_block_of_the_user(tmp_path: Path) -> None:
    learn = train(path=tmp_path)
    expected = learn.validate()[0]
    learn.save('trained')
    learn.model.load_state_dict(net().state_dict())
    with bf16():
        before = loss_of(learn.model, *BATCHES[0]).item()
        learn.load('trained')
        assert learn.validate()[0] == pytest.approx(expected) != pytest.approx(before)


class Tied(nn.Module):
    "Uses a weight twice."

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh()).mean(1, keepdim=True)


def test_a_weight_is_cast_once_in_an_ordinary_batch() -> None:
    results = []
    for cache_enabled in (True, False):
        model = Tied()
        opt = torch.optim.SGD(model.parameters(), lr=LR)
        for x, y in BATCHES:
            opt.zero_grad()
            with bf16(cache_enabled=cache_enabled):
                loss = F.mse_loss(model(x).float(), y)
            loss.backward()
            opt.step()
        results.append(weights(model))
    learn = Learner(BATCHES, Tied(), nn.MSELoss(), opt_func=torch.optim.SGD, lr=LR)
    learn.add_cb(MixedPrecision('bf16')).logger = noop
    learn.fit(1)
    assert same(weights(learn.model), results[0]) and not same(results[0], results[1])


# -- averages --------------------------------------------------------------------------------------


def test_a_teacher_within_the_forward_pass_has_the_average() -> None:
    def note(cb: Callback) -> None:
        if cb.training:
            with torch.no_grad(), cb.learn.ema.applied():
                seen.append(cb.learn.model(cb.x).float())
            again.append(cb.learn.model(cb.x).float().detach())
            students.append(cb.pred.float().detach())

    seen: list[Tensor] = []
    again: list[Tensor] = []
    students: list[Tensor] = []
    learn = train(Learner, EMA(0.5, warmup=None), Callback(after_pred=note))
    model, expected = net(), []
    opt = torch.optim.SGD(model.parameters(), lr=LR)
    teacher = copy.deepcopy(model)
    for x, y in BATCHES:
        with torch.no_grad(), bf16():
            expected.append(teacher(x).float())
        step(model, opt, x, y)
        with torch.no_grad():
            for average, p in zip(teacher.parameters(), model.parameters(), strict=True):
                average.lerp_(p, 0.5)
    for pred, other in zip(seen, expected, strict=True):
        torch.testing.assert_close(pred, other, rtol=0, atol=2e-2)
    assert same(again, students)
    assert same(weights(learn.model), weights(model))
    assert (seen[2] - students[2]).abs().max() > 0.05


def test_an_evaluation_within_a_forward_pass_has_the_average() -> None:
    learn = train(Learner, EMA(0.5, warmup=None))
    x = BATCHES[0][0]
    expected = learn.validate()[0]
    with bf16():
        own = learn.model(x)
    with learn.contexts('forward'):
        assert torch.equal(learn.model(x), own)
        assert learn.validate()[0] == expected
        assert torch.equal(learn.model(x), own)
    assert expected != loss_of(learn.model, *BATCHES[0]).item()


class Switching(torch.optim.SGD):
    "Has zero weights for evaluations, as an extreme ScheduleFree."

    kept: list[Tensor] | None = None

    def eval(self) -> None:
        if self.kept is None:
            self.kept = [p.detach().clone() for p in self.param_groups[0]['params']]
            for p in self.param_groups[0]['params']:
                p.data.zero_()

    def train(self) -> None:
        if self.kept is not None:
            for p, value in zip(self.param_groups[0]['params'], self.kept, strict=True):
                p.data.copy_(value)
            self.kept = None


def test_an_evaluation_within_a_forward_pass_has_the_weights_of_the_optimizer() -> None:
    def look(cb: Callback) -> None:
        if cb.training:
            losses.append(cb.learn.validate()[0])
            with cb.learn.opt.evaluating():
                zeros.append(cb.learn.model(cb.x).detach())
            differences.append(cb.learn.model(cb.x).detach() - cb.pred.detach())

    losses: list[float] = []
    zeros: list[Tensor] = []
    differences: list[Tensor] = []
    train(Learner, Callback(after_pred=look), opt_func=Switching)
    expected = BATCHES[0][1].square().mean().item()
    assert losses == pytest.approx([expected] * len(BATCHES))
    assert not torch.cat([*zeros, *differences]).any()
