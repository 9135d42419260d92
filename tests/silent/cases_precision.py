"""Steps, averages and evaluations inside an autocast block, against blocks of their own."""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import EMA, SAM, Callback, Learner, MixedPrecision
from learnkit.interop import from_lightning
from tests.silent.cases import case

LR, RHO = 0.1, 0.05
G = torch.Generator().manual_seed(1)
BATCHES = [(torch.randn(8, 6, generator=G), torch.randn(8, 1, generator=G)) for _ in range(2)]
bf16 = partial(torch.autocast, 'cpu', dtype=torch.bfloat16)
LBFGS = partial(torch.optim.LBFGS, max_iter=4)
Pair = tuple[Any, Any]


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def quiet(learn: Any) -> Any:
    learn.logger = lambda row: None
    with learn.no_bar():
        learn.fit(1)
    return learn


def train(kind: type[Learner] = Learner, *cbs: Any, **options: Any) -> float:
    "Return the loss of the first batch after training."
    options = {'opt_func': torch.optim.SGD, 'lr': LR, **options}
    cbs = (MixedPrecision('bf16'), *cbs)
    learn = quiet(kind(BATCHES, net(), nn.MSELoss(), cbs=cbs, **options))
    return loss_of(learn.model, *BATCHES[0]).item()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with bf16():
        return F.mse_loss(model(x).float(), y)


def by_hand(n_steps: int = 1, opt_func: Any = torch.optim.SGD, rho: float = 0.0) -> float:
    "Return the loss of the first batch after a loop with a block for each forward pass."
    model = net()
    opt = opt_func(model.parameters(), lr=LR)
    params = list(model.parameters())

    def evaluate(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    for batch in BATCHES:
        for _ in range(n_steps):
            if opt_func is LBFGS:
                opt.step(partial(evaluate, *batch))
                continue
            evaluate(*batch)
            if rho:
                before = [p.detach().clone() for p in params]
                grads = [p.grad for p in params]
                norm = torch.stack([g.norm() for g in grads]).norm()
                for p, g in zip(params, grads, strict=True):
                    p.data.add_(g * (rho / norm))
                evaluate(*batch)
                for p, value in zip(params, before, strict=True):
                    p.data.copy_(value)
            opt.step()
    return loss_of(model, *BATCHES[0]).item()


class OneBlock(Learner):
    n_steps = 3

    def train_batch(self) -> None:
        with self.contexts('forward'):
            for _ in range(self.n_steps):
                self.optimize(lambda: self.compute_loss(self.forward(self.model, self.x)))


class OneStep(OneBlock):
    n_steps = 1


class InForward(Learner):
    def train_batch(self) -> None:
        def step_often() -> Tensor:
            for _ in range(3):
                pred = self.model(self.x)
                self.optimize(self.loss_func(pred.float(), self.y))
            return pred

        self.forward(step_often)


class Manual(nn.Module):
    "Three steps in each batch, in the style of a LightningModule."

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        opt = self.optimizers()  # type: ignore[operator]
        for _ in range(3):
            loss = F.mse_loss(self.net(batch[0]).float(), batch[1])
            self.losses.append(loss.item())
            opt.zero_grad()
            self.manual_backward(loss)  # type: ignore[operator]
            opt.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


@case(
    'precision',
    'losses of three manual steps of a LightningModule',
    old='[1.55512, 1.55512, 1.55512]',
)
def manual_steps() -> Pair:
    learn = quiet(from_lightning(Manual(), BATCHES[:1], MixedPrecision('bf16')))
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for _ in range(3):
        loss = loss_of(model, *BATCHES[0])
        losses.append(loss.item())
        opt.zero_grad()
        loss.backward()
        opt.step()
    return learn.model.losses, losses


@case('precision', 'three steps in one block', old='2.12492')
def one_block() -> Pair:
    return train(OneBlock), by_hand(3)


@case('precision', 'three steps in one forward pass', old='2.12492')
def in_forward() -> Pair:
    return train(InForward), by_hand(3)


@case('precision', 'LBFGS in one block', old='1.52139')
def lbfgs() -> Pair:
    return train(OneStep, opt_func=LBFGS), by_hand(opt_func=LBFGS)


@case('precision', 'SAM in one block', old='1.53634')
def sam() -> Pair:
    return train(OneStep, SAM(RHO)), by_hand(rho=RHO)


@case('precision', 'autocast around a fit', old='1.45981')
def around_a_fit() -> Pair:
    learn = Learner(BATCHES, net(), nn.MSELoss(), opt_func=torch.optim.SGD, lr=LR)
    with bf16():
        quiet(learn)
    return loss_of(learn.model, *BATCHES[0]).item(), by_hand()


@case('precision', 'output of the average in a forward pass of the model', old='-0.0301514')
def teacher() -> Pair:
    def look(cb: Callback) -> None:
        if cb.training:
            with torch.no_grad(), cb.learn.ema.applied():
                seen.append(cb.learn.model(cb.x).float())

    seen: list[Tensor] = []
    cbs = [MixedPrecision('bf16'), EMA(0.5, warmup=None), Callback(after_pred=look)]
    learn = Learner(BATCHES, net(), nn.MSELoss(), opt_func=torch.optim.SGD, lr=LR, cbs=cbs)
    quiet(learn)
    model = net()
    average = copy.deepcopy(model)
    loss_of(model, *BATCHES[0]).backward()
    for p, a in zip(model.parameters(), average.parameters(), strict=True):
        p.data -= LR * p.grad
        a.data.lerp_(p.data, 0.5)
    with torch.no_grad(), bf16():
        return seen[1][0].item(), average(BATCHES[1][0])[0].item()
