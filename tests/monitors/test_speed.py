"""The speed and runtime monitors on a clock set by the test, and the shared behavior of monitors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from learnkit import Callback
from learnkit.engine import counters, run
from learnkit.monitors import speed
from learnkit.monitors.monitor import Monitor
from learnkit.monitors.speed import RuntimeEstimator, SpeedMonitor, find_peak
from learnkit.testing import RegModel, synth_learner


class Clock:
    "A clock that the test advances."

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(speed, 'perf_counter', clock)
    monkeypatch.setattr(counters, 'perf_counter', clock)
    monkeypatch.setattr(run, 'perf_counter', clock)
    return clock


class Pass(Callback):
    "Make a training batch take `train(i)` seconds, and an evaluation batch `valid[dl_name]`."

    def __init__(
        self, clock: Clock, train: Callable[[int], float] = lambda i: 2.0, **valid: float
    ) -> None:
        self.clock, self.train_s, self.valid_s = clock, train, valid

    def before_batch(self) -> None:
        learn = self.learn
        self.clock.now += (
            self.train_s(learn.train_iter)
            if learn.training
            else self.valid_s.get(learn.dl_name, 0.0)
        )


class Seen(Callback):
    "Record logged values with the number of their batch."

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, Any]] = []

    def receive_log(self, name: str, value: Any, weight: Any = 1, shown: bool = True) -> None:
        self.rows.append((self.learn.parts.counters.batches, name, value))

    def of(self, name: str) -> dict[int, Any]:
        return {at: value for at, n, value in self.rows if n == name}


# ------------------------------------------------------------------------------------- all monitors


class Count(Monitor):
    metric_names = {'n_looks': 'how often it has looked'}
    n_looks = 0

    def measure(self) -> dict[str, float]:
        assert not torch.is_grad_enabled()
        self.n_looks += 1
        return {'n_looks': self.n_looks}


@pytest.mark.parametrize(
    ('every', 'at'),
    [
        ('4ba', [4, 8, 12, 16, 20]),
        (7, [7, 14]),
        ('3st', [3, 6, 9, 12, 15, 18]),
        ('96sp', [6, 12, 18]),
        ('0.25dur', [5, 10, 15, 20]),
        ('1ep', [10, 20]),
        ('2ep', [20]),
        ('1h', []),
    ],
)
def test_looks_when_a_multiple_of_every_is_complete(every: Any, at: list[int]) -> None:
    seen = Seen()
    synth_learner(cbs=[Count(every), seen]).fit(2)
    assert list(seen.of('n_looks')) == at


def test_looks_neither_in_evaluation_nor_in_lr_find() -> None:
    learn = synth_learner(cbs=(count := Count('1ba')))
    learn.validate()
    learn.get_preds()
    learn.lr_find(num_it=5, show_plot=False)
    assert count.n_looks == 0


# -------------------------------------------------------------------------------------------- speed


def test_rates_over_a_sliding_window(clock: Clock) -> None:
    seen = Seen()
    synth_learner(cbs=[SpeedMonitor(window=3, every=1), Pass(clock, lambda i: i + 1.0), seen]).fit(
        1
    )
    seconds = {n: float(n) for n in range(1, 11)}  # the nth batch takes n seconds
    expected = {}
    for n in range(2, 11):
        last = range(max(2, n - 2), n + 1)
        expected[n] = len(last) / sum(seconds[i] for i in last)
    assert seen.of('throughput/batches_per_sec') == pytest.approx(expected)
    found = seen.of('throughput/samples_per_sec')
    assert found == pytest.approx({n: 16 * v for n, v in expected.items()})
    assert seen.of('throughput/device/samples_per_sec') == seen.of('throughput/samples_per_sec')
    assert not seen.of('throughput/tokens_per_sec') and not seen.of('throughput/flops_per_sec')


def test_evaluation_is_distinguished_from_training(clock: Clock) -> None:
    seen = Seen()

    def look_around(cb: Callback) -> None:
        if cb.learn.train_iter == 5:
            cb.learn.validate()
        if cb.learn.train_iter == 7:
            cb.learn.get_preds()

    watch = Callback(after_batch=look_around)
    watch.run_valid = False
    monitor = SpeedMonitor(every='1ep', time_unit='minutes')
    learn = synth_learner(n_valid=3, cbs=[monitor, Pass(clock, valid=7.0), watch, seen])
    learn.fit(2)
    # 2 s a batch
    assert list(seen.of('throughput/batches_per_sec').values()) == pytest.approx([0.5, 0.5])
    assert seen.of('time/train') == pytest.approx({10: 20 / 60, 20: 40 / 60})
    assert seen.of('time/val') == pytest.approx({10: 42 / 60, 20: (42 + 21) / 60})
    assert seen.of('time/total') == pytest.approx({10: 62 / 60, 20: 103 / 60})
    clock.now += 500
    learn.validate()
    learn.fit(1)
    # without the time between fits and of separate evaluations
    assert seen.of('time/train')[30] == pytest.approx(60 / 60)
    assert seen.of('time/val')[30] == pytest.approx((42 + 21 + 21 + 42) / 60)
    assert list(seen.of('throughput/batches_per_sec').values())[-1] == pytest.approx(0.5)


def test_tokens(clock: Clock) -> None:
    class CountTokens(Callback):
        run_valid = False

        def after_batch(self) -> None:
            self.learn.parts.counters.tokens += 100

    seen = Seen()
    synth_learner(cbs=[SpeedMonitor(every=5), Pass(clock), CountTokens(), seen]).fit(1)
    assert (
        seen.of('throughput/tokens_per_sec')
        == seen.of('throughput/device/tokens_per_sec')
        == {5: 50.0, 10: 50.0}
    )


class Counted(RegModel):
    "Reports 1000 flops per sample."

    def flops_per_batch(self, batch: Any) -> int:
        return 1000 * len(batch[0])


class Fixed(RegModel):
    flops_per_batch = 16e3


@pytest.mark.parametrize('model', [Counted, Fixed])
def test_flops_and_their_share_of_the_peak(clock: Clock, model: type[RegModel]) -> None:
    seen = Seen()
    cbs = [SpeedMonitor(every=5, peak_flops=32e3), Pass(clock), seen]
    synth_learner(model=model(), cbs=cbs).fit(1)
    assert seen.of('throughput/flops_per_sec') == pytest.approx({5: 8000.0, 10: 8000.0})
    assert seen.of('throughput/device/mfu') == pytest.approx({5: 0.25, 10: 0.25})


def test_the_peak_is_known_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, 'model_device', lambda model, dls: torch.device('cuda'))
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'NVIDIA A10G')
    assert find_peak(synth_learner()) is None
    assert find_peak(synth_learner(model=RegModel().half())) == 70e12
    assert find_peak(synth_learner().to_bf16()) == 70e12


# ------------------------------------------------------------------------------------------ runtime


def test_the_rate_of_training_and_evaluations_so_far_continues(clock: Clock) -> None:
    seen = Seen()
    estimator = RuntimeEstimator(time_unit='minutes', every=5)
    # the first batch, which takes 50 s, is left out
    passing = Pass(clock, lambda i: 2.0 if i else 50.0, valid=7.0)
    learn = synth_learner(cbs=[estimator, passing, seen])
    learn.fit(4)
    expected = {}
    for n in range(5, 41, 5):
        evaluations_s = 2 * 7 * ((n - 1) // 10)  # of two batches, after each 10 batches
        expected[n] = (2 * (n - 1) + evaluations_s) / (n - 1) * (40 - n) / 60
    assert seen.of('time/remaining_estimate') == pytest.approx(expected)
    assert estimator.remaining_s == 0
