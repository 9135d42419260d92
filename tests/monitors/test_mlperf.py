"""MLPerf result files."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from learnkit import Callback, Learner
from learnkit.callbacks import GradientAccumulation
from learnkit.core.errors import MetricError, OptionError
from learnkit.monitors.mlperf import MLPerf
from tests.helpers.learners import quiet_synth_learner


def closeness(pred: Tensor, targ: Tensor) -> Tensor:
    return -(pred - targ).abs().mean()


learner = partial(quiet_synth_learner, n_train=4, lr=0.01, metrics=closeness)


def lines(path: Path) -> list[dict[str, Any]]:
    texts = path.read_text().splitlines()
    assert all(text.startswith(':::MLLOG ') for text in texts)
    return [json.loads(text.removeprefix(':::MLLOG ')) for text in texts]


def test_the_lines_of_a_run(tmp_path: Path) -> None:
    mlperf = MLPerf(benchmark='line', submitter='us', system='desk', cache_cleared=True)
    learn = learner(mlperf, path=tmp_path)
    learn.fit(2)
    assert learn.ml_perf.file == tmp_path / 'mlperf/results/desk/line/result_0.txt'
    rows = lines(learn.ml_perf.file)
    submission = [f'submission_{k}' for k in ('benchmark', 'division', 'org', 'platform', 'status')]
    epoch = (
        'block_start epoch_start epoch_stop eval_start eval_accuracy eval_stop block_stop'.split()
    )
    assert [r['key'] for r in rows] == [
        'cache_clear',
        'init_start',
        *submission,
        'seed',
        'global_batch_size',
        'train_samples',
        'eval_samples',
        'init_stop',
        'run_start',
        *epoch,
        *epoch,
        'run_stop',
    ]
    for r in rows:
        assert set(r) == {'namespace', 'time_ms', 'event_type', 'key', 'value', 'metadata'}
    kinds = {'start': 'INTERVAL_START', 'stop': 'INTERVAL_END'}
    for r in rows:
        assert r['event_type'] == kinds.get(r['key'].rpartition('_')[2], 'POINT_IN_TIME')
    assert [r['time_ms'] for r in rows] == sorted(r['time_ms'] for r in rows)

    values = {r['key']: r['value'] for r in rows}
    assert values['submission_org'] == 'us'
    assert values['global_batch_size'] == 16
    assert values['train_samples'] == 64
    assert values['eval_samples'] == 32
    measured = [
        (r['value'], r['metadata']['epoch_num'], r['metadata']['samples_count'])
        for r in rows
        if r['key'] == 'eval_accuracy'
    ]
    assert measured == [(row['closeness'], i, 64 * i) for i, row in enumerate(learn.history, 1)]
    assert rows[-1]['metadata']['status'] == 'success'


def test_the_file_ends_where_the_target_is_reached(tmp_path: Path) -> None:
    torch.manual_seed(0)
    learn = learner(path=tmp_path)
    learn.fit(6)
    target = learn.history[2]['closeness']
    best = [row['closeness'] for row in learn.history]
    assert best.index(next(v for v in best if v >= target)) == 2

    def again(threshold: float, **options: Any) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        learn = learner(MLPerf(target=threshold, **options), path=tmp_path)
        learn.fit(6)
        return lines(learn.ml_perf.file)

    rows = again(target, comp='greater')
    assert [r['metadata']['epoch_num'] for r in rows if r['key'] == 'eval_accuracy'] == [1, 2, 3]
    assert rows[-1]['key'] == 'run_stop' and rows[-1]['metadata']['status'] == 'success'
    spoil = Callback(after_train=lambda cb: cb.learn.model.a.data.fill_(math.nan))
    torch.manual_seed(0)
    diverged = learner(
        MLPerf(target=1e9, comp=lambda new, old: not new > old), spoil, path=tmp_path
    )
    diverged.fit(1)  # NaN reaches no target
    assert lines(diverged.ml_perf.file)[-1]['metadata']['status'] == 'aborted'
    rows = again(1.0, comp='greater')
    assert rows[-1]['metadata']['status'] == 'aborted' and rows[-1]['metadata']['epoch_num'] == 6


def test_a_run_that_fails_is_aborted_and_the_next_has_its_own_file(tmp_path: Path) -> None:
    def fail(cb: Callback) -> None:
        if failing and cb.learn.time.ba == 5:
            raise RuntimeError('boom')

    failing = True
    learn = learner(MLPerf(index=3), Callback(after_loss=fail), path=tmp_path)
    with pytest.raises(RuntimeError):
        learn.fit(3)
    rows = lines(learn.ml_perf.file)
    assert learn.ml_perf.file.name == 'result_3.txt' and rows[-1]['metadata']['status'] == 'aborted'
    failing = False
    learn.fit(1)
    assert learn.ml_perf.file.name == 'result_4.txt'
    assert lines(learn.ml_perf.file)[-1]['metadata']['status'] == 'success'
    learn.validate()
    assert len(list(learn.ml_perf.file.parent.iterdir())) == 2


def test_a_step_of_several_batches(tmp_path: Path) -> None:
    learn = learner(MLPerf(), GradientAccumulation(40), path=tmp_path)
    learn.fit(1)
    values = {r['key']: r['value'] for r in lines(learn.ml_perf.file)}
    assert values['global_batch_size'] == 48


def test_what_is_missing_is_reported_before_training(tmp_path: Path) -> None:
    (tmp_path / 'file').write_text('')
    for cb, error in (
        (MLPerf(monitor='accuracy'), MetricError),
        (MLPerf('file/x'), OptionError),
        (MLPerf(target=1.0), OptionError),
        (MLPerf(monitor='lr', target=1.0), MetricError),
    ):
        learn = learner(cb, path=tmp_path)
        with pytest.raises(error):
            learn.fit(1)
        assert learn.time.ba == 0
    with pytest.raises(MetricError, match='validation loader'):
        Learner(
            [(torch.zeros(2, 1), torch.zeros(2, 1))],
            learn.model,
            torch.nn.MSELoss(),
            path=tmp_path,
            cbs=MLPerf(),
        ).fit(1)
