"""Lazy modules, which have no values before the first forward pass, in fits and in searches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from learnkit import DataLoaders, Learner
from learnkit.callbacks import EMA, SAM, ChannelsLast, GuardNonFinite, LRFinder

BS = 16


def make(x: Tensor | None = None, **options: Any) -> Learner:
    torch.manual_seed(0)
    x = torch.randn(64, 4) if x is None else x
    loader = DataLoader(TensorDataset(x, torch.randn(64, 1)), batch_size=BS)
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyLinear(1))
    return Learner(DataLoaders(loader, loader), model, nn.MSELoss(), **options)


def fit(learn: Learner, seed: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    with learn.no_bar(), learn.no_logging():
        learn.fit(2)
    return {name: t.clone() for name, t in learn.model.state_dict().items()}


def check_equal(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, msg=name)


@pytest.mark.parametrize('make_cb', [EMA, ChannelsLast, GuardNonFinite])
def test_callbacks_that_copy_weights_train_a_lazy_model(make_cb: Callable[[], Any]) -> None:
    check_equal(fit(make(cbs=make_cb())), fit(make()))


def test_microbatches_that_fit_train_a_lazy_model() -> None:
    check_equal(fit(make(microbatch='auto')), fit(make()))


def test_sam_restores_the_buffers_of_a_lazy_model() -> None:
    learn = make(cbs=SAM())
    fit(learn)
    assert int(learn.model[1].num_batches_tracked) == 8


def test_an_average_of_a_lazy_model_starts_with_the_first_step() -> None:
    learn = make(cbs=EMA(0.5, warmup=None))
    fit(learn)
    averages = learn.ema.state_dict()['averages']
    assert {name for name, _ in learn.model.named_parameters()} <= averages.keys()
    assert learn.ema.state_dict()['n_updates'] == 7


def find_rates(learn: Learner) -> None:
    learn.fit(1, cbs=LRFinder(num_it=6))


UNDONE: dict[str, Callable[[Learner], object]] = {
    'lr_find': lambda learn: learn.lr_find(num_it=6, show_plot=False),
    'LRFinder': find_rates,
    'check_resume': lambda learn: learn.check_resume(3, 1),
    'find_batch_size': lambda learn: learn.find_batch_size(max_size=8),
    'summary': lambda learn: learn.summary(),
}


@pytest.mark.parametrize('name', UNDONE)
def test_a_training_that_is_undone_leaves_an_initialized_model(name: str) -> None:
    learn = make()
    torch.manual_seed(1)
    with learn.no_bar(), learn.no_logging():
        UNDONE[name](learn)
    model = learn.model
    assert [type(m) for m in model] == [nn.Linear, nn.BatchNorm1d, nn.Linear]
    assert (model[0].in_features, model[2].in_features) == (4, 3)
    assert int(model[1].num_batches_tracked) == 0 and torch.equal(model[1].weight, torch.ones(3))
    bound = 4**-0.5  # of torch's initial weights
    assert model[0].weight.abs().max() <= bound and model[2].weight.abs().max() <= 3**-0.5
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    other = make()
    other.model(torch.randn(2, 4))
    other.model.load_state_dict(weights)
    check_equal(fit(learn), fit(other))
