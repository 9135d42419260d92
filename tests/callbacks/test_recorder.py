"""Compare the Recorder with direct computation: losses, metrics, hyperparameters, history, plots."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit import (
    SGD,
    Callback,
    CancelBatchException,
    CancelEpochException,
    CancelTrainException,
    DataLoaders,
    Recorder,
    TrainEvalCallback,
    mae,
    mse,
)
from learnkit.testing import synth_learner
from tests.helpers.recording import TRAIN, VALID, learner, linear


def by_hand(
    train: list[Any], valid: list[Any], n_epoch: int, lr: float = 0.1
) -> tuple[list[float], list[tuple[float, float, float]]]:
    "Return the loss of each step, and the loss, mae and mse of each validation over all samples."
    model = linear()
    opt, losses, epochs = torch.optim.SGD(model.parameters(), lr=lr), [], []
    for _ in range(n_epoch):
        for x, y in train:
            loss = F.mse_loss(model(x), y)
            losses.append(loss.item())
            loss.backward()
            opt.step()
            opt.zero_grad()
        with torch.no_grad():
            pred, y = torch.cat([model(x) for x, _ in valid]), torch.cat([y for _, y in valid])
        epochs.append(
            (F.mse_loss(pred, y).item(), F.l1_loss(pred, y).item(), F.mse_loss(pred, y).item())
        )
    return losses, epochs


def smoothed(losses: list[float], beta: float = 0.98) -> list[float]:
    "Return debiased exponential means, computed as weighted sums."
    res = []
    for t in range(1, len(losses) + 1):
        w = [beta ** (t - i) for i in range(1, t + 1)]
        res.append(sum(a * b for a, b in zip(w, losses, strict=False)) / sum(w))
    return res


# Values


def test_values_match_a_loop_by_hand() -> None:
    learn = learner((TRAIN, VALID), metrics=[mae, mse])
    learn.fit(3)
    losses, epochs = by_hand(TRAIN, VALID, 3)
    smooth = smoothed(losses)
    assert torch.tensor(list(learn.recorder.losses)).tolist() == pytest.approx(smooth, rel=1e-5)
    means = [sum(losses[5 * i : 5 * i + 5]) / 5 for i in range(3)]
    expected = [pytest.approx([means[i], *epochs[i]], rel=1e-5) for i in range(3)]
    assert [list(v) for v in learn.recorder.values] == expected
    expected = ['epoch', 'train_loss', 'valid_loss', 'mae', 'mse', 'time']
    assert learn.recorder.metric_names == expected
    assert learn.smooth_loss.item() == pytest.approx(smooth[-1], rel=1e-5)
    assert learn.final_record == learn.recorder.values[-1]
    assert list(learn.recorder.iters) == [5, 10, 15]
    assert learn.recorder.lrs == [0.1] * 15


# Cancelled batches and skipped epochs


def test_a_batch_cancelled_before_its_loss_counts_for_nothing_and_one_after_does() -> None:
    def cancel(event: str) -> list[float]:
        def stop(cb: Any) -> None:
            if cb.iter == 1:
                raise CancelBatchException

        learn = learner((TRAIN, VALID), Callback(**{event: stop}), lr=0.0, metrics=mae)
        learn.fit(1)
        return [*learn.recorder.smooth_loss.raw, learn.history[0]['mae']]

    model = linear()
    losses = [F.mse_loss(model(x), y).item() for x, y in TRAIN]
    x, y = (torch.cat(parts) for parts in zip(*(VALID[0], VALID[2]), strict=True))
    without = F.l1_loss(model(x), y).item()
    x, y = (torch.cat(parts) for parts in zip(*VALID, strict=True))
    whole = F.l1_loss(model(x), y).item()
    for event in ('before_batch', 'before_pred', 'after_pred'):
        assert cancel(event) == pytest.approx([losses[0], *losses[2:], without], rel=1e-5)
    assert cancel('after_loss') == pytest.approx([*losses, whole], rel=1e-5)


def test_an_epoch_that_is_skipped_gets_no_row() -> None:
    def skip(cb: Any) -> None:
        if cb.epoch == 1:
            raise CancelEpochException

    learn = learner((TRAIN, VALID), Callback(before_epoch=skip))
    learn.fit(3)
    assert [r['epoch'] for r in learn.history] == [0, 2] == [row[0] for row in learn.rows]


def test_an_epoch_without_a_trained_batch_has_no_training_loss() -> None:
    def skip(cb: Any) -> None:
        if cb.epoch == 1:
            raise CancelTrainException

    learn = learner((TRAIN, VALID), Callback(before_train=skip))
    learn.fit(3)
    assert [r['train_loss'] is None for r in learn.history] == [False, True, False]
    assert learn.history[1]['valid_loss'] == learn.history[0]['valid_loss']


# Logged values and parts of the loss


def test_logged_values_are_averaged_over_the_epoch_in_training_and_each_evaluation() -> None:
    def note(cb: Any) -> None:
        cb.learn.log('half', cb.iter / 2)
        cb.learn.log('weighted', torch.tensor(float(cb.iter)), weight=cb.iter)

    dls = DataLoaders(TRAIN, {'day': VALID, 'night': VALID[:2]})
    learn = learner(dls, Callback(after_pred=note))
    learn.fit(2)
    weighted = lambda n: sum(i * i for i in range(n)) / sum(range(n))
    for row in learn.history:
        assert (row['half'], row['day/half'], row['night/half']) == pytest.approx((1, 0.5, 0.25))
        found = (row['weighted'], row['day/weighted'], row['night/weighted'])
        assert found == pytest.approx((weighted(5), weighted(3), weighted(2)))
    assert {'half', 'day/half', 'night/half', 'weighted'} <= set(learn.recorder.metric_names)


def test_what_a_prediction_logs_is_not_in_a_row() -> None:
    rows = []
    for predicts in (False, True):

        def predict(cb: Any, predicts: bool = predicts) -> None:
            if predicts and cb.fitting:
                cb.learn.get_preds(dl=VALID[2:], inner=True)

        learn = learner(
            (TRAIN, VALID),
            Callback(after_validate=predict),
            Callback(after_pred=lambda cb: cb.learn.log('n', len(cb.x))),
        )
        learn.fit(2)
        rows.append([{k: v for k, v in row.items() if k != 'time'} for row in learn.history])
        assert learn.history[1]['valid_n'] == 3
        learn.get_preds(inner=True)
        learn.fit(1)
        assert learn.history[2]['valid_n'] == 3
    assert rows[0] == rows[1]


def test_what_a_validation_inside_a_fit_logs_and_measures_stays_out_of_the_epochs_row() -> None:
    def nested(cb: Any) -> None:
        if cb.training and cb.iter == 2:
            seen.append(cb.learn.validate(dl=VALID[2:]))

    seen: list[Any] = []
    rows = []
    for cbs in ([], [Callback(after_batch=nested)]):
        learn = learner(
            (TRAIN, VALID),
            *cbs,
            Callback(after_pred=lambda cb: cb.learn.log('n', len(cb.x))),
            metrics=mae,
            recorder=Recorder(train_metrics=True),
        )
        learn.fit(2)
        rows.append([{k: v for k, v in row.items() if k != 'time'} for row in learn.history])
    assert rows[0] == rows[1] and len(seen) == 2


@pytest.mark.parametrize('event', ['before_validate', 'after_batch', 'after_eval', 'after_epoch'])
def test_an_evaluation_inside_the_evaluation_changes_no_row(event: str) -> None:
    "A callback that predicts or validates on other data before the Recorder runs."
    histories = []
    for inside in (False, True):

        def evaluate(cb: Any, inside: bool = inside) -> None:
            if (
                not inside
                or not cb.fitting
                or cb.phase == 'predict'
                or (cb.training and event == 'after_batch')
            ):
                return
            cb.learn.validate(dl=VALID[:1])
            cb.learn.get_preds()

        learn = learner((TRAIN, VALID), Callback(**{event: evaluate}), metrics=mae)
        learn.fit(2)
        histories.append([{k: v for k, v in row.items() if k != 'time'} for row in learn.history])
    assert histories[0] == histories[1]


def test_a_loss_of_named_parts_minimises_their_sum_and_records_each() -> None:
    def parts(pred: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {'fit': F.mse_loss(pred, y), 'size': 0.1 * pred.square().mean()}

    def total(pred: Tensor, y: Tensor) -> Tensor:
        return sum(parts(pred, y).values())

    ends = []
    for loss in (parts, total, lambda p, y: {**parts(p, y), 'loss': total(p, y)}):
        learn = learner((TRAIN, VALID), loss_func=loss)
        learn.fit(2)
        ends.append(learn)
    assert torch.equal(ends[0].model.weight, ends[1].model.weight)
    assert torch.equal(ends[0].model.weight, ends[2].model.weight)
    model, row = ends[0].model, ends[0].history[1]
    x, y = (torch.cat(p) for p in zip(*VALID, strict=True))
    assert row['valid_fit'] == pytest.approx(F.mse_loss(model(x), y).item(), rel=1e-5)
    assert row['valid_size'] == pytest.approx(0.1 * model(x).square().mean().item(), rel=1e-5)
    assert row['valid_loss'] == pytest.approx(row['valid_fit'] + row['valid_size'], rel=1e-5)
    assert {'train_fit', 'train_size'} <= set(row) and 'valid_loss' in ends[2].history[0]
    assert 'train_loss_2' not in ends[2].history[0]


def test_parts_of_a_loss_are_weighted_like_the_loss() -> None:
    "Weights are counts of positive targets, which differ between batches."
    count = lambda xb, yb: (yb[0] > 0).sum().item()

    def parts(pred: Tensor, y: Tensor) -> dict[str, Tensor]:
        pos = y > 0
        return {'fit': (pred - y)[pos].square().mean(), 'size': pred[pos].square().mean()}

    valid = [(x, torch.cat([y[:1].abs(), y[1:]])) for x, y in VALID]  # at least one in each
    learn = learner((valid, valid), loss_func=parts, weight_func=count, lr=0.0)
    learn.fit(1)
    x, y = (torch.cat(p) for p in zip(*valid, strict=True))
    whole, row = parts(learn.model(x), y), learn.history[0]
    assert row['valid_loss'] == pytest.approx(sum(whole.values()).item(), rel=1e-5)
    expected = whole['fit'].item()
    assert [row[k] for k in row if k.endswith('_fit')][-1] == pytest.approx(expected, rel=1e-5)


def test_learn_log_without_a_recorder_does_nothing() -> None:
    cbs = [TrainEvalCallback, Callback(after_pred=lambda cb: cb.learn.log('x', 1))]
    learn = synth_learner(default_cbs=False, cbs=cbs)
    learn.fit(1)
    with pytest.raises(AttributeError, match='Recorder'):
        _ = learn.history


# Hyperparameters


def test_a_replaced_model_and_optimizer_are_let_go() -> None:
    learn = learner((TRAIN, VALID))
    learn.fit(1)
    old = weakref.ref(learn.model.weight)
    learn.model, learn.opt = nn.Linear(3, 1), None
    gc.collect()
    assert old() is None and learn.recorder.lrs == [0.1] * 5


# History


def test_history_continues_over_fits_and_values_start_over() -> None:
    learn = learner((TRAIN, VALID), metrics=mae)
    learn.fit(2)
    learn.validate()
    learn.get_preds()
    learn.fit(1)
    assert [(r['fit'], r['epoch']) for r in learn.history] == [(0, 0), (0, 1), (1, 0)]
    assert len(learn.recorder.values) == 1 and len(learn.recorder.losses) == 5
    assert all(r['time'] > 0 and isinstance(r['mae'], float) for r in learn.history)


@pytest.mark.parametrize('n', [1, 2, 3])
def test_the_losses_match_the_last_fit_also_when_they_were_read_before(n: int) -> None:
    learn = learner((TRAIN, VALID))
    learn.fit(2)
    before = list(learn.recorder.losses)
    learn.fit(n)
    after = [v.item() for v in learn.recorder.losses]
    assert len(before) == 10
    assert after == pytest.approx(smoothed(by_hand(TRAIN, VALID, 2 + n)[0][10:]), rel=1e-5)
    learn.recorder.smooth_loss.reset()
    assert len(learn.recorder.losses) == 0


def test_values_can_be_written_by_a_later_callback() -> None:
    class Overwrite(Callback):
        order = 51

        def after_epoch(self) -> None:
            self.recorder.values[-1] = [7.0, 8.0]

    class Look(Callback):
        order = 61

        def after_epoch(self) -> None:
            seen.append(self.recorder.values[-1])

    seen: list[Any] = []
    learner((TRAIN, VALID), Look, Overwrite).fit(1)
    assert seen == [[7.0, 8.0]]


# Plots


def test_plot_loss_draws_the_smoothed_losses_and_the_validation_at_the_ends_of_epochs() -> None:
    pytest.importorskip('matplotlib')
    learn = learner((TRAIN, VALID))
    learn.fit(3)
    ax = learn.recorder.plot_loss(skip_start=2)
    train, valid = ax.get_lines()
    smooth = smoothed(by_hand(TRAIN, VALID, 3)[0])
    assert train.get_xdata().tolist() == list(range(2, 15))
    assert train.get_ydata().tolist() == pytest.approx(smooth[2:], rel=1e-5)
    assert list(valid.get_xdata()) == [5, 10, 15]
    assert list(valid.get_ydata()) == [r['valid_loss'] for r in learn.history]
    assert ax.get_xlabel() == 'step'
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ['train', 'valid']


def test_plot_sched_draws_what_changed() -> None:
    pytest.importorskip('matplotlib')
    schedule = Callback(before_step=lambda cb: cb.opt.set_hyper('mom', cb.pct_train))
    learn = learner((TRAIN, VALID), schedule, opt_func=partial(SGD, mom=0.9))
    learn.fit(2)
    axs = learn.recorder.plot_sched()
    assert [ax.get_ylabel() for ax in axs] == ['lr', 'mom']
    assert axs[1].get_lines()[0].get_ydata().tolist() == pytest.approx([i / 10 for i in range(10)])
    [ax] = learn.recorder.plot_sched('wd', figsize=(3, 2))
    assert ax.get_ylabel() == 'wd' and ax.figure.get_size_inches().tolist() == [3, 2]


def test_what_a_rewound_run_needs_takes_sixteen_bytes_a_step() -> None:
    sizes = []
    for n in (100, 200):
        learn = synth_learner(n_train=n)
        with learn.no_bar():
            learn.fit(1)
        kept = learn.recorder.state_dict()['smooth_loss']
        assert kept['raw'].tolist() == learn.recorder.smooth_loss.raw  # as they were, bit for bit
        sizes.append(sum(t.nbytes for t in kept.values() if isinstance(t, Tensor)))
    assert sizes[1] - sizes[0] == 100 * 16
