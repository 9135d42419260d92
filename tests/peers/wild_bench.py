"""Run classes of public repositories in a learnkit Learner and in their own trainer, and compare.

    python -m tests.peers.wild_bench LIBRARY [CLASS ...]   # in the environment of a library: print rows

`wild_cases.txt` is the table of the classes; `wild_<library>.py` has what they are trained with, and `compare`.
A copy of a repository lies in `FOLDER/<owner>+<name>`, as `python -m tests.peers wild --sources FOLDER` reads it.
A file is run without its package: its imports of other files of the copy are followed, and what is not installed
stays undefined."""

from __future__ import annotations
import __future__

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.peers.rows import Row

SOURCES = 'LEARNKIT_PEERS_SOURCES'  # environment variable with the folder
TABLE = Path(__file__).with_name('wild_cases.txt')
# statements of a module that define something; others, for example a training, are not run
DEFINITIONS = (
    *(ast.Assign, ast.AnnAssign, ast.ClassDef, ast.FunctionDef, ast.If),
    *(ast.Import, ast.ImportFrom, ast.Try, ast.With),
)


@dataclass
class Case:
    "A class of a repository, and what it is trained with."

    library: str
    repository: str  # owner/name
    file: str
    name: str
    call: str  # an expression whose value is a callback, or several
    conditions: list[str]
    behaviors: list[str]
    why: str  # what differs, and why
    options: dict[str, Any] = field(default_factory=dict)  # those of all conditions
    observed: list[str] = field(default_factory=list)  # expressions that are compared after a fit

    def observe(self, names: Mapping[str, Any]) -> dict[str, Any]:
        return {expression: eval(expression, dict(names)) for expression in self.observed}


def read_table(text: str | None = None) -> tuple[dict[str, str], list[Case]]:
    "Return the sentences of the behaviors by name, and the cases, of a text or of the table."
    behaviors, cases = {}, []
    library = repository = file = ''
    for line in join_continued(TABLE.read_text('utf-8') if text is None else text):
        depth, line = len(line) - len(line.lstrip()), line.strip()
        if depth == 2:
            file, _, line = line.partition(' ')
        if depth:
            cases.append(read_case(line, library, repository, file))
        elif ': ' in line:
            name, _, behaviors[name] = line.partition(': ')
        elif line != 'BEHAVIORS':
            library, repository, _ = line.split()
    return behaviors, cases


def join_continued(text: str) -> list[str]:
    "Return the lines without comments, each with the lines that are indented further than a case."
    lines: list[str] = []
    for line in filter(str.strip, text.splitlines()):
        if line.startswith('      '):
            lines[-1] += f' {line.strip()}'
        elif not line.startswith('#'):
            lines.append(line)
    return lines


def read_case(line: str, library: str, repository: str, file: str) -> Case:
    made, conditions, behaviors, why = [*map(str.strip, line.split('|')), '', '', ''][:4]
    named = re.match(r'(.+?) =(?: |$)', made)
    name, call = (named[1], made[named.end() :]) if named else (made.partition('(')[0], made)
    words = [list(filter(None, column.split(', '))) for column in (conditions, behaviors)]
    return Case(library, repository, file, name, call, *words, why)


class Files:
    "Names that the files of one repository define."

    def __init__(
        self,
        repository: str,  # owner/name
        names: Mapping[str, Any],  # what each file sees, beside what it imports
        stand_ins: Mapping[str, Any],  # what replaces names of the files after they are run
    ) -> None:
        self.folder = Path(os.environ[SOURCES]) / repository.replace('/', '+')
        self.names, self.stand_ins = names, stand_ins
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
                if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
                    names.setdefault(statement.name, raising(f'{file.name}: {error!r}'))
        names.update(self.stand_ins)
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
        roots = [self.folder, self.folder / 'src']
        places = [file.parents[statement.level - 1]] if statement.level else roots
        for place in (root.joinpath(*parts) for root in places):
            for path in (place.with_suffix('.py'), place / '__init__.py'):
                if path.is_file():
                    return path
        return None


def makes_class(statement: ast.stmt) -> bool:
    "Return True for a call of fastcore's `mk_class`, which defines a class in the module that calls it."
    return ast.unparse(statement).startswith('mk_class(')


def raising(why: str) -> Callable[..., Any]:
    "Return what takes the place of a name that a file could not define."

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ImportError(why)

    return fail


def run_case(case: Case, setup: Any, files: Files) -> list[Row]:
    "Return the rows of a case, with the names and the conditions of a library's module."
    source = files.load(case.file)
    for condition in case.conditions:
        if condition.isidentifier():
            options = setup.CONDITIONS[condition]
            case.options |= options(source) if callable(options) else options
        else:
            case.observed.append(condition)
    names = {**vars(setup), **vars(source), 'load': lambda path: files.load(path)}

    def make() -> list[Any]:
        made = eval(case.call or '()', names)
        return list(made) if isinstance(made, (list, tuple)) else [made]

    rows: list[Row] = setup.compare(case, make)
    for row in rows:
        row.callback = f'{case.repository}: {row.callback}'
    rows[0].behaviors = case.behaviors
    return rows


def run_cases(cases: list[Case], setup: Any) -> Iterator[Row]:
    "Yield the rows of cases of one library."
    files: dict[str, Files] = {}
    for case in cases:
        if case.repository not in files:
            files[case.repository] = Files(case.repository, setup.NAMES, setup.STAND_INS)
        yield from run_case(case, setup, files[case.repository])


def rows(library: str, names: list[str] | None = None) -> list[Row]:
    "Return the rows of a library, or those of some of its classes."
    cases = [case for case in read_table()[1] if case.library == library]
    chosen = [case for case in cases if not names or case.name in names]
    return list(run_cases(chosen, import_module(f'tests.peers.wild_{library}')))


if __name__ == '__main__':
    for row in rows(sys.argv[1], sys.argv[2:]):
        print(row)
