import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from learnkit.core.errors import MetricError
from learnkit.metrics.base import SEND_EVERY, AvgSmoothLoss, Mean, Metric
from tests.helpers.measuring import Watched, devices, watch_reads


@pytest.mark.parametrize(
    ('cls', 'column'),
    [('IoU', 'iou'), ('MeanIoUMetric', 'mean_iou'), ('mAP', 'map'), ('TopK', 'top_k')],
)
def test_an_abbreviation_is_one_word(cls: str, column: str) -> None:
    assert type(cls, (Metric,), {})().name == column


# ---------------------------------------------------------------- Mean


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 100)), max_size=20))
def test_mean_is_the_weighted_mean(pairs: list[tuple[float, int]]) -> None:
    on_host, on_device, weights_on_device = Mean(), Mean(), Mean()
    for x, w in pairs:
        on_host.add(torch.tensor(x, dtype=torch.float64), w)
        on_device.add(
            watch_reads(torch.tensor([x], dtype=torch.float64)), watch_reads(torch.tensor(w))
        )
        weights_on_device.add(x, watch_reads(torch.tensor(w)))
    n = sum(w for _, w in pairs)
    expected = (
        pytest.approx(math.fsum(x * w for x, w in pairs) / n, rel=1e-12, abs=1e-6) if n else None
    )
    assert on_host.value == expected
    assert on_device.value == expected
    assert weights_on_device.value == expected


def test_mean_takes_every_kind_of_number() -> None:
    m = Mean()
    for x in (
        1,
        2.0,
        np.float32(3),
        np.array([4.0]),
        np.int64(5),
        torch.tensor(6),
        torch.tensor([[7.0]]),
        True,
    ):
        m.add(x)
    assert m.value == 29 / 8
    m.reset()
    assert m.value is None


def test_mean_refuses_more_than_one_number() -> None:
    for bad in (torch.zeros(2), np.zeros(3), 'a', None):
        with pytest.raises(MetricError, match='taken of numbers'):
            Mean().add(bad)


def test_mean_leaves_out_weight_zero_also_when_it_is_nan() -> None:
    m = Mean()
    m.add(torch.tensor(math.nan), 0)
    m.add(torch.tensor(math.nan), torch.tensor(0))
    m.add(math.nan, watch_reads(torch.tensor(0.0)))
    m.add(watch_reads(torch.tensor(math.nan)), watch_reads(torch.tensor(0)))
    m.add(2.0, torch.tensor(3.0))
    assert m.value == 2.0


@devices
def test_averages_stay_exact_over_a_long_epoch(device: str) -> None:
    "The error of a float32 sum of a million ones and a bit would be far larger."
    m, x = Mean(), watch_reads(torch.tensor(1 / 3, device=device))
    for _ in range(3000):
        m.add(x, 100_003)
    assert m.total.device.type == device and m.total.dtype == torch.float64 and Watched.reads == 0
    assert m.value == pytest.approx(float(x), rel=1e-13)


# ---------------------------------------------------------------- the smoothed loss


def smoothed(losses: list[float], beta: float) -> list[float]:
    "Compare with the weighted mean: the newest loss has weight 1, the one before it beta, then beta squared."

    def one(xs: list[float]) -> float:
        ws = [beta**i for i in range(len(xs))]
        return math.fsum(w * x for w, x in zip(ws, reversed(xs), strict=True)) / math.fsum(ws)

    return [one(losses[: i + 1]) for i in range(len(losses))]


def run(s: AvgSmoothLoss, losses: torch.Tensor) -> AvgSmoothLoss:
    for loss in losses:
        s.accumulate(SimpleNamespace(loss=loss))
    return s


@pytest.mark.parametrize('n', [1, 64, 300])
@pytest.mark.parametrize('beta', [0.0, 0.98])
@pytest.mark.parametrize('deferred', [False, True])
def test_smooth_loss_equals_the_weighted_mean(n: int, beta: float, deferred: bool) -> None:
    losses = torch.rand(n, dtype=torch.float64)
    s = run(AvgSmoothLoss(beta, deferred), losses)
    assert s.count == n
    assert s.smooth == pytest.approx(smoothed(losses.tolist(), beta), rel=1e-12)
    assert s.raw == losses.tolist() and s.latest == s.smooth[-1] and len(s.smooth) == n
    value, val = s.value, s.val
    assert value is not None and float(value) == pytest.approx(s.smooth[-1], rel=1e-6)
    assert val.dtype == torch.float32
    assert float(val) == pytest.approx(s.smooth[-1] * (1 - beta**n), rel=1e-6)


def test_smooth_loss_reads_between_steps_change_nothing() -> None:
    losses = torch.rand(200, dtype=torch.float64)
    for deferred in (False, True):
        quiet, read = AvgSmoothLoss(deferred=deferred), AvgSmoothLoss(deferred=deferred)
        run(quiet, losses)
        for i, loss in enumerate(losses):
            run(read, loss[None])
            _ = (read.latest, read.raw, read.count, i % 7 or read.smooth, i % 11 or read.val)
        assert quiet.smooth == read.smooth


def test_smooth_loss_takes_the_mean_of_other_shapes_and_any_float_type() -> None:
    for deferred in (False, True):
        s = AvgSmoothLoss(0.0, deferred)
        vector, matrix, scalar = torch.tensor([1.0, 3.0]), torch.tensor([[4.0]]), torch.tensor(5.0)
        for loss in (vector, matrix, scalar.bfloat16(), scalar.double() + 1):
            s.accumulate(SimpleNamespace(loss=loss.requires_grad_()))
        assert s.smooth == [2.0, 4.0, 5.0, 6.0]


def test_deferred_losses_travel_in_groups_without_a_host_read() -> None:
    s, losses = AvgSmoothLoss(deferred=True), watch_reads(torch.rand(2 * SEND_EVERY - 1))
    learns = [SimpleNamespace(loss=loss) for loss in losses]
    Watched.reads = 0
    for learn in learns:
        s.accumulate(learn)
    assert len(s.raw) == SEND_EVERY and s.count == 2 * SEND_EVERY - 1
    assert Watched.reads <= 1  # one group has arrived
    assert [type(x) for x in s.raw] == [float] * SEND_EVERY

    assert len(s.smooth) == 2 * SEND_EVERY - 1 and Watched.reads <= 2
    direct = AvgSmoothLoss()
    for learn in learns:
        direct.accumulate(learn)
    assert Watched.reads >= 2 * SEND_EVERY - 1  # the watch works
    assert direct.smooth == s.smooth


def test_latest_never_waits_for_a_copy_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    "A copy is read only when its event has happened, or when the next copy begins."

    class Event:
        done, waited = False, False

        def query(self) -> bool:
            return self.done

        def synchronize(self) -> None:
            self.waited, self.done = not self.done, True

    from learnkit.metrics import base as averages

    init, events = averages._Copy.__init__, []

    def slow(self: Any, losses: torch.Tensor) -> None:
        init(self, losses)
        self.event = Event()
        events.append(self.event)

    monkeypatch.setattr(averages._Copy, '__init__', slow)
    s = run(AvgSmoothLoss(deferred=True), torch.rand(SEND_EVERY + 5))
    assert s.latest is None and s.raw == [] and s.count == SEND_EVERY + 5
    assert [e.waited for e in events] == [False]

    events[0].done = True
    assert s.latest is not None and len(s.raw) == SEND_EVERY
    run(s, torch.rand(2 * SEND_EVERY))  # the second copy waits for the first, which `latest` began
    assert [e.waited for e in events] == [False, True, True, False]
    assert len(s.smooth) == s.count == 3 * SEND_EVERY + 5


@pytest.mark.cuda
def test_smooth_loss_on_the_device() -> None:
    losses = torch.rand(300)
    on_device = losses.cuda()
    s, on_cpu = AvgSmoothLoss(), run(AvgSmoothLoss(), losses)
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode('error')
        try:
            run(s, on_device)
        finally:
            torch.cuda.set_sync_debug_mode('default')
    run(s, losses[:3])  # from the CPU, after the losses of the device
    run(on_cpu, losses[:3])
    assert s.smooth == on_cpu.smooth and s.count == 303


@pytest.mark.parametrize('deferred', [False, True])
def test_smooth_loss_continues_after_a_resume(deferred: bool, tmp_path: Any) -> None:
    losses = torch.rand(150, dtype=torch.float64)
    whole = run(AvgSmoothLoss(0.9, deferred), losses)
    first = run(AvgSmoothLoss(0.9, deferred), losses[:70])
    torch.save(first.state_dict(), tmp_path / 's.pth')

    second = run(AvgSmoothLoss(deferred=deferred), losses[:5])
    second.load_state_dict(torch.load(tmp_path / 's.pth', weights_only=True))
    assert second.count == 70 and second.beta == 0.9
    assert run(second, losses[70:]).smooth == whole.smooth
    assert second.raw == whole.raw
    assert second.val == whole.val


def test_opposite_infinities_and_overflow_end_no_mean() -> None:
    for losses, mean in (
        ([1.0, math.inf, -math.inf], math.nan),
        ([1.0, math.inf], math.inf),
        ([1.7e308] * 3, math.inf),
        ([0.1] * 10, 0.1),
    ):
        smooth = AvgSmoothLoss()
        for loss in losses:
            smooth.accumulate(SimpleNamespace(loss=torch.tensor(loss, dtype=torch.float64)))
        assert smooth.mean_since(0) == pytest.approx(mean, nan_ok=True)
