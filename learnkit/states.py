"""The states of callbacks, each under a key of its own, for whoever saves and resumes."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from warnings import warn

from learnkit.errors import CallbackError, OptionError, did_you_mean
from learnkit.runs import Runs
from learnkit.weights import plain

__all__ = ['States']


class States(Runs):
    "The part of the Learner that gathers its callbacks' states, and hands them back."

    def callback_states(self) -> dict[str, Any]:
        """Return the state of every callback that has one, by its key: its `state_key`, or its name, made unique.

        Raises `CallbackError`, with the callback's name, for a state that would not load safely.

        >>> from learnkit import EMA
        >>> from learnkit.testing import synth_learner
        >>> sorted(synth_learner(cbs=[EMA(), EMA(0.9)]).callback_states())
        ['ema', 'ema_2', 'recorder']
        """
        states = {}
        for cb in self.cbs:
            state = getattr(cb, 'state_dict', lambda: None)()
            if state is None: continue
            try: states[self._callbacks.keys[id(cb)]] = plain(state, 'state_dict()')
            except OptionError as e: raise CallbackError(f'{type(cb).__name__}: {e}') from None
        return states

    def load_callback_states(
        self,
        states: Mapping[str, Any],   # from `callback_states`, of this Learner or of one with the same callbacks
    ) -> None:
        """Hand each state to its callback.

        A state whose callback is not there is left out with a warning, and so is a callback without a state, which
        goes on as it is: both are named.
        """
        keys = {self._callbacks.keys[id(cb)]: cb for cb in self.cbs}
        stateful = {key for key, cb in keys.items() if getattr(cb, 'state_dict', lambda: None)() is not None}
        for key in (k for k in states if k not in keys):
            warn(f'There is a state for a callback `{key}`, and no such callback.{did_you_mean(key, keys)} It is left '
                 'out; add the callback first if it is to go on.', stacklevel=2)
        for key in sorted(stateful - set(states)):
            warn(f'There is no state for the callback `{key}` ({type(keys[key]).__name__}): it goes on as it is.',
                 stacklevel=2)
        for key, cb in keys.items():
            if key in states: cb.load_state_dict(states[key])
