"""Runs: a stop holds for one fit, errors are raised in their order."""

import pytest

from learnkit import Callback
from learnkit.engine.run import raise_first
from learnkit.testing import synth_learner
from tests.helpers.learners import bare_learner


def test_a_stop_between_fits_does_not_shorten_the_next() -> None:
    learn = bare_learner(3, recorder=None, cls=synth_learner)
    learn.stop()
    learn.fit(2)
    assert learn.train_iter == 6


def test_a_stop_in_a_validation_alone_does_not_shorten_the_next_fit() -> None:
    learn = bare_learner(3, recorder=None, cls=synth_learner)
    learn.validate(cbs=Callback(after_batch=lambda cb: cb.learn.stop()))
    learn.fit(1)
    assert learn.train_iter == 3


def test_the_first_error_has_notes_of_the_others() -> None:
    raise_first(None, [])
    with pytest.raises(ValueError, match='a') as e:
        raise_first(None, [ValueError('a'), KeyError('b')])
    assert e.value.__notes__ == ["and then KeyError: 'b' "]
