"""Adapter for fastai's own callbacks, which have fastai's base class and exceptions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from learnkit.core.errors import CancelException
from learnkit.engine.callback import Callback, get_own_handler
from learnkit.engine.events import LEVELS

__all__ = ['is_fastai_callback', 'get_fastai_handler']

_CANCEL_EXCEPTIONS = {level.exception.__name__: level.exception for level in LEVELS.values()}
# attributes of fastai's callbacks
_PROTOCOL = ('order', 'learn', 'run', 'run_train', 'run_valid', 'name')


def is_fastai_callback(cb: object) -> bool:
    "Return True for a callback or class that follows fastai's protocol and does not inherit from `Callback`."
    cls = cb if isinstance(cb, type) else type(cb)
    if issubclass(cls, Callback) or '__call__' not in dir(cls):
        return False
    return all(hasattr(cls, name) for name in _PROTOCOL)


def get_fastai_handler(cb: Any, event_name: str) -> Callable[[], Any] | None:
    """Return a function that runs `event_name` on a foreign callback, or None if the callback has no handler.

    fastai's Cancel exceptions are converted to this package's exceptions of the same name.
    """
    return partial(_run_event, cb, event_name) if get_own_handler(cb, event_name) else None


def _run_event(cb: Any, event_name: str) -> Any:
    "Run an event on a foreign callback, and convert its Cancel exceptions."
    try:
        return cb(event_name)
    except Exception as e:
        name = type(e).__name__
        if name in _CANCEL_EXCEPTIONS and not isinstance(e, CancelException):
            raise _CANCEL_EXCEPTIONS[name] from e
        raise
