"""Every loss class of torch.nn on ragged batches, against the loss and the gradient of the whole set."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import SGD, DataLoaders, GradientAccumulation, Learner
from tests.helpers.learners import bare_learner

N_FEATURES = 4
WEIGHT = torch.tensor([1.0, 4.0, 0.2, 2.0], dtype=torch.float64)
Batch = tuple[Tensor, ...]  # inputs and targets


@dataclass
class Case:
    "A loss with batches for it."

    make: Callable[[], Any]  # returns the loss
    targets: Callable[..., tuple[Tensor, ...]]  # f(shape of the predictions, generator)
    activation: Callable[[Tensor], Tensor] = field(default=lambda x: x)  # of the model
    is_elementwise: bool = False  # samples may have different lengths


class Scale(nn.Module):
    "Scale each feature, and apply an activation."

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, N_FEATURES, dtype=torch.float64))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x * self.scale)


def randn(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=gen, dtype=torch.float64)


def numbers(shape: tuple[int, ...], gen: torch.Generator) -> tuple[Tensor]:
    return (randn(shape, gen),)


def shares(shape: tuple[int, ...], gen: torch.Generator) -> tuple[Tensor]:
    return (randn(shape, gen).sigmoid(),)


def signs(shape: tuple[int, ...], gen: torch.Generator) -> tuple[Tensor]:
    return (randn(shape, gen).sign(),)


def classes(shape: tuple[int, ...], gen: torch.Generator) -> tuple[Tensor]:
    return (torch.randint(N_FEATURES, shape[:1], generator=gen),)


def ignored(shape: tuple[int, ...], gen: torch.Generator) -> tuple[Tensor]:
    "Class numbers, of which about half are ignored."
    (targ,) = classes(shape, gen)
    is_ignored = torch.rand(shape[:1], generator=gen) < 0.5
    is_ignored[0] = False
    return (torch.where(is_ignored, -100, targ),)


def chances(shape: tuple[int, ...], gen: torch.Generator) -> tuple[Tensor]:
    return (randn(shape, gen).softmax(-1),)


def labels(shape: tuple[int, ...], gen: torch.Generator) -> tuple[Tensor]:
    "Sets of classes for MultiLabelMarginLoss, each ended by -1."
    targ = torch.stack([torch.randperm(shape[1], generator=gen) for _ in range(shape[0])])
    targ[:, 2:] = -1
    targ[::2, 1:] = -1
    return (targ,)


def variances(shape: tuple[int, ...], gen: torch.Generator) -> tuple[Tensor, Tensor]:
    return randn(shape, gen), randn(shape, gen).exp()


def others(shape: tuple[int, ...], gen: torch.Generator) -> tuple[Tensor, Tensor]:
    "The other input of a pair, and the sign for each entry."
    return randn(shape, gen), randn(shape, gen).sign()


def pairs(shape: tuple[int, ...], gen: torch.Generator) -> tuple[Tensor, Tensor]:
    "The other input of a pair, and the sign for each sample."
    return randn(shape, gen), randn(shape[:1], gen).sign()


def triplets(shape: tuple[int, ...], gen: torch.Generator) -> tuple[Tensor, Tensor]:
    return randn(shape, gen), randn(shape, gen)


def grids(shape: tuple[int, ...], gen: torch.Generator) -> tuple[Tensor]:
    "Two class numbers a sample, of which some are ignored."
    targ = torch.randint(3, (shape[0], 2), generator=gen)
    targ[torch.rand(targ.shape, generator=gen) < 0.4] = -100
    targ[0] = 1
    return (targ,)


def sequences(shape: tuple[int, ...], gen: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    "Targets, and the lengths of inputs and targets, for CTCLoss."
    n = shape[0]
    targ = torch.randint(1, N_FEATURES, (n, 3), generator=gen)
    return targ, torch.full((n,), 7), torch.randint(1, 4, (n,), generator=gen)


def frames(x: Tensor) -> Tensor:
    "Return log-probabilities (T, B, C) of 7 frames."
    shifts = torch.arange(7, dtype=x.dtype)[:, None, None]
    return (x * (1 + shifts)).log_softmax(-1)


def log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    "Return a function that makes the same loss with parameters each time."

    def make_seeded() -> nn.Module:
        torch.manual_seed(3)
        return make().double()

    return make_seeded


def linear(**options: Any) -> Callable[[], nn.Module]:
    return seeded(lambda: nn.LinearCrossEntropyLoss(N_FEATURES, N_FEATURES, **options))


CASES: dict[str, Case] = {
    'L1Loss': Case(nn.L1Loss, numbers, is_elementwise=True),
    'MSELoss': Case(nn.MSELoss, numbers, is_elementwise=True),
    'SmoothL1Loss': Case(nn.SmoothL1Loss, numbers, is_elementwise=True),
    'HuberLoss': Case(nn.HuberLoss, numbers, is_elementwise=True),
    'PoissonNLLLoss': Case(nn.PoissonNLLLoss, shares, is_elementwise=True),
    'GaussianNLLLoss': Case(nn.GaussianNLLLoss, variances, is_elementwise=True),
    'SoftMarginLoss': Case(nn.SoftMarginLoss, signs, is_elementwise=True),
    'HingeEmbeddingLoss': Case(nn.HingeEmbeddingLoss, signs, is_elementwise=True),
    'MarginRankingLoss': Case(lambda: nn.MarginRankingLoss(0.5), others, is_elementwise=True),
    'BCELoss': Case(nn.BCELoss, shares, torch.sigmoid, is_elementwise=True),
    'BCEWithLogitsLoss': Case(nn.BCEWithLogitsLoss, shares, is_elementwise=True),
    'BCEWithLogitsLoss, weights': Case(
        lambda: nn.BCEWithLogitsLoss(WEIGHT, pos_weight=WEIGHT), shares
    ),
    'KLDivLoss': Case(nn.KLDivLoss, chances, log_softmax, is_elementwise=True),
    'KLDivLoss, batchmean': Case(lambda: nn.KLDivLoss(reduction='batchmean'), chances, log_softmax),
    'CrossEntropyLoss': Case(nn.CrossEntropyLoss, ignored),
    'CrossEntropyLoss, weights': Case(lambda: nn.CrossEntropyLoss(WEIGHT), ignored),
    'CrossEntropyLoss, smoothing': Case(
        lambda: nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), ignored
    ),
    'CrossEntropyLoss, probabilities': Case(lambda: nn.CrossEntropyLoss(WEIGHT), chances),
    'NLLLoss': Case(lambda: nn.NLLLoss(WEIGHT, ignore_index=1), classes, log_softmax),
    'LinearCrossEntropyLoss': Case(linear(), ignored),
    'LinearCrossEntropyLoss, weights': Case(linear(weight=WEIGHT, bias=True), ignored),
    'LinearCrossEntropyLoss, ignore_index': Case(linear(ignore_index=2), classes),
    'LinearCrossEntropyLoss, probabilities': Case(linear(weight=WEIGHT), chances),
    'LinearCrossEntropyLoss, grid': Case(
        seeded(lambda: nn.LinearCrossEntropyLoss(N_FEATURES, 3, out_features=(2,))), grids
    ),
    'AdaptiveLogSoftmaxWithLoss': Case(
        seeded(lambda: nn.AdaptiveLogSoftmaxWithLoss(N_FEATURES, N_FEATURES, [2])), classes
    ),
    'MultiMarginLoss': Case(lambda: nn.MultiMarginLoss(weight=WEIGHT), classes),
    'MultiLabelMarginLoss': Case(nn.MultiLabelMarginLoss, labels),
    'MultiLabelSoftMarginLoss': Case(
        lambda: nn.MultiLabelSoftMarginLoss(WEIGHT), shares, is_elementwise=True
    ),
    'CosineEmbeddingLoss': Case(nn.CosineEmbeddingLoss, pairs),
    'TripletMarginLoss': Case(nn.TripletMarginLoss, triplets, is_elementwise=True),
    'TripletMarginWithDistanceLoss': Case(
        nn.TripletMarginWithDistanceLoss, triplets, is_elementwise=True
    ),
    'CTCLoss': Case(nn.CTCLoss, sequences, frames),
}
KINDS = [kind for kind in CASES if hasattr(nn, kind.partition(',')[0])]

pytestmark = pytest.mark.filterwarnings('ignore:reduction:UserWarning')  # torch, of KLDivLoss


def test_every_loss_class_of_torch_is_swept() -> None:
    names = [name for name in dir(nn) if name.endswith('Loss')]
    swept = {kind.partition(',')[0] for kind in CASES}
    assert set(names) <= swept, 'add a case, and the loss to a list of core/denominator.py'


def make_batches(case: Case, sizes: list[int], lengths: list[int]) -> list[Batch]:
    gen = torch.Generator().manual_seed(0)
    batches = []
    for n, length in zip(sizes, lengths, strict=True):
        shape = (n, length, N_FEATURES) if case.is_elementwise else (n, N_FEATURES)
        batches.append((randn(shape, gen), *case.targets(shape, gen)))
    return batches


def join(case: Case, batches: list[Batch]) -> Batch:
    "Return one batch of all elements, of samples of one length if they are not all alike."
    if case.is_elementwise:
        return tuple(torch.cat([t.flatten(0, -2) for t in ts]) for ts in zip(*batches, strict=True))
    return tuple(map(torch.cat, zip(*batches, strict=True)))


def compute_whole(case: Case, batch: Batch) -> tuple[float, Tensor]:
    "Return the loss of one batch by torch alone, and the gradient of all parameters."
    model, loss_func = Scale(case.activation), case.make()
    x, *yb = batch
    loss = loss_func(model(x), *yb)
    loss = getattr(loss, 'loss', loss)
    loss.backward()
    params = [*model.parameters(), *loss_func.parameters()]
    return loss.item(), torch.cat([p.grad.flatten() for p in params])


def make_learner(case: Case, train: Any, valid: Any = None, *cbs: Any, **options: Any) -> Learner:
    dls = DataLoaders(train, valid, n_inp=1)
    return bare_learner(dls, Scale(case.activation), case.make(), SGD, lr=0.5, cbs=cbs, **options)


def trained_gradient(learn: Learner) -> Tensor:
    "Return the gradient of the only step of a fit, from the weights."
    params = [*learn.model.parameters(), *learn.loss_func.parameters()]
    before = [p.detach().clone() for p in params]
    learn.fit(1)
    assert learn.time.st == 1
    pairs = zip(before, params, strict=True)
    return torch.cat([(old - p.detach()).flatten() for old, p in pairs]) / 0.5


@pytest.mark.parametrize('kind', KINDS)
def test_the_loss_of_an_epoch_is_the_loss_of_the_set(kind: str) -> None:
    case = CASES[kind]
    batches = make_batches(case, [5, 8, 2], [3, 7, 5])
    expected, _ = compute_whole(case, join(case, batches))
    (loss,) = make_learner(case, batches, batches).validate()
    assert loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize('kind', KINDS)
def test_accumulated_gradients_are_those_of_the_set(kind: str) -> None:
    case = CASES[kind]
    batches = make_batches(case, [5, 8, 2], [3, 7, 5])
    _, expected = compute_whole(case, join(case, batches))
    learn = make_learner(case, batches, None, GradientAccumulation(batches=3))
    torch.testing.assert_close(trained_gradient(learn), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('kind', KINDS)
def test_gradients_of_microbatches_are_those_of_the_batch(kind: str) -> None:
    case = CASES[kind]
    batches = make_batches(case, [7], [3])
    _, expected = compute_whole(case, batches[0])
    learn = make_learner(case, batches, microbatch=3)
    torch.testing.assert_close(trained_gradient(learn), expected, rtol=1e-10, atol=1e-12)
