"""Print figures of the package's structure: how many files a batch passes, how dense the code is.

python -m tests.house               # this working tree
python -m tests.house FOLDER ...    # several, for example a checkout of an older commit too

`tests/project/test_house.py` fails if a figure gets worse. Times are measured by
`python -m benchmarks.imports` (the import) and `python -m benchmarks` (a step, an idle callback, a handler).
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef, ast.Module)
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}

# what is measured, and the goal: at most this; None: no goal
GOALS: dict[str, float | None] = {
    'classes that the Learner inherits from': 2,
    'files from fit() to the first step': 14,
    'functions from fit() to the first step': 90,
    'files entered in a steady training batch': 7,
    'functions entered in a steady training batch': None,
    'entries at the top of the package': 16,
    'modules': 100,
    'syntax nodes': 175_000,
    'syntax nodes of a code line': 8,
    'learn._private in the package': 20,
    'learn: Any': 0,
    'files that only a mid-epoch resume enters': 9,
    'modules in an import cycle': 0,
    'lines of tests': 45_000,
}

# Runs in a fresh process, in the folder that is measured; prints JSON.
PROBE = """
import json, sys, tempfile, warnings
warnings.simplefilter('ignore')
import torch
torch.set_num_threads(1)
import learnkit
from learnkit import Callback, Learner
OWN = learnkit.__path__[0]
from learnkit.testing import synth_learner

class Entered:
    "Count the files and functions of the package that are entered."
    def __init__(self):
        self.codes = set()
    def __call__(self, frame, event, argument):
        code = frame.f_code
        # comprehensions are no functions any more from Python 3.12 on; the model is the user's
        is_function = code.co_name not in ('<listcomp>', '<setcomp>', '<dictcomp>', '<genexpr>')
        if event == 'call' and is_function and OWN in code.co_filename and '/testing' not in code.co_filename:
            self.codes.add((code.co_filename, code.co_firstlineno))
    def files(self):
        return len({file for file, _ in self.codes})

class Stop(Exception):
    pass

to_step, batch, at_resume = Entered(), Entered(), Entered()

def first_step(cb):
    sys.setprofile(None)
    raise Stop

learn = synth_learner(cbs=Callback(after_step=first_step))
with learn.no_bar():
    sys.setprofile(to_step)
    try: learn.fit(1)
    except Stop: pass
    finally: sys.setprofile(None)

def begin(cb):
    if cb.learn.train_iter == 5: sys.setprofile(batch)
    if cb.learn.train_iter == 6: sys.setprofile(None)

learn = synth_learner(cbs=Callback(before_draw=begin))
with learn.no_bar(): learn.fit(1)
sys.setprofile(None)

def leave(cb):
    if cb.train_iter == 14: raise Stop

from learnkit import Checkpoint
with tempfile.TemporaryDirectory() as folder:
    learn = synth_learner(cbs=[Checkpoint(every='1ba'), Callback(after_batch=leave)], path=folder)
    try:
        with learn.no_bar(): learn.fit(2)
    except Stop: pass
    del learn
    plain, learn = Entered(), synth_learner()
    with learn.no_bar():
        sys.setprofile(plain)
        learn.fit(1)
        sys.setprofile(None)
    learn = synth_learner(path=folder)  # without a Checkpoint, which would write files too
    with learn.no_bar():
        sys.setprofile(at_resume)
        learn.fit(2, resume=True)
        sys.setprofile(None)
only_resume = {file for file, _ in at_resume.codes} - {file for file, _ in plain.codes}
print(json.dumps({
    'classes': len(Learner.__mro__) - 2,
    'files to step': to_step.files(), 'functions to step': len(to_step.codes),
    'files of a batch': batch.files(), 'functions of a batch': len(batch.codes),
    'files of a resume': len(only_resume),
}))
"""


def sources(package: Path) -> Iterator[str]:
    "Yield the source of every module of a package."
    for path in sorted(package.rglob('*.py')):
        yield path.read_text('utf-8')


def without_annotations(tree: ast.AST) -> ast.AST:
    "Remove annotations and docstrings from a syntax tree, in place."
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(0)
        if isinstance(node, SCOPES) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return tree


def node_count(package: Path) -> int:
    "Return the number of syntax nodes of a package, without annotations and docstrings."
    trees = [without_annotations(ast.parse(source)) for source in sources(package)]
    return sum(len(list(ast.walk(tree))) for tree in trees)


def code_line_count(package: Path) -> int:
    "Return the number of lines that hold code: no blank lines, comments and docstrings."
    return sum(len(code_lines(source)) for source in sources(package))


def code_lines(source: str) -> set[int]:
    "Return the numbers of the lines of a module that hold code."
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, SCOPES) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return lines


def private_access_count(package: Path) -> int:
    "Return how often modules read or set `learn._private`, beside the modules of the Learner itself."
    own = re.compile(r'\blearn(?:er)?\._[a-z]\w*')
    return sum(len(own.findall(source)) for source in sources(package))


def untyped_learner_count(package: Path) -> int:
    "Return how often a Learner is annotated as `Any`."
    return sum(len(re.findall(r'\blearn: Any\b', source)) for source in sources(package))


def module_name(path: Path, package: Path) -> str:
    "Return the dotted name of a module."
    parts = path.relative_to(package.parent).with_suffix('').parts
    return '.'.join(part for part in parts if part != '__init__')


def imported_modules(tree: ast.AST, known: set[str]) -> set[str]:
    "Return the modules of the package that any import in a module names, in functions as well."
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f'{node.module}.{alias.name}' for alias in node.names} & known
            found |= submodules or {node.module}
    return found & known


def cycle_count(package: Path) -> int:
    "Return how many modules stand in an import cycle, lazy imports and those for type checkers counted."
    paths = {module_name(path, package): path for path in package.rglob('*.py')}
    trees = {name: ast.parse(path.read_text('utf-8')) for name, path in paths.items()}
    graph = {name: imported_modules(tree, set(paths)) - {name} for name, tree in trees.items()}
    reach = {name: reachable(name, graph) for name in graph}
    return sum(name in reach[name] for name in graph)


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    "Return every module that a module's imports lead to."
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def entry_count(package: Path) -> int:
    "Return the number of files and folders at the top of the package."
    hidden = ('.', '__pycache__')
    return sum(not entry.name.startswith(hidden) for entry in package.iterdir())


def test_line_count(root: Path) -> int:
    "Return the number of lines of the tests."
    return sum(path.read_text('utf-8').count('\n') for path in (root / 'tests').rglob('*.py'))


def probe(root: Path) -> dict[str, int]:
    "Run `PROBE` on a working tree."
    env = os.environ | {'PYTHONPATH': str(root), 'MPLBACKEND': 'Agg'}
    done = subprocess.run(
        [sys.executable, '-c', PROBE],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def figures(root: Path) -> dict[str, float]:
    "Return the figures of one working tree, by the names in `GOALS`."
    package = root / 'learnkit'
    run = probe(root)
    nodes, lines = node_count(package), code_line_count(package)
    return {
        'classes that the Learner inherits from': run['classes'],
        'files from fit() to the first step': run['files to step'],
        'functions from fit() to the first step': run['functions to step'],
        'files entered in a steady training batch': run['files of a batch'],
        'functions entered in a steady training batch': run['functions of a batch'],
        'entries at the top of the package': entry_count(package),
        'modules': len(list(package.rglob('*.py'))),
        'syntax nodes': nodes,
        'syntax nodes of a code line': round(nodes / lines, 1),
        'learn._private in the package': private_access_count(package),
        'learn: Any': untyped_learner_count(package),
        'files that only a mid-epoch resume enters': run['files of a resume'],
        'modules in an import cycle': cycle_count(package),
        'lines of tests': test_line_count(root),
    }


def format_figure(value: float | None) -> str:
    "Return a number with thousands separators, right-aligned; an empty cell for None."
    return ('' if value is None else f'{value:,}').rjust(12)


def main(arguments: list[str]) -> None:
    "Print a table with one column a working tree, and a column of goals."
    roots = [Path(argument).resolve() for argument in arguments] or [ROOT]
    columns = [figures(root) for root in roots]
    width = max(map(len, GOALS))
    headers = [root.name[-12:].rjust(12) for root in roots]
    print(' '.join([' ' * width, *headers, 'goal'.rjust(12)]))
    for name, goal in GOALS.items():
        values = [column[name] for column in columns]
        print(' '.join([name.ljust(width), *map(format_figure, [*values, goal])]))


if __name__ == '__main__':
    main(sys.argv[1:])
