"""Changes of a paused fit, each compared with a plain loop of torch that makes the same change at the same batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fastcore.basics import noop
from torch import Tensor, nn
from torch.optim import lr_scheduler as torch_lr

from learnkit import SGD, Callback, Checkpoint, DataLoaders, Learner, mae
from learnkit.callbacks.schedule import LRScheduler, ParamScheduler
from learnkit.core.errors import OptionError
from learnkit.optim.annealing import SchedLin, combined_cos

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


def list_changes(learn: Learner) -> list[tuple[Any, ...]]:
    return [tuple(c[k] for k in ('ba', 'what', 'old', 'new')) for c in learn.history.changes]


def split(model: nn.Module) -> list[list[nn.Parameter]]:
    return [list(layer.parameters()) for layer in (model[0], model[2])]  # type: ignore[index]


def one_cycle(peak: float) -> Callable[[float], float]:
    f = combined_cos(0.25, peak / 25, peak, peak / 1e5)
    return lambda pct: float(f(pct))


def torch_loop(
    set_options: Callable[[int, torch.optim.Optimizer], None],
    n_epoch: int = 3,
    **options: Any,
) -> list[Tensor]:
    "Return the weights that a loop with an optimizer of torch reaches, whose options are set before each batch."
    model = make_model()
    opt = torch.optim.SGD([{'params': p} for p in split(model)], lr=0.1, **options)
    for i, (x, y) in enumerate(batches(n_epoch)):
        set_options(i, opt)
        opt.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()
    return list(model.parameters())


def set_group_options(*groups: Callable[[int], dict[str, Any]]) -> Any:
    def apply(i: int, opt: torch.optim.Optimizer) -> None:
        for group, find in zip(opt.param_groups, groups, strict=True):
            group.update(find(i))

    return apply


def test_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    learn = make()
    with learn.no_bar():
        learn.fit(3, pause_at='8ba')
    learn.remove_cb(learn.progress)
    learn.resume(lr=0.03)
    check(learn, loop(batches(3), lambda i: 0.1 if i < 8 else 0.03))
    assert capsys.readouterr().out.startswith('8ba: lr 0.1 -> 0.03\n')
    assert learn.history.changes == [{'ba': 8, 'ep': 1, 'what': 'lr', 'old': '0.1', 'new': '0.03'}]


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
    assert list_changes(learn) == [(8, 'loss', 'MSELoss', 'L1Loss')]


@pytest.mark.parametrize('first', ['freeze', 'unfreeze'])
def test_frozen_layers(first: str) -> None:
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


@pytest.mark.parametrize(
    ('change', 'factors'),
    [
        ({'lr': slice(0.02, 0.03)}, (2, 0.3)),
        ({'lr': [0.01, 0.05]}, (1, 0.5)),
        ({'lr_scale': 0.5}, (0.5, 0.5)),
    ],
)
def test_rates_of_several_groups(change: dict[str, Any], factors: tuple[float, ...]) -> None:
    learn = make(splitter=split)
    with learn.no_bar():
        learn.fit_one_cycle(3, slice(0.01, 0.1), pause_at='8ba')
        learn.resume(**change)
    rates = [one_cycle(0.01), one_cycle(0.1)]
    find = [
        lambda i, f=f, k=k: {'lr': f(i / 18) * (1 if i < 8 else k)}
        for f, k in zip(rates, factors, strict=True)
    ]
    check(learn, torch_loop(set_group_options(*find)))


def test_changes_of_a_changed_fit() -> None:
    learn = make()
    with learn.no_bar():
        learn.fit_flat_cos(2, 0.1, pause_at='4ba')
        learn.resume(lr=0.05, n_epoch=4, pause_at='8ba')
        learn.resume(lr_scale=0.5, n_epoch=3, pause_at='10ba')
        learn.resume(lr=0.1)
    f = combined_cos(0.75, 0.1, 0.1, 0.1 / 1e5)
    factor = lambda i: 1 if i < 4 else 0.5 if i < 8 else 0.25 if i < 10 else 1
    check(learn, loop(batches(3), lambda i: float(f(min(1, i / 12))) * factor(i)))
    assert [c[1:] for c in list_changes(learn)] == [
        ('lr', '0.1', '0.05'),
        ('n_epoch', '2', '4'),
        ('lr', '0.05', '0.025'),
        ('n_epoch', '4', '3'),
        ('lr', '0.025', '0.1'),
    ]


def test_hyperparameters_by_hand() -> None:
    learn = make(opt_func=partial(torch.optim.SGD, momentum=0.9), splitter=split)
    with learn.no_bar():
        learn.fit(3, pause_at='8ba')
        learn.opt.set_hypers(mom=0.5, wd=[0.1, 0.2])
        learn.resume(lr=0.03, pause_at='12ba')
        learn.wd = 0.3
        learn.lr = 0.06
        learn.resume()

    def find(wd: float) -> Callable[[int], dict[str, Any]]:
        def options(i: int) -> dict[str, Any]:
            if i < 8:
                return {'momentum': 0.9}
            if i < 12:
                return {'lr': 0.03, 'momentum': 0.5, 'weight_decay': wd}
            return {'lr': 0.06, 'momentum': 0.5, 'weight_decay': 0.3}

        return options

    check(learn, torch_loop(set_group_options(find(0.1), find(0.2)), momentum=0.9))
    assert list_changes(learn) == [
        (8, 'lr', '0.1', '0.03'),
        (8, 'mom', '0.9', '0.5'),
        (8, 'wd', '0', '0.1, 0.2'),
        (12, 'lr', '0.03', '0.06'),
        (12, 'wd', '0.1, 0.2', '0.3'),
    ]


def test_a_hyperparameter_that_the_schedule_sets() -> None:
    learn = make()
    with learn.no_bar():
        learn.fit_one_cycle(3, 0.1, pause_at='8ba')
        learn.opt.set_hypers(lr=0.5)
        with pytest.warns(UserWarning, match=r'lr was set to 0\.5 .* ParamScheduler'):
            learn.resume()
    check(learn, loop(batches(3), lambda i: one_cycle(0.1)(i / 18)))
    assert not learn.history.changes


SCHEDULERS: dict[str, tuple[str, Any]] = {
    'step': ('epoch', partial(torch_lr.StepLR, step_size=1, gamma=0.5)),
    'cosine': ('batch', partial(torch_lr.CosineAnnealingLR, T_max=18)),
    'one cycle': ('batch', partial(torch_lr.OneCycleLR, max_lr=0.1, total_steps=18)),
    'cyclic': ('batch', partial(torch_lr.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3)),
    'lambda': ('batch', partial(torch_lr.LambdaLR, lr_lambda=lambda i: 1 / (1 + i))),
    'sequential': (
        'batch',
        lambda opt: torch_lr.SequentialLR(
            opt, [torch_lr.LinearLR(opt, 0.1, 1, 5), torch_lr.ExponentialLR(opt, 0.9)], [5]
        ),
    ),
}


@pytest.mark.parametrize('change', [{'lr': 0.05}, {'lr_scale': 0.5}])
@pytest.mark.parametrize('name', list(SCHEDULERS))
def test_a_scheduler_of_torch(name: str, change: dict[str, float], tmp_path: Path) -> None:
    by, scheduler = SCHEDULERS[name]
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = scheduler(opt)
    decay = lambda i: 0.0 if i < 8 else 0.2
    for i, (x, y) in enumerate(batches(3)):
        rate = opt.param_groups[0]['lr']
        opt.param_groups[0].update(lr=rate * (1 if i < 8 else 0.5), weight_decay=decay(i))
        opt.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()
        opt.param_groups[0]['lr'] = rate
        if by == 'batch' or i % N == N - 1:
            plain.step()

    def make_scheduled() -> Learner:
        opt_func = partial(torch.optim.SGD, momentum=0.9)
        cbs = [LRScheduler(scheduler, by=by), Checkpoint('4ba', keep_last=None)]
        learn = make(opt_func=opt_func, path=tmp_path, cbs=cbs)
        learn.logger = noop
        return learn

    learn = make_scheduled()
    learn.fit(3, pause_at='8ba')
    learn.opt.set_hypers(wd=0.2)
    learn.resume(**change, pause_at='13ba')
    learn.resume()
    check(learn, list(model.parameters()))
    again = make_scheduled()
    for path in sorted(tmp_path.rglob('*.ckpt'))[-2:]:
        path.unlink()
    again.fit(3, resume=True)
    check(again, list(model.parameters()))
    assert again.history.changes == learn.history.changes and len(learn.history.changes) == 2
    learn.fit(1)
    assert learn.recorder.lrs[0] == pytest.approx(make_rates(scheduler)[0])


def make_rates(scheduler: Any) -> list[float]:
    "Return the first rate of a scheduler."
    opt = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    scheduler(opt)
    return [group['lr'] for group in opt.param_groups]


def test_changes_survive_checkpoints(tmp_path: Path) -> None:
    def make_saved() -> Learner:
        learn = make(splitter=split, path=tmp_path, cbs=Checkpoint('1ba'))
        learn.logger = noop
        return learn

    rates = slice(0.01, 0.1)
    learn = make_saved()
    learn.fit_one_cycle(2, rates, pause_at='8ba')
    learn.resume(lr=[0.005, 0.2], n_epoch=3, pause_at='10ba')
    for stop in ('13ba', '15ba'):
        learn = make_saved()
        learn.fit_one_cycle(3, rates, resume=True, pause_at=stop)
    learn = make_saved()
    learn.fit_one_cycle(3, rates, resume=True)
    peaks = [one_cycle(0.01), one_cycle(0.1)]
    find = [
        lambda i, f=f, k=k: {'lr': f(min(1, i / 12)) * (1 if i < 8 else k)}
        for f, k in zip(peaks, (0.5, 2), strict=True)
    ]
    check(learn, torch_loop(set_group_options(*find)))
    assert [c[1] for c in list_changes(learn)] == ['lr', 'n_epoch']


def test_a_replaced_layer() -> None:
    def make_head() -> nn.Module:
        torch.manual_seed(3)
        return nn.Linear(4, 1)

    learn = make(opt_func=torch.optim.Adam, lr=0.01, splitter=split)
    with learn.no_bar():
        learn.fit(3, pause_at='8ba')
        learn.model[2] = make_head()
        learn.resume()
    model = make_model()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for i, (x, y) in enumerate(batches(3)):
        if i == 8:
            model[2] = make_head()  # type: ignore[index]
            states = {p: opt.state[p] for p in model[0].parameters()}  # type: ignore[index]
            opt = torch.optim.Adam(model.parameters(), lr=0.01)
            opt.state.update(states)
        opt.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()
    check(learn, list(model.parameters()))
    linear = 'Linear(in_features=4, out_features=1, bias=True)'
    assert list_changes(learn) == [(8, 'layer 2', linear, linear)]


def test_another_model_and_another_optimizer() -> None:
    learn = make()
    with learn.no_bar():
        learn.fit(3, pause_at='8ba')
        learn.opt_func = torch.optim.Adam
        learn.create_opt()
        learn.resume(pause_at='10ba')
        learn.model = make_model()
        learn.resume()
    assert [c[1:] for c in list_changes(learn)] == [
        ('optimizer', 'SGD', 'Adam'),
        ('model', 'Sequential', 'Sequential'),
    ]
    assert learn.time.ba == 18 and isinstance(learn.opt[0], torch.optim.Adam)


def test_metrics_from_the_next_evaluation_on() -> None:
    learn = Learner(
        DataLoaders.from_tensors((X, Y), (X, Y), bs=BS, shuffle=False), make_model(), nn.MSELoss()
    )
    learn.logger = noop
    learn.fit(2, pause_at='8ba')
    learn.metrics = [mae]
    learn.resume()
    pred, target = learn.get_preds()
    expected = (pred - target).abs().mean().item()
    assert learn.history[-1]['mae'] == pytest.approx(expected, abs=1e-6)
    assert learn.history[0].get('mae') is None
    assert list_changes(learn) == [(8, 'metrics', 'none', 'mae')]


def test_a_failed_resume_records_each_change_once() -> None:
    learn = make()
    learn.logger = noop
    learn.fit(3, pause_at='8ba')
    learn.loss_func = nn.L1Loss()

    def fail(cb: Any) -> None:
        raise ValueError('a bug')

    learn.add_cb(failing := Callback(before_fit=fail))
    with pytest.raises(ValueError, match='a bug'):
        learn.resume()
    learn.remove_cb(failing)
    learn.resume()
    assert [c[1] for c in list_changes(learn) if c[1] == 'loss'] == ['loss']
    check(learn, loop(batches(3), loss=lambda i: nn.MSELoss() if i < 8 else nn.L1Loss()))


def test_rates_that_are_refused() -> None:
    learn = make()
    learn.logger = noop
    learn.fit(3, cbs=ParamScheduler({'lr': SchedLin(0.1, 0.01)}), pause_at='8ba')
    with pytest.raises(OptionError, match='lr_scale='):
        learn.resume(lr=0.05)
    for factor in (0, -1, float('nan'), 'half'):
        with pytest.raises(OptionError, match='lr_scale='):
            learn.resume(lr_scale=factor)  # type: ignore[arg-type]
    learn.resume(lr_scale=0.5)
    check(learn, loop(batches(3), lambda i: (0.1 - 0.09 * i / 18) * (1 if i < 8 else 0.5)))
    learn.fit_one_cycle(1, 0.0, pause_at='20ba')
    with pytest.raises(OptionError, match='cannot be scaled'):
        learn.resume(lr=0.05)
