"""Progress of a resumed fit: the bar starts at the next batch, and no row is printed twice."""

from __future__ import annotations

import io
import re
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import nn

import learnkit.callbacks.progress
from learnkit import Callback, DataLoaders, Learner
from learnkit.callbacks.progress import Bar, Display, TerminalDisplay
from learnkit.core.errors import CancelFitException
from tests.helpers.clock import use_clock

BATCH = torch.ones(2, 1), torch.ones(2, 1)


class Kept(Display):
    "A display that records the position and the text of each bar."

    interval_s = 0.0

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.bars: list[tuple[str, int, int | None]] = []
        self.texts: list[str] = []

    def draw(self, bar: Bar | None) -> None:
        if bar is None:
            return
        self.bars.append((bar.label, bar.done, bar.total))
        self.texts.append(bar.text())


class Loader:
    "A loader whose length may be unknown."

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return iter([BATCH] * self.n)


class Sized(Loader):
    def __len__(self) -> int:
        return self.n


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Kept]:
    "Return the displays of the test's runs."
    made: list[Kept] = []

    def make(stream: Any = None) -> Kept:
        made.append(Kept())
        return made[-1]

    monkeypatch.setattr(learnkit.callbacks.progress, 'make_display', make)
    return made


def learner(train: Any = None, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    dls = DataLoaders(train or Sized(5), Sized(2))
    return Learner(dls, nn.Linear(1, 1), loss_func=nn.MSELoss(), **kwargs)


def state_after(n: int, train: Any = None, event: str = 'batch_checkpoint', **kwargs: Any) -> Any:
    states: list[Any] = []

    def take(cb: Any) -> None:
        if cb.train_iter == n:
            states.append(cb.learn.checkpoint_state())
            raise CancelFitException

    with (learn := learner(train, **kwargs)).no_bar():
        learn.fit(3, cbs=Callback(**{event: take}))
    return states[0]


def test_the_bar_starts_where_the_epoch_resumes(shown: list[Kept]) -> None:
    learner().fit(3, resume=state_after(8))
    bars = list(dict.fromkeys(shown[-1].bars))
    assert bars[:3] == [('epoch 2/3 train', i, 5) for i in (3, 4, 5)]
    assert bars[3:] == [
        ('epoch 2/3 valid', 0, 2),
        ('epoch 2/3 valid', 1, 2),
        ('epoch 2/3 valid', 2, 2),
        *[('epoch 3/3 train', i, 5) for i in range(6)],
        *[('epoch 3/3 valid', i, 2) for i in range(3)],
    ]


def test_the_bar_between_epochs_starts_at_the_beginning(shown: list[Kept]) -> None:
    learner().fit(3, resume=state_after(5, event='epoch_checkpoint'))
    assert shown[-1].bars[0] == ('epoch 2/3 train', 0, 5)


def test_rows_stand_under_a_header_and_none_comes_twice(capsys: pytest.CaptureFixture[str]) -> None:
    state = state_after(8)
    learner().fit(3, resume=state)
    head, *rows = capsys.readouterr().out.strip().splitlines()
    assert head.split() == ['epoch', 'train_loss', 'valid_loss', 'time']
    assert [row.split()[0] for row in rows] == ['1', '2']


def test_a_row_within_the_epoch_shows_how_much_of_it_is_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    learner(eval_every='2ba').fit(3, resume=state_after(8, eval_every='2ba'))
    rows = capsys.readouterr().out.strip().splitlines()[1:]
    assert [row.split()[0] for row in rows] == ['2.00', '1', '2.40', '2.80', '2']


def test_a_row_within_an_epoch_of_unknown_length(capsys: pytest.CaptureFixture[str]) -> None:
    learner(Loader(5), eval_every='2ba').fit(3, resume=state_after(8, Loader(5), eval_every='2ba'))
    assert '1+5' in capsys.readouterr().out


def test_the_remaining_time_is_estimated_from_the_resumed_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = use_clock(monkeypatch, 'learnkit.callbacks.progress').now - 10
    assert Bar('train', 100, 60, first=50, started=began).text() == 'train 60/100 60% 00:10<00:40'
    assert Bar('train', 100, 50, first=50, started=began).text() == 'train 50/100 50% 00:10<?'
    assert Bar('train', None, 60, first=50, started=began).text() == 'train 60 batches 00:10 1.0/s'


def test_the_fit_shows_when_it_will_be_done(shown: list[Kept]) -> None:
    learner().fit(3, resume=state_after(8))
    texts = [text for text in shown[-1].texts if text.startswith('epoch 3/3 train 5/5')]
    assert texts and all(re.search(r'fit 00:0\d left$', text) for text in texts)


def test_a_terminal_counts_the_speed_of_this_run_alone() -> None:
    display = TerminalDisplay(io.StringIO())
    # so long that a pause of the machine does not matter
    display.draw(Bar('train', 20_000, 10_060, first=60, started=perf_counter() - 5000))
    assert ' 2.00it/s' in str(display.bar)
    display.close()
