"""Loaders of every kind and all their shards in one process, for tests of shards."""

import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, WeightedRandomSampler

from learnkit import TensorLoader
from learnkit.core.random import capture_rng, restore_rng
from learnkit.distributed.shards import shard
from tests.helpers.positions import Items, seeded_generator
from tests.helpers.resuming import scramble

Make = Callable[..., Any]  # f(seed, n=, bs=, **options) returns a loader


def ids(batch: Any) -> list[int]:
    "Return the numbers of a batch's samples."
    t = (
        batch
        if isinstance(batch, Tensor)
        else batch[0]
        if isinstance(batch, (tuple, list))
        else batch['x']
    )
    return [int(i) for i in (t[:, 0] if t.ndim > 1 else t)]


def tensors(_: int, n: int = 22, bs: int = 4, **options: Any) -> TensorLoader:
    return TensorLoader(torch.arange(n), torch.arange(n) * 2, bs=bs, **options)


def items(s: int, n: int = 22, bs: int = 4, **options: Any) -> DataLoader[Any]:
    made = {k: v(s, n) if callable(v) else v for k, v in options.items()}
    return DataLoader(Items(n=n), **({} if 'batch_sampler' in made else {'batch_size': bs}), **made)


def batch_list(_: int, n: int = 22, bs: int = 4, **options: Any) -> list[Any]:
    return [(t, 2 * t) for t in torch.arange(n).split(bs)]


class Loader:
    "A loader that is not torch's; it draws its order lazily from a generator that others may also use."

    def __init__(self, n: int, bs: int, rng: Any = random) -> None:
        self.n, self.bs, self.rng = n, bs, rng

    def __len__(self) -> int:
        return -(-self.n // self.bs)

    def __iter__(self) -> Iterator[Any]:
        left = list(range(self.n))
        while left:
            yield torch.tensor(
                [left.pop(self.rng.randrange(len(left))) for _ in range(min(self.bs, len(left)))]
            )


def own_loader(_: int, n: int = 22, bs: int = 4, **options: Any) -> Loader:
    return Loader(n, bs)


class Together:
    "All shards of a loader with separate generators, as in processes, iterated in turn."

    def __init__(
        self, make: Make, size: int, seed: int = 1, wholes: list[Any] | None = None, **options: Any
    ) -> None:
        scramble(seed)
        self.rngs = [capture_rng()]
        wholes = wholes or [make(seed)]
        self.rngs[0] = capture_rng()
        for rank in range(1, size):
            scramble(100 + rank)
            if len(wholes) < size:
                wholes.append(make(100 + rank))
            self.rngs.append(capture_rng())
        self.wholes = wholes
        self.shards = [shard(whole, rank, size, **options) for rank, whole in enumerate(wholes)]

    def each(self, f: Callable[[int, Any], Any]) -> list[Any]:
        results = []
        for rank, dl in enumerate(self.shards):
            restore_rng(self.rngs[rank])
            results.append(f(rank, dl))
            self.rngs[rank] = capture_rng()
        return results

    def take_order(self) -> None:
        restore_rng(self.rngs[0])
        state = self.shards[0].order_state()
        self.each(lambda _, dl: dl.take_order(state))

    def epoch(self) -> list[list[Any]]:
        "Return the batches of an epoch for each process."
        self.take_order()
        return self.each(lambda _, dl: [ids(b) for b in dl])


def rounds_of(together: Together, parts: list[list[Any]], sized: bool = True) -> list[list[int]]:
    "Join the parts of each round without fillers, and compare their sizes with `share`."
    rounds = []
    assert len({len(p) for p in parts}) == 1
    for i in range(len(parts[0])):
        shares = [dl.share(i) for dl in together.shards]
        assert {total for _, total in shares} == {sum(k for k, _ in shares)}
        for part, (k, _) in zip(parts, shares, strict=True):
            assert len(part[i]) == k or k == 0
        rounds.append(
            list(chain.from_iterable(p[i] for p, (k, _) in zip(parts, shares, strict=True) if k))
        )
    if sized:
        assert [len(dl) for dl in together.shards] == [len(rounds)] * len(parts)
    return rounds


def make_by_kind(kind: str) -> Callable[..., Make]:
    "Return a function of the batch size that returns a function of the seed that creates a loader."
    makers: dict[str, tuple[Make, dict[str, Any]]] = {
        'tensors': (tensors, {}),
        'tensors shuffled': (tensors, {'shuffle': True}),
        'tensors, seed': (tensors, {'shuffle': True, 'seed': 3}),
        'tensors, global': (tensors, {'shuffle': True, 'generator': torch.default_generator}),
        'items': (items, {}),
        'items shuffled': (items, {'shuffle': True}),
        'items, generator': (
            items,
            {'shuffle': True, 'generator': lambda seed, n: seeded_generator(seed)},
        ),
        'items, global': (
            items,
            {'shuffle': True, 'generator': lambda seed, n: torch.default_generator},
        ),
        'weighted': (
            items,
            {'sampler': lambda seed, n: WeightedRandomSampler(torch.arange(1.0, n + 1), n)},
        ),
    }
    make, options = makers[kind]
    return lambda bs, **more: lambda s, **m: make(s, bs=bs, **options, **more, **m)


def alone(make: Make, epochs: int = 2, seed: int = 1) -> tuple[list[list[Any]], Any]:
    "Return the batches of one process, and the global generators after them."
    scramble(seed)
    dl = make(seed)
    return [[ids(b) for b in dl] for _ in range(epochs)], capture_rng()
