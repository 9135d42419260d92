"""`%load_ext learnkit`: comments of parameters in IPython's help, and a fast first completion."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from learnkit.core.model import unwrap_partial

__all__ = ['add_parameters', 'prepare_shell', 'warm_up_jedi']

# completing this code makes jedi parse the modules of the Learner and of callbacks
_FIRST_CODE = (
    'from learnkit import Learner\nlearn: Learner\nlearn.',
    'from learnkit import Callback\nclass C(Callback):\n    def before_fit(self):\n        self.',
)


def prepare_shell(
    shell: Any,  # IPython's shell
) -> None:
    "Add the comments of parameters to the help of `?` and Shift-Tab, and parse the package for completion."
    find_info = shell.inspector.info

    def info(obj: Any, *args: Any, **kwargs: Any) -> Any:
        found = find_info(obj, *args, **kwargs)
        found['docstring'] = add_parameters(obj, found.get('docstring'))
        return found

    shell.inspector.info = info
    if getattr(shell.Completer, 'use_jedi', False):
        warm_up_jedi()


def add_parameters(
    obj: Any,  # any object; only help for functions and classes of the package is changed
    text: str | None,  # its help
) -> str | None:
    "Return the help for an object with the comments of its parameters, which fastcore's `docments` reads."
    is_function = inspect.isroutine(obj) or isinstance(obj, type)
    module = getattr(obj, '__module__', None) or ''
    if not text or not is_function or not module.startswith('learnkit.'):
        return text
    from fastcore.docments import docments  # slow

    try:
        notes = docments(unwrap_partial(obj), args_kwargs=True)
    except (OSError, SyntaxError, TypeError, ValueError):  # no source code, or none that parses
        return text
    lines = [f'{name}\n    {note}' for name, note in notes.items() if note]
    return '\n'.join([text, '', 'Parameters', '----------', *lines]) if lines else text


def warm_up_jedi() -> None:
    "Complete typical first lines of code, so that jedi has parsed the modules of the package."
    if find_spec('jedi') is not None:
        for code in _FIRST_CODE:
            import_module('jedi').Script(code).complete()
