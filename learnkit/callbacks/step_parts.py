# SPDX-License-Identifier: Apache-2.0
"""Parts of a compiled step that callbacks offer by their method `compiled_step`.

A part is a dict of functions by event. The functions are traced together with the step, so they are
functions of tensors: each gets the values of its event and the callback's `state`, and returns the
new values. Before each step the function at the key 'state' returns this state, and after it the
function at 'finish' gets what the functions have added to it. docs/lifecycle.md has the table.

A step has two halves: the passes, forward and backward, and the optimizer's step. If the second half
cannot be compiled, the passes are compiled alone, and the handlers of the second half are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from learnkit.core.batch import short_repr
from learnkit.core.errors import CallbackError, did_you_mean
from learnkit.engine.callback import name_handler
from learnkit.engine.dispatch import place_in_event, takes_every_event
from learnkit.engine.events import METHODS, STEP_EVENTS, WILL_STEP
from learnkit.engine.traits import trait_of

if TYPE_CHECKING:
    from learnkit.learner import Learner

# events and methods of callbacks that a compiled step cannot call
SKIPPED = (*STEP_EVENTS, *METHODS)
# those of its second half, which are called where only the passes are compiled
OF_OPTIMIZER = (*STEP_EVENTS[STEP_EVENTS.index('before_step') :], WILL_STEP)
# functions that are traced: those of events, the context around model and loss, and the loss
TRACED = (
    'before_pred',
    'forward',
    'after_pred',
    'loss',
    'after_loss',
    'before_backward',
    'before_step',
    'after_step',
)
# the others run before and after the compiled code; a part with 'undo' may refuse the step, and with
# 'passes_only' its handlers of the optimizer's step are called
KEYS = (*TRACED, 'state', 'finish', 'undo', 'passes_only')

Functions = dict[str, tuple[tuple[Callable[..., Any], int], ...]]


class Part:
    "Part of one callback in a compiled step."

    def __init__(
        self,
        cb: Any,
        switch: list[Any],  # empty while the callback is off
        functions: dict[str, Any],
        in_passes: bool = True,  # whether the callback acts in forward or backward
    ) -> None:
        self.cb = cb
        self.switch = switch
        self.functions = functions
        self.in_passes = in_passes
        self.read_state: Callable[[], dict[str, Any] | None] = functions.get('state', dict)
        self.finish: Callable[[dict[str, Any]], None] | None = functions.get('finish')


def list_numbers(state: dict[str, Any]) -> tuple[str, ...]:
    "Return the entries of a state that are numbers, which may change from step to step."
    return tuple(name for name, value in state.items() if type(value) in (int, float))


Reason = tuple[str, list[Any]]  # why something cannot be compiled, and the switch of the callback


class Handlers:
    "Handlers of a Learner's callbacks inside a step: parts in place of them, and those that have to be called."

    def __init__(self, learn: Learner) -> None:
        self.parts: list[Part] = []
        self.blocks: list[Reason] = []  # handlers of the passes
        self.step_blocks: list[Reason] = []  # handlers of the optimizer's step
        for cb, switch, events in list_handled(learn):
            functions = read_functions(cb, events)
            if functions is None:
                self._block(cb, switch, events)
                continue
            in_passes = any(event not in OF_OPTIMIZER for event in events)
            self.parts.append(Part(cb, switch, functions, in_passes))
            if functions.get('passes_only'):
                self._block(cb, switch, [event for event in events if event in OF_OPTIMIZER])
            elif WILL_STEP in events:
                self._block(cb, switch, [WILL_STEP])
        if learn.microbatch:
            microbatches = learn.parts.microbatches
            functions = microbatches.compiled_step(learn)
            self.parts.append(Part(microbatches, [True], functions))
            reason = f'microbatch={learn.microbatch!r} may split batches'
            self.step_blocks.append((reason, [True]))

    def _block(self, cb: Any, switch: list[Any], events: Iterable[str]) -> None:
        name = type(cb).__name__
        for event in events:
            blocks = self.step_blocks if event in OF_OPTIMIZER else self.blocks
            if event == WILL_STEP:
                blocks.append((f'{name} decides which batches end with a step', switch))
            else:
                blocks.append((f'{name_handler(cb, event)} has to be called', switch))

    def list_parts(self, takes_step: bool) -> list[Part]:
        "Return the parts of callbacks that are on, of the whole step or of the passes."
        return [part for part in self.parts if part.switch and (takes_step or part.in_passes)]


def list_handled(learn: Learner) -> list[tuple[Any, list[Any], list[str]]]:
    "Return the callbacks with handlers inside a step, in order, each with its switch and these events."
    table = learn.parts.callbacks.plain_tables[True]
    handled: dict[int, tuple[list[Any], list[str]]] = {}
    for event in SKIPPED:
        for _, switch, cb in table[event]:
            handled.setdefault(id(cb), (switch, []))[1].append(event)
    ordered = learn.parts.callbacks.list_ordered()
    return [(cb, *handled[id(cb)]) for cb in ordered if id(cb) in handled]


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
    owners = [vars(cb), *(cls.__dict__ for cls in type(cb).__mro__)]
    level = next((i for i, own in enumerate(owners) if 'compiled_step' in own), 1)
    return not any(event in own for event in events for own in owners[:level])


def order_functions(parts: list[Part]) -> Functions:
    "Return the functions of each event in the order of its handlers, each with the index of its part."
    functions: Functions = {}
    for key in TRACED:
        offering = [i for i, part in enumerate(parts) if key in part.functions]
        offering.sort(key=lambda i: place_in_event(parts[i].cb, key))
        functions[key] = tuple((parts[i].functions[key], i) for i in offering)
    return functions
