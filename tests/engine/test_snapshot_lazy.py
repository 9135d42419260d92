"""Lazy modules, which have no values before the first forward pass, in fits and in trainings that are undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from learnkit import DataLoaders, Learner
from learnkit.callbacks import EMA, SAM, ChannelsLast, GuardNonFinite
from learnkit.core.model import has_lazy_tensors
from learnkit.engine.snapshot import Snapshot

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


def test_a_snapshot_makes_a_model_lazy_again() -> None:
    model = nn.Sequential(nn.LazyConv2d(2, 3), nn.LazyBatchNorm2d(affine=False), nn.Flatten())
    types = [type(m) for m in model.modules()]
    tensors = [*model.parameters(), *model.buffers()]
    snapshot = Snapshot([model, tensors])
    for size in (5, 6):
        model(torch.ones(2, 3, size, size)).sum().backward()
        assert not has_lazy_tensors(model)
        snapshot.undo()
        assert [type(m) for m in model.modules()] == types
        assert all(
            a is b for a, b in zip([*model.parameters(), *model.buffers()], tensors, strict=True)
        )
        assert has_lazy_tensors(model) and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    'search',
    [
        lambda learn: learn.lr_find(show_plot=False, num_it=10),
        lambda learn: learn.find_batch_size(max_size=8),
    ],
    ids=['lr_find', 'find_batch_size'],
)
def test_a_search_leaves_a_lazy_model_as_it_was(search: Callable[[Learner], Any]) -> None:
    expected = fit(make())
    learn = make()
    with learn.no_bar():
        search(learn)
    assert type(learn.model[0]) is nn.LazyLinear and has_lazy_tensors(learn.model)
    check_equal(fit(learn), expected)


@pytest.mark.parametrize('policy', ['raise', 'skip', 'stop'])
def test_the_guard_trains_a_lazy_model(policy: str) -> None:
    check_equal(fit(make(cbs=GuardNonFinite(policy))), fit(make()))


@pytest.mark.parametrize('make_cb', [EMA, ChannelsLast])
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
