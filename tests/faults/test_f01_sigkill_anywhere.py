"""Row 1: SIGKILL at a random instant. The resumed run ends in the very state of one that was not killed."""

import pytest

from learnkit.testing.harness import kill_and_resume
from tests.faults.resume_helpers import learner


def test_some_kills() -> None:
    report = kill_and_resume(learner, n_epoch=2, kills=2, seed=1)
    assert report.exact and report.resumes >= 2, report.differences


@pytest.mark.full
def test_many_kills() -> None:
    report = kill_and_resume(learner, n_epoch=4, kills=200, seed=2)
    print(
        f'row 1: {report.kills} kills, {report.resumes} of them resumed from a checkpoint, in {report.runs} runs: '
        f'{"all exact" if report.exact else "NOT exact"}'
    )
    assert report.exact, report.differences


@pytest.mark.filterwarnings('ignore:These attributes changed')  # it names the loss function
def test_a_difference_would_be_seen() -> None:
    "The harness detects state that is missing from checkpoints."

    def forgetful() -> object:
        steps = iter(range(1, 1000))
        learn = learner()
        learn.loss_func = lambda pred, targ: loss_func(pred, targ) * next(steps)
        return learn

    loss_func = learner().loss_func
    # A run that was killed after its last step ends with the same weights: try again until one was killed before.
    report = kill_and_resume(forgetful, n_epoch=2, kills=8, seed=1)
    assert not report.exact
