"""Print the figures of the package's structure: its size, its depth and the names that users see.

python -m tests.house               # this working tree, and the goals
python -m tests.house FOLDER ...    # other checkouts first, for example of an older commit

It is a report and fails nothing. Times are measured by `python -m benchmarks.imports` (the import) and
`python -m benchmarks` (a step, an idle callback, a handler).
"""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import tokenize
from collections import Counter
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

# what is measured, and the goal: at most this
GOALS = {
    'fit() to the first step: calls': 250,
    'fit() to the first step: functions': 110,
    'fit() to the first step: files': 16,
    'a steady batch: calls': 44,
    'a steady batch: functions': 34,
    'a steady batch: files': 8,
    'public names of a Learner': 100,
    'public names of a Callback, without its events': 20,
    'files that read frames, code objects or bytecode': 3,
    'private names of torch': 12,
    'lines of tests': 52_000,
    'code lines': 27_000,
    'code lines of engine/loop.py': 200,
}
# code lines of each package or module
BUDGETS = {
    'callbacks + monitors': 7_000,
    'engine': 3_400,
    'core': 2_000,
    'interop': 2_200,
    'checkpoint': 1_700,
    'distributed': 1_900,
    'metrics': 1_500,
    'data': 1_500,
    'inference': 1_200,
    'optim': 1_000,
    'loggers': 950,
    'debug': 700,
    'learner': 650,
    'losses': 330,
    'testing': 250,
    'the rest': 150,
}

READS_FRAMES = set(
    """_getframe currentframe setprofile settrace walk_stack walk_tb dis opcode f_back f_code f_lasti f_locals gi_frame
    tb_frame tb_next __closure__ __code__ co_code co_consts co_filename co_flags co_names co_varnames""".split()
)
# private names of Python, torchmetrics and wrapped callbacks
NOT_OF_TORCH = set(
    """_defaults _exit _exit_function _exitfunc _finalizer_registry _getframe _make _n_calls _parent_pid _reductions
    _registry _run_exitfuncs _shutdown""".split()
)

# Runs in a fresh process, in the folder that is measured; prints JSON.
PROBE = """
import json, sys, warnings
from collections import Counter
warnings.simplefilter('ignore')
import torch
torch.set_num_threads(1)
import learnkit
from learnkit import Callback, Learner
OWN = learnkit.__path__[0]
from learnkit.testing import synth_learner

class Calls(Counter):
    "Count the calls of the package's functions; a comprehension belongs to its function."
    def __call__(self, frame, event, argument):
        code = frame.f_code
        if event != 'call' or not code.co_filename.startswith(OWN) or '/testing' in code.co_filename:
            return
        if code.co_name not in ('<listcomp>', '<setcomp>', '<dictcomp>', '<genexpr>', '<module>'):
            self[code.co_filename, code.co_firstlineno] += 1

    def totals(self):
        return self.total(), len(self), len({file for file, _ in self})

class Stop(Exception):
    pass

class StopAtStep(Callback):
    def after_step(self):
        sys.setprofile(None)
        raise Stop

draws = []

class CountOneBatch(Callback):
    def before_draw(self):
        draws.append(1)
        sys.setprofile(batch if len(draws) == 5 else None)

to_step, batch = Calls(), Calls()
learn = synth_learner(cbs=StopAtStep())
with learn.no_bar():
    sys.setprofile(to_step)
    try: learn.fit(1)
    except Stop: pass
learn = synth_learner(cbs=CountOneBatch())
with learn.no_bar(): learn.fit(1)

annotated = {name for cls in Learner.__mro__ for name in getattr(cls, '__annotations__', ())}
of_learner = annotated | {*dir(Learner)} | {*vars(learn)}
is_public = lambda name: not name.startswith('_')
print(json.dumps({
    'to step': to_step.totals(), 'batch': batch.totals(),
    'Learner': len([*filter(is_public, of_learner)]),
    'Callback': len([*filter(is_public, {*dir(Callback)} - {*learnkit.EVENTS})]),
}))
"""


def code_lines(source: str) -> set[int]:
    "Return the numbers of the lines of a module that hold code: no blank lines, comments and docstrings."
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, SCOPES) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return lines


def count_code_lines(package: Path) -> Counter[str]:
    "Return the code lines of each package and module in `BUDGETS`."
    counts = Counter(dict.fromkeys(BUDGETS, 0))
    for path in package.rglob('*.py'):
        name = path.relative_to(package).with_suffix('').parts[0]
        if name in ('callbacks', 'monitors'):
            name = 'callbacks + monitors'
        counts[name if name in BUDGETS else 'the rest'] += len(code_lines(path.read_text('utf-8')))
    return counts


def parse_modules(package: Path) -> list[ast.Module]:
    return [ast.parse(path.read_text('utf-8')) for path in sorted(package.rglob('*.py'))]


def used_names(tree: ast.Module) -> Iterator[str]:
    "Yield the attributes that a module reads, and the names that it imports."
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported = [getattr(node, 'module', None) or '', *(alias.name for alias in node.names)]
            yield from '.'.join(imported).split('.')


def defined_names(tree: ast.Module) -> Iterator[str]:
    "Yield the names that a module defines: functions, classes, variables and attributes that are set."
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def torch_private_names(trees: list[ast.Module]) -> set[str]:
    "Return the private names that the package uses and does not define, without `NOT_OF_TORCH`."
    used = {name for tree in trees for name in used_names(tree)}
    defined = {name for tree in trees for name in defined_names(tree)}
    private = {name for name in used if name.startswith('_') and not name.startswith('__')}
    return private - (defined - {'_version'}) - NOT_OF_TORCH - {'_'}


def count_test_lines(root: Path) -> int:
    return sum(path.read_text('utf-8').count('\n') for path in (root / 'tests').rglob('*.py'))


def run_probe(root: Path) -> dict:
    "Run `PROBE` on a working tree."
    done = subprocess.run(
        [sys.executable, '-c', PROBE],
        cwd=root,
        env=os.environ | {'PYTHONPATH': str(root), 'MPLBACKEND': 'Agg'},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure(root: Path) -> dict[str, int]:
    "Return the figures of one working tree, by the names in `GOALS` and `BUDGETS`."
    package = root / 'learnkit'
    trees, of_package, run = parse_modules(package), count_code_lines(package), run_probe(root)
    loop = package / 'engine' / 'loop.py'
    counted = [
        *run['to step'],
        *run['batch'],
        run['Learner'],
        run['Callback'],
        sum(not READS_FRAMES.isdisjoint(used_names(tree)) for tree in trees),
        len(torch_private_names(trees)),
        count_test_lines(root),
        of_package.total(),
        len(code_lines(loop.read_text('utf-8'))),
    ]
    return dict(zip(GOALS, counted, strict=True)) | of_package


def main(folders: list[str]) -> None:
    "Print a table with a column for each checkout, this working tree and the goal."
    roots = [*(Path(folder).resolve() for folder in folders), ROOT]
    columns = [measure(root) for root in roots]
    headers = [*(root.name[-10:] for root in roots[:-1]), 'now', 'goal']
    width = max(map(len, GOALS))
    print(' ' * width, *(header.rjust(10) for header in headers))
    for name, goal in (GOALS | BUDGETS).items():
        values = [*(column[name] for column in columns), goal]
        print(name.ljust(width), *(f'{value:10,}' for value in values))


if __name__ == '__main__':
    main(sys.argv[1:])
