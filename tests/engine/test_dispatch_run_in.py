"""`run_in` selects the runs in which a callback's handlers are called."""

import pytest

from learnkit import Callback, FixedStopper
from learnkit.testing import synth_learner


class Notes(Callback):
    "Record event names with the kind of their run."

    def __init__(self, run_in: str) -> None:
        self.run_in, self.seen = run_in, []

    def before_fit(self) -> None:
        self.seen.append(('before_fit', self.learn.fitting))

    def after_validate(self) -> None:
        self.seen.append(('after_validate', self.learn.fitting))

    def cleanup(self) -> None:
        self.seen.append(('cleanup', self.learn.fitting))


FIT = [('before_fit', True), ('after_validate', True), ('cleanup', True)]
EVALUATION = [('before_fit', False), ('after_validate', False), ('cleanup', False)]


@pytest.mark.parametrize(
    ('run_in', 'in_fit', 'in_evaluation'),
    [
        ('any', FIT, EVALUATION),
        ('fit', FIT, [('cleanup', False)]),
        ('evaluation', [('cleanup', True)], EVALUATION),
    ],
)
def test_handlers_run_in_their_kind_of_run(
    run_in: str, in_fit: list[tuple[str, bool]], in_evaluation: list[tuple[str, bool]]
) -> None:
    cb = Notes(run_in)
    learn = synth_learner(n_train=2, n_valid=1, cbs=cb)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        assert cb.seen == in_fit
        cb.seen.clear()
        learn.validate()
        assert cb.seen == in_evaluation
        cb.seen.clear()
        learn.get_preds()
        assert cb.seen == in_evaluation
        cb.seen.clear()
        learn.fit(1)
    assert cb.seen == in_fit
    assert cb.run


def test_a_fit_in_a_with_block_has_the_callbacks_of_fits() -> None:
    cb = Notes('fit')
    learn = synth_learner(n_train=2, n_valid=1, cbs=[cb, FixedStopper('1ep')])
    with learn.no_bar(), learn.no_logging(), learn:
        assert not cb.seen
        learn.fit(3)
        assert cb.seen == FIT[:2]
        learn.validate()
        assert cb.seen == FIT[:2]
    assert cb.seen == [*FIT[:2], ('cleanup', False)]
    assert len(learn.history) == 1
