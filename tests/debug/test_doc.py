"""`doc` for signatures, events and callbacks, as text and in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import learnkit
from learnkit import Callback, DataLoaders, GradientClip, Learner, OptionError, Recorder, Time, doc
from learnkit.core import errors
from learnkit.core.errors import CancelException, CancelTrainException, CancelValidException
from learnkit.debug.doc import Doc, comments, open_levels
from learnkit.engine.events import EVENTS, LEVELS, LIFECYCLE
from learnkit.testing import synth_learner


# fmt: off
def documented(
    a: int,                # the first
    b: Any = None,
    c: Any = 'x',          # a letter
    *rest: str,            # all others
    d: float = 0.5,
    **more: Any,           # for the model
) -> dict[str, Any]:  # by name
    "Return what was given."
    return {'a': a, 'b': b, 'c': c, 'rest': rest, 'd': d, **more}
# fmt: on


def test_comments_match_the_signature() -> None:
    assert comments(documented) == {
        'a': 'the first',
        'c': 'a letter',
        'rest': 'all others',
        'more': 'for the model',
        'return': 'by name',
    }
    assert comments(partial(documented, 1))['a'] == 'the first'
    assert comments(Learner.fit)['n_epoch'].startswith('epochs, or')
    assert comments(synth_learner().fit) == comments(Learner.fit)


def one_line(a: int, b: str = '') -> None:
    "Do nothing."  # not about `a`


@contextmanager
def wrapped(
    a: int,  # how many
) -> Iterator[None]:
    "Yield."
    yield


def test_a_function_without_comments_has_none() -> None:
    assert comments(one_line) == comments(print) == comments(3) == comments(lambda x: x) == {}
    assert comments(eval('lambda x: x')) == {}
    assert comments(wrapped) == {'a': 'how many'}


def test_a_signature_is_shown_as_it_is_written() -> None:
    assert (
        doc(documented).signature()
        == """\
documented(
    a: int,          # the first
    b: Any = None,
    c: Any = 'x',    # a letter
    *rest: str,      # all others
    d: float = 0.5,
    **more: Any,     # for the model
) -> dict[str, Any]  # by name"""
    )
    assert doc(synth_learner().no_bar).signature() == 'Learner.no_bar() -> Iterator[Self]'

    def positional(a: int, /, b: int, *, c: int) -> None:
        "Do nothing."

    expected = ['a: int', '/', 'b: int', '*', 'c: int']
    assert [p.text for p in doc(positional).parameters or []] == expected


@pytest.mark.parametrize('what', [Learner.fit, 'fit', 'Learner.fit', 'learn.fit'])
def test_help_for_a_method_of_the_learner(what: Any) -> None:
    text = repr(doc(what))
    assert text.startswith('Learner.fit(\n    n_epoch: int | str | Time, ')
    assert '# checkpoint to resume' in text
    assert 'Train for `n_epoch` epochs' in text
    assert 'learnkit.learner' in text


def test_methods_of_the_parts_of_the_learner_are_shown_as_its_own() -> None:
    assert doc(Learner.fit_one_cycle).title == 'Learner.fit_one_cycle'
    assert doc(Learner.smooth_loss).title == 'Learner.smooth_loss'
    assert doc(Learner.smooth_loss).parameters is None
    assert doc(DataLoaders.from_tensors).title == 'DataLoaders.from_tensors'
    expected = {'fit', 'lr_find', 'get_preds', 'save', 'explain'}
    assert expected <= {name for name, _ in doc(Learner).lists['Methods']}


def test_help_for_what_is_made_of_something() -> None:
    assert doc(synth_learner()).title == 'Learner' and doc(Time('2ep')).title == 'Time'
    assert doc(partial(learnkit.SGD, mom=0.9)).text == doc('SGD').text
    assert [name for name, _ in doc(errors).lists['Names']] == errors.__all__
    assert doc(nn.Linear).title == 'Linear'


# -- events ----------------------------------------------------------------------------------------


class Levels(Callback):
    "Records the open levels at each event, in training and in evaluation."

    order = -1000

    def __init__(self) -> None:
        self.seen: dict[str, set[frozenset[str]]] = {}

    def __call__(self, event_name: str) -> Any:
        self.seen.setdefault(event_name, set()).add(frozenset(self.learn.run.levels))


def test_open_levels_match_a_fit() -> None:
    levels = Levels()
    with synth_learner(cbs=levels).no_bar() as learn:
        learn.fit(2, iteration=1)
    assert len(levels.seen) > 25
    for event, seen in levels.seen.items():
        if event in ('after_create', 'cleanup'):
            continue
        documented = {
            frozenset(open_levels(i)) for i, m in enumerate(LIFECYCLE) if m.event == event
        }
        # the table has draws in one place of two
        documented |= {
            frozenset(t - {'train'} | {'validate'})
            for t in documented
            if event in ('before_draw', 'after_draw')
        }
        assert seen == documented, event


@pytest.mark.parametrize('event', EVENTS)
def test_help_for_an_event(event: str) -> None:
    found = doc(event)
    assert all(m.doc in found.text for m in LIFECYCLE if m.event == event)
    legal = {name for name, _ in found.lists.get('May be raised here', ())}
    assert legal == {
        LEVELS[level].exception.__name__
        for i, m in enumerate(LIFECYCLE)
        if m.event == event
        for level in open_levels(i)
    }


def test_help_for_an_event_lists_its_handlers_in_order() -> None:
    found = doc('after_loss')
    assert ('MixedPrecision', 'order 10') in found.lists['Callbacks that handle it']
    legal = dict(found.lists['May be raised here'])
    assert legal[CancelTrainException.__name__].endswith('In training.')
    assert legal[CancelValidException.__name__].endswith('In evaluation.')
    assert 'run_train' in found.text and 'run_train' not in doc('before_fit').text
    assert doc('after_cancel_valid').title == doc('after_cancel_validate').title


def test_help_for_exceptions() -> None:
    rows = dict(doc('CancelStepException').lists['From this event on it may be raised'])
    assert rows == {'before_step': 'then after_cancel_step, after_step'}
    assert len(doc(CancelException).lists['From this event on it may be raised']) == 7
    expected = ['LearnkitError', 'ValueError']
    assert [name for name, _ in doc(errors.TimeError).lists['Also caught as']] == expected


# -- callbacks -------------------------------------------------------------------------------------


class Mine(Callback):
    "Do a thing."

    order, run_valid = 7, False

    def __init__(
        self,
        n: int = 3,  # how many
    ) -> None:
        self.n = n

    def before_fit(self) -> None:
        "Begin."

    def after_loss(self) -> None:
        "Look at the loss."

    def forget(self) -> None:
        "Begin again."


def test_help_for_a_callback() -> None:
    for what in (Mine, Mine(5)):
        found = doc(what)
        assert found.signature() == 'Mine(\n    n: int = 3,  # how many\n)'
        (head, runs), (methods, rows) = found.lists.items()
        assert head.endswith('uns at (order 7, not in evaluation)') and methods == 'Methods'
        assert runs == [('before_fit', 'Begin.'), ('after_loss', 'Look at the loss.')]
        assert rows == [('forget', 'Begin again.')]
    assert next(iter(doc(Mine(5)).lists)).startswith('Mine(n=5) runs at')
    learn = synth_learner(cbs=Mine)
    assert next(iter(doc(learn.mine).lists)).startswith('Mine, of a Learner, runs at')


def test_help_for_a_callback_of_functions() -> None:
    def shout(cb: Any) -> None:
        "Shout."

    assert next(iter(doc(Callback(after_fit=shout)).lists.values())) == [('after_fit', 'Shout.')]
    assert doc(Recorder()).title == 'Recorder'


# -- what is not there, and looks ------------------------------------------------------------------


@pytest.mark.parametrize(
    'name', ['after_bacth', 'Learner.fitt', 'fitt', '', '.', 'Learner.', 'learn', 'no such thing']
)
def test_an_unknown_name(name: str) -> None:
    with pytest.raises(OptionError) as e:
        doc(name)
    assert repr(name) in str(e.value)
    assert ('after_batch' in str(e.value)) == (name == 'after_bacth')


@pytest.mark.parametrize('value', [3, None, [1], EVENTS, torch.zeros])
def test_what_has_no_help(value: Any) -> None:
    if value is torch.zeros:
        assert doc(value).parameters is None
        return
    with pytest.raises(OptionError, match=f'no help for a {type(value).__name__}'):
        doc(value)


class Tags(HTMLParser):
    "Records the open tags, and the text."

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ''

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(
    'what', ['Learner', 'fit', 'after_loss', 'EMA', 'TimeError', GradientClip(1.0)], ids=str
)
def test_the_html_is_well_formed_and_has_the_same_text(what: Any) -> None:
    found = doc(what)
    parsed = Tags()
    parsed.feed(found._repr_html_() or '')
    assert not parsed.open
    for p in found.parameters or []:
        assert ' '.join(p.text.split()) in ' '.join(parsed.text.split())
    assert all(name in parsed.text for rows in found.lists.values() for name, _ in rows)


def test_html_is_escaped() -> None:
    html = Doc('<b>', text='a < `<script>`\n\n>>> 1 < 2')._repr_html_()
    assert html is not None and '<script>' not in html and '<b><b>' not in html
    assert '<p>a &lt; <code>&lt;script&gt;</code></p>' in html
    assert 'monospace">&gt;&gt;&gt; 1 &lt; 2</pre>' in html
