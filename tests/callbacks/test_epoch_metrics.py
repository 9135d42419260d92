"""Metrics of an epoch: the places where they are measured, and changes between fits."""

import pytest
import torch
import torch.nn.functional as F

from learnkit import AvgMetric, mae, mse
from tests.helpers.recording import TRAIN, VALID, learner, linear, points


def test_metrics_on_train_valid_or_both() -> None:
    model = linear()
    train, valid = [points(4), points(2)], VALID
    metrics = [
        AvgMetric(mae, 'a', on='train'),
        AvgMetric(mae, 'b', on='both'),
        AvgMetric(mae, 'c', on='valid'),
        AvgMetric(mae, 'd'),
    ]
    learn = learner((train, valid), model=model, lr=0.0, metrics=metrics)
    learn.fit(1)
    of = lambda batches: F.l1_loss(
        model(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches])
    ).item()
    row = learn.history[0]
    assert {k: row[k] for k in row if k[-1] in 'abcd' and k != 'fit'} == {
        'train_a': pytest.approx(of(train)),
        'train_b': pytest.approx(of(train)),
        **dict.fromkeys('bcd', pytest.approx(of(valid))),
    }


def test_metrics_can_be_changed_between_fits() -> None:
    learn = learner((TRAIN, VALID), metrics=mae)
    learn.fit(1)
    learn.metrics = [mse]
    learn.fit(1)
    assert 'mae' in learn.history[0] and 'mae' not in learn.history[1]
    assert learn.history[1]['mse'] == pytest.approx(learn.history[1]['valid_loss'])
    assert learn.recorder.metric_names == ['epoch', 'train_loss', 'valid_loss', 'mse', 'time']
