"""Callback objects of fastai itself: they run in a Learner as they are, with their own base class and exceptions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from learnkit.core.errors import CancelException
from learnkit.engine.callback import Callback, own_handler
from learnkit.engine.events import LEVELS

__all__ = ['is_foreign', 'foreign_handler']

_CANCELS = {level.exception.__name__: level.exception for level in LEVELS.values()}


def is_foreign(cb: object) -> bool:
    "Tell whether `cb` is a callback by fastai's protocol (called with an event's name), though not by our class."
    cls = cb if isinstance(cb, type) else type(cb)
    return (
        not issubclass(cls, Callback)
        and '__call__' in dir(cls)
        and all(
            hasattr(cls, name)
            for name in ('order', 'learn', 'run', 'run_train', 'run_valid', 'name')
        )
    )


def foreign_handler(cb: Any, event_name: str) -> Callable[[], Any] | None:
    "Return what runs `event_name` on a foreign callback, its Cancel exceptions turned into ours of the same name."
    return partial(_call, cb, event_name) if own_handler(cb, event_name) else None


def _call(cb: Any, event_name: str) -> Any:
    try:
        return cb(event_name)
    except Exception as e:
        if type(e).__name__ in _CANCELS and not isinstance(e, CancelException):
            raise _CANCELS[type(e).__name__] from e
        raise
