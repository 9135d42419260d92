"""Callbacks that end a fit by a time, a threshold or patience."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learnkit import Callback
from learnkit.callbacks.early_stopping import EarlyStopping
from learnkit.callbacks.stoppers import FixedStopper, ThresholdStopper
from learnkit.core.errors import CancelEpochException, OptionError, TimeError
from learnkit.metrics.averages import ValueMetric
from learnkit.metrics.direction import MetricProperties
from learnkit.testing import synth_learner
from tests.helpers.learners import quiet_synth_learner

# ------------------------------------------------------------------------------------------ by time


@pytest.mark.parametrize(
    ('at', 'batches', 'rows'),
    [
        ('25ba', 25, 3),
        ('3ep', 30, 3),
        (2, 20, 2),
        ('161sp', 11, 2),
        ('0.25dur', 25, 3),
    ],
)
def test_stops_at_a_time(at: Any, batches: int, rows: int) -> None:
    learn = quiet_synth_learner(n_train=10, cbs=FixedStopper(at))  # batches of 16
    learn.fit(10)
    assert (learn.time.ba, learn.opt.n_steps, len(learn.history)) == (batches, batches, rows)


def test_the_time_is_the_sum_of_all_fits_and_a_fit_after_it_trains_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    learn = synth_learner(n_train=10, cbs=FixedStopper('25ba'))
    ended: list[int] = []
    learn.add_cb(Callback(after_fit=lambda cb: cb.fitting and ended.append(cb.learn.time.ba)))
    learn.logger = lambda row: None
    with learn.no_bar():
        learn.fit(1)
        learn.fit(1)
        learn.fit(1)
        learn.fit(1)
    assert ended == [10, 20, 25, 25] and len(learn.history) == 3
    assert '25ba are over' in capsys.readouterr().out
    learn.validate()


def test_stops_after_an_iteration() -> None:
    learn = quiet_synth_learner(n_train=2, cbs=FixedStopper('2iter'))
    learn.fit(10, iteration=3)
    assert learn.time.ep == 6 and learn.time.iter == 2


def test_an_epoch_that_was_cancelled_counts_once_it_has_trained() -> None:
    def cancel(cb: Callback) -> None:
        raise CancelEpochException

    learn = quiet_synth_learner(n_train=2, cbs=[FixedStopper('3ep'), Callback(after_step=cancel)])
    learn.fit(10, start_epoch=4)
    assert learn.time.ep == 3


@pytest.mark.parametrize('wrong', ['5 parsecs', 0, None])
def test_what_is_not_a_time_is_refused(wrong: Any) -> None:
    with pytest.raises(TimeError):
        FixedStopper(wrong)
    with pytest.raises(TimeError):
        EarlyStopping(patience=wrong)


@pytest.mark.parametrize(
    'cb',
    [
        FixedStopper('9tok'),
        EarlyStopping(patience='9tok'),
    ],
)
def test_a_unit_that_is_not_counted_is_refused_before_training(cb: Callback) -> None:
    learn = quiet_synth_learner(cbs=cb)
    with pytest.raises(TimeError, match='9tok'):
        learn.fit(1)
    assert learn.time.ba == 0


# ----------------------------------------------------------------------------------------- patience


@pytest.mark.parametrize(
    ('patience', 'rows'),
    [
        (2, 3),
        ('2ep', 4),
        ('19ba', 3),
        ('20ba', 4),
        ('1iter', 5),
    ],
)
def test_patience_in_every_unit(patience: Any, rows: int) -> None:
    # the first epoch is the best; a number is reached, as in fastai, a time is exceeded, as in Composer
    learn = quiet_synth_learner(n_train=10, lr=0.0, cbs=EarlyStopping(patience=patience))
    learn.fit(10, lr=0.0, iteration=2)
    assert len(learn.history) == rows


# ---------------------------------------------------------------------------------------- threshold


def mae(pred: Tensor, targ: Tensor) -> Tensor:
    return (pred - targ).abs().mean()


def epochs_until(column: str, passes: Any, **kwargs: Any) -> int:
    "Return the number of epochs in which the same training passes a threshold, from its history."
    torch.manual_seed(1)
    learn = quiet_synth_learner(lr=0.004, **kwargs)
    learn.fit(20)
    return 1 + next(i for i, row in enumerate(learn.history) if passes(row[column]))


@pytest.mark.parametrize(
    ('monitor', 'threshold', 'comp', 'passes'),
    [
        ('valid_loss', 1.0, None, lambda v: v < 1.0),
        ('mae', 0.9, MetricProperties(), lambda v: v < 0.9),
        ('train_loss', 4.0, 'less', lambda v: v < 4.0),
        ('mae', 1.2, np.less, lambda v: v < 1.2),
        (lambda learn: learn.history[-1]['mae'], 0.9, 'less', lambda v: v < 0.9),
    ],
)
def test_stops_once_a_metric_is_past_a_threshold(
    monitor: Any, threshold: float, comp: Any, passes: Any
) -> None:
    column = monitor if isinstance(monitor, str) else 'mae'
    expected = epochs_until(column, passes, metrics=mae)
    torch.manual_seed(1)
    learn = quiet_synth_learner(
        lr=0.004, metrics=mae, cbs=ThresholdStopper(monitor, threshold, comp)
    )
    learn.fit(20)
    assert 1 < len(learn.history) == expected < 20
    assert learn.threshold_stopper.value == learn.history[-1][column]
    assert passes(learn.threshold_stopper.value)


def test_nan_is_past_no_threshold() -> None:
    at: dict[str, Any] = {}
    values = [math.nan, 1.0, math.nan, 3.0, 4.0]
    score = ValueMetric(lambda: values[at['learn'].epoch], 'score')
    stopper = ThresholdStopper('score', 2.0, lambda value, limit: not value <= limit)
    at['learn'] = learn = quiet_synth_learner(metrics=score, cbs=stopper)
    learn.fit(5)
    assert len(learn.history) == 4 and stopper.best == stopper.value == 3.0


@pytest.mark.parametrize(
    'wrong',
    [
        {'monitor': 'quux'},
        {'comp': 'up'},
        {'monitor': lambda learn: 1},
    ],
)
def test_thresholds_that_cannot_work_are_refused(wrong: Any) -> None:
    with pytest.raises(OptionError):
        ThresholdStopper(**{'monitor': 'accuracy', 'threshold': 0.9, **wrong})
