"""Views of a training: handlers and their places, the time of its parts, and which callback changed what."""

from functools import partial
from typing import Any

import pytest
import torch

from learnkit import Callback, GradientClip, LRMonitor, MixUp, OptimizerMonitor
from tests.helpers.learners import quiet_synth_learner

learner = partial(quiet_synth_learner, n_train=3, n_valid=1)


# ------------------------------------------------------------------------------------------ explain


def test_explain_lists_handlers_in_order_with_their_place() -> None:
    def late(cb: Any) -> None:
        pass

    line = late.__code__.co_firstlineno
    cb = Callback(after_batch=late)
    cb.order = 70
    learn = learner(cbs=[cb, GradientClip])
    found = learn.explain('after_batch')
    expected = ['TrainEvalCallback', 'Recorder', 'ProgressCallback', 'Callback']
    assert [h.callback for h in found] == expected
    assert [h.when for h in found] == ['training', 'always', 'always', 'always']
    assert (found[-1].file, found[-1].line, found[-1].function) == (__file__, line, 'Callback.late')
    assert str(found[-1]).endswith(f'{__file__}:{line}') and len(repr(found).splitlines()) == 4
    assert learn.explain('before_step')[0].function == 'GradientClip.before_step'


# -------------------------------------------------------------------------------------------- trace


def test_trace_names_what_each_callback_changed() -> None:
    class Meddles(Callback):
        def before_batch(self) -> None:
            self.learn.xb = tuple(x + 1 for x in self.xb)

        def after_pred(self) -> None:
            self.learn.pred = self.pred * 2

        def after_loss(self) -> None:
            self.learn.loss_grad = self.loss_grad * 3

        def before_step(self) -> None:
            self.opt.set_hyper('lr', 0.5)
            self.model.a.grad.mul_(2)

        def after_step(self) -> None:
            self.model.b.data.add_(1)

    learn = learner(n_train=1, cbs=[Meddles()])
    with learn.trace() as changes:
        learn.fit(1)
    own = [(c.event, c.what) for c in changes if c.callback == 'Meddles' and c.epoch == 0][:6]
    assert own == [
        ('before_batch', 'xb'),
        ('after_pred', 'pred'),
        ('after_loss', 'loss_grad'),
        ('before_step', 'gradient of a'),
        ('before_step', 'hyper lr'),
        ('after_step', 'weight b'),
    ]
    assert learn.parts.callbacks.tables is learn.parts.callbacks.tables
    n = len(changes)
    learn.fit(1)
    assert len(changes) == n  # outside the context nothing is watched


def test_an_observer_that_changed_a_number_is_reported_by_name() -> None:
    class Peeks(Callback):
        observer = True

        def after_batch(self) -> None:
            torch.rand(1)

        def before_batch(self) -> None:
            self.xb[0].mul_(1.5)

    class Honest(Callback):
        observer = True

        def after_batch(self) -> None:
            self.mean = float(self.pred.mean())

    learn = learner(n_train=1, cbs=[Peeks(), Honest()])
    with pytest.warns(UserWarning, match=r'Peeks .* xb, random numbers'):
        with learn.trace() as changes:
            learn.fit(1)
    assert {c.callback for c in changes.by_observers} == {'Peeks'}


def test_a_traced_training_gives_the_same_numbers() -> None:
    def trained(traced: bool) -> list[Any]:
        torch.manual_seed(0)
        learn = learner(n_train=4, cbs=[MixUp()])
        if not traced:
            learn.fit_one_cycle(2)
        else:
            with learn.trace():
                learn.fit_one_cycle(2)
        return [*learn.model.parameters(), *learn.recorder.losses]

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


def test_metric_names_lists_each_once_with_its_meaning() -> None:
    learn = learner(cbs=[OptimizerMonitor(every='1ba'), LRMonitor(every='1ba')])
    before = learn.metric_names()
    learn.fit(1)
    assert learn.metric_names() == before  # a pattern matches names logged since
    assert before['train_loss'] == 'training loss, mean of the epoch'
    assert 'l2_norm/grad/{parameter}' in before
    assert all(isinstance(meaning, str) and meaning for meaning in before.values())
