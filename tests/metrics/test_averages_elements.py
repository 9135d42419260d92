"""Metrics over elements: the value on sequences of different lengths, invalid targets, and `on=`."""

from functools import partial
from typing import Any

import pytest
import torch

from learnkit.core.errors import MetricError
from learnkit.metrics import (
    AvgLoss,
    LossMetrics,
    Perplexity,
    accuracy,
    error_rate,
    exp_rmspe,
    mae,
    mse,
    msle,
    rmse,
    top_k_accuracy,
)
from learnkit.metrics.averages import AvgMetric, as_metrics
from tests.helpers.measuring import batch, devices

LENGTHS = (1, 5, 2, 9)


def sequences(n_classes: int = 0, device: str = 'cpu') -> list[tuple[torch.Tensor, torch.Tensor]]:
    "Return batches of 2 sequences of different lengths: class scores and numbers, or two sets of numbers."
    if n_classes:
        return [
            (
                torch.randn(2, t, n_classes, device=device),
                torch.randint(n_classes, (2, t), device=device),
            )
            for t in LENGTHS
        ]
    return [(torch.rand(2, t, device=device), torch.rand(2, t, device=device)) for t in LENGTHS]


def of_the_set(f: Any, batches: list[tuple[torch.Tensor, torch.Tensor]], **kw: Any) -> float:
    "Return the value of a list of metrics after all batches."
    metric = as_metrics(f)[0]
    metric.reset()
    for pred, targ in batches:
        metric.accumulate(batch(pred, targ, xb=(pred,), **kw))
    return metric.value


@devices
@pytest.mark.parametrize(
    'f',
    [
        accuracy,
        error_rate,
        top_k_accuracy,
        partial(top_k_accuracy, k=2),
        mse,
        mae,
        msle,
        rmse,
        exp_rmspe,
        {'mine': partial(accuracy, axis=-1)},
    ],
)
def test_sequences_of_any_length_give_the_value_on_the_set(f: Any, device: str) -> None:
    inner = f['mine'] if isinstance(f, dict) else f
    name = getattr(inner, 'func', inner).__name__
    batches = sequences(7 if name in ('accuracy', 'error_rate', 'top_k_accuracy') else 0, device)
    together = [torch.cat([b[i].flatten(0, 1) for b in batches]) for i in range(2)]
    assert of_the_set(f, batches) == pytest.approx(float(inner(*together)), rel=1e-6)


def test_five_of_six_tokens_are_right() -> None:
    batches = [
        (torch.eye(2)[torch.tensor([[1]])], torch.tensor([[0]])),
        (torch.eye(2)[torch.tensor([[0, 1, 1, 1, 1]])], torch.tensor([[0, 1, 1, 1, 1]])),
    ]
    assert of_the_set(accuracy, batches) == pytest.approx(5 / 6)
    # a mean over samples, as it was asked for
    assert of_the_set(AvgMetric(accuracy), batches) == pytest.approx(0.5)


# -- where a metric is computed --------------------------------------------------------------------


@pytest.mark.parametrize('make', [AvgLoss, Perplexity, partial(LossMetrics, 'kl')])
def test_classes_take_on(make: Any) -> None:
    made = make(on='train')
    assert (made[0] if isinstance(made, list) else made).on == 'train'
    with pytest.raises(MetricError, match="'train', 'valid' or 'both'"):
        make(on='test')
