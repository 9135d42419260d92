"""Hyperparameters of each step, as the optimizer used them."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from learnkit import SGD, Callback, OptimWrapper
from tests.helpers.recording import TRAIN, VALID, learner


def test_hyper_parameters_of_each_step_are_those_that_were_used() -> None:
    def schedule(cb: Any) -> None:
        cb.opt.set_hypers(lr=0.1 / (1 + cb.train_iter), mom=cb.pct_train)

    schedule_cb = Callback(before_batch=schedule)
    schedule_cb.run_valid = False
    learn = learner((TRAIN, VALID), schedule_cb, opt_func=partial(SGD, mom=0.9))
    learn.fit(2)
    hps = learn.recorder.hps
    assert learn.recorder.lrs == hps['lr'] == pytest.approx([0.1 / (1 + i) for i in range(10)])
    assert hps['mom'] == pytest.approx([i / 10 for i in range(10)]) and hps['wd'] == [0.0] * 10


def test_a_rate_in_a_tensor_is_kept_as_it_was_at_each_step() -> None:
    def schedule(cb: Any) -> None:
        cb.opt.set_hyper('lr', 0.5**cb.train_iter)

    opt_func = lambda params, lr: torch.optim.SGD(params, lr=torch.tensor(lr))
    learn = learner((TRAIN, VALID), Callback(before_step=schedule), opt_func=opt_func)
    learn.fit(1)
    assert isinstance(learn.opt.param_groups[0]['lr'], Tensor)
    assert learn.recorder.lrs == learn.recorder.hps['lr'] == [0.5**i for i in range(5)]


def test_an_optimizer_of_another_kind_in_the_middle_of_a_fit() -> None:
    "All steps are recorded; a hyperparameter that an optimizer lacked is nan, one that the last lacks is dropped."

    def replace(cb: Any) -> None:
        if cb.train_iter == 2:
            opt = torch.optim.Adagrad(cb.learn.model.parameters(), lr=0.25)
            cb.learn.opt = OptimWrapper(opt=opt)

    learn = learner((TRAIN, VALID), Callback(before_draw=replace), opt_func=torch.optim.SGD)
    learn.fit(1)
    hps = learn.recorder.hps
    assert learn.recorder.lrs == hps['lr'] == [0.1, 0.1, 0.25, 0.25, 0.25]
    assert hps['wd'] == [0.0] * 5 and 'mom' not in hps
    assert [v != v for v in hps['eps']] == [True, True, False, False, False]
