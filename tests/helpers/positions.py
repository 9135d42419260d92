"""Loaders of every kind, and comparisons of an uninterrupted pass with a pass resumed in a new loader."""

import io
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from learnkit.core.random import capture_own, capture_rng, restore_rng
from learnkit.data.position import LoaderPosition

N, BS = 22, 4  # six batches an epoch, the last of two samples
END = object()


class Items(Dataset[Any]):
    "Samples of their index and a random number from the generator `noise`."

    def __init__(self, noise: str = '', seed: int = 0, n: int = N) -> None:
        self.n, self.transform = n, Noise(noise, seed)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor([i, self.transform()], dtype=torch.float64)


class Noise:
    def __init__(self, noise: str, seed: int) -> None:
        self.noise = noise
        if noise == 'own':
            self.rng = np.random.default_rng(seed)
        if noise == 'own python':
            self.rng: Any = random.Random(seed)

    def __call__(self) -> float:
        draw: dict[str, Callable[[], Any]] = {
            '': float,
            'torch': lambda: torch.rand(1).item(),
            'python': random.random,
            'numpy': np.random.rand,
        }
        return float(draw[self.noise]() if self.noise in draw else self.rng.random())


class OwnSeed(Sampler[int]):
    "Draws each epoch's order from its own generator, index by index."

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return (int(self.rng.integers(N)) for _ in range(N))


class Eager(Sampler[list[int]]):
    "A batch sampler that draws when iteration begins, not when the first batch is drawn."

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        return iter([c.tolist() for c in torch.randperm(N).split(BS)])


class IndexByIndex(Sampler[int]):
    "Keeps drawing from Python's global generator during a pass."

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(N) for _ in range(N))


class EpochCountSampler(Sampler[int]):
    "Draws the order of each epoch from a count of epochs."

    epoch = 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        yield from torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class SetEpochSampler(Sampler[int]):
    "Like `EpochCountSampler`, with `set_epoch`, which it calls itself."

    def __init__(self, seed: int) -> None:
        self._epoch = 0

    def __len__(self) -> int:
        return N

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    @property
    def epoch(self) -> int:
        return self._epoch

    def __iter__(self) -> Iterator[int]:
        self.set_epoch(self.epoch + 1)
        return iter(torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Stream(IterableDataset[Any]):
    "Yields its worker's shard from a shuffle buffer with its own generator or a global one."

    def __init__(self, seed: int, own: bool = True) -> None:
        self.rng: Any = random.Random(seed) if own else random

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        left = list(
            range(
                0 if worker is None else worker.id, N, 1 if worker is None else worker.num_workers
            )
        )
        while left:
            yield torch.tensor([left.pop(self.rng.randrange(len(left))), self.rng.random()])


def draw_from_global_generators() -> None:
    "Draw from every global generator, as dropout and callbacks do."
    torch.rand(3)
    np.random.rand()
    random.random()


def digest_generators(dl: Any) -> int:
    "Return a digest of every generator, including the loader's."

    def frozen(v: Any) -> Any:
        if isinstance(v, Tensor):
            return v.numpy().tobytes()
        if isinstance(v, dict):
            return tuple((k, frozen(x)) for k, x in v.items())
        return tuple(map(frozen, v)) if isinstance(v, tuple) and len(v) < 9 else v

    return hash(frozen((capture_rng(), capture_own(dl))))


def save_position(drawing: LoaderPosition, n: int) -> bytes:
    "Return a checkpoint of the position and the global generators as bytes."
    file = io.BytesIO()
    torch.save({'position': drawing.state_dict(n), 'rng': capture_rng()}, file)
    return file.getvalue()


def draw_epoch(
    drawing: LoaderPosition, n: int = 0, begun: bool = False, keep: bool = True
) -> tuple[list[Any], dict[int, bytes]]:
    "Draw an epoch from batch `n` on; return batches with generator digests, and a checkpoint of each."
    if not begun:
        draw_from_global_generators()
    batches, seen, checkpoints = drawing.begin(), [], {}
    if not begun and keep:
        checkpoints[0] = save_position(drawing, 0)
    while (batch := next(batches, END)) is not END:
        n += 1
        draw_from_global_generators()
        seen.append((n, batch.tolist(), digest_generators(drawing.dl)))
        if keep:
            checkpoints[n] = save_position(drawing, n)
    return [*seen, digest_generators(drawing.dl)], checkpoints


def resume_passes(
    make: Callable[[int], Any], checkpoint: bytes, epochs: int = 2, keep: bool = True
) -> tuple[list[list[Any]], list[dict[int, bytes]]]:
    "Resume from a checkpoint in a new loader with other global seeds; return the same as `run_without_stop`."
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    dl = make(7)
    state = torch.load(io.BytesIO(checkpoint), weights_only=True)
    restore_rng(state['rng'])
    drawing, n = LoaderPosition.resume(dl, state['position']), state['position']['n']
    seen, kept = draw_epoch(drawing, n, begun=state['position']['start'] is not None, keep=keep)
    passes, checkpoints = [seen], [kept]
    for _ in range(epochs - 1):
        seen, kept = draw_epoch(LoaderPosition(dl), keep=keep)
        passes.append(seen)
        checkpoints.append(kept)
    return passes, checkpoints


def passes_after_resume(
    make: Callable[[int], Any], checkpoint: bytes, epochs: int = 2
) -> list[Any]:
    "Return the batches of each epoch after a resume from a checkpoint."
    return resume_passes(make, checkpoint, epochs, keep=False)[0]


def run_without_stop(
    make: Callable[[int], Any], epochs: int = 2
) -> tuple[list[list[Any]], list[dict[Any, bytes]]]:
    "Draw epochs; return their batches, and their checkpoints by batch, the last one as 'end'."
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    dl, passes, checkpoints = make(1), [], []
    for _ in range(epochs):
        seen, kept = draw_epoch(LoaderPosition(dl))
        passes.append(seen)
        checkpoints.append({**kept, 'end': save_position(LoaderPosition(dl), 0)})
    return passes, checkpoints


def check(make: Callable[[int], Any], places: list[Any], epochs: int = 2) -> None:
    "Compare the rest of the first epoch and all of the next ones bit for bit; 'end' compares the next only."
    passes, checkpoints = run_without_stop(make, epochs)
    assert len(passes[0]) > 3
    for place in places:
        if place == 'last':
            place = len(passes[0]) - 1
        rest = passes[1:] if place == 'end' else [list(islice(passes[0], place, None)), *passes[1:]]
        assert passes_after_resume(make, checkpoints[0][place], len(rest)) == rest, place


def loader(noise: str = '', workers: int = 0, **options: Any) -> Callable[[int], Any]:
    "Return a function that creates a DataLoader; callable options are called with the seed."

    def make(seed: int) -> DataLoader[Any]:
        made = {k: v(seed) if callable(v) else v for k, v in options.items()}
        sizes = {} if 'batch_sampler' in made else {'batch_size': BS}
        return DataLoader(Items(noise, seed), num_workers=workers, **{**sizes, **made})

    return make


def seeded_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
