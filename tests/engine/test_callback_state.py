"""Callback states: a key for each callback, plain values, and warnings that name missing callbacks."""

from functools import partial
from typing import Any

import pytest

from learnkit import EMA, Callback, CallbackError, EarlyStoppingCallback
from tests.helpers.learners import quiet_synth_learner


class Counter(Callback):
    "Counts batches."

    def __init__(self, state_key: str | None = None) -> None:
        self.n = 0
        if state_key:
            self.state_key = state_key

    def after_batch(self) -> None:
        self.n += 1

    def state_dict(self) -> dict[str, Any]:
        return {'n': self.n}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self.n = sd['n']


learner = partial(quiet_synth_learner, n_train=3, n_valid=1)


def test_two_of_one_class_keep_separate_states() -> None:
    a, b = Counter(), Counter()
    learn = learner(a, b)
    learn.fit(1)
    b.n = 100
    states = learn.callback_states()
    assert states['counter'] == {'n': 4} and states['counter_2'] == {'n': 100}

    c, d = Counter(), Counter()
    learner(c, d).load_callback_states(states)
    assert (c.n, d.n) == (4, 100)


def test_what_is_missing_is_reported_by_name() -> None:
    states = learner(EMA(), Counter()).callback_states()
    other = learner(EarlyStoppingCallback())
    with pytest.warns(UserWarning, match='saved state') as caught:
        other.load_callback_states(states)
    texts = sorted(str(w.message) for w in caught)
    assert len(texts) == 3
    assert texts[0].startswith('No callback `counter` for the saved state')
    assert texts[1].startswith('No callback `ema` for the saved state')
    assert texts[2].startswith(
        'No saved state for the callback `early_stopping` (EarlyStoppingCallback)'
    )


def test_a_state_that_would_not_load_safely_is_refused() -> None:
    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {'inner': {'f': print}}

    with pytest.raises(
        CallbackError, match=r"Odd: state_dict\(\)\['inner'\]\['f'\] .*builtin_function"
    ):
        learner(Odd()).callback_states()
