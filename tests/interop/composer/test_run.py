"""What all callbacks of Composer share in a Learner: one state, and the end of the fit that it has."""

from functools import partial
from typing import Any

import pytest

from learnkit.interop import from_composer
from tests.helpers.interop import Read, make_learner

learner = partial(make_learner, adapt=from_composer)


@pytest.mark.parametrize(('end', 'n'), [('4ba', 4), ('40sp', 5), ('2ep', 6), ('9ba', 9)])
def test_a_callback_ends_the_fit_earlier(end: str, n: int) -> None:
    class Shorten:
        def fit_start(self, state: Any, logger: Any) -> None:
            state.max_duration = end

    learn = learner(Shorten())
    learn.fit(3)
    assert learn.time.ba == n

    class Lengthen:
        def fit_start(self, state: Any, logger: Any) -> None:
            state.max_duration = '4ep'

    with pytest.raises(AttributeError, match='the fit ends at 3ep'):
        learner(Lengthen()).fit(3)


def test_all_callbacks_share_one_state_and_what_one_writes_is_read_by_the_other() -> None:
    class Writes:
        def before_load(self, state: Any, logger: Any) -> None:
            self.state, self.end = state, state.max_duration
            state.temperature = 0.5

        def eval_start(self, state: Any, logger: Any) -> None:
            other = [0] * 7
            state.set_dataloader(other, 'extra', 7)
            assert (state.dataloader, state.dataloader_label) == (other, 'extra')

        def batch_start(self, state: Any, logger: Any) -> None:
            assert (state.dataloader_label, state.dataloader_len.value) == ('train', 3)

    writes = Writes()
    reads = Read(lambda s: (s, s.temperature), 'epoch_end')
    learn = learner(reads, writes)
    learn.fit(1)
    assert reads.got == [(writes.state, 0.5)] and writes.end == '1ep'
