"""Losses of single samples, predictions on one item, and batches that callbacks look at."""

from __future__ import annotations

import functools
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
    row(
        was=padded_means.argsort(descending=True).tolist(), now=order.tolist(), independent=expected
    )
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


# -- losses that show no parameters ----------------------------------------------------------------


class WrappedLoss:
    "A loss whose signature is that of the module it wraps, `(*args, **kwargs)`, as fastai's losses."

    def __init__(self) -> None:
        self.func = nn.CrossEntropyLoss()
        self.n_calls = 0
        functools.update_wrapper(self, self.func)

    def __call__(self, pred: Tensor, targ: Tensor) -> Tensor:
        self.n_calls += 1
        return self.func(pred, targ)


@pytest.mark.silent(
    "a validation without targets: calls of a loss like fastai's CrossEntropyLossFlat"
)
def test_a_loss_of_args_is_not_called_without_targets(row: Row) -> None:
    loss = WrappedLoss()
    learn = Learner([(torch.zeros(4, 3),)], nn.Linear(3, 2), loss, default_cbs=False)
    learn.validate(0)
    row(was='TypeError', now=loss.n_calls, independent=0)
    assert loss.n_calls == 0


# -- one item --------------------------------------------------------------------------------------


class Scaled:
    "A collate function that scales bytes, with or without targets."

    def __call__(self, samples: list[Any]) -> Any:
        if not isinstance(samples[0], tuple):
            return torch.stack(samples) / 255
        xs, ys = zip(*samples, strict=True)
        return torch.stack(xs) / 255, torch.tensor(ys)


@pytest.mark.silent('predict(item) with a collate function that scales: probability of class 1')
@pytest.mark.parametrize('item_is_whole', [False, True])
def test_predict_collates_as_the_loader(item_is_whole: bool, row: Row) -> None:
    gen = torch.Generator().manual_seed(1)
    items = [(torch.randint(256, (2,), generator=gen), i % 2) for i in range(6)]
    loader = DataLoader(items, batch_size=3, collate_fn=Scaled())
    torch.manual_seed(0)
    learn = Learner(DataLoaders(loader, loader), nn.Linear(2, 2), nn.CrossEntropyLoss())
    expected = learn.get_preds()[0][4]
    plain = learn.model(items[4][0].float()).softmax(-1)
    pred = learn.predict(items[4] if item_is_whole else items[4][0])[2]
    row(was=plain[1].item(), now=pred[1].item(), independent=expected[1].item())
    assert torch.allclose(pred, expected)


def test_predict_collates_samples_without_targets() -> None:
    items = [torch.tensor([255, 0]), torch.tensor([51, 102])]
    loader = DataLoader(items, batch_size=2, collate_fn=Scaled())
    learn = Learner(DataLoaders(loader), nn.Identity(), nn.CrossEntropyLoss(), default_cbs=False)
    assert learn.predict(items[1], with_input=True)[0].tolist() == pytest.approx([0.2, 0.4])


# -- batches that callbacks look at ----------------------------------------------------------------


@pytest.mark.silent('dls.one_batch() before each batch: distance of the weights after two epochs')
def test_one_batch_leaves_the_training_alone(row: Row) -> None:
    def train(*cbs: Callback) -> Tensor:
        x = torch.arange(24.0)[:, None] / 24
        torch.manual_seed(4)
        loader = DataLoader([(v, v * 2) for v in x], batch_size=4, shuffle=True)
        learn = Learner(DataLoaders(loader), nn.Linear(1, 1), nn.MSELoss(), SGD, lr=0.1, cbs=cbs)
        with learn.no_bar(), learn.no_logging():
            learn.fit(2)
        return learn.model.weight.detach()

    looking = Callback(before_batch=lambda cb: cb.dls.one_batch())
    now = (train(looking) - train()).abs().max().item()
    row(was=0.0106001, now=now, independent=0.0)
    assert now == 0
