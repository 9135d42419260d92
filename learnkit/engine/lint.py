"""What goes wrong in a callback without an error: handlers that no event calls, attributes that hide the loop's."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from dis import get_instructions
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

from learnkit.core.validation import warn_user
from learnkit.engine.callback import SHADOWING, Callback
from learnkit.engine.events import ALIASES, EVENTS

__all__ = ['warn_of_slips', 'event_like']

_WHEN = {
    **dict.fromkeys(('start', 'begin', 'started'), 'before'),
    **dict.fromkeys(('end', 'finish', 'finished'), 'after'),
}
_LEVELS = {
    'epoch': 'epoch',
    'train': 'fit',
    'training': 'fit',
    'fit': 'fit',
    'train_epoch': 'train',
    'training_epoch': 'train',
    'batch': 'batch',
    'train_batch': 'batch',
    'training_batch': 'batch',
    'validation_batch': 'batch',
    'val_batch': 'batch',
    'test_batch': 'batch',
    'predict_batch': 'batch',
    'train_step': 'batch',
    'training_step': 'batch',
    'step': 'batch',
    'eval_batch': 'batch',
    'iteration': 'batch',
    'validation': 'validate',
    'val': 'validate',
    'test': 'validate',
    'validation_epoch': 'validate',
    'val_epoch': 'validate',
    'test_epoch': 'validate',
    'eval': 'eval',
    'evaluate': 'eval',
    'evaluation': 'eval',
    'predict': 'predict',
    'backward': 'backward',
    'optimizer_step': 'step',
}
_OTHERS = {
    'training_step': 'after_batch',
    'validation_step': 'after_batch',
    'on_after_backward': 'after_backward',
    'on_before_backward': 'before_backward',
    'on_before_optimizer_step': 'before_step',
    'on_before_zero_grad': 'after_step',
    'on_exception': 'after_error',
    'on_init_end': 'after_create',
    'on_evaluate': 'after_eval',
    'on_save_checkpoint': 'state_dict',
    'on_load_checkpoint': 'load_state_dict',
}
# what a callback reads of the loop
_STATE = {
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


def event_like(name: str) -> str | None:
    """Return what a method's name means here: that of other libraries, or one that is nearly an event's; None for none.

    >>> [event_like(name) for name in ('on_epoch_end', 'on_train_batch_end', 'fit_begin', 'after_bach', 'on_new_best')]
    ['after_epoch', 'after_batch', 'before_fit', 'after_batch', None]
    """
    if name in _OTHERS:
        return _OTHERS[name]
    level, _, when = name.removeprefix('on_').rpartition('_')
    if when in _WHEN and level in _LEVELS:
        return f'{_WHEN[when]}_{_LEVELS[level]}'
    if not name.startswith(('before_', 'after_')):
        return None
    close = get_close_matches(name, EVENTS, n=1, cutoff=0.85)
    return close[0] if close else None


def warn_of_slips(
    cb: Any,  # a callback; only what classes from outside the package define is looked at
) -> None:
    "Warn of methods that look like handlers and will never run, and of attributes that hide the state of the loop."
    classes = [cls for cls in type(cb).__mro__ if cls not in Callback.__mro__]
    own = [cls for cls in classes if cls.__module__.partition('.')[0] != 'learnkit']
    for name in dict.fromkeys(
        name for cls in own for name in vars(cls) if name not in (*EVENTS, *ALIASES)
    ):
        if (meant := event_like(name)) and not _is_fine(name, classes):
            warn_user(
                f'{type(cb).__name__}.{name} is no event and will not run. Did you mean `{meant}`?'
            )
    for name in sorted(_STATE & {name for cls in own for name in _sets(cls)}):
        warn_user(f'{SHADOWING.format(name)}, or choose another name')


def _sets(cls: type) -> set[str]:
    "Return what a class sets in its body and, on the callback itself, in its constructor, but no method or property."
    init = vars(cls).get('__init__')
    stored = _set_on_self(init.__code__) if isinstance(init, FunctionType) else set()
    return {
        name for name, value in vars(cls).items() if not isinstance(value, (FunctionType, property))
    } | stored


def _set_on_self(code: CodeType) -> set[str]:
    "Return the names that a method sets as attributes of its first parameter."
    steps = [step for step in get_instructions(code) if step.opname != 'EXTENDED_ARG']
    return {
        step.argval
        for loaded, step in pairwise(steps)
        if step.opname == 'STORE_ATTR'
        and ('LOAD_FAST' in loaded.opname or loaded.opname == 'LOAD_DEREF')
        and code.co_varnames[:1] == _last(loaded.argval)
    }


def _last(names: Any) -> tuple[str, ...]:
    "Return the variable that an instruction loads last: some load two."
    return names[-1:] if isinstance(names, tuple) else (names,)


def _is_fine(name: str, classes: list[type]) -> bool:
    "Tell whether a name is no method, overrides another one, or is called by one of these classes."
    found = [vars(cls)[name] for cls in classes if name in vars(cls)]
    if len(found) > 1 or not isinstance(found[0], FunctionType):
        return True
    functions = [f for cls in classes for f in vars(cls).values() if isinstance(f, FunctionType)]
    return any(name in code.co_names for f in functions for code in _codes(f.__code__))


def _codes(code: CodeType) -> Iterator[CodeType]:
    "Yield the code of a function, and of those inside it."
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)
