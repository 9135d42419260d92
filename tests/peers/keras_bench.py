"Run callbacks of Keras 3 in a learnkit Learner and in `model.fit`, on torch, and compare."

from __future__ import annotations

import contextlib
import csv
import io
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ['KERAS_BACKEND'] = 'torch'

import keras  # after its backend is chosen
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import Callback, Checkpoint, DataLoaders, Learner
from learnkit.interop import from_keras
from learnkit.interop.keras import HOOKS
from learnkit.metrics import mae
from tests.peers.rows import EQUAL, TOO_FAR, Row, compare_numbers, quiet_folder

N, BATCH, EPOCHS, LR = 44, 8, 6, 0.05  # the last batch has 4 samples
G = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=G)
Y = X.sum(1, keepdim=True) + torch.randn(N, 1, generator=G)
WEIGHT, BIAS = torch.randn(1, 3, generator=G), torch.zeros(1)

# -- callbacks as users write them -----------------------------------------------------------------


class Calls(keras.callbacks.Callback):
    "Notes each call with its place, and the names and values of its logs."

    def __init__(self) -> None:
        super().__init__()
        self.record: list[Any] = []


def note(hook: str) -> Callable[..., None]:
    def call(self: Any, *given: Any, logs: Any = None) -> None:
        place = list(given)
        if place and (place[-1] is None or isinstance(place[-1], dict)):
            logs = place.pop()  # Keras passes it without its name
        logs = {k: v for k, v in (logs or {}).items() if k != 'outputs'}
        values = sorted(logs.items())
        self.record.append((hook, *place, *[part for pair in values for part in pair]))

    return call


for name in HOOKS:
    setattr(Calls, name, note(name))


class StopAtBatch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.optimizer.learning_rate > 0 and batch == 2:
            self.model.stop_training = True


class StopAtLoss(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs['val_loss'] < 1.6:
            self.model.stop_training = True


class WarmUp(keras.callbacks.Callback):
    "Sets the rate before each batch."

    def on_train_begin(self, logs: Any = None) -> None:
        self.step = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        self.model.optimizer.learning_rate = LR * min(1.0, self.step / 10)


class Losses(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        self.record: list[Any] = []

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.record.append(logs['loss'])


class KeepBest(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        self.best, self.weights = np.inf, None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs['val_loss'] < self.best:
            self.best, self.weights = logs['val_loss'], self.model.get_weights()

    def on_train_end(self, logs: Any = None) -> None:
        self.model.set_weights(self.weights)


class Shrink(keras.callbacks.Callback):
    "Changes weights at the end of an epoch."

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.set_weights([0.9 * w for w in self.model.get_weights()])


class Averaged(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        weights = self.model.get_weights()
        if epoch == 0:
            self.mean = weights
        self.mean = [m + (w - m) / (epoch + 1) for m, w in zip(self.mean, weights, strict=True)]

    def on_train_end(self, logs: Any = None) -> None:
        self.model.set_weights(self.mean)


class Params(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        self.record = [self.params['epochs'], self.params['steps']]


class Cold(keras.callbacks.Callback):
    "Starts at a rate of zero, by the methods of a variable."

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.optimizer.learning_rate.assign(0.0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        rate = self.model.optimizer.learning_rate
        rate.assign(float(rate.numpy()) + 0.01)


class Predicts(keras.callbacks.Callback):
    "Measures the model on data of its own, and counts steps."

    def on_train_begin(self, logs: Any = None) -> None:
        self.record: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        error = np.abs(self.model.predict(X.numpy(), verbose=0) - Y.numpy()).mean()
        steps = self.model.optimizer.iterations
        self.record.append([float(error), int(steps)])


class StopAtStart(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 3:
            self.model.stop_training = True


class Spoil(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 4:
            self.model.set_weights([w * np.nan for w in self.model.get_weights()])


class Logged(keras.callbacks.LambdaCallback):
    def __init__(self) -> None:
        self.record: list[Any] = []
        super().__init__(on_epoch_end=lambda e, values: self.record.append([e, values['loss']]))


class StopAtMetric(keras.callbacks.Callback):
    "Stops at a metric of the training batches."

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs.get('mae') < 1.15:
            self.model.stop_training = True


class Measures(keras.callbacks.Callback):
    "Measures a value of its own, for the callbacks behind it."

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs['val_own'] = abs(logs['val_loss'] - 1.6)


class BatchMetrics(keras.callbacks.Callback):
    "Keeps the metrics of the batches, and the best of each epoch."

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.best = np.inf

    def on_train_begin(self, logs: Any = None) -> None:
        self.record: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.best = min(self.best, logs['mae'])
        self.record.append(logs['mae'])

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.record.append(logs['mae'])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs['best_mae'] = float(self.best)


class Overfits(keras.callbacks.Callback):
    "Stops when the evaluation is far above the training."

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs['val_mae'] / logs['mae'] > 0.98:
            self.model.stop_training = True


class Last(keras.callbacks.Callback):
    "Keeps the logs at the end of the training."

    def on_train_end(self, logs: Any = None) -> None:
        self.record = [[name, value] for name, value in sorted(logs.items())]


# -- the comparison --------------------------------------------------------------------------------


@dataclass
class Case:
    "Callbacks; `file` is where the first one writes numbers."

    title: str
    make: Callable[[], Any]
    part: str = "Users' callbacks"
    file: str = ''
    metrics: bool = False  # whether the mean absolute error is measured
    why: str = ''  # what differs
    lost: str = ''  # what differs in a resumed run


OWN = 'Callbacks of Keras'
kc = keras.callbacks
CASES = [
    Case("EarlyStopping('val_loss')", lambda: kc.EarlyStopping('val_loss', patience=1), OWN),
    Case(
        'EarlyStopping(restore_best_weights=True)',
        lambda: kc.EarlyStopping('val_loss', min_delta=0.2, restore_best_weights=True),
        OWN,
    ),
    Case(
        "EarlyStopping('val_mae', mode='min')",
        lambda: kc.EarlyStopping('val_mae', 0.1, mode='min', start_from_epoch=1),
        OWN,
        metrics=True,
        why='of other metrics than the loss Keras finds the mode by itself',
    ),
    Case(
        "ReduceLROnPlateau('val_loss')",
        lambda: kc.ReduceLROnPlateau('val_loss', patience=1, min_delta=0.3),
        OWN,
    ),
    Case(
        'LearningRateScheduler', lambda: kc.LearningRateScheduler(lambda epoch, lr: lr * 0.5), OWN
    ),
    Case('TerminateOnNaN()', lambda: [kc.TerminateOnNaN(), Spoil(), Calls()], OWN),
    Case(
        'CSVLogger',
        lambda: kc.CSVLogger('log.csv'),
        OWN,
        'log.csv',
        lost='a resumed training begins the file anew, in Keras too',
    ),
    Case(
        'CSVLogger(append=True)',
        lambda: kc.CSVLogger('log.csv', append=True),
        OWN,
        'log.csv',
        metrics=True,
        lost='a resumed training writes the header again',
    ),
    Case('History()', kc.History, OWN, metrics=True),
    Case('LambdaCallback', Logged, OWN),
    Case(
        'ModelCheckpoint(save_weights_only=True)',
        lambda: [
            kc.ModelCheckpoint('best.weights.h5', save_best_only=True, save_weights_only=True),
            Shrink(),
        ],
        OWN,
        why='the file is a file of PyTorch',
    ),
    Case('ModelCheckpoint(save_freq=7)', lambda: every_seven_batches(), OWN, why='as above'),
    Case('notes every call', Calls),
    Case('stops at a batch', lambda: [StopAtBatch(), Calls()]),
    Case('stops when an epoch begins', lambda: [StopAtStart(), Calls()]),
    Case('stops at a loss', StopAtLoss),
    Case('sets the rate before batches', WarmUp),
    Case('starts with a rate of zero', Cold),
    Case('keeps the losses of batches', Losses),
    Case('keeps the best weights', KeepBest),
    Case('changes weights', Shrink),
    Case('averages weights over epochs', Averaged),
    Case('predicts, and counts steps', Predicts),
    Case('reads its parameters', Params),
    Case('notes every call, with a metric', Calls, metrics=True),
    Case('stops at a training metric', StopAtMetric, metrics=True),
    Case(
        'a value of its own, then EarlyStopping on it',
        lambda: [Measures(), kc.EarlyStopping('val_own', mode='min', patience=1), kc.History()],
    ),
    Case('keeps the metrics of batches', lambda: [BatchMetrics(), kc.History()], metrics=True),
    Case('stops when it overfits', Overfits, metrics=True),
    Case(
        'LearningRateScheduler, then a log of the rate',
        lambda: [
            kc.LearningRateScheduler(lambda epoch, lr: lr * 0.5),
            kc.CSVLogger('log.csv', append=True),
            kc.History(),
        ],
        file='log.csv',
        lost='a resumed training writes the header again',
    ),
    Case(
        'ReduceLROnPlateau, then a log of the rate',
        lambda: [kc.ReduceLROnPlateau('mae', mode='min', patience=1, min_delta=0.1), kc.History()],
        metrics=True,
        why='of other metrics than the loss Keras finds the mode by itself',
    ),
    Case('reads the logs at the end', lambda: [Measures(), Last()], metrics=True),
]


def every_seven_batches() -> Any:
    return kc.ModelCheckpoint('{epoch}-{batch}.weights.h5', save_freq=7, save_weights_only=True)


def made_by(case: Case) -> list[Any]:
    cbs = case.make()
    return cbs if isinstance(cbs, list) else [cbs]


def run_in_keras(case: Case) -> dict[str, Tensor]:
    dense = keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((3,)), dense])
    dense.set_weights([WEIGHT.T.numpy(), BIAS.numpy()])
    model.compile(keras.optimizers.SGD(LR), 'mse', metrics=['mae'] if case.metrics else [])
    cbs = made_by(case)
    x, y = X.numpy(), Y.numpy()
    data = {'validation_data': (x, y), 'validation_batch_size': BATCH, 'shuffle': False}
    options = {'batch_size': BATCH, 'verbose': 0, 'callbacks': cbs}
    model.fit(x, y, epochs=EPOCHS, **data, **options)
    model.evaluate(x, y, **options)
    model.predict(x, **options)
    kernel, bias = dense.get_weights()
    return numbers_of(case, cbs, [torch.tensor(kernel.T), torch.tensor(bias)])


def make_learner(case: Case, cbs: list[Any]) -> Learner:
    model = nn.Linear(3, 1)
    model.load_state_dict({'weight': WEIGHT, 'bias': BIAS})
    dls = DataLoaders.from_tensors((X, Y), (X, Y), bs=BATCH, shuffle=False, device='cpu')
    return Learner(
        dls,
        model,
        F.mse_loss,
        torch.optim.SGD,
        lr=LR,
        metrics=mae if case.metrics else [],
        cbs=[from_keras(cb) for cb in cbs],
    )


def run_in_learner(case: Case) -> dict[str, Tensor]:
    cbs = made_by(case)
    learn = make_learner(case, cbs)
    with learn.no_bar(), learn.no_logging():
        learn.fit(EPOCHS)
        return finish(case, cbs, learn)


def run_killed(case: Case) -> dict[str, Tensor]:
    "Train in a Learner that fails in the third epoch, and resume in another one."

    def fail(cb: Any) -> None:
        if cb.train_iter == 15:
            raise InterruptedError

    for more in ([Callback(before_batch=fail)], []):
        cbs = made_by(case)
        learn = make_learner(case, cbs)
        learn.add_cbs([Checkpoint('1ba', Path('checkpoints')), *more])
        with learn.no_bar(), learn.no_logging(), contextlib.suppress(InterruptedError):
            learn.fit(EPOCHS, resume=True)
    return finish(case, cbs, learn)


def finish(case: Case, cbs: list[Any], learn: Learner) -> dict[str, Tensor]:
    learn.validate()
    learn.get_preds()
    return numbers_of(case, cbs, [p.detach() for p in learn.model.parameters()])


def numbers_of(case: Case, cbs: list[Any], weights: list[Tensor]) -> dict[str, Tensor]:
    "Return the weights, what was noted, the history and the numbers of a file, as tensors."
    found = {f'weights {i}': t for i, t in enumerate(weights)}
    found |= {name.name: torch.tensor(0) for name in Path().glob('*.h5')}
    record = []
    for cb in cbs:
        record += list(getattr(cb, 'record', ()))
        record += [[k, *values] for k, values in sorted(getattr(cb, 'history', {}).items())]
    if case.file:
        lines = Path(case.file).read_text('utf-8').splitlines()
        rows = [row for row in csv.DictReader(lines) if row['epoch'] != 'epoch']
        record += [[part for k in sorted(r) for part in (k, float(r[k]))] for r in rows]
    for i, entry in enumerate(record):
        parts = entry if isinstance(entry, (tuple, list)) else [entry]
        names = [part for part in parts if isinstance(part, str)]
        values = [float(part) for part in parts if not isinstance(part, str)]
        found[f'{i} {names}'] = torch.tensor(values, dtype=torch.float64)
    return found


def run_case(case: Case, run: Callable[[Case], dict[str, Tensor]], part: str) -> Row:
    with quiet_folder():
        expected = run_in_keras(case)
    with quiet_folder():
        try:
            found = run(case)
        except Exception as e:
            return Row(case.title, False, None, TOO_FAR, f'{type(e).__name__}: {e}', part)
    numbers = compare_numbers(expected, found)
    # Keras multiplies in another order
    numbers = EQUAL if numbers == 'within 1e-05' else numbers
    why = case.lost if case.lost and run is run_killed else case.why
    return Row(case.title, True, list(expected) == list(found), numbers, why, part)


def rows() -> list[Row]:
    warnings.simplefilter('ignore')
    with contextlib.redirect_stderr(io.StringIO()):
        whole = [run_case(case, run_in_learner, case.part) for case in CASES]
        resumed = [run_case(case, run_killed, 'Killed and resumed') for case in CASES]
    return whole + resumed
