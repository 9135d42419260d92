"""`DataLoaders`, and the in-memory `TensorLoader` compared with torch's DataLoader."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from learnkit.core import device
from learnkit.core.errors import EmptyLoaderError, LoaderError
from learnkit.data.dataloaders import (
    DataLoaders,
    TensorLoader,
    as_dataloaders,
    check_loaders,
    default_device,
    evaluation_loaders,
    n_batches,
)

X, Y = torch.arange(20.0).view(10, 2), torch.arange(10)
BATCHES = [(X[:5], Y[:5]), (X[5:], Y[5:])]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


class Endless:
    "A user's loader without a length."

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield BATCHES[0]


def targets(loader: Any) -> list[int]:
    return [int(i) for _, y in loader for i in y]


# TensorLoader


@given(st.integers(1, 30), st.integers(1, 12), st.booleans())
def test_batches_match_torch(n: int, bs: int, drop_last: bool) -> None:
    x, y = torch.randn(n, 3), torch.arange(n)
    ours = TensorLoader(x, y, bs=bs, drop_last=drop_last)
    torchs = DataLoader(TensorDataset(x, y), batch_size=bs, drop_last=drop_last)
    assert len(ours) == len(torchs) == len(list(ours))
    for a, b in zip(ours, torchs, strict=True):
        assert type(a) is tuple and torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@given(st.integers(1, 30), st.integers(1, 12), st.booleans(), st.integers(0, 2**40))
def test_a_shuffled_epoch_is_a_permutation(n: int, bs: int, drop_last: bool, seed: int) -> None:
    loader = TensorLoader(
        torch.arange(n) * 10, torch.arange(n), bs=bs, shuffle=True, drop_last=drop_last, seed=seed
    )
    batches = list(loader)
    assert len(batches) == len(loader) and all(torch.equal(x, 10 * y) for x, y in batches)
    seen = [int(i) for _, y in batches for i in y]
    assert len(set(seen)) == len(seen) == (n // bs * bs if drop_last else n)
    expected = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    assert seen == expected[: len(seen)]


def test_more_batches_than_are_made_at_a_time() -> None:
    loader = TensorLoader(torch.arange(2500), bs=1, shuffle=True, seed=1)
    assert sorted(int(x) for (x,) in loader) == list(range(2500))
    assert [int(x) for (x,) in TensorLoader(torch.arange(2500), bs=1)] == list(range(2500))


def test_epochs_differ_and_the_same_seed_repeats_them() -> None:
    a, b = (TensorLoader(X, Y, bs=3, shuffle=True, seed=4) for _ in range(2))
    first, second = targets(a), targets(a)
    assert first != second and [targets(b), targets(b)] == [first, second]
    assert targets(a.new()) == first and targets(a.new(seed=5)) != first


def test_the_global_generator_seeds_a_shuffling_loader_once() -> None:
    torch.manual_seed(1)
    a = targets(TensorLoader(X, Y, shuffle=True))
    torch.manual_seed(1)
    loader = TensorLoader(X, Y, shuffle=True)
    state = torch.get_rng_state()
    assert targets(loader) == a
    targets(loader.new(shuffle=False)), targets(TensorLoader(X, Y))
    # neither an epoch nor an ordered loader draws from it
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert targets(TensorLoader(X, Y, shuffle=True)) != a


def test_a_generator_given_is_used() -> None:
    g = torch.Generator().manual_seed(3)
    loader = TensorLoader(X, Y, shuffle=True, generator=g)
    assert loader.generator is g
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3)).tolist()
    assert targets(loader) == order
    assert targets(loader.new(generator=torch.Generator().manual_seed(3))) == order
    with pytest.raises(LoaderError, match='not both'):
        TensorLoader(X, seed=1, generator=g)


@pytest.mark.parametrize('shuffle', [False, True])
def test_batches_are_copies(shuffle: bool) -> None:
    x = torch.zeros(4)
    for (batch,) in TensorLoader(x, bs=2, shuffle=shuffle):
        batch += 1
    assert x.sum() == 0


def test_dicts_arrays_and_the_data_set() -> None:
    loader = TensorLoader({'ids': np.arange(10), 'x': X}, bs=4)
    batches = list(loader)
    assert [list(b) for b in batches] == [['ids', 'x']] * 3 and batches[2]['ids'].tolist() == [8, 9]
    assert len(loader.dataset) == 10 and loader.dataset[3]['ids'] == 3
    x, y = TensorLoader(X, Y).dataset[4]
    assert x.tolist() == [8, 9] and y == 4
    shuffled = loader.new(shuffle=True, seed=0, bs=10)
    assert torch.equal(next(iter(shuffled))['x'][:, 0], 2.0 * next(iter(shuffled.new()))['ids'])
    assert (loader.n, loader.bs, shuffled.bs) == (10, 4, 10)


def test_the_device_of_the_tensors() -> None:
    loader = TensorLoader(X, Y, device='meta', bs=4)
    assert {t.device.type for batch in loader for t in batch} == {'meta'}
    with pytest.raises(LoaderError, match='several devices'):
        TensorLoader(X, Y.to('meta'))


@pytest.mark.parametrize(
    ('make', 'error', 'text'),
    [
        (lambda: TensorLoader(X, Y[:3]), LoaderError, r'different lengths, \[10, 3\]'),
        (lambda: TensorLoader(X[:0]), EmptyLoaderError, 'empty'),
        (lambda: TensorLoader(X, bs=0), LoaderError, 'bs=0'),
        (lambda: TensorLoader(X, 5), LoaderError, 'entry 1'),
        (lambda: TensorLoader({'x': torch.tensor(1.0)}), LoaderError, "entry 'x'"),
    ],
)
def test_tensor_loader_refuses(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


@pytest.mark.cuda
@pytest.mark.parametrize('shuffle', [True, False])
def test_batches_are_pinned_where_cuda_is_in_use(shuffle: bool) -> None:
    torch.zeros(1, device='cuda')
    loader = TensorLoader(X, Y, bs=4, shuffle=shuffle, seed=0)
    assert all(t.is_pinned() for batch in loader for t in batch)
    moved = [(x.to('cuda', non_blocking=True).cpu(), y) for x, y in loader]
    assert all(torch.equal(x[:, 0], 2.0 * y) for x, y in moved)
    on_device = TensorLoader(X, Y, bs=4, shuffle=shuffle, seed=0, device='cuda')
    assert all(torch.equal(x[:, 0], 2.0 * y) and x.is_cuda for x, y in on_device)


# DataLoaders


def test_holds_loaders_by_position_and_name() -> None:
    train, day, night, test = ([b] for b in (1, 2, 3, 4))
    valid = {'day': day, 'night': night}
    dls = DataLoaders(train, valid, test, device='cpu', path='data', n_inp=2, n_iter=3)
    expected = [train, day, train, day, night, test]
    assert [dls.train, dls.valid, dls[0], dls[1], dls[2], dls[3]] == expected
    assert dls['day'] is day and dls['train'] is train and dls['other0'] is test
    assert dls.evaluation == [('day', day), ('night', night)] and len(dls) == 4
    assert list(dls) == dls.loaders == [train, day, night, test]
    assert (dls.path, dls.n_inp, dls.n_iter) == (Path('data'), 2, 3)
    with pytest.raises(KeyError, match="'noon'"):
        dls['noon']
    with pytest.raises(IndexError):
        dls[4]


def test_data_sets_and_first_batch() -> None:
    ds = TensorDataset(X, Y)
    dls = DataLoaders(DataLoader(ds, batch_size=5), TensorLoader(X, Y))
    assert dls.train_ds is ds and len(dls.valid_ds) == 10
    assert torch.equal(dls.one_batch()[0], X[:5])
    with pytest.raises(EmptyLoaderError):
        DataLoaders(iter([])).one_batch()


def test_device_is_chosen_once_and_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    dls = DataLoaders(BATCHES)
    assert dls.device == default_device() and dls.device is dls.device
    dls.device = 'meta'
    assert dls.device == torch.device('meta')
    assert dls.cpu() is dls and dls.device == torch.device('cpu')
    monkeypatch.setattr(device, 'find_accelerator', lambda: torch.device('cuda'))
    monkeypatch.setattr(torch.accelerator, 'device_count', lambda: 2)
    assert dls.to('cuda:1').device == torch.device('cuda', 1) and dls.cuda().device.type == 'cuda'
    with pytest.raises(LoaderError, match=r"'cuda:2': .* finds 2 such devices"):
        dls.to('cuda:2')
    for missing in ('xpu', 'vulkan', 'gpu'):
        with pytest.raises(LoaderError, match=f'{missing}.*such device'):
            dls.to(missing)
    assert not torch.cuda.is_initialized() and dls.device == torch.device('cuda')


def test_default_device_takes_the_best_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ('cuda', 'xpu', 'mps'):
        monkeypatch.setattr(
            torch.accelerator,
            'current_accelerator',
            lambda check_available=False, k=kind: torch.device(k),
        )
        assert default_device() == torch.device(kind)
    monkeypatch.undo()
    assert default_device() == (torch.accelerator.current_accelerator(True) or torch.device('cpu'))


@pytest.mark.parametrize(
    ('make', 'error', 'text'),
    [
        (lambda: DataLoaders(5), LoaderError, "'train' is a int"),
        (lambda: DataLoaders({'a': BATCHES}), LoaderError, "'train' is a dict"),
        (lambda: DataLoaders(X), LoaderError, 'from_tensors'),
        (lambda: DataLoaders(TensorDataset(X)), LoaderError, 'from_datasets'),
        (lambda: DataLoaders([]), EmptyLoaderError, "'train'"),
        (lambda: DataLoaders(BATCHES, []), EmptyLoaderError, "'valid'"),
        (lambda: DataLoaders(BATCHES, {'day': BATCHES, 'night': []}), EmptyLoaderError, "'night'"),
        (lambda: DataLoaders(BATCHES, BATCHES, 5), LoaderError, "'other0'"),
        (lambda: DataLoaders(BATCHES, {}), LoaderError, 'dict of validation loaders is empty'),
        (lambda: DataLoaders(BATCHES, {'train': BATCHES}), LoaderError, "'train' cannot name"),
        (lambda: DataLoaders(BATCHES, n_iter=0), LoaderError, 'n_iter=0'),
        (
            lambda: DataLoaders(DataLoader(TensorDataset(X), batch_size=64, drop_last=True)),
            EmptyLoaderError,
            'drop_last',
        ),
    ],
)
def test_data_loaders_refuse(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


# from_datasets, from_tensors


def test_from_datasets_is_torchs_loader() -> None:
    ds = TensorDataset(X, Y)
    dls = DataLoaders.from_datasets(ds, ds, 4, seed=3, drop_last=True, device='cpu', n_inp=1)
    generator = torch.Generator().manual_seed(3)
    expected = DataLoader(ds, 4, shuffle=True, drop_last=True, generator=generator)
    assert [targets(dls.train), targets(dls.train)] == [targets(expected), targets(expected)]
    assert targets(dls.valid) == list(range(10)) and len(dls.valid) == 3
    assert dls.train.pin_memory == torch.cuda.is_available()
    assert dls.n_inp == 1
    assert dls.device.type == 'cpu'
    # validating draws nothing from the training order's generator
    assert dls.valid.generator is None


def test_from_datasets_takes_sequences_dicts_streams_and_options() -> None:
    samples = list(zip(X, Y, strict=True))
    dls = DataLoaders.from_datasets(
        samples, {'day': samples[:4], 'night': samples[4:]}, 5, shuffle=False
    )
    assert targets(dls.train) == list(range(10)) and targets(dls['night']) == list(range(4, 10))
    stream = DataLoaders.from_datasets(Stream(), bs=4)
    assert [b.tolist() for b in stream.train] == [[0, 1, 2, 3], [4, 5]]
    sampler = SubsetRandomSampler([1, 2])
    chosen = DataLoaders.from_datasets(samples, samples, 5, sampler=sampler, collate_fn=len)
    assert list(chosen.train) == [2] and list(chosen.valid) == [5, 5]


@pytest.mark.parametrize(
    ('make', 'error', 'text'),
    [
        (lambda: DataLoaders.from_datasets([]), EmptyLoaderError, "'train' .* is empty"),
        (lambda: DataLoaders.from_datasets([1], []), EmptyLoaderError, "'valid' .* is empty"),
        (lambda: DataLoaders.from_datasets([1], {'day': 5}), LoaderError, "'day' is a int"),
        (lambda: DataLoaders.from_datasets(DataLoader([1])), LoaderError, 'is a DataLoader'),
    ],
)
def test_from_datasets_refuses(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_from_tensors() -> None:
    train = (X, Y)
    dls = DataLoaders.from_tensors(train, (X[:4], Y[:4]), bs=4, seed=1, drop_last=True, path='here')
    expected = targets(TensorLoader(X, Y, bs=4, shuffle=True, drop_last=True, seed=1))
    assert targets(dls.train) == expected
    assert targets(dls.valid) == [0, 1, 2, 3] and dls.path == Path('here')
    assert DataLoaders.from_tensors(X, bs=5).one_batch()[0].shape == (5, 2)  # one tensor
    assert DataLoaders.from_tensors((X.numpy(), Y.numpy()), device='meta').device.type == 'meta'


def test_from_tensors_distinguishes_a_named_batch_from_named_loaders() -> None:
    named = {'x': X, 'y': Y}
    dls = DataLoaders.from_tensors(named, named)
    assert dls.evaluation[0][0] == 'valid' and list(next(iter(dls.valid))) == ['x', 'y']
    dls = DataLoaders.from_tensors(named, {'day': named, 'night': (X, Y)})
    assert [n for n, _ in dls.evaluation] == ['day', 'night']
    assert type(next(iter(dls['night']))) is tuple


# What any loader can be asked


def test_number_of_batches() -> None:
    for loader, n in (
        (BATCHES, 2),
        (iter(BATCHES), None),
        (Endless(), None),
        (DataLoader(Stream()), None),
        (TensorLoader(X, bs=3), 4),
        (DataLoader(TensorDataset(X), batch_size=4), 3),
    ):
        assert n_batches(loader) == n


def test_as_dataloaders() -> None:
    dls = DataLoaders(BATCHES)
    assert as_dataloaders(dls) is dls
    made = as_dataloaders((BATCHES, {'day': BATCHES}))
    assert made.train is BATCHES and made.evaluation == [('day', BATCHES)]
    assert as_dataloaders((BATCHES,)).valid is None
    assert as_dataloaders((BATCHES, None)).valid is None
    assert as_dataloaders(BATCHES).train is BATCHES  # a list of two batches is one loader
    loader = TensorLoader(X, Y)
    assert as_dataloaders(loader).train is loader


def test_loaders_of_another_library() -> None:
    class Theirs(list[Any]):
        train = property(lambda self: self[0])

    theirs = Theirs([BATCHES, BATCHES[:1]])
    assert as_dataloaders(theirs) is theirs
    assert evaluation_loaders(theirs) == [('valid', BATCHES[:1])]
    assert evaluation_loaders(Theirs([BATCHES])) == []


def test_loaders_are_checked_before_a_fit() -> None:
    train, day = [1], [2]
    dls = DataLoaders(train, {'day': day}, iter([]))
    check_loaders(dls)
    day.clear()
    with pytest.raises(EmptyLoaderError, match="'day'"):
        check_loaders(dls)
    train.clear()
    with pytest.raises(EmptyLoaderError, match="'train'"):
        check_loaders(dls)
    check_loaders(SimpleNamespace(train=iter([]), evaluation=[]))  # of unknown length
