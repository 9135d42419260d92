"""Checks of the first batches: metrics, the last layer, counters, and the loss that callbacks set."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import Callback, DataLoaders, Learner, Recorder, mae
from learnkit.core.errors import MetricError, TimeError
from learnkit.testing import synth_learner
from tests.helpers.learners import quiet_learner
from tests.helpers.refusing import make, refuses, trains


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


# The counters and the loss


@pytest.mark.parametrize('budget', ['10tok', '1e6tok'])
def test_a_budget_of_what_is_not_counted_is_refused_at_the_first_batch(budget: str) -> None:
    learn = make()
    refuses(learn, TimeError, 'tok', 'token_func', do=lambda learn: learn.fit(budget))
    trains(learn)


def set_loss(cb: Any) -> None:
    cb.learn.loss = cb.learn.loss + 1


def set_both(cb: Any) -> None:
    cb.learn.loss_grad = cb.learn.loss_grad + 1
    cb.learn.loss = cb.learn.loss_grad.clone()


@pytest.mark.parametrize('event', ['after_loss', 'before_backward'])
@pytest.mark.parametrize(('set_it', 'n_warnings'), [(set_loss, 1), (set_both, 0)])
def test_a_loss_that_is_not_minimized_is_warned_of_once(
    event: str, set_it: Callable[[Any], None], n_warnings: int
) -> None:
    handlers: dict[str, Any] = {event: set_it}
    learn = make(cbs=Callback(run_valid=False, **handlers))
    with learn.no_bar():
        seen = warnings_of(lambda: learn.fit(2))
    assert len(seen) == n_warnings and all('loss_grad' in message for message in seen)


def test_checks_cost_nothing_from_the_second_batch_on() -> None:
    counts: list[int] = []

    def count(cb: Any) -> None:
        tables = cb.learn.parts.callbacks.tables
        counts.append(sum(len(entries) for table in tables for entries in table.values()))

    cbs = [Recorder(train_metrics=True), Callback(before_draw=count, after_loss=lambda cb: None)]
    learn = synth_learner(n_train=3, metrics=mae, cbs=cbs, default_cbs=False)
    learn.logger = lambda row: None
    learn.fit(2)
    first, *others = counts
    assert len(others) > 3 and set(others) == {first - 3}  # the loss before and after, the metrics
    assert not learn.parts.callbacks.run_handlers
