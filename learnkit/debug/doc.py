# SPDX-License-Identifier: Apache-2.0
"""Help for events, callbacks and functions: `doc('after_loss')`, `doc(my_callback)`, `doc(Learner.fit)`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

from learnkit.core.errors import OptionError, did_you_mean
from learnkit.core.model import unwrap_partial
from learnkit.engine.callback import Callback
from learnkit.engine.events import EVENTS, INNER_EVENTS, LEVELS, LIFECYCLE, Level
from learnkit.engine.traits import own_attribute


class Doc(str):
    "Help for an object; a notebook shows the text as it is."

    def __repr__(self) -> str:
        return str(self)


def doc(
    what: Any,  # an event, a callback, a class, a function, or a name in `learnkit.all`
) -> Doc:
    """Return the help for an event, a callback, a class or a function.

    The help of an event states what is true there, the Cancel exceptions that may be raised there, and the callbacks
    that handle the event. The help of a callback lists the events that it handles. fastcore prints the signatures of
    functions and classes, with the comments of their parameters. A string is also accepted: `doc('fit')` is
    `doc(Learner.fit)`.

    Raises `OptionError` for an unknown name, and for an object without documentation.

    >>> print(doc('params').partition('>>>')[0])
    def params(
        m:nn.Module
    )->list[nn.Parameter]:
    ...
    >>> doc('after_bacth')
    Traceback (most recent call last):
    learnkit.core.errors.OptionError: There is nothing called 'after_bacth'. Did you mean `after_batch`? ...
    """
    found = _find(what) if isinstance(what, str) else what
    if isinstance(found, str):
        return _describe_event(found)
    if isinstance(found, Callback):
        return _describe_callback(found, type(found))
    if not inspect.isroutine(found) and not isinstance(found, (type, partial, property)):
        found = type(found)
        if found.__module__ == 'builtins':
            raise OptionError(
                f'There is no help for a {found.__name__}: pass a class, a function, a callback, or a name.'
            )
    if isinstance(found, type) and issubclass(found, Callback):
        return _describe_callback(found, found)
    return _describe_object(found)


def open_levels(
    i: int,  # index of a moment in `LIFECYCLE`
) -> list[str]:
    """Return the levels of the loop that are open at a moment, whose Cancel exceptions may be raised there.

    >>> open_levels(next(i for i, m in enumerate(LIFECYCLE) if m.event == 'after_epoch'))
    ['fit']
    """

    def is_open(level: Level) -> bool:
        for moment in reversed(LIFECYCLE[: i + 1]):
            if moment.event in (level.before, level.after_cancel, level.after):
                return moment.event == level.before
        return False

    return [name for name, level in LEVELS.items() if is_open(level)]


def _find(name: str) -> Any:
    "Return the event, or the object, of a name in `learnkit.all` or of the Learner."
    if name in EVENTS:
        return name
    known = _get_public_names()
    first, *others = name.removeprefix('learn.').split('.')
    found = known.get(first, getattr(known['Learner'], first, None))
    for part in others:
        found = getattr(found, part, None)
    if found is not None:
        return found
    hint = did_you_mean(name, [*EVENTS, *known, *dir(known['Learner'])])
    raise OptionError(
        f'There is nothing called {name!r}.{hint} Pass the name of an event, or a name that '
        '`from learnkit.all import *` imports.'
    )


def _get_public_names() -> dict[str, Any]:
    package = import_module('learnkit.all')  # imports all modules, so only on request
    return {name: getattr(package, name) for name in package.__all__}


def _join(*parts: str) -> Doc:
    return Doc('\n\n'.join(filter(None, parts)))


def _describe_object(found: Any) -> Doc:
    "Return signature and docstring of a function or a class."
    text = inspect.getdoc(unwrap_partial(found)) or ''
    if isinstance(found, property) and found.fget is not None:
        return _join(found.fget.__qualname__, text)
    return _join(_format_signature(found), text)


def _format_signature(found: Any) -> str:
    try:
        from fastcore.docments import DocmentText  # slow; fastcore 1.8 does not have it

        return str(DocmentText(found, docstring=False))
    except (ImportError, OSError, SyntaxError, TypeError, ValueError):  # or there is no source code
        return f'{getattr(found, "__name__", found)}(...)'


def _describe_callback(source: Callback | type[Callback], cls: type[Callback]) -> Doc:
    limits = '' if source.run_train else ', not in training'
    limits += '' if source.run_valid else ', not in evaluation'
    name = cls.__name__ if source is cls else repr(source)
    handlers = [(event, _get_handler(source, event)) for event in EVENTS]
    rows = [(event, _first_line(handler)) for event, handler in handlers if handler is not None]
    return _join(
        _describe_object(cls),
        _format_list(f'{name} runs at (order {source.order:g}{limits})', rows),
    )


def _get_handler(source: Callback | type[Callback], event: str) -> Any:
    "Return the function of a callback, or of a class of callbacks, for an event."
    if not isinstance(source, type):
        return own_attribute(source, event)
    function = inspect.getattr_static(source, event, None)
    return function if inspect.isfunction(function) else None


def _describe_event(event: str) -> Doc:
    moments = [(i, m) for i, m in enumerate(LIFECYCLE) if m.event == event]
    text = '; '.join(dict.fromkeys(m.doc for _, m in moments)) + '.'
    if event in INNER_EVENTS:
        text += '\n\nIt belongs to a batch: `run_train` and `run_valid` of a callback apply.'
    composer_names = ', '.join(m.composer for _, m in moments if m.composer)
    callbacks = sorted(
        (cls.order, name)
        for name, cls in _get_public_names().items()
        if isinstance(cls, type) and issubclass(cls, Callback) and _get_handler(cls, event)
    )
    return _join(
        f'{event} (an event)',
        text,
        composer_names and f'In Composer: {composer_names}.',
        _format_list('May be raised here', _list_cancel_exceptions([i for i, _ in moments])),
        _format_list(
            'Callbacks that handle it', ((name, f'order {order:g}') for order, name in callbacks)
        ),
        f"`learn.explain('{event}')` lists the callbacks of a Learner that run here, in order; "
        '`learn.show_training_loop()` shows the events around it.',
    )


def _list_cancel_exceptions(indices: list[int]) -> Iterator[tuple[str, str]]:
    "Yield the Cancel exceptions that may be raised at an event, given the event's indices in `LIFECYCLE`."
    for name, level in LEVELS.items():
        if any(name in open_levels(i) for i in indices):
            yield level.exception.__name__, _first_line(level.exception)


def _first_line(value: Any) -> str:
    return (inspect.getdoc(value) or '').partition('\n')[0]


def _format_list(head: str, rows: Any) -> str:
    lines = [f'    {name:<28}  {description}'.rstrip() for name, description in rows]
    return '\n'.join([f'{head}:', *lines]) if lines else ''
