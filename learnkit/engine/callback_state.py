"""The states of callbacks, each under a key of its own, for whoever saves and resumes."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from warnings import warn

from learnkit.core.errors import CallbackError, OptionError, did_you_mean
from learnkit.core.plain import plain
from learnkit.engine.attributes import (
    changed_attributes,
    has_own_state,
    inherits_state,
    keeps_attributes,
    note_attributes,
    note_beginning,
    put_attributes,
)
from learnkit.engine.loop import Loop
from learnkit.engine.run import add_note

__all__ = ['States']

STATE, ATTRIBUTES = '__state__', '__attributes__'  # of a callback that has both


class States(Loop):
    "The part of the Learner that gathers its callbacks' states, and hands them back."

    def _insert_cb(self, cb: Any, at: int | None = None, switch: list[Any] | None = None) -> None:
        if keeps_attributes(cb): note_attributes(cb)
        super()._insert_cb(cb, at, switch)

    def callback_states(self) -> dict[str, Any]:
        """Return the state of every callback that has one, by its key: its `state_key`, or its name, made unique.

        Of a callback without a `state_dict`, one written for fastai for instance, that is every attribute that has
        changed since it was added and is data: numbers, texts, tensors, arrays, paths, random generators, and lists,
        tuples, sets and dicts of data.

        Raises `CallbackError`, with the callback's name, for a state that would not load safely.

        >>> from learnkit import EMA
        >>> from learnkit.testing import synth_learner
        >>> sorted(synth_learner(cbs=[EMA(), EMA(0.9)]).callback_states())
        ['ema', 'ema_2', 'recorder', 'train_eval']
        """
        states = {}
        for cb in self.cbs:
            state = state_of(cb)
            if state is None: continue
            try: states[self.callbacks.keys[id(cb)]] = plain(state, 'state_dict()')
            except OptionError as e: raise CallbackError(f'{type(cb).__name__}: {e}') from None
        return states

    def _wall_clock(self) -> dict[str, list[str]]:
        "Return what in the callbacks' states tells of the clock or the machine, by their keys; '*' is any callback."
        found = {self.callbacks.keys[id(cb)]: list(cb.wall_clock) for cb in self.cbs if getattr(cb, 'wall_clock', ())}
        columns = [name for cb in self.cbs if getattr(type(cb), 'of_machine', False) for name in cb.metric_names]
        # of the Recorder, and of loggers
        places = ('history.*', 'open.logged', 'rows.*.1', 'writer.cache')
        if columns: found['*'] = [f'{place}.{name}' for name in columns for place in places]
        return found

    def _note_beginning(self) -> None:
        for cb in self.cbs:
            if keeps_attributes(cb): note_beginning(cb)

    def load_callback_states(
        self,
        states: Mapping[str, Any],   # from `callback_states`, of a Learner with the same callbacks
    ) -> None:
        """Hand each state to its callback.

        A state whose callback is not there is left out with a warning, and so is a callback without a state, which
        goes on as it is: both are named.
        """
        keys = {self.callbacks.keys[id(cb)]: cb for cb in self.cbs}
        stateful = {key for key, cb in keys.items() if has_own_state(cb) and state_of(cb) is not None}
        for key in (k for k in states if k not in keys):
            warn(f'There is a state for a callback `{key}`, and no such callback.{did_you_mean(key, keys)} It is left '
                 'out; add the callback first if it is to go on.', stacklevel=2)
        for key in sorted(stateful - set(states)):
            warn(f'There is no state for the callback `{key}` ({type(keys[key]).__name__}): it goes on as it is.',
                 stacklevel=2)
        for key, cb in keys.items():
            try: put_state(cb, states.get(key))
            except Exception as e:
                add_note(e, f'in {type(cb).__name__}.load_state_dict')
                raise


def state_of(cb: Any) -> dict[str, Any] | None:
    "Return the state of a callback: what it says itself, or else the attributes that have changed; or both."
    if not has_own_state(cb): return changed_attributes(cb)
    state = getattr(cb, 'state_dict', lambda: None)()
    more = changed_attributes(cb) if inherits_state(cb) else None
    return state if more is None else {STATE: state, ATTRIBUTES: more}


def put_state(cb: Any, state: Any) -> None:
    "Hand a callback what `state_of` returned."
    own, more = (state[STATE], state[ATTRIBUTES]) if isinstance(state, Mapping) and STATE in state else (state, {})
    if not has_own_state(cb): return put_attributes(cb, own or {})
    if own is not None: cb.load_state_dict(own)
    if inherits_state(cb): put_attributes(cb, more)
