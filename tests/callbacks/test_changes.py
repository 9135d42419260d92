"""Changes of a paused fit, each compared with a plain loop of torch that makes the same change at the same batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import SGD, Callback, DataLoaders, Learner
from learnkit.core.errors import OptionError
from learnkit.optim.annealing import combined_cos

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)
BS, N = 4, 6  # samples of a batch, batches of an epoch


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def make_dls(bs: int = BS) -> DataLoaders:
    return DataLoaders.from_tensors((X, Y), bs=bs, shuffle=False, device='cpu')


def make(**options: Any) -> Learner:
    options = {'opt_func': torch.optim.SGD, 'lr': 0.1, 'loss_func': nn.MSELoss(), **options}
    return Learner(make_dls(), make_model(), **options)


def loop(
    batches: list[Any],
    rate: Callable[[int], float] = lambda i: 0.1,
    loss: Callable[[int], Callable[[Tensor, Tensor], Tensor]] = lambda i: nn.MSELoss(),
    trained: Callable[[int], slice] = lambda i: slice(None),
) -> list[Tensor]:
    "Return the weights that a loop by hand reaches."
    model = make_model()
    params = list(model.parameters())
    for i, (x, y) in enumerate(batches):
        value = loss(i)(model(x), y)
        grads = torch.autograd.grad(value, params)
        with torch.no_grad():
            for p, grad in list(zip(params, grads, strict=True))[trained(i)]:
                p -= rate(i) * grad
    return params


def batches(n_epoch: int, bs: int = BS) -> list[Any]:
    return [*zip(X.split(bs), Y.split(bs), strict=True)] * n_epoch


def check(learn: Learner, expected: list[Tensor]) -> None:
    for p, q in zip(learn.model.parameters(), expected, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    learn = make()
    with learn.no_bar():
        learn.fit(3, pause_at='8ba')
    learn.remove_cb(learn.progress)
    learn.resume(lr=0.03)
    check(learn, loop(batches(3), lambda i: 0.1 if i < 8 else 0.03))
    assert capsys.readouterr().out.startswith('8ba: lr 0.1 -> 0.03\n')
    assert learn.history.changes == [{'ba': 8, 'what': 'lr', 'old': '0.1', 'new': '0.03'}]


@pytest.mark.parametrize('change', [{'lr': 0.05}, {'lr_scale': 0.5}])
def test_the_peak_of_a_schedule(change: dict[str, float]) -> None:
    learn = make()
    with learn.no_bar():
        learn.fit_one_cycle(3, 0.1, pause_at='8ba')
        learn.resume(**change)
    f = combined_cos(0.25, 0.1 / 25, 0.1, 0.1 / 1e5)
    check(learn, loop(batches(3), lambda i: float(f(i / 18)) * (1 if i < 8 else 0.5)))


@pytest.mark.parametrize('stretch', [False, True])
def test_a_number_of_epochs(stretch: bool) -> None:
    learn = make()
    with learn.no_bar():
        learn.fit_one_cycle(2, 0.1, pause_at='8ba')
        learn.resume(n_epoch=4, stretch=stretch)
    f = combined_cos(0.25, 0.1 / 25, 0.1, 0.1 / 1e5)
    later = lambda i: float(f(i / 24 if stretch else min(1.0, i / 12)))
    check(learn, loop(batches(4), lambda i: float(f(i / 12)) if i < 8 else later(i)))
    assert len(learn.history) == 4


def test_a_loss_function() -> None:
    learn = make()
    with learn.no_bar():
        learn.fit(3, pause_at='8ba')
        learn.loss_func = nn.L1Loss()
        learn.resume()
    check(learn, loop(batches(3), loss=lambda i: nn.MSELoss() if i < 8 else nn.L1Loss()))
    assert learn.history.changes == [{'ba': 8, 'what': 'loss', 'old': 'MSELoss', 'new': 'L1Loss'}]


@pytest.mark.parametrize('first', ['freeze', 'unfreeze'])
def test_frozen_layers(first: str) -> None:
    split = lambda model: [list(model[0].parameters()), list(model[2].parameters())]
    learn = make(splitter=split)
    getattr(learn, first)()
    with learn.no_bar():
        learn.fit(3, pause_at='8ba')
        learn.unfreeze() if first == 'freeze' else learn.freeze()
        learn.resume()
    is_head = lambda i: (i < 8) == (first == 'freeze')
    check(learn, loop(batches(3), trained=lambda i: slice(2 if is_head(i) else 0, None)))
    assert [c['what'] for c in learn.history.changes] == ['frozen']


def test_a_batch_size_from_the_next_epoch_on() -> None:
    learn = make()
    with learn.no_bar():
        learn.fit(3, pause_at='8ba')
        learn.dls = make_dls(8)
        learn.resume()
    check(learn, loop(batches(2) + batches(1, 8)))
    assert learn.time.ba == 12 + 3
    assert [c['what'] for c in learn.history.changes] == ['train loader']


def test_callbacks_and_weights() -> None:
    class Halve(Callback):
        def before_backward(self) -> None:
            self.learn.loss_grad = self.learn.loss_grad / 2

    learn = make(opt_func=SGD)
    with learn.no_bar():
        learn.fit(2, cbs=Halve(), pause_at='4ba')
        assert learn.paused is not None
        learn.paused.cbs.clear()
        learn.resume(pause_at='6ba')
        learn.add_cb(halve := Halve())
        learn.resume(pause_at='9ba')
        learn.remove_cb(halve)
        learn.resume()
    factor = lambda i: 0.5 if i < 4 or 6 <= i < 9 else 1
    check(learn, loop(batches(2), rate=lambda i: 0.1 * factor(i)))
    assert [c['ba'] for c in learn.history.changes] == [4, 6, 9]


def test_what_is_refused() -> None:
    learn = make()
    with learn.no_bar():
        learn.fit(3, pause_at='8ba')
        with pytest.raises(OptionError, match='lr_scale'):
            learn.resume(lr=0.1, lr_scale=2)
        with pytest.raises(OptionError, match='n_epoch=1'):
            learn.resume(n_epoch=1)
        learn.resume()
    check(learn, loop(batches(3)))
