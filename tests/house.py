"""Print the figures of the package's structure: its size, its depth, and in how many places a fact is written.

python -m tests.house               # before, this working tree, and the goals
python -m tests.house FOLDER ...    # other checkouts, too, for example of an older commit

`BEFORE` is what this command printed of the tree at which the goals were set. It is a report and fails nothing. Times
are measured by `python -m benchmarks.imports` (the import) and `python -m benchmarks` (a step, an idle callback, a
handler).
"""

import ast
import io
import json
import os
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
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

BEFORE = {
    'code lines': 35_255,
    'code lines without interop/': 30_981,
    'fit() to the first step: calls': 388,
    'fit() to the first step: functions': 201,
    'fit() to the first step: files': 41,
    'a steady batch: calls': 56,
    'a steady batch: functions': 41,
    'a steady batch: files': 12,
    'names that features ask a callback for': 34,
    'fields of learn.parts': 25,
    'places that reach through learn.parts': 363,
    'files that reach through learn.parts': 73,
    "places that list the loop's state": 6,
    'lines of tests, without peers and sweeps': 67_472,
    'lines of tests/peers and tests/sweeps': 10_165,
    'callbacks': 6_177,
    'engine': 4_744,
    'interop': 4_274,
    'checkpoint': 3_263,
    'comm': 0,
    'distributed': 2_227,
    'core': 2_443,
    'data': 1_946,
    'metrics': 1_661,
    'debug': 1_848,
    'monitors': 1_331,
    'inference': 1_255,
    'optim': 1_160,
    'loggers': 995,
    'learner': 675,
    'the rest': 1_256,
}

# at most this share of what a fit took before
SHARES = {
    'fit() to the first step: calls': 0.70,
    'fit() to the first step: functions': 0.75,
    'fit() to the first step: files': 0.70,
    'a steady batch: calls': 0.90,
    'a steady batch: functions': 0.90,
    'a steady batch: files': 0.75,
}
# at most this; None: no goal of its own
GOALS = {
    'code lines': None,
    'code lines without interop/': 27_000,
    **{name: round(BEFORE[name] * share) for name, share in SHARES.items()},
    'names that features ask a callback for': 21,
    'fields of learn.parts': 9,
    'places that reach through learn.parts': 150,
    'files that reach through learn.parts': None,
    "places that list the loop's state": 1,
    'lines of tests, without peers and sweeps': 54_000,
    'lines of tests/peers and tests/sweeps': None,
}
# code lines of each package or module
BUDGETS = {
    'callbacks': 5_850,
    'engine': 3_750,
    'interop': 4_150,
    'checkpoint': 2_400,
    'comm': 530,
    'distributed': 1_600,
    'core': 1_900,
    'data': 1_560,
    'metrics': 1_550,
    'debug': 1_380,
    'monitors': 1_440,
    'inference': 1_290,
    'optim': 1_000,
    'loggers': 970,
    'learner': 650,
    'the rest': 880,
}

# functions that ask a callback for an attribute by its name
ASKING = {'declared', 'getattr', 'hasattr', 'notify', 'trait_of'}
CALLBACKS = {'cb', 'callback', 'type(cb)', 'type(callback)'}  # what `getattr` is called with
CONSTANTS = {
    'CONTEXTS',
    'WILL_STEP',
}  # of engine/events.py, the names that the loop itself asks for
# attributes of the loop, and the objects of the engine that have a state; a table that names many of them lists it
STATE = set(
    """batch batch_form dl dl_name epoch iter loader_name loss loss_grad n_epoch n_iter pct_train phase pred
    train_iter training xb yb advice closure counters evaluations lengths loss_weights microbatches modes custom_batch
    positions""".split()
)
MANY = 7

# Runs in a fresh process, in the folder that is measured; prints JSON.
PROBE = """
import json, sys, warnings
from collections import Counter
warnings.simplefilter('ignore')
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
import learnkit
from learnkit import Callback, Learner
OWN = learnkit.__path__[0]

class Calls(Counter):
    "Count the calls of the package's functions; a comprehension belongs to its function."
    def __call__(self, frame, event, argument):
        code = frame.f_code
        if event != 'call' or not code.co_filename.startswith(OWN):
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

def make_learner(cb):
    x = torch.linspace(-1, 1, 160)[:, None]
    dl = DataLoader(TensorDataset(x, 2 * x + 3), batch_size=16, shuffle=True)
    options = {'loss_func': torch.nn.MSELoss(), 'opt_func': torch.optim.SGD, 'lr': 0.01}
    return Learner(dl, torch.nn.Linear(1, 1), cbs=cb, **options)

to_step, batch = Calls(), Calls()
learn = make_learner(StopAtStep())
with learn.no_bar():
    sys.setprofile(to_step)
    try: learn.fit(1)
    except Stop: pass
learn = make_learner(CountOneBatch())
with learn.no_bar(): learn.fit(1)
print(json.dumps({'to step': to_step.totals(), 'batch': batch.totals()}))
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
        counts[name if name in BUDGETS else 'the rest'] += len(code_lines(path.read_text('utf-8')))
    return counts


def asked_names(tree: ast.Module) -> Iterator[str]:
    "Yield the names of attributes that a module asks callbacks for by strings."
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in CONSTANTS:
            values = node.value.values if isinstance(node.value, ast.Dict) else [node.value]
            yield from (ast.literal_eval(value) for value in values)
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func).rpartition('.')[2]
        is_of_callback = function in ('declared', 'notify') or (
            bool(node.args) and ast.unparse(node.args[0]) in CALLBACKS
        )
        if function in ASKING and is_of_callback:
            strings = [arg for arg in node.args[:2] if isinstance(arg, ast.Constant)]
            yield from (arg.value for arg in strings[:1] if isinstance(arg.value, str))


def count_asked_names(package: Path) -> int:
    """Return how many names features ask a callback for, besides what the class `Callback` declares.

    Adapters ask the callbacks of other libraries, which have other names.
    """
    names: set[str] = set()
    for path in package.rglob('*.py'):
        if 'interop' not in path.parts:
            names.update(asked_names(ast.parse(path.read_text('utf-8'))))
    return len({name for name in names - declared_names(package) if not name.startswith('_')})


def declared_names(package: Path) -> set[str]:
    "Return the methods and attributes in the body of the class `Callback`."
    tree = ast.parse((package / 'engine' / 'callback.py').read_text('utf-8'))
    return {*names_of_class(tree, 'Callback'), 'state_key'}


def names_of_class(tree: ast.Module, name: str) -> Iterator[str]:
    for cls in ast.walk(tree):
        if isinstance(cls, ast.ClassDef) and cls.name == name:
            for node in cls.body:
                if isinstance(node, FUNCTIONS):
                    yield node.name
                elif isinstance(node, ast.AnnAssign):
                    yield ast.unparse(node.target)
                elif isinstance(node, ast.Assign):
                    yield from map(ast.unparse, node.targets)


def count_fields_of_parts(package: Path) -> int:
    tree = ast.parse((package / 'engine' / 'parts.py').read_text('utf-8'))
    classes = (
        one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and one.name == 'Parts'
    )
    return sum(isinstance(node, ast.AnnAssign) for cls in classes for node in cls.body)


def count_reaches(package: Path) -> Counter[str]:
    "Return how often each file reads an attribute of `learn.parts`."
    counts: Counter[str] = Counter()
    for path in package.rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text('utf-8'))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                counts[str(path)] += node.value.attr == 'parts'
    return +counts


def listed_names(node: ast.AST) -> set[str]:
    "Return the strings of a table, of a string of words, or the attributes that a function sets."
    if isinstance(node, FUNCTIONS):
        inner = (one for one in ast.walk(node) if isinstance(one, ast.Attribute))
        return {one.attr for one in inner if isinstance(one.ctx, ast.Store)}
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        words = node.value.split()
        return set(words) if all(map(str.isidentifier, words)) else set()
    if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
        elements = node.keys if isinstance(node, ast.Dict) else node.elts
        firsts = [
            one.args[0] if isinstance(one, ast.Call) and one.args else one for one in elements
        ]
        return {str(one.value) for one in firsts if isinstance(one, ast.Constant)}
    return set()


def count_lists_of_state(package: Path) -> int:
    "Return the number of tables and functions of the engine and of checkpoints that list the loop's state."
    paths = [
        path for folder in ('engine', 'checkpoint') for path in (package / folder).glob('*.py')
    ]
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text('utf-8'))))
    return sum(len(listed_names(node) & STATE) >= MANY for node in nodes)


def count_test_lines(root: Path, is_counted: Callable[[str], bool]) -> int:
    "Return the lines of the files in some folders of tests."
    paths = [path.relative_to(root / 'tests') for path in (root / 'tests').rglob('*.py')]
    files = [root / 'tests' / path for path in paths if is_counted(path.parts[0])]
    return sum(path.read_text('utf-8').count('\n') for path in files)


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
    of_package, run, reaches = count_code_lines(package), run_probe(root), count_reaches(package)
    is_apart = {'peers', 'sweeps'}.__contains__
    counted = [
        of_package.total(),
        of_package.total() - of_package['interop'],
        *run['to step'],
        *run['batch'],
        count_asked_names(package),
        count_fields_of_parts(package),
        reaches.total(),
        len(reaches),
        count_lists_of_state(package),
        count_test_lines(root, lambda folder: not is_apart(folder)),
        count_test_lines(root, is_apart),
    ]
    return dict(zip(GOALS, counted, strict=True)) | of_package


def main(folders: list[str]) -> None:
    "Print a table with the figures before, of each checkout, of this working tree, and the goals."
    roots = [*(Path(folder).resolve() for folder in folders), ROOT]
    columns = [BEFORE, *map(measure, roots)]
    headers = ['before', *(root.name[-10:] for root in roots[:-1]), 'now', 'goal']
    width = max(map(len, GOALS))
    print(' ' * width, *(header.rjust(10) for header in headers))
    for name, goal in (GOALS | BUDGETS).items():
        values = [*(column.get(name) for column in columns), goal]
        cells = ['' if value is None else f'{value:,}' for value in values]
        print(name.ljust(width), *(cell.rjust(10) for cell in cells))


if __name__ == '__main__':
    main(sys.argv[1:])
