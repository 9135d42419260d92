"""For every metric, the merged states of several processes equal the state of one process on all batches."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import learnkit.metrics as M
from learnkit.callbacks.epoch_metrics import value_of
from learnkit.core.errors import MetricError
from learnkit.metrics.averages import as_metrics
from learnkit.metrics.base import AvgSmoothLoss, Metric, merge_losses
from learnkit.metrics.merge import check_mergeable, interleave, merge_states, shared_state
from tests.helpers.every_metric import EVERY_METRIC, kind_of, make_metric

torchmetrics = pytest.importorskip('torchmetrics')
tm = torchmetrics.classification


def batch(pred: Any, *yb: Any, loss: Tensor | None = None) -> Any:
    loss_func = SimpleNamespace(part=loss)
    return SimpleNamespace(
        pred=pred, yb=yb, xb=(pred,), loss=loss, weight_func=None, loss_func=loss_func
    )


def batches(kind: str, n: int = 53, bs: int = 5) -> list[Any]:
    g = torch.Generator().manual_seed(1)
    scores = torch.randn(n, 4, generator=g)
    classes = torch.randint(4, (n,), generator=g)
    values, losses = torch.randn(n, 2, generator=g), torch.rand(n, generator=g)
    pred, targ = {
        'classes': (scores, classes),
        'two classes': (scores[:, :2], classes % 2),
        'nine classes': (torch.randn(n, 9, generator=g), classes),
        'labels': (scores, (scores + torch.randn(n, 4, generator=g) > 0).long()),
        'positive': (values[:, 0].exp(), values.sum(1).exp()),
        'regression': (values[:, 0], values.sum(1)),
        'pixels': (
            scores.reshape(n, 4, 1, 1).expand(n, 4, 2, 3) + torch.randn(n, 4, 2, 3, generator=g),
            torch.randint(4, (n, 2, 3), generator=g),
        ),
        'tokens': (
            torch.nn.functional.one_hot(torch.arange(n * 6).reshape(n, 6) % 7, 9).float(),
            torch.arange(n * 6).reshape(n, 6) % (7 + (torch.arange(n)[:, None] > 30)),
        ),
    }[kind]
    pieces = zip(*(t.split(bs) for t in (pred, targ, losses)), strict=True)
    return [batch(p, t, loss=x.mean()) for p, t, x in pieces]


def of_all(make: Callable[[], Metric], data: list[Any], size: int) -> list[tuple[Any, Metric]]:
    "Return values and metrics of each process, after its part of the batches and the merge."
    metrics = [make() for _ in range(size)]
    for rank, m in enumerate(metrics):
        m.reset()
        for b in data[rank::size]:
            m.accumulate(b)
    for m in metrics:
        check_mergeable(m)
    states = [shared_state(m) for m in metrics]
    read = []
    for m in metrics:
        merge_states(m, copy.deepcopy(states))
        read.append((value_of(m, len(data)), m))
    return read


def same(a: Any, b: Any, tolerance: float = 0.0) -> bool:
    return bool(
        torch.allclose(torch.as_tensor(a), torch.as_tensor(b), tolerance, tolerance, equal_nan=True)
    )


def wiggles(p: Tensor, t: Tensor) -> Tensor:
    return (p[1:] - p[:-1]).abs().sum()  # by the order of the samples


# not merged: the losses of each step are (`merge_losses`), and a value of the user's is of one process
ALONE = {'AvgSmoothLoss', 'ValueMetric'}


def metric_of(thing: Any, **options: Any) -> Callable[[], Metric]:
    return lambda: as_metrics(
        thing(**options) if options or isinstance(thing, (type, partial)) else thing
    )[0]


CASES: dict[str, tuple[str, Callable[[], Metric]]] = {
    name: (kind_of(name), partial(make_metric, name)) for name in EVERY_METRIC if name not in ALONE
}
CASES |= {
    'top_k': ('classes', metric_of(partial(M.ElementMean, partial(M.top_k_accuracy, k=2)))),
    'F1Score of each class': ('classes', metric_of(M.F1Score, average=None)),
    'AccumMetric in order': ('regression', metric_of(M.AccumMetric, func=wiggles)),
    'renamed': ('classes', lambda: as_metrics({'f1': M.F1Score(average='macro')})[0]),
    'torchmetrics accuracy': ('classes', metric_of(tm.MulticlassAccuracy, num_classes=4)),
    'torchmetrics auroc': ('classes', metric_of(tm.MulticlassAUROC, num_classes=4)),
    'torchmetrics pearson': ('regression', metric_of(torchmetrics.PearsonCorrCoef)),
}


SIZES = (1, 2, 4, 13)  # the quick form of a case has one of these, and 3


@pytest.mark.parametrize(
    ('name', 'size'),
    [
        pytest.param(name, size, marks=[] if size in (3, SIZES[i % 4]) else [pytest.mark.full])
        for i, name in enumerate(CASES)
        for size in (*SIZES, 3)
    ],
)
def test_merged_it_is_the_metric_of_all_batches(name: str, size: int) -> None:
    kind, make = CASES[name]
    data = batches(kind)
    alone = make()
    alone.reset()
    for b in data:
        alone.accumulate(b)
    expected = value_of(alone, len(data))

    read = of_all(make, data, size)  # with 13 processes, two have seen nothing
    assert same(read[0][0], expected, 2e-6 if 'torchmetrics' in name else 1e-6)
    assert all(same(v, read[0][0]) for v, _ in read)  # to the last bit


@pytest.mark.parametrize('name', ['AccumMetric in order', 'SpearmanCorrCoef', 'RocAuc'])
def test_kept_predictions_come_in_the_order_of_the_data(name: str) -> None:
    kind, make = CASES[name]
    data = batches(kind)
    alone = make()
    for b in data:
        alone.accumulate(b)
    theirs = alone.waiting
    for _, m in of_all(make, data, 3):
        for a, b in zip(zip(*m.waiting, strict=True), zip(*theirs, strict=True), strict=True):
            assert torch.equal(torch.cat(a), torch.cat(b))
    assert interleave([[1, 4], [2], [3]]) == [1, 2, 3, 4]


# -- metrics of a user's own -----------------------------------------------------------------------


class Counted(Metric):
    sum_reduced = ('n', 'seen', 'rows')

    def reset(self) -> None:
        self.n, self.seen, self.rows = 0, [], np.zeros(2)

    def accumulate(self, learn: Any) -> None:
        self.n += 1
        self.seen.append(float(learn.pred))
        self.rows = self.rows + [1, 2]

    @property
    def value(self) -> Any:
        return self.n


def test_summed_attributes_of_every_kind() -> None:
    _, m = of_all(Counted, [batch(torch.tensor(float(i))) for i in range(5)], 2)[1]
    assert m.n == 5
    assert m.seen == [0.0, 2.0, 4.0, 1.0, 3.0]
    assert m.rows.tolist() == [5.0, 10.0]


class Largest(Metric):
    def reset(self) -> None:
        self.most = -torch.inf

    def accumulate(self, learn: Any) -> None:
        self.most = max(self.most, float(learn.pred))

    def merge(self, states: list[dict[str, Any]]) -> None:
        self.most = max(sd['most'] for sd in states)

    @property
    def value(self) -> float:
        return self.most


def test_a_user_defined_merge() -> None:
    found = [v for v, _ in of_all(Largest, [batch(torch.tensor(float(i))) for i in range(5)], 4)]
    assert found == [4.0] * 4


class Silent(Metric):
    "A metric like fastai's, without a declared merge."

    def reset(self) -> None:
        self.total, self.n = 0.0, 0

    def accumulate(self, learn: Any) -> None:
        self.total, self.n = self.total + float(learn.pred), self.n + 1

    @property
    def value(self) -> float:
        return self.total / self.n


class Peak(M.AvgMetric):
    "Its reset clears more than its base class declares."

    def reset(self) -> None:
        super().reset()
        self.peak = 0.0


class Counter:
    "An object with the methods of torchmetrics."

    def reset(self) -> None:
        self.n = 0

    def update(self, pred: Tensor, targ: Tensor) -> None:
        self.n += 1

    def compute(self) -> int:
        return self.n


@pytest.mark.parametrize('metric', [Silent(), Peak(M.mse), {'x': Silent()}, Counter()])
def test_a_metric_that_does_not_declare_its_merge_is_refused_at_the_start(metric: Any) -> None:
    with pytest.raises(MetricError, match=r"sum_reduced = \('total', 'n'\)") as e:
        check_mergeable(as_metrics(metric)[0])
    assert any(name in str(e.value) for name in ('Silent', 'Peak', 'Counter'))


# -- torchmetrics' reductions ----------------------------------------------------------------------


class Reduced(torchmetrics.Metric):
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for how in ('sum', 'max', 'min'):
            self.add_state(how, torch.tensor(0.0), how)
        self.add_state('joined', torch.zeros(0), 'cat')
        self.add_state('listed', [], None)
        self.add_state('product', torch.tensor(1.0), lambda t: t.prod(0))

    def update(self, pred: Tensor, targ: Tensor) -> None:
        x, first = pred.sum(), self._update_count == 1
        self.sum = self.sum + x
        self.max, self.min = (
            (x, x) if first else (torch.maximum(self.max, x), torch.minimum(self.min, x))
        )
        self.joined = torch.cat([self.joined, x[None]])
        self.listed.append(x)
        self.product = self.product * x

    def compute(self) -> Tensor:
        ordered = self.joined.sort().values, torch.stack(self.listed).sort().values
        return torch.cat([torch.stack([self.sum, self.max, self.min, self.product]), *ordered])


@pytest.mark.parametrize('size', [3, 13])
def test_each_reduction(size: int) -> None:
    data = batches('regression')
    for b in data:
        b.pred = b.pred.double().exp()
    alone = as_metrics(Reduced())[0]
    for b in data:
        alone.accumulate(b)
    expected = alone.value.double()
    assert same(of_all(lambda: as_metrics(Reduced())[0], data, size)[0][0].double(), expected, 1e-5)


# -- means, losses, logs ---------------------------------------------------------------------------


def test_the_losses_of_an_epoch_are_put_in_place() -> None:
    losses, weights = torch.rand(3, 40).tolist(), [[1.0] * 40, [3.0] * 40, [2.0] * 39 + [0.0]]
    losses[2][-1] = float('nan')  # of a sample that does not count
    total = [sum(w[i] for w in weights) for i in range(40)]
    mean = [
        sum(r[i] * w[i] for r, w in zip(losses, weights, strict=True) if w[i]) / total[i]
        for i in range(40)
    ]
    merged = merge_losses(losses, weights)
    assert merged[0] == pytest.approx(mean, rel=1e-14) and merged[1] == total
    two = merge_losses([[1.0, 2.0], [10.0, 20.0]], [[1.0, 1.0], [1.0, 0.0]], 'sum')
    assert two[0] == [11.0, 2.0]

    ours, alone = AvgSmoothLoss(), AvgSmoothLoss()
    for begun in (0, 20):
        for x in losses[0][begun : begun + 20]:
            ours.accumulate(SimpleNamespace(loss=torch.tensor(x)))
        ours.state_dict()  # a checkpoint in the middle of the epoch
        ours.replace(begun, mean[begun : begun + 20])
    for x in mean:
        alone.accumulate(SimpleNamespace(loss=torch.tensor(x, dtype=torch.float64)))
    assert ours.smooth == alone.smooth
    assert torch.equal(ours.state_dict()['raw'], alone.state_dict()['raw'])


class SelfMerging:
    "Largest value, number of values and first value of each batch, with the methods of torcheval."

    device = 'cpu'

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.largest = torch.tensor(-torch.inf)
        self.seen = torch.tensor(0)
        self.firsts: list[Tensor] = []

    def update(self, pred: Tensor, targ: Tensor) -> None:
        self.firsts.append(pred[:1])
        self.largest = torch.maximum(self.largest, pred.max())
        self.seen += len(pred)

    def compute(self) -> Tensor:
        return torch.cat([torch.stack([self.largest, self.seen]), *self.firsts])

    def state_dict(self) -> dict[str, Any]:
        return {'largest': self.largest, 'seen': self.seen, 'firsts': self.firsts}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self.largest, self.seen = sd['largest'].clone(), sd['seen'].clone()
        self.firsts = list(sd['firsts'])

    def to(self, device: Any) -> Any:
        return self

    def merge_state(self, metrics: list[Any]) -> Any:
        for other in metrics:
            self.largest = torch.maximum(self.largest, other.largest)
            self.seen += other.seen
            self.firsts += other.firsts
        return self


@pytest.mark.parametrize('size', [1, 2, 3])
def test_a_metric_that_merges_others_into_itself(size: int) -> None:
    data = batches('regression')
    pred = torch.cat([b.pred for b in data])
    for value, metric in of_all(lambda: as_metrics([SelfMerging()])[0], data, size):
        assert same(value, [pred.max(), len(pred), *(b.pred[0] for b in data)])
        metric.reset()
        assert metric.value is None and metric.metric.seen == 0
