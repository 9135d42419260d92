# SPDX-License-Identifier: Apache-2.0
"""Parts of a compiled step that callbacks offer by their method `compiled_step`.

A part is a dict of functions by event. The functions are traced together with the step, so they are
functions of tensors: each gets the values of its event and the callback's `state`, and returns the
new values. Before each step the function at the key 'state' returns this state, and after it the
function at 'finish' gets what the functions have added to it. docs/lifecycle.md has the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from learnkit.core.batch import short_repr
from learnkit.core.errors import CallbackError, did_you_mean
from learnkit.engine.callback import name_handler
from learnkit.engine.dispatch import place_in_event, takes_every_event
from learnkit.engine.events import METHODS, STEP_EVENTS
from learnkit.engine.traits import trait_of

if TYPE_CHECKING:
    from learnkit.learner import Learner

# events and methods of callbacks that a compiled step cannot call
SKIPPED = (*STEP_EVENTS, *METHODS)
# functions that are traced: those of events, the context around model and loss, and the loss
TRACED = ('before_pred', 'forward', 'after_pred', 'loss', 'after_loss', 'before_step', 'after_step')
# the others run before and after the compiled code; a part with 'undo' may refuse the step
KEYS = (*TRACED, 'state', 'finish', 'undo')

Functions = dict[str, tuple[tuple[Callable[..., Any], int], ...]]


class Part:
    "Part of one callback in a compiled step."

    def __init__(self, cb: Any, switch: list[Any], functions: dict[str, Any]) -> None:
        self.cb = cb
        self.switch = switch  # empty while the callback is off
        self.functions = functions
        self.read_state: Callable[[], dict[str, Any] | None] = functions.get('state', dict)
        self.finish: Callable[[dict[str, Any]], None] | None = functions.get('finish')


def list_numbers(state: dict[str, Any]) -> tuple[str, ...]:
    "Return the entries of a state that are numbers, which may change from step to step."
    return tuple(name for name, value in state.items() if type(value) in (int, float))


class Handlers:
    "Handlers of a Learner's callbacks inside a step: those that have to be called, and parts for the others."

    def __init__(self, learn: Learner) -> None:
        table = learn.parts.callbacks.plain_tables[True]
        handled: dict[int, list[str]] = {}
        switches: dict[int, tuple[Any, list[Any]]] = {}
        for event in SKIPPED:
            for _, switch, cb in table[event]:
                handled.setdefault(id(cb), []).append(event)
                switches[id(cb)] = cb, switch
        self.parts: list[Part] = []
        self.blocks: list[tuple[str, list[Any]]] = []  # reason and switch
        for cb in learn.parts.callbacks.list_ordered():
            if id(cb) not in handled:
                continue
            events = handled[id(cb)]
            switch = switches[id(cb)][1]
            functions = read_functions(cb, events)
            if functions is None:
                self.blocks += [(f'{name_handler(cb, e)} has to be called', switch) for e in events]
            else:
                self.parts.append(Part(cb, switch, functions))


def read_functions(cb: Any, events: Iterable[str]) -> dict[str, Any] | None:
    "Return what `compiled_step` of a callback returns, or None if its handlers of the events have to be called."
    method = trait_of(cb, 'compiled_step')
    if method is None or takes_every_event(type(cb)) or not covers(cb, events):
        return None
    functions: dict[str, Any] | None = method()
    for key in functions or ():
        if key not in KEYS:
            raise CallbackError(
                f'{type(cb).__name__}.compiled_step returned a function for {short_repr(key)}: the keys are '
                f'{", ".join(KEYS)}.{did_you_mean(str(key), KEYS)}'
            )
    return functions


def covers(cb: Any, events: Iterable[str]) -> bool:
    "Return True unless a subclass, or the instance, has changed a handler after `compiled_step` was written."
    names = [cls.__dict__ for cls in type(cb).__mro__]
    level = next((i for i, own in enumerate(names) if 'compiled_step' in own), 0)
    newer = [vars(cb), *names[:level]]
    return not any(event in own for event in events for own in newer)


def order_functions(parts: list[Part]) -> Functions:
    "Return the functions of each event in the order of its handlers, each with the index of its part."
    functions: Functions = {}
    for key in TRACED:
        offering = [i for i, part in enumerate(parts) if key in part.functions]
        offering.sort(key=lambda i: place_in_event(parts[i].cb, key))
        functions[key] = tuple((parts[i].functions[key], i) for i in offering)
    return functions
