"""Registry of cases that used to give a wrong number, or an unclear error, without a word.

A case returns what learnkit computes and what an independent computation gives: a closed form, a loop by
hand, or the real package. `python -m tests.silent` prints them as a table; `test_cases.py` compares them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Case:
    "One row of the table."

    part: str  # title of the part, such as 'roles'
    title: str
    old: str  # what was computed before, measured
    compute: Callable[[], tuple[Any, Any]]  # returns the value of learnkit and the independent one
    tolerance: float  # relative and absolute


CASES: list[Case] = []


def case(part: str, title: str, *, old: str, tolerance: float = 1e-5) -> Callable[[Any], Any]:
    "Register a function that returns the value of learnkit and the independent value."

    def register(compute: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
        CASES.append(Case(part, title, old, compute, tolerance))
        return compute

    return register


def load_cases() -> list[Case]:
    "Import all modules `cases_*.py` of this folder, and return their cases."
    for path in sorted(Path(__file__).parent.glob('cases_*.py')):
        import_module(f'tests.silent.{path.stem}')
    return CASES


def is_equal(case: Case, new: Any, independent: Any) -> bool:
    "Return True if both values agree: numbers within the tolerance, everything else exactly."
    if isinstance(independent, (float, list, tuple, dict)) and not _has_text(independent):
        return bool(
            new == pytest.approx(independent, rel=case.tolerance, abs=case.tolerance, nan_ok=True)
        )
    return bool(new == independent)


def _has_text(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value
    return isinstance(value, (list, tuple, dict)) and any(isinstance(v, str) for v in values)
