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
from tempfile import TemporaryDirectory
from typing import Any

os.environ['KERAS_BACKEND'] = 'torch'

import keras  # after its backend is chosen
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from learnkit import DataLoaders, Learner
from learnkit.interop import from_keras
from learnkit.interop.keras import HOOKS
from tests.peers.rows import EQUAL, TOO_FAR, Row, compare_numbers

N, BATCH, EPOCHS, LR = 40, 8, 6, 0.05
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
        values = sorted((logs or {}).items()) if hook != 'on_test_batch_end' else []
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


# -- the comparison --------------------------------------------------------------------------------


@dataclass
class Case:
    "A callback; `file` is where it writes numbers."

    make: Callable[[], Any]
    title: str
    part: str = "Users' callbacks"
    file: str = ''
    why: str = ''  # what differs


OWN = 'Callbacks of Keras'
kc = keras.callbacks
CASES = [
    Case(lambda: kc.EarlyStopping('val_loss', patience=1), "EarlyStopping('val_loss')", OWN),
    Case(
        lambda: kc.EarlyStopping('val_loss', min_delta=0.2, restore_best_weights=True),
        'EarlyStopping(restore_best_weights=True)',
        OWN,
    ),
    Case(
        lambda: kc.ReduceLROnPlateau('val_loss', patience=1, min_delta=0.3),
        "ReduceLROnPlateau('val_loss')",
        OWN,
    ),
    Case(
        lambda: kc.LearningRateScheduler(lambda epoch, lr: lr * 0.5), 'LearningRateScheduler', OWN
    ),
    Case(kc.TerminateOnNaN, 'TerminateOnNaN()', OWN),
    Case(lambda: kc.CSVLogger('log.csv'), 'CSVLogger', OWN, file='log.csv'),
    Case(kc.History, 'History()', OWN),
    Case(lambda: kc.LambdaCallback(on_epoch_end=lambda epoch, logs: None), 'LambdaCallback', OWN),
    Case(
        lambda: kc.ModelCheckpoint('best.weights.h5', save_best_only=True, save_weights_only=True),
        'ModelCheckpoint(save_weights_only=True)',
        OWN,
        why='writes a file of PyTorch',
    ),
    Case(Calls, 'notes every call'),
    Case(StopAtBatch, 'stops at a batch'),
    Case(StopAtLoss, 'stops at a loss'),
    Case(WarmUp, 'sets the rate before batches'),
    Case(Losses, 'keeps the losses of batches'),
    Case(KeepBest, 'keeps the best weights'),
    Case(Shrink, 'changes weights'),
    Case(Averaged, 'averages weights over epochs'),
    Case(Params, 'reads `params`'),
]


def run_in_keras(case: Case) -> tuple[Any, list[Tensor]]:
    dense = keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((3,)), dense])
    dense.set_weights([WEIGHT.T.numpy(), BIAS.numpy()])
    model.compile(keras.optimizers.SGD(LR), 'mse')
    cb = case.make()
    model.fit(
        X.numpy(),
        Y.numpy(),
        batch_size=BATCH,
        epochs=EPOCHS,
        validation_data=(X.numpy(), Y.numpy()),
        validation_batch_size=BATCH,
        shuffle=False,
        callbacks=[cb],
        verbose=0,
    )
    kernel, bias = dense.get_weights()
    return cb, [torch.tensor(kernel.T), torch.tensor(bias)]


def run_in_learner(case: Case) -> tuple[Any, list[Tensor]]:
    model = nn.Linear(3, 1)
    model.load_state_dict({'weight': WEIGHT, 'bias': BIAS})
    dls = DataLoaders.from_tensors((X, Y), (X, Y), bs=BATCH, shuffle=False, device='cpu')
    cb = case.make()
    learn = Learner(dls, model, F.mse_loss, torch.optim.SGD, lr=LR, cbs=from_keras(cb))
    with learn.no_bar(), learn.no_logging():
        learn.fit(EPOCHS)
    return cb, [p.detach() for p in model.parameters()]


def numbers_of(case: Case, cb: Any, weights: list[Tensor]) -> dict[str, Tensor]:
    "Return the weights, what was noted, the history and the numbers of a file, as tensors."
    found = {f'weights {i}': t for i, t in enumerate(weights)}
    history = getattr(cb, 'history', None)
    record = list(getattr(cb, 'record', ())) + ([*history.values()] if history else [])
    if case.file:
        lines = Path(case.file).read_text('utf-8').splitlines()
        record += [list(row.values()) for row in csv.DictReader(lines)]
    for i, entry in enumerate(record):
        parts = entry if isinstance(entry, (tuple, list)) else [entry]
        names = [part for part in parts if isinstance(part, str) and not case.file]
        values = [float(part) for part in parts if part not in names]
        found[f'{i} {names}'] = torch.tensor(values, dtype=torch.float64)
    return found


def run_case(case: Case) -> Row:
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        expected = numbers_of(case, *run_in_keras(case))
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            found = numbers_of(case, *run_in_learner(case))
        except Exception as e:
            return Row(case.title, False, None, TOO_FAR, f'{type(e).__name__}: {e}', case.part)
    numbers = compare_numbers(expected, found)
    # Keras multiplies in another order
    numbers = EQUAL if numbers == 'within 1e-05' else numbers
    return Row(case.title, True, expected.keys() == found.keys(), numbers, case.why, case.part)


def rows() -> list[Row]:
    warnings.simplefilter('ignore')
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return [run_case(case) for case in CASES]
