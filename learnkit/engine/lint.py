"""Warnings of silent mistakes in callbacks: handlers that no event calls, attributes that hide the Learner's."""

from __future__ import annotations

from types import FunctionType
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
    for name in dict.fromkeys(name for cls in user_classes for name in vars(cls)):
        members = [vars(cls)[name] for cls in classes if name in vars(cls)]
        event = None if name in EVENTS or name in ALIASES else event_like(name)
        # a method that overrides another one is called by the class of that one
        if event and len(members) == 1 and isinstance(members[0], FunctionType):
            warn_user(
                f'{type(cb).__name__}.{name} is not an event, and no event calls it. Did you mean `{event}`?'
            )
    members_by_name = {name: o for cls in user_classes for name, o in vars(cls).items()}
    hidden = {n for n, o in members_by_name.items() if not isinstance(o, (FunctionType, property))}
    if user_classes == classes:  # attributes of a callback of this package are its own
        hidden |= vars(cb).keys()
    for name in sorted(_LOOP_ATTRIBUTES & hidden):
        warn_user(f'{SHADOWING.format(name)}, or choose another name')
