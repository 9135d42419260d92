"""Help and completion in IPython and Jupyter: comments of parameters in the help, and a fast first completion."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ['add_parameters', 'prepare_shell', 'warm_up_jedi']

# completing this code makes jedi parse the modules of the Learner and of callbacks
_FIRST_CODE = (
    'from learnkit import Learner\nlearn: Learner\nlearn.',
    'from learnkit import Callback\nclass C(Callback):\n    def before_fit(self):\n        self.',
)


def prepare_shell(
    shell: Any,  # IPython's shell
) -> None:
    """Add the comments of parameters to the help of `?` and Shift-Tab, and call `warm_up_jedi` after the next cell.

    Further calls for the same shell have no effect. `import learnkit` calls this function in IPython.
    """
    inspector = getattr(shell, 'inspector', None)
    events = getattr(shell, 'events', None)
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
    obj: Any,  # function, method or class of the package; other objects are not changed
) -> None:
    "Append the comments of the parameters to the docstring, unless it has them already."
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
    "Complete typical first lines of code, so that jedi has parsed the modules of the package."
    if find_spec('jedi') is not None:
        for code in _FIRST_CODE:
            import_module('jedi').Script(code).complete()
