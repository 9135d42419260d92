"""Names that a package has from the start, and whose modules are imported when one of them is first used."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ['later']


def later(
    package: str,                   # the `__name__` of the package
    modules: Mapping[str, str],     # names, separated by blanks, by the full name of the module that has them
    names: dict[str, Any],          # the package's `globals()`
    also: Mapping[str, str] | None = None,  # likewise: names that are not among the package's own
) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package (PEP 562), which imports what is asked for, and keeps it.

    >>> find = later('learnkit', {'learnkit.timing': 'Time Timestamp'}, {})
    >>> find('Time').__name__
    'Time'
    """
    places = (*modules.items(), *(also or {}).items())
    where = {name: module for module, listed in places for name in listed.split()}

    def __getattr__(name: str) -> Any:
        if name not in where: raise AttributeError(f'module {package!r} has no attribute {name!r}', name=name)
        names[name] = value = getattr(import_module(where[name]), name)
        return value
    return __getattr__
