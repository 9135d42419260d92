"""Views of a training: handlers and their places, the time of its parts, and which callback changed what."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from learnkit import (
    Callback,
    CancelBatchException,
    GradientClip,
    LRMonitor,
    MixUp,
    OptimizerMonitor,
    UnknownEventError,
)
from learnkit.engine.timings import EVERY, FIRST
from learnkit.testing import synth_learner
from tests.helpers.clock import use_clock


def learner(n_train: int = 3, **kwargs: Any) -> Any:
    learn = synth_learner(n_train=n_train, n_valid=1, **kwargs)
    learn.logger = lambda row: None
    return learn


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


def test_explain_lists_what_is_off_and_what_is_observed() -> None:
    class Looks(Callback):
        observer, run_train = True, False

        def after_loss(self) -> None:
            pass

    learn = learner(cbs=Looks())
    [handler] = learn.explain('after_loss')
    assert handler.when == 'evaluation' and handler.function == 'Looks.after_loss' and handler.is_on
    learn.looks.run = False
    assert not learn.explain('after_loss')[0].is_on
    assert repr(learn.explain('before_step')) == 'nothing runs there'
    with pytest.raises(UnknownEventError, match='after_loss'):
        learn.explain('after_los')


# ------------------------------------------------------------------------------------------ timings


def test_one_step_in_so_many_is_measured() -> None:
    learn = learner(n_train=100)
    assert 'No step has been measured' in repr(learn.timings)
    learn.fit(1)
    assert learn.timings.n == len(range(FIRST - 1, 100, EVERY))
    learn.fit(1)  # a new fit starts from zero
    assert learn.timings.n == len(range(FIRST - 1, 100, EVERY))


def test_the_total_is_the_sum_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    "Time of sleeping parts is attributed to them, and the parts add up to the step."
    clock = use_clock(monkeypatch, 'learnkit.engine.timings')

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def forward(self, x: Any) -> Any:
            clock.sleep(4.0)
            return x * self.w

    class Loader(list[Any]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                clock.sleep(8.0)
                yield batch

    batches = Loader([(torch.ones(2, 1), torch.ones(2, 1))] * 20)
    learn = learner(dls=batches, model=Slow(), cbs=Callback(after_step=lambda cb: clock.sleep(2.0)))
    learn.fit(1)
    seconds = learn.timings.seconds
    assert list(seconds)[:3] == ['data', 'forward', 'Callback']
    expected = {'data': 8.0, 'forward': 4.0, 'Callback': 2.0}
    assert {part: s for part, s in seconds.items() if s} == expected
    expected = {'data', 'transfer', 'forward', 'loss', 'backward', 'step', 'loop', 'Recorder'}
    assert expected <= set(seconds)
    text = repr(learn.timings)
    assert text.splitlines()[1].startswith('data') and '(1 measured)' in text


def test_the_plot_has_a_bar_for_each_part() -> None:
    learn = learner(n_train=20)
    learn.fit(1)
    ax = learn.timings.plot()
    factor = 1e3 if 'ms' in ax.get_xlabel() else 1e6  # a slow machine is shown in milliseconds
    expected = [s * factor for s in learn.timings.seconds.values()]
    assert [bar.get_width() for bar in ax.patches] == pytest.approx(expected)


def test_a_step_that_is_measured_trains_as_any_other() -> None:
    def trained(first: int) -> list[Any]:
        torch.manual_seed(0)
        learn = learner(n_train=20, cbs=[MixUp(), GradientClip()])
        with pytest.MonkeyPatch.context() as m:
            m.setattr('learnkit.engine.timings.FIRST', first)
            learn.fit(2)
        assert learn.timings.n == (2 if first == FIRST else 0)
        return [*learn.model.parameters(), *learn.recorder.losses]

    assert all(torch.equal(a, b) for a, b in zip(trained(FIRST), trained(10_000), strict=True))


@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'before_step', 'after_batch'])
@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt, CancelBatchException])
def test_the_loop_reads_its_own_tables_again_after_an_exception(
    event: str, error: type[BaseException]
) -> None:
    def fail(cb: Any) -> None:
        if cb.train_iter + (event != 'after_batch') == FIRST and cb.training and armed:
            raise error

    armed = True
    learn = learner(n_train=20, cbs=Callback(**{event: fail}))
    if error is CancelBatchException and event != 'after_batch':
        learn.fit(1)
    else:
        with pytest.raises((error, RuntimeError)):
            learn.fit(1)
    assert learn.tables is learn.callbacks.tables
    armed = False
    learn.fit(1)
    assert learn.timings.n == 1


def test_callbacks_added_and_removed_in_a_measured_step_run() -> None:
    seen: list[int] = []
    late = Callback(after_batch=lambda cb: seen.append(cb.train_iter))

    def add(cb: Any) -> None:
        if cb.train_iter == FIRST - 1:
            cb.learn.add_cb(late)
        if cb.train_iter == FIRST + 1:
            cb.learn.remove_cb(late)

    learner(n_train=20, cbs=Callback(before_batch=add)).fit(1)
    assert seen == [FIRST, FIRST + 1]


def test_an_evaluation_in_a_measured_step_is_the_callback_that_asks_for_it() -> None:
    learn = learner(n_train=20, eval_every='1ba')
    learn.fit(1)
    assert learn.timings.n == 1 and learn.timings.seconds['EvaluateWithinEpochs'] > 0


def test_a_learner_with_timings_can_be_copied() -> None:
    learn = learner(n_train=20)
    learn.fit(1)
    duplicate = copy.deepcopy(learn)
    assert duplicate.timings.seconds == learn.timings.seconds
    assert duplicate.timings is not learn.timings
    duplicate.fit(1)


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
    assert learn.tables is learn.callbacks.tables
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


def test_a_model_with_lazy_layers_can_be_traced() -> None:
    learn = synth_learner(model=nn.LazyLinear(1))
    with learn.no_bar(), learn.trace() as changes:
        learn.fit(1)
    assert not any(c.what.startswith('weight') for c in changes)


def test_trace_ends_when_the_training_fails() -> None:
    def fail(cb: Any) -> None:
        raise ValueError

    learn = learner(cbs=Callback(after_loss=fail))
    with pytest.raises(ValueError), learn.trace() as changes:
        learn.fit(1)
    assert learn.tables is learn.callbacks.tables and repr(changes)


def test_explain_names_what_overrides_the_dispatch() -> None:
    class Every(Callback):
        def run_event(self, event_name: str) -> None:
            pass

    [handler] = [h for h in learner(cbs=Every()).explain('after_loss') if h.callback == 'Every']
    assert handler.file == __file__ and handler.function == 'Every.run_event'


def test_draws_from_python_and_numpy_are_noticed() -> None:
    class Draws(Callback):
        observer = True

        def after_loss(self) -> None:
            random.random()

        def after_step(self) -> None:
            np.random.rand()

    np.random.rand()  # from then on a draw moves a place in numpy's state, and nothing else
    learn = learner(n_train=1, cbs=Draws())
    with pytest.warns(UserWarning, match='Draws'), learn.trace() as changes:
        learn.fit(1)
    assert {c.event for c in changes.by_observers} == {'after_loss', 'after_step'}


def test_metric_names_lists_each_once_with_its_meaning() -> None:
    learn = learner(cbs=[OptimizerMonitor(every='1ba'), LRMonitor(every='1ba')])
    before = learn.metric_names()
    learn.fit(1)
    assert learn.metric_names() == before  # a pattern matches names logged since
    assert before['train_loss'] == 'training loss, mean of the epoch'
    assert 'l2_norm/grad/{parameter}' in before
    assert all(isinstance(meaning, str) and meaning for meaning in before.values())
