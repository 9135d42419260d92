"""Runs over several processes: none begins after a failed one."""

from typing import Any

import pytest

from learnkit import Callback
from tests.helpers.distributing import make_learner
from tests.helpers.ranks import run_ranks


@pytest.mark.dist
def test_a_fit_after_a_failed_one_is_refused_at_once() -> None:
    def job(rank: int) -> list[str]:
        messages = []

        def fail(cb: Any) -> None:
            if cb.world.rank and cb.train_iter == 3:
                raise ValueError('broken')

        learn = make_learner(cbs=Callback(after_batch=fail))
        with learn.distributed('ddp', timeout='20s'):  # whose failed fit has closed the connections
            for resume in (False, None, True):
                try:
                    learn.fit(1, resume=resume)
                except Exception as e:
                    messages.append(f'{type(e).__name__}: {e}')
        learn.fit(1)
        return messages

    for messages in run_ranks(job):
        assert 'broken' in messages[0]
        assert all(t.startswith('DistributedError: The last run') for t in messages[1:])
