"""Another value for an attribute, for the length of a context."""

from __future__ import annotations

from typing import Any, Self

__all__ = ['replacing_yield']


class replacing_yield:
    """Set an attribute for the length of a context.

    As in fastai, a function under `@contextmanager` may also return it.

    >>> from types import SimpleNamespace
    >>> o = SimpleNamespace(a=1)
    >>> with replacing_yield(o, 'a', 2): print(o.a)
    2
    >>> o.a
    1
    """

    def __init__(self, o: Any, attr: str, val: Any) -> None:
        self.o, self.attr, self.val, self.inside = o, attr, val, False

    def __enter__(self) -> None:
        self.old, self.inside = getattr(self.o, self.attr), True
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
        "Restore, and let the exception go on."
        self.__exit__()
        raise e
