"""Custom loaders, and runs that are killed and resumed: samples, weights and history of each."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Sampler

from learnkit import Callback, Checkpoint, DataLoaders, Learner
from learnkit.core.errors import CheckpointError, EmptyLoaderError
from tests.helpers.resuming import scramble

N, BS, N_EPOCH = 64, 4, 3
N_BATCHES = N // BS
PLACES = (5, 21, 32)  # numbers of batches, over all epochs, after which a run is killed

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

    def __init__(self, ids: list[list[int]], kill: Callable[[int], None]) -> None:
        self._ids, self._kill = ids, kill

    def before_batch(self) -> None:
        if not self.learn.training:
            return
        self._kill(len(self._ids))
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


def make_learner(dl: Any, folder: Path, every: str, cbs: list[Any]) -> Learner:
    "Return a Learner with dropout and Adam, whose weights are the same in each process."
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    return Learner(
        DataLoaders(dl, [batch_of([0, 1])]),
        model,
        nn.MSELoss(),
        opt_func=torch.optim.Adam,
        lr=0.01,
        cbs=[Checkpoint(every, folder, preemption=False, background=False), *cbs],
    )


def live(
    run: Run,
    make: Callable[[], Any],  # makes the training loader
    folder: Path,
    seed: int,
    kill: Callable[
        [int], None
    ],  # f(n): called before each batch with the number of batches trained on
    cbs: Sequence[Callback] = (),
    every: str = '1ba',  # when a checkpoint is taken
) -> None:
    "Train or resume in new objects, with other states of the generators in each life."
    scramble(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', "'set_vital' is deprecated")  # torchdata's own affair
        dl = make()
    learn = make_learner(dl, folder, every, [Watch(run.ids, kill), *cbs])
    scramble(50 + seed)
    with warnings.catch_warnings(record=True) as caught, learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        try:
            learn.fit(N_EPOCH, resume=True)
        except Killed:
            pass
        except (CheckpointError, EmptyLoaderError) as e:
            run.error = str(e)
    run.warnings += [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    run.weights = [t for p in learn.model.parameters() for t in p.flatten().tolist()]
    run.history = [[row[k] for k in row if k != 'time'] for row in learn.history]


def train(make: Callable[[], Any], folder: Path, kills: tuple[int, ...] = ()) -> Run:
    "Train three epochs, killed before some batches and resumed each time."
    run = Run()
    for life, n in enumerate((*kills, None)):

        def kill(n_drawn: int, n: int | None = n) -> None:
            if n_drawn == n:
                raise Killed

        # of most lives, the only checkpoint is the one before the kill
        live(run, make, folder, life, kill, every=f'{n or N_BATCHES}ba')
        if run.error:
            break
    return run


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


class SeedingIterator(Iterator[Any]):
    "Iterator of `Starting`."

    def __init__(self, dl: Seeding) -> None:
        self.dl = dl
        self.order: list[int] = []

    def __next__(self) -> Any:
        dl = self.dl
        if not self.order:
            dl.epoch += dl.i == 0
            torch.empty((), dtype=torch.int64).random_()
            self.order = order_of(dl.epoch)
        if dl.i == N_BATCHES:
            dl.i = 0
            raise StopIteration
        dl.i += 1
        return dl.collate(self.order[(dl.i - 1) * BS : dl.i * BS])


class Starting(Seeding):
    "Its iterator, which is no generator, starts a pass with the first batch."

    def __iter__(self) -> Iterator[Any]:
        return SeedingIterator(self)


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


class Mixture(IterableDataset[Any]):
    "Mixes two sources by torch's global generator, and ends with the first that has ended."

    def __iter__(self) -> Iterator[Any]:
        sources = [iter(range(0, N, 2)), iter(range(1, N, 2))]
        while (i := next(sources[int(torch.rand(()) < 0.5)], None)) is not None:
            yield X[i], torch.tensor([float(i)])


class Ending(IterableDataset[Any]):
    "Has as many samples as torch's global generator decides."

    def __iter__(self) -> Iterator[Any]:
        for i in range(N):
            if i >= 12 and torch.rand(()) < 0.1:
                return
            yield X[i], torch.tensor([float(i)])


class ByEpoch(IterableDataset[Any]):
    "Shuffles by the epoch that the training sets; its state is loaded in the epoch that saved it only."

    def __init__(self) -> None:
        self.epoch, self.i = 0, 0
        self.loaded: dict[str, int] = {}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        is_rest = self.loaded.get('epoch') == self.epoch
        for i in range(self.loaded['i'] if is_rest else 0, N):
            self.i = i + 1
            k = order_of(self.epoch)[i]
            yield X[k], torch.tensor([float(k)])

    def state_dict(self) -> dict[str, int]:
        return {'epoch': self.epoch, 'i': self.i}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = dict(state)


class Sticky(ByEpoch):
    "Begins each pass after a load at the loaded position."

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = dict(state)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.loaded = {**self.loaded, 'epoch': epoch} if self.loaded else {}


class Prefetching(Seeding):
    "Makes its batches in a thread, three ahead."

    def __iter__(self) -> Iterator[Any]:
        if self.i == 0:
            self.epoch += 1
        torch.empty((), dtype=torch.int64).random_()
        order, first = order_of(self.epoch), self.i
        made: Queue[Any] = Queue(3)

        def work() -> None:
            for i in range(first, N_BATCHES):
                made.put(self.collate(order[i * BS : (i + 1) * BS]))
            made.put(None)

        Thread(target=work, daemon=True).start()
        while (batch := made.get()) is not None:
            self.i += 1
            yield batch
        self.i = 0


class SharedMemory(Seeding):
    "Gives views of two slots in shared memory, which it fills in turn."

    def __init__(self) -> None:
        super().__init__()
        self.slots = torch.zeros(2, BS, 7).share_memory_()

    def collate(self, ids: list[int]) -> Any:
        slot = self.slots[self.i % 2]
        slot[:, :6], slot[:, 6] = X[ids], torch.tensor(ids, dtype=torch.float32)
        return slot[:, :6], slot[:, 6:]


class Weighted(Seeding):
    "Mixes two sources by weight with its own generator; its state is the generator and both positions."

    def __init__(self) -> None:
        super().__init__()
        self.rng, self.at = np.random.default_rng(1), [0, 0]

    def __iter__(self) -> Iterator[Any]:
        torch.empty((), dtype=torch.int64).random_()
        while self.i < N_BATCHES:
            self.i += 1
            yield batch_of([self.draw() for _ in range(BS)])
        self.i = 0

    def draw(self) -> int:
        source = int(self.rng.random() < 0.3)
        self.at[source] += 1
        return (2 * self.at[source] + source) % N

    def state_dict(self) -> dict[str, Any]:
        return {'i': self.i, 'at': list(self.at), 'rng': self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.i, self.at = state['i'], list(state['at'])
        self.rng.bit_generator.state = state['rng']


class Ordered(Dataset[Any]):
    "Samples of fixed inputs, with noise from a global generator of the process that fetches them."

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return X[i] + 0.1 * torch.rand(6), torch.tensor([float(i)])


class SeededWhenMade(Sampler[int]):
    "Shuffles by its epoch, and by a seed that it draws when it is made, as accelerate's seedable sampler."

    def __init__(self) -> None:
        self.initial_seed, self.epoch = int(torch.randint(100, ())), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from order_of(self.epoch, self.initial_seed)
        self.epoch += 1


class Adapter:
    "Takes the class of the loader that it wraps, and reads its state when it is made, as accelerate's wrapper."

    def __init__(self, inner: Any) -> None:
        self.base_dataloader = inner
        self.state = inner.state_dict() if hasattr(inner, 'state_dict') else None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.base_dataloader)

    def __getattr__(self, name: str) -> Any:
        if name == 'base_dataloader':
            raise AttributeError
        return getattr(self.base_dataloader, name)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[Any]:
        yield from self.base_dataloader

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.base_dataloader.load_state_dict(state)


class Plain(Ordered):
    "Samples without noise."

    def __getitem__(self, i: int) -> Any:
        return X[i], torch.tensor([float(i)])


class Endless(Sampler[list[int]]):
    "A batch sampler whose `__len__` raises."

    def __init__(self, error: type[Exception]) -> None:
        self.error, self.n_passes = error, 0

    def __iter__(self) -> Iterator[list[int]]:
        self.n_passes += 1
        order = order_of(self.n_passes)
        return iter([order[i * BS : (i + 1) * BS] for i in range(N_BATCHES)])

    def __len__(self) -> int:
        raise self.error('not known yet')


class Counting(Iterator[Any]):
    "Iterator of batches whose `__len__` raises, as Lightning's `CombinedLoader`."

    def __init__(self, error: type[Exception]) -> None:
        self.error, self.i = error, 0

    def __iter__(self) -> Counting:
        self.i = 0
        return self

    def __next__(self) -> Any:
        if self.i == N_BATCHES:
            raise StopIteration
        self.i += 1
        return batch_of(list(range(BS * self.i - BS, BS * self.i)))

    def __len__(self) -> int:
        raise self.error('not known yet')


class Wrapping:
    "Gives the batches of another loader."

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner
