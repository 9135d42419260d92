"""Copies ahead of time: order, errors and streams, with a stand-in for the streams of a device."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from learnkit import TensorLoader
from learnkit.data import prefetch as readahead
from learnkit.data.position import LoaderPosition
from learnkit.data.prefetch import read_ahead

CUDA = torch.device('cuda', 0)


def test_on_the_cpu_it_is_the_loaders_own_iterator() -> None:
    batches = [1, 2, 3]
    assert type(read_ahead(batches, torch.device('cpu'))) is type(iter(batches))


class Log(list[str]):
    "A stand-in for torch's streams that records calls."

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log = self

        class Stream:
            def __init__(self, device: Any = None) -> None:
                self.device = device

            def wait_stream(self, other: Any) -> None:
                log.append('wait')

            def __enter__(self) -> None:
                log.append('side')

            def __exit__(self, *_: object) -> None:
                log.append('main')

        monkeypatch.setattr(readahead, 'has_streams', lambda device: device.type == 'cuda')
        monkeypatch.setattr(readahead, 'records_streams', lambda device: True)
        monkeypatch.setattr(torch, 'Stream', Stream)
        monkeypatch.setattr(torch.accelerator, 'current_stream', Stream)
        monkeypatch.setattr(Tensor, 'record_stream', lambda t, s: log.append('in use'))
        monkeypatch.setattr(Tensor, 'pin_memory', lambda t: t)
        monkeypatch.setattr(readahead, '_send', lambda t, device: (log.append('copy'), t)[1])


def test_the_next_batch_is_on_its_way_before_this_one_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Log()
    log.install(monkeypatch)
    batches = [(torch.full((2,), float(i)), {'y': torch.full((2,), float(-i))}) for i in range(3)]
    got = []
    for x, y in read_ahead(batches, CUDA):
        log.append('used')
        got.append((x[0].item(), y['y'][0].item()))
    assert got == [(0.0, 0.0), (1.0, -1.0), (2.0, -2.0)]
    travel, use = ['side', 'copy', 'copy', 'main'], ['wait', 'in use', 'in use']
    assert list(log) == [*travel, *use, *travel, 'used', *use, *travel, 'used', *use, 'used']


@pytest.mark.parametrize('kind', ['iterator', 'DataLoader in the process'])
def test_where_drawing_early_would_lose_a_batch_it_is_copied_when_it_is_drawn(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log()
    log.install(monkeypatch)
    drawn: list[int] = []

    def draw() -> Iterator[Tensor]:
        for i in range(3):
            drawn.append(i)
            yield torch.full((1,), i)

    if kind == 'iterator':
        batches = read_ahead(draw(), CUDA)
    else:
        dl = DataLoader([torch.zeros(1)] * 3, num_workers=0)
        batches = read_ahead(dl, CUDA, draw)
    assert not drawn and not log
    assert [(t.item(), len(drawn)) for t in batches] == [(0, 1), (1, 2), (2, 3)]
    assert list(log) == ['side', 'copy', 'main', 'wait', 'in use'] * 3


def test_an_error_comes_with_the_batch_it_belongs_to(monkeypatch: pytest.MonkeyPatch) -> None:
    Log().install(monkeypatch)

    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            yield torch.zeros(1)
            raise OSError('disk')

    batches = read_ahead(Loader(), CUDA)
    assert torch.equal(next(batches), torch.zeros(1))
    with pytest.raises(OSError, match='disk'):
        next(batches)
    assert list(read_ahead(type('Empty', (), {'__iter__': lambda self: iter(())})(), CUDA)) == []


def test_a_position_is_after_the_batches_that_were_used(monkeypatch: pytest.MonkeyPatch) -> None:
    Log().install(monkeypatch)

    def make() -> TensorLoader:
        return TensorLoader(torch.arange(6), bs=2, shuffle=True, seed=0)

    dl = make()
    drawing = LoaderPosition(dl)
    batches = read_ahead(dl, CUDA, drawing.begin)
    next(batches)
    position = drawing.state_dict(1)
    resumed = LoaderPosition.resume(make(), position).begin()
    assert [b[0].tolist() for b in resumed] == [b[0].tolist() for b in batches]


def test_an_object_that_moves_itself_is_left_to_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    "Its tensors would be freed on a stream that does not wait for the computation on them."
    log = Log()
    log.install(monkeypatch)

    class Graph:
        def to(self, device: Any) -> None:
            raise AssertionError

    graph = Graph()
    ((found, _),) = read_ahead([(graph, torch.ones(1))], CUDA)
    assert found is graph and log == ['side', 'copy', 'main', 'wait', 'in use']


@pytest.mark.cuda
def test_the_batches_are_the_loaders() -> None:
    batches = [(torch.randn(64, 8), torch.arange(64) + i) for i in range(20)]
    device = torch.device('cuda', torch.cuda.current_device())
    for (x, y), (xd, yd) in zip(batches, read_ahead(batches, device), strict=True):
        assert xd.is_cuda and torch.equal(xd.cpu(), x) and torch.equal(yd.cpu(), y)
