"""Loaders of one's own, and runs that are killed and resumed: samples, weights and history of each."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from learnkit import Callback, Checkpoint, DataLoaders, Learner
from learnkit.core.errors import CheckpointError
from tests.helpers.resuming import scramble

N, BS, N_EPOCH = 64, 4, 3
N_BATCHES = N // BS
PLACES = (5, 21, 32)  # batches, over all epochs, before which a run is killed

X = torch.randn(N, 6, generator=torch.Generator().manual_seed(11))


def batch_of(ids: list[int]) -> tuple[Tensor, Tensor]:
    "Return the inputs of samples, and their ids as targets."
    return X[ids], torch.tensor(ids, dtype=torch.float32).unsqueeze(1)


def order_of(epoch: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    order: list[int] = torch.randperm(N, generator=generator).tolist()
    return order


# -- runs ------------------------------------------------------------------------------------------


class Killed(BaseException):
    "Ends a run at once, as SIGKILL does; no event follows."


class Watch(Callback):
    "Record the ids of each batch, and kill the run before a batch."

    order = -1000

    def __init__(self, ids: list[list[int]], kill_before: int | None) -> None:
        self._ids, self._kill_before = ids, kill_before

    def before_batch(self) -> None:
        if not self.learn.training:
            return
        if len(self._ids) == self._kill_before:
            raise Killed
        self._ids.append(self.learn.yb[0].flatten().int().tolist())

    def state_dict(self) -> None:
        return None


@dataclass
class Run:
    "What can be compared of a run."

    ids: list[list[int]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    history: list[Any] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: str = ''

    def is_exact(self, other: Run) -> bool:
        return (self.ids, self.weights, self.history) == (other.ids, other.weights, other.history)


def train(make: Callable[[], Any], folder: Path, kills: tuple[int, ...] = (), seed: int = 0) -> Run:
    "Train three epochs, killed before some batches and resumed each time with new objects and generators."
    run = Run()
    for life, kill_before in enumerate((*kills, None)):
        scramble(100 * seed + life)
        dl = make()
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        scramble(100 * seed + 50 + (life if life else 0))
        saving = Checkpoint('1ba', folder, preemption=False, background=False)
        learn = Learner(
            DataLoaders(dl, [batch_of([0, 1])]),
            model,
            nn.MSELoss(),
            opt_func=torch.optim.Adam,
            lr=0.01,
            cbs=[saving, Watch(run.ids, kill_before)],
        )
        with warnings.catch_warnings(record=True) as caught, learn.no_bar(), learn.no_logging():
            warnings.simplefilter('always')
            try:
                learn.fit(N_EPOCH, resume=True)
            except Killed:
                pass
            except CheckpointError as e:
                run.error = str(e)
        run.warnings += [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
        if run.error:
            return run
    run.weights = [t for p in model.parameters() for t in p.flatten().tolist()]
    run.history = [[row[k] for k in row if k != 'time'] for row in learn.history]
    return run


def resume_at(make: Callable[[], Any], folder: Path, *kills: int) -> tuple[Run, Run]:
    "Return a run without a stop, and a run that is killed and resumed."
    return train(make, folder / 'whole'), train(make, folder / 'killed', kills)


# -- loaders with state ----------------------------------------------------------------------------


class Seeding:
    "Shuffles by its epoch, and draws a seed for workers when a pass starts; its `__iter__` is a generator function."

    def __init__(self) -> None:
        self.epoch, self.i = -1, 0

    def __len__(self) -> int:
        return N_BATCHES

    def __iter__(self) -> Iterator[Any]:
        if self.i == 0:
            self.epoch += 1
        torch.empty((), dtype=torch.int64).random_()
        order = order_of(self.epoch)
        while self.i < N_BATCHES:
            i = self.i
            self.i = i + 1
            yield self.collate(order[i * BS : (i + 1) * BS])
        self.i = 0

    def collate(self, ids: list[int]) -> Any:
        return batch_of(ids)

    def state_dict(self) -> dict[str, Any]:
        return {'epoch': self.epoch, 'i': self.i}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.i = state['epoch'], state['i']


class NextEpoch(Seeding):
    "Its state after the last batch of an epoch means the start of the next one."

    def state_dict(self) -> dict[str, Any]:
        return {'epoch': self.epoch, 'i': self.i % N_BATCHES}


class EndOfEpoch(Seeding):
    "Like Mosaic's: a pass over a state from the end of an epoch is empty, also after the epoch has ended."

    def __init__(self) -> None:
        super().__init__()
        self.loaded: tuple[int, int] | None = None
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        torch.empty((), dtype=torch.int64).random_()
        self.epoch, self.i = self.loaded or (self.epoch, 0)
        self.loaded = None
        epoch, self.epoch = self.epoch, self.epoch + 1
        order = order_of(epoch)
        while self.i < N_BATCHES:
            i = self.i
            self.i = i + 1
            yield self.collate(order[i * BS : (i + 1) * BS])

    def state_dict(self) -> dict[str, Any]:
        epoch, i = self.loaded or (self.epoch - 1, self.i)
        return {'epoch': epoch, 'i': i}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = (state['epoch'], state['i']) if state['epoch'] >= 0 else None


class Augmenting(Seeding):
    "Adds noise from torch's global generator to each batch."

    def collate(self, ids: list[int]) -> Any:
        x, y = batch_of(ids)
        return x + 0.1 * torch.randn_like(x), y


class OwnNoise(Seeding):
    "Adds noise from its own generator, which its state includes."

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(5)

    def collate(self, ids: list[int]) -> Any:
        x, y = batch_of(ids)
        return x + self.rng.random(), y

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = self.rng.getstate()
        return {**super().state_dict(), 'rng': [version, list(words), gauss]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        version, words, gauss = state['rng']
        self.rng.setstate((version, tuple(words), gauss))


class PermutedLate(Seeding):
    "Draws its order from torch's global generator when its first batch is drawn."

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(N).tolist()
        while self.i < N_BATCHES:
            i = self.i
            self.i = i + 1
            yield self.collate(order[i * BS : (i + 1) * BS])
        self.i = 0


class PermutedNoise(PermutedLate, Augmenting):
    "Draws its order and its noise from torch's global generator."


class Raising(Seeding):
    "Its `state_dict` raises, as accelerate's does for some loaders."

    def __iter__(self) -> Iterator[Any]:
        order = order_of(self.epoch)
        for i in range(N_BATCHES):
            yield self.collate(order[i * BS : (i + 1) * BS])
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        raise AttributeError('no attribute dl_state_dict')


class RaisingCount(Raising):
    "Counts its passes in an attribute of another name."

    n_passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.n_passes += 1
        order = order_of(self.n_passes)
        for i in range(N_BATCHES):
            yield self.collate(order[i * BS : (i + 1) * BS])


# -- loaders without state -------------------------------------------------------------------------


class Unseeded:
    "Shuffles by a generator that nobody can restore."

    def __iter__(self) -> Iterator[Any]:
        order = list(range(N))
        random.SystemRandom().shuffle(order)
        for i in range(N_BATCHES):
            yield batch_of(order[i * BS : (i + 1) * BS])


class Buffer(IterableDataset[Any]):
    "Shuffles in a buffer by torch's global generator, from which dropout draws as well."

    def __iter__(self) -> Iterator[Any]:
        buffer = list(range(16))
        for i in range(16, N + 16):
            j = int(torch.randint(len(buffer), ()))
            ids, buffer[j] = buffer[j], i if i < N else -1
            yield X[ids], torch.tensor([float(ids)])
            if i >= N:
                buffer = [k for k in buffer if k >= 0]


class Noisy:
    "Adds noise from torch's global generator to inputs and targets; the order is fixed."

    def __iter__(self) -> Iterator[Any]:
        for i in range(N_BATCHES):
            x, y = batch_of(list(range(i * BS, (i + 1) * BS)))
            yield x + 0.1 * torch.randn_like(x), y + 0.1 * torch.rand_like(y)
