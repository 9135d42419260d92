"""Errors of the model, the loss and the backward pass are explained; then the Learner trains."""

from typing import Any

import pytest
from torch import Tensor, nn

from learnkit import DataLoaders
from learnkit.core.errors import BatchError, LossError
from tests.helpers.refusing import X, Y, make, refuses, trains


def test_no_loss_function() -> None:
    learn = make(loss_func=None)
    refuses(learn, LossError, 'No loss function', 'Linear', 'loss_func=', 'cross_entropy')
    learn.loss_func = nn.MSELoss()
    trains(learn)


@pytest.mark.parametrize(
    ('loss', 'expected_text'),
    [
        (nn.MSELoss(reduction='none'), ['(8, 1)', "reduction='mean'"]),
        (
            lambda p, y: nn.functional.mse_loss(p.detach(), y),
            ['does not depend on any parameter', 'detached'],
        ),
        (lambda p, y: nn.functional.mse_loss(p, y).item(), ['tensor']),
        (lambda p, y: None, ['None', 'tensor']),
        (lambda p, y: {'a': 1.0}, ["'a'", 'tensor']),
        (lambda p, y: (p - y).abs().mean() > 0, ['does not depend on any parameter']),
    ],
    ids=['shape', 'detached', 'a number', 'None', 'numbers', 'a comparison'],
)
def test_a_loss_that_cannot_be_minimised(loss: Any, expected_text: list[str]) -> None:
    learn = make(loss_func=loss)
    refuses(learn, LossError, *expected_text)
    learn.loss_func = nn.MSELoss()
    trains(learn)


@pytest.mark.parametrize('batch', [X, (X,), [X], {'x': X}], ids=lambda b: type(b).__name__)
def test_a_batch_without_targets(batch: Any) -> None:
    class TakesX(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    learn = make(dls=DataLoaders([batch], None, device='cpu'), model=TakesX(1, 1))
    refuses(learn, BatchError, 'no targets', '[24, 1] float32', '(input, target)')
    learn.dls = DataLoaders([(X, Y)], None, device='cpu')
    trains(learn)
