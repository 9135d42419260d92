# SPDX-License-Identifier: Apache-2.0
"""Context managers that replace the value of an attribute, and pause Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self


class replacing_yield:
    """Set an attribute to another value within a context.

    As in fastai, a function decorated with `@contextmanager` may return an instance.

    >>> from types import SimpleNamespace
    >>> o = SimpleNamespace(a=1)
    >>> with replacing_yield(o, 'a', 2): print(o.a)
    2
    >>> o.a
    1
    """

    def __init__(self, o: Any, attr: str, val: Any) -> None:
        self.o = o
        self.attr = attr
        self.val = val
        self.inside = False

    def __enter__(self) -> None:
        self.old = getattr(self.o, self.attr)
        self.inside = True
        setattr(self.o, self.attr, self.val)

    def __exit__(self, *exc_info: object) -> None:
        setattr(self.o, self.attr, self.old)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> None:
        if not self.inside:
            return self.__enter__()
        self.__exit__()
        raise StopIteration

    def throw(self, e: BaseException) -> None:
        "Restore the attribute and raise the exception."
        self.__exit__()
        raise e


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause Python's garbage collector, for imports.

    Importing torch creates so many objects that the collector runs many times. It finds almost no garbage, and takes a
    fifth of the import time.

    >>> with paused_collection(): print(gc.isenabled())
    False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
