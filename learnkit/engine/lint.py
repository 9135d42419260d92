"""Warnings of silent mistakes in callbacks: handlers that no event calls, attributes that hide the Learner's."""

from __future__ import annotations

from collections import Counter
from types import FunctionType
from typing import Any

from learnkit.core.validation import warn_user
from learnkit.engine.callback import SET_BY_BASE, SHADOWING
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
    cb: Any,  # callback; only what classes outside this package define is checked
) -> None:
    "Warn of methods that look like handlers but never run, and of attributes that hide the state of the loop."
    if type(cb).__module__.startswith('learnkit.'):
        return
    classes = [cls for cls in type(cb).__mro__ if cls.__module__.partition('.')[0] != 'learnkit']
    counts = Counter(name for cls in classes[:-1] for name in vars(cls))  # without `object`
    members = {name: getattr(type(cb), name, None) for name in counts}
    for name, n in counts.items():
        event = None if name in EVENTS or name in ALIASES else event_like(name)
        # a method that overrides one of a mixin is called by the mixin
        if event and n == 1 and isinstance(members[name], FunctionType):
            warn_user(
                f'{type(cb).__name__}.{name} is not an event, and no event calls it. Did you mean `{event}`?'
            )
    values = {name for name, o in members.items() if not isinstance(o, (FunctionType, property))}
    own = vars(cb).keys() - vars(cb).get(SET_BY_BASE, ())
    for name in sorted(_LOOP_ATTRIBUTES & (values | own)):
        warn_user(f'{SHADOWING.format(name)}, or choose another name')
