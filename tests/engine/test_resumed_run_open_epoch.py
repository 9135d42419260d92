"""A fit resumed in the middle of an epoch records exactly what an uninterrupted fit records."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import (
    Callback,
    DataLoaders,
    Metric,
    Recorder,
)
from learnkit.callbacks import GradientAccumulation
from learnkit.callbacks.schedule import ParamScheduler, SchedCos
from learnkit.core.time import format_seconds
from learnkit.metrics import RMSE, AccumMetric, mae
from tests.helpers.clock import use_clock
from tests.helpers.learners import bare_learner

N_BATCHES, N_EPOCH = 5, 3


def data(n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g)
    return x, x.sum(1, keepdim=True) + torch.randn(n, 1, generator=g)


def learner(*cbs: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    train = data(4 * N_BATCHES - 1, 1)
    dls = DataLoaders.from_tensors(train, {'valid': data(6, 2), 'other': data(5, 3)}, bs=4)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    options = {'metrics': [mae, RMSE(), AccumMetric(ratio)], **kwargs}
    learn = bare_learner(
        dls,
        model,
        loss_func=nn.MSELoss(),
        lr=0.05,
        cbs=cbs,
        recorder=Recorder(train_metrics=True),
        **options,
    )
    learn.rows = []
    learn.logger = lambda row: learn.rows.append(list(row))
    return learn


class Take(Callback):
    "Takes the state after some batches, or after an epoch."

    def __init__(self, after: int, event: str = 'batch_checkpoint') -> None:
        self.after, self.states = after, []
        setattr(self, event, self._take)

    def _take(self) -> None:
        if self.learn.train_iter == self.after:
            self.states.append(self.learn.checkpoint_state())

    def state_dict(self) -> None:
        return None


def resumed(
    make: Callable[[], Any],
    after: int,
    event: str = 'batch_checkpoint',
    again: Callable[[], Any] | None = None,
) -> tuple[Any, Any]:
    "Return the Learner that trained without a stop, and one that resumed from its state."
    straight, take = make(), Take(after, event)
    straight.add_cb(take)
    straight.fit(N_EPOCH)
    other = (again or make)()
    torch.manual_seed(99)  # nothing of it may count
    other.fit(N_EPOCH, resume=take.states[0])
    return straight, other


def timeless(rows: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k != 'time'} for r in rows]


def ratio(preds: Tensor, targs: Tensor) -> Tensor:
    return preds.median() / targs.std()


def assert_recorded_alike(a: Any, b: Any) -> None:
    assert timeless(a.history) == timeless(b.history) and len(a.history) == N_EPOCH
    one, two = a.recorder, b.recorder
    assert one.evaluations == two.evaluations
    assert list(one.iters) == list(two.iters)
    assert one.n_fits == two.n_fits
    assert one.smooth_loss.smooth == two.smooth_loss.smooth
    assert one.smooth_loss.raw == two.smooth_loss.raw
    assert one.lrs == two.lrs and one.hps == two.hps and len(one.lrs) == N_EPOCH * N_BATCHES
    assert list(map(list, one.values)) == list(map(list, two.values))
    assert one.metric_names == two.metric_names
    assert list(a.final_record) == list(b.final_record)
    assert a.rows[-1][:-1] == b.rows[-1][:-1]
    for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize('after', [1, 3, 5, 8, 10])
def test_every_row_and_step_equals_a_fit_without_a_stop(after: int) -> None:
    def log(cb: Any) -> None:
        cb.learn.log('extra', cb.loss * cb.train_iter, weight=cb.iter + 1)

    make = lambda: learner(Callback(after_loss=log), ParamScheduler({'lr': SchedCos(0.1, 0.01)}))
    straight, other = resumed(make, after)
    assert_recorded_alike(straight, other)
    assert {'train_mae', 'train_rmse', 'extra', 'valid_extra', 'other/mae'} <= set(other.history[0])


@pytest.mark.parametrize('after', [1, 3, 7])
def test_an_evaluation_in_the_middle_of_the_epoch_stays_in_its_row(after: int) -> None:
    make = partial(learner, eval_every='3ba')
    straight, other = resumed(make, after)
    assert_recorded_alike(straight, other)
    expected = [r['ba'] for r in straight.recorder.evaluations]
    assert [r['ba'] for r in other.recorder.evaluations] == expected


def test_a_fit_inside_a_block_of_its_learner_records_alike() -> None:
    def make() -> Any:
        log = Callback(after_batch=lambda cb: cb.learn.log('number', cb.iter), run_valid=False)
        return learner(log, eval_every='3ba')

    straight, other, take = make(), make(), Take(4)
    straight.add_cb(take)
    with straight:
        straight.fit(N_EPOCH)
    with other:
        other.fit(N_EPOCH, resume=take.states[0])
    assert_recorded_alike(straight, other)
    assert [row['number'] for row in other.history] == [2.0] * N_EPOCH
    assert straight.recorder.measured == other.recorder.measured
    assert straight.recorder.measured['valid_loss'] == straight.history[-1]['valid_loss']


@pytest.mark.parametrize('microbatch', [2, 'auto'])
def test_in_microbatches_and_between_two_steps(microbatch: Any) -> None:
    assert_recorded_alike(
        *resumed(lambda: learner(GradientAccumulation(8), microbatch=microbatch), 3)
    )


def test_the_time_of_the_row_counts_both_parts_and_not_what_lay_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = use_clock(monkeypatch, 'learnkit.callbacks.recorder')
    take, nap = Take(3), lambda cb: clock.sleep(1.0 * cb.training)
    learner(take, Callback(before_batch=nap)).fit(1)
    other = learner(Callback(before_batch=nap))
    clock.sleep(100.0)
    other.fit(1, resume=take.states[0])
    assert other.history[0]['time'] == 5.0  # naps
    assert other.rows[-1][-1] == format_seconds(other.history[0]['time'])


# --------------------------------------------------------------------------- another set of metrics


class Seen(Metric):
    "Collects targets in a set, which is not a plain value."

    def reset(self) -> None:
        self.seen: set[float] = set()

    def accumulate(self, learn: Any) -> None:
        self.seen |= set(learn.yb[0].flatten().tolist())

    @property
    def value(self) -> int:
        return len(self.seen)


def test_a_metric_that_cannot_be_saved_stops_nothing_and_is_named() -> None:
    make = partial(learner, metrics=[mae, Seen()])
    with pytest.warns(UserWarning, match='no state of `seen`'):
        straight, other = resumed(make, 2)
    n = 4 * N_BATCHES - 1
    assert [r['train_seen'] for r in straight.history] == [n] * N_EPOCH
    # the batches of the first epoch are shuffled
    assert [r['train_seen'] for r in other.history] == [n - 8, n, n]
    assert [r['train_mae'] for r in other.history] == [r['train_mae'] for r in straight.history]


def test_an_added_metric_starts_over_and_a_removed_one_is_left_out() -> None:
    make = partial(learner, metrics=[mae, nn.L1Loss()])
    with pytest.warns(UserWarning, match='no state of `rmse`'):
        straight, other = resumed(make, 3, again=partial(learner, metrics=[RMSE(), mae]))
    assert [r['train_mae'] for r in other.history] == [r['train_mae'] for r in straight.history]
    assert 'train_l1_loss' not in other.recorder.metric_names and other.history[0]['train_rmse'] > 0
    assert 'train_rmse' not in straight.history[0] and 'train_rmse' in other.history[1]
