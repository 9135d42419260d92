"""Slow libraries, imported when tests first use them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from learnkit.core.errors import MissingExtraError
from learnkit.core.optional import check_libraries

__all__ = ['require']


class Library:
    "A module that is imported when its first attribute is read, which keeps collection fast."

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        # pytest looks for its marks on whatever a file has, at which `importlib.util.LazyLoader` would import
        if name.startswith('_'):
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


def require(*names: str) -> Any:
    "Skip the tests of a file if a library is not installed; return the last library as a lazy module."
    try:
        check_libraries('The file', *(name.partition('.')[0] for name in names))
    except MissingExtraError as e:
        pytest.skip(str(e), allow_module_level=True)
    return Library(names[-1])
