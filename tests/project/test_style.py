"""Style of the package that the formatter cannot check: one thought in a statement."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# a generator expression that takes less time for each batch than a function
ALLOWED_FILE = 'learnkit/data/dataloaders.py'
ALLOWED_SOURCE = '(tuple([take(t, 0, idx) for t in tensors]) for idx in self._split_rows(order, n))'


def has_inner(node: ast.AST, kinds: type[ast.AST] | tuple[type[ast.AST], ...]) -> bool:
    "Return True if a node contains another node of some kinds."
    return any(isinstance(inner, kinds) for inner in ast.walk(node) if inner is not node)


def is_nested_comprehension(node: ast.AST) -> bool:
    return isinstance(node, COMPREHENSIONS) and has_inner(node, COMPREHENSIONS)


def is_nested_conditional(node: ast.AST) -> bool:
    return isinstance(node, ast.IfExp) and has_inner(node, ast.IfExp)


def assigns_unrelated_values(node: ast.AST) -> bool:
    "Return True for `a, b = x, y`, except for a swap."
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
        return False
    if not isinstance(node.value, ast.Tuple):
        return False
    targets = {ast.unparse(target) for target in node.targets[0].elts}
    return targets.isdisjoint(ast.unparse(value) for value in node.value.elts)


def find(is_bad: Callable[[ast.AST], bool]) -> Iterator[tuple[str, str]]:
    "Yield the file and the source of every node of the package that is bad style."
    for path in sorted((ROOT / 'learnkit').rglob('*.py')):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text('utf-8'))):
            if is_bad(node):
                yield name, ast.unparse(node)


@pytest.mark.parametrize(
    'is_bad', [is_nested_comprehension, is_nested_conditional, assigns_unrelated_values]
)
def test_a_statement_holds_one_thought(is_bad: Callable[[ast.AST], bool]) -> None:
    found = [place for place in find(is_bad) if place != (ALLOWED_FILE, ALLOWED_SOURCE)]
    assert not found


@pytest.mark.parametrize(
    ('is_bad', 'source', 'expected'),
    [
        (is_nested_comprehension, 'x = [[i for i in row] for row in rows]', True),
        (is_nested_comprehension, 'x = [i for row in rows for i in row]', False),
        (is_nested_conditional, 'x = a if b else c if d else e', True),
        (assigns_unrelated_values, 'a, b = 1, 2', True),
        (assigns_unrelated_values, 'a, b = b, a', False),
        (assigns_unrelated_values, 'a, b = f()', False),
    ],
)
def test_what_is_found(is_bad: Callable[[ast.AST], bool], source: str, expected: bool) -> None:
    assert any(map(is_bad, ast.walk(ast.parse(source)))) is expected
