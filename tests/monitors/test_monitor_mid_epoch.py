"""Monitors, stoppers and periodic callbacks with evaluations within epochs, and how monitors are displayed."""

import re
from functools import partial
from pathlib import Path
from typing import Any

from learnkit import Callback
from learnkit.callbacks import (
    ActivationMonitor,
    LRMonitor,
    MemoryMonitor,
    OptimizerMonitor,
    RuntimeEstimator,
    SpeedMonitor,
)
from learnkit.loggers import JSONLinesLogger, read_log
from tests.helpers.learners import quiet_synth_learner

MONITORS = (
    SpeedMonitor,
    RuntimeEstimator,
    LRMonitor,
    OptimizerMonitor,
    MemoryMonitor,
    ActivationMonitor,
)


# six batches per epoch, and one validation batch
learner = partial(quiet_synth_learner, n_train=6, n_valid=1, lr=0.05)


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
