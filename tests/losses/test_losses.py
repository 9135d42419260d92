"""Compare losses with fastai's names with torch's functions and closed forms in float64."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from learnkit.core.errors import LossError
from learnkit.data.dataloaders import DataLoaders, TensorLoader
from learnkit.learner import Learner
from learnkit.losses import (
    BaseLoss,
    BCELossFlat,
    BCEWithLogitsLossFlat,
    CrossEntropyLossFlat,
    DiceLoss,
    FocalLoss,
    FocalLossFlat,
    L1LossFlat,
    LabelSmoothingCrossEntropy,
    LabelSmoothingCrossEntropyFlat,
    MSELossFlat,
)

REDUCTIONS = ['mean', 'sum', 'none']
# of predictions, and their axis
SHAPES = [((6, 4), -1), ((3, 4, 5, 2), 1), ((3, 5, 4), -1), ((2, 4, 3, 5, 2), 1)]
OF_CLASSES = [CrossEntropyLossFlat, LabelSmoothingCrossEntropyFlat, FocalLossFlat]
each_shape = pytest.mark.parametrize(('shape', 'axis'), SHAPES)
each_reduction = pytest.mark.parametrize('reduction', REDUCTIONS)
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)


def data(shape: tuple[int, ...], axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    "Return float64 predictions and class numbers."
    inp = torch.randn(shape, dtype=torch.float64)
    return inp, torch.randint(shape[axis], inp.select(axis, 0).shape)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def logs(inp: torch.Tensor, targ: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    "Return log-probabilities [N, C], by definition, and targets [N], in sample order."
    x = inp.movedim(axis, -1).reshape(-1, inp.shape[axis])
    return x - x.exp().sum(1, keepdim=True).log(), targ.reshape(-1)


def reduced(loss: torch.Tensor, how: str) -> torch.Tensor:
    return {'mean': loss.mean(), 'sum': loss.sum(), 'none': loss}[how]


# ---------------------------------------------------------------- classes


@each_shape
@each_reduction
def test_cross_entropy(shape: tuple[int, ...], axis: int, reduction: str) -> None:
    inp, targ = data(shape, axis)
    log_p, t = logs(inp, targ, axis)
    nll = -log_p[torch.arange(len(t)), t]
    close(CrossEntropyLossFlat(axis=axis, reduction=reduction)(inp, targ), reduced(nll, reduction))

    w = WEIGHT[t]
    weighted = (w * nll).sum() / w.sum() if reduction == 'mean' else reduced(w * nll, reduction)
    close(CrossEntropyLossFlat(WEIGHT, axis=axis, reduction=reduction)(inp, targ), weighted)


@each_shape
@pytest.mark.parametrize('loss', OF_CLASSES)
def test_soft_labels(shape: tuple[int, ...], axis: int, loss: Any) -> None:
    "Probability 1 of a class equals the class index; mixed targets mix two cross-entropies."
    inp, targ = data(shape, axis)
    n = shape[axis]
    soft = F.one_hot(targ, n).double().movedim(-1, axis)
    close(loss(axis=axis)(inp, soft), loss(axis=axis)(inp, targ))
    if loss is FocalLossFlat:
        return
    other = (targ + 1) % n
    mixed = 0.3 * soft + 0.7 * F.one_hot(other, n).double().movedim(-1, axis)
    got = loss(axis=axis)(inp, mixed)
    close(got, 0.3 * loss(axis=axis)(inp, targ) + 0.7 * loss(axis=axis)(inp, other))


@each_shape
@each_reduction
@pytest.mark.parametrize('weight', [None, WEIGHT])
def test_label_smoothing(
    shape: tuple[int, ...], axis: int, reduction: str, weight: torch.Tensor | None
) -> None:
    inp, targ = data(shape, axis)
    log_p, t = logs(inp, targ, axis)
    w = torch.ones(4, dtype=torch.float64) if weight is None else weight
    hard, smooth = -(w[t] * log_p[torch.arange(len(t)), t]), -log_p.mean(1)
    hard = hard.sum() / w[t].sum() if reduction == 'mean' else reduced(hard, reduction)
    expected = 0.8 * hard + 0.2 * reduced(smooth, reduction)

    close(LabelSmoothingCrossEntropyFlat(0.2, weight, reduction, axis=axis)(inp, targ), expected)
    plain = LabelSmoothingCrossEntropy(0.2, weight, reduction)(inp.movedim(axis, 1), targ)
    close(plain.reshape(expected.shape), expected)


@each_shape
@each_reduction
@pytest.mark.parametrize('gamma', [0.0, 0.5, 2.0])
@pytest.mark.parametrize('weight', [None, WEIGHT])
def test_focal_loss(
    shape: tuple[int, ...], axis: int, reduction: str, gamma: float, weight: Any
) -> None:
    inp, targ = data(shape, axis)
    log_p, t = logs(inp, targ, axis)
    log_pt = log_p[torch.arange(len(t)), t]
    loss = -((1 - log_pt.exp()) ** gamma) * log_pt * (1.0 if weight is None else weight[t])

    close(FocalLossFlat(gamma, weight, reduction, axis=axis)(inp, targ), reduced(loss, reduction))
    plain = FocalLoss(gamma, weight, reduction)(inp.movedim(axis, 1), targ)
    close(plain.reshape(reduced(loss, reduction).shape), reduced(loss, reduction))


@pytest.mark.parametrize(
    'make',
    [
        FocalLoss,
        lambda: FocalLoss(0.5, WEIGHT),
        LabelSmoothingCrossEntropy,
        CrossEntropyLossFlat,
        lambda: LabelSmoothingCrossEntropy(0.3, WEIGHT),
        lambda: DiceLoss(square_in_union=True),
    ],
)
def test_gradients(make: Any) -> None:
    inp, targ = data((5, 4), 1)
    assert torch.autograd.gradcheck(make(), (inp.requires_grad_(), targ))


# ---------------------------------------------------------------- labels, regression, masks


@each_reduction
@pytest.mark.parametrize('dtype', [torch.int64, torch.bool, torch.float64])
def test_binary_cross_entropy(reduction: str, dtype: torch.dtype) -> None:
    inp, targ = torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6, 3)).to(dtype)
    p, t = 1 / (1 + (-inp).exp()), targ.double()
    expected = reduced(-(t * p.log() + (1 - t) * (1 - p).log()).reshape(-1), reduction)
    close(BCEWithLogitsLossFlat(reduction=reduction)(inp, targ), expected)
    close(BCELossFlat(reduction=reduction)(p, targ), expected)


def test_binary_cross_entropy_with_weights_by_label() -> None:
    inp = torch.randn(6, 3, 5, dtype=torch.float64)
    targ = torch.randint(2, (6, 3, 5))
    w = torch.rand(3).double()
    p, t = inp.sigmoid(), targ.double()
    positive, negative = -t * p.log(), -(1 - t) * (1 - p).log()
    got = BCEWithLogitsLossFlat(pos_weight=w, axis=1)(inp, targ)
    close(got, (w[:, None] * positive + negative).mean())
    close(BCEWithLogitsLossFlat(w, axis=1)(inp, targ), (w[:, None] * (positive + negative)).mean())
    close(BCELossFlat(w, axis=1)(p, targ), (w[:, None] * (positive + negative)).mean())
    with pytest.raises(LossError, match=r'pass targets of shape \[6, 3, 5\]'):
        BCEWithLogitsLossFlat(pos_weight=w, axis=1)(inp, targ.reshape(18, 5))


@each_reduction
@pytest.mark.parametrize('shape', [(6,), (6, 1), (6, 2)])
def test_regression(reduction: str, shape: tuple[int, ...]) -> None:
    inp, targ = torch.randn(shape, dtype=torch.float64), torch.randint(9, shape)
    diff = (inp - targ).reshape(-1)
    for t in (targ, targ.reshape(-1), targ.float()):
        close(MSELossFlat(reduction=reduction)(inp, t), reduced(diff**2, reduction))
        close(L1LossFlat(reduction=reduction)(inp, t), reduced(diff.abs(), reduction))


@pytest.mark.parametrize('loss', [MSELossFlat, L1LossFlat, BCEWithLogitsLossFlat])
def test_the_loss_is_in_float32_for_targets_of_any_type(loss: Any) -> None:
    "Targets from numpy are often float64."
    targ = torch.randint(2, (6,))
    for inp in (torch.randn(6, 1), torch.randn(6, 1).bfloat16()):
        inp.requires_grad_()
        for t in (targ, targ.double(), targ.bool(), targ.bfloat16()):
            value = loss()(inp, t)
            value.backward()
            assert value.dtype == torch.float32
            assert inp.grad is not None
            assert inp.grad.dtype == inp.dtype


@pytest.mark.parametrize('square', [False, True])
@each_reduction
def test_dice_loss(square: bool, reduction: str) -> None:
    inp, targ = data((2, 3, 4, 5), 1)
    targ[0, 0, 0] = 255  # of no class
    p = inp.exp() / inp.exp().sum(1, keepdim=True)
    expected = torch.zeros(2, 3, dtype=torch.float64)
    for b in range(2):
        for c in range(3):
            t = (targ[b] == c).double()
            total = (p[b, c] ** 2 if square else p[b, c]).sum() + t.sum()
            expected[b, c] = 1 - (2 * (p[b, c] * t).sum() + 1e-6) / (total + 1e-6)
    loss = DiceLoss(reduction=reduction, square_in_union=square)
    for t in (targ, targ[:, None]):
        close(loss(inp, t), reduced(expected, reduction))
    last = DiceLoss(axis=-1, reduction=reduction, square_in_union=square)
    close(last(inp.movedim(1, -1), targ), reduced(expected, reduction))


# ---------------------------------------------------------------- activation, decodes


@pytest.mark.parametrize('loss', [*OF_CLASSES, DiceLoss])
def test_probabilities_and_classes(loss: Any) -> None:
    for axis in (1, -1):
        x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
        p = loss(axis=axis).activation(x)
        close(p, x.exp() / x.exp().sum(axis, keepdim=True))
        assert loss(axis=axis).decodes(p).equal(p.max(axis).indices)
    for plain in (LabelSmoothingCrossEntropy(), FocalLoss()):
        close(plain.activation(x), x.softmax(1))
        assert plain.decodes(x).equal(x.argmax(1))


# ---------------------------------------------------------------- as an object


def test_any_torch_loss_can_be_flattened() -> None:
    inp, targ = torch.randn(2, 6, 1)
    got = BaseLoss(nn.HuberLoss, delta=0.3, is_2d=False)(inp, targ[:, 0])
    close(got, F.huber_loss(inp, targ, delta=0.3))


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize('loss', [MSELossFlat, L1LossFlat, BCEWithLogitsLossFlat, BCELossFlat])
@pytest.mark.parametrize(
    ('inp', 'targ'), [((6, 2), (6,)), ((6, 1), (1,)), ((6,), (6, 6)), ((6, 1), ())]
)
def test_nothing_is_broadcast(loss: Any, inp: tuple[int, ...], targ: tuple[int, ...]) -> None:
    with pytest.raises(LossError) as e:
        loss()(torch.rand(inp), torch.rand(targ))
    for part in (loss.__name__, f'{list(inp)} float32', f'{list(targ)} float32'):
        assert part in str(e.value)


@pytest.mark.parametrize('loss', [*OF_CLASSES, LabelSmoothingCrossEntropy, FocalLoss, DiceLoss])
def test_targets_that_are_not_class_numbers(loss: Any) -> None:
    inp = torch.randn(6, 4)
    one_hot = F.one_hot(torch.arange(6) % 4)
    floats = torch.zeros(6)
    few = torch.zeros(5, dtype=torch.long)
    for targ in (one_hot, floats, few):
        with pytest.raises(LossError, match=r'4 classes along axis -?1') as e:
            loss()(inp, targ)
        assert 'Are the classes along another `axis`?' in str(e.value)
        assert loss.__name__ in str(e.value)


# ---------------------------------------------------------------- in a Learner


def test_shapes_that_do_not_fit_are_reported_before_a_weight_has_changed() -> None:
    x = torch.randn(40, 3)
    learn = Learner(DataLoaders(TensorLoader(x, x, bs=16)), nn.Linear(3, 1), MSELossFlat())
    before = copy.deepcopy(learn.model.state_dict())
    with pytest.raises(LossError, match=r'\[16, 1\] float32 and targets \[16, 3\]'):
        learn.fit(1)
    assert all(v.equal(before[k]) for k, v in learn.model.state_dict().items())


def test_options_of_the_wrapped_loss_are_attributes_as_in_fastai() -> None:
    loss = copy.deepcopy(CrossEntropyLossFlat(ignore_index=3, label_smoothing=0.1))
    assert (loss.ignore_index, loss.label_smoothing, loss.weight) == (3, 0.1, None)
    with pytest.raises(AttributeError, match='no_such_option'):
        loss.no_such_option  # noqa: B018
