"""Evaluations inside handlers, batches without targets, streams, metrics with several values, and the end of a Learner."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, Learner
from learnkit.data import DataLoaders

EVALUATING_EVENTS = (
    'before_fit', 'before_epoch', 'before_train', 'after_train', 'before_eval', 'before_validate',
    'after_validate', 'after_eval', 'after_epoch', 'after_fit',
)


def points(n: int, seed: int) -> tuple[Tensor, Tensor]:
    "Return `x` and `y`, each `[n, 1]`, in float64."
    gen = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, n, 1, generator=gen, dtype=torch.float64))


def regression(**kwargs: Any) -> Learner:
    "Return a Learner of a linear layer with a loader of 8 and one of 6 samples, and no output."
    torch.manual_seed(0)
    dls = DataLoaders.from_tensors(points(8, 1), points(6, 2), bs=4, shuffle=False)
    options: dict[str, Any] = {'loss_func': nn.MSELoss(), 'opt_func': torch.optim.SGD, 'lr': 0.1, **kwargs}
    learn = Learner(dls, nn.Linear(1, 1).double(), **options)
    learn.logger = lambda row: None
    return learn


def mean_square(learn: Any, x: Tensor, y: Tensor) -> float:
    "Return the loss of all samples in one pass of plain torch."
    with torch.no_grad():
        return float((learn.model(x) - y).square().mean())


# -- evaluations that a callback starts --------------------------------------------------------------------------------

@pytest.mark.silent('validate(dl=) in after_epoch: loss on a test set')
def test_validate_in_after_epoch(row: Callable[..., None]) -> None:
    test = points(10, 3)
    found: list[tuple[float, float]] = []

    def evaluate(cb: Any) -> None:
        now = cb.learn.validate(dl=[test])[0]
        found.append((now, mean_square(cb.learn, *test)))

    learn = regression(cbs=Callback(after_epoch=evaluate))
    learn.fit(3)
    row(was='RecursionError', now=found[-1][0], independent=found[-1][1])
    assert len(found) == 3
    for now, independent in found:
        assert now == pytest.approx(independent, rel=1e-12)
    assert learn.validate(dl=[test])[0] == pytest.approx(found[-1][1], rel=1e-12)


@pytest.mark.parametrize('event', EVALUATING_EVENTS)
def test_every_event_may_evaluate_and_changes_nothing(event: str) -> None:
    test = points(10, 3)
    found: list[Any] = []

    def evaluate(cb: Any) -> None:
        loss = cb.learn.validate(dl=[test])[0]
        preds, targs = cb.learn.get_preds(dl=[test])
        with torch.no_grad():
            expected = cb.learn.model(test[0])
        found.append((loss, mean_square(cb.learn, *test), torch.equal(preds, expected)))

    plain, learn = regression(), regression(cbs=Callback(**{event: evaluate}))
    for one in (plain, learn):
        one.fit(2)
    assert len(found) == (1 if event in ('before_fit', 'after_fit') else 2)
    for loss, expected, same_preds in found:
        assert loss == pytest.approx(expected, rel=1e-12) and same_preds
    assert torch.equal(plain.model.weight, learn.model.weight)
    timeless = [[{**r, 'time': 0} for r in one.history] for one in (plain, learn)]
    assert timeless[0] == timeless[1]
    # from a stand-alone validation too, which returns its own result
    found.clear()
    assert learn.validate() == plain.validate()
    assert bool(found) == (event not in ('before_train', 'after_train'))


def test_callbacks_that_evaluate_call_each_other_once() -> None:
    "A starts B's handler once a run, and B starts A's: each level of runs has one callback less."
    calls: list[str] = []

    def evaluating(name: str) -> Callback:
        def evaluate(cb: Any) -> None:
            calls.append(name)
            cb.learn.validate()
        return Callback(after_epoch=evaluate)

    regression(cbs=[evaluating('a'), evaluating('b')]).fit(2)
    assert calls == ['a', 'b', 'b', 'a'] * 2


class Every(Callback):
    "Take every event in one method, and evaluate at the end of an epoch."

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.losses: list[float] = []

    def run_event(self, event_name: str) -> None:
        self.events.append(event_name)
        if event_name == 'after_epoch':
            self.losses.append(self.learn.validate()[0])


class Foreign:
    "A callback by fastai's protocol, of another class."
    order, run, run_train, run_valid, name, learn = 0, True, True, True, 'foreign', None

    def __init__(self) -> None:
        self.losses: list[float] = []

    def __call__(self, event_name: str) -> None:
        getattr(self, event_name)()

    def after_epoch(self) -> None:
        self.losses.append(self.learn.validate()[0])


@pytest.mark.parametrize('make', [Every, Foreign])
def test_other_kinds_of_callbacks_evaluate_too(make: Callable[[], Any]) -> None:
    cb = make()
    learn = regression(cbs=cb)
    learn.fit(2)
    assert len(cb.losses) == 2
    assert cb.losses[-1] == pytest.approx(mean_square(learn, *points(6, 2)), rel=1e-12)
    if make is Every:
        assert cb.events.count('after_epoch') == 2 and cb.events.count('before_validate') == 2
        learn.fit(1)  # it is on again
        assert cb.events.count('after_epoch') == 3


def test_a_failed_evaluation_leaves_the_callback_on() -> None:
    calls: list[int] = []

    def evaluate(cb: Any) -> None:
        calls.append(cb.epoch)
        with pytest.raises(OSError):
            cb.learn.validate(cbs=Callback(before_pred=fail))

    def fail(cb: Any) -> None:
        raise OSError

    regression(cbs=Callback(after_epoch=evaluate)).fit(3)
    assert calls == [0, 1, 2]


def test_a_callback_that_changes_batches_and_evaluates_is_named() -> None:
    class Double(Callback):
        def before_batch(self) -> None:
            self.learn.xb = (2 * self.x,)

        def after_epoch(self) -> None:
            self.losses = self.learn.validate()

    learn = regression(cbs=Double())
    with pytest.warns(UserWarning, match='Double.*before_batch'):
        learn.fit(1)
    assert learn.double.losses[0] == pytest.approx(mean_square(learn, *points(6, 2)), rel=1e-12)


def test_logging_after_an_evaluation_inside_another_keeps_its_column() -> None:
    def evaluate(cb: Any) -> None:
        cb.learn.validate()
        cb.learn.log('gap', 2.0)

    learn = regression(cbs=Callback(after_eval=evaluate))
    learn.fit(1)
    assert learn.history[0]['valid_gap'] == 2.0 and 'gap' not in learn.history[0]
