"""Losses of single samples, predictions on one item, and batches that callbacks look at."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from learnkit import SGD, Callback, CrossEntropyLossFlat, DataLoaders, Learner

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


@pytest.mark.parametrize('name', LOSSES)
def test_loss_of_padded_samples(name: str) -> None:
    loss_func, ignored, options = LOSSES[name]
    x, y = padded_batch(ignored)
    learn = Learner([(x, y)], **{'model': nn.Identity(), **options}, loss_func=loss_func)
    *_, losses = learn.get_preds(0, with_loss=True)
    streamed = next(learn.predict_iter(ds_idx=0, with_loss=True))[-1]
    expected = sample_means(x, y, ignored)
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)
    assert streamed.tolist() == losses.tolist()


def test_loss_of_targets_that_are_nan() -> None:
    def mse_of_known(pred: Tensor, y: Tensor, reduction: str = 'mean') -> Tensor:
        squares = torch.where(y.isnan(), 0, pred - y).square()
        return squares if reduction == 'none' else squares.sum() / (~y.isnan()).sum()

    x, y = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[0.0, 0.0], [torch.nan, 2.0]])
    *_, losses = Learner([(x, y)], nn.Identity(), mse_of_known).get_preds(0, with_loss=True)
    assert losses.tolist() == [2.5, 9.0]


# -- one item --------------------------------------------------------------------------------------


class Scaled:
    "A collate function that scales bytes, with or without targets."

    def __call__(self, samples: list[Any]) -> Any:
        if not isinstance(samples[0], tuple):
            return torch.stack(samples) / 255
        xs, ys = zip(*samples, strict=True)
        return torch.stack(xs) / 255, torch.tensor(ys)


def test_predict_collates_as_the_loader() -> None:
    gen = torch.Generator().manual_seed(1)
    items = [(torch.randint(256, (2,), generator=gen), i % 2) for i in range(6)]
    loader = DataLoader(items, batch_size=3, collate_fn=Scaled())
    torch.manual_seed(0)
    learn = Learner(DataLoaders(loader, loader), nn.Linear(2, 2), nn.CrossEntropyLoss())
    expected = learn.get_preds()[0][4]
    for item in (items[4], items[4][0]):
        assert torch.allclose(learn.predict(item)[2], expected)


def test_predict_collates_samples_without_targets() -> None:
    items = [torch.tensor([255, 0]), torch.tensor([51, 102])]
    loader = DataLoader(items, batch_size=2, collate_fn=Scaled())
    learn = Learner(DataLoaders(loader), nn.Identity(), nn.CrossEntropyLoss(), default_cbs=False)
    assert learn.predict(items[1], with_input=True)[0].tolist() == pytest.approx([0.2, 0.4])


# -- batches that callbacks look at ----------------------------------------------------------------


def test_one_batch_leaves_the_training_alone() -> None:
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
    assert now == 0
