"""Losses of single samples, predictions on one item, and batches that callbacks look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from learnkit import (
    SGD,
    Callback,
    CrossEntropyLossFlat,
    DataLoaders,
    Interpretation,
    Learner,
)

Row = Callable[..., None]
N_CLASSES = 3
PAD = -100


def padded_batch(ignored: int = PAD) -> tuple[Tensor, Tensor]:
    "Four sequences of length 6, of which 6, 3, 1 and 2 targets count; the scores are the inputs."
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(4, 6, N_CLASSES, generator=gen)
    y = torch.randint(1, N_CLASSES, (4, 6), generator=gen)
    for i, length in enumerate((6, 3, 1, 2)):
        y[i, length:] = ignored
    return x, y


def sample_means(x: Tensor, y: Tensor, ignored: int = PAD) -> list[float]:
    "The mean loss of each sequence without its padding, one by one in double precision."
    means = []
    for scores, targets in zip(x.double(), y, strict=True):
        counted = targets != ignored
        means.append(F.cross_entropy(scores[counted], targets[counted]).item())
    return means


def flattened(pred: Tensor, y: Tensor, reduction: str = 'mean') -> Tensor:
    return F.cross_entropy(pred.flatten(0, 1), y.flatten(), reduction=reduction)


def masked(pred: Tensor, y: Tensor, reduction: str = 'mean') -> Tensor:
    "A loss of the targets above 0, which says so by `weight_func` alone."
    losses = F.cross_entropy(pred.transpose(1, 2), y.clamp_min(0), reduction='none') * (y > 0)
    return losses if reduction == 'none' else losses.sum() / (y > 0).sum()


class ChannelsFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


LOSSES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    'CrossEntropyLossFlat': (CrossEntropyLossFlat(), PAD, {}),
    'ignore_index=0': (CrossEntropyLossFlat(ignore_index=0), 0, {}),
    'a function of flattened tensors': (flattened, PAD, {}),
    'nn.CrossEntropyLoss': (nn.CrossEntropyLoss(), PAD, {'model': ChannelsFirst()}),
    'weight_func': (masked, 0, {'weight_func': lambda xb, yb: (yb[0] > 0).sum()}),
}


@pytest.mark.silent('get_preds(with_loss=True) of padded sequences: loss of the shortest')
@pytest.mark.parametrize('name', LOSSES)
def test_loss_of_padded_samples(name: str, row: Row) -> None:
    loss_func, ignored, options = LOSSES[name]
    x, y = padded_batch(ignored)
    learn = Learner([(x, y)], **{'model': nn.Identity(), **options}, loss_func=loss_func)
    *_, losses = learn.get_preds(0, with_loss=True)
    streamed = next(learn.predict_iter(ds_idx=0, with_loss=True))[-1]
    expected = sample_means(x, y, ignored)
    row(was=expected[2] / 6, now=losses[2].item(), independent=expected[2])
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)
    assert streamed.tolist() == losses.tolist()


@pytest.mark.silent('top_losses of padded sequences: order of the samples')
def test_top_losses_of_padded_samples(row: Row) -> None:
    x, y = padded_batch()
    learn = Learner([(x, y)], nn.Identity(), CrossEntropyLossFlat())
    losses, order = Interpretation.from_learner(learn, ds_idx=0).top_losses()
    means = torch.tensor(sample_means(x, y))
    padded_means = means * torch.tensor([6, 3, 1, 2]) / 6
    expected = means.argsort(descending=True).tolist()
    row(was=padded_means.argsort(descending=True).tolist(), now=order.tolist(), independent=expected)
    assert order.tolist() == expected
    assert losses.tolist() == pytest.approx(sorted(means.tolist(), reverse=True), rel=1e-5)


@pytest.mark.silent('loss of a sample whose targets are NaN in part (MSE of the rest)')
def test_loss_of_targets_that_are_nan(row: Row) -> None:
    def mse_of_known(pred: Tensor, y: Tensor, reduction: str = 'mean') -> Tensor:
        squares = torch.where(y.isnan(), 0, pred - y).square()
        return squares if reduction == 'none' else squares.sum() / (~y.isnan()).sum()

    x, y = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[0.0, 0.0], [torch.nan, 2.0]])
    *_, losses = Learner([(x, y)], nn.Identity(), mse_of_known).get_preds(0, with_loss=True)
    row(was=4.5, now=losses[1].item(), independent=9.0)
    assert losses.tolist() == [2.5, 9.0]
