"""Libraries that take long to import, and that tests import when they first use them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from learnkit.core.errors import MissingExtraError
from learnkit.core.optional import check_libraries

__all__ = ['require']


class Library:
    "A module that is imported when its first attribute is read: importing it while tests are collected delays all."

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        # pytest looks for its marks on whatever a file has, at which `importlib.util.LazyLoader` would import
        if name.startswith('_'):
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


def require(*names: str) -> Any:
    "Skip the tests of a file where a library is not installed; return the last one, which is not imported yet."
    try:
        check_libraries('The file', *(name.partition('.')[0] for name in names))
    except MissingExtraError as e:
        pytest.skip(str(e), allow_module_level=True)
    return Library(names[-1])
