"""Traits of callbacks: declared once, documented, and close names are named."""

from pathlib import Path

import pytest

from learnkit import Callback
from learnkit.engine.traits import TRAITS, trait_of, traits_markdown
from learnkit.testing import synth_learner

ROOT = Path(__file__).resolve().parents[2]


def test_a_trait_that_is_not_declared_is_an_error() -> None:
    with pytest.raises(KeyError, match='remove_on_lunch'):
        trait_of(Callback(), 'remove_on_lunch')


def test_the_page_has_the_public_traits() -> None:
    page = (ROOT / 'docs' / 'lifecycle.md').read_text('utf-8')
    assert traits_markdown() in page
    private = [trait.name for trait in TRAITS.values() if not trait.is_public]
    assert private and not [name for name in private if f'`{name}' in traits_markdown()]


def test_every_trait_is_asked_for() -> None:
    package = ROOT / 'learnkit'
    text = ''.join(
        path.read_text('utf-8') for path in package.rglob('*.py') if path.name != 'traits.py'
    )
    assert [name for name in TRAITS if f"'{name}'" not in text] == []


def test_a_close_name_is_named() -> None:
    class Tracker(Callback):
        remove_on_fnd = True

        def recieve_log(self) -> None: ...

    with pytest.warns(UserWarning, match='Tracker') as warned:
        synth_learner(cbs=Tracker())
    assert [str(w.message).split('`')[1] for w in warned] == ['remove_on_find', 'receive_log']


def test_other_names_are_left_alone(recwarn: pytest.WarningsRecorder) -> None:
    class Own(Callback):
        first = remove = machine = None

        def log_image(self) -> None: ...

        def receive(self) -> None: ...

        def on_add(self) -> None: ...

    synth_learner(cbs=Own())
    assert not recwarn.list
