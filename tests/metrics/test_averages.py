from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from learnkit.core.errors import MetricError
from learnkit.metrics.averages import (
    AvgLoss,
    AvgMetric,
    SumMetric,
    ValueMetric,
    as_metrics,
    dry_run,
    whole_set_metric,
)
from learnkit.metrics.base import Metric
from learnkit.metrics.functional import RMSE, accuracy, mae, mse
from tests.helpers.measuring import Watched, batch, devices, feed, scores, watch_reads

# ---------------------------------------------------------------- averages


@pytest.mark.parametrize(('n', 'bs'), [(150, 64), (65, 64), (64, 64), (7, 100)])
def test_avg_metric_equals_the_whole_set(n: int, bs: int) -> None:
    pred, targ = torch.randn(n, dtype=torch.float64), torch.randn(n, dtype=torch.float64)
    for func, whole in ((mse, (pred - targ) ** 2), (F.l1_loss, (pred - targ).abs())):
        expected = float(whole.mean())
        assert feed(AvgMetric(func), pred, targ, bs=bs).value == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    'convert',
    [float, np.float64, torch.Tensor.numpy, lambda t: t.reshape(1), lambda t: t.reshape(1, 1)],
)
def test_avg_metric_takes_any_number_the_function_gives(convert: Any) -> None:
    pred, targ = torch.randn(2, 20, dtype=torch.float64)
    m = feed(AvgMetric(lambda p, t: convert(mse(p, t))), pred, targ, bs=8)
    assert m.value == pytest.approx(float(mse(pred, targ)), rel=1e-14)


def test_averages_weigh_by_weight_func() -> None:
    pred, targ = torch.arange(6.0), torch.zeros(6)
    tokens = iter([torch.tensor(10), torch.tensor(30)])
    m = feed(AvgMetric(mae), pred, targ, bs=3, weight_func=lambda xb, yb: next(tokens))
    assert m.value == (1 * 10 + 4 * 30) / 40
    m = feed(AvgMetric(mae), pred, targ, bs=3, weight_func=None)
    assert m.value == 2.5

    loss = AvgLoss()
    for x, w in ((2.0, 1), (5.0, 2)):
        loss.accumulate(batch(loss=torch.tensor(x), weight_func=lambda xb, yb, w=w: w))
    assert loss.value == 4.0 and loss.name == 'loss'


def test_avg_loss_weighs_by_samples_with_and_without_targets() -> None:
    x, loss = torch.zeros(3), AvgLoss()
    assert loss.value is None
    loss.accumulate(batch(None, x, loss=torch.tensor(1.0)))
    # not reduced, no targets
    loss.accumulate(batch(None, xb=(x[:1],), loss=torch.tensor([4.0, 6.0])))
    assert loss.value == (3 * 1 + 5) / 4
    loss.reset()
    loss.accumulate(batch(None, x, loss=0.0))
    assert loss.value == 0.0


def test_no_host_read_per_batch() -> None:
    pred, targ = watch_reads(torch.randn(40)), torch.randn(40)
    metrics = [AvgMetric(mse), AvgMetric(mse), AvgLoss(), RMSE()]
    learn = batch(pred, targ, loss=mse(pred, targ))
    for m in metrics:
        m.reset()
        for _ in range(3):
            m.accumulate(learn)
    assert Watched.reads == 0
    # one transfer each, and the watch works
    assert [m.value for m in metrics] and Watched.reads == len(metrics)


def test_a_loss_module_follows_the_predictions() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    with torch.device('meta'):
        elsewhere = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    AvgMetric(loss).try_batch(elsewhere[0], (elsewhere[1],))
    assert loss.weight.device.type == 'meta'


# ---------------------------------------------------------------- sums over the set


class Bias(SumMetric):
    def sums(self, pred: torch.Tensor, targ: torch.Tensor) -> Any:
        return (pred - targ).sum(), targ.sum(), 2

    def final(self, sums: torch.Tensor) -> float:
        return float(sums[0] / sums[1] * sums[2])


@pytest.mark.parametrize(('n', 'bs'), [(150, 64), (65, 64), (64, 64), (7, 100)])
def test_sum_metric_equals_the_whole_set(n: int, bs: int) -> None:
    pred, targ = torch.rand(2, n, dtype=torch.float64)
    n_batches = -(-n // bs)
    m = feed(Bias(), pred, targ, bs=bs)
    expected = float((pred - targ).sum() / targ.sum()) * 2 * n_batches
    assert m.value == pytest.approx(expected, rel=1e-12)
    assert Bias()(pred, targ) == pytest.approx(m.value / n_batches, rel=1e-12)
    m.reset()
    assert m.value is None and m.name == 'bias' and Bias('offset', on='both').name == 'offset'


def test_a_function_stands_for_the_metric_it_is_marked_with() -> None:
    class Scaled(Bias):
        def __init__(self, scale: float = 1.0, on: str | None = None) -> None:
            super().__init__('scaled', on)
            self.scale = scale

        def final(self, sums: torch.Tensor) -> float:
            return self.scale * super().final(sums)

    @whole_set_metric(Scaled)
    def scaled(pred: torch.Tensor, targ: torch.Tensor, scale: float = 1.0) -> float:
        return Scaled(scale)(pred, targ)

    plain, threefold, named, other = as_metrics(
        [scaled, partial(scaled, scale=3.0), {'x': scaled}, scaled]
    )
    assert [plain.scale, threefold.scale] == [1.0, 3.0]
    expected = ['scaled', 'scaled_2', 'x', 'scaled_3']
    assert [m.name for m in (plain, threefold, named, other)] == expected
    assert plain is not other
    # something else is bound
    assert isinstance(as_metrics(partial(scaled, torch.ones(2)))[0], AvgMetric)


# ---------------------------------------------------------------- names and errors


def test_names() -> None:
    class TopKMetric(Metric):
        pass

    assert TopKMetric().name == 'top_k' and Metric().name == 'metric'
    assert (
        AvgMetric(accuracy).name == AvgMetric(partial(partial(accuracy, axis=1))).name == 'accuracy'
    )
    assert AvgMetric(F.mse_loss).name == AvgMetric(nn.MSELoss()).name == 'mse_loss'
    assert AvgMetric(accuracy, 'acc').name == 'acc' and RMSE().name == 'rmse'
    assert ValueMetric(lambda: 3, 'three').name == 'three' and ValueMetric(lambda: 3).value == 3


def test_a_result_that_is_not_a_number_is_refused() -> None:
    for result in (torch.zeros(5), None, {'a': 1.0}):
        with pytest.raises(MetricError, match=r'`<lambda>` returned .*not one number') as e:
            feed(AvgMetric(lambda p, t, result=result: result), torch.zeros(7), torch.zeros(7))
        assert '7' in e.value.__notes__[0]


def test_what_a_metric_raises_keeps_its_type_and_gains_a_note() -> None:
    def bad(p: Any, t: Any) -> Any:
        raise KeyError('boom')

    with pytest.raises(KeyError, match='boom') as e:
        feed(AvgMetric(bad), torch.zeros(5, 2), torch.zeros(5))
    (note,) = e.value.__notes__
    assert '`bad`' in note and '5' in note and '(pred, *targets)' in note


def test_what_is_not_a_metric_is_refused() -> None:
    for bad in (3, 'accuracy', {'a': 3}):
        with pytest.raises(MetricError, match='metric'):
            as_metrics(bad)


# ---------------------------------------------------------------- as_metrics


def test_as_metrics_names_are_distinct_and_the_objects_untouched() -> None:
    first, second = AvgMetric(mse, on='train'), AvgMetric(mse, on='both')
    ms = as_metrics([first, second, AvgMetric(mae, 'mse_2'), {'l2': first}, mse])
    assert [m.name for m in ms] == ['mse', 'mse_2', 'mse_2_2', 'l2', 'mse_3']
    assert first.name == second.name == 'mse'
    assert [m.name for m in as_metrics(ms)] == [m.name for m in ms]

    assert ms[1].on == 'both' and ms[1].func is mse
    feed(ms[1], torch.ones(4), torch.zeros(4))
    assert ms[1].value == second.value == 1.0


# ---------------------------------------------------------------- torchmetrics


def torchmetrics_objects() -> list[Any]:
    library = pytest.importorskip('torchmetrics.classification')
    return [
        library.MulticlassAccuracy(3, average='micro'),
        library.MulticlassF1Score(3),
        library.MulticlassAUROC(3),
    ]


@pytest.mark.parametrize('i', range(3))
@devices
def test_torchmetrics_equals_the_whole_set(i: int, device: str) -> None:
    pred, targ = scores(150)
    metric, whole = torchmetrics_objects()[i], torchmetrics_objects()[i]
    expected = float(whole(pred, targ))

    (m,) = as_metrics(metric)
    m.reset()
    assert m.value is None
    assert feed(m, pred.to(device).requires_grad_(), targ.to(device)).value == pytest.approx(
        expected, rel=1e-6
    )
    # forgotten, and back on the CPU
    assert feed(m, pred[:70], targ[:70]).value != pytest.approx(expected, rel=1e-6)
    assert m.name == ['multiclass_accuracy', 'multiclass_f1_score', 'multiclass_auroc'][i]


def test_a_torchmetrics_collection_is_expanded() -> None:
    MetricCollection = pytest.importorskip('torchmetrics').MetricCollection
    acc, f1, auroc = torchmetrics_objects()
    ms = as_metrics(
        [MetricCollection({'acc': acc, 'f1': f1}, prefix='m_'), {'auc': auroc, 'mine': accuracy}]
    )
    assert [m.name for m in ms] == ['m_acc', 'm_f1', 'auc', 'mine']
    pred, targ = scores(150)
    for m, whole in zip(ms, [*torchmetrics_objects(), accuracy], strict=True):
        assert feed(m, pred, targ).value == pytest.approx(float(whole(pred, targ)), rel=1e-6)


# ---------------------------------------------------------------- dry runs


def test_dry_run_changes_nothing() -> None:
    pred, targ = scores(20)
    for m in as_metrics(
        [accuracy, accuracy, torchmetrics_objects()[0], AvgLoss(), ValueMetric(lambda: 1 / 0)]
    ):
        m.reset()
        dry_run(m, pred, (targ,))
        if not isinstance(m, ValueMetric):
            assert m.value is None
