"""Monitors, stoppers and periodic callbacks with evaluations within epochs, and how monitors are displayed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fastcore.basics import noop

from learnkit import Callback, DataLoaders, Evaluator, Learner, Periodic, TimeError, mae
from learnkit.callbacks import (
    ActivationMonitor,
    BestMetric,
    LRMonitor,
    MemoryMonitor,
    MLPerf,
    OptimizerMonitor,
    PeriodicData,
    RuntimeEstimator,
    SpeedMonitor,
    ThresholdStopper,
)
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.loggers import JSONLinesLogger, read_log
from learnkit.monitors.monitor import Monitor
from learnkit.testing import synth_learner

MONITORS = (
    SpeedMonitor,
    RuntimeEstimator,
    LRMonitor,
    OptimizerMonitor,
    MemoryMonitor,
    ActivationMonitor,
)


def learner(*cbs: Any, path: Path = Path(), **kwargs: Any) -> Learner:
    "Return a Learner with six batches per epoch, and one batch in each of two validation loaders."
    learn = synth_learner(n_train=6, n_valid=1, lr=0.05, path=path, cbs=list(cbs), **kwargs)
    learn.logger = noop
    return learn


# -- what is printed, recorded and logged ----------------------------------------------------------


def test_monitors_leave_the_printed_table_narrow() -> None:
    rows: list[list[Any]] = []
    learn = learner(*(cls(every='2ba') for cls in MONITORS))
    learn.logger = lambda row: rows.append(list(row))
    learn.fit(1)
    assert list(learn.recorder.metric_names) == ['epoch', 'train_loss', 'valid_loss', 'time']
    assert len(rows[0]) == 4
    for name in (
        'time/train',
        'l2_norm/grad/a',
        'memory/peak_rss_mem',
        'activations/l2_norm/RegModel_output.0',
    ):
        assert name in learn.history[0]


def test_monitors_are_logged_once_and_not_with_the_epoch(tmp_path: Path) -> None:
    learn = learner(
        *(cls(every='2ba') for cls in MONITORS), JSONLinesLogger, path=tmp_path, eval_every='2ba'
    )
    learn.fit(2)
    rows = read_log(tmp_path / 'metrics.jsonl')
    names = {name for row in rows for name in row if name.startswith('epoch/')}
    assert names == {'epoch/epoch', 'epoch/train_loss', 'epoch/time'}
    assert [row['step'] for row in rows if 'time/train' in row] == [2, 4, 6, 8, 10, 12]


class Steps(Monitor):
    metric_names = {'mean/ba': 'batches', 'last/ba': 'batches'}
    latest = ('last/',)

    def measure(self) -> dict[str, float]:
        return dict.fromkeys(self.metric_names, self.learn.time.ba)


def test_the_last_value_is_kept_where_a_mean_is_meaningless() -> None:
    learn = learner(Steps(every='2ba'))
    learn.fit(1)
    assert (learn.history[0]['mean/ba'], learn.history[0]['last/ba']) == (4, 6)


def test_times_rates_and_peaks_are_the_last_ones() -> None:
    seen: dict[str, Any] = {}

    def receive(self: Any, name: str, value: Any, weight: Any, shown: bool) -> None:
        seen[name] = weight, shown

    listener_class = type('Hears', (Callback,), {'receive_log': receive})
    learner(*(cls(every='2ba') for cls in MONITORS), listener_class()).fit(1)
    assert not any(shown for _, shown in seen.values())
    for name in ('time/train', 'time/total', 'time/remaining_estimate', 'memory/peak_rss_mem'):
        assert seen[name] == (None, False)
    assert seen[next(n for n in seen if n.startswith('lr-'))] == (None, False)
    assert seen['l2_norm/grad/a'] == seen['throughput/samples_per_sec'] == (1, False)


def test_every_monitor_describes_its_names() -> None:
    learn = learner(*(cls(every='2ba') for cls in MONITORS))
    meanings = learn.metric_names()
    learn.fit(1)
    patterns = [re.sub(r'\\\{\w+\\\}', '.+', re.escape(name)) for name in meanings]
    assert not [
        name
        for name in learn.history[0]
        if name not in ('fit', 'epoch', 'time') and not any(re.fullmatch(p, name) for p in patterns)
    ]


# -- evaluations within epochs ---------------------------------------------------------------------


def test_threshold_stopper_stops_in_the_middle_of_an_epoch() -> None:
    torch.manual_seed(0)
    learn = learner(eval_every='2ba')
    learn.fit(1)
    first, second, *_ = (row['valid_loss'] for row in learn.recorder.evaluations)
    torch.manual_seed(0)
    learn = learner(ThresholdStopper('valid_loss', (first + second) / 2), eval_every='2ba')
    learn.fit(1)
    assert first > second and learn.time.ba == 4
    assert learn.threshold_stopper.value == learn.recorder.evaluations[1]['valid_loss']


def two_loaders() -> DataLoaders:
    "Return loaders with two validation loaders, `day` and `night`; the targets of `night` are shifted."
    x = torch.randn(96, 1)
    batches = [(b, 2 * b + 1) for b in x.split(16)]
    return DataLoaders(
        batches,
        {'day': batches[:2], 'night': Evaluator([(b, 2 * b - 3) for b, _ in batches[:2]], '2ba')},
    )


def test_best_metric_matches_the_best_evaluation() -> None:
    learn = learner(
        BestMetric('night/loss', 'night/mae'), dls=two_loaders(), metrics=mae, eval_every='3ba'
    )
    learn.fit(3)
    rows = [row for row in learn.recorder.evaluations if 'night/loss' in row]
    best = min(rows, key=lambda row: row['night/loss'])
    assert [row['ba'] for row in rows] == [2, 4, 6, 8, 10, 12, 14, 16, 18]
    assert learn.best_metric.best_at.ba == best['ba']
    assert learn.history[-1]['best/night/mae'] == best['night/mae']


def test_best_metric_is_not_fooled_by_another_loaders_evaluation() -> None:
    learn = learner(BestMetric('night/loss', 'day/loss'), dls=two_loaders(), eval_every='3ba')
    learn.fit(1)
    assert learn.best_metric.best_at.ba % 2 == 0
    seen = next(
        row for row in learn.recorder.evaluations if row['ba'] == learn.best_metric.best_at.ba
    )
    assert learn.best_metric.at_best['day/loss'] == seen.get('day/loss')


def test_mlperf_has_each_evaluation_once(tmp_path: Path) -> None:
    learn = learner(
        MLPerf(monitor='night/loss'), dls=two_loaders(), eval_every='3ba', path=tmp_path
    )
    learn.fit(1)
    lines = [
        json.loads(line.removeprefix(':::MLLOG '))
        for line in learn.ml_perf.file.read_text().splitlines()
    ]
    got = [
        (line['metadata']['samples_count'], line['value'])
        for line in lines
        if line['key'] == 'eval_accuracy'
    ]
    assert got == [
        (16 * row['ba'], row['night/loss'])
        for row in learn.recorder.evaluations
        if 'night/loss' in row
    ]
    assert sum(line['key'] == 'eval_start' for line in lines) == len(learn.recorder.evaluations)


def test_periodic_data_takes_the_loader_of_an_evaluator() -> None:
    learn = learner(PeriodicData('2ba', 'night'), dls=two_loaders(), eval_every='3ba')
    learn.fit(1)
    targets = torch.cat([y for _, y in dict(evaluation_loaders(learn.dls))['night']])
    assert learn.periodic_data.results['targs'].equal(targets)


# -- tokens ----------------------------------------------------------------------------------------


def test_periodic_counts_tokens() -> None:
    at: list[int] = []
    learn = learner(
        Periodic('100tok', lambda cb: at.append(cb.learn.time.ba)), token_func=lambda xb, yb: 40
    )
    learn.fit(1)
    assert at == [3, 5]  # 120 and 200 tokens


@pytest.mark.parametrize(
    'make', [lambda: Periodic('100tok', noop), lambda: SpeedMonitor(every='100tok')]
)
def test_without_tokens_an_error_is_raised_before_training(make: Any) -> None:
    learn = learner(make())
    with pytest.raises(TimeError, match='token_func'):
        learn.fit(1)
    assert learn.time.ba == 0
