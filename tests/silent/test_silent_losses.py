"""Losses that are not a mean over samples: against plain torch loops in double precision."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import DataLoaders, GradientAccumulation, Learner
from learnkit.metrics import Perplexity
from tests.helpers.ranks import run_ranks
from tests.silent.test_silent_means import (
    Batch,
    class_batches,
    distance,
    joined,
    learner,
    make_model,
    plain_weights,
    weights_of,
)

CLASS_WEIGHT = torch.tensor([1.0, 5.0, 0.2, 1.0]).double()


class Wrapped(nn.Module):
    "A module around a loss of torch."

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(CLASS_WEIGHT)

    def forward(self, pred: Tensor, y: Tensor) -> Tensor:
        return self.inner(pred, y)


def of_present(pred: Tensor, y: Tensor) -> Tensor:
    "Mean squared error of the targets that are not NaN; class 3 has none."
    targ = torch.where(y == 3, torch.nan, y.double())
    there = ~targ.isnan()
    return F.mse_loss(pred[:, 0][there], targ[there])


def root(pred: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(pred[:, 0], y.double()).sqrt()


def normalized_focal(pred: Tensor, y: Tensor) -> Tensor:
    ce = F.cross_entropy(pred, y, reduction='none')
    focus = (1 - (-ce).exp()) ** 2
    return (focus * ce).sum() / focus.sum().detach()


def info_nce(pred: Tensor, y: Tensor) -> Tensor:
    scores = pred @ pred.roll(1, 1).T
    return F.cross_entropy(scores, torch.arange(len(pred)))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    'weighted lambda': lambda pred, y: F.cross_entropy(pred, y, CLASS_WEIGHT),
    'module around weights': Wrapped(),
    'targets that are not NaN': of_present,
    'root of the squared error': root,
    'normalized focal': normalized_focal,
    'InfoNCE': info_nce,
}


def count_warnings(act: Callable[[], Any]) -> int:
    "Return the number of warnings that a loss is no mean over samples."
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        act()
    return sum('not a mean over samples' in str(w.message) for w in seen)


def train(way: str, loss_func: Any) -> tuple[Tensor, list[Batch], int]:
    "Train in parts; return the weights, the batches of the steps, and the number of warnings."
    batches = class_batches([8] * 4)
    if way == 'microbatch':
        learn = learner(batches, loss_func, microbatch=4)
        steps = batches
    else:
        learn = learner(batches, loss_func, GradientAccumulation(16))
        steps = [joined(pair) for pair in zip(batches[::2], batches[1::2], strict=True)]
    n = count_warnings(lambda: learn.fit(2))
    return weights_of(learn.model), steps * 2, n


@pytest.mark.parametrize('way', ['microbatch', 'accumulation'])
@pytest.mark.parametrize('kind', LOSSES)
def test_a_loss_that_cannot_be_split_is_warned_of(kind: str, way: str) -> None:
    ours, steps, n = train(way, LOSSES[kind])
    expected = plain_weights(steps, LOSSES[kind])
    off = distance(ours, expected)
    assert n == 1 and off > 1e-4


def test_a_loss_that_cannot_be_split_is_warned_of_in_processes() -> None:
    def job(rank: int) -> list[int]:
        found = []
        for loss_func in LOSSES.values():
            x, y = joined(class_batches([32]))
            dls = DataLoaders.from_tensors((x, y), bs=8, shuffle=False)
            learn = learner(dls, loss_func)
            with learn.distributed('ddp', timeout='300s'):
                found.append(count_warnings(lambda learn=learn: learn.fit(2)))
        return found

    now, _ = run_ranks(job)
    assert now == [1] * len(LOSSES)


# means that the targets weight: also the mean over batches of one size is not the mean over the set
WEIGHTED = ['weighted lambda', 'module around weights', 'targets that are not NaN']


@pytest.mark.parametrize('kind', LOSSES)
@pytest.mark.parametrize('sizes', [[8, 8, 5], [8, 8, 8]])
def test_an_evaluation_of_a_loss_that_is_no_mean_over_samples(kind: str, sizes: list[int]) -> None:
    batches = class_batches(sizes)
    for y in (batches[0][1], batches[-1][1]):
        y[:2] = torch.tensor([0, 3])[: len(y)]  # classes with and without a target
    learn = learner((batches, batches), LOSSES[kind])
    now = count_warnings(lambda: (learn.validate(), learn.validate()))
    assert now == (len(set(sizes)) > 1 or kind in WEIGHTED)


MEANS: dict[str, Callable[..., Any]] = {
    'function': lambda pred, y: F.cross_entropy(pred, y),
    'per sample': lambda pred, y: F.cross_entropy(pred, y, reduction='none').mean(),
    'parts': lambda pred, y: {'fit': F.cross_entropy(pred, y), 'size': pred.square().mean()},
}


@pytest.mark.parametrize('kind', MEANS)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_mean_over_samples_is_not_warned_of(kind: str, dtype: torch.dtype) -> None:
    batches = [(x.to(dtype), y) for x, y in class_batches([9, 9, 5])]
    learn = learner((batches, batches), MEANS[kind], model=make_model().to(dtype), microbatch=6)
    assert count_warnings(lambda: learn.fit(2)) == 0


# -- sums and means over elements ------------------------------------------------------------------


def summed_learner(sizes: list[int], **options: Any) -> Learner:
    x, y = joined(class_batches([24]))
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    loss_func = nn.CrossEntropyLoss(reduction='sum')
    return learner((batches, batches), loss_func, metrics=Perplexity(), lr=0.0, **options)


@pytest.mark.parametrize('sizes', [[3] * 8, [10, 10, 4]])
def test_a_sum_is_divided_by_the_samples(sizes: list[int]) -> None:
    learn = summed_learner(sizes)
    learn.fit(1)
    x, y = joined(class_batches([24]))
    expected = F.cross_entropy(make_model()(x), y).item()
    now = learn.history[0]
    assert now['train_loss'] == pytest.approx(expected, rel=1e-13)
    assert now['valid_loss'] == pytest.approx(expected, rel=1e-13)
    assert now['perplexity'] == pytest.approx(torch.tensor(expected).exp().item(), rel=1e-6)


ELEMENT_LOSSES: dict[str, Any] = {
    'PoissonNLLLoss': nn.PoissonNLLLoss(),
    'soft_margin_loss': F.soft_margin_loss,
    'KLDivLoss': nn.KLDivLoss(),
    'MSELoss': nn.MSELoss(),
}


@pytest.mark.filterwarnings('ignore:reduction:UserWarning')  # torch, of KLDivLoss
@pytest.mark.parametrize('kind', ELEMENT_LOSSES)
def test_ragged_batches_are_weighted_by_elements(kind: str) -> None:
    gen = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randn(n, length, generator=gen, dtype=torch.float64),
            torch.rand(n, length, generator=gen, dtype=torch.float64),
        )
        for n, length in ((4, 3), (4, 9), (2, 5))
    ]
    loss_func = ELEMENT_LOSSES[kind]
    flat = [torch.cat([batch[i].flatten() for batch in batches]) for i in range(2)]
    expected = loss_func(*flat).item()
    learn = learner((batches, batches), loss_func, model=nn.Sequential(nn.Identity()))
    (loss,) = learn.validate()
    assert loss == pytest.approx(expected, rel=1e-13)
