"""The training that `benchmarks.resume` kills: data, network, and settings that all programs share.

The first value of a row is its number. The network writes the numbers of its training batches to a file, so that a
run shows which samples it was trained on."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

N, N_VALID, N_FEATURES, N_CLASSES = 480, 240, 8, 4
BATCH, ACCUMULATED = 16, 2  # samples a batch, batches a step of the optimizer
EPOCHS, PATIENCE = 8, 2
LR, DECAY = 0.05, 0.9  # highest rate; decay of the averaged weights
SAVE_EVERY = 10  # batches
BATCHES = N // BATCH  # an epoch
STEPS = EPOCHS * BATCHES // ACCUMULATED
LOG = 'LEARNKIT_RESUME_LOG'  # environment variable with the file of sample numbers


class Rows(Dataset[Any]):
    "Four classes by the angle of two features; a third of the labels is random, so that training overfits."

    def __init__(self, n: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        features = torch.randn(n, N_FEATURES, generator=g)
        angle = torch.atan2(features[:, 0], features[:, 1])
        labels = ((angle + torch.pi) / (2 * torch.pi) * N_CLASSES).long().clamp(max=N_CLASSES - 1)
        is_random = torch.rand(n, generator=g) < 1 / 3
        self.x = torch.cat([torch.arange(n)[:, None].float(), features], 1)
        self.y = torch.where(is_random, torch.randint(N_CLASSES, (n,), generator=g), labels)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


def train_rows() -> Rows:
    return Rows(N, 1)


def valid_rows() -> Rows:
    return Rows(N_VALID, 2)


def train_loader(kind: Any = DataLoader, batch_size: int = BATCH) -> Any:
    return kind(train_rows(), batch_size=batch_size, shuffle=True, num_workers=2)


def valid_loader() -> Any:
    return DataLoader(valid_rows(), batch_size=N_VALID)


def log_samples(numbers: Tensor) -> None:
    "Append the numbers of a training batch's samples to the log, which survives a kill."
    file = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, numbers.to(torch.int16).numpy().tobytes())
    os.close(file)


class Net(nn.Module):
    "A perceptron with batch normalization and dropout."

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(N_FEATURES, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(64, N_CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            log_samples(x[:, 0])
        return self.layers(x[:, 1:])
