"""Claims about losses: batches of unequal sizes have the loss and the gradient of all samples together.

Ten samples in batches of 5, 2 and 3. A loss is a mean over samples if its means over these batches, weighted in a loop
by hand, are the loss of all ten. For another loss the mean is weighted by the numbers of samples, and no loop can
divide a batch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from learnkit import DataLoaders, GradientAccumulation, Learner, MixedPrecision
from tests.sweeps.claims import Claim, Inapplicable, by_hand
from tests.sweeps.verdicts import Subject

SIZES = (5, 2, 3)
N = sum(SIZES)
LR = 0.1
RTOL = 1e-5
Batch = tuple[Tensor, tuple[Tensor, ...]]


# -- data of each kind -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    "Shape of a prediction, and the targets of all samples."

    shape: tuple[int, ...]
    targets: tuple[Tensor, ...]
    last: tuple[Callable[[], nn.Module], ...] = ()  # modules behind the prediction


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator)


def make_kinds() -> dict[str, Kind]:
    "Return the kinds of data by name."
    signs = draw(N, 3).sign()
    classes = torch.arange(N) % 3
    ignored = torch.where(torch.arange(N) % 4 == 1, -100, classes)
    pixels = (draw(N, 4, 4).abs() * 2).long().clamp(max=2)
    masks = (draw(N, 2, 4, 4) > 0).float()
    low = draw(N, 2).abs()
    boxes = torch.cat([low, low + 1 + draw(N, 2).abs()], 1)
    labels = torch.stack([classes, torch.full((N,), -1), torch.full((N,), -1)], 1)
    return {
        'values': Kind((3,), (draw(N, 3),)),
        'signs': Kind((3,), (signs,)),
        'binary': Kind((3,), ((signs > 0).float(),)),
        'chances': Kind((3,), ((signs > 0).float(),), (nn.Sigmoid,)),
        'classes': Kind((3,), (classes,)),
        'ignored': Kind((3,), (ignored,)),
        'log classes': Kind((3,), (classes,), (partial(nn.LogSoftmax, 1),)),
        'log values': Kind((3,), (draw(N, 3).softmax(1),), (partial(nn.LogSoftmax, 1),)),
        'labels': Kind((3,), (labels,)),
        'counts': Kind((3,), (draw(N, 3).abs().round(),)),
        'variances': Kind((3,), (draw(N, 3), draw(N, 3).abs() + 0.1)),
        'pairs': Kind((3,), (draw(N, 3), signs[:, 0])),
        'ranks': Kind((3,), (draw(N, 3), signs)),
        'triplets': Kind((3,), (draw(N, 3), draw(N, 3) + 1)),
        'pixels': Kind((3, 4, 4), (pixels,)),
        'masks': Kind((2, 4, 4), (masks,)),
        'chances of masks': Kind((2, 4, 4), (masks,), (nn.Sigmoid,)),
        'embeddings': Kind((8,), (torch.arange(N) % 2,)),
        'embeddings of balanced classes': Kind((8,), (torch.arange(N) % 5,)),
        'embeddings without labels': Kind((8,), ()),
        'boxes': Kind((4,), (boxes,), (Boxes,)),
    }


class Boxes(nn.Module):
    "Corners of boxes from any numbers."

    def forward(self, x: Tensor) -> Tensor:
        low = x[:, :2].abs()
        return torch.cat([low, low + 0.5 + x[:, 2:].abs()], 1)


KINDS = make_kinds()


# -- the table -------------------------------------------------------------------------------------

Rows = Iterator[tuple[str, str, Callable[..., Any]]]  # title, kind, f() -> loss


def list_torch() -> Rows:
    "Yield torch's losses, some with weights and ignored targets."
    kinds = {
        'L1Loss': 'values',
        'MSELoss': 'values',
        'SmoothL1Loss': 'values',
        'HuberLoss': 'values',
        'BCELoss': 'chances',
        'BCEWithLogitsLoss': 'binary',
        'CrossEntropyLoss': 'classes',
        'NLLLoss': 'log classes',
        'KLDivLoss': 'log values',
        'SoftMarginLoss': 'signs',
        'HingeEmbeddingLoss': 'signs',
        'MultiLabelSoftMarginLoss': 'binary',
        'MultiMarginLoss': 'classes',
        'MultiLabelMarginLoss': 'labels',
        'PoissonNLLLoss': 'counts',
        'GaussianNLLLoss': 'variances',
        'CosineEmbeddingLoss': 'pairs',
        'MarginRankingLoss': 'ranks',
        'TripletMarginLoss': 'triplets',
        'TripletMarginWithDistanceLoss': 'triplets',
    }
    for name, kind in kinds.items():
        yield name, kind, getattr(nn, name)
    weight = torch.tensor([1.0, 2.0, 5.0])
    entropy = nn.CrossEntropyLoss
    yield 'CrossEntropyLoss(ignored targets)', 'ignored', entropy
    yield 'CrossEntropyLoss(weight)', 'ignored', partial(entropy, weight)
    yield 'CrossEntropyLoss(label_smoothing)', 'classes', partial(entropy, label_smoothing=0.1)
    yield (
        'CrossEntropyLoss(weight, label_smoothing)',
        'ignored',
        partial(entropy, weight, label_smoothing=0.1),
    )
    yield 'CrossEntropyLoss(pixels)', 'pixels', partial(entropy, ignore_index=1)
    yield 'CrossEntropyLoss(sum)', 'classes', partial(entropy, reduction='sum')
    yield 'NLLLoss(weight)', 'log classes', partial(nn.NLLLoss, weight)
    yield 'MultiMarginLoss(weight)', 'classes', partial(nn.MultiMarginLoss, weight=weight)
    yield 'BCELoss(weight)', 'chances', partial(nn.BCELoss, weight)
    yield (
        'BCEWithLogitsLoss(pos_weight)',
        'binary',
        partial(nn.BCEWithLogitsLoss, pos_weight=weight),
    )
    yield 'KLDivLoss(batchmean)', 'log values', partial(nn.KLDivLoss, reduction='batchmean')


def list_metric_learning() -> Rows:
    "Yield the losses of embeddings and labels of pytorch-metric-learning."
    library = import_module('pytorch_metric_learning.losses')
    skipped = ('BaseLossWrapper', 'BaseMetricLossFunction', 'GenericPairLoss', 'MultipleLosses')
    without_labels = ('CrossBatchMemory', 'SelfSupervisedLoss', 'VICRegLoss', 'InstanceLoss')
    needed = {
        'num_classes': 2,
        'embedding_size': 8,
        'n_bins': 4,
        'l': 8,
        'K': 2,
        'num_bins': 4,
        'Tn': 0.5,
        'Tp': 0.5,
        'margin': 0.4,
        'descriptors_dim': 8,
    }
    # by class: further arguments, which have defaults or which its signature does not name
    more = {
        'CosFaceLoss': ['num_classes', 'embedding_size'],
        'SubCenterArcFaceLoss': ['num_classes', 'embedding_size'],
        'ManifoldLoss': ['K'],
    }
    kinds = {
        'ManifoldLoss': 'embeddings without labels',
        'SmoothAPLoss': 'embeddings of balanced classes',
    }
    for name, cls in sorted(vars(library).items()):
        is_loss = inspect.isclass(cls) and issubclass(cls, nn.Module)
        if not is_loss or name in (*skipped, *without_labels):
            continue
        parameters = inspect.signature(cls.__init__).parameters.values()
        required = [p.name for p in parameters if p.default is p.empty and p.name in needed]
        required += more.get(name, [])
        yield (
            name,
            kinds.get(name, 'embeddings'),
            partial(cls, **{key: needed[key] for key in required}),
        )


def list_monai() -> Rows:
    "Yield monai's losses of masks and of values."
    library = import_module('monai.losses')
    sigmoid = ('DiceLoss', 'DiceCELoss', 'DiceFocalLoss', 'GeneralizedDiceLoss', 'TverskyLoss')
    for name in (*sigmoid, 'GeneralizedDiceFocalLoss', 'HausdorffDTLoss', 'LogHausdorffDTLoss'):
        yield name, 'masks', partial(getattr(library, name), sigmoid=True)
    yield 'DiceLoss(batch)', 'masks', partial(library.DiceLoss, sigmoid=True, batch=True)
    for name in ('FocalLoss', 'AsymmetricUnifiedFocalLoss'):
        yield name, 'masks', getattr(library, name)
    for name in ('NACLLoss',):
        yield name, 'pixels', partial(getattr(library, name), classes=3, dim=2)
    for name in ('ContrastiveLoss', 'BarlowTwinsLoss'):
        yield name, 'values', getattr(library, name)


def list_segmentation_models() -> Rows:
    "Yield the losses of segmentation-models-pytorch, of several labels."
    library = import_module('segmentation_models_pytorch.losses')
    for name in ('JaccardLoss', 'DiceLoss', 'FocalLoss', 'LovaszLoss', 'TverskyLoss'):
        yield name, 'masks', partial(getattr(library, name), 'multilabel')
    yield 'FocalLoss(multiclass)', 'pixels', partial(library.FocalLoss, 'multiclass')
    yield 'SoftBCEWithLogitsLoss', 'masks', library.SoftBCEWithLogitsLoss
    yield 'SoftCrossEntropyLoss', 'pixels', partial(library.SoftCrossEntropyLoss, 'mean', 0.1)
    yield 'MCCLoss', 'chances of masks', library.MCCLoss


def list_torchvision() -> Rows:
    "Yield torchvision's focal loss and the losses of boxes."
    library = import_module('torchvision.ops')
    yield (
        'sigmoid_focal_loss',
        'masks',
        lambda: partial(library.sigmoid_focal_loss, reduction='mean'),
    )
    for name in ('generalized_box_iou_loss', 'distance_box_iou_loss', 'complete_box_iou_loss'):
        yield name, 'boxes', lambda name=name: partial(getattr(library, name), reduction='mean')


LIBRARIES: dict[str, Callable[[], Rows]] = {
    'torch': list_torch,
    'pytorch-metric-learning': list_metric_learning,
    'monai': list_monai,
    'segmentation_models_pytorch': list_segmentation_models,
    'torchvision': list_torchvision,
}


def load_losses(library: str) -> list[Subject]:
    "Return the losses of an installed library."
    return [Subject(library, title, build, kind) for title, kind, build in LIBRARIES[library]()]


# -- both loops ------------------------------------------------------------------------------------


def make_model(kind: Kind) -> nn.Sequential:
    torch.manual_seed(0)
    n_out = int(torch.tensor(kind.shape).prod())
    shaped = [nn.Unflatten(1, kind.shape)] if len(kind.shape) > 1 else []
    return nn.Sequential(nn.Linear(4, n_out), *shaped, *(make() for make in kind.last))


def make_batches(kind: Kind, sizes: tuple[int, ...]) -> list[Batch]:
    "Return inputs and targets in batches of these sizes."
    columns = [column.split(list(sizes)) for column in (draw(N, 4), *kind.targets)]
    return [(x, tuple(yb)) for x, *yb in zip(*columns, strict=True)]


def make_loss(subject: Subject) -> Any:
    "Return the loss function, with the same parameters each time."
    torch.manual_seed(1)
    return subject.build()


def compute(loss_func: Any, model: nn.Module, batches: list[Batch]) -> list[Tensor]:
    "Return the loss of each batch, in a loop by hand."
    torch.manual_seed(2)
    return [loss_func(model(x), *yb) for x, yb in batches]


def is_mean_over_samples(subject: Subject) -> bool:
    "Return True if the whole loss is a mean of the losses of batches, with weights of the targets or not."
    kind = KINDS[subject.options]
    loss_func, model = make_loss(subject), make_model(kind)

    def evaluate() -> bool:
        with torch.no_grad():
            [whole] = compute(loss_func, model, make_batches(kind, (N,)))
            singles = compute(loss_func, model, make_batches(kind, SIZES))
        weighted = sum(n * loss for n, loss in zip(SIZES, singles, strict=True)) / N
        if getattr(loss_func, 'reduction', 'mean') == 'sum':
            return True
        known = isinstance(loss_func, (nn.CrossEntropyLoss, nn.NLLLoss))
        return known or torch.allclose(weighted, whole, rtol=RTOL)

    found: bool = by_hand(evaluate)
    return found


def step_by_hand(
    subject: Subject, context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> nn.Module:
    "Return the model after one step on all samples."
    kind = KINDS[subject.options]
    loss_func, model = make_loss(subject), make_model(kind)
    opt = torch.optim.SGD(model.parameters(), lr=LR)
    with context():
        x, yb = make_batches(kind, (N,))[0]
        torch.manual_seed(2)
        loss = loss_func(model(x).float(), *yb)
    loss.backward()
    opt.step()
    return model


def add_gradients_by_hand(subject: Subject, sizes: tuple[int, ...]) -> None:
    "Run the backward passes of all batches."
    kind = KINDS[subject.options]
    loss_func, model = make_loss(subject), make_model(kind)
    for x, yb in make_batches(kind, sizes):
        loss_func(model(x), *yb).backward()


def make_learner(subject: Subject, sizes: tuple[int, ...], *cbs: Any, **options: Any) -> Learner:
    kind = KINDS[subject.options]
    batches = [(x, *yb) for x, yb in make_batches(kind, sizes)]
    dls = DataLoaders(batches, batches, device='cpu', n_inp=1)
    loss_func = make_loss(subject)
    options = {'opt_func': torch.optim.SGD, 'lr': LR, **options}
    return Learner(dls, make_model(kind), loss_func, cbs=list(cbs), **options)


def fit(learn: Learner) -> nn.Module:
    "Train for an epoch."
    torch.manual_seed(2)
    with learn.no_logging(), learn.no_bar():
        learn.fit(1)
    return learn.model


def compare(expected: nn.Module, got: nn.Module, rtol: float = 1e-4) -> list[str]:
    "Return by how much weights differ."
    a, b = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (expected, got))
    if a.isnan().any():
        raise Inapplicable('the loop by hand ends with NaN')
    gap = float((a - b).abs().max())
    return [] if torch.allclose(a, b, rtol=rtol, atol=1e-6) else [f'weights differ by {gap:.2g}']


# -- claims ----------------------------------------------------------------------------------------


def check_mean(subject: Subject, folder: Path) -> list[str]:
    "The loss of an evaluation in unequal batches."
    kind = KINDS[subject.options]
    by_hand(lambda: make_loss(subject))
    sizes = (N,) if is_mean_over_samples(subject) else SIZES
    model, loss_func = make_model(kind), make_loss(subject)
    with torch.no_grad():
        losses = by_hand(lambda: compute(loss_func, model, make_batches(kind, sizes)))
    expected = sum(n * float(loss) for n, loss in zip(sizes, losses, strict=True)) / N
    learn = make_learner(subject, SIZES)
    torch.manual_seed(2)
    with learn.no_logging(), learn.no_bar():
        got = float(learn.validate()[0])
    if getattr(loss_func, 'reduction', '') == 'sum':
        losses = compute(loss_func, model, make_batches(kind, SIZES))
        expected = sum(map(float, losses)) / N
    if math.isnan(expected):
        raise Inapplicable('the loop by hand is NaN')
    if abs(got - expected) <= RTOL * max(1e-3, abs(expected)):
        return []
    return [f'loss {got:.7g}, by hand {expected:.7g}']


def check_training(subject: Subject, folder: Path) -> list[str]:
    "A step on all samples."
    expected = by_hand(lambda: step_by_hand(subject))
    return compare(expected, fit(make_learner(subject, (N,))), rtol=0)


def check_accumulation(subject: Subject, folder: Path) -> list[str]:
    "A step for three unequal batches."
    expected = by_hand(lambda: step_by_hand(subject))
    by_hand(lambda: add_gradients_by_hand(subject, SIZES))
    return compare(expected, fit(make_learner(subject, SIZES, GradientAccumulation(batches=3))))


def check_microbatches(subject: Subject, folder: Path) -> list[str]:
    "A step on all samples in microbatches of 4."
    expected = by_hand(lambda: step_by_hand(subject))
    by_hand(lambda: add_gradients_by_hand(subject, (4, 4, 2)))
    return compare(expected, fit(make_learner(subject, (N,), microbatch=4)))


def check_half(subject: Subject, folder: Path) -> list[str]:
    "A step with autocast to bf16, and the loss in float32."
    context = partial(torch.autocast, 'cpu', torch.bfloat16)
    expected = by_hand(lambda: step_by_hand(subject, context))
    got = fit(make_learner(subject, (N,), MixedPrecision('bf16')))
    return compare(expected, got, rtol=2e-2)


CLAIMS: dict[str, Claim] = {
    'mean over unequal batches': check_mean,
    'trains': check_training,
    'accumulation': check_accumulation,
    'microbatches': check_microbatches,
    'half precision': check_half,
}
