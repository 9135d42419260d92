"""Loader positions with tensors, lists, iterators, streams, persistent workers and loaders with state."""

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from learnkit import TensorLoader
from learnkit.core.errors import CheckpointError, OptionError
from learnkit.core.random import capture_rng, restore_rng
from learnkit.data.position import LoaderPosition
from tests.helpers.positions import (
    BS,
    Eager,
    IndexByIndex,
    Items,
    N,
    OwnSeed,
    SetEpochSampler,
    Stream,
    check,
    digest_generators,
    loader,
    passes_after_resume,
    resume_passes,
    run_without_stop,
    seeded_generator,
)

STOP_POINTS = [0, 1, 3, 'last', 'end']
ROWS = torch.arange(N)


class Column(TensorLoader):
    "Yields each batch as one tensor, which these tests compare."

    def from_batch(self, n: int) -> Iterator[Any]:
        return (b['x'] if self.names else b[0] for b in super().from_batch(n))


class Own(DataLoader[Any]):
    "A subclass of DataLoader with another `__iter__`."

    def __iter__(self) -> Any:
        return (2 * b for b in super().__iter__())


TENSORS: dict[str, Callable[[int], TensorLoader]] = {
    'in order': lambda seed: Column(ROWS, bs=BS),
    'shuffle': lambda seed: Column(ROWS, bs=BS, shuffle=True),
    'seed': lambda seed: Column(ROWS, bs=BS, shuffle=True, seed=seed),
    'names': lambda seed: Column({'x': ROWS}, bs=BS, shuffle=True),
    'global generator': lambda seed: Column(
        ROWS, bs=BS, shuffle=True, generator=torch.default_generator
    ),
}


@pytest.mark.parametrize('kind', TENSORS)
def test_tensor_loader(kind: str) -> None:
    check(TENSORS[kind], STOP_POINTS)


@pytest.mark.parametrize(
    'make', [loader('own', shuffle=True), lambda seed: Own(Items('own', seed), BS)]
)
def test_a_shared_generator_of_a_data_set_is_restored(make: Any) -> None:
    dl = make(1)
    drawing = LoaderPosition(dl)
    batches = drawing.begin()
    next(batches)
    dl.dataset.transform.rng.random()
    position, rng = drawing.state_dict(1), capture_rng()
    expected = [b.tolist() for b in batches]
    restore_rng(rng)
    assert [b.tolist() for b in LoaderPosition.resume(make(2), position).begin()] == expected


def test_an_iterator_resumes_after_all_epochs() -> None:
    def numbers() -> Iterator[Tensor]:
        return (torch.tensor(i) for i in range(100))

    dl, seen = numbers(), []
    first = LoaderPosition(dl)
    batches = first.begin()
    seen += [next(batches).item() for _ in range(10)]
    second = LoaderPosition(dl, n_before=10)
    batches = second.begin()
    position = second.state_dict(3)
    assert [next(batches).item() for _ in range(3)] == [10, 11, 12]
    assert next(LoaderPosition.resume(numbers(), position).begin()).item() == 13
    between = LoaderPosition(dl, n_before=13).state_dict(0)
    resumed = LoaderPosition.resume(numbers(), between)
    assert resumed.n_before == 13 and next(resumed.begin()).item() == 13


class Generating:
    "Draws its order and its samples from Python's and torch's global generators; has no length."

    def __iter__(self) -> Iterator[Tensor]:
        order = list(range(7))
        random.shuffle(order)
        for i in order:
            yield torch.tensor([i, torch.rand(1)])


@pytest.mark.parametrize(
    'make',
    [
        lambda seed: Generating(),
        lambda seed: Own(Items('torch'), BS, shuffle=True),
        lambda seed: Own(Items('own', seed), BS, shuffle=True, generator=seeded_generator(seed)),
        lambda seed: DataLoader(Stream(seed), BS),
    ],
)
def test_other_loaders_are_iterated_again(make: Callable[[int], Any]) -> None:
    check(make, STOP_POINTS)


@pytest.mark.parametrize(
    'make',
    [
        lambda seed: Own(Items('torch'), BS, shuffle=True, num_workers=2),
        lambda seed: DataLoader(Stream(seed), BS, num_workers=2),
        lambda seed: DataLoader(Stream(seed, own=False), BS, num_workers=2),
    ],
)
def test_other_loaders_with_workers(make: Callable[[int], Any]) -> None:
    check(make, [3], epochs=1)


def test_a_sampler_that_shares_a_global_generator_is_exact_in_this_process() -> None:
    check(loader(sampler=lambda seed: IndexByIndex()), STOP_POINTS)


@pytest.mark.parametrize(
    ('sampler', 'places'),
    [
        ({'shuffle': True}, [0, 3, 'end']),
        ({'sampler': OwnSeed}, [3]),
        ({'batch_sampler': lambda seed: Eager()}, [3]),
    ],
)
def test_persistent_workers(sampler: dict[str, Any], places: list[Any]) -> None:
    make = loader(workers=2, persistent_workers=True, generator=seeded_generator, **sampler)
    check(make, places, epochs=3)


def test_persistent_workers_with_random_samples() -> None:
    make = loader('torch', workers=2, persistent_workers=True, shuffle=True)
    passes, checkpoints = run_without_stop(make)
    assert passes_after_resume(make, checkpoints[0][3]) == [passes[0][3:], passes[1]]
    position = LoaderPosition(make(1))
    position.begin()
    (lost,) = position.describe_lost_state(3)
    assert 'persistent_workers=False' in lost


def test_persistent_workers_of_an_iterable_data_set() -> None:
    class Noise(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return (torch.randn(2) for _ in range(8))

    dl = DataLoader(Noise(), 2, num_workers=1, persistent_workers=True)
    position = LoaderPosition(dl)
    next(position.begin())
    (lost,) = position.describe_lost_state(1)
    assert 'persistent_workers=False' in lost


@pytest.mark.parametrize(
    ('before', 'after', 'options'),
    [
        (0, 2, {'shuffle': True, 'generator': seeded_generator}),
        (2, 0, {'sampler': OwnSeed}),
        (2, 1, {'shuffle': True, 'generator': seeded_generator}),
    ],
)
def test_another_number_of_workers(before: int, after: int, options: dict[str, Any]) -> None:
    passes, checkpoints = run_without_stop(loader(workers=before, **options), 1)
    with pytest.warns(UserWarning, match=f'num_workers={before}, now it is {after}'):
        got = passes_after_resume(loader(workers=after, **options), checkpoints[0][3], 1)
    assert [b[1] for b in got[0][:-1]] == [b[1] for b in passes[0][3:-1]]


@pytest.mark.parametrize(
    'make',
    [
        loader('own', shuffle=True),
        loader('torch', workers=2, shuffle=True),
        pytest.param(loader(workers=2, sampler=OwnSeed), marks=pytest.mark.full),
        TENSORS['seed'],
        lambda seed: Generating(),
    ],
)
def test_a_resumed_run_can_be_resumed(make: Callable[[int], Any]) -> None:
    passes, checkpoints = run_without_stop(make)
    _, later = resume_passes(make, checkpoints[0][2])
    assert passes_after_resume(make, later[0][4]) == [passes[0][4:], passes[1]]
    assert passes_after_resume(make, later[1][1], 1) == [passes[1][1:]]


# --------------------------------------------------------------------- loaders with their own state


def stateful(noise: str = '', workers: int = 0, **options: Any) -> Callable[[int], Any]:
    "Return a function that creates torchdata's loader."
    torchdata = pytest.importorskip('torchdata.stateful_dataloader')

    def make(seed: int) -> Any:
        made = {k: v(seed) if callable(v) else v for k, v in options.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', "'set_vital' is deprecated")  # its own affair
            return torchdata.StatefulDataLoader(Items(noise, seed), BS, num_workers=workers, **made)

    return make


@pytest.mark.parametrize(
    'options',
    [{}, {'shuffle': True}, {'shuffle': True, 'generator': seeded_generator}, {'sampler': OwnSeed}],
)
@pytest.mark.parametrize('noise', ['', 'torch', 'own'])
def test_stateful_dataloader(noise: str, options: dict[str, Any]) -> None:
    check(stateful(noise, **options), STOP_POINTS)


def test_stateful_dataloader_with_workers() -> None:
    check(stateful(workers=2, shuffle=True), ['last', 'end'])


def test_stateful_dataloader_with_persistent_workers() -> None:
    check(stateful(workers=2, shuffle=True, persistent_workers=True), [3, 'end'], epochs=3)


class ByEpoch(SetEpochSampler):
    "Shuffles by the epoch that its loader sets."

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch)).tolist())


@pytest.mark.parametrize('sampler', [lambda seed: RandomSampler(range(N)), OwnSeed, ByEpoch])
def test_a_loader_of_nodes_draws_each_order_once(sampler: Callable[[int], Any]) -> None:
    nodes = pytest.importorskip('torchdata.nodes')

    def make(seed: int) -> Any:
        indices = nodes.Batcher(nodes.SamplerWrapper(sampler(seed)), BS, drop_last=False)
        return nodes.Loader(nodes.Mapper(indices, torch.tensor))

    check(make, STOP_POINTS, epochs=3)


class WithState:
    "A loader that saves its position and a tensor."

    def __init__(self, extra: Any = None) -> None:
        self.i, self.sums, self.extra = 0, torch.zeros(2), extra

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Tensor]:
        while self.i < 5:
            self.i += 1
            self.sums += self.i
            yield torch.tensor([self.i, *self.sums])
        self.i = 0

    def state_dict(self) -> dict[str, Any]:
        return {'i': self.i, 'sums': self.sums, 'extra': self.extra, 'n': np.int64(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.i, self.sums = state['i'], state['sums']


class Permuted(WithState):
    "A loader that saves its position, and draws its order from torch's generator when a pass begins."

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(5)

        def batches() -> Iterator[Tensor]:
            while self.i < 5:
                self.i += 1
                yield order[self.i - 1]
            self.i = 0

        return batches()


@pytest.mark.parametrize('kind', [WithState, Permuted])
def test_a_loader_with_its_own_state(kind: type[WithState]) -> None:
    check(lambda seed: kind(), STOP_POINTS)


def test_a_state_that_would_not_load_safely_is_refused() -> None:
    drawing = LoaderPosition(WithState([{1}]))
    drawing.begin()
    with pytest.raises(OptionError, match=r"WithState\['extra'\]\[0\] is a set"):
        drawing.state_dict(0)


# ------------------------------------------------------------------------- what is not gone on with


@pytest.mark.parametrize(
    ('was', 'now', 'message'),
    [
        (loader(), TENSORS['in order'], 'type DataLoader, now Column'),
        (loader(), lambda seed: DataLoader(Items(), 5), 'batches 6, now 5; batch size 4, now 5'),
        (loader(), lambda seed: DataLoader(Items(n=23), BS), 'samples 22, now 23'),
        (
            TENSORS['shuffle'],
            lambda seed: Column(ROWS[:20], bs=BS, shuffle=True),
            'batches 6, now 5; samples 22, now 20',
        ),
        (lambda seed: [ROWS] * 5, lambda seed: [ROWS] * 4, 'batches 5, now 4'),
    ],
)
def test_another_loader_is_refused_before_anything_changes(
    was: Any, now: Any, message: str
) -> None:
    checkpoints = run_without_stop(was, 1)[1][0]
    for place in (2, 'end'):
        with pytest.raises(CheckpointError, match=message):
            passes_after_resume(now, checkpoints[place])


def test_generators_that_are_made_late_are_named() -> None:
    checkpoint = run_without_stop(loader('own'), 1)[1][0][3]
    with pytest.warns(UserWarning, match=r'lacks now: dataset\.transform\.rng\..*in `__init__`'):
        passes_after_resume(loader(), checkpoint, 1)


# ------------------------------------------------------------------------------------------ indices


@pytest.mark.parametrize(
    'make',
    [
        loader(shuffle=True),
        loader('torch', shuffle=True, generator=seeded_generator),
        loader(sampler=OwnSeed),
        loader(batch_sampler=lambda seed: Eager()),
        loader(workers=2, shuffle=True, generator=seeded_generator),
        TENSORS['shuffle'],
    ],
)
def test_indices_of_a_batch(make: Callable[[int], Any]) -> None:
    dl = make(1)
    drawing = LoaderPosition(dl)
    assert drawing.indices(0) is None
    batches = drawing.begin()
    for i, batch in enumerate(batches):
        expected = [int(row[0]) if row.ndim else int(row) for row in batch]
        before = digest_generators(dl)
        assert drawing.indices(i) == expected
        assert digest_generators(dl) == before
    assert drawing.indices(99) is None


def test_indices_without_batches_and_where_they_cannot_be_known() -> None:
    drawing = LoaderPosition(DataLoader(Items(), batch_size=None))
    drawing.begin()
    assert drawing.indices(5) == [5]
    for dl in (
        [1, 2],
        Generating(),
        DataLoader(Stream(0)),
    ):
        other = LoaderPosition(dl)
        other.begin()
        assert other.indices(0) is None


def test_the_loaders_own_iterator_is_what_is_drawn_from() -> None:
    dl = DataLoader(Items(), BS, num_workers=2)
    assert type(LoaderPosition(dl).begin()) is type(iter(dl))
    assert type(LoaderPosition([1]).begin()) is type(iter([1]))


def test_a_tensor_loader_that_shuffles_since_later_resumes_in_its_order() -> None:
    "Without a generator, the loader draws its order from torch's global generator."

    def make_loader() -> TensorLoader:
        loader = TensorLoader(torch.arange(12), bs=2)
        loader.shuffle = True
        return loader

    torch.manual_seed(3)
    position = LoaderPosition(make_loader())
    batches = [x.tolist() for (x,) in position.begin()]
    state = position.state_dict(2)
    torch.manual_seed(4)
    resumed = LoaderPosition.resume(make_loader(), state)
    assert [x.tolist() for (x,) in resumed.begin()] == batches[2:]
