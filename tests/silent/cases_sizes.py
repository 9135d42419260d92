"""Sizes of batches, lengths of loaders, and means of losses, against loops by hand."""

import math
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from learnkit import SGD, Callback, DataLoaders, GradientAccumulation, Learner, accuracy
from tests.helpers.learners import quiet_learner
from tests.silent.cases import case

PART = 'sizes, lengths, means'


class Loader:
    "A loader of 20 batches that claims another length."

    def __init__(self, said: int | Exception) -> None:
        self.said = said

    def __len__(self) -> int:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x = torch.linspace(-1, 1, 20)
        return iter([(v.view(1, 1), v.view(1, 1)) for v in x])


class Time(nn.Module):
    "A linear layer on the mean over the time of (T, B, F)."

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.mean(0))[:, 0]


def make_learner(dls: Any, model: nn.Module, loss_func: Any, *cbs: Any, **options: Any) -> Learner:
    return quiet_learner(dls, model, loss_func, SGD, cbs=list(cbs), has_bar=False, **options)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- lengths ---------------------------------------------------------------------------------------


def wrong_length() -> tuple[list[float], list[float]]:
    "Return the rates of `fit_one_cycle(4)` with 20 batches for 10, and the shares of the fit."
    shares: list[float] = []
    note = Callback(before_batch=lambda cb: shares.append(cb.learn.pct_train), run_valid=False)
    learn = make_learner(DataLoaders(Loader(10)), nn.Linear(1, 1), nn.MSELoss(), note)
    learn.fit_one_cycle(4, 0.1)
    return [float(lr) for lr in learn.recorder.lrs], shares


@case(
    PART,
    'rates at batches 15, 30, 45, 60, 75 of 4 epochs of 20, for a length of 10',
    old='[0.0933, 0.075, 0.05, 0.025, 0.0]',
)
def rates_of_a_wrong_length() -> tuple[Any, Any]:
    def rate(share: float) -> float:
        if share < 0.25:
            return 0.004 + 0.096 * (1 - math.cos(4 * math.pi * share)) / 2
        return 1e-6 + (0.1 - 1e-6) * (1 + math.cos(math.pi * (share - 0.25) / 0.75)) / 2

    first = [min(i / 10, 1) / 4 for i in range(20)]
    later = [0.25 + i / 80 for i in range(60)]
    return wrong_length()[0][15::15], [rate(share) for share in (first + later)[15::15]]


@case(PART, 'largest step back of the share of a fit by a wrong length', old='0.225')
def share_of_a_wrong_length() -> tuple[float, float]:
    _, shares = wrong_length()
    steps = [b - a for a, b in pairwise(shares)]
    return max(0.0, -min(steps)), 0.0


@case(PART, 'batches of a loader whose len() raises RuntimeError', old='RuntimeError')
def length_that_raises() -> tuple[int, int]:
    loader = Loader(RuntimeError('Please call `iter(combined_loader)` first.'))
    learn = make_learner(DataLoaders(loader), nn.Linear(1, 1), nn.MSELoss())
    learn.fit(2)
    return learn.time.ba, 40


# -- sizes -----------------------------------------------------------------------------------------


def sequences(n: int) -> Any:
    "Return a loader of batches (T=7, B=4, F) with targets (B,)."

    def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        xs, ys = zip(*items, strict=True)
        return pad_sequence(list(xs)), torch.stack(ys)

    items = [(randn(7, 3, seed=i), randn(1, seed=i)[0]) for i in range(n)]
    return DataLoader(items, 4, collate_fn=collate)


@case(PART, 'steps of 32 samples accumulated to 16, sequence-first', old='3')
def steps_of_sequences() -> tuple[int, int]:
    learn = make_learner(sequences(32), Time(), nn.MSELoss(), GradientAccumulation(16))
    learn.fit(1)
    return learn.time.st, 2


@case(PART, "batches of 4 samples in fit('64sp'), sequence-first", old='10')
def batches_of_sequences() -> tuple[int, int]:
    learn = make_learner(sequences(32), Time(), nn.MSELoss())
    learn.fit('64sp')
    return learn.time.ba, 16


# -- means -----------------------------------------------------------------------------------------


def warned(learn: Learner) -> bool:
    "Return True if an evaluation warns that the loss is not a mean over samples."
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        learn.validate()
    return any('not a mean over samples' in str(w.message) for w in caught)


@case(PART, 'warning of a masked mean of batches of one size', old='False')
def masked_mean() -> tuple[bool, bool]:
    def masked(pred: Tensor, y: Tensor) -> Tensor:
        return (pred[:, 0] - y).square()[y > -0.3].mean()

    batches = [(randn(16, 3, seed=i), randn(16, seed=i + 9)) for i in range(3)]
    torch.manual_seed(0)
    return warned(make_learner((batches, batches), nn.Linear(3, 1), masked)), True


@case(PART, 'warning of a contrastive loss of batches of one size', old='False')
def contrastive() -> tuple[bool, bool]:
    def info_nce(pred: Tensor, y: Tensor) -> Tensor:
        scores = F.normalize(pred, dim=1) @ F.normalize(y, dim=1).T
        return F.cross_entropy(5 * scores, torch.arange(len(y)))

    batches = [(randn(16, 3, seed=i), randn(16, 4, seed=i + 9)) for i in range(3)]
    torch.manual_seed(0)
    return warned(make_learner((batches, batches), nn.Linear(3, 4), info_nce)), False


def hinge_batches() -> list[tuple[Tensor, Tensor]]:
    shapes = [(4, 3), (2, 9), (5, 2)]
    return [(randn(*s, seed=i), randn(*s, seed=i + 9).sign()) for i, s in enumerate(shapes)]


@case(PART, 'valid_loss of HingeEmbeddingLoss on ragged batches', old='0.62934')
def hinge_embedding() -> tuple[float, float]:
    batches = hinge_batches()
    learn = make_learner((batches, batches), nn.Sequential(nn.Identity()), nn.HingeEmbeddingLoss())
    x, y = (torch.cat([batch[i].flatten() for batch in batches]) for i in range(2))
    return learn.validate()[0], nn.HingeEmbeddingLoss()(x, y).item()


def features_learner(**options: Any) -> tuple[Learner, Tensor, Tensor]:
    "Return a Learner with LinearCrossEntropyLoss, and the data of its batches."
    x = randn(20, 4)
    y = torch.where(randn(20, seed=1) > 0.3, -100, x.argmax(1))
    torch.manual_seed(3)
    loss_func = nn.LinearCrossEntropyLoss(6, 4, weight=torch.tensor([1.0, 5.0, 0.2, 1.0]))
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    batches = list(zip(x.split([3, 15, 2]), y.split([3, 15, 2]), strict=True))
    return make_learner((batches, batches), model, loss_func, **options), x, y


if hasattr(nn, 'LinearCrossEntropyLoss'):  # torch 2.13

    @case(PART, 'valid_loss of LinearCrossEntropyLoss with weights and -100', old='1.79128')
    def linear_cross_entropy() -> tuple[float, float]:
        learn, x, y = features_learner()
        with torch.no_grad():
            return learn.validate()[0], learn.loss_func(learn.model(x), y).item()

    @case(PART, 'accuracy beside LinearCrossEntropyLoss', old='0.153846')
    def accuracy_of_features() -> tuple[float, float]:
        learn, x, y = features_learner(metrics=accuracy)
        with torch.no_grad():
            chosen = learn.loss_func.linear(learn.model(x)).argmax(1)
        is_counted = y >= 0
        return learn.validate()[1], (chosen == y)[is_counted].float().mean().item()
