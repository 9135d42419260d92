"""The training loader is read while a fit is paused: the fit continues bit for bit, or says what differs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from learnkit import Learner
from tests.faults.set_ups import LOADERS
from tests.faults.test_f51_set_ups import Trace, combine, compare, picture
from tests.helpers.resuming import scramble


def iterate(learn: Learner) -> None:
    list(islice(learn.dls.train, 3))


def predict(learn: Learner) -> None:
    learn.get_preds(dl=learn.dls.train)


READERS = {'iterate': iterate, 'predict': predict}


def train(name: str, read: Callable[[Learner], None] | None) -> tuple[Any, Any, list[str]]:
    set_up = combine({'loader': name})
    scramble(0)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of torchdata
        learn = set_up.make()
    scramble(0)
    learn.add_cb(trace := Trace())
    learn.fit(3, pause_at=None if read is None else 7)
    lines: list[str] = []
    if read is not None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            read(learn)
            scramble(7)
            learn.resume()
        lines = [str(w.message) for w in caught if '/torch/' not in w.filename]
    learn.remove_cb(trace)
    end = picture(learn)
    learn.close()
    return end, trace.batches, lines


def judge(name: str, how: str, capsys: Any) -> str:
    expected = train(name, None)
    capsys.readouterr()
    found = train(name, READERS[how])
    out = capsys.readouterr().out
    is_said = 'not exact' in out or bool(found[2])
    is_equal = not compare(expected[0], found[0]) and not compare(expected[1], found[1])
    if is_equal:
        return 'exact, said' if is_said else 'exact'
    return 'said' if is_said else 'SILENT'


@pytest.mark.parametrize('name', ['noise', 'InList'])
def test_a_loader_that_is_read(name: str, capsys: Any) -> None:
    assert judge(name, 'iterate', capsys) == ('said' if name == 'InList' else 'exact')


@pytest.mark.full
@pytest.mark.filterwarnings('ignore:The train loader')
@pytest.mark.parametrize('how', list(READERS))
@pytest.mark.parametrize('name', list(LOADERS))
def test_every_loader_that_is_read(name: str, how: str, capsys: Any) -> None:
    if name == 'out of order' or (name == 'endless stream' and how == 'predict'):
        pytest.skip('two fits differ, or the prediction has no end')
    outcome = judge(name, how, capsys)
    assert outcome != 'SILENT'
