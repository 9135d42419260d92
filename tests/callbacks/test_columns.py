"""Columns of the table: their names, their order, and the values that they have."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from learnkit import DataLoaders, Recorder, mae
from tests.helpers.recording import TRAIN, VALID, learner, linear


@pytest.mark.parametrize(
    ('options', 'names'),
    [
        ({}, ['epoch', 'train_loss', 'valid_loss', 'mae', 'time']),
        ({'add_time': False}, ['epoch', 'train_loss', 'valid_loss', 'mae']),
        (
            {'train_metrics': True},
            ['epoch', 'train_loss', 'train_mae', 'valid_loss', 'valid_mae', 'time'],
        ),
        ({'train_metrics': True, 'valid_metrics': False}, ['epoch', 'train_loss', 'mae', 'time']),
    ],
)
def test_columns_before_and_after_a_fit(options: dict[str, bool], names: list[str]) -> None:
    learn = learner((TRAIN, VALID), recorder=Recorder(**options), metrics=mae)
    assert learn.recorder.metric_names == names
    learn.fit(1)
    assert learn.recorder.metric_names == names
    assert len(learn.rows[0]) == len(names)
    assert len(learn.recorder.values[0]) == len(set(names) - {'epoch', 'time'})


def test_named_validation_loaders_have_their_own_columns() -> None:
    model = linear()
    dls = DataLoaders(TRAIN, {'day': VALID, 'night': VALID[1:]})
    learn = learner(dls, model=model, lr=0.0, metrics=mae)
    learn.fit(2)
    assert learn.recorder.metric_names == [
        'epoch',
        'train_loss',
        'day/loss',
        'day/mae',
        'night/loss',
        'night/mae',
        'time',
    ]
    for name, batches in (('day', VALID), ('night', VALID[1:])):
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        expected = F.l1_loss(model(x), y).item()
        assert learn.history[1][f'{name}/mae'] == pytest.approx(expected, rel=1e-5)
        expected = F.mse_loss(model(x), y).item()
        assert learn.history[1][f'{name}/loss'] == pytest.approx(expected, rel=1e-5)
