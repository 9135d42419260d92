"""A Learner whose run is rewound."""

from collections.abc import Container
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learnkit import SGD, Callback, Checkpoint, DataLoaders, Learner
from learnkit.checkpoint.digest import digest

N, BS, EPOCHS = 64, 8, 3
BATCHES = EPOCHS * N // BS


class Record(Callback):
    "Keep a digest of the state before each batch."

    order = -100
    run_valid = False

    def __init__(self, batches: Container[int] = range(1 << 30)) -> None:
        self._batches = batches
        self.digests: dict[int, str] = {}
        self.indices: dict[int, Any] = {}

    def before_batch(self) -> None:
        if self.learn.time.ba not in self._batches:
            return
        self.digests[self.learn.time.ba] = describe(self.learn)
        self.indices[self.learn.time.ba] = self.learn.parts.positions.indices(self.learn)


def describe(learn: Learner) -> str:
    "Return a digest of weights, optimizer and generators."
    return digest([learn.model.state_dict(), learn.opt.state_dict(), torch.get_rng_state()])


def make(
    path: Path,
    *cbs: Any,
    workers: int = 0,
    seed: int = 0,
    bad: int | None = None,
    kind: type[Learner] = Learner,
    **options: Any,
) -> Learner:
    torch.manual_seed(seed)
    x = torch.randn(N, 4)
    y = x.sum(1, keepdim=True)
    if bad is not None:
        y[bad] = 1000.0
    data = TensorDataset(x, y)
    dls = DataLoaders(DataLoader(data, BS, shuffle=True, num_workers=workers), DataLoader(data, BS))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    options = {'opt_func': partial(SGD, mom=0.9), 'lr': 0.01, **options}
    learn = kind(
        dls,
        model,
        nn.MSELoss(),
        path=path,
        cbs=[Checkpoint('5ba', keep_last=None), *cbs],
        **options,
    )
    learn.logger = lambda *_: None
    return learn


def train(learn: Learner) -> list[float]:
    "Train, and return the losses."
    with learn.no_bar():
        learn.fit(EPOCHS)
    return list(learn.recorder.smooth_loss.raw)
