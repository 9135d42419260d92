"""What makes a resume inexact is found, and named."""

from pathlib import Path

import pytest

from learnkit import Callback, Checkpoint
from learnkit.testing import synth_learner


class Hidden(Callback):
    "Takes rates from an iterator, whose position cannot be saved."

    def __init__(self, path: Path) -> None:
        self.by_default, self.log = iter([1]), path.open('a')

    def before_fit(self) -> None:
        self.rates = iter(range(1, 100))

    def before_batch(self) -> None:
        if self.training:
            self.opt.set_hyper('lr', 0.001 * next(self.rates))


def test_what_is_lost_is_named_by_a_failed_check_and_by_the_first_checkpoint(
    tmp_path: Path,
) -> None:
    hidden = Hidden(tmp_path / 'log')
    learn = synth_learner(cbs=hidden)
    found = learn.check_resume(4)
    assert not found
    # what cannot be read may have changed
    assert [line.split(':')[0] for line in found.lost] == ['Hidden.by_default', 'Hidden.rates']
    assert found.differences and 'Hidden.rates: its content cannot be read' in repr(found)
    learn.add_cb(Checkpoint('1ba', tmp_path))
    with pytest.warns(UserWarning, match=r'\n  Hidden.rates: .*define `state_dict`') as caught:
        learn.fit(1)
    assert len(caught) == 1
    hidden.log.close()
