"Data and models for the bench of fastai: tables, pictures in files, series of numbers, noise."

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.peers.rows import import_torchvision

import_torchvision()

from fastai.vision import all as vision  # noqa: E402  # after the operators
from PIL import Image  # noqa: E402

SIZE = 16  # height and width of a picture


def seed_generators(seed: int) -> None:
    "Seed torch, numpy and Python alike."
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def make_loaders(x: torch.Tensor, y: torch.Tensor, path: Path, bs: int = 8) -> vision.DataLoaders:
    "Return fastai's loaders: four fifths of the rows to train, shuffled, and the others."
    n = 4 * len(x) // 5
    train = vision.TfmdDL(TensorDataset(x[:n], y[:n]), bs=bs, shuffle=True, num_workers=0)
    valid = vision.TfmdDL(TensorDataset(x[n:], y[n:]), bs=bs, num_workers=0)
    return vision.DataLoaders(train, valid, path=path)


def table(path: Path) -> vision.DataLoaders:
    "Return rows of eight numbers, in three classes."
    x = torch.randn(60, 8)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    return make_loaders(x, y, path)


def classifier() -> nn.Module:
    "Return a network with batch norm and dropout."
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)
    )


def sloped() -> nn.Module:
    "Return a network whose activations have slopes to learn."
    return nn.Sequential(nn.Linear(8, 16), nn.PReLU(16), nn.Linear(16, 3))


def series(path: Path) -> vision.DataLoaders:
    "Return sequences of four vectors, each with a vector to predict at every step."
    x = torch.randn(60, 4, 8)
    return make_loaders(x, x.roll(1, 1), path)


class Recurrent(nn.Module):
    "A recurrent network with the outputs that `RNNCallback` takes apart, and a state to reset."

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.RNN(8, 16, batch_first=True), nn.Linear(16, 8)
        self.n_resets = 0

    def reset(self) -> None:
        self.n_resets += 1

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raw, _ = self.rnn(x)
        dropped = nn.functional.dropout(raw, 0.1, self.training)
        return self.head(dropped), raw, dropped


class LongMemory(nn.Module):
    "An LSTM and a layer on its outputs."

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0])


def words(path: Path) -> vision.DataLoaders:
    "Return a text of ten words, in sequences of six that continue in the next batch."
    text = (torch.arange(8 * 61) ** 2 // 3) % 10
    x = torch.stack([text[i : i + 6] for i in range(0, 480, 6)])
    y = torch.stack([text[i + 1 : i + 7] for i in range(0, 480, 6)])
    train = vision.TfmdDL(TensorDataset(x[:64], y[:64]), bs=8, num_workers=0)
    valid = vision.TfmdDL(TensorDataset(x[64:], y[64:]), bs=8, num_workers=0)
    return vision.DataLoaders(train, valid, path=path)


class LanguageModel(nn.Module):
    "Two LSTM layers that keep their state from batch to batch, with dropout and tied embeddings."

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 16), nn.Linear(16, 10)
        self.rnn = nn.LSTM(16, 16, 2, batch_first=True)
        self.head.weight = self.embed.weight
        self.state = [torch.zeros(2, 8, 16) for _ in range(2)]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raw, state = self.rnn(self.embed(x), tuple(self.state))
        self.state = [t.detach() for t in state]
        out = nn.functional.dropout(raw, 0.3, self.training)
        return self.head(out), raw, out

    def reset(self) -> None:
        for t in self.state:
            t.zero_()


def write_pictures(folder: Path, n: int = 20) -> None:
    "Write `n` reddish and `n` bluish pictures, in a folder for each color."
    generator = np.random.default_rng(0)
    for channel, color in ((0, 'red'), (2, 'blue')):
        (folder / color).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            pixels = generator.integers(0, 160, (SIZE, SIZE, 3), dtype=np.uint8)
            pixels[..., channel] += 60
            Image.fromarray(pixels).save(folder / color / f'{i}.png')


def pictures(path: Path, augment: bool = True) -> vision.DataLoaders:
    "Return a DataBlock's loaders of picture files, augmented batch by batch."
    write_pictures(path / 'pictures')
    transforms = vision.aug_transforms(size=SIZE) if augment else []
    block = vision.DataBlock(
        blocks=(vision.ImageBlock, vision.CategoryBlock),
        get_items=vision.get_image_files,
        splitter=vision.RandomSplitter(seed=0),
        get_y=vision.parent_label,
        batch_tfms=transforms,
    )
    files = path / 'pictures'
    return block.dataloaders(files, path=path, bs=8, num_workers=0)


def body() -> nn.Module:
    "Return a small convolutional body, in two parts."
    first = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(first, second)


def picture_classifier() -> nn.Module:
    "Return fastai's head on the small body."
    return vision.add_head(body(), 16, 2)


def noise(path: Path) -> vision.DataLoaders:
    "Return noise with a picture to each, for a GAN."
    return make_loaders(torch.randn(60, 8), torch.rand(60, 3, SIZE, SIZE), path)
