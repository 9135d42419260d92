"""What an editor and a notebook offer: completion in a callback that is being typed, and parameters in the help."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

import learnkit
from learnkit import Callback, Learner, doc
from learnkit.debug.notebook import add_parameters, prepare_shell, warm_up_jedi
from learnkit.engine.events import EVENTS
from tests.helpers.libraries import require

jedi = require('jedi')

CLASS = 'class Mine(Callback):\n    def before_batch(self):\n        '


def complete(code: str) -> list[str]:
    "Return what Tab offers at the end of a notebook's cell."
    return [found.name for found in jedi.Interpreter(code, [vars(learnkit), globals()]).complete()]


def test_self_offers_the_state_of_the_loop() -> None:
    offered = set(complete(f'{CLASS}self.'))
    assert offered >= set(
        'x y xb yb pred loss loss_grad epoch n_epoch iter n_iter train_iter pct_train training model opt dls '
        'learn recorder history'.split()
    )
    missing = set(EVENTS) - offered
    assert not missing, 'declare these events in the class body of Callback'
    assert complete(f'{CLASS}self.model.named_par') == ['named_parameters']


def test_def_offers_the_events() -> None:
    code = 'class Mine(Callback):\n    def before_b'
    assert complete(code) == ['before_backward', 'before_batch']


def test_declarations_are_for_editors_alone() -> None:
    assert not {'x', 'loss', 'model', 'before_batch'} & {*vars(Callback), *Callback.__annotations__}
    assert not hasattr(Callback(), 'loss')


def documented(comment: str = 'it') -> Any:
    def f(
        a: int = 1,  # the first
        b: int = 2,  # the second
    ) -> int:  # their sum
        "Add two numbers."
        return a + b

    f.__module__ = 'learnkit.made_up'
    return f


def test_parameters_are_added_once() -> None:
    f = documented()
    for _ in range(2):
        add_parameters(f)
        assert f.__doc__ == (
            'Add two numbers.\n\nParameters\n----------\na\n    the first\nb\n    the second\nreturns\n    their sum'
        )


def test_other_objects_are_left_alone() -> None:
    before = SimpleNamespace.__doc__
    for obj in (SimpleNamespace, len, 3, 'text', jedi.Script, lambda: None):
        add_parameters(obj)
    assert SimpleNamespace.__doc__ == before


class Events:
    "The events of a shell."

    def __init__(self) -> None:
        self.functions: list[Any] = []

    def register(self, event: str, function: Any) -> None:
        assert event == 'post_run_cell'
        self.functions.append(function)

    def unregister(self, event: str, function: Any) -> None:
        self.functions.remove(function)


def test_the_help_of_a_shell_has_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    inspector = pytest.importorskip('IPython.core.oinspect').Inspector(theme_name='nocolor')
    before = Learner.fit_until.__doc__
    monkeypatch.setattr(Learner.fit_until, '__doc__', before)  # restored at the end
    warmed: list[bool] = []
    monkeypatch.setattr('learnkit.debug.notebook.warm_up_jedi', lambda: warmed.append(True))
    shell = SimpleNamespace(
        inspector=inspector, events=Events(), Completer=SimpleNamespace(use_jedi=True)
    )
    for _ in range(2):
        prepare_shell(shell)
    docstring = inspector.info(Learner.fit_until)['docstring']
    assert 'total\n    total training of this Learner: epochs, or any other unit' in docstring
    assert docstring.count('Parameters\n') == 1
    assert doc(Learner.fit_until).text == inspect.cleandoc(before or '')

    (function,) = shell.events.functions
    function(None)
    assert warmed == [True] and shell.events.functions == []


def test_a_shell_of_another_kind_is_left_alone() -> None:
    prepare_shell(SimpleNamespace())


def test_jedi_is_warmed_up() -> None:
    warm_up_jedi()
