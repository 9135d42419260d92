"""Runs: a stop holds for one fit, errors are raised in their order."""

from typing import Any

import pytest
import torch

from learnkit import Callback, CancelBackwardException, Learner
from learnkit.engine.run import raise_first, run_level, set_batch
from learnkit.testing import RegModel, synth_dls, synth_learner
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


@pytest.mark.parametrize('raises', [None, CancelBackwardException, KeyError])
def test_a_level_that_is_run_by_hand_has_its_events(raises: type[Exception] | None) -> None:
    seen: list[Any] = []

    def work() -> None:
        seen.append(learn.run.levels)
        if raises is not None:
            raise raises

    events = ('before_backward', 'after_cancel_backward', 'after_backward')
    handlers: dict[str, Any] = {e: lambda cb, e=e: seen.append(e) for e in events}
    learn = synth_learner(cbs=Callback(**handlers))
    if raises is KeyError:
        with pytest.raises(KeyError):
            run_level(learn, 'backward', work)
    else:
        run_level(learn, 'backward', work)
    begin = ['before_backward', ('backward',)]
    end = {
        None: ['after_backward'],
        CancelBackwardException: ['after_cancel_backward', 'after_backward'],
        KeyError: [],
    }
    assert seen == begin + end[raises]
    assert learn.run.levels == ()


def test_a_batch_is_replaced_as_the_learner_splits_it() -> None:
    class Reversed(Learner):
        def _split(self, b: Any) -> None:
            super()._split(b[::-1])

    x, y = torch.zeros(2, 1), torch.ones(2, 1)
    for cls, expected in ((Learner, x), (Reversed, y)):
        learn = cls(synth_dls(), RegModel(), torch.nn.MSELoss())
        set_batch(learn, (x, y))
        assert learn.xb[0] is expected
