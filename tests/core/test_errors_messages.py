"""Error messages name the fix where the cause alone would not be enough."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import (
    SGD,
    Adam,
    BatchError,
    Callback,
    CancelBatchException,
    FitError,
    LearnkitError,
    MetricError,
    OptimizerError,
    OptimWrapper,
    Time,
    TimeError,
)
from learnkit.metrics import LossMetrics
from learnkit.testing import synth_learner


def cancelled() -> Any:
    def skip(cb: Any) -> None:
        raise CancelBatchException

    with synth_learner(cbs=Callback(before_batch=skip)).no_bar() as learn:
        learn.get_preds()


def fit_by(opt_func: Any) -> Callable[[], Any]:
    return lambda: synth_learner(opt_func=opt_func).fit(1)


def no_optimizers(params: Any, lr: float) -> list[Any]:
    return []


@pytest.mark.parametrize(
    ('do', 'error', 'expected_text'),
    [
        (lambda: Time('2 epochs'), TimeError, "Write '2ep'."),
        (
            fit_by(partial(SGD, momentum=0.9)),
            OptimizerError,
            'opt_func=SGD cannot be called with the parameters, `lr=` and momentum',
        ),
        (
            fit_by(partial(Adam, betas=(0.9, 0.99))),
            OptimizerError,
            'opt_func=Adam cannot be called',
        ),
        (fit_by(no_optimizers), OptimizerError, 'which has no optimizer'),
        (
            lambda: OptimWrapper([nn.Parameter(torch.zeros(1))]),
            OptimizerError,
            'opt=torch.optim.AdamW',
        ),
        (lambda: synth_learner().fit(2, start_epoch=3), FitError, '`fit(3 + epochs to train)`'),
        (
            lambda: synth_learner().fit('10m', start_epoch=3),
            FitError,
            'needs a fit of epochs, `fit(10)`',
        ),
        (lambda: LossMetrics('a,b', 'c'), MetricError, 'give each attribute one'),
        (cancelled, BatchError, 'Does a callback cancel them all?'),
    ],
)
def test_the_message_names_the_fix(
    do: Callable[[], Any], error: type[LearnkitError], expected_text: str
) -> None:
    with pytest.raises(error) as e:
        do()
    assert expected_text in str(e.value)
