"""Compare sharpness-aware minimization with a plain loop, bit for bit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import Callback, CancelBatchException, Learner, Recorder
from learnkit.callbacks.accumulation import GradientAccumulation
from learnkit.callbacks.sam import SAM
from learnkit.callbacks.training import GradientClip
from learnkit.core.errors import OptionError
from tests.helpers.learners import bare_learner

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    'SGD': partial(torch.optim.SGD, momentum=0.9),
    'AdamW': torch.optim.AdamW,
}


def net(dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 2))


def batches(n: int = 4) -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 3, generator=gen), torch.randn(8, 2, generator=gen)) for _ in range(n)]


def learner(
    model: nn.Module, *cbs: Any, opt: Any = OPTIMIZERS['SGD'], train: Any = None, **kwargs: Any
) -> Learner:
    return bare_learner(
        [*batches()] if train is None else train,
        model,
        F.mse_loss,
        opt_func=opt,
        lr=0.05,
        cbs=cbs,
        recorder=None,
        **{'wd_bn_bias': True, **kwargs},
    )


def by_hand(
    model: nn.Module,
    opt_func: Any,
    rho: float = 0.05,
    pieces: int = 1,
    max_norm: float | None = None,
) -> nn.Module:
    "Train two epochs in plain torch: move rho up the gradient, take the gradient, move back, step."
    opt, params = opt_func(model.parameters(), lr=0.05), list(model.parameters())

    def both_passes(x: Tensor, y: Tensor) -> None:
        size = len(x) // pieces
        for a, b in zip(x.split(size), y.split(size), strict=True):
            loss = F.mse_loss(model(a), b)
            (loss * (size / len(x)) if pieces > 1 else loss).backward()

    for x, y in batches() * 2:
        both_passes(x, y)
        with torch.no_grad():
            before = [p.clone() for p in params]
            norm = torch.norm(torch.stack([p.grad.norm() for p in params]))
            for p in params:
                p.add_(p.grad * (rho / (norm + 1e-12)))
        opt.zero_grad()
        both_passes(x, y)
        with torch.no_grad():
            for p, value in zip(params, before, strict=True):
                p.copy_(value)
        if max_norm:
            nn.utils.clip_grad_norm_(params, max_norm)
        opt.step()
        opt.zero_grad()
    return model


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize('opt', OPTIMIZERS)
@pytest.mark.parametrize('options', [{}, {'rho': 0.5}], ids=str)
@pytest.mark.parametrize('pieces', [1, 2])
def test_it_is_the_loop_written_by_hand(opt: str, options: dict[str, Any], pieces: int) -> None:
    microbatch = None if pieces == 1 else 4
    learn = learner(net(), SAM(**options), opt=OPTIMIZERS[opt], microbatch=microbatch)
    torch.manual_seed(7)
    learn.fit(2)
    expected = net()
    torch.manual_seed(7)
    assert equal(learn.model, by_hand(expected, OPTIMIZERS[opt], pieces=pieces, **options))
    ordinary = net()
    torch.manual_seed(7)
    learner(ordinary, opt=OPTIMIZERS[opt], microbatch=None if pieces == 1 else 4).fit(2)
    assert not equal(learn.model, ordinary)


def test_clipping_acts_on_the_second_gradient() -> None:
    learn = learner(net(0.0), GradientClip(0.1), SAM)
    learn.fit(2)
    assert equal(learn.model, by_hand(net(0.0), OPTIMIZERS['SGD'], max_norm=0.1))


def test_what_is_recorded_is_of_the_first_pass() -> None:
    losses: list[Tensor] = []
    seen: dict[str, list[Any]] = {'after_loss': [], 'after_batch': []}
    watch = Callback(
        after_loss=lambda cb: seen['after_loss'].append(cb.loss),
        after_batch=lambda cb: seen['after_batch'].append((cb.loss, cb.pred)),
    )
    watcher = Callback(
        before_batch=lambda cb: losses.append(F.mse_loss(model(cb.x), cb.y).detach())
    )
    learn = learner(model := net(0.0), SAM, watch, Recorder, watcher)
    learn.logger = lambda row: None
    learn.fit(1)
    assert [loss for loss, _ in seen['after_batch']] == losses and len(learn.recorder.losses) == 4
    first, second = seen['after_loss'][::2], seen['after_loss'][1::2]
    assert first == losses and all(b > a for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    'where', ['before_pred', 'after_loss', 'before_backward', 'after_backward']
)
@pytest.mark.parametrize('error', [RuntimeError, KeyboardInterrupt, CancelBatchException])
def test_whatever_ends_the_second_pass_the_weights_are_back(
    where: str, error: type[BaseException]
) -> None:
    model = net()
    start = [p.detach().clone() for p in model.parameters()]

    def fail(cb: Any) -> None:
        if cb.learn.run.repeating:
            raise error

    learn = learner(model, SAM, train=batches(1))
    if error is CancelBatchException:
        learn.fit(1, cbs=Callback(**{where: fail}))
    else:
        with pytest.raises(error):
            learn.fit(1, cbs=Callback(**{where: fail}))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))
    assert not learn.run.repeating and learn.sam._weights == []
    learn.fit(1)
    assert learn.opt.n_steps == 1 and not equal(model, net())


def test_a_scaled_loss_gives_the_same_step() -> None:
    "Scales before backward and unscales before the step, like fp16 mixed precision."

    class Scaled(Callback):
        order = 10

        def before_backward(self) -> None:
            self.learn.loss_grad = self.loss_grad * 1024.0

        def before_step(self) -> None:
            for p in self.opt.parameters():
                p.grad /= 1024.0

    learn = learner(net(0.0), Scaled, SAM)
    learn.fit(2)
    expected = by_hand(net(0.0), OPTIMIZERS['SGD'])
    for p, q in zip(learn.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize(
    'options',
    [
        {'rho': -1},
        {'rho': float('nan')},
        {'rho': 'x'},
        {'rho': float('inf')},
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        SAM(**options)


def test_what_does_not_go_together_is_refused_before_training() -> None:
    learn = learner(model := net(), SAM, GradientAccumulation)
    with pytest.raises(OptionError, match='GradientAccumulation'):
        learn.fit(1)
    learn = learner(model, SAM, opt=torch.optim.LBFGS)
    with pytest.raises(OptionError, match='LBFGS'):
        learn.fit(1)
    assert equal(model, net())
