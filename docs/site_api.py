"""Generate the pages of the API: one page for each task, with every public name described once."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

from site_tasks import LEARNER_PAGES, PUBLIC_MODULES, TASKS, LearnerPage, Task

import learnkit
import learnkit.all

LEARNER = 'learnkit.learner.Learner'
LONGEST_VALUE = 300  # characters of a constant's value that are shown

INDEX = """
API
===

``from learnkit.all import *`` imports everything that a notebook needs. In a program, import each name from its
package: ``from learnkit import Learner, Callback``, ``from learnkit.metrics import F1Score``.

.. toctree::
   :hidden:

   {pages}

{table}

The names of ``learnkit``
-------------------------

{names}
"""


LEARNER_CONTENTS = """
.. toctree::
   :hidden:

   {pages}

{tables}
"""


@cache
def modules() -> tuple[str, ...]:
    "Return the full name of every module of the package."
    found = sorted(m.name for m in walk_packages(learnkit.__path__, 'learnkit.'))
    return 'learnkit', *(name for name in found if not name.endswith('.__main__'))


def public(module: str) -> list[str]:
    "Return the names in `__all__`, or else those that a module defines without an underscore."
    own = [name for name in sorted(assigned(module)) if not name.startswith('_')]
    return list(getattr(import_module(module), '__all__', own))


def get(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


@cache
def assigned(module: str) -> frozenset[str]:
    "Return the names that a module defines at its top level: classes, functions, values."
    names = set()
    for node in ast.parse(Path(import_module(module).__file__ or '').read_text('utf-8')).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        names |= {
            part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)
        }
    return frozenset(names)


@cache
def homes() -> dict[str, list[str]]:
    "Return the modules that define and export a name."
    found: dict[str, list[str]] = {}
    for module in modules():
        for name in public(module):
            if name in assigned(module):
                found.setdefault(name, []).append(module)
    return found


def home(module: str, name: str) -> str | None:
    "Return the module that defines `name` of `module`, or None if another project defines it."
    same = [other for other in homes().get(name, ()) if get(other, name) is get(module, name)]
    return same[0] if same else None


def summary(value: Any) -> str:
    "Return the first sentence of the docstring of a module, class, function or property, as one line."
    if not (callable(value) or inspect.ismodule(value) or isinstance(value, property)):
        return ''
    return (
        ' '.join((inspect.getdoc(value) or '').split('\n\n')[0].split())
        .replace('`', '``')
        .split('. ')[0]
        .removesuffix('.')
    )


def table(names: list[tuple[str, str | None]]) -> str:
    "Return a table of names and the modules that define them: each with a link and its first sentence."
    rows = []
    for name, module in names:
        shown = f':py:obj:`{name} <{module}.{name}>`' if module else f'``{name}``'
        rows.append((shown, summary(get(module, name)) if module else ''))
    return table_of_rows(rows)


def table_of_rows(rows: list[tuple[str, str]]) -> str:
    "Return a table of two columns."
    lines = [f'   * - {left}\n     - {right}' for left, right in rows]
    return '\n'.join(['.. list-table::', '   :class: names', '', *lines])


def heading(title: str, underline: str = '=') -> str:
    return f'{title}\n{underline * len(title)}'


def inherited_members(cls: type) -> str:
    """Return the option that describes members of base classes without a description as the class's members.

    Sphinx leaves out the named classes, which have a description or are not learnkit's, and their bases."""
    bases = cls.__mro__[1:]
    left_out = [base for base in bases if is_described(base) or not is_own(base)]
    n_included = bases.index(left_out[0])
    names = ', '.join(base.__name__ for base in left_out)
    return f'   :inherited-members: {names}\n' if n_included else ''


def is_own(cls: type) -> bool:
    "Return True if a class is learnkit's."
    return cls.__module__.partition('.')[0] == 'learnkit'


def is_described(cls: type) -> bool:
    "Return True if a page of the API describes a class."
    return f'{cls.__module__}.{cls.__name__}' in page_of()


def directive(module: str, name: str) -> str:
    "Return the directive that describes one name."
    value = get(module, name)
    if value is learnkit.Learner:
        return f'.. autoclass:: {LEARNER}\n'
    if isinstance(value, type):
        kind = 'exception' if issubclass(value, BaseException) else 'class'
        return f'.. auto{kind}:: {module}.{name}\n   :members:\n{inherited_members(value)}'
    if inspect.isfunction(value):
        return f'.. autofunction:: {module}.{name}\n'
    return f'.. autodata:: {module}.{name}\n' + (
        '   :no-value:\n' if len(repr(value)) > LONGEST_VALUE else ''
    )


def described(task: Task) -> list[tuple[str, str]]:
    "Return the modules and names that a page describes, in the order of the page."
    return [
        (module, name)
        for module in (f'learnkit.{short}' for short in task.modules)
        for name in public(module)
        if name in assigned(module) and id(get(module, name)) in public_values()
    ]


@cache
def public_values() -> frozenset[int]:
    "Return the identity of every value that users import by a name."
    return frozenset(id(get(module, name)) for module in PUBLIC_MODULES for name in public(module))


@cache
def page_of() -> dict[str, str]:
    "Return the page that describes each public name, by the full name."
    return {f'{module}.{name}': task.slug for task in TASKS for module, name in described(task)}


def task_page(task: Task) -> str:
    "Return the page of a task."
    found = described(task)
    parts = [heading(task.title), task.intro]
    if len(found) > 3:
        parts.append(table([(name, module) for module, name in found]))
    parts += [directive(module, name) for module, name in found]
    if task.slug == 'learner':
        parts.append(learner_contents())
    return '\n\n'.join(parts) + '\n'


def members_table(page: LearnerPage) -> str:
    "Return a table of the members on a page: each with a link and its first sentence."
    return table_of_rows(
        [
            (f':py:obj:`{name} <{LEARNER}.{name}>`', summary(getattr(learnkit.Learner, name)))
            for name in page.members
        ]
    )


def learner_contents() -> str:
    "Return the contents of the pages about the Learner."
    tables = []
    for page in LEARNER_PAGES:
        tables += [f':doc:`{page.title} <{page.slug}>`', page.intro, members_table(page)]
    pages = '\n   '.join(page.slug for page in LEARNER_PAGES)
    return LEARNER_CONTENTS.format(pages=pages, tables='\n\n'.join(tables))


def learner_page(page: LearnerPage) -> str:
    "Return a page about the Learner, with the members for one task."
    parts = [heading(page.title), page.intro, members_table(page)]
    for name in page.members:
        is_property = isinstance(getattr(learnkit.Learner, name), property)
        kind = 'autoproperty' if is_property else 'automethod'
        parts.append(f'.. {kind}:: {LEARNER}.{name}\n')
    return '\n\n'.join(parts) + '\n'


def index_page() -> str:
    "Return the first page of the API."
    names = sorted(public('learnkit'), key=str.lower)
    rows = [(f':doc:`{task.title} <{task.slug}>`', task.intro) for task in TASKS]
    return INDEX.format(
        pages='\n   '.join(task.slug for task in TASKS),
        table=table_of_rows(rows),
        names=table([(name, home('learnkit', name)) for name in names]),
    )
