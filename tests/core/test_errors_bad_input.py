"""Bad input raises a typed error with the cause and the fix before a weight changes; then the Learner trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, DataLoaders, Learner
from learnkit.core.errors import (
    BatchError,
    CallbackError,
    FitError,
    LearnkitError,
    LossError,
    MetricError,
    ModelError,
)

X, Y = torch.linspace(-1, 1, 24)[:, None], torch.linspace(-2, 2, 24)[:, None]


def mae(pred: Tensor, y: Tensor) -> Tensor:
    return (pred - y).abs().mean()


def make(
    dls: Any = None,
    model: nn.Module | None = None,
    loss_func: Any = nn.functional.mse_loss,
    **kwargs: Any,
) -> Learner:
    return Learner(
        DataLoaders.from_tensors((X, Y), (X, Y), bs=8, device='cpu') if dls is None else dls,
        nn.Linear(1, 1) if model is None else model,
        loss_func,
        **{'lr': 0.1, **kwargs},
    )


def refuses(
    learn: Learner,
    error: type[LearnkitError],
    *expected_text: str,
    do: Callable[[Learner], Any] = lambda learn: learn.fit(2),
) -> str:
    "Check the error's type and words, and that model, optimizer, callbacks and state are unchanged."
    weights = [t.clone() for t in learn.model.state_dict().values()]
    modes, cbs, opt = [m.training for m in learn.model.modules()], list(learn.cbs), learn.opt
    hypers = [dict(h) for h in opt.hypers] if opt else None
    with pytest.raises(error) as info:
        do(learn)
    message = str(info.value)
    assert type(info.value) is error
    for word in expected_text:
        assert word in message, message
    for a, b in zip(learn.model.state_dict().values(), weights, strict=True):
        assert torch.equal(a, b)
    assert not any(p.grad is not None for p in learn.model.parameters())
    assert (
        list(learn.cbs) == cbs
        and learn.logger is print
        and (learn.run.depth, learn.run.levels, learn.fitting) == (0, (), False)
    )
    assert len(learn.history) == 0 and modes == [True] * len(modes)
    if hypers:
        assert [dict(h) for h in learn.opt.hypers] == hypers
    return message


def trains(learn: Learner) -> None:
    "Check that the Learner still trains."
    before = [p.clone() for p in learn.model.parameters()]
    learn.fit(1)
    assert len(learn.history) == 1 and learn.history[0]['train_loss'] > 0
    assert not all(torch.equal(a, b) for a, b in zip(learn.model.parameters(), before, strict=True))


# -- the loss --------------------------------------------------------------------------------------


def test_no_loss_function() -> None:
    learn = make(loss_func=None)
    refuses(learn, LossError, 'No loss function', 'Linear', 'loss_func=', 'cross_entropy')
    learn.loss_func = nn.MSELoss()
    trains(learn)


@pytest.mark.parametrize(
    ('loss', 'expected_text'),
    [(nn.MSELoss, ['MSELoss is a class', 'MSELoss()']), ('mse', ["'mse'"]), (5, ['5'])],
)
def test_an_invalid_loss_is_refused(loss: Any, expected_text: list[str]) -> None:
    with pytest.raises(LossError) as e:
        make(loss_func=loss)
    assert all(s in str(e.value) for s in ['loss_func', *expected_text])


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


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize('batch', [X, (X,), [X], {'x': X}], ids=lambda b: type(b).__name__)
def test_a_batch_without_targets(batch: Any) -> None:
    class TakesX(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    learn = make(dls=DataLoaders([batch], None, device='cpu'), model=TakesX(1, 1))
    refuses(learn, BatchError, 'no targets', '[24, 1] float32', '(input, target)')
    learn.dls = DataLoaders([(X, Y)], None, device='cpu')
    trains(learn)


# -- callbacks and events --------------------------------------------------------------------------


class NeedsArgs(Callback):
    def __init__(self, n: int) -> None:
        self.n = n


CALLBACKS = [
    (5, ['5', 'Callback(event=function)']),
    ('mixup', ["'mixup'"]),
    (mae, ['mae', 'Callback(event=function)']),
    (nn.Linear, ['Linear', 'Callback(event=function)']),
    (NeedsArgs, ['NeedsArgs', 'without arguments', 'instance']),
    (object(), ['object']),
]


@pytest.mark.parametrize(('bad', 'expected_text'), CALLBACKS, ids=lambda o: str(o)[:12])
def test_an_invalid_callback_is_refused(bad: Any, expected_text: list[str]) -> None:
    with pytest.raises(CallbackError) as e:
        make(cbs=bad)
    assert all(s in str(e.value) for s in expected_text), str(e.value)
    learn = make()
    for do in (
        lambda learn: learn.fit(1, cbs=[Callback(), bad]),
        lambda learn: learn.add_cb(bad),
        lambda learn: learn.validate(cbs=bad),
        lambda learn: learn.get_preds(cbs=bad),
        lambda learn: setattr(learn, 'cbs', [bad]),
    ):
        refuses(learn, CallbackError, *expected_text, do=do)
    trains(learn)


# -- metrics ---------------------------------------------------------------------------------------


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


# -- model and optimizer ---------------------------------------------------------------------------


def test_a_model_without_trainable_parameters() -> None:
    model = nn.Linear(1, 1).requires_grad_(False)
    learn = make(model=model)
    refuses(learn, ModelError, 'Linear', 'no trainable parameters', 'requires_grad_()')
    assert len(learn.validate()) == 1, 'it can still be evaluated'
    model.requires_grad_(True)
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


# -- the arguments of fit --------------------------------------------------------------------------


@pytest.mark.parametrize('n', [-1, 1.5, None, True, float('nan')], ids=repr)
def test_an_invalid_number_of_epochs_is_refused(n: Any) -> None:
    learn = make()
    refuses(learn, FitError, 'n_epoch', 'whole number', '0 or more', do=lambda learn: learn.fit(n))
    trains(learn)


@pytest.mark.parametrize('size', [0, 1.5, '4'])
def test_an_invalid_microbatch_is_refused(size: Any) -> None:
    with pytest.raises(FitError, match='microbatch'):
        make(microbatch=size)
