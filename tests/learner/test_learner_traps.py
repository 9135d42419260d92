"""Wrong calls that look right raise an error or a warning with the fix."""

import re
from collections import UserList
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from learnkit import (
    Callback,
    DataLoaders,
    EarlyStoppingCallback,
    GradientAccumulation,
    Learner,
    LoaderError,
    accuracy,
)
from learnkit.core.errors import (
    CallbackError,
    LossError,
    MetricError,
    OptimizerError,
    OptionError,
    TimeError,
    UnknownEventError,
)
from learnkit.data import TensorLoader
from learnkit.optim.annealing import SchedLin
from tests.helpers.learners import quiet_learner

X, Y = torch.randn(64, 4), torch.arange(64) % 3


def learner(model: nn.Module | None = None, loss_func: Any = None, **options: Any) -> Learner:
    dls = DataLoaders.from_tensors((X, Y), (X, Y), bs=16, device='cpu')
    loss_func = nn.CrossEntropyLoss() if loss_func is None else loss_func
    return quiet_learner(dls, model or nn.Linear(4, 3), loss_func, **options)


def learner_of(
    dls: Any, model: nn.Module | None = None, loss_func: Any = F.cross_entropy
) -> Learner:
    return quiet_learner(dls, model or nn.Linear(4, 3), loss_func)


# -------------------------------------------------------------------------------- accumulated batches


def test_batches_of_any_size_are_one_step() -> None:
    sizes = [3, 5, 8, 1, 7, 8]
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    reference = nn.Linear(4, 3)
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    batches = list(zip(X[:32].split(sizes), Y[:32].split(sizes), strict=True))
    for two in (batches[:2], batches[2:4], batches[4:]):
        x, y = (torch.cat(parts) for parts in zip(*two, strict=True))
        optimizer.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
    cb = GradientAccumulation(batches=2)
    learn = Learner(batches, model, F.cross_entropy, opt_func=torch.optim.SGD, lr=0.5, cbs=cb)
    with learn.no_bar():
        learn.fit(1)
    assert learn.opt.n_steps == 3
    assert torch.allclose(model.weight, reference.weight, atol=1e-6)


def test_a_number_below_the_batch_size_is_asked_for_its_unit() -> None:
    learn = learner(cbs=GradientAccumulation(4))
    before = learn.model.weight.clone()
    with (
        learn.no_bar(),
        pytest.raises(OptionError, match=r'batches=4\).*GradientAccumulation\(64\)'),
    ):
        learn.fit(1)
    assert torch.equal(learn.model.weight, before)
    for n_acc in (1, 16, 17):  # one step a batch in either unit; a whole batch; more
        with learner(cbs=GradientAccumulation(n_acc)).no_bar() as learn:
            learn.fit(1)
        assert learn.opt.n_steps == (4 if n_acc < 17 else 2)


def test_torchs_name_of_the_batch_size_is_taken_where_torch_makes_the_loader() -> None:
    dls = DataLoaders.from_datasets([(x, y) for x, y in zip(X, Y, strict=True)], batch_size=8)
    assert dls.train.batch_size == 8


@pytest.mark.parametrize(
    ('make', 'error', 'expected_text'),
    [
        (lambda: learner(loss_func=nn.MSELoss), LossError, r'write MSELoss\(\)'),
        (lambda: learner(opt_func='adam').create_opt(), OptimizerError, r'`torch.optim.Adam`'),
        (lambda: learner(metrics='accuracy'), MetricError, 'from learnkit import accuracy'),
        (lambda: learner().fit('3'), TimeError, "'3' is not a time"),
        (lambda: EarlyStoppingCallback(patience='3'), TimeError, "'3' is not a time"),
        (
            lambda: Callback(on_epoch_end=print),
            UnknownEventError,
            "'on_epoch_end'.*Did you mean `after_epoch`",
        ),
        (lambda: learner().remove_cb('Nope'), CallbackError, "'Nope' is a string"),
        (lambda: learner().export('m.onnx'), OptionError, r'ExportForInference.*onnx'),
    ],
)
def test_names_in_the_place_of_things(
    make: Callable[[], Any], error: type[Exception], expected_text: str
) -> None:
    with pytest.raises(error, match=expected_text):
        make()


# ------------------------------------------------------------------------------ loaders and batches


LOADER = DataLoader(TensorDataset(X, Y), batch_size=16)


@pytest.mark.parametrize('entry', [LOADER, TensorLoader(X, Y)])
def test_a_list_of_loaders(entry: Any) -> None:
    kind = type(entry).__name__
    with pytest.raises(
        LoaderError, match=rf"'train'.*[lL]ist of {kind},.*`DataLoaders\(train, valid\)`"
    ):
        learner_of([entry, entry])


@pytest.mark.parametrize(
    ('batch', 'model', 'expected_text'),
    [
        ((X, Y, Y), nn.Linear(4, 3), '2 inputs.*forward.. takes 1.*last entry.*n_inp=1'),
        (
            ((X, X), Y),
            nn.Linear(4, 3),
            r'tuple of 2 entries is one input.*`\(x1, x2, y\)`.*n_inp=2',
        ),
        (
            ({'x': X}, Y),
            nn.Sequential(nn.Flatten(), nn.Linear(4, 3)),
            r'dict is one input.*forward\(\).*\(input\)',
        ),
        ({'x': X, 'labels': Y}, nn.Linear(4, 3), r'by keyword.*\(input\).*tuples `\(x, y\)`'),
    ],
)
def test_batches_that_do_not_fit_the_model(
    batch: Any, model: nn.Module, expected_text: str
) -> None:
    with pytest.raises((TypeError, AttributeError)) as e:
        learner_of(DataLoaders([batch], device='cpu'), model).fit(1)
    assert re.search(expected_text, e.value.__notes__[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
@pytest.mark.parametrize(
    'make',
    [
        lambda: DataLoaders([(X, Y)], device='cuda'),
        lambda: DataLoaders.from_tensors((X, Y), device='cuda'),
        lambda: DataLoaders([(X, Y)]).to('cuda'),
    ],
)
def test_a_device_that_is_missing_is_named_at_once(make: Callable[[], Any]) -> None:
    with pytest.raises(LoaderError, match=r"device='cuda(:1)?'.*'cpu'"):
        make()


def test_lists_of_a_configuration() -> None:
    rates, moms = UserList([1e-3, 1e-2]), UserList([0.9, 0.8, 0.9])
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    learn = learner(
        layers,
        lr=rates,
        moms=moms,
        splitter=lambda m: [list(m[0].parameters()), list(m[1].parameters())],
        metrics=UserList([accuracy]),
        cbs=UserList([Callback(), Callback()]),
    )
    assert len(learn.cbs) == 5
    with learn.no_bar():
        learn.fit(1)
        assert [h['lr'] for h in learn.opt.hypers] == [1e-3, 1e-2]
        learn.fit_one_cycle(1, rates)
    assert learn.recorder.hps['mom'][0] == pytest.approx(0.9)
    assert SchedLin(UserList([0.0, 2.0]), UserList([1.0, 4.0]))(0.5).tolist() == [0.5, 3.0]
