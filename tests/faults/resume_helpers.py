"""What rows 1 to 5 share: a Learner of many parts, and resuming it in processes of their own."""

import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from learnkit import EMA, Callback, Checkpoint, DataLoaders, Learner, accuracy
from learnkit.callbacks import ParamScheduler
from learnkit.callbacks.schedule import combined_cos
from learnkit.checkpoint.digest import differences
from learnkit.checkpoint.folder import entries
from tests.helpers.harness import run_until_done

N_EPOCH, N_BATCH, BS = 2, 5, 4
Make = Callable[[], Learner]


class Augmented(Dataset[tuple[Tensor, int]]):
    "Points with noise from three generators, new in each pass."

    def __len__(self) -> int:
        return N_BATCH * BS

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return noise + i % 3, i % 3


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
    )


def in_memory() -> DataLoaders:
    x, y = torch.randn(N_BATCH * BS, 4), torch.randint(3, (N_BATCH * BS,))
    return DataLoaders.from_tensors((x, y), (x[:8], y[:8]), bs=BS)


def augmented(num_workers: int) -> DataLoaders:
    train = DataLoader(Augmented(), BS, shuffle=True, num_workers=num_workers)
    return DataLoaders(train, DataLoader(Augmented(), BS, num_workers=0))


def learner(
    *cbs: Callable[[], Callback], dls: Callable[[], DataLoaders] = in_memory, **kwargs: Any
) -> Learner:
    "Return a Learner with dropout, batch norm, Adam, a one-cycle schedule and averaged weights, as in a script."
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    schedule = ParamScheduler(
        {'lr': combined_cos(0.25, 1e-3, 1e-2, 1e-5), 'mom': combined_cos(0.25, 0.95, 0.85, 0.95)}
    )
    return Learner(
        dls(),
        net(),
        nn.CrossEntropyLoss(),
        metrics=accuracy,
        cbs=[EMA(0.9), schedule, *(cb() for cb in cbs)],
        **kwargs,
    )


def resumed_at(make: Make, folder: Path, which: Callable[[int], Iterable[int]] = range) -> int:
    """Train in one process, and resume from its checkpoints in others, with other global seeds.

    `which` selects checkpoints from their number. Assert that each run ends in the same state; return the number."""
    straight = run_until_done(partial(train, make, folder)).result
    kept = entries(folder)
    assert len(kept) == N_EPOCH * (N_BATCH + 1)
    chosen = [kept[i] for i in which(len(kept))]
    for seed, entry in enumerate(chosen, 1):
        found = differences(
            straight,
            run_until_done(partial(train, make, folder / f'{seed}', entry.path, seed)).result,
        )
        assert not found, '\n'.join([f'resumed from {entry.path.name}:', *found])
    return len(chosen)


def train(make: Make, folder: Path, resume: Any = False, seed: int = 0) -> Any:
    "Train or resume, with a checkpoint after every batch and epoch; return the final state."
    learn = make()
    if seed:
        for other in (torch.manual_seed, random.seed, np.random.seed):
            other(seed)
    cbs = [Checkpoint('1ba', folder, keep_last=None, background=False), AtEpochEnds()]
    learn.fit(N_EPOCH, resume=resume, cbs=cbs)
    return learn.checkpoint_state()


class AtEpochEnds(Callback):
    "Write a checkpoint after each epoch in addition to its last batch; the last epoch always has one."

    def epoch_checkpoint(self) -> None:
        if self.epoch + 1 < N_EPOCH:
            self.learn.checkpoint.save()
