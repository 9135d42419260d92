"""A method that overrides a method of another class of the package says so, so that a renamed method is noticed."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import learnkit


def list_classes() -> Iterator[type]:
    "Yield the classes that the package defines."
    for info in pkgutil.walk_packages(learnkit.__path__, 'learnkit.'):
        if info.name.endswith('__main__'):
            continue
        module = importlib.import_module(info.name)
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == info.name:
                yield cls


def find_function(member: Any) -> Any:
    "Return the function of a method or property, or None."
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, cached_property):
        member = member.func
    if isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    return member if inspect.isfunction(member) else None


def list_overrides(cls: type) -> Iterator[str]:
    "Yield the names of the methods of a class that override a method of another class of the package."
    bases = [base for base in cls.__mro__[1:] if base.__module__.startswith('learnkit')]
    for name, member in vars(cls).items():
        function = find_function(member)
        is_own = function is not None and function.__qualname__ == f'{cls.__qualname__}.{name}'
        if not is_own or name.startswith('__'):
            continue
        if any(find_function(vars(base).get(name)) is not None for base in bases):
            yield name


def test_an_override_says_so() -> None:
    unmarked = [
        f'{cls.__module__}: {cls.__qualname__}.{name}'
        for cls in list_classes()
        for name in list_overrides(cls)
        if not hasattr(find_function(vars(cls)[name]), '__override__')
    ]
    assert unmarked == [], 'write `@override` (typing_extensions) above these methods'
