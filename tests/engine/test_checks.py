"""Models, losses, metrics and sizes that are refused or warned of before training."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import DataLoaders, Learner, mae
from learnkit.core.errors import FitError, LossError, MetricError, ModelError
from tests.helpers.learners import quiet_learner
from tests.helpers.refusing import X, Y, make, refuses, trains


@pytest.mark.parametrize(
    ('loss', 'expected_text'),
    [(nn.MSELoss, ['MSELoss is a class', 'MSELoss()']), ('mse', ["'mse'"]), (5, ['5'])],
)
def test_an_invalid_loss_is_refused(loss: Any, expected_text: list[str]) -> None:
    with pytest.raises(LossError) as e:
        make(loss_func=loss)
    assert all(s in str(e.value) for s in ['loss_func', *expected_text])


def no_number(pred: Tensor, y: Tensor) -> Tensor:
    return pred - y


def text(pred: Tensor, y: Tensor) -> str:
    return 'good'


def one_argument(pred: Tensor) -> Tensor:
    return pred.mean()


@pytest.mark.parametrize('metric', [no_number, text, one_argument], ids=lambda f: f.__name__)
def test_metrics_with_wrong_shapes(metric: Any) -> None:
    learn = make(metrics=[mae, metric])
    message = refuses(learn, MetricError, metric.__name__)
    if metric is not text:
        assert '[8, 1]' in message, message
    learn.metrics = mae
    trains(learn)


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


POINTS, CLASSES = torch.randn(64, 4), torch.arange(64) % 3


def learner(model: nn.Module, loss_func: Any = None) -> Learner:
    dls = DataLoaders.from_tensors((POINTS, CLASSES), bs=16, device='cpu')
    return quiet_learner(dls, model, loss_func or nn.CrossEntropyLoss())


def warnings_of(do: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        do()
    assert all(one.filename == __file__ for one in seen)
    return [str(one.message) for one in seen]


class Numbered(nn.Module):
    "A model of two layers whose output goes through a function."

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f, self.linear = f, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.linear(x))


CROSS_ENTROPIES = [nn.CrossEntropyLoss(), F.cross_entropy]


@pytest.mark.parametrize('loss_func', CROSS_ENTROPIES)
@pytest.mark.parametrize(
    'model', [nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)), Numbered(partial(F.softmax, dim=1))]
)
def test_a_softmax_before_cross_entropy(loss_func: Any, model: nn.Module) -> None:
    learn = learner(model, loss_func)
    with learn.no_bar():
        (warning,) = warnings_of(lambda: learn.fit(2))
    assert 'softmax' in warning and 'get_preds' in warning


@pytest.mark.parametrize('f', [F.relu, torch.sigmoid])
def test_other_models_are_not_doubted(f: Callable[[Tensor], Tensor]) -> None:
    with learner(Numbered(f)).no_bar() as learn:
        learn.fit(1)
