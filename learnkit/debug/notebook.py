# SPDX-License-Identifier: Apache-2.0
"""`%load_ext learnkit`: comments of parameters in IPython's help."""

from __future__ import annotations

import inspect
from typing import Any

from learnkit.core.model import unwrap_partial


def prepare_shell(
    shell: Any,  # IPython's shell
) -> None:
    "Add the comments of parameters to the help of `?` and Shift-Tab."
    find_info = shell.inspector.info

    def info(obj: Any, *args: Any, **kwargs: Any) -> Any:
        found = find_info(obj, *args, **kwargs)
        found['docstring'] = add_parameters(obj, found.get('docstring'))
        return found

    shell.inspector.info = info


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
