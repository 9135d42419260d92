"""Compare the optimizer monitors with plain torch on clones of the weights."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import (
    Callback,
    DataLoaders,
    GradientClip,
    Learner,
    LRScheduler,
    MixedPrecision,
)
from learnkit.callbacks.recorder import Recorder
from learnkit.core.errors import CancelStepException, TimeError
from learnkit.monitors.activation_monitor import ActivationMonitor
from learnkit.monitors.memory import MemoryMonitor
from learnkit.monitors.optimizer_monitor import LRMonitor, OptimizerMonitor
from learnkit.monitors.speed import RuntimeEstimator, SpeedMonitor
from learnkit.monitors.system_monitor import SystemMonitor
from tests.helpers.learners import quiet_learner, quiet_synth_learner
from tests.helpers.measuring import transfers


class Seen(Callback):
    "Record logged values with the index of their batch."

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}

    def receive_log(self, name: str, value: Any, weight: Any = 1, shown: bool = True) -> None:
        row = self.rows.setdefault(self.learn.iter, {})
        assert name not in row
        row[name] = value

    def of(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows.values() if name in row]


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4, dtype=dtype), nn.Linear(4, 2, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def data(dtype: torch.dtype = torch.float64, bs: int = 8) -> DataLoaders:
    torch.manual_seed(1)
    x, y = torch.randn(48, 3, dtype=dtype), torch.randn(48, 2, dtype=dtype)
    return DataLoaders(list(zip(x.split(bs), y.split(bs), strict=True)), [(x, y)])


def learner(
    opt_func: Any, *cbs: Callback, dtype: torch.dtype = torch.float64, **kwargs: Any
) -> Learner:
    torch.manual_seed(0)
    model = kwargs.pop('model', None) or Net(dtype)
    return quiet_learner(
        data(dtype), model, nn.MSELoss(), opt_func, lr=0.1, cbs=list(cbs), **kwargs
    )


def norm(t: Tensor) -> float:
    return t.double().pow(2).sum().sqrt().item()


def cosine(a: Tensor, b: Tensor) -> float:
    return (a * b).sum().item() / (norm(a) * norm(b))


def reference(
    make: Callable[..., torch.optim.Optimizer], first: str, second: str | None
) -> list[dict[str, float]]:
    "Train the same network in a plain loop, and measure it."
    torch.manual_seed(0)
    model, rows = Net(), []
    opt = make(model.parameters(), lr=0.1)
    for x, y in data().train:
        opt.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        named = dict(model.named_parameters())
        before = {n: p.detach().clone() for n, p in named.items()}
        opt.step()
        row: dict[str, float] = {}
        kinds: dict[str, dict[str, Any]] = {}
        for n, p in named.items():
            update, state = p.detach() - before[n], opt.state[p]
            kinds[n] = {
                'grad': p.grad,
                'param': p.detach(),
                'update': update,
                'moment': state[first],
            }
            if second:
                kinds[n]['second_moment_sqrt'] = state[second].sqrt()
        for n, k in kinds.items():
            row |= {f'l2_norm/{kind}/{n}': norm(t) for kind, t in k.items()}
            row[f'cosine/update_grad/{n}'] = cosine(k['update'], k['grad'])
            row[f'cosine/moment_grad/{n}'] = cosine(k['moment'], k['grad'])
            row[f'l2_norm_ratio/update_param/{n}'] = norm(k['update']) / norm(k['param'])
        for kind in kinds['body.weight']:
            row[f'l2_norm/{kind}/global'] = norm(
                torch.cat([k[kind].flatten() for k in kinds.values()])
            )
        rows.append(row)
    return rows


@pytest.mark.parametrize(
    ('make', 'first', 'second'),
    [
        (torch.optim.Adam, 'exp_avg', 'exp_avg_sq'),
        (partial(torch.optim.SGD, momentum=0.9), 'momentum_buffer', None),
        (partial(torch.optim.RMSprop, momentum=0.9), 'momentum_buffer', 'square_avg'),
    ],
)
def test_norms_and_angles_match_a_plain_loop(make: Any, first: str, second: str | None) -> None:
    seen = Seen()
    learner(make, OptimizerMonitor(every=1), seen, wd_bn_bias=True).fit(1)
    assert len(seen.rows) == 6
    for got, expected in zip(seen.rows.values(), reference(make, first, second), strict=True):
        assert got == pytest.approx(expected, rel=1e-9)


def test_what_an_optimizer_does_not_keep_is_left_out() -> None:
    seen = Seen()
    learner(partial(torch.optim.SGD, momentum=0.0), OptimizerMonitor(every=1), seen).fit(1)
    kinds = {name.split('/')[1] for name in seen.rows[0]}
    assert kinds == {'grad', 'param', 'update', 'update_grad', 'update_param'}
    for name, v in seen.rows[0].items():
        if name.startswith('cosine/update_grad'):
            assert v == pytest.approx(-1)


@pytest.mark.parametrize(('every', 'at'), [('3ba', [2, 5]), ('4st', [3]), ('16sp', [2, 4])])
def test_looks_at_the_step_of_the_batch_that_is_due(every: str, at: list[int]) -> None:
    seen = Seen()  # of samples the look comes with the step after them
    learner(torch.optim.Adam, OptimizerMonitor(every=every), seen).fit(1)
    assert list(seen.rows) == at


def test_gradients_are_unscaled_and_clipped() -> None:
    plain, clipped, scaled = Seen(), Seen(), Seen()
    sgd = partial(torch.optim.SGD, momentum=0.0)
    learner(sgd, OptimizerMonitor(every=1), plain, dtype=torch.float32).fit(1)
    learner(sgd, OptimizerMonitor(every=1), clipped, GradientClip(1e-3), dtype=torch.float32).fit(1)
    learner(
        sgd, OptimizerMonitor(every=1), scaled, MixedPrecision('fp16'), dtype=torch.float32
    ).fit(1)
    assert clipped.of('l2_norm/grad/global') == pytest.approx([1e-3] * 6, rel=1e-3)
    expected = plain.of('l2_norm/grad/global')
    assert scaled.of('l2_norm/grad/global') == pytest.approx(expected, rel=2e-2)


def test_a_step_that_is_canceled_later_is_not_counted() -> None:
    def cancel(cb: Callback) -> None:
        if cb.learn.iter == 1:
            raise CancelStepException

    seen, last = Seen(), Callback(before_step=cancel)
    last.order = 200
    learner(torch.optim.Adam, OptimizerMonitor(every=1), seen, last).fit(1)
    assert list(seen.rows) == [0, 2, 3, 4, 5]


def test_several_optimizers() -> None:
    def make(params: Any, lr: float) -> dict[str, torch.optim.Optimizer]:
        return {
            'body': torch.optim.SGD(params[0]['params'], lr=lr, momentum=0.5),
            'head': torch.optim.Adam(params[1]['params'], lr=lr / 10),
        }

    seen = Seen()
    splitter = lambda m: [list(m.body.parameters()), list(m.head.parameters())]
    learn = learner(
        make, OptimizerMonitor(every=1), LRMonitor(every=1, mom=True), seen, splitter=splitter
    )
    learn.fit(1)
    row = seen.rows[5]
    expected = math.hypot(
        *(
            row[f'l2_norm/moment/{n}']
            for n in ('body.weight', 'body.bias', 'head.weight', 'head.bias')
        )
    )
    assert row['l2_norm/moment/global'] == pytest.approx(expected)
    assert 'l2_norm/second_moment_sqrt/head.bias' in row
    assert 'l2_norm/second_moment_sqrt/body.bias' not in row
    rates = {n: v for n, v in row.items() if n.startswith(('lr-', 'mom-'))}
    assert rates == {
        'lr-SGD/group0': 0.1,
        'lr-Adam/group0': 0.01,
        'mom-SGD/group0': 0.5,
        'mom-Adam/group0': 0.9,
    }


def test_one_transfer_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    n = transfers(monkeypatch)
    learn = learner(torch.optim.SGD, OptimizerMonitor(every='3ba'))
    learn.remove_cb(Recorder)
    learn.fit(1)
    assert n == ['tolist'] * 2


# -------------------------------------------------------------------------------------------- rates


def test_rates_match_the_step() -> None:
    seen = Seen()
    learn = learner(torch.optim.SGD, LRMonitor(every=1), seen)
    learn.fit_one_cycle(1, 0.1)
    assert seen.of('lr-SGD/group0') == pytest.approx(learn._get_recorder().lrs)


def test_rates_under_a_scheduler_of_torch() -> None:
    seen = Seen()
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    halve = LRScheduler(scheduler, by='batch')
    learner(torch.optim.SGD, LRMonitor(every=1), seen).fit(1, cbs=halve)
    assert seen.of('lr-SGD/group0') == pytest.approx([0.1 * 0.5**i for i in range(6)])


def test_a_look_at_a_step_is_not_counted_in_epochs() -> None:
    with pytest.raises(TimeError, match='Pass batches'):
        OptimizerMonitor('1ep')


# ------------------------------------------------------------------------------ all of them at once

ALL = (
    SpeedMonitor,
    RuntimeEstimator,
    LRMonitor,
    OptimizerMonitor,
    MemoryMonitor,
    SystemMonitor,
    ActivationMonitor,
)


def test_no_monitor_changes_a_number() -> None:
    def run(*cbs: Callback) -> list[Tensor]:
        torch.manual_seed(3)
        layers = [
            nn.Linear(1, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
            nn.Linear(8, 1),
        ]
        model = nn.Sequential(*layers)
        learn = quiet_synth_learner(
            model=model, n_train=12, cbs=[*cbs, GradientClip(0.5)], opt_func=torch.optim.Adam
        )
        learn.fit_one_cycle(2, 0.05)
        return [
            *learn.model.state_dict().values(),
            *learn._get_recorder().losses,
            torch.rand(3),
        ]

    plain, watched = run(), run(*(cls(every=1) for cls in ALL))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
