"""Rows of a history and values by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from learnkit import Callback, DataLoaders, Learner, accuracy
from learnkit.testing import synth_learner


def test_a_row_that_is_read_too_early_raises() -> None:
    learn = synth_learner(cbs=Callback(after_epoch=lambda cb: cb.history[-1]))
    with learn.no_bar(), pytest.raises(IndexError, match='`order = 60`'):
        learn.fit(1)


X, Y = torch.randn(64, 4), torch.arange(64) % 3


def learner(model: nn.Module | None = None, loss_func: Any = None, **options: Any) -> Learner:
    dls = DataLoaders.from_tensors((X, Y), (X, Y), bs=16, device='cpu')
    loss_func = nn.CrossEntropyLoss() if loss_func is None else loss_func
    learn = Learner(dls, model or nn.Linear(4, 3), loss_func, **options)
    learn.logger = lambda row: None
    return learn


def test_values_of_validate_have_names() -> None:
    learn = learner(metrics=accuracy)
    with learn.no_bar():
        values = learn.validate()
    pred = learn.model(X).detach()
    loss, share = F.cross_entropy(pred, Y).item(), (pred.argmax(1) == Y).float().mean().item()
    assert list(values) == pytest.approx([loss, share])
    assert values.names == ['valid_loss', 'accuracy']
    assert values['accuracy'] == values[1] and values['valid_loss'] == values[0]
    assert repr(values) == f'[valid_loss={values[0]:.6g}, accuracy={values[1]:.6g}]'
    with pytest.raises(KeyError, match=r"'acc'.*'accuracy'"):
        values['acc']
    assert values[:1] == [values[0]] and values == [values[0], values[1]]
