"""What the pages of the API hold: one page a module, with every public name where it is defined."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import learnkit
import learnkit.all

PACKAGES = (
    'learner data callbacks metrics losses optim loggers engine checkpoint distributed inference interop debug '
    'core testing demo all'
).split()
LONGEST_VALUE = 300  # characters of a constant's value that are shown

INDEX = """
API
===

What is imported from where: ``from learnkit import Learner`` for the names of the table below,
``from learnkit.all import *`` for everything that a notebook needs, and every name from its own module.

.. toctree::
   :hidden:

   {modules}

{table}

The names of ``learnkit``
-------------------------

{names}
"""


@cache
def modules() -> tuple[str, ...]:
    "The full name of every module of the package."
    found = sorted(m.name for m in walk_packages(learnkit.__path__, 'learnkit.'))
    return 'learnkit', *(name for name in found if not name.endswith('.__main__'))


def public(module: str) -> list[str]:
    return list(getattr(import_module(module), '__all__', ()))


def get(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


@cache
def assigned(module: str) -> frozenset[str]:
    "The names that a module's own top-level statements give: classes, functions, values."
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
    "The modules that define and export something of a name."
    found: dict[str, list[str]] = {}
    for module in modules():
        for name in public(module):
            if name in assigned(module):
                found.setdefault(name, []).append(module)
    return found


def home(module: str, name: str) -> str | None:
    "The module that defines what `module` calls `name`; None for what comes from another project."
    same = [other for other in homes().get(name, ()) if get(other, name) is get(module, name)]
    return same[0] if same else None


def summary(value: Any) -> str:
    "The first sentence about a module, a class or a function, as one line."
    if not (callable(value) or inspect.ismodule(value)):
        return ''
    return (
        ' '.join((inspect.getdoc(value) or '').split('\n\n')[0].split())
        .replace('`', '``')
        .split('. ')[0]
    )


def table(module: str, names: list[str]) -> str:
    "A table of names, each with a link to where it is defined, and its first sentence."
    rows = ['.. list-table::', '   :class: names', '']
    for name in names:
        where = home(module, name)
        shown = f':py:obj:`{name} <{where}.{name}>`' if where else f'``{name}``'
        rows += [f'   * - {shown}', f'     - {summary(get(module, name)) if where else ""}']
    return '\n'.join(rows)


def directive(module: str, name: str) -> str:
    "What tells Sphinx to describe one name."
    value = get(module, name)
    if isinstance(value, type):
        kind = 'exception' if issubclass(value, BaseException) else 'class'
        return f'.. auto{kind}:: {module}.{name}\n   :members:\n'
    if inspect.isfunction(value):
        return f'.. autofunction:: {module}.{name}\n'
    return f'.. autodata:: {module}.{name}\n' + (
        '   :no-value:\n' if len(repr(value)) > LONGEST_VALUE else ''
    )


def below(package: str) -> list[str]:
    "The modules of a package that is not the whole one."
    return [name for name in modules() if name.startswith(f'{package}.') and package != 'learnkit']


def entries(names: list[str]) -> str:
    "The lines of a table of contents: modules by the last part of their names."
    return '\n   '.join(f'{name.rpartition(".")[2]} <{name}>' for name in names)


def module_table(names: list[str]) -> str:
    "A table of modules, each with its first sentence."
    rows = (f'   * - :py:mod:`{name}`\n     - {summary(import_module(name))}' for name in names)
    return '\n'.join(['.. list-table::', '   :class: names', '', *rows])


def module_page(module: str) -> str:
    "Return the page of a module."
    here = [name for name in public(module) if name in assigned(module)]
    others = [name for name in public(module) if name not in here]
    parts = [f'{module}\n{"=" * len(module)}', f'.. automodule:: {module}']
    if inner := below(module):
        parts += ['.. toctree::\n   :hidden:\n\n   ' + entries(inner), module_table(inner)]
    parts += [directive(module, name) for name in here]
    if others:
        parts += ['.. rubric:: To be imported from here, too', table(module, others)]
    return '\n\n'.join(parts) + '\n'


def index_page() -> str:
    "Return the first page of the API."
    names = sorted(public('learnkit'), key=str.lower)
    packages = [f'learnkit.{name}' for name in PACKAGES]
    return INDEX.format(
        modules=entries(packages), table=module_table(packages), names=table('learnkit', names)
    )
