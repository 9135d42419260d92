"""The report of the package's structure measures what it says."""

from __future__ import annotations

import ast

from tests.house import (
    BUDGETS,
    GOALS,
    READS_FRAMES,
    ROOT,
    code_lines,
    measure,
    torch_private_names,
    used_names,
)

SOURCE = '''"""A docstring
of two lines."""

import torch
from torch._ops import _private

# a comment


class Own:
    "No code."

    _mine = 1

    def read(self):
        return self._mine, torch._foreach_mul, self.f.__code__
'''


def test_only_lines_of_code_are_counted() -> None:
    assert code_lines(SOURCE) == {4, 5, 10, 13, 15, 16}


def test_names_that_others_keep_private_and_code_objects() -> None:
    tree = ast.parse(SOURCE)
    assert torch_private_names([tree]) == {'_ops', '_private', '_foreach_mul'}
    assert READS_FRAMES & {*used_names(tree)} == {'__code__'}


def test_every_figure_is_measured() -> None:
    figures = measure(ROOT)
    assert figures.keys() == GOALS.keys() | BUDGETS.keys()
    assert figures['code lines'] == sum(figures[name] for name in BUDGETS)
    assert min(figures.values()) > 0
