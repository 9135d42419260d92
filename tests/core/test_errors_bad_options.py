"""Wrong options raise typed errors with the cause and the fix before a weight changes."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import (
    SGD,
    CutMix,
    DataLoaders,
    Learner,
    MixedPrecision,
    MixUp,
    ParamScheduler,
    SaveModelCallback,
    accuracy,
)
from learnkit.core.errors import LoaderError, OptimizerError, OptionError, ScheduleError
from learnkit.optim.optimizers import MuonAdamW

X, Y = torch.linspace(-1, 1, 96).reshape(24, 4), torch.arange(24) % 3


def make(loss_func: Any = None, **options: Any) -> Learner:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    dls = DataLoaders.from_tensors((X, Y), (X, Y), bs=8, device='cpu')
    return Learner(dls, model, loss_func or nn.CrossEntropyLoss(), **options)


def weights(learn: Learner) -> list[Tensor]:
    return [t.clone() for t in learn.model.state_dict().values()]


def message(
    learn: Learner,
    error: type[Exception],
    do: Callable[[Learner], Any] = lambda learn: learn.fit(1),
) -> str:
    "Return the error's message, and check that nothing changed."
    before = weights(learn)
    with pytest.raises(error) as e:
        do(learn)
    assert type(e.value) is error and not learn.history
    assert all(map(torch.equal, weights(learn), before))
    return str(e.value)


# -- optimizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('opt_func', 'expected_text'),
    [
        ([torch.optim.SGD], 'opt_func[0] is or returned SGD, not a ready optimizer'),
        ([partial(SGD, mom=0.9)], 'opt_func[0] is or returned SGD'),
        ([accuracy], 'opt_func[0] is or returned accuracy, not a ready optimizer'),
    ],
)
def test_what_makes_no_optimizer(opt_func: Any, expected_text: str) -> None:
    learn = make(opt_func=opt_func)
    assert expected_text in message(learn, OptimizerError)
    learn.opt_func = MuonAdamW
    learn.fit(1)


@pytest.mark.parametrize(('name', 'value'), [('mom', 1.0), ('sqr_mom', 1.5)])
def test_momenta_are_shares(name: str, value: float) -> None:
    learn = make()
    learn.create_opt()
    before = dict(learn.opt.hypers[0])
    expected = f'{name}={value}'
    assert expected in message(
        learn, OptimizerError, lambda learn: learn.opt.set_hyper(name, value)
    )
    sched = ParamScheduler({name: lambda pct: value})
    expected = f'{name}={value}'
    assert expected in message(learn, OptimizerError, lambda learn: learn.fit(1, cbs=sched))
    assert dict(learn.opt.hypers[0]) == before
    learn.opt.set_hyper('lr', 2.0)


# -- callbacks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('cbs', 'error', 'expected_text'),
    [
        (
            [SaveModelCallback, partial(SaveModelCallback, 'train_loss')],
            OptionError,
            'write the same file.*`fname`',
        ),
        ([MixUp, CutMix], OptionError, 'both blend each batch'),
        (
            [partial(MixedPrecision, 'fp16'), partial(MixedPrecision, 'bf16')],
            OptionError,
            "'fp16'. and .*'bf16'. contradict",
        ),
    ],
    ids=['two saves', 'blends', 'two precisions'],
)
def test_callbacks_that_cannot_run(
    cbs: Any, error: type[Exception], expected_text: str, tmp_path: Any
) -> None:
    learn = make(path=tmp_path)
    text = message(learn, error, lambda learn: learn.fit(1, cbs=[cb() for cb in cbs]))
    assert re.search(expected_text, text), text
    learn.fit(1)


# -- predictions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('do', 'error', 'expected_text'),
    [
        (lambda learn: learn.get_preds(act=nn.Softmax), OptionError, 'act=Softmax is a class'),
        (lambda learn: learn.export(act='softmax'), OptionError, "act='softmax' cannot be called"),
        (lambda learn: learn.get_preds(dl=X), LoaderError, '`dl=[(x,)]`'),
        (lambda learn: learn.validate(dl=learn.dls), LoaderError, 'pass its `.train` or'),
        (lambda learn: learn.lr_find(1, 0.1), ScheduleError, '0 < start_lr < end_lr'),
    ],
    ids=range(5),
)
def test_predictions_and_searches(do: Any, error: type[Exception], expected_text: str) -> None:
    assert expected_text in message(make(), error, do)
