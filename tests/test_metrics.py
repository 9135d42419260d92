from __future__ import annotations

import copy
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

from learnkit.averages import SEND_EVERY
from learnkit.errors import CancelBatchException, MetricError
from learnkit.metrics import (
    RMSE,
    AvgLoss,
    AvgMetric,
    AvgSmoothLoss,
    Mean,
    Metric,
    TorchMetric,
    ValueMetric,
    accuracy,
    as_metrics,
    dry_run,
    error_rate,
    mae,
    mse,
    rmse,
)

HOST_READS = ('item', 'cpu', 'tolist', 'numpy', '__float__', '__bool__', '__int__')
devices = pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.cuda)])


class Watched(torch.Tensor):
    "A tensor that counts what would make the host wait if it were on a device, as which it is treated."
    reads = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, '__name__', '') in HOST_READS: Watched.reads += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def watched(t: torch.Tensor) -> torch.Tensor:
    Watched.reads = 0
    return t.as_subclass(Watched)


def batch(pred: Any = None, *yb: Any, xb: tuple[Any, ...] = (), **kw: Any) -> SimpleNamespace:
    return SimpleNamespace(pred=pred, yb=yb, xb=xb, **kw)


def fed(metric: Any, pred: torch.Tensor, *targs: torch.Tensor, bs: int = 64, **kw: Any) -> Any:
    "The metric after one pass over the set."
    metric.reset()
    for parts in zip(*(t.split(bs) for t in (pred, *targs)), strict=True): metric.accumulate(batch(*parts, **kw))
    return metric


def scores(n: int = 150, n_classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, n_classes), torch.randint(n_classes, (n,))


# ---------------------------------------------------------------- Mean and averages

@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 100)), max_size=20))
def test_mean_is_the_weighted_mean(pairs: list[tuple[float, int]]) -> None:
    on_host, on_device, weights_on_device = Mean(), Mean(), Mean()
    for x, w in pairs:
        on_host.add(torch.tensor(x, dtype=torch.float64), w)
        on_device.add(watched(torch.tensor([x], dtype=torch.float64)), watched(torch.tensor(w)))
        weights_on_device.add(x, watched(torch.tensor(w)))
    n = sum(w for _, w in pairs)
    expected = pytest.approx(math.fsum(x*w for x, w in pairs)/n, rel=1e-12, abs=1e-6) if n else None
    assert on_host.value == expected and on_device.value == expected and weights_on_device.value == expected


def test_mean_takes_every_kind_of_number() -> None:
    m = Mean()
    for x in (1, 2., np.float32(3), np.array([4.]), np.int64(5), torch.tensor(6), torch.tensor([[7.]]), True): m.add(x)
    assert m.value == 29/8
    m.reset()
    assert m.value is None


def test_mean_refuses_more_than_one_number() -> None:
    for bad in (torch.zeros(2), np.zeros(3), 'a', None):
        with pytest.raises(MetricError, match='taken of numbers'): Mean().add(bad)


def test_mean_leaves_out_weight_zero_also_when_it_is_nan() -> None:
    m = Mean()
    m.add(torch.tensor(math.nan), 0)
    m.add(torch.tensor(math.nan), torch.tensor(0))
    m.add(math.nan, watched(torch.tensor(0.)))
    m.add(watched(torch.tensor(math.nan)), watched(torch.tensor(0)))
    m.add(2., torch.tensor(3.))
    assert m.value == 2.


def test_mean_reports_nan() -> None:
    m = Mean()
    m.add(torch.tensor(math.nan), 4)
    m.add(1., 4)
    assert math.isnan(m.value or 0.)


@devices
def test_averages_stay_exact_over_a_long_epoch(device: str) -> None:
    "A float32 sum of a million ones and a bit would be off by far more."
    m, x = Mean(), watched(torch.tensor(1/3, device=device))
    for _ in range(3000): m.add(x, 100_003)
    assert m.total.device.type == device and m.total.dtype == torch.float64 and Watched.reads == 0
    assert m.value == pytest.approx(float(x), rel=1e-13)


@pytest.mark.parametrize(('n', 'bs'), [(150, 64), (65, 64), (64, 64), (7, 100)])
def test_avg_metric_equals_the_whole_set(n: int, bs: int) -> None:
    pred, targ = torch.randn(n, dtype=torch.float64), torch.randn(n, dtype=torch.float64)
    for func, whole in ((mse, (pred - targ)**2), (F.l1_loss, (pred - targ).abs())):
        assert fed(AvgMetric(func), pred, targ, bs=bs).value == pytest.approx(float(whole.mean()), rel=1e-14)


def test_avg_metric_on_several_targets() -> None:
    pred, a, b = torch.randn(3, 20, dtype=torch.float64)
    value = fed(AvgMetric(lambda p, a, b: (p*a - b).mean()), pred, a, b, bs=8).value
    assert value == pytest.approx(float((pred*a - b).mean()), rel=1e-14)


@pytest.mark.parametrize('convert', [float, np.float64, torch.Tensor.numpy, lambda t: t.reshape(1),
                                     lambda t: t.reshape(1, 1)])
def test_avg_metric_takes_any_number_the_function_gives(convert: Any) -> None:
    pred, targ = torch.randn(2, 20, dtype=torch.float64)
    m = fed(AvgMetric(lambda p, t: convert(mse(p, t))), pred, targ, bs=8)
    assert m.value == pytest.approx(float(mse(pred, targ)), rel=1e-14)


def test_avg_metric_gets_no_graph_and_builds_none() -> None:
    pred, seen = torch.randn(5, requires_grad=True)*2, []

    def func(p: torch.Tensor, t: torch.Tensor) -> float:
        seen.append((p.requires_grad, torch.is_grad_enabled()))
        return float(np.mean(p.numpy() - t.numpy()))  # numpy() refuses what has a graph

    m = fed(AvgMetric(func), pred, torch.zeros(5))
    assert seen == [(False, False)] and torch.is_grad_enabled() and m.value == pytest.approx(pred.mean().item())


def test_averages_weigh_by_weight_func() -> None:
    pred, targ = torch.arange(6.), torch.zeros(6)
    tokens = iter([torch.tensor(10), torch.tensor(30)])
    m = fed(AvgMetric(mae), pred, targ, bs=3, weight_func=lambda xb, yb: next(tokens))
    assert m.value == (1*10 + 4*30)/40
    m = fed(AvgMetric(mae), pred, targ, bs=3, weight_func=None)
    assert m.value == 2.5

    loss = AvgLoss()
    for x, w in ((2., 1), (5., 2)): loss.accumulate(batch(loss=torch.tensor(x), weight_func=lambda xb, yb, w=w: w))
    assert loss.value == 4. and loss.name == 'loss'


def test_avg_loss_weighs_by_samples_with_and_without_targets() -> None:
    x, loss = torch.zeros(3), AvgLoss()
    assert loss.value is None
    loss.accumulate(batch(None, x, loss=torch.tensor(1.)))
    loss.accumulate(batch(None, xb=(x[:1],), loss=torch.tensor([4., 6.])))  # not reduced, no targets
    assert loss.value == (3*1 + 5)/4
    loss.reset()
    loss.accumulate(batch(None, x, loss=0.))
    assert loss.value == 0.


def test_no_host_read_per_batch() -> None:
    pred, targ = watched(torch.randn(40)), torch.randn(40)
    metrics = [AvgMetric(mse), AvgMetric(mse), AvgLoss(), RMSE()]
    learn = batch(pred, targ, loss=mse(pred, targ))
    for m in metrics:
        m.reset()
        for _ in range(3): m.accumulate(learn)
    assert Watched.reads == 0
    assert [m.value for m in metrics] and Watched.reads == len(metrics)  # one transfer each, and the watch works


def test_a_subclass_may_keep_its_own_total_and_count() -> None:
    class Double(AvgMetric):
        def __init__(self) -> None: self.func = mse

        def accumulate(self, learn: Any) -> None:
            self.total += 2*learn.loss*len(learn.yb[0])
            self.count += len(learn.yb[0])

    m = Double()
    m.reset()
    for x, n in ((1., 1), (2., 3)): m.accumulate(batch(None, torch.zeros(n), loss=torch.tensor(x)))
    assert m.value == 2*(1 + 6)/4 and m.name == 'mse' and m.on is None


def test_a_loss_module_follows_the_predictions() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1., 2., 3.]))
    with torch.device('meta'): elsewhere = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    AvgMetric(loss)._compute(elsewhere[0], (elsewhere[1],))
    assert loss.weight.device.type == 'meta'


# ---------------------------------------------------------------- names and errors

def test_names() -> None:
    class TopKMetric(Metric): pass

    assert TopKMetric().name == 'top_k' and Metric().name == 'metric'
    assert AvgMetric(accuracy).name == AvgMetric(partial(partial(accuracy, axis=1))).name == 'accuracy'
    assert AvgMetric(F.mse_loss).name == AvgMetric(nn.MSELoss()).name == 'mse_loss'
    assert AvgMetric(accuracy, 'acc').name == 'acc' and RMSE().name == 'rmse'
    assert ValueMetric(lambda: 3, 'three').name == 'three' and ValueMetric(lambda: 3).value == 3


def test_on_is_checked() -> None:
    assert AvgMetric(mse, on='train').on == 'train' and AvgMetric(mse).on is None
    with pytest.raises(MetricError, match=r"got 'vald'\. Did you mean `valid`"): AvgMetric(mse, on='vald')
    with pytest.raises(MetricError, match='got 3'): TorchMetric(torchmetrics_objects()[0], on=3)  # type: ignore[arg-type]


def test_a_result_that_is_no_number_is_refused() -> None:
    for result in (torch.zeros(5), None, 'high', [1.]):
        with pytest.raises(MetricError, match=r'`<lambda>` gave .*not one number') as e:
            fed(AvgMetric(lambda p, t, result=result: result), torch.zeros(7), torch.zeros(7))
        assert '7' in e.value.__notes__[0]


def test_what_a_metric_raises_keeps_its_type_and_gains_a_note() -> None:
    def bad(p: Any, t: Any) -> Any: raise KeyError('boom')

    with pytest.raises(KeyError, match='boom') as e: fed(AvgMetric(bad), torch.zeros(5, 2), torch.zeros(5))
    note, = e.value.__notes__
    assert '`bad`' in note and '5' in note and '(pred, *targets)' in note


def test_what_is_no_metric_is_refused() -> None:
    for bad in (3, 'accuracy', [mse, 4.5], torch.zeros(2), {'a': 3}):
        with pytest.raises(MetricError, match='no metric'): as_metrics(bad)
    with pytest.raises(MetricError, match='without arguments'): as_metrics(AvgMetric)
    with pytest.raises(MetricError, match='averages a function'): AvgMetric(3)  # type: ignore[arg-type]
    with pytest.raises(MetricError, match='no update, compute and reset'): TorchMetric(mse)


# ---------------------------------------------------------------- as_metrics

def test_as_metrics_takes_nothing_one_or_many() -> None:
    own = AvgLoss()
    assert list(as_metrics(None)) == [] == list(as_metrics([]))
    assert as_metrics(own)[0] is own
    assert isinstance(as_metrics(RMSE)[0], RMSE) and isinstance(as_metrics(rmse)[0], RMSE)
    assert [type(m) for m in as_metrics((mse, partial(mae), own))] == [AvgMetric, AvgMetric, AvgLoss]
    assert list(as_metrics(as_metrics([mse, own]))) != [] and as_metrics(as_metrics(own))[0] is own


def test_as_metrics_names_are_distinct_and_the_objects_untouched() -> None:
    first, second = AvgMetric(mse, on='train'), AvgMetric(mse, on='both')
    ms = as_metrics([first, second, AvgMetric(mae, 'mse_2'), {'l2': first}, mse])
    assert [m.name for m in ms] == ['mse', 'mse_2', 'mse_2_2', 'l2', 'mse_3']
    assert first.name == second.name == 'mse'
    assert [m.name for m in as_metrics(ms)] == [m.name for m in ms]

    assert ms[1].on == 'both' and ms[1].func is mse
    fed(ms[1], torch.ones(4), torch.zeros(4))
    assert ms[1].value == second.value == 1.


def test_a_renamed_metric_has_no_other_attributes() -> None:
    renamed = as_metrics([mse, mse])[1]
    with pytest.raises(AttributeError, match="'AvgMetric' object has no attribute 'nope'"): renamed.nope  # noqa: B018
    assert copy.deepcopy(renamed).name == 'mse_2'


# ---------------------------------------------------------------- torchmetrics

def torchmetrics_objects() -> list[Any]:
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
    return [MulticlassAccuracy(3, average='micro'), MulticlassF1Score(3), MulticlassAUROC(3)]


@pytest.mark.parametrize('i', range(3))
@devices
def test_torchmetrics_equals_the_whole_set(i: int, device: str) -> None:
    pred, targ = scores(150)
    metric, whole = torchmetrics_objects()[i], torchmetrics_objects()[i]
    expected = float(whole(pred, targ))

    m, = as_metrics(metric)
    m.reset()
    assert m.value is None
    assert fed(m, pred.to(device).requires_grad_(), targ.to(device)).value == pytest.approx(expected, rel=1e-6)
    assert fed(m, pred[:70], targ[:70]).value != pytest.approx(expected, rel=1e-6)  # forgotten, and back on the CPU
    assert m.name == ['multiclass_accuracy', 'multiclass_f1_score', 'multiclass_auroc'][i]


def test_torchmetrics_against_sklearn() -> None:
    from sklearn.metrics import f1_score
    pred, targ = scores(150)
    expected = f1_score(targ, pred.argmax(1), average='macro')
    assert fed(TorchMetric(torchmetrics_objects()[1]), pred, targ).value == pytest.approx(expected)


def test_a_torchmetrics_collection_is_expanded() -> None:
    from torchmetrics import MetricCollection
    acc, f1, auroc = torchmetrics_objects()
    ms = as_metrics([MetricCollection({'acc': acc, 'f1': f1}, prefix='m_'), {'auc': auroc, 'mine': accuracy}])
    assert [m.name for m in ms] == ['m_acc', 'm_f1', 'auc', 'mine']
    pred, targ = scores(150)
    for m, whole in zip(ms, [*torchmetrics_objects(), accuracy], strict=True):
        assert fed(m, pred, targ).value == pytest.approx(float(whole(pred, targ)), rel=1e-6)


def test_a_torchmetrics_value_per_class_comes_as_a_tensor() -> None:
    from torchmetrics.classification import MulticlassAccuracy
    pred, targ = scores(150)
    m = fed(TorchMetric(MulticlassAccuracy(3, average=None), 'per_class', on='valid'), pred, targ)
    expected = torch.stack([(pred.argmax(1) == targ)[targ == c].float().mean() for c in range(3)])
    assert torch.allclose(m.value, expected) and m.name == 'per_class' and m.on == 'valid'


# ---------------------------------------------------------------- dry runs

def test_dry_run_changes_nothing() -> None:
    pred, targ = scores(20)
    for m in as_metrics([accuracy, accuracy, torchmetrics_objects()[0], AvgLoss(), ValueMetric(lambda: 1/0)]):
        m.reset()
        dry_run(m, pred, (targ,))
        if not isinstance(m, ValueMetric): assert m.value is None


def test_dry_run_says_what_does_not_fit() -> None:
    pred, targ = scores(20)
    f1 = torchmetrics_objects()[1]
    for m in (AvgMetric(mse), AvgMetric(accuracy), TorchMetric(f1)):
        with pytest.raises(MetricError, match=f'`{m.name}`.* It raised') as e: dry_run(m, pred, (targ[:10],))
        assert '20' in str(e.value) and '10' in str(e.value) and e.value.__cause__ is not None
    with pytest.raises(MetricError, match=r'`mse_loss`.*missing 1 required') as e:
        dry_run(AvgMetric(F.mse_loss), pred, ())
    assert isinstance(e.value.__cause__, TypeError)
    with pytest.raises(MetricError, match='one number'): dry_run(AvgMetric(lambda p, t: p), pred, (targ,))
    assert float(f1._update_count) == 0


def test_dry_run_leaves_a_metric_with_its_own_accumulate_alone() -> None:
    class FromLearner(AvgMetric):
        def accumulate(self, learn: Any) -> None: self.add(learn.other)

    dry_run(FromLearner(lambda: 1/0), torch.zeros(3), ())


def test_a_cancel_and_running_out_of_memory_pass_through() -> None:
    def out_of_memory(p: Any, t: Any) -> Any: raise torch.OutOfMemoryError('full')
    def cancel(p: Any, t: Any) -> Any: raise CancelBatchException

    for func, kind in ((out_of_memory, torch.OutOfMemoryError), (cancel, CancelBatchException)):
        with pytest.raises(kind): fed(AvgMetric(func), torch.zeros(3), torch.zeros(3))
        with pytest.raises(kind): dry_run(AvgMetric(func), torch.zeros(3), (torch.zeros(3),))


# ---------------------------------------------------------------- the functions

def test_accuracy_and_error_rate() -> None:
    pred, targ = scores(50)
    right = [p.index(max(p)) == t for p, t in zip(pred.tolist(), targ.tolist(), strict=True)]
    expected = sum(right)/50
    assert float(accuracy(pred, targ)) == pytest.approx(expected)
    assert float(accuracy(pred, targ[:, None])) == pytest.approx(expected)
    assert float(error_rate(pred, targ)) == pytest.approx(1 - expected)
    image = pred.reshape(2, 5, 5, 3).permute(0, 3, 1, 2)
    assert float(accuracy(image, targ.reshape(2, 5, 5), axis=1)) == pytest.approx(expected)
    assert float(error_rate(image, targ.reshape(2, 5, 5), axis=1)) == pytest.approx(1 - expected)


def test_regression_metrics() -> None:
    pred, targ = torch.randn(2, 30, dtype=torch.float64)
    diffs = [a - b for a, b in zip(pred.tolist(), targ.tolist(), strict=True)]
    square = math.fsum(d*d for d in diffs)/30
    assert float(mse(pred[:, None], targ)) == pytest.approx(square)
    assert float(mae(pred, targ)) == pytest.approx(math.fsum(map(abs, diffs))/30)
    assert float(rmse(pred, targ)) == pytest.approx(square**.5)
    assert fed(as_metrics(rmse)[0], pred, targ, bs=8).value == pytest.approx(square**.5, rel=1e-14)
    assert fed(AvgMetric(rmse), pred, targ, bs=8).value != pytest.approx(square**.5, rel=1e-3)
    assert RMSE().value is None


def test_shapes_are_never_broadcast() -> None:
    cases = (accuracy, (4, 3), (4, 3)), (error_rate, (4, 3), (1,)), (mse, (4, 2), (4,)), (mae, (4,), (1,))
    for func, pred, targ in cases:
        with pytest.raises(MetricError, match='do not fit targets'): func(torch.zeros(pred), torch.zeros(targ))


# ---------------------------------------------------------------- the smoothed loss

def smoothed(losses: list[float], beta: float) -> list[float]:
    "The weighted mean itself: the newest loss weighs 1, the one before beta, then beta squared."
    def one(xs: list[float]) -> float:
        ws = [beta**i for i in range(len(xs))]
        return math.fsum(w*x for w, x in zip(ws, reversed(xs), strict=True))/math.fsum(ws)
    return [one(losses[:i+1]) for i in range(len(losses))]


def run(s: AvgSmoothLoss, losses: torch.Tensor) -> AvgSmoothLoss:
    for loss in losses: s.accumulate(SimpleNamespace(loss=loss))
    return s


@pytest.mark.parametrize('n', [1, 63, 64, 65, 300])
@pytest.mark.parametrize('beta', [0., 0.5, 0.98])
@pytest.mark.parametrize('deferred', [False, True])
def test_smooth_loss_equals_the_weighted_mean(n: int, beta: float, deferred: bool) -> None:
    losses = torch.rand(n, dtype=torch.float64)
    s = run(AvgSmoothLoss(beta, deferred), losses)
    assert s.count == n
    assert s.smooth == pytest.approx(smoothed(losses.tolist(), beta), rel=1e-12)
    assert s.raw == losses.tolist() and s.latest == s.smooth[-1] and len(s.smooth) == n
    value, val = s.value, s.val
    assert value is not None and float(value) == pytest.approx(s.smooth[-1], rel=1e-6)
    assert val.dtype == torch.float32 and float(val) == pytest.approx(s.smooth[-1]*(1 - beta**n), rel=1e-6)


def test_smooth_loss_reads_between_steps_change_nothing() -> None:
    losses = torch.rand(200, dtype=torch.float64)
    for deferred in (False, True):
        quiet, read = AvgSmoothLoss(deferred=deferred), AvgSmoothLoss(deferred=deferred)
        run(quiet, losses)
        for i, loss in enumerate(losses):
            run(read, loss[None])
            _ = (read.latest, read.raw, read.count, i % 7 or read.smooth, i % 11 or read.val)
        assert quiet.smooth == read.smooth


def test_smooth_loss_before_the_first_step_and_after_reset() -> None:
    s = AvgSmoothLoss(deferred=True)
    for _ in range(2):
        assert (s.count, s.raw, s.smooth, s.latest, s.value, float(s.val)) == (0, [], [], None, None, 0.)
        run(s, torch.rand(70))
        kept = s.smooth
        s.reset()
        assert len(kept) == 70


def test_smooth_loss_takes_the_mean_of_other_shapes_and_any_float_type() -> None:
    for deferred in (False, True):
        s = AvgSmoothLoss(0., deferred)
        vector, matrix, scalar = torch.tensor([1., 3.]), torch.tensor([[4.]]), torch.tensor(5.)
        for loss in (vector, matrix, scalar.bfloat16(), scalar.double() + 1):
            s.accumulate(SimpleNamespace(loss=loss.requires_grad_()))
        assert s.smooth == [2., 4., 5., 6.]


def test_smooth_loss_with_beta_that_cannot_be() -> None:
    for beta in (1., -0.1, 2, math.nan):
        with pytest.raises(MetricError, match='beta'): AvgSmoothLoss(beta)


def test_deferred_losses_travel_in_groups_without_a_host_read() -> None:
    s, losses = AvgSmoothLoss(deferred=True), watched(torch.rand(2*SEND_EVERY - 1))
    learns = [SimpleNamespace(loss=loss) for loss in losses]
    Watched.reads = 0
    for learn in learns: s.accumulate(learn)
    assert len(s.raw) == SEND_EVERY and s.count == 2*SEND_EVERY - 1
    assert Watched.reads <= 1  # one group has arrived
    assert [type(x) for x in s.raw] == [float]*SEND_EVERY

    assert len(s.smooth) == 2*SEND_EVERY - 1 and Watched.reads <= 2
    direct = AvgSmoothLoss()
    for learn in learns: direct.accumulate(learn)
    assert Watched.reads >= 2*SEND_EVERY - 1  # the watch works
    assert direct.smooth == s.smooth


def test_latest_never_waits_for_a_copy_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    "A copy whose event has not happened is left alone until it has, or until two are on the way."
    class Event:
        done, waited = False, False
        def query(self) -> bool: return self.done
        def synchronize(self) -> None: self.waited, self.done = not self.done, True

    from learnkit import averages
    init, events = averages._Copy.__init__, []

    def slow(self: Any, losses: torch.Tensor) -> None:
        init(self, losses)
        self.event = Event()
        events.append(self.event)

    monkeypatch.setattr(averages._Copy, '__init__', slow)
    s = run(AvgSmoothLoss(deferred=True), torch.rand(2*SEND_EVERY + 5))
    assert s.latest is None and s.raw == [] and s.count == 2*SEND_EVERY + 5
    assert not any(e.waited for e in events) and len(events) == 2

    events[0].done = True
    assert s.latest is not None and len(s.raw) == SEND_EVERY
    run(s, torch.rand(2*SEND_EVERY))  # two more copies: the oldest of the three on the way is waited for
    assert [e.waited for e in events] == [False, True, False, False]
    assert len(s.smooth) == s.count == 4*SEND_EVERY + 5 and all(e.waited for e in events[1:])


def test_latest_starts_a_copy_so_that_slow_steps_show_too() -> None:
    s = run(AvgSmoothLoss(0., deferred=True), torch.tensor([3.]))
    assert 3. in (s.latest, s.latest)


@pytest.mark.cuda
def test_smooth_loss_on_the_device() -> None:
    losses = torch.rand(300)
    s, on_cpu = AvgSmoothLoss(), run(AvgSmoothLoss(), losses)
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode('error')
        try: run(s, losses.cuda())
        finally: torch.cuda.set_sync_debug_mode('default')
    run(s, losses[:3])  # from the CPU, in order behind those of the device
    run(on_cpu, losses[:3])
    assert s.smooth == on_cpu.smooth and s.count == 303


@pytest.mark.parametrize('deferred', [False, True])
def test_smooth_loss_goes_on_after_a_checkpoint(deferred: bool, tmp_path: Any) -> None:
    losses = torch.rand(150, dtype=torch.float64)
    whole, first = run(AvgSmoothLoss(0.9, deferred), losses), run(AvgSmoothLoss(0.9, deferred), losses[:70])
    torch.save(first.state_dict(), tmp_path/'s.pth')

    second = run(AvgSmoothLoss(deferred=deferred), losses[:5])
    second.load_state_dict(torch.load(tmp_path/'s.pth', weights_only=True))
    assert second.count == 70 and second.beta == 0.9
    assert run(second, losses[70:]).smooth == whole.smooth and second.raw == whole.raw and second.val == whole.val
