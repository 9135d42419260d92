"""What an editor and a notebook offer: completion in a callback that is being typed, and parameters in the help."""

from pathlib import Path

import pytest

import learnkit
from learnkit.debug.notebook import add_parameters
from learnkit.engine.events import EVENTS
from tests.helpers.fresh import output_of
from tests.helpers.libraries import require

jedi = require('jedi')

CLASS = 'class Mine(Callback):\n    def before_batch(self):\n        '


def complete(code: str) -> list[str]:
    "Return what Tab offers at the end of a notebook's cell."
    return [
        found.name for found in jedi.Interpreter(code, [{'Callback': learnkit.Callback}]).complete()
    ]


def test_self_offers_the_state_of_the_loop() -> None:
    offered = set(complete(f'{CLASS}self.'))
    assert offered >= set(
        'x y xb yb pred loss loss_grad epoch n_epoch iter n_iter train_iter pct_train training model opt dls '
        'learn recorder history'.split()
    )
    missing = set(EVENTS) - offered
    assert not missing, 'declare these events in the class body of Callback'
    assert complete(f'{CLASS}self.model.named_par') == ['named_parameters']


def documented(
    a: int = 1,  # the first
    b: int = 2,  # the second
) -> int:  # their sum
    "Add two numbers."
    return a + b


def test_help_has_the_comments_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert add_parameters(documented, 'Add.') == 'Add.'  # no function of the package
    monkeypatch.setattr(documented, '__module__', 'learnkit.made_up')
    assert add_parameters(documented, 'Add.') == (
        'Add.\n\nParameters\n----------\na\n    the first\nb\n    the second\nreturn\n    their sum'
    )


SHELL = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell()
had_jedi = 'jedi' in sys.modules
shell.run_cell('import learnkit; from learnkit import Learner').raise_error()
print('info' in vars(shell.inspector), ('jedi' in sys.modules) != had_jedi)
shell.run_cell('%load_ext learnkit').raise_error()
print('info' in vars(shell.inspector))
print(shell.inspector.info(shell.user_ns['Learner'].fit_until)['docstring'])
"""


def test_the_import_changes_nothing_in_a_shell_and_the_extension_adds_the_comments(
    tmp_path: Path,
) -> None:
    pytest.importorskip('IPython')
    lines = output_of(SHELL, cwd=tmp_path).splitlines()
    assert lines[:2] == ['False False', 'True']
    assert lines[lines.index('total') + 1].startswith('    total training of this Learner: epochs')
