"""A metric's accumulated state survives a file; its value then equals a metric that saw every batch."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import learnkit.metrics as lk
from learnkit.core.errors import MetricError
from learnkit.metrics import classification as scores
from learnkit.metrics.averages import AvgLoss, AvgMetric, TorchMetric
from learnkit.metrics.base import AvgSmoothLoss, Metric
from tests.helpers.resuming import through_a_file

torchmetrics = pytest.importorskip('torchmetrics')
GEN = torch.Generator()


def a_batch(pred: Tensor, targ: Tensor) -> Any:
    return SimpleNamespace(pred=pred, yb=(targ,), xb=(pred,), loss=pred.float().mean().detach())


def classes(n: int, c: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(n, c, generator=GEN), torch.randint(c, (n,), generator=GEN)


def numbers(n: int) -> tuple[Tensor, Tensor]:
    return torch.rand(n, 1, generator=GEN), torch.rand(n, 1, generator=GEN)


def masks(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2, 4, generator=GEN), torch.randint(2, (n, 4), generator=GEN)


def tokens(n: int) -> tuple[Tensor, Tensor]:
    targ = torch.randint(4, (n, 6), generator=GEN)
    return F.one_hot(targ, 4) + torch.randn(n, 6, 4, generator=GEN) / 2, targ


def goes_on(
    make: Callable[[], Any], make_batch: Callable[[int], tuple[Tensor, Tensor]], at: int = 2
) -> Any:
    "Check the value of a metric saved after `at` of four uneven batches; return the state."
    GEN.manual_seed(0)
    batches = [a_batch(*make_batch(n)) for n in (20, 20, 20, 13)]
    straight, first, other = make(), make(), make()
    for m in (straight, first, other):
        m.reset()
    other.accumulate(batches[-1])  # what it has is forgotten when a state is loaded
    for b in batches:
        straight.accumulate(b)
    for b in batches[:at]:
        first.accumulate(b)
    state = through_a_file(first.state_dict())
    before = repr(state)
    other.load_state_dict(state)
    for b in batches[at:]:
        other.accumulate(b)
        first.accumulate(b)
    a, b, c = straight.value, first.value, other.value
    torch.testing.assert_close(a, c, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)  # saving changes nothing
    assert repr(state) == before
    half = make()
    half.reset()
    for b in batches[at:]:
        half.accumulate(b)
    assert not same(half.value, c)  # the state matters
    return state


def same(a: Any, b: Any) -> bool:
    return bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b)))


OURS: dict[str, tuple[Callable[[], Any], Any]] = {
    'avg': (lambda: AvgMetric(F.mse_loss), numbers),
    'loss': (AvgLoss, numbers),
    'dice': (lk.Dice, masks),
    'accum': (lambda: lk.AccumMetric(lambda p, t: (p - t).abs().median()), numbers),
    'f1': (lambda: scores.F1Score(average='macro'), classes),
    'auc': (lk.RocAuc, classes),
    'bleu': (lk.CorpusBLEUMetric, tokens),
}


@pytest.mark.parametrize('name', OURS)
def test_ours(name: str) -> None:
    goes_on(*OURS[name])


def test_a_predicted_slice_is_not_saved_with_all_of_its_data() -> None:
    whole = torch.rand(1000, 1)
    m = lk.AccumMetric(lambda p, t: p.sum())
    for i in range(2):
        m.accumulate(a_batch(whole[i : i + 1], whole[i : i + 1]))
    for pred, targ in m.state_dict()['waiting']:
        assert pred.untyped_storage().nbytes() == targ.untyped_storage().nbytes() == 4
    kept = Anything()
    kept.last = whole[3:5]
    assert kept.state_dict()['last'].untyped_storage().nbytes() == 8


def test_the_smoothed_loss_continues() -> None:
    a, b = AvgSmoothLoss(), AvgSmoothLoss()
    losses = [SimpleNamespace(loss=torch.rand((), generator=GEN)) for _ in range(9)]
    for x in losses[:4]:
        a.accumulate(x)
    early = a.state_dict()
    for x in losses[4:6]:
        a.accumulate(x)
    state = through_a_file(a.state_dict())
    assert state['raw'].dtype == torch.float64 and len(early['raw']) == 4
    b.load_state_dict(state)
    for x in losses[6:]:
        a.accumulate(x)
        b.accumulate(x)
    assert a.smooth == b.smooth and a.raw == b.raw and len(a.smooth) == 9
    a.reset()
    assert len(a.state_dict()['raw']) == 0


# ------------------------------------------------------------------------------------- torchmetrics

TM: dict[str, tuple[Callable[[], Any], Any]] = {
    'accuracy': (lambda: torchmetrics.Accuracy('multiclass', num_classes=3), classes),
    'auroc': (lambda: torchmetrics.AUROC('multiclass', num_classes=3), classes),
    'pearson': (torchmetrics.PearsonCorrCoef, lambda n: tuple(t[:, 0] for t in numbers(n))),
}


@pytest.mark.parametrize('name', TM)
def test_torchmetrics(name: str) -> None:
    make, make_batch = TM[name]
    goes_on(lambda: m if isinstance(m := make(), Metric) else TorchMetric(m), make_batch)


def test_a_value_that_was_computed_before_is_not_the_value_after_a_resume() -> None:
    m = TorchMetric(torchmetrics.MeanSquaredError())
    other = TorchMetric(torchmetrics.MeanSquaredError())
    other.accumulate(a_batch(torch.zeros(2), torch.full((2,), 9.0)))
    assert other.value == 81.0
    m.accumulate(a_batch(torch.zeros(2), torch.full((2,), 2.0)))
    other.load_state_dict(m.state_dict())
    # and torchmetrics warns of nothing
    assert other.value == 4.0 and other.metric.update_count == 1


# -------------------------------------------------------------------------------- metrics of a user


class Anything(Metric):
    last: Any = None
    value = 0.0


class Mine(Metric):
    "A metric with a state of every kind."

    def __init__(self, k: int, f: Callable[..., Any] = torch.abs) -> None:
        self.k, self.f, self.loss = k, f, nn.L1Loss()

    def reset(self) -> None:
        self.total, self.n, self.preds, self.by = torch.zeros(()), 0, [], {'hits': 0}

    def accumulate(self, learn: Any) -> None:
        pred, targ = learn.pred, learn.yb[0]
        self.total += self.f(pred - targ).sum()  # in place
        self.n += len(pred)
        self.preds.append((pred, targ))
        self.by['hits'] += int((pred > targ).sum())

    @property
    def value(self) -> Tensor:
        worst = max(float((p - t).max()) for p, t in self.preds)
        return torch.tensor([float(self.total) / self.n, worst, self.by['hits'], self.n, self.k])


class Around(Metric):
    "A metric of metrics that are created late."

    def __init__(self, inner: Metric) -> None:
        self.inner, self.tm = inner, torchmetrics.MeanSquaredError()

    def reset(self) -> None:
        self.inner.reset()
        self.tm.reset()

    def accumulate(self, learn: Any) -> None:
        self.inner.accumulate(learn)
        self.tm.update(learn.pred, learn.yb[0])

    @property
    def value(self) -> Any:
        return self.inner.value[0] + self.tm.compute()


class Wide(AvgMetric):
    "A subclass of a metric of the package with more state."

    def reset(self) -> None:
        super().reset()
        self.top = -math.inf

    def accumulate(self, learn: Any) -> None:
        super().accumulate(learn)
        self.top = max(self.top, float(learn.pred.max()))

    @property
    def value(self) -> Any:
        return super().value + self.top


@pytest.mark.parametrize(
    'make',
    [lambda: Mine(2), lambda: Around(Mine(3)), lambda: Wide(F.mse_loss)],
    ids=['plain', 'nested', 'subclass'],
)
def test_a_metric_that_knows_nothing_of_states(make: Callable[[], Any]) -> None:
    goes_on(make, numbers)


@pytest.mark.parametrize(('value', 'kind'), [({1}, 'set'), (torch.ones(1).numpy(), 'ndarray')])
def test_what_is_not_plain_is_reported(value: Any, kind: str) -> None:
    m = Anything()
    m.last = value
    with pytest.raises(MetricError, match=f'^its attribute `last` is a {kind}$'):
        m.state_dict()


@pytest.mark.parametrize('at', [2, 3])
def test_numbers_of_torchmetrics_outside_its_states(at: int) -> None:
    "`RunningMean` has the place in its window in an attribute, and the sliding error a map of its sums."
    image = torchmetrics.image

    def make_values(n: int) -> tuple[Tensor, Tensor]:
        return torch.rand(n, generator=GEN), torch.ones(n)

    def make_images(n: int) -> tuple[Tensor, Tensor]:
        return torch.rand(n, 1, 9, 9, generator=GEN), torch.rand(n, 1, 9, 9, generator=GEN)

    class OfPredictions(torchmetrics.RunningMean):  # type: ignore[name-defined, misc]
        def update(self, pred: Tensor, targ: Tensor) -> None:
            super().update(pred)

    state = goes_on(lambda: TorchMetric(OfPredictions(window=3)), make_values, at)
    assert state['metric/']['']['attributes'] == {'_num_vals_seen': at}
    sliding = lambda: TorchMetric(image.RootMeanSquaredErrorUsingSlidingWindow())
    state = goes_on(sliding, make_images, at)
    assert [*state['metric/']['']['attributes']] == ['rmse_map']
