"""Collect the states of callbacks, each under a unique key, and load them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from warnings import warn

from learnkit.core.errors import CallbackError, OptionError, did_you_mean
from learnkit.core.learner_type import LearnerLike
from learnkit.core.plain import plain
from learnkit.engine.attributes import (
    changed_attributes,
    has_own_state,
    inherits_state,
    keeps_attributes,
    note_beginning,
    put_attributes,
)
from learnkit.engine.run import add_note

if TYPE_CHECKING:
    from learnkit.engine.loop import Loop

__all__ = [
    'callback_states',
    'load_callback_states',
    'collect_nondeterministic_state',
    'note_beginnings',
]

# keys of a callback's state that has two parts
STATE = '__state__'
ATTRIBUTES = '__attributes__'


def callback_states(learn: Loop) -> dict[str, Any]:
    """Return the state of every callback that has one, by the callback's key.

    The key is the callback's `state_key`, or its name, made unique. Raises `CallbackError` for a state
    that is not plain data.
    """
    states = {}
    for cb in learn.cbs:
        state = _get_state(cb)
        if state is None:
            continue
        try:
            states[learn.callbacks.keys[id(cb)]] = plain(state, 'state_dict()')
        except OptionError as e:
            raise CallbackError(f'{type(cb).__name__}: {e}') from None
    return states


def collect_nondeterministic_state(learn: LearnerLike) -> dict[str, list[str]]:
    """Return what in the callbacks' states depends on the clock or the machine, by their keys.

    '*' is the key of any callback.
    """
    keys = learn.callbacks.keys
    timed = [cb for cb in learn.cbs if getattr(cb, 'nondeterministic_state', ())]
    found = {keys[id(cb)]: list(cb.nondeterministic_state) for cb in timed}
    measuring = [cb for cb in learn.cbs if getattr(type(cb), 'machine_dependent', False)]
    columns = [name for cb in measuring for name in cb.metric_names]
    # of the Recorder, and of loggers
    places = ('history.*', 'open.logged', 'rows.*.1', 'writer.cache')
    if columns:
        # the first measurement may come earlier or later, and with it the name in the order of columns
        found['*'] = ['logged_names', *(f'{place}.{name}' for name in columns for place in places)]
    return found


def note_beginnings(learn: LearnerLike) -> None:
    "Store the attributes of callbacks without a `state_dict` before a fit is resumed."
    for cb in learn.cbs:
        if keeps_attributes(cb):
            note_beginning(cb)


def load_callback_states(
    learn: Loop,
    states: Mapping[str, Any],  # states by the callbacks' keys, from `callback_states`
) -> None:
    """Load each state into its callback.

    Warns of a state without a callback and of a stateful callback without a state.
    """
    keys = {learn.callbacks.keys[id(cb)]: cb for cb in learn.cbs}
    stateful = {key for key, cb in keys.items() if has_own_state(cb) and _get_state(cb) is not None}
    for key in (k for k in states if k not in keys):
        warn(
            f'There is a state for a callback `{key}`, and no such callback.'
            f'{did_you_mean(key, keys)} It is left out; add the callback first to load it.',
            stacklevel=3,
        )
    for key in sorted(stateful - set(states)):
        warn(
            f'There is no state for the callback `{key}` ({type(keys[key]).__name__}): it stays '
            'as it is.',
            stacklevel=3,
        )
    for key, cb in keys.items():
        try:
            _load_state(cb, states.get(key))
        except Exception as e:
            add_note(e, f'in {type(cb).__name__}.load_state_dict')
            raise


def _get_state(cb: Any) -> dict[str, Any] | None:
    "Return the result of a callback's `state_dict`, or the attributes that changed, or both, or None for no state."
    if not has_own_state(cb):
        return changed_attributes(cb)
    state = getattr(cb, 'state_dict', lambda: None)()
    attributes = changed_attributes(cb) if inherits_state(cb) else None
    return state if attributes is None else {STATE: state, ATTRIBUTES: attributes}


def _load_state(cb: Any, state: Any) -> None:
    "Load a state that `_get_state` returned into a callback."
    attributes: Any = {}
    if isinstance(state, Mapping) and STATE in state:
        state, attributes = state[STATE], state[ATTRIBUTES]
    if not has_own_state(cb):
        return put_attributes(cb, state or {})
    if state is not None:
        cb.load_state_dict(state)
    if inherits_state(cb):
        put_attributes(cb, attributes)
