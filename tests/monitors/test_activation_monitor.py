"""Compare the activation monitor with statistics in plain torch and with scipy's definitions."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, DataLoaders, Learner
from learnkit.callbacks.recorder import Recorder
from learnkit.monitors.activation_monitor import ActivationMonitor
from tests.helpers.learners import quiet_learner
from tests.helpers.measuring import transfers


class Seen(Callback):
    "Record logged values with the number of their batch."

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def receive_log(self, name: str, value: Any, weight: Any = 1, shown: bool = True) -> None:
        row = self.rows.setdefault(self.learn.parts.counters.batches - 1, {})
        assert name not in row
        row[name] = value


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) for m in model.modules())


def mean_square(pred: Any, targ: Tensor) -> Tensor:
    return (pred if isinstance(pred, Tensor) else pred[0]).float().pow(2).mean()


def learner(model: nn.Module, x: Tensor, *cbs: Callback, bs: int = 4, **kwargs: Any) -> Learner:
    y = torch.zeros(len(x), 1)
    batches = list(zip(x.split(bs), y.split(bs), strict=True))
    dls = DataLoaders(batches, batches[:1])
    return quiet_learner(dls, model, mean_square, lr=0.01, cbs=list(cbs), **kwargs)


def expected(t: Tensor) -> dict[str, float]:
    "Return the statistics of each row of a tensor."
    rows = t.double().reshape(-1, t.shape[-1])
    found: dict[str, list[float]] = {
        'l2_norm': [],
        'average': [],
        'max': [],
        'skewness': [],
        'kurtosis': [],
    }
    for row in rows:
        found['l2_norm'].append(sum(v * v for v in row.tolist()) ** 0.5)
        found['average'].append(row.mean().item())
        found['max'].append(max(row.tolist()))
        d = row - row.mean()
        if not d.any():
            continue
        sigma = row.std(correction=0)
        found['skewness'].append(((d / sigma) ** 3).mean().item())
        found['kurtosis'].append(((d / sigma) ** 4).mean().item())
    return {stat: sum(v) / len(v) for stat, v in found.items() if v}


def named(stats: dict[str, float], where: str) -> dict[str, float]:
    return {f'activations/{stat}/{where}': v for stat, v in stats.items()}


def test_statistics_of_inputs_and_outputs() -> None:
    torch.manual_seed(0)
    model, x, seen = nn.Sequential(nn.Linear(5, 6), nn.Tanh()), torch.randn(4, 3, 5), Seen()
    mid = model[0](x)
    want = {
        **named(expected(x), '0_input.0'),
        **named(expected(mid), '0_output.0'),
        **named(expected(mid), '1_input.0'),
        **named(expected(mid.tanh()), '1_output.0'),
    }
    learner(model, x, ActivationMonitor(), seen).fit(1)
    assert seen.rows[0] == pytest.approx(want, rel=1e-5)


def test_rows_of_equal_numbers_have_no_shape() -> None:
    x = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 3.0]])
    seen, constant = Seen(), Seen()
    learner(nn.Linear(3, 1), x, ActivationMonitor(), seen).fit(1)
    got = {k: v for k, v in seen.rows[0].items() if '_input' in k}
    assert got == pytest.approx(named(expected(x), 'Linear_input.0'))
    assert not any('skew' in k for k in seen.rows[0] if '_output' in k)  # one feature
    learner(nn.Linear(3, 1), torch.ones(2, 3), ActivationMonitor(), constant).fit(1)
    assert 'activations/kurtosis/Linear_input.0' not in constant.rows[0]
    assert constant.rows[0]['activations/average/Linear_input.0'] == 1


@pytest.mark.parametrize(
    ('every', 'at'),
    [('3ba', [0, 3, 6, 9]), (4, [0, 4, 8]), (None, list(range(10)))],
)
def test_when_it_looks_and_that_hooks_are_there_only_then(every: Any, at: list[int]) -> None:
    def look(cb: Callback) -> None:
        if cb.learn.training and hooks(cb.learn.model):
            hooked.append(cb.learn.train_iter)

    seen, hooked, note = Seen(), list[int](), Callback(after_pred=look)
    learn = learner(nn.Linear(2, 2), torch.randn(20, 2), ActivationMonitor(every), seen, note)
    learn.fit(2)
    assert list(seen.rows) == at
    assert hooked == at
    assert hooks(learn.model) == 0


def test_ignored_and_chosen_modules() -> None:
    def modules_of(**options: Any) -> set[str]:
        seen = Seen()
        model = nn.Sequential(
            nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.ReLU()), nn.LayerNorm(2)
        )
        learner(model, torch.randn(4, 2), ActivationMonitor(**options), seen).fit(1)
        return {name.split('/')[2].split('_')[0] for row in seen.rows.values() for name in row}

    assert modules_of() == {'0', '1.0', '1.1', '2'}
    assert modules_of(ignore='1.') == {'0', '2'}
    assert modules_of(ignore=['0', '2']) == {'1.1'}
    assert modules_of(modules=['1.1', '2'], ignore='2') == {'1.1'}
    assert modules_of(ignore=['0', '1', '2']) == set()


def test_one_transfer_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    n = transfers(monkeypatch)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    learn = learner(model, torch.randn(16, 2), ActivationMonitor('2ba'))
    learn.remove_cb(Recorder)
    learn.fit(1)
    assert n == ['tolist'] * 2
