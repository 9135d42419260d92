"""Wrong options raise typed errors with the cause and the fix before a weight changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from learnkit import (
    SGD,
    Adam,
    CutMix,
    DataLoaders,
    EarlyStoppingCallback,
    Learner,
    MixedPrecision,
    MixUp,
    OptimWrapper,
    ParamScheduler,
    SaveModelCallback,
    accuracy,
)
from learnkit.callbacks.schedule import SchedCos
from learnkit.core.errors import (
    CallbackError,
    LoaderError,
    LossError,
    MetricError,
    OptimizerError,
    OptionError,
    ScheduleError,
    TimeError,
)
from learnkit.losses import CrossEntropyLossFlat, DiceLoss
from learnkit.optim.optimizers import Lookahead, MuonAdamW

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


def no_lr(params: Any) -> Any:
    return SGD(params)


@pytest.mark.parametrize(
    ('opt_func', 'expected_text'),
    [
        (torch.optim.Muon, 'opt_func=MuonAdamW'),
        ([torch.optim.SGD], 'opt_func[0] is or returned SGD, not a ready optimizer'),
        ([partial(SGD, mom=0.9)], 'opt_func[0] is or returned SGD'),
        ([accuracy], 'opt_func[0] is or returned accuracy, not a ready optimizer'),
        (Lookahead, 'opt_func=Lookahead cannot be called'),
        (accuracy, 'opt_func=accuracy cannot be called'),
        (no_lr, 'opt_func=no_lr cannot be called with the parameters, `lr=`'),
    ],
)
def test_what_makes_no_optimizer(opt_func: Any, expected_text: str) -> None:
    learn = make(opt_func=opt_func)
    assert expected_text in message(learn, OptimizerError)
    learn.opt_func = MuonAdamW
    learn.fit(1)


def test_wrappers_around_what_is_not_an_optimizer_yet() -> None:
    with pytest.raises(OptimizerError, match=r'Lookahead takes parameters and a class'):
        Lookahead(Adam)
    with pytest.raises(
        OptimizerError, match=r'`opt_func=partial\(OptimWrapper, opt=torch.optim.AdamW\)`'
    ):
        OptimWrapper(opt=torch.optim.SGD)
    learn = make(opt_func=partial(OptimWrapper, opt=torch.optim.SGD))
    learn.fit(1)
    assert type(learn.opt.opt) is torch.optim.SGD


def test_an_invalid_splitter_is_refused() -> None:
    assert 'splitter=5 cannot be called' in message(make(splitter=5), OptimizerError)
    assert 'is not a list of parameters' in message(make(splitter=lambda m: 3), OptimizerError)


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


def two_args(learn: Any, epoch: int) -> float:
    return 0.0


@pytest.mark.parametrize(
    ('made', 'error', 'expected_text'),
    [
        (lambda: EarlyStoppingCallback(comp=5), OptionError, 'comp=5'),
        (lambda: EarlyStoppingCallback(patience=0), TimeError, 'patience=0: '),
        (
            lambda: EarlyStoppingCallback(monitor=lambda: 3),
            OptionError,
            'monitor=<lambda> cannot be called with `learn`',
        ),
        (
            lambda: SaveModelCallback(monitor=two_args),
            OptionError,
            'monitor=two_args.*`lambda learn: ...`',
        ),
        (lambda: ParamScheduler(SchedCos(1.0, 0.0)), ScheduleError, 'give a dict'),
    ],
    ids=['comp', 'patience', 'no argument', 'two arguments', 'no dict'],
)
def test_options_of_callbacks(made: Any, error: type[Exception], expected_text: str) -> None:
    with pytest.raises(error, match=expected_text):
        made()


@pytest.mark.parametrize(
    ('cbs', 'error', 'expected_text'),
    [
        (
            [SaveModelCallback, partial(SaveModelCallback, 'train_loss')],
            OptionError,
            'both write .*model.pth.*`fname`',
        ),
        ([MixUp, CutMix], OptionError, 'both blend each batch'),
        (
            [partial(MixedPrecision, 'fp16'), partial(MixedPrecision, 'bf16')],
            OptionError,
            "'fp16'. and .*'bf16'. contradict",
        ),
        (
            [partial(EarlyStoppingCallback, 'valid_los')],
            MetricError,
            r'Did you mean `valid_loss`\?$',
        ),
        ([partial(EarlyStoppingCallback, 'zebra')], MetricError, '`learn.log`'),
    ],
    ids=['two saves', 'blends', 'two precisions', 'a close name', 'no close name'],
)
def test_callbacks_that_cannot_run(
    cbs: Any, error: type[Exception], expected_text: str, tmp_path: Any
) -> None:
    learn = make(path=tmp_path)
    text = message(learn, error, lambda learn: learn.fit(1, cbs=[cb() for cb in cbs]))
    assert re.search(expected_text, text), text
    assert ('learn.log' in text) == ('learn.log' in expected_text)
    learn.fit(1)


def test_a_monitor_without_validation_data() -> None:
    learn = Learner([(X, Y)], nn.Linear(4, 3), nn.CrossEntropyLoss(), cbs=EarlyStoppingCallback())
    text = message(learn, MetricError)
    assert 'Without validation data nothing is evaluated: `DataLoaders(train, valid)`' in text
    # a stream has no validation data, and what it logs can be watched
    assert 'monitor=lambda learn: learn.history[-1]' in text


def test_schedulers_of_torch_are_not_callbacks() -> None:
    ready = StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), 1)
    for given, use in (
        (StepLR, '`LRScheduler(partial(StepLR, ...))`'),
        (ready, '`LRScheduler(partial('),
    ):
        assert use in message(
            make(), CallbackError, lambda learn, given=given: learn.fit(1, cbs=given)
        )


# -- losses and metrics ----------------------------------------------------------------------------

LOSSES = [CrossEntropyLossFlat(axis=5), CrossEntropyLossFlat(axis=-3), DiceLoss(axis=2)]


@pytest.mark.parametrize('loss', LOSSES, ids=str)
def test_an_axis_that_predictions_do_not_have(loss: Any) -> None:
    expected = f'(axis={loss.axis}): predictions [8, 3] float32 have no such axis'
    assert expected in message(make(loss), LossError)


# -- predictions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('do', 'error', 'expected_text'),
    [
        (
            lambda learn: learn.get_preds(act=nn.Softmax),
            OptionError,
            'act=Softmax is a class: write `act=Softmax(...)`',
        ),
        (lambda learn: learn.get_preds(act=5), OptionError, 'act=5 cannot be called'),
        (lambda learn: learn.predict_iter(act=nn.Sigmoid), OptionError, 'act=Sigmoid is a class'),
        (lambda learn: learn.export(act='softmax'), OptionError, "act='softmax' cannot be called"),
        (lambda learn: learn.tta(augment=nn.Dropout), OptionError, 'augment=Dropout is a class'),
        (lambda learn: learn.get_preds(dl=X), LoaderError, '`dl=[(x,)]`'),
        (lambda learn: learn.get_preds(dl=X.numpy()), LoaderError, 'dl is ndarray[24, 4] float32'),
        (
            lambda learn: learn.validate(dl=learn.dls),
            LoaderError,
            'pass its `.train` or its `.valid`',
        ),
        (
            lambda learn: learn.get_preds(dl=learn.dls),
            LoaderError,
            'dl is a DataLoaders, of several loaders',
        ),
        (lambda learn: learn.lr_find(num_it=0), OptionError, 'num_it=0'),
        (lambda learn: learn.lr_find(1, 0.1), ScheduleError, '0 < start_lr < end_lr'),
    ],
    ids=range(11),
)
def test_predictions_and_searches(do: Any, error: type[Exception], expected_text: str) -> None:
    assert expected_text in message(make(), error, do)
