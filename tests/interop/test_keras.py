"""Callbacks of Keras in a Learner, without Keras; `tests/peers/keras_bench.py` compares with `model.fit`."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learnkit import SGD, Callback, Checkpoint, DataLoaders, Learner
from learnkit.checkpoint.compare import learn_digest
from learnkit.core.errors import CallbackError
from learnkit.interop import from_keras
from learnkit.metrics import ValueMetric, mae
from tests.faults.run_helpers import Reach, quiet
from tests.helpers.harness import run_until_done
from tests.helpers.learners import quiet_synth_learner

learner = partial(quiet_synth_learner, n_train=3, n_valid=2, has_bar=False)


class OfKeras:
    "Has what Keras's base class has."

    def set_params(self, params: Any) -> None:
        self.params = params

    def set_model(self, model: Any) -> None:
        self.model = model


def test_order_of_the_methods_and_their_logs() -> None:
    calls: list[Any] = []
    hooks = [
        f'on_{level}_{side}'
        for level in ('train', 'epoch', 'train_batch', 'test', 'test_batch')
        for side in ('begin', 'end')
    ]

    def note(hook: str, *place: Any) -> None:
        calls.append((hook, *place[:-1], sorted(place[-1])))

    methods = {hook: lambda self, *given, hook=hook: note(hook, *given) for hook in hooks}
    learn = learner(from_keras(type('All', (), methods)()))
    learn.fit(1)
    batches = [
        (f'on_{kind}_batch_{side}', i, ['loss'] if side == 'end' else [])
        for kind, n in (('train', 3), ('test', 2))
        for i in range(n)
        for side in ('begin', 'end')
    ]
    logs = ['loss', 'val_loss']
    assert calls[:2] == [('on_train_begin', []), ('on_epoch_begin', 0, [])]
    assert calls[2:8] == batches[:6] and calls[8] == ('on_test_begin', [])
    assert calls[9:13] == batches[6:] and calls[13][0] == 'on_test_end'
    assert calls[14:] == [('on_epoch_end', 0, logs), ('on_train_end', logs)]
    calls.clear()
    learn.validate()  # outside of a fit
    assert calls == [('on_test_begin', []), *batches[6:], ('on_test_end', ['loss'])]
    calls.clear()
    learn.get_preds()
    assert calls == []  # it has no hooks of predictions


class Values(OfKeras):
    "Notes the logs."

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {}

    def note(self, name: str, logs: Any) -> None:
        self.seen.setdefault(name, []).append(dict(logs))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note('train', logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note('test', logs)

    def on_test_end(self, logs: Any = None) -> None:
        self.note('test end', logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note('epoch', logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note('predict', {'outputs': logs['outputs'].flatten().tolist()})


def test_logs_are_means_over_samples() -> None:
    # the model is the identity at a rate of 0: the losses are the squares of the inputs
    train, valid = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[2.0], [4.0], [9.0]])
    dls = DataLoaders.from_tensors(
        (train, train * 0), (valid, valid * 0), bs=2, shuffle=False, device='cpu'
    )
    model = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    cb = Values()
    learn = Learner(dls, model, torch.nn.MSELoss(), SGD, lr=0.0, metrics=mae, cbs=from_keras(cb))
    quiet(learn).fit(2)
    learn.validate()
    learn.get_preds()
    ends = {'loss': 101 / 3, 'mae': 5.0}
    epoch = {'loss': 14 / 3, 'mae': 2.0, 'val_loss': 101 / 3, 'val_mae': 5.0}
    half = {'loss': 2.5, 'mae': 1.5}
    assert cb.seen['train'] == [half, pytest.approx({'loss': 14 / 3, 'mae': 2.0})] * 2
    assert cb.seen['test'] == [{'loss': 10.0, 'mae': 3.0}, pytest.approx(ends)] * 3
    assert cb.seen['test end'] == [pytest.approx(ends)] * 3
    assert cb.seen['epoch'] == [pytest.approx(epoch)] * 2
    assert [logs['outputs'] for logs in cb.seen['predict']] == [[2.0, 4.0], [9.0]]


def test_a_value_that_was_not_evaluated_is_absent_and_nan_is_not() -> None:
    cb = Values()
    unknown = ValueMetric(lambda: float('nan'), 'unknown')
    learner(from_keras(cb), metrics=unknown, eval_every='2ep').fit(4)
    evaluated = {'loss', 'val_loss', 'val_unknown'}
    assert [set(logs) for logs in cb.seen['epoch']] == [{'loss'}, evaluated] * 2
    assert all(np.isnan(logs['val_unknown']) for logs in cb.seen['epoch'][1::2])


class WriteF1(OfKeras):
    "Writes a value of its own, and the rate, into the logs."

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs['val_f1'] = 0.5 * epoch
        logs['learning_rate'] = float(self.model.optimizer.learning_rate)


class StopAtF1(OfKeras):
    "Stops at a value that another callback has written."

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.at_end: list[str] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.rates.append(logs['learning_rate'])
        self.model.stop_training = logs['val_f1'] >= 1

    def on_train_end(self, logs: Any = None) -> None:
        self.at_end = sorted(logs)


def test_callbacks_share_the_logs_of_an_event() -> None:
    stop = StopAtF1()
    cbs = [from_keras(WriteF1()), Callback(order=95), from_keras(stop)]
    learn = learner(*cbs, lr=0.2)
    for _ in range(2):
        stop.rates = []
        learn.fit(5)
        assert stop.rates == [0.2] * 3
        assert stop.at_end == ['loss', 'val_loss']  # another event has its own logs, as in Keras
        assert set(learn.history[-1]) == {'fit', 'epoch', 'time', 'train_loss', 'valid_loss'}


def test_a_training_metric_is_in_the_logs_and_not_in_the_history() -> None:
    seen: dict[str, list[Any]] = {}
    for microbatch in (None, 4):
        cb = Values()
        torch.manual_seed(0)
        learn = learner(from_keras(cb), metrics=mae, microbatch=microbatch, lr=0.01)
        learn.fit(2)
        assert (
            set(learn.history[-1]) >= {'mae', 'valid_loss'} and 'train_mae' not in learn.history[-1]
        )
        seen[str(microbatch)] = [logs['mae'] for logs in (*cb.seen['train'], *cb.seen['epoch'])]
    assert seen['None'] == pytest.approx(seen['4'], rel=1e-5)
    # the last value of the batches is that of the epoch
    assert seen['None'][2] == seen['None'][6] and seen['None'][5] == seen['None'][7]
    table = learner(from_keras(cb := Values()), metrics=mae, lr=0.01)
    table.recorder.train_metrics = True  # the metric has a column, too
    table.fit(2)
    assert [logs['mae'] for logs in cb.seen['epoch']] == [row['train_mae'] for row in table.history]


def test_training_metrics_of_a_resumed_epoch_count_all_batches(tmp_path: Path) -> None:
    def make(cb: Any) -> Learner:
        torch.manual_seed(0)
        return learner(from_keras(cb), Checkpoint('1ba', tmp_path), metrics=mae, path=tmp_path)

    def fail(cb: Callback) -> None:
        if cb.train_iter == 5:
            raise KeyboardInterrupt

    whole = Values()
    torch.manual_seed(0)
    learner(from_keras(whole), metrics=mae).fit(3)
    with pytest.raises(KeyboardInterrupt):
        make(Values()).fit(3, cbs=Callback(before_batch=fail))
    resumed = Values()
    make(resumed).fit(3, resume=True)
    assert resumed.seen['epoch'] == whole.seen['epoch']  # the first epoch is from the checkpoint


class Halve(OfKeras):
    "Halves the rate after each epoch, and stops at the third."

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate *= 0.5
        self.model.stop_training = epoch == 2


def test_rate_weights_and_stop() -> None:
    cb = Halve()
    learn = learner(from_keras(cb), lr=0.4)
    learn.fit(5)
    assert len(learn.history) == 3 and learn.opt.param_groups[0]['lr'] == pytest.approx(0.05)
    assert cb.params == {'epochs': 5, 'steps': 3, 'verbose': 0}
    weights = cb.model.get_weights()
    state = list(learn.model.state_dict().values())
    assert all(np.array_equal(w, t.numpy()) for w, t in zip(weights, state, strict=True))
    cb.model.set_weights([w + 1 for w in weights])
    assert torch.equal(state[0], torch.tensor(weights[0]) + 1)
    with pytest.raises(AttributeError, match=r'self.model.count_params.*from_keras adds'):
        cb.model.count_params()
    with pytest.raises(AttributeError, match='learning_rate'):
        cb.model.optimizer.beta_1 = 0.5
    with pytest.raises(AttributeError, match='not `trainable`'):
        cb.model.trainable = False
    with pytest.raises(CallbackError, match='0 arrays for'):
        cb.model.set_weights([])
    x = np.ones((5, 1), np.float32)
    with torch.no_grad():
        expected = learn.model(torch.tensor(x)).numpy()
    assert np.array_equal(cb.model.predict(x, batch_size=5), expected)
    for rate in (0.0, 0.3):  # from a rate of zero, too
        cb.model.optimizer.learning_rate.assign(rate)
        assert cb.model.optimizer.lr.numpy() == rate
    assert cb.model.optimizer.iterations == 9


def test_rates_of_several_groups_keep_their_ratio() -> None:
    cb = Halve()
    learn = learner(from_keras(cb), splitter=lambda m: [[m.a], [m.b]])
    learn.fit(1, lr=[0.1, 0.4])
    assert [group['lr'] for group in learn.opt.param_groups] == pytest.approx([0.05, 0.2])
    assert cb.model.optimizer.learning_rate == pytest.approx(0.2)


def test_files_of_weights(tmp_path: Path) -> None:
    cb = Halve()
    learn = learner(from_keras(cb))
    learn.fit(1)
    before = cb.model.get_weights()
    cb.model.save_weights(tmp_path / 'w.pth')
    cb.model.set_weights([0 * w for w in before])
    cb.model.load_weights(tmp_path / 'w.pth')
    assert all(np.array_equal(a, b) for a, b in zip(before, cb.model.get_weights(), strict=True))


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(CallbackError, match='method such as on_train_begin'):
        from_keras(object())
    with pytest.raises(CallbackError, match=r'write from_keras\(Halve\('):
        from_keras(Halve)


class KeepBest(OfKeras):
    "Restores the best weights at the end, and stops two epochs after them."

    def on_train_begin(self, logs: Any = None) -> None:
        self.best, self.wait, self.weights = np.inf, 0, None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.wait += 1
        if logs['val_loss'] < self.best - 1:
            self.best, self.wait, self.weights = logs['val_loss'], 0, self.model.get_weights()
        self.model.stop_training = self.wait > 1

    def on_train_end(self, logs: Any = None) -> None:
        self.model.set_weights(self.weights)


def train(folder: Path) -> Any:
    torch.manual_seed(0)
    learn = learner(from_keras(KeepBest()), Checkpoint('1ba', folder), path=folder)
    learn.add_cb(Reach())
    learn.fit(9, resume=True)
    learn.remove_cb(Reach)
    return learn_digest(learn), learn.time.ba


def test_a_killed_run_ends_the_same(tmp_path: Path) -> None:
    expected = train(tmp_path / 'whole')
    job = partial(train, tmp_path / 'killed')
    lives = run_until_done(job, kill=[('train after_batch', 5)] * 2)
    assert lives.kills == 2 and lives.result == expected


class Plateau(OfKeras):
    "Chooses its comparison and the sign of `min_delta` at the first epoch, as Keras does."

    def __init__(self, mode: str = 'auto', patience: int = 2, stops: bool = True) -> None:
        self.min_delta, self.patience, self.stops = 0.03, patience, stops
        self.monitor_op: Any = None
        if mode == 'min':
            self.choose()

    def choose(self) -> None:
        self.monitor_op = np.less
        self.min_delta *= -1

    def on_train_begin(self, logs: Any = None) -> None:
        self.best, self.wait = np.inf, 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.monitor_op is None:
            self.choose()
        self.wait += 1
        if self.monitor_op(logs['val_loss'] - self.min_delta, self.best):
            self.best, self.wait = logs['val_loss'], 0
        if self.wait < self.patience:
            return
        self.wait = 0
        if self.stops:
            self.model.stop_training = True
        else:
            self.model.optimizer.learning_rate *= 0.5


def shrink(lr: float = 0.1) -> Learner:
    "Return a Learner of one batch an epoch, whose weight shrinks by `2 lr` of itself in each step."
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    data = torch.ones(4, 1), torch.zeros(4, 1)
    dls = DataLoaders.from_tensors(data, data, bs=4, device='cpu')
    return quiet(Learner(dls, model, torch.nn.MSELoss(), SGD, lr=lr))


def interrupt(cb: Any, epochs: int) -> None:
    "Interrupt the run after its checkpoint of an epoch."
    if cb.learn.time.ep == epochs:
        raise KeyboardInterrupt


def plateau_by_hand(stops: bool) -> tuple[int, float]:
    "Return the number of epochs and the last rate, of at most 30 epochs."
    w, lr, best, wait = 1.0, 0.1, np.inf, 0
    for epoch in range(30):
        w -= lr * 2 * w
        wait += 1
        if w * w < best - 0.03:
            best, wait = w * w, 0
        if wait == 2:
            wait = 0
            if stops:
                return epoch + 1, lr
            lr /= 2
    return 30, lr


@pytest.mark.parametrize('stops', [True, False], ids=['stop', 'reduce the rate'])
@pytest.mark.parametrize('mode', ['auto', 'min'])
@pytest.mark.parametrize(
    'kills', [0, 4, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 3))]
)
def test_every_kill_keeps_the_sign_of_min_delta(
    mode: str, stops: bool, kills: int, tmp_path: Path
) -> None:
    for at in [*[2, 3, 5, 6][:kills], None]:
        learn = shrink()
        learn.add_cbs([from_keras(Plateau(mode, stops=stops)), Checkpoint('1ep', tmp_path)])
        if at is None:
            learn.fit(30, resume=True)
            break
        learn.add_cb(Callback(epoch_checkpoint=partial(interrupt, epochs=at), order=2000))
        with pytest.raises(KeyboardInterrupt):
            learn.fit(30, resume=True)
    found = learn.time.ep, learn.opt.param_groups[0]['lr']
    assert found == pytest.approx(plateau_by_hand(stops))


def test_the_state_of_a_loaded_state_is_the_same() -> None:
    first, second = from_keras(Plateau('min')), from_keras(Plateau())
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict() and first.state_dict()['monitor_op'] == 'less'


class Counted(torch.nn.Linear):
    "A layer with extra state: the number of its calls."

    n = 0

    def get_extra_state(self) -> int:
        return self.n

    def set_extra_state(self, state: int) -> None:
        self.n = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return super().forward(x)


def test_weights_of_a_model_with_extra_state() -> None:
    cb, model = KeepBest(), Counted(1, 1)
    learn = learner(from_keras(cb), model=model)
    learn.fit(1)
    assert [w.shape for w in cb.model.get_weights()] == [(1, 1), (1,)]
    cb.model.set_weights([np.full((1, 1), 3.0), np.zeros(1)])
    assert model.weight.item() == 3 and model.n == 5  # 3 batches of training, 2 of validation
