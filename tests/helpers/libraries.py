"""Libraries that take long to import, and that tests import when they first use them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

__all__ = ['Library', 'require']


class Library:
    "A module that is imported when its first attribute is read: importing it while tests are collected delays all."

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith('_'):  # pytest looks for its marks on whatever a file has
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


def require(*names: str) -> Any:
    "Skip the tests of a file where a library is not installed; return the last one, which is not imported yet."
    for name in names:
        if find_spec(name.partition('.')[0]) is None:
            pytest.skip(f'could not import {name!r}', allow_module_level=True)
    return Library(names[-1])
