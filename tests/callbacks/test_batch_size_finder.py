"""The batch size finder: the size found under a limit of the model or the process, and the unchanged Learner."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import (
    EMA,
    Adam,
    Callback,
    DataLoaders,
    FitError,
    GradientAccumulation,
    Learner,
    OptionError,
    TensorLoader,
    accuracy,
)
from learnkit.checkpoint.digest import differences
from learnkit.core.batch import are_equal
from learnkit.core.random import capture_rng
from learnkit.testing import synth_learner
from tests.helpers.learners import quiet_learner
from tests.helpers.ranks import run_ranks

SIZES: list[int] = []  # not an attribute of the model, which would be restored


class Hungry(nn.Module):
    "A model that raises torch's out-of-memory error for more than `limit` samples."

    def __init__(self, fits: int, error: type[Exception] = torch.OutOfMemoryError) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fits, self.error = fits, error
        self.layers = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        SIZES.append(len(x))
        out: Tensor = self.layers(x)
        if len(x) > self.fits:
            raise self.error('out of memory (raised by a test)')
        return out


def learner(model: nn.Module, n: int = 40, **kwargs: Any) -> Learner:
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(n, 3, generator=g), torch.randint(2, (n,), generator=g)
    train = TensorLoader(x, y, bs=5, shuffle=True, seed=3)
    dls = DataLoaders(train, TensorLoader(x[:8], y[:8], bs=4), device='cpu')
    options = {'opt_func': Adam, 'metrics': accuracy, 'lr': 0.1, **kwargs}
    return quiet_learner(dls, model, nn.CrossEntropyLoss(), **options)


@pytest.mark.parametrize(
    ('fits', 'options', 'found', 'sizes'),
    [
        (13, {}, 8, [2, 2, 4, 4, 8, 8, 16]),
        (13, {'exact': True}, 13, [2, 2, 4, 4, 8, 8, 16, 12, 12, 14, 13, 13]),
        (100, {}, 32, [2, 2, 4, 4, 8, 8, 16, 16, 32, 32]),  # there are 40 samples
        (100, {'exact': True, 'max_size': 6}, 6, [2, 2, 4, 4, 5, 5, 6, 6]),
    ],
)
def test_the_largest_size_that_fits(
    fits: int, options: dict[str, Any], found: int, sizes: list[int]
) -> None:
    SIZES.clear()
    assert learner(Hungry(fits)).find_batch_size(**options) == found
    assert sizes == SIZES


def test_everything_is_restored_and_training_continues_alike() -> None:
    ends = []
    for finds in (False, True):
        model = Hungry(100)
        learn = learner(model, cbs=EMA(0.9))
        torch.manual_seed(5)
        learn.fit(1)
        if finds:
            model.fits = 13
            before, rng = learn.checkpoint_state(), capture_rng()
            parameters = [*map(id, learn.model.parameters())]
            assert learn.find_batch_size() == 8
            assert not differences(before, learn.checkpoint_state())
            assert are_equal(rng, capture_rng())
            assert parameters == [*map(id, learn.model.parameters())]
            assert all(p.grad is None for p in learn.model.parameters())
            assert len(learn.history) == 1 and learn.time.ba == 8
            model.fits = 100
        learn.fit(1)
        ends.append(learn.checkpoint_state())
    differ = [d for d in differences(*ends) if 'time' not in d and 'seconds' not in d]
    assert not differ, differ


def test_accumulation_and_microbatches_do_not_act(tmp_path: Path) -> None:
    for option in ({'cbs': [GradientAccumulation(6)]}, {'microbatch': 2}):
        learn = learner(Hungry(13), path=tmp_path, **option)
        assert learn.find_batch_size() == 8
        assert learn.microbatch == option.get('microbatch')
    assert not list(tmp_path.iterdir())


def test_where_it_cannot_be_called() -> None:
    learn = synth_learner()
    with pytest.raises(AttributeError, match='`find_batch_size`'):
        learn.scale_batch_size(mode='power')
    with pytest.raises(OptionError, match='max_size=0'):
        learn.find_batch_size(0)
    with pytest.raises(OptionError, match='iterator'):
        Learner(
            iter([(torch.zeros(2, 1), torch.zeros(2, 1))]), nn.Linear(1, 1), nn.MSELoss()
        ).find_batch_size()
    nested = synth_learner(cbs=Callback(after_batch=lambda cb: cb.learn.find_batch_size()))
    with nested.no_bar(), pytest.raises(FitError, match='same Learner'):
        nested.fit(1)


@pytest.mark.dist
def test_not_in_several_processes() -> None:
    def job(rank: int) -> bool:
        learn = synth_learner()
        with learn.distributed('ddp'), pytest.raises(FitError, match='in one process'):
            learn.find_batch_size()
        return True

    assert run_ranks(job) == [True, True]
