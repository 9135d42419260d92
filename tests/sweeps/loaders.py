"""Table of training loaders: torch's, and loaders of a few lines without any library; `libraries.py` has the others.

A function makes a new loader of 16 batches of 4 samples, 64 samples an epoch. Each sample has its `id` and the values
`x` that belong to it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from tests.sweeps.verdicts import Subject

N_BATCH, BS = 16, 4
N = N_BATCH * BS
FETCHED = 'LEARNKIT_SWEEP_FETCHED'  # environment variable: file with a byte for each fetched sample
IDS = list(range(N))

Read = Callable[[Any], tuple[Tensor, Tensor]]
Sample = dict[str, Any]


def read_dict(batch: Any) -> tuple[Tensor, Tensor]:
    "Return ids and values of a batch that is a dict."
    return torch.as_tensor(batch['id']).reshape(-1), torch.as_tensor(batch['x'])


def read_tuple(batch: Any) -> tuple[Tensor, Tensor]:
    "Return ids and values of a batch that is a pair."
    ids, x = batch
    return torch.as_tensor(ids).reshape(-1), torch.as_tensor(x)


@dataclass(frozen=True)
class Reading:
    "How the sweep reads a loader."

    read: Read = read_dict  # returns ids and values of a batch
    n_iter: int | None = None  # batches of an epoch, for a stream


LOADERS: list[Subject] = []


def loader(
    library: str, title: str, read: Read = read_dict, n_iter: int | None = None
) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    "Add a function `f(folder) -> loader` to the table; the folder keeps files of the data over all runs."

    def add(build: Callable[[Path], Any]) -> Callable[[Path], Any]:
        LOADERS.append(Subject(library, title, build, Reading(read, n_iter)))
        return build

    return add


def load_loaders() -> list[Subject]:
    "Return all loaders of the table."
    import_module('tests.sweeps.libraries')
    return LOADERS


# -- samples ---------------------------------------------------------------------------------------


def note_fetch(sample: Any = None) -> Any:
    "Record that a sample is fetched, in whichever process, and return the sample."
    with open(os.environ[FETCHED], 'ab') as file:
        file.write(b'.')
    return sample


def values_of(i: int) -> np.ndarray[Any, Any]:
    "Return the four values of sample `i`."
    return np.cos((int(i) + 1) * np.arange(1, 5)).astype(np.float32)


def make_record(i: int) -> Sample:
    "Return sample `i` for a file, or for a library's own batches."
    return {'id': int(i), 'x': values_of(i)}


def fetch(i: int) -> Sample:
    "Return sample `i`, and record that it was fetched."
    note_fetch()
    return make_record(i)


class Samples(Dataset[Sample]):
    "All samples, by index."

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Sample:
        return fetch(i)


class NoisySamples(Samples):
    "Samples with noise from the three global generators."

    def __getitem__(self, i: int) -> Sample:
        sample = fetch(i)
        noise = torch.randn(4).numpy() + random.random() + np.random.rand()
        return {**sample, 'x': (sample['x'] + noise).astype(np.float32)}


class SampleStream(IterableDataset[Sample]):
    "All samples in order, split among workers."

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from map(fetch, IDS[first::step])


class ShuffledStream(IterableDataset[Sample]):
    "All samples, in an order that depends on the epoch number which `set_epoch` sets."

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        yield from map(fetch, shuffled(self.epoch))


class ResumableStream(SampleStream):
    "A stream with the methods that StatefulDataLoader asks for."

    def __init__(self) -> None:
        self.n = 0

    def __iter__(self) -> Iterator[Sample]:
        for i in IDS[self.n :]:
            self.n += 1
            yield fetch(i)
        self.n = 0

    def state_dict(self) -> dict[str, int]:
        return {'n': self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state['n']


def shuffled(seed: int) -> list[int]:
    ids = list(IDS)
    random.Random(seed).shuffle(ids)
    return ids


def stack(samples: Any) -> dict[str, Tensor]:
    "Return samples as a batch."
    x = np.stack([np.asarray(sample['x'], np.float32) for sample in samples])
    return {
        'id': torch.tensor([int(sample['id']) for sample in samples]),
        'x': torch.from_numpy(x),
    }


def batch_of(ids: Any) -> dict[str, Tensor]:
    return stack([fetch(i) for i in ids])


# -- loaders of a few lines ------------------------------------------------------------------------


class Batches:
    "An iterable with a length: batches in an order that depends on the number of the pass."

    def __init__(self) -> None:
        self.n_passes = 0

    def __len__(self) -> int:
        return N_BATCH

    def draw(self, ids: list[int], first: int = 0) -> Iterator[dict[str, Tensor]]:
        for i in range(first, N_BATCH):
            yield batch_of(ids[i * BS : (i + 1) * BS])

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.n_passes += 1
        return self.draw(shuffled(self.n_passes))


class Stateful(Batches):
    "A loader with a state whose `__iter__` is a generator, which draws a seed for workers when it starts."

    def __init__(self) -> None:
        self.epoch = self.n_batches = 0

    def state_dict(self) -> dict[str, int]:
        return {'epoch': self.epoch, 'n_batches': self.n_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.n_batches = state['epoch'], state['n_batches']

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        torch.empty((), dtype=torch.int64).random_()  # as torch's DataLoader for its workers
        for batch in self.draw(shuffled(self.epoch), self.n_batches):
            self.n_batches += 1
            yield batch
        self.epoch += 1
        self.n_batches = 0


class EndsEarly(Stateful):
    "A loader whose state after the last batch is that of the next epoch's start."

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self.draw(shuffled(self.epoch), self.n_batches):
            self.n_batches += 1
            if self.n_batches == N_BATCH:
                self.epoch += 1
                self.n_batches = 0
            yield batch


class StaysLoaded(Stateful):
    "A loader of which each pass begins where the state that was loaded last has it."

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        first = self.n_batches
        for i, batch in enumerate(self.draw(IDS, first), first):
            self.n_batches = i + 1
            yield batch
        self.n_batches = first


class StateRaises(Batches):
    "A loader whose `state_dict` raises."

    def state_dict(self) -> dict[str, int]:
        raise RuntimeError('The state is not known.')

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise RuntimeError('The state is not known.')


class LengthRaises(Batches):
    "A loader whose length is not known before it is iterated."

    def __len__(self) -> int:
        raise RuntimeError('The length is not known yet.')


class Unseeded(Batches):
    "A loader that shuffles by the entropy of the operating system."

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.draw(random.SystemRandom().sample(IDS, N))


class SeededBySelf(Batches):
    "A loader whose order comes from a generator that lives in a closure."

    def __init__(self) -> None:
        draw = random.Random(7).sample
        self.draw_order = lambda: draw(IDS, N)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.draw(self.draw_order())


class Threaded(Batches):
    "A loader that fetches batches ahead in a thread."

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        queue: Queue[Any] = Queue(2)
        self.n_passes += 1
        ids = shuffled(self.n_passes)

        def fill() -> None:
            for batch in self.draw(ids):
                queue.put(batch)
            queue.put(None)

        Thread(target=fill, daemon=True).start()
        return iter(queue.get, None)


class Mixture(Batches):
    "A loader that draws each sample from one of two sources, by a generator in an attribute."

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)
        self.heads = [0, N // 2]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for _ in range(N_BATCH):
            ids = []
            for source in self.rng.choice(2, BS, p=[0.8, 0.2]):
                ids.append(int(source) * N // 2 + self.heads[source] % (N // 2))
                self.heads[source] += 1
            yield batch_of(ids)


class SharedMemory(Batches):
    "A loader that gives every batch in the same memory."

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.n_passes += 1
        memory = torch.zeros(BS, 4).share_memory_()
        for batch in self.draw(shuffled(self.n_passes)):
            yield {'id': batch['id'], 'x': memory.copy_(batch['x'])}


def add_own(title: str, cls: type[Batches]) -> None:
    loader('', title)(lambda folder: cls())


add_own('an iterable that counts its passes', Batches)
add_own('a state, and an `__iter__` that is a generator', Stateful)
add_own('a state that means the next epoch after the last batch', EndsEarly)
add_own('a state at which each later pass begins as well', StaysLoaded)
add_own('`state_dict()` raises', StateRaises)
add_own('`len()` raises', LengthRaises)
add_own('batches fetched ahead by a thread', Threaded)
add_own('each batch in the same memory', SharedMemory)
add_own('a mixture that counts in a list', Mixture)
add_own('an order from a generator in a closure', SeededBySelf)
add_own('an order without a seed', Unseeded)


@loader('', 'an endless iterator', n_iter=N_BATCH)
def build_endless(folder: Path) -> Any:
    return (batch_of(shuffled(i)[:BS]) for i in range(10**6))


@loader('', 'a list of batches')
def build_list(folder: Path) -> Any:
    return [stack([make_record(k) for k in IDS[i : i + BS]]) for i in range(0, N, BS)]


# -- torch -----------------------------------------------------------------------------------------


@loader('torch', 'DataLoader, shuffled')
def build_shuffled(folder: Path) -> Any:
    return DataLoader(Samples(), BS, shuffle=True)


@loader('torch', 'DataLoader, augmented')
def build_augmented(folder: Path) -> Any:
    return DataLoader(NoisySamples(), BS, shuffle=True)


@loader('torch', 'DataLoader, augmented in 2 workers')
def build_augmented_in_workers(folder: Path) -> Any:
    return DataLoader(NoisySamples(), BS, shuffle=True, num_workers=2)


@loader('torch', 'DataLoader, persistent workers')
def build_persistent(folder: Path) -> Any:
    return DataLoader(Samples(), BS, shuffle=True, num_workers=2, persistent_workers=True)


@loader('torch', 'DataLoader, augmented in persistent workers')
def build_augmented_in_persistent(folder: Path) -> Any:
    return DataLoader(NoisySamples(), BS, shuffle=True, num_workers=2, persistent_workers=True)


@loader('torch', 'WeightedRandomSampler')
def build_weighted(folder: Path) -> Any:
    return DataLoader(Samples(), BS, sampler=WeightedRandomSampler([1.0 + i % 3 for i in IDS], N))


@loader('torch', 'IterableDataset')
def build_stream(folder: Path) -> Any:
    return DataLoader(SampleStream(), BS)


@loader('torch', 'IterableDataset, 2 workers')
def build_stream_in_workers(folder: Path) -> Any:
    return DataLoader(SampleStream(), BS, num_workers=2)


@loader('torch', 'IterableDataset with `set_epoch`')
def build_stream_of_epochs(folder: Path) -> Any:
    return DataLoader(ShuffledStream(), BS)


@loader('torch', 'IterableDataset with `set_epoch`, as an endless stream', n_iter=N_BATCH)
def build_endless_stream(folder: Path) -> Any:
    return DataLoader(ShuffledStream(), BS)
