"""Fits of a number of batches on streams whose length is absent or wrong."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from learnkit import EMA, Callback, Checkpoint, DataLoaders, Learner
from learnkit.callbacks.progress import Display
from learnkit.callbacks.stoppers import FixedStopper

N = 40  # batches of a fit


class Stream(IterableDataset[Any]):
    "Yield random samples, and state a length, or none."

    def __init__(self, n: int | None) -> None:
        self.n = n

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(8 * self.n_batches() if self.n else 10**9):
            x = torch.randn(4, generator=generator)
            yield x, x.sum()[None]

    def n_batches(self) -> int:
        return self.n or 0


class Estimated(Stream):
    "Yield twice as many samples as stated."

    def n_batches(self) -> int:
        return 2 * (self.n or 0)

    def __len__(self) -> int:
        return 8 * (self.n or 0)


STREAMS = [Stream(None), Stream(15), Estimated(15)]


def make(data: Stream, *cbs: Any) -> Learner:
    torch.manual_seed(0)
    learn = Learner(
        DataLoaders(DataLoader(data, 8)), nn.Linear(4, 1), nn.MSELoss(), lr=0.01, cbs=list(cbs)
    )
    return learn


def cosine_cycle(share: float, peak: float) -> float:
    "Return the rate of a one-cycle schedule of `fit_one_cycle`'s defaults."
    start, end, low, high = (
        (0.0, 0.25, peak / 25, peak) if share < 0.25 else (0.25, 1.0, peak, peak / 1e5)
    )
    at = (share - start) / (end - start)
    return low + (high - low) * (1 - math.cos(math.pi * at)) / 2


@pytest.mark.filterwarnings('ignore:Length of IterableDataset')
@pytest.mark.parametrize('data', STREAMS, ids=['endless', 'ends', 'estimated'])
def test_schedules_follow_the_number_of_batches(data: Stream) -> None:
    for budget in (f'{N}ba', f'{8 * N}sp', f'{N}st'):
        learn = make(data)
        with learn.no_bar(), learn.no_logging():
            learn.fit_one_cycle(budget, 0.1)
        expected = [cosine_cycle(i / N, 0.1) for i in range(N)]
        assert learn.recorder.lrs == pytest.approx(expected, rel=1e-6)


def test_cycles_of_batches() -> None:
    learn = make(Stream(None))
    with learn.no_bar(), learn.no_logging():
        learn.fit_sgdr(2, '10ba', 0.1)
    expected = [0.05 * (1 + math.cos(math.pi * i / n)) for n in (10, 20) for i in range(n)]
    assert learn.recorder.lrs == pytest.approx(expected, rel=1e-6)


def test_shares_of_a_fit_are_shares_of_its_batches() -> None:
    average = EMA(0.5, start='0.5dur')
    begun = []
    note = Callback(after_batch=lambda cb: begun.append(average.has_begun), order=200)
    learn = make(Stream(None), average, note)
    with learn.no_bar(), learn.no_logging():
        learn.fit(f'{N}ba')
        assert begun.index(True) == pytest.approx(N / 2, abs=1)
        learn.fit(f'{N}ba', cbs=FixedStopper('0.75dur'))
    assert learn.time.ba == N + 30


@pytest.mark.filterwarnings('ignore:Length of IterableDataset')
@pytest.mark.parametrize('data', STREAMS[:2], ids=['endless', 'ends'])
def test_a_killed_fit_resumes_in_the_middle_of_the_schedule(data: Stream, tmp_path: Path) -> None:
    straight = make(data, Checkpoint('7ba', tmp_path, keep_last=None))
    with straight.no_bar(), straight.no_logging():
        straight.fit_one_cycle(f'{N}ba', 0.1)
    for path in sorted(tmp_path.glob('*.ckpt'))[::2]:
        learn = make(data)
        with learn.no_bar(), learn.no_logging():
            learn.fit_one_cycle(f'{N}ba', 0.1, resume=path)
        assert learn.recorder.lrs == straight.recorder.lrs
        assert torch.equal(learn.model.weight, straight.model.weight)


@pytest.mark.filterwarnings('ignore:Length of IterableDataset')
@pytest.mark.parametrize(
    ('data', 'budget', 'expected'),
    [
        (Stream(None), '5ba', [5, 5, 5, 5, 5]),
        (Stream(None), '40sp', [5, 5, 5, 5, 5]),
        (Stream(3), '5ba', [3, 3, 3, 2, 2]),
        (Estimated(2), '5ba', [2, 5, 5, 5, 1]),
    ],
)
def test_the_bar_ends_with_the_budget(
    data: Stream, budget: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: dict[int, int | None] = {}

    class Silent(Display):
        interval_s = 0.0

        def draw(self, bar: Any) -> None:
            if bar is not None and bar.done:
                totals[learn.time.ba] = bar.total

        def write(self, names: Any, row: Any) -> None:
            pass

    monkeypatch.setattr('learnkit.callbacks.progress.make_display', Silent)
    learn = make(data)
    learn.fit(budget)
    if data.n == 3:  # the length of the first pass is known only behind it
        expected = [5, 5, 5, 2, 2]
    assert [totals[i] for i in range(1, 6)] == expected
