"""`doc` for events, callbacks, classes and functions."""

from functools import partial
from typing import Any

import pytest

import learnkit
from learnkit import Callback, DataLoaders, Learner, OptionError, Time, doc
from learnkit.debug.doc import open_levels
from learnkit.engine.events import EVENTS, LEVELS, LIFECYCLE
from learnkit.testing import synth_learner


@pytest.mark.parametrize('what', [Learner.fit, 'fit', 'Learner.fit', 'learn.fit'])
def test_help_for_a_function_has_its_comments(what: Any) -> None:
    text = doc(what)
    assert text.startswith('def fit(\n    n_epoch:int | str | Time, # epochs, or a budget')
    assert '# checkpoint to resume' in text
    assert 'Train for `n_epoch` epochs' in text
    assert repr(text) == text  # as a notebook shows it


def test_help_for_what_is_made_of_something() -> None:
    assert doc(synth_learner()) == doc(Learner) and doc(Time('2ep')) == doc('Time')
    assert 'Train `model` on `dls`' in doc(Learner)
    assert doc(partial(learnkit.SGD, mom=0.9)).partition('\n\n')[2] in doc('SGD')
    assert doc(Learner.smooth_loss).startswith('Learner.smooth_loss\n\n')
    assert 'from_tensors(' in doc(DataLoaders.from_tensors)
    assert doc(len).startswith('len(...)') or 'Return the number of items' in doc(len)


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


def listed(text: str, head: str) -> dict[str, str]:
    "Return the names below a heading, with their descriptions."
    rows = text.partition(f'{head}:\n')[2].partition('\n\n')[0].splitlines()
    return {name: ' '.join(words) for name, *words in map(str.split, rows)}


@pytest.mark.parametrize('event', EVENTS)
def test_help_for_an_event(event: str) -> None:
    text = doc(event)
    assert all(m.doc in text for m in LIFECYCLE if m.event == event)
    assert listed(text, 'May be raised here').keys() == {
        LEVELS[level].exception.__name__
        for i, m in enumerate(LIFECYCLE)
        if m.event == event
        for level in open_levels(i)
    }


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


@pytest.mark.parametrize(('what', 'name'), [(Mine, 'Mine'), (Mine(5), 'Mine(n=5)')])
def test_help_for_a_callback(what: Any, name: str) -> None:
    text = doc(what)
    assert text.startswith('def Mine(\n    n:int=3, # how many\n)') and 'Do a thing.' in text
    runs = listed(text, f'{name} runs at (order 7, not in evaluation)')
    assert runs == {'before_fit': 'Begin.', 'after_loss': 'Look at the loss.'}


@pytest.mark.parametrize(
    'name', ['after_bacth', 'Learner.fitt', 'fitt', '', '.', 'Learner.', 'no such thing']
)
def test_an_unknown_name(name: str) -> None:
    with pytest.raises(OptionError) as e:
        doc(name)
    assert repr(name) in str(e.value)
    assert ('after_batch' in str(e.value)) == (name == 'after_bacth')
