"""Row 28: a metric is NaN. It is never best: the best checkpoint stays, and no tracker is poisoned."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from learnkit import Callback, CheckpointError
from learnkit.callbacks import Checkpoint, EarlyStoppingCallback, ReduceLROnPlateau
from learnkit.checkpoint.folder import entries, find
from learnkit.metrics import ValueMetric
from tests.faults.run_helpers import make_learner, quiet

NAN, INF = math.nan, math.inf


def planned(values: list[float], *cbs: Any, **options: Any) -> Any:
    "Return a learner whose metric `score` is what is planned for each epoch."
    at: dict[str, Any] = {}
    score = ValueMetric(lambda: values[min(at['learn'].epoch, len(values) - 1)], 'score')
    at['learn'] = learn = quiet(make_learner(list(cbs), metrics=score, **options))
    return learn


def kept(folder: Path) -> list[tuple[str, Any]]:
    return [(e.path.name.split('-')[1], e.info['value']) for e in reversed(entries(folder))]


@pytest.mark.parametrize(
    ('values', 'mode', 'epochs'),
    [
        ([1.0, NAN, NAN, NAN], 'min', ['ep1', 'ep4']),
        ([NAN, 2.0, NAN, NAN], 'max', ['ep2', 'ep4']),
        ([NAN, 1.0, 1.0, NAN], 'max', ['ep2', 'ep4']),
        ([3.0, NAN, 1.0, 2.0], 'min', ['ep3', 'ep4']),
        ([3.0, INF, NAN, 4.0], 'min', ['ep1', 'ep4']),
        ([-INF, NAN, -5.0, NAN], 'max', ['ep3', 'ep4']),
        ([NAN, NAN, NAN, NAN], 'min', ['ep4']),
        ([NAN, NAN, NAN, 1.0], 'max', ['ep4']),
    ],
)
def test_the_best_checkpoint_stays(
    values: list[float], mode: str, epochs: list[str], tmp_path: Path
) -> None:
    saver = Checkpoint(folder=tmp_path, keep_last=1, keep_best=1, monitor='score', mode=mode)
    learn = planned(values, saver)
    learn.fit(4)
    assert [epoch for epoch, _ in kept(tmp_path)] == epochs
    assert all(value is None or value == value for _, value in kept(tmp_path))
    finite = [v for v in values if v == v]
    if not finite:
        with pytest.raises(CheckpointError, match='None has a monitored value'):
            learn.fit(5, resume='best')
        return
    found = find('best', tmp_path)
    assert found and found[2]['value'] == (min if mode == 'min' else max)(finite)


@pytest.mark.parametrize('first', [NAN, 5.0], ids=['from the first epoch', 'later'])
def test_early_stopping_continues_to_compare(first: float) -> None:
    stopper = EarlyStoppingCallback('score', comp='less', patience=3)
    learn = planned([first, NAN, 4.0, NAN, 3.0, 3.5, NAN, 9.0], stopper)
    learn.fit(20)
    assert len(learn.history) == 8 and stopper.best == 3.0, 'three epochs after the best'


def test_a_plateau_counts_nan_as_no_improvement() -> None:
    values = [1.0, NAN, NAN, 0.5, NAN]
    learn = planned(values, ReduceLROnPlateau('score', comp='less', patience=2, factor=10.0))
    rates: list[float] = []
    learn.fit(5, cbs=Callback(before_epoch=lambda cb: rates.append(cb.opt.hypers[0]['lr'])))
    assert rates == pytest.approx([0.05, 0.05, 0.05, 0.005, 0.005])


@pytest.mark.full
def test_all_orders(tmp_path: Path) -> None:
    "Every sequence of four of these values, both ways."
    n = 0
    for values, mode in product(product([NAN, 1.0, 2.0, INF], repeat=4), ('min', 'max')):
        folder = tmp_path / f'{n}'
        saver = Checkpoint(folder=folder, keep_last=1, monitor='score', mode=mode, background=False)
        planned(list(values), saver).fit(4)
        finite = [v for v in values if v == v]
        want = {'ep4'} | (
            {f'ep{values.index((min if mode == "min" else max)(finite)) + 1}'} if finite else set()
        )
        assert {epoch for epoch, _ in kept(folder)} == want, (values, mode)
        n += 1
    print(f'row 28: {n} sequences of values with NaN, the best checkpoint stayed in each')
