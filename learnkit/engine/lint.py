"""Warnings of silent mistakes in callbacks: handlers that no event calls, attributes that hide the Learner's."""

from __future__ import annotations

from collections.abc import Iterator
from dis import get_instructions
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

from learnkit.core.validation import warn_user
from learnkit.engine.callback import SHADOWING, Callback
from learnkit.engine.events import ALIASES, EVENTS, event_like

__all__ = ['lint', 'event_like']

# attributes of the loop that callbacks read
_LOOP_ATTRIBUTES = {
    'epoch',
    'iter',
    'n_epoch',
    'n_iter',
    'train_iter',
    'pct_train',
    'training',
    'phase',
    'xb',
    'yb',
    'pred',
    'loss',
    'loss_grad',
}


def lint(
    cb: Any,  # callback; only its classes from outside this package are checked
) -> None:
    "Warn of methods that look like handlers but never run, and of attributes that hide the state of the loop."
    if type(cb).__module__.startswith('learnkit.'):
        return
    classes = [cls for cls in type(cb).__mro__ if cls not in Callback.__mro__]
    user_classes = [cls for cls in classes if cls.__module__.partition('.')[0] != 'learnkit']
    members = dict.fromkeys(name for cls in user_classes for name in vars(cls))
    for name in members:
        if name in EVENTS or name in ALIASES:
            continue
        event = event_like(name)
        if event and not _has_other_use(name, classes):
            warn_user(
                f'{type(cb).__name__}.{name} is not an event and will not run. Did you mean `{event}`?'
            )
    attributes = {name for cls in user_classes for name in _find_attributes(cls)}
    for name in sorted(_LOOP_ATTRIBUTES & attributes):
        warn_user(f'{SHADOWING.format(name)}, or choose another name')


def _find_attributes(cls: type) -> set[str]:
    "Return the names set in a class's body or on `self` in its constructor, without methods and properties."
    members = vars(cls).items()
    names = {name for name, value in members if not isinstance(value, (FunctionType, property))}
    init = vars(cls).get('__init__')
    if isinstance(init, FunctionType):
        names |= _find_set_on_self(init.__code__)
    return names


def _find_set_on_self(code: CodeType) -> set[str]:
    "Return the names that a method sets as attributes of its first parameter, read from the bytecode."
    instructions = [i for i in get_instructions(code) if i.opname != 'EXTENDED_ARG']
    return {
        store.argval
        for load, store in pairwise(instructions)
        if store.opname == 'STORE_ATTR'
        and ('LOAD_FAST' in load.opname or load.opname == 'LOAD_DEREF')
        and code.co_varnames[:1] == _get_last_variable(load.argval)
    }


def _get_last_variable(names: Any) -> tuple[str, ...]:
    "Return the variable that an instruction loads last, as some instructions load two."
    return names[-1:] if isinstance(names, tuple) else (names,)


def _has_other_use(name: str, classes: list[type]) -> bool:
    "Return True if a name is not a method, overrides another method, or is used by one of these classes."
    members = [vars(cls)[name] for cls in classes if name in vars(cls)]
    if len(members) > 1 or not isinstance(members[0], FunctionType):
        return True
    functions = [f for cls in classes for f in vars(cls).values() if isinstance(f, FunctionType)]
    return any(name in code.co_names for f in functions for code in _walk_code(f.__code__))


def _walk_code(code: CodeType) -> Iterator[CodeType]:
    "Yield the code of a function and of the functions inside it."
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _walk_code(inner)
