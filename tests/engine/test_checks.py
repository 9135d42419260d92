"""Models, losses and sizes that are refused before training."""

from typing import Any

import pytest
from torch import nn

from learnkit import Learner, mae
from learnkit.core.errors import FitError, LossError, ModelError
from tests.helpers.refusing import X, Y, make


@pytest.mark.parametrize(
    ('loss', 'expected_text'),
    [(nn.MSELoss, ['MSELoss is a class', 'MSELoss()']), ('mse', ["'mse'"]), (5, ['5'])],
)
def test_an_invalid_loss_is_refused(loss: Any, expected_text: list[str]) -> None:
    with pytest.raises(LossError) as e:
        make(loss_func=loss)
    assert all(s in str(e.value) for s in ['loss_func', *expected_text])


@pytest.mark.parametrize(
    ('model', 'expected_text'),
    [(nn.Linear, 'Linear(...)'), (mae, 'torch.nn.Module'), (None, 'None')],
    ids=['class', 'function', 'None'],
)
def test_an_invalid_model_is_refused(model: Any, expected_text: str) -> None:
    with pytest.raises(ModelError) as e:
        Learner([(X, Y)], model, nn.MSELoss())
    assert expected_text in str(e.value)


@pytest.mark.parametrize('size', [0, 1.5, '4'])
def test_an_invalid_microbatch_is_refused(size: Any) -> None:
    with pytest.raises(FitError, match='microbatch'):
        make(microbatch=size)
