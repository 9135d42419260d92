"""Callbacks that change how batches and epochs are trained on."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from learnkit.callback import Callback
from learnkit.loop import SkipToEpoch

__all__ = ['SkipToEpoch', 'before_batch_cb']


def before_batch_cb(
    f: Callable[[Any, tuple[Any, ...], tuple[Any, ...]], Any],  # f(callback, xb, yb) gives the new xb and yb
) -> Callback:
    """Make a callback that changes batches from a function of the callback, `xb` and `yb`.

    >>> @before_batch_cb
    ... def half(cb, xb, yb): return tuple(x / 2 for x in xb), yb
    >>> half
    Callback(before_batch=half)
    """
    def before_batch(cb: Callback) -> None: cb.learn.xb, cb.learn.yb = f(cb, cb.learn.xb, cb.learn.yb)
    before_batch.__name__ = getattr(f, '__name__', 'before_batch')
    return Callback(before_batch=before_batch)
