"""The time of the parts of a step."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import (
    Callback,
    CancelBatchException,
    GradientClip,
    MixUp,
    StepTimeMonitor,
)
from learnkit.monitors.step_time import FIRST
from tests.helpers.clock import use_clock
from tests.helpers.learners import quiet_synth_learner


def learner(n_train: int = 3, **kwargs: Any) -> Any:
    learn = quiet_synth_learner(n_train=n_train, n_valid=1, **kwargs)
    learn.add_cb(StepTimeMonitor())
    return learn


def test_one_step_in_so_many_is_measured() -> None:
    learn = learner(n_train=100)
    with pytest.raises(AttributeError, match='StepTimeMonitor'):
        _ = learn.timings
    learn.fit('5ba')
    assert 'No step has been measured' in repr(learn.timings)
    learn.fit(1)
    assert learn.timings.n == len(range(FIRST - 1, 100, StepTimeMonitor().every))
    learn.fit(1)  # a new fit starts from zero
    assert learn.timings.n == len(range(FIRST - 1, 100, StepTimeMonitor().every))


def test_the_total_is_the_sum_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    "Time of sleeping parts is attributed to them, and the parts add up to the step."
    clock = use_clock(monkeypatch, 'learnkit.monitors.step_time')

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
            m.setattr('learnkit.monitors.step_time.FIRST', first)
            learn.fit(2)
        assert learn.timings.n == (2 if first == FIRST else 0)
        return [*learn.model.parameters(), *learn.recorder.losses]

    assert all(torch.equal(a, b) for a, b in zip(trained(FIRST), trained(10_000), strict=True))


@pytest.mark.parametrize('event', ['after_pred', 'after_batch'])
@pytest.mark.parametrize('error', [ValueError, CancelBatchException])
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
    assert learn.parts.callbacks.tables is learn.parts.callbacks.tables
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


def test_a_learner_with_timings_can_be_copied() -> None:
    learn = learner(n_train=20)
    learn.fit(1)
    duplicate = copy.deepcopy(learn)
    assert duplicate.timings.seconds == learn.timings.seconds
    assert duplicate.timings is not learn.timings
    duplicate.fit(1)
