"""Load the classes of `wild_sources` from copies of their repositories.

A copy lies in `FOLDER/<owner>+<name>/<path>`, as `python -m tests.peers wild --sources FOLDER` reads it. A file is run
without its package: its imports of other files of the copy are followed, and what is not installed stays undefined."""

from __future__ import annotations
import __future__

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCES = 'LEARNKIT_PEERS_SOURCES'  # environment variable with the folder
# statements of a module that define something; others, for example a training, are not run
DEFINITIONS = (
    ast.Assign,
    ast.AnnAssign,
    ast.ClassDef,
    ast.FunctionDef,
    ast.If,
    ast.Import,
    ast.ImportFrom,
    ast.Try,
    ast.With,
)


class Files:
    "Names that the files of one repository define."

    def __init__(
        self,
        repository: str,  # owner/name
        names: dict[str, Any],  # what each file sees, beside what it imports
    ) -> None:
        self.folder = Path(os.environ[SOURCES]) / repository.replace('/', '+')
        self.names = names
        self.loaded: dict[Path, dict[str, Any]] = {}

    def load(self, path: str) -> SimpleNamespace:
        "Return the names of a file."
        return SimpleNamespace(**self._run(self.folder / path))

    def _run(self, file: Path) -> dict[str, Any]:
        if file in self.loaded:
            return self.loaded[file]
        names = self.loaded[file] = {**self.names, '__name__': file.stem, '__file__': str(file)}
        for statement in ast.parse(file.read_text('utf-8')).body:
            if not isinstance(statement, DEFINITIONS) and not makes_class(statement):
                continue
            try:
                self._run_statement(statement, names, file)
            except Exception as error:  # for example a package that is not installed
                for name in defined_names(statement):
                    names.setdefault(name, Missing(f'{file.name}: {error!r}'))
        return names

    def _run_statement(self, statement: ast.stmt, names: dict[str, Any], file: Path) -> None:
        other = self._find_import(statement, file)
        if other is not None:
            found = self._run(other)
            for alias in statement.names:  # type: ignore[attr-defined]
                if alias.name == '*':
                    names.update({k: v for k, v in found.items() if not k.startswith('_')})
                elif alias.name in found:
                    names[alias.asname or alias.name] = found[alias.name]
            return
        module = ast.Module([statement], [])
        # annotations stay strings: they may name what is not installed
        flags = __future__.annotations.compiler_flag
        exec(compile(module, str(file), 'exec', flags, dont_inherit=True), names)

    def _find_import(self, statement: ast.stmt, file: Path) -> Path | None:
        "Return the file of the copy from which a statement imports."
        if not isinstance(statement, ast.ImportFrom):
            return None
        parts = statement.module.split('.') if statement.module else []
        if not statement.level and parts[0] in sys.modules:
            return None  # Composer's repository imports the Composer that is installed
        roots = [file.parents[statement.level - 1]] if statement.level else self._roots()
        places = [root.joinpath(*parts) for root in roots]
        candidates = [
            path for place in places for path in (place.with_suffix('.py'), place / '__init__.py')
        ]
        return next((path for path in candidates if path.is_file()), None)

    def _roots(self) -> Iterator[Path]:
        yield self.folder
        yield self.folder / 'src'


class Missing:
    "What a file could not define: it raises an error when it is used."

    def __init__(self, why: str) -> None:
        self.why = why

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ImportError(self.why)


def makes_class(statement: ast.stmt) -> bool:
    "Return True for a call of fastcore's `mk_class`, which defines a class in the module that calls it."
    return ast.unparse(statement).startswith('mk_class(')


def defined_names(statement: ast.stmt) -> Iterator[str]:
    "Yield the classes and functions that a statement would have defined."
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
        yield statement.name


def replace_names(cls: type, **names: Any) -> Any:
    "Replace names in the file of a class, for example of a package that is not installed; return the class."
    functions = (value for value in vars(cls).values() if hasattr(value, '__globals__'))
    next(functions).__globals__.update(names)
    return cls
