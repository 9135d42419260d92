"""Help and completion in IPython and Jupyter: parameters in the help of `?`, a first completion without a wait."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ['add_parameters', 'prepare_shell', 'warm_up_jedi']

# what is typed first: completing it once parses the modules of the Learner and of callbacks
_FIRST = (
    'from learnkit import Learner\nlearn: Learner\nlearn.',
    'from learnkit import Callback\nclass C(Callback):\n    def before_fit(self):\n        self.',
)


def prepare_shell(
    shell: Any,  # IPython's shell
) -> None:
    """Let the help of `?` and Shift-Tab have the parameters, and parse the package once after the next cell.

    Both happen once a shell. `import learnkit` calls this function in IPython.
    """
    inspector, events = getattr(shell, 'inspector', None), getattr(shell, 'events', None)
    if inspector is None or events is None or hasattr(inspector, '_learnkit'):
        return
    inspector._learnkit = True
    find_info = inspector.info

    def info(obj: Any, *args: Any, **kwargs: Any) -> Any:
        add_parameters(obj)
        return find_info(obj, *args, **kwargs)

    inspector.info = info
    if not getattr(getattr(shell, 'Completer', None), 'use_jedi', False):
        return

    def warm_up(result: Any = None) -> None:
        events.unregister('post_run_cell', warm_up)
        warm_up_jedi()

    events.register('post_run_cell', warm_up)


def add_parameters(
    obj: Any,  # function, method or class of the package; others are left alone
) -> None:
    "Append the comments of the parameters to the docstring, once."
    obj = getattr(obj, '__func__', obj)
    is_class = isinstance(obj, type)
    if not is_class and not inspect.isfunction(obj):
        return
    from learnkit.debug.doc import PARAMETERS, comments  # rarely needed

    own_doc = obj.__dict__.get('__doc__') if is_class else obj.__doc__
    if not own_doc or PARAMETERS in own_doc or obj.__module__.partition('.')[0] != 'learnkit':
        return
    notes = comments(obj.__dict__.get('__init__') if is_class else obj)
    returned = notes.pop('return', '')
    parameters = [f'{name}\n    {note}' for name, note in notes.items()]
    if returned:
        parameters.append(f'returns\n    {returned}')
    if parameters:
        obj.__doc__ = f'{inspect.cleandoc(own_doc)}{PARAMETERS}' + '\n'.join(parameters)


def warm_up_jedi() -> None:
    "Complete what is typed first, so that jedi has parsed it."
    if find_spec('jedi') is not None:
        for code in _FIRST:
            import_module('jedi').Script(code).complete()
