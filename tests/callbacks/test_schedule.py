"""Annealing, combined schedules, `ParamScheduler`, and the fits that follow a schedule."""

import copy
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learnkit import SGD, Callback, CancelFitException
from learnkit.callbacks.schedule import ParamScheduler, SchedLin, SchedNo
from learnkit.core.errors import FitError, OptimizerError, ScheduleError
from learnkit.testing import synth_learner
from tests.helpers.learners import bare_learner

learner = partial(bare_learner, cls=synth_learner, n_valid=1)


# ----------------------------------------------------------------------------------- ParamScheduler


class Used(Callback):
    "Record the hyperparameters of each step."

    def __init__(self, *names: str) -> None:
        self.names, self.values = names, []

    def before_step(self) -> None:
        self.values.append([[float(h[n]) for n in self.names] for h in self.opt.hypers])


def test_every_step_is_taken_with_the_scheduled_values() -> None:
    used = Used('lr', 'mom', 'wd')
    learn = learner(5, wd_bn_bias=True)  # the model has scalars alone, which have no weight decay
    scheds = {
        'lr': SchedLin(1.0, 0.0),
        'mom': lambda pct: 0.5 + pct / 4,
        'wd': lambda pct: torch.tensor(pct),
    }
    learn.fit(2, cbs=[ParamScheduler(scheds), used])
    expected = [[[1 - i / 10, 0.5 + i / 40, i / 10]] for i in range(10)]
    np.testing.assert_allclose(used.values, expected, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(learn.recorder.hps['lr'], [1 - i / 10 for i in range(10)])
    assert all(type(h) is float for h in (learn.opt.hypers[0]['lr'], learn.opt.hypers[0]['wd']))


@pytest.mark.parametrize('opt_func', [torch.optim.Adam, partial(SGD, mom=0.9)])
@pytest.mark.parametrize('kind', [np.array, torch.tensor, list])
def test_values_for_each_group(opt_func: Any, kind: Any) -> None:
    used = Used('lr', 'mom')
    learn = learner(4, opt_func=opt_func, splitter=lambda m: [[m.a], [m.b]])
    scheds = {'lr': lambda pct: kind([0.5 + pct, 2.0]), 'mom': SchedLin(0.5, 0.75)}
    learn.fit(1, cbs=[ParamScheduler(scheds), used])
    assert used.values == [[[0.5 + i / 4, 0.5 + i / 16], [2.0, 0.5 + i / 16]] for i in range(4)]


def test_groups_that_are_replaced_in_the_fit_are_followed() -> None:
    def reload(cb: Any) -> None:
        if cb.train_iter == 2:
            cb.opt.load_state_dict(copy.deepcopy(cb.opt.state_dict()))
        if cb.train_iter == 4:
            cb.learn.create_opt()

    used = Used('lr')
    learn = learner(6, opt_func=torch.optim.Adam)
    cbs = [ParamScheduler({'lr': SchedLin(6.0, 0.0)}), Callback(after_batch=reload), used]
    learn.fit(1, cbs=cbs)
    assert [v[0][0] for v in used.values] == pytest.approx([6.0, 5.0, 4.0, 3.0, 2.0, 1.0])


@pytest.mark.parametrize(
    ('scheds', 'message'),
    [
        ({'speed': SchedNo(1.0, 1.0)}, 'speed is not a hyperparameter'),
        ({'lr': lambda pct: [1.0, 2.0, 3.0]}, '3 values for 1 param'),
        ({'lr': SchedNo(-1.0, -1.0)}, '0 or more'),
        ({'lr': lambda pct: None}, 'lr=None'),
    ],
)
def test_what_cannot_be_set_is_reported_before_training(scheds: Any, message: str) -> None:
    learn = learner()
    with pytest.raises(OptimizerError, match=message):
        learn.fit(1, cbs=ParamScheduler(scheds))
    assert learn.train_iter == 0 and not learn.opt.state


def test_a_bad_value_in_the_middle_names_the_place() -> None:
    for bad in (float('nan'), -1.0, np.array([float('nan')])):
        learn = learner()
        with pytest.raises(OptimizerError) as e:
            cbs = ParamScheduler({'lr': lambda pct, bad=bad: 0.1 if pct < 0.45 else bad})
            learn.fit(1, cbs=cbs)
        assert 'in ParamScheduler.before_batch (epoch 0, batch 5)' in e.value.__notes__


# ----------------------------------------------------------------------------------- scheduled fits


def cosine(start: float, end: float, p: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * p)) / 2


def one_cycle(
    pct: float, peak: float, div: float = 25.0, div_final: float = 1e5, at: float = 0.25
) -> float:
    return (
        cosine(peak / div, peak, pct / at)
        if pct < at
        else cosine(peak, peak / div_final, (pct - at) / (1 - at))
    )


def test_one_cycle() -> None:
    learn = learner()
    learn.fit_one_cycle(2, 0.1)
    expected = [one_cycle(i / 20, 0.1) for i in range(20)]
    np.testing.assert_allclose(learn.recorder.lrs, expected, rtol=1e-9)
    moms = [
        cosine(0.95, 0.85, i / 5) if i < 5 else cosine(0.85, 0.95, (i - 5) / 15) for i in range(20)
    ]
    np.testing.assert_allclose(learn.recorder.hps['mom'], moms, rtol=1e-9)
    learn.fit_one_cycle(1, div=2.0, div_final=4.0, pct_start=0.5, moms=(0.5, 0.25, 0.75))
    expected = [one_cycle(i / 10, 1e-3, 2, 4, 0.5) for i in range(10)]
    np.testing.assert_allclose(learn.recorder.lrs, expected, rtol=1e-9)
    assert learn.recorder.hps['mom'][0] == 0.5 and learn.recorder.hps['mom'][5] == 0.25
    assert learn.recorder.plot_sched() is not None


@pytest.mark.parametrize(
    ('lr_max', 'rates'),
    [
        ([0.1, 0.2], [0.1, 0.2]),
        (slice(1e-3, 0.1), [1e-3, 0.1]),
        (slice(0.1), [0.01, 0.1]),
        (None, [1e-3, 1e-3]),
    ],
)
def test_one_cycle_over_groups(lr_max: Any, rates: list[float]) -> None:
    used = Used('lr')
    learn = learner(8, opt_func=torch.optim.Adam, splitter=lambda m: [[m.a], [m.b]])
    learn.fit_one_cycle(1, lr_max, cbs=used)
    expected = [[[one_cycle(i / 8, r)] for r in rates] for i in range(8)]
    np.testing.assert_allclose(used.values, expected, rtol=1e-6)


def test_momentum_of_zero_stays_unless_it_is_asked_for() -> None:
    learn = learner(opt_func=SGD)
    learn.fit_one_cycle(1, 0.01)
    assert learn.recorder.hps['mom'] == [0.0] * 10
    learn.fit_one_cycle(1, 0.01, moms=(0.9, 0.8, 0.9))
    assert learn.recorder.hps['mom'][0] == 0.9
    without = learner(opt_func=torch.optim.Adagrad)
    without.fit_one_cycle(1, 0.01)
    assert one_cycle(0.1, 0.01) == pytest.approx(without.recorder.lrs[1])
    with pytest.raises(OptimizerError, match='mom is not a hyperparameter'):
        without.fit_one_cycle(1, moms=(0.9,) * 3)


def test_flat_cos() -> None:
    learn = learner()
    learn.fit_flat_cos(2, 0.1)
    expected = [0.1] * 15 + [cosine(0.1, 1e-6, i / 5) for i in range(5)]
    np.testing.assert_allclose(learn.recorder.lrs, expected, rtol=1e-9)
    learn.fit_flat_cos(2, 0.1, pct_start=0.5, start_epoch=1)
    expected = [cosine(0.1, 1e-6, i / 10) for i in range(10)]
    np.testing.assert_allclose(learn.recorder.lrs, expected, rtol=1e-9)
    learn.fit_flat_cos(1, 0.1, pct_start=1.0)
    assert learn.recorder.lrs == [0.1] * 10


def test_sgdr() -> None:
    learn = learner(4)
    learn.fit_sgdr(3, 1, 0.1)
    assert learn.n_epoch == 7
    expected = [cosine(0.1, 0.0, i / n) for n in (4, 8, 16) for i in range(n)]
    np.testing.assert_allclose(learn.recorder.lrs, expected, rtol=1e-9, atol=1e-15)
    learn.fit_sgdr(2, 1, 0.1, cycle_mult=1)
    expected = [cosine(0.1, 0.0, i / 4) for i in range(4)] * 2
    np.testing.assert_allclose(learn.recorder.lrs, expected, rtol=1e-9)


def test_fine_tune() -> None:
    learn = learner(10, splitter=lambda m: [[m.a], [m.b]], opt_func=torch.optim.Adam)
    used = Used('lr')
    weights: list[Tensor] = []

    def note(cb: Any) -> None:
        weights.append(cb.learn.model.a.detach().clone())

    learn.fine_tune(2, 0.1, cbs=[used, Callback(after_epoch=note)])
    assert len(weights) == 3
    assert weights[1] != weights[0]
    assert all(p.requires_grad for p in learn.model.parameters())
    frozen = [[[one_cycle(i / 10, r, at=0.99)] for r in (0.01, 0.1)] for i in range(10)]
    free = [[[one_cycle(i / 20, r, 5.0, at=0.3)] for r in (5e-4, 0.05)] for i in range(20)]
    np.testing.assert_allclose(used.values, frozen + free, rtol=1e-9)
    start = learner(10, splitter=lambda m: [[m.a], [m.b]], opt_func=torch.optim.Adam)
    before = start.model.a.item()
    start.fine_tune(0, 0.1)
    assert start.model.a.item() == before != weights[0].item()
    start.fine_tune(3, 0.1, start_epoch=2)
    assert [row['epoch'] for row in start.history] == [0, 2]


@pytest.mark.parametrize('fit', ['fit_one_cycle', 'fit_flat_cos', 'fit_sgdr'])
def test_an_interrupted_fit_continues_with_the_same_rates(fit: str) -> None:
    def stop(cb: Any) -> None:
        if cb.epoch == 1:
            raise CancelFitException

    args: Any = {'fit_one_cycle': (3, 0.1), 'fit_flat_cos': (3, 0.1), 'fit_sgdr': (2, 1, 0.1)}[fit]
    whole, parts, rates = learner(), learner(), []
    getattr(whole, fit)(*args)
    getattr(parts, fit)(*args, cbs=Callback(before_epoch=stop))
    rates += parts.recorder.lrs
    getattr(parts, fit)(*args, start_epoch=1)
    rates += parts.recorder.lrs
    assert rates == whole.recorder.lrs and len(rates) == 30


BAD: list[tuple[str, Any, Any, str]] = [
    ('fit_one_cycle', ScheduleError, {'pct_start': 1.5}, '1.5'),
    ('fit_one_cycle', FitError, {'start_epoch': 5}, 'start_epoch=5'),
    ('fit_flat_cos', FitError, {'n_epoch': -1}, 'n_epoch'),
]
FIRST: dict[str, dict[str, Any]] = {
    'fit_one_cycle': {'n_epoch': 1},
    'fit_flat_cos': {'n_epoch': 1},
}


@pytest.mark.parametrize(('fit', 'error', 'options', 'message'), BAD)
def test_bad_options_change_nothing(fit: str, error: Any, options: Any, message: str) -> None:
    learn = learner()
    with pytest.raises(error, match=message):
        getattr(learn, fit)(**FIRST[fit] | options)
    assert learn.opt is None
    assert not learn.history
    assert all(p.requires_grad for p in learn.model.parameters())
