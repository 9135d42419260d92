"""Learning rates in tensors, of ready optimizers, and of added groups."""

from typing import Any

import torch

from learnkit import SGD, Callback
from learnkit.testing import synth_learner
from tests.helpers.learners import bare_learner


def test_a_schedule_does_not_write_into_the_learners_own_rate() -> None:
    rate = torch.tensor(0.125)
    used: list[float] = []

    def schedule(cb: Any) -> None:
        used.append(float(cb.opt.hypers[0]['lr']))
        cb.opt.set_hyper('lr', 0.5)

    cbs = [Callback(before_step=schedule)]
    learn = bare_learner(3, 1, cls=synth_learner, cbs=cbs, opt_func=SGD, lr=rate)
    learn.fit(1)
    learn.fit(1)
    learn.fit(1, lr=(other := torch.tensor(0.25)))
    assert used == [0.125, 0.5, 0.5] * 2 + [0.25, 0.5, 0.5]
    assert learn.lr is rate and rate.item() == 0.125 and other.item() == 0.25
