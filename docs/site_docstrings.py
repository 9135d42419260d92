"""Convert docstrings and the comments in signatures for the pages of the API.

Docstrings are plain text: `code` in single backticks, indented code, lists, examples. The comments of a signature
become a table of the parameters. A callback's page says at which events it runs."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

from fastcore.docments import docments
from site_api import is_described

from learnkit import Callback
from learnkit.engine.events import EVENTS

CODE = re.compile(r'(?<!`)`([^`]+)`(?!`)(\w?)')
EMPHASIS = re.compile(r'(?<![\w*(])(\*{1,2})(?=\w)([^*`]+)(?<=[\w.!])\1(?![\w*])')
LIST = re.compile(r'\s*(- |\d+\. )')


def marked_up(text: str) -> str:
    "Return a text with `code` and *stress* as reStructuredText, with every other character of markup escaped."

    def plain(part: str) -> str:
        return re.sub(r'([*|\\])|(?<=\w)_(?!\w)', lambda m: '\\' + m[0], part)

    def words(part: str) -> str:
        pieces = []
        last = 0
        for m in EMPHASIS.finditer(part):
            pieces += [plain(part[last : m.start()]), m[0]]
            last = m.end()
        return ''.join([*pieces, plain(part[last:])])

    pieces = []
    last = 0
    for m in CODE.finditer(text):
        code = ' '.join(m[1].split())
        pieces += [words(text[last : m.start()]), f'``{code}``', f'\\ {m[2]}' if m[2] else '']
        last = m.end()
    return ''.join([*pieces, words(text[last:])])


def as_rst(doc: str) -> list[list[str]]:
    "Return the paragraphs of a docstring as reStructuredText, each as lines; at least one."
    blocks: list[list[str]] = []
    for block in re.split(r'\n\s*\n', doc.strip('\n')):
        if block.lstrip().startswith('>>>'):
            text = block
        elif block.startswith('    ') and not LIST.match(block):
            text = '.. code-block:: python\n\n' + block
        else:
            text = re.sub(r'(?m)(?<=[^\n])\n(?=- )', '\n\n', marked_up(block))
        blocks.append([*text.split('\n'), ''])
    return blocks


def comments(value: Any) -> dict[str, str]:
    "Return the comments in a signature by parameter; 'return' is the comment of the returned value."
    made = value.__dict__.get('__init__') if isinstance(value, type) else None
    # not by `dataclass`
    written = inspect.isfunction(made) and made.__code__.co_filename != '<string>'
    try:
        found = docments(made if written else value) if callable(value) else {}
    except (OSError, TypeError, SyntaxError, ValueError, AttributeError):
        return {}  # there is no source to read
    # of a constructor on one line, the comment is about its one parameter
    if written and found.get('return'):
        *_, last = (name for name in found if name != 'return')
        found[last] = found.pop('return')
    return {name: ' '.join(text.split()) for name, text in found.items() if text}


def parameters(value: Any) -> list[str]:
    "Return the lines of a table: the parameters that have comments, and what these say."
    if not (told := comments(value)):
        return []
    lines = ['.. list-table::', '   :class: parameters', '']
    for name, text in told.items():
        shown = '*returns*' if name == 'return' else f'``{name}``'
        lines += [f'   * - {shown}', f'     - {marked_up(text)}']
    return [*lines, '']


def handled(cls: type[Callback]) -> list[str]:
    "Return the lines with the events at which a callback runs, and its order."
    events = [event for event in EVENTS if inspect.isfunction(getattr(cls, event, None))]
    if not events:
        return []
    off = [
        where
        for runs, where in ((cls.run_train, 'training'), (cls.run_valid, 'evaluation'))
        if not runs
    ]
    tail = ''.join(
        f'; {text}' for text in [f'order {cls.order}', *(f'not in {where}' for where in off)]
    )
    return [f'Runs at {", ".join(f"``{event}``" for event in events)}{tail}.', '']


def inherited(cls: type) -> list[str]:
    "Return the lines of a table of the base classes in the package, with the members inherited from each."
    rows = []
    seen = set(vars(cls))
    for base in cls.__mro__[1:]:
        if base is Callback or not is_described(base):
            continue
        where = f'{base.__module__}.{base.__name__}'
        names = [
            name for name, value in vars(base).items() if name not in seen and is_told(name, value)
        ]
        seen.update(names)
        links = ', '.join(f':py:obj:`{name} <{where}.{name}>`' for name in names)
        if names:
            rows += [f'   * - :py:obj:`{base.__name__} <{where}>`', f'     - {links}']
    return (
        ['Also has, from', '', '.. list-table::', '   :class: names', '', *rows, ''] if rows else []
    )


def is_told(name: str, value: Any) -> bool:
    "Return True if a member of a class is on the page of the class."
    return (
        not name.startswith('_')
        and bool(getattr(value, '__doc__', None))
        and (inspect.isroutine(value) or isinstance(value, property | classmethod | staticmethod))
    )


def remark(module: str, name: str) -> list[str]:
    "Return the comment at the end of the line that assigns a name of a module."
    source = inspect.getsource(import_module(module))
    match = re.search(rf'^{name}\b[^#\n]*#\s*(.+)$', source, re.M)
    return [marked_up(match[1]), ''] if match else []


def describe(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    "Replace a docstring by its lines for the site."
    if what == 'data':
        lines[:] = remark(*name.rsplit('.', 1))
        return
    first, *more = as_rst('\n'.join(lines))
    lines[:] = [*first, *parameters(value), *(line for block in more for line in block)]
    if isinstance(value, type):
        lines += [*(handled(value) if issubclass(value, Callback) else []), *inherited(value)]


def show_signature(
    app: Any,
    what: str,
    name: str,
    value: Any,
    options: Any,
    signature: str | None,
    returned: str | None,
) -> tuple[str, str] | None:
    "Write `Callable[..., Any]` as it is written."
    if signature is None:
        return None
    return signature.replace('[[...], ', '[..., '), (returned or '').replace('[[...], ', '[..., ')


def show_bases(app: Any, name: str, value: type, options: Any, bases: list[type]) -> None:
    "Name the public base of a class in place of a private one."

    def public_one(base: Any) -> Any:
        return next(
            one for one in getattr(base, '__mro__', (base,)) if not one.__name__.startswith('_')
        )

    bases[:] = [public_one(base) for base in bases]


def setup(app: Any) -> dict[str, bool]:
    "Connect the functions of this module to the events of Sphinx."
    # The keywords of all events are for editors; Sphinx reads the options from the source.
    vars(Callback.__init__).pop('__signature__', None)
    app.connect('autodoc-process-docstring', describe)
    app.connect('autodoc-process-bases', show_bases)
    app.connect('autodoc-process-signature', show_signature)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
