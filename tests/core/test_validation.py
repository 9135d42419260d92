"""Hints in error messages, and the line that warnings point to."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import Learner, SaveModelCallback
from learnkit.core.validation import classes_hint, precision_hint
from learnkit.losses import CrossEntropyLossFlat

X, Y = torch.randn(8, 4), torch.arange(8) % 3


def catch_warning(do: Any) -> warnings.WarningMessage:
    "Return the only warning of a call."
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        do()
    (one,) = seen
    return one


def test_warnings_point_at_the_users_line(tmp_path: Any) -> None:
    learn = Learner([(X, Y)], nn.Linear(4, 3), nn.CrossEntropyLoss(), path=tmp_path)
    nan = SaveModelCallback(monitor=lambda learn: float('nan'))
    for do in (
        learn.freeze,
        lambda: learn.fit(1, cbs=nan),
    ):
        one = catch_warning(do)
        assert one.filename == __file__, one


def test_float64_from_numpy() -> None:
    wide = (X.double(),)
    assert "`x.astype('float32')`" in precision_hint(wide, nn.Linear(4, 3))
    assert 'float64' in precision_hint({'x': X.numpy(), 'y': [X.double()]}, nn.Linear(4, 3))
    for b, model in (
        (X, nn.Linear(4, 3)),
        (wide, nn.Linear(4, 3).double()),
        (wide, nn.ReLU()),
        ((), nn.Linear(4, 3)),
    ):
        assert precision_hint(b, model) == ''


def test_classes_that_are_out_of_bounds() -> None:
    loss, pred, targ = CrossEntropyLossFlat(), torch.zeros(1, 7, 5), torch.full((1, 7), 6)
    with pytest.raises(IndexError) as e:
        loss(pred, targ)
    assert classes_hint(loss, pred, (targ,), e.value) == ': targets from 6 to 6 for 5 classes'
