"""Print where statements, docstrings and the layout of tests differ from the rules in the section Style of
CONTRIBUTING.md.

python -m tests.taste

It is a report and fails nothing.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import learnkit
from learnkit import EVENTS, Callback, DataLoaders, Learner, Recorder

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 'learnkit'
TESTS = ROOT / 'tests'
LONGEST = 30  # lines of a function
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# 'Returns' and 'Running' are no imperatives, 'Pass' is one
NO_VERB = re.compile(
    r'(a|an|the|this|that|it|its|one|what|whether|how|if|when|of|for|to|class|callback|function|'
    r'\w+ing|\w*[^s]s)\b',
    re.I,
)
# folders of tests with an order of their own, and tests of many modules
UNMIRRORED = set('browser compat faults golden helpers peers project silent'.split())
INTERPLAY = {
    'callbacks/test_every_callback',
    'callbacks/test_every_callback_resumes',
    'interop/hf/test_trainer',
    'interop/test_peft',
}
UNTESTED = {  # modules without logic
    'checkpoint/test_digest',  # other paths of the functions of `compare`
    'core/test_version',  # a constant, which tests/project compares with settings.ini
    'engine/test_parts',  # fields, each with a class of another module
}


def is_nested(node: ast.AST, kinds: type[ast.AST] | tuple[type[ast.AST], ...]) -> bool:
    "Return True if a node and one inside it are of some kinds."
    inner = (one for one in ast.walk(node) if one is not node)
    return isinstance(node, kinds) and any(isinstance(one, kinds) for one in inner)


def assigns_unrelated_values(node: ast.AST) -> bool:
    "Return True for `a, b = x, y`, except for a swap."
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
        return False
    if not isinstance(node.value, ast.Tuple):
        return False
    targets = {ast.unparse(target) for target in node.targets[0].elts}
    return targets.isdisjoint(ast.unparse(value) for value in node.value.elts)


def check_node(node: ast.AST) -> str | None:
    "Return what is wrong with a statement or a function."
    if is_nested(node, COMPREHENSIONS):
        return 'a comprehension in a comprehension'
    if is_nested(node, ast.IfExp):
        return 'a conditional expression in a conditional expression'
    if assigns_unrelated_values(node):
        return 'unrelated values in one assignment'
    if isinstance(node, FUNCTIONS):
        first = node.body[min(1, len(node.body) - 1)] if ast.get_docstring(node) else node.body[0]
        n_lines = (node.end_lineno or 0) - first.lineno + 1
        if n_lines > LONGEST:
            return f'{node.name} has {n_lines} lines'
    return None


def report_statements() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text('utf-8'))):
            problem = check_node(node)
            if problem:
                yield f'{path.relative_to(ROOT)}:{node.lineno}: {problem}'


def check_docstring(value: Any) -> str | None:
    "Return what is wrong with the docstring of a function or class."
    first = (value.__doc__ or '').strip().partition('\n')[0]
    if not first.endswith('.'):
        return 'the first line of its docstring is no sentence'
    if not inspect.isclass(value) and NO_VERB.match(first):
        return f'its docstring begins with no imperative: {first}'
    return None


def public_functions(cls: type) -> Iterator[tuple[str, Any]]:
    "Yield the methods and properties that a class of the package defines, without its events."
    for name, value in inspect.getmembers_static(cls):
        function = value.fget if isinstance(value, property) else getattr(value, '__func__', value)
        if not inspect.isfunction(function) or name.startswith('_') or name in EVENTS:
            continue
        if function.__module__.startswith('learnkit'):
            yield f'{cls.__name__}.{name}', function


def report_docstrings() -> Iterator[str]:
    named = {name: getattr(learnkit, name) for name in learnkit.__all__}
    public = {name: value for name, value in named.items() if callable(value)}
    for name, value in public.items():
        if '>>> ' not in (value.__doc__ or ''):
            yield f'{name}: its docstring has no example'
    for cls in (Learner, Callback, DataLoaders, Recorder):
        public.update(public_functions(cls))
    for name, value in public.items():
        problem = check_docstring(value)
        if problem:
            yield f'{name}: {problem}'


def report_layout() -> Iterator[str]:
    "Yield test files that are named after no module, and modules that no test file is named after."
    paths = [path.relative_to(TESTS) for path in TESTS.rglob('test_*.py')]
    tests = {path.with_suffix('').as_posix() for path in paths if path.parts[0] not in UNMIRRORED}
    modules = {mirror(path) for path in PACKAGE.rglob('*.py') if not path.stem.startswith('__')}
    for test in sorted(tests - INTERPLAY):
        if not any(f'{test}_'.startswith(f'{module}_') for module in modules):
            yield f'tests/{test}.py: no module has this name'
    for module in sorted(modules - UNTESTED):
        if not any(f'{test}_'.startswith(f'{module}_') for test in tests):
            yield f'tests/{module}.py: the module has no test file'


def mirror(path: Path) -> str:
    "Return folder and stem of the test file of a module: `engine/test_loop`."
    folder = path.parent if path.parent != PACKAGE else path.with_suffix('')
    return f'{folder.relative_to(PACKAGE).as_posix()}/test_{path.stem}'


def main() -> None:
    for report in (report_statements, report_docstrings, report_layout):
        for line in report():
            print(line)


if __name__ == '__main__':
    main()
