"""Random generators are restored exactly, and a captured state can be saved and loaded safely."""

import io
import pickle
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from learnkit.core.random import (
    capture_own,
    capture_rng,
    own_generators,
    preserved_rng,
    restore_own,
    restore_rng,
    state_setter,
)


def draw() -> tuple[Any, ...]:
    "Draw from every global generator, an odd number of times if it caches a second normal number."
    return (
        random.random(),
        random.gauss(0, 1),
        random.randrange(10**9),
        np.random.rand(),
        np.random.randn(),
        np.random.randint(10**9),
        torch.rand(3).tolist(),
        torch.randn(2).tolist(),
    )


def test_restores_every_generator_exactly() -> None:
    state = capture_rng()
    first = [draw() for _ in range(5)]
    assert first[0] != first[1]
    restore_rng(state)
    assert [draw() for _ in range(5)] == first
    restore_rng(state)  # a state is not used up
    assert [draw() for _ in range(5)] == first


def test_survives_a_safe_load() -> None:
    draw()
    file = io.BytesIO()
    torch.save(capture_rng(), file)
    expected = draw()
    file.seek(0)
    restore_rng(torch.load(file, weights_only=True))
    assert draw() == expected


def test_preserved_also_when_the_block_raises() -> None:
    state = capture_rng()
    expected = draw()
    restore_rng(state)
    with pytest.raises(KeyError), preserved_rng():
        draw()
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        raise KeyError
    assert draw() == expected


@pytest.mark.cuda
def test_restores_cuda_devices() -> None:
    torch.rand(1, device='cuda')
    state = capture_rng()
    expected = torch.rand(3, device='cuda')
    assert len(state['devices']['cuda']) == torch.cuda.device_count()
    restore_rng(state)
    assert torch.equal(torch.rand(3, device='cuda'), expected)


# ----------------------------------------------------------------------- the generators of a loader


class Augment:
    def __init__(self) -> None:
        self.rng, self.amount = np.random.default_rng(5), 0.1

    def shift(self, x: Any) -> Any:
        return x


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transforms = [Augment(), {'flip': random.Random(6)}]
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2))


class Samples:
    def __init__(self) -> None:
        self.rows, self.transform = list(range(1000)), Module()
        self.legacy = np.random.RandomState(7)
        self._private = torch.Generator()
        self.system = random.SystemRandom()
        self.me, self.kind = self, Augment

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> int:
        return i


def many_generators() -> Any:
    shared = torch.Generator().manual_seed(1)
    samples = torch.utils.data.Subset(Samples(), range(100))
    collate = partial(torch.utils.data.default_collate, collate_fn_map=None)
    return torch.utils.data.DataLoader(
        samples,
        4,
        shuffle=True,
        generator=shared,
        collate_fn=collate,
        worker_init_fn=Augment().shift,
    )


PATHS = {
    'generator',
    'worker_init_fn.__self__.rng',
    'dataset.dataset.legacy',
    'dataset.dataset._private',
    'dataset.dataset.transform.transforms[0].rng',
    "dataset.dataset.transform.transforms[1]['flip']",
}


def test_the_generators_of_a_loader_by_their_place_each_once() -> None:
    dl = many_generators()
    assert set(own_generators(dl)) == PATHS
    assert own_generators([1]) == own_generators(iter([1])) == {}


def draw_own(dl: Any) -> list[float]:
    return [
        float(torch.rand(1, generator=g)) if isinstance(g, torch.Generator) else g.random()
        for g in own_generators(dl).values()
    ]


def test_own_generators_are_restored_exactly_after_a_safe_load() -> None:
    dl, file = many_generators(), io.BytesIO()
    draw_own(dl)
    torch.save(capture_own(dl), file)
    expected = draw_own(dl)
    file.seek(0)
    anew = many_generators()
    assert restore_own(anew, torch.load(file, weights_only=True)) == []
    assert draw_own(anew) == expected


@pytest.mark.parametrize('bits', ['PCG64', 'MT19937'])
def test_every_bit_generator_of_numpy(bits: str) -> None:
    file = io.BytesIO()
    owner = Augment()
    owner.rng = np.random.Generator(getattr(np.random, bits)(3))
    owner.rng.integers(5, dtype=np.int32)  # keeps half of what was drawn
    torch.save(capture_own(owner), file)
    expected = owner.rng.random(3).tolist()
    file.seek(0)
    assert restore_own(owner, torch.load(file, weights_only=True)) == []
    assert owner.rng.random(3).tolist() == expected


def test_a_bit_generator_is_found_and_the_systems_generator_is_not() -> None:
    owner = Augment()
    owner.bits, owner.system = np.random.PCG64(3), random.SystemRandom()
    states = capture_own(owner)
    expected = owner.bits.random_raw()
    assert set(states) == {'rng', 'bits'}
    assert restore_own(owner, states) == [] and owner.bits.random_raw() == expected
    assert state_setter(owner.system) is None


def test_own_generators_that_are_not_there_or_of_another_kind_are_named() -> None:
    owner = Augment()
    states = capture_own(owner)
    owner.rng = random.Random(0)  # type: ignore[assignment]  # another kind
    assert restore_own(owner, states) == ['rng'] == restore_own([], states)


class Node:
    def __init__(self, *parts: Any) -> None:
        self.parts, self.named, self.size = list(parts), dict(enumerate(parts)), 3


class Collecting(pickle.Pickler):
    "Collects the generators that pickle reaches."

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: set[int] = set()

    def persistent_id(self, o: Any) -> Any:
        if isinstance(o, (torch.Generator, np.random.Generator, random.Random)):
            self.found.add(id(o))
            return 'generator'
        return None


def grow(rng: random.Random, depth: int) -> Any:
    "Return a deep random structure of lists, tuples, dicts and objects, some of them large."
    makers = (lambda: 3, torch.Generator, lambda: np.random.default_rng(0), random.Random)
    parts = [rng.choice(makers)() for _ in range(rng.choice([0, 1, 3, 40]))]
    if depth:
        parts.append(grow(rng, depth - 1))
    return rng.choice([list, tuple, lambda p: dict(enumerate(p)), lambda p: Node(*p)])(parts)


@pytest.mark.parametrize('seed', range(5))
def test_every_generator_that_pickle_reaches_is_found(seed: int) -> None:
    root = Node(grow(random.Random(seed), 3 + seed))
    pickler = Collecting()
    pickler.dump(root)
    assert {id(g) for g in own_generators(root).values()} == pickler.found
