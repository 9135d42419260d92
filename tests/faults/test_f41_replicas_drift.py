"""Row 41: one weight changes in one process alone. A comparison of checksums names the tensor and the process."""

from typing import Any

import pytest
import torch

from learnkit import Callback
from learnkit.core.errors import DistributedError
from tests.helpers.distributing import make_dls, make_learner
from tests.helpers.ranks import run_ranks


def drifting(rank: int, what: str) -> str:
    "Change one number in the last process at the end of an epoch by one unit in the last place."

    def drift(cb: Any) -> None:
        if cb.world.rank != cb.world.size - 1:
            return
        t = cb.model[3].weight if what == 'weight' else cb.opt.state[cb.model[3].weight]['exp_avg']
        with torch.no_grad():
            t[1, 2] = torch.nextafter(t[1, 2], torch.tensor(9.0, dtype=t.dtype))

    def compare(cb: Any) -> None:
        if cb.epoch == 1:
            cb.learn.check_replicas()

    cbs = [Callback(after_train=drift), Callback(after_epoch=compare)]
    learn = make_learner(make_dls(), cbs=cbs)
    with learn.distributed('ddp', timeout='300s'):
        learn.check_replicas()
        with pytest.raises(DistributedError) as e:
            learn.fit(3)
    return str(e.value)


@pytest.mark.parametrize(
    ('what', 'name', 'n'), [('weight', '3.weight', 2), ('momentum', 'exp_avg of 3.weight', 3)]
)
def test_the_tensor_is_named(what: str, name: str, n: int) -> None:
    for text in run_ranks(drifting, n, what):
        assert f'{name} (process {n - 1})' in text and '0.weight' not in text
