"""Rows of a history and values by name."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from learnkit import Callback, Learner, accuracy
from learnkit.testing import synth_learner


def test_a_row_that_is_read_too_early_raises() -> None:
    learn = synth_learner(cbs=Callback(after_epoch=lambda cb: cb.history[-1]))
    with learn.no_bar(), pytest.raises(IndexError, match='`order = 60`'):
        learn.fit(1)


def test_values_of_validate_have_names() -> None:
    x, y = torch.randn(64, 4), torch.arange(64) % 3
    dls = [(x, y)], [(x, y)]
    learn = Learner(dls, nn.Linear(4, 3), nn.CrossEntropyLoss(), metrics=accuracy)
    with learn.no_bar():
        values = learn.validate()
    pred = learn.model(x).detach()
    loss, share = F.cross_entropy(pred, y).item(), (pred.argmax(1) == y).float().mean().item()
    assert list(values) == pytest.approx([loss, share])
    assert values.names == ['valid_loss', 'accuracy']
    assert values['accuracy'] == values[1] and values['valid_loss'] == values[0]
    assert repr(values) == f'[valid_loss={values[0]:.6g}, accuracy={values[1]:.6g}]'
    with pytest.raises(KeyError, match=r"'acc'.*'accuracy'"):
        values['acc']
    assert values[:1] == [values[0]] and values == [values[0], values[1]]
