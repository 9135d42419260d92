"""Text and HTML of objects: no errors, no drawn batch, no wait for a device."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import Callback, DataLoaders, Learner, Time, Timestamp
from learnkit.callbacks.recorder import History
from learnkit.checkpoint.resume_check import ResumeCheck
from learnkit.core.html import definitions, never_raising, safe_call, table, truncate_rows
from learnkit.core.time import format_time
from learnkit.engine.timings import Timings
from learnkit.testing import synth_learner


class Rows(HTMLParser):
    "Collects the cells of tables by row, and checks that every tag is closed."

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == 'br':
            return
        self.open.append(tag)
        if tag == 'tr':
            self.rows.append([])
        if tag in ('th', 'td'):
            self.rows[-1].append('')

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if 'td' in self.open or 'th' in self.open:
            self.rows[-1][-1] += data


def html_of(o: Any) -> str:
    html = o._repr_html_()
    assert isinstance(html, str)
    return html


def rows_of(o: Any) -> list[list[str]]:
    return Rows(html_of(o)).rows


# -- tables


def test_a_table_escapes_and_sets_numbers_to_the_right() -> None:
    html = table(['n', '<b>'], [(1, '<script>'), (None, 'a & b')], 'x < y')
    assert Rows(html).rows == [['n', '<b>'], ['1', '<script>'], ['', 'a & b']]
    assert '<script>' not in html and '<div><b>x &lt; y</b></div>' in html
    assert html.count('<td style="text-align:right">') == 2
    assert html.count('<td style="text-align:left">') == 2


def test_infinite_numbers_are_aligned_like_others() -> None:
    assert 'text-align:left' not in table([], [(0.5,), (math.inf,), (-math.inf,), (math.nan,)])


def test_a_long_table_shows_its_first_and_last_rows() -> None:
    rows = Rows(table(['i'], [(i,) for i in range(1000)])).rows
    expected = ['i', *map(str, range(10)), '... 940 more ...', *map(str, range(950, 1000))]
    assert [r[0] for r in rows] == expected
    assert truncate_rows(['a'], 1, '{}', '{}') == ['a']


def test_what_raises_is_not_in_the_way() -> None:
    rows = Rows(definitions({'a': lambda: 1 / 0, 'b': lambda: ['<1>', '2'], 'c': 3}, 'title')).rows
    assert rows == [['a', '(not known: ZeroDivisionError)'], ['b', '<1>2'], ['c', '3']]
    assert safe_call(lambda: 5) == 5

    class Broken:
        @never_raising
        def _repr_html_(self) -> str:
            raise ValueError

    assert Broken()._repr_html_() is None


# -- the Learner


def test_the_html_of_a_learner_shows_its_parts_and_progress() -> None:
    learn = synth_learner(lr=0.25, cbs=Callback(before_fit=print), metrics=nn.L1Loss())
    rows = dict(rows_of(learn))
    assert rows['model'] == 'RegModel, 2 parameters, on cpu'
    found = rows['data']
    assert found == 'train: TensorLoader, 10 batches of 16valid: TensorLoader, 2 batches of 16'
    assert rows['loss'] == 'MSELoss'
    assert rows['optimizer'] == 'SGD, lr 0.25, not made yet'
    # as they run
    found = rows['callbacks']
    assert found == 'TrainEvalCallbackCallback(before_fit=print)RecorderProgressCallback'
    assert rows['trained'] == 'not yet' and rows['last epoch'] == 'none'

    learn.model.a.requires_grad_(False)
    with learn.no_bar(), learn.no_logging():
        learn.fit(2)
    rows = dict(rows_of(learn))
    assert rows['model'] == 'RegModel, 2 parameters, 1 of them trained, on cpu'
    assert rows['optimizer'] == f'SGD ({type(learn.opt.optimizers[""]).__name__}), lr 0.25'
    assert re.fullmatch(
        r'2 epochs, 20 batches, 20 optimizer steps, 320 samples in [\d.]+ seconds', rows['trained']
    )
    last = learn.history[-1]
    assert rows['last epoch'].startswith(
        f'epoch 1, train_loss {last["train_loss"]:.6f}, valid_loss'
    )


class Hostile(nn.Module):
    "A model whose `__repr__` and attributes raise."

    def __repr__(self) -> str:
        raise RuntimeError

    def _repr_html_(self) -> str:
        raise RuntimeError

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        raise RuntimeError


def test_a_look_never_raises() -> None:
    class Shy(Callback):
        def __repr__(self) -> str:
            raise RuntimeError

    learn = synth_learner(cbs=Shy())
    learn.model, learn.opt, learn.loss_func, learn._metrics = Hostile(), object(), None, [object()]
    rows = dict(rows_of(learn))
    assert rows['model'] == '(not known: RuntimeError)'
    assert rows['callbacks'] == 'TrainEvalCallback(not known: RuntimeError)RecorderProgressCallback'
    assert rows['optimizer'] == rows['metrics'] == '(not known: AttributeError)'
    assert repr(learn) == (
        "Learner(Hostile, loss_func=None, valid=['valid'], cbs=[TrainEvalCallback, Recorder, "
        'ProgressCallback, (not known: RuntimeError)])'
    )
    half = Learner.__new__(Learner)  # as in a traceback of the constructor
    assert 'not known' in repr(half) and 'not known' in html_of(half)


def test_a_learner_with_a_lazy_model_and_another_kind_of_loaders() -> None:
    class Dls:
        train = [torch.zeros(2)]

        def __getitem__(self, i: int) -> Any:
            raise IndexError

    rows = dict(
        rows_of(Learner(Dls(), nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1)), nn.MSELoss()))
    )
    assert rows['model'] == 'Sequential, 4 parameters so far, on cpu'
    assert rows['data'] == 'train: list, 1 batch'


@pytest.mark.parametrize(
    'name', ['_repr_html_', '_repr_svg_', '_repr_mimebundle_', '_ipython_display_']
)
def test_the_models_looks_are_not_the_learners(name: str) -> None:
    model = nn.Linear(1, 1)
    setattr(model, name, lambda: 'the model')
    learn = synth_learner(model=model)
    assert getattr(learn, name, None) is None or getattr(learn, name)() != 'the model'


# -- the others


def test_loaders_are_not_drawn_from() -> None:
    class Once:
        def __iter__(self) -> Iterator[Any]:
            raise RuntimeError('drawn from')

    dls = DataLoaders(Once(), {'day': [1, 2]})
    assert rows_of(dls) == [
        ['name', 'loader', 'samples'],
        ['train', 'Once, unknown length', ''],
        ['day', 'list, 2 batches', ''],
    ]
    state = torch.get_rng_state()
    dls = DataLoaders.from_datasets([(i, i) for i in range(10)], [(0, 0)], bs=4)
    assert rows_of(dls)[1:] == [
        ['train', 'DataLoader, 3 batches of 4', '10'],
        ['valid', 'DataLoader, 1 batch of 4', '1'],
    ]
    assert torch.equal(torch.get_rng_state(), state) and dls._device is None


def test_the_history_has_a_row_an_epoch() -> None:
    rows = [
        {'fit': 0, 'epoch': 0, 'train_loss': 0.5, 'time': 61.0},
        {'fit': 0, 'epoch': 1, 'train_loss': None, 'f1': 1.0},
    ]
    assert rows_of(History(rows)) == [
        ['fit', 'epoch', 'train_loss', 'time', 'f1'],
        ['0', '0', '0.500000', '01:01', ''],
        ['0', '1', '', '', '1.000000'],
    ]
    assert repr(History(rows)) == repr(rows) and html_of(History()) == 'no epoch yet'


def test_what_there_is_not_yet() -> None:
    assert html_of(Timings()) == repr(Timings()) == 'No step has been measured yet: one in 32 is.'


def test_times_are_written_out() -> None:
    expected = ['1 epoch', '1:30:00', '3 seconds', '25% of the run', '1 batch', '1 sample']
    times = ('1ep', '90m', '3sec', '0.25dur', '1ba', '1sp')
    assert [format_time(t.value, t.unit) for t in map(Time, times)] == expected
    now = Timestamp(ep=1, ba=2000, sec=0.25, dur=0.5)
    assert dict(rows_of(now)) == {
        'iter': '0 iterations',
        'ep': '1 epoch',
        'ba': '2,000 batches',
        'st': '0 optimizer steps',
        'sp': '0 samples',
        'tok': '0 tokens',
        'sec': '0.25 seconds',
        'dur': '50% of the run',
    }


def test_a_resume_check_lists_what_differs() -> None:
    exact = ResumeCheck(8, 4, 'ab' * 32)
    other = ResumeCheck(8, 4, 'ab' * 32, ['weight <a>'], ['a hint'])
    assert dict(rows_of(exact)) == {
        'resumes': 'exactly, to the last bit',
        'batches': '8',
        'stopped after': '4',
        'SHA-256': 'abababababab...',
    }
    assert dict(rows_of(other))['differences'] == 'weight <a>'
    assert dict(rows_of(other))['hints'] == 'a hint'
