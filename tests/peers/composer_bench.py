"Run every callback, logger and algorithm that runs in Composer here in a learnkit Learner and in Composer's Trainer."

from __future__ import annotations

import io
import os
import random
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.peers.rows import EQUAL, TOO_FAR, Row, compare_numbers, define_torchvision_operators

define_torchvision_operators()

import composer.algorithms as algorithms  # noqa: E402  # after the operators
import composer.callbacks as callbacks  # noqa: E402
from composer import Callback, Event, Time, Trainer  # noqa: E402
from composer.loggers import (  # noqa: E402
    ConsoleLogger,
    FileLogger,
    InMemoryLogger,
    ProgressBarLogger,
)
from composer.models import ComposerClassifier  # noqa: E402

from learnkit import DataLoaders, Learner  # noqa: E402
from learnkit.interop import from_composer  # noqa: E402

# names, or beginnings of names, of values that no two runs share
OF_THE_MACHINE = (
    'throughput/',
    'time/train',
    'time/val',
    'time/total',
    'time/remaining',
    'cpu_',
    'disk_',
    'network_',
)


class Net(nn.Module):
    "A small network of images 1 x 6 x 6."

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(torch.relu(self.norm(self.conv(x)))).flatten(1))


class Seed(Callback):
    "Seed the generators at each batch: loaders draw from them, in learnkit not in evaluation."

    def init(self, state: Any, logger: Any) -> None:
        seed(0)

    def batch_start(self, state: Any, logger: Any) -> None:
        seed(int(state.timestamp.batch))


def seed(n: int) -> None:
    torch.manual_seed(n)
    np.random.seed(n)
    random.seed(n)


@dataclass
class Setting:
    "What both sides train."

    duration: str = '2ep'
    microbatch: int | None = None
    optimizer: Callable[..., Any] = torch.optim.SGD
    options: dict[str, Any] = field(default_factory=lambda: {'momentum': 0.9})
    n_train: int = 6
    eval_interval: str = '1ep'
    runs: tuple[str, ...] = ('fit',)


@dataclass
class Outcome:
    "What is left after a run."

    weights: dict[str, torch.Tensor]
    log: dict[str, list[tuple[int, Any]]]  # batches and values, by name
    hyperparameters: dict[str, Any]
    error: str = ''


def loaders(setting: Setting) -> tuple[DataLoader[Any], DataLoader[Any]]:
    "Training batches and 3 validation batches, of 8 samples each, in one order in each epoch."
    generator = torch.Generator().manual_seed(0)
    n = 8 * setting.n_train
    x = torch.randn(n + 24, 1, 6, 6, generator=generator)
    y = torch.randint(4, (n + 24,), generator=generator)
    train = DataLoader(TensorDataset(x[:n], y[:n]), 8)
    return train, DataLoader(TensorDataset(x[n:], y[n:]), 8)


def classifier() -> ComposerClassifier:
    torch.manual_seed(2)
    return ComposerClassifier(Net(), num_classes=4)


def in_composer(
    setting: Setting, cbs: Sequence[Any] = (), algs: Sequence[Any] = (), loggers: Sequence[Any] = ()
) -> Outcome:
    "Train with Composer's Trainer."
    model, memory = classifier(), InMemoryLogger()
    train, valid = loaders(setting)
    trainer = Trainer(
        model=model,
        train_dataloader=train,
        eval_dataloader=valid,
        optimizers=setting.optimizer(model.parameters(), lr=0.05, **setting.options),
        device_train_microbatch_size=setting.microbatch,
        eval_interval=setting.eval_interval,
        callbacks=[Seed(), *cbs],
        algorithms=list(algs),
        loggers=[memory, *loggers],
        progress_bar=False,
        device='cpu',
        run_name='peer',
    )
    try:
        for run in setting.runs:
            if run == 'fit':
                trainer.fit(duration=setting.duration)
            elif run == 'eval':
                trainer.eval()
            else:
                trainer.predict(valid)
        error = ''
    except Exception as e:
        error = describe(e)
    trainer.close()
    return outcome(model, memory, error)


def in_learnkit(
    setting: Setting, cbs: Sequence[Any] = (), algs: Sequence[Any] = (), loggers: Sequence[Any] = ()
) -> Outcome:
    "Train with a Learner."
    memory = InMemoryLogger()
    train, valid = loaders(setting)
    model = classifier()
    learn = Learner(
        DataLoaders(train, {'eval': valid}),
        model,
        opt_func=setting.optimizer(model.parameters(), lr=0.05, **setting.options),
        microbatch=setting.microbatch,
        eval_every=setting.eval_interval,
        cbs=[from_composer(cb) for cb in (Seed(), *cbs, *algs, memory, *loggers)],
        path='peer',
    )
    error = ''
    with learn.no_bar(), learn.no_logging():
        try:
            for run in setting.runs:
                if run == 'fit':
                    learn.fit(setting.duration)
                elif run == 'eval':
                    learn.validate()
                else:
                    learn.get_preds(dl=valid)
        except Exception as e:
            error = describe(e)
    learn.close()
    return outcome(model, memory, error)


def describe(e: Exception) -> str:
    if os.environ.get('PEERS_TRACE'):
        traceback.print_exception(e)
    return f'{type(e).__name__}: {e}'.splitlines()[0]


def outcome(model: nn.Module, memory: InMemoryLogger, error: str) -> Outcome:
    log = {
        name: [(int(t.batch), value) for t, value in entries]
        for name, entries in memory.data.items()
    }
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return Outcome(weights, log, dict(memory.hyperparameters), error)


# -- comparison ------------------------------------------------------------------------------------


def is_of_machine(name: str) -> bool:
    return name.startswith(OF_THE_MACHINE)


def numbers_of(o: Outcome) -> dict[str, torch.Tensor]:
    "Return weights and logged values by name; values that depend on the machine as their number."
    found = {f'weights/{name}': value for name, value in o.weights.items()}
    for name, entries in o.log.items():
        values = [] if is_of_machine(name) else [float(value) for _, value in entries]
        found[f'steps/{name}'] = torch.tensor([step for step, _ in entries])
        found[f'values/{name}'] = torch.tensor(values, dtype=torch.float64)
    return found


def compare(
    name: str,
    make: Callable[[str], dict[str, Any]],  # f(folder): arguments of `in_composer`
    setting: Setting | None = None,
    look: Callable[[dict[str, Any], str], Any]
    | None = None,  # f(arguments, folder): what to compare too
    part: str = 'Callbacks',
    why: str = '',
) -> Row:
    "Run both sides and return the row."
    outcomes, looks = [], []
    before = os.getcwd()
    for run in (in_composer, in_learnkit):
        with TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
            os.chdir(folder)
            try:
                with redirect_stdout(io.StringIO()):
                    arguments = make(folder)
                    outcomes.append(run(setting or Setting(), **arguments))
                looks.append(look(arguments, folder) if look else None)
            except Exception as e:
                outcomes.append(Outcome({}, {}, {}, describe(e)))
                looks.append(None)
            finally:
                os.chdir(before)
    theirs, ours = outcomes
    if theirs.error:
        reason = (
            f'in Composer too: {theirs.error}' if ours.error else f'only Composer: {theirs.error}'
        )
        return Row(
            name,
            not ours.error,
            theirs.log.keys() == ours.log.keys(),
            EQUAL if theirs.error == ours.error else TOO_FAR,
            why or reason,
            part,
        )
    if ours.error:
        return Row(name, False, False, TOO_FAR, why or ours.error, part)
    keys = (
        theirs.log.keys() == ours.log.keys()
        and theirs.hyperparameters.keys() <= ours.hyperparameters.keys()
    )
    numbers = compare_numbers(numbers_of(theirs), numbers_of(ours))
    if looks[0] != looks[1]:
        numbers = TOO_FAR
        if os.environ.get('PEERS_TRACE'):
            print(name, *looks, sep='\n')
    if any(map(is_of_machine, theirs.log)):
        why = why or 'values that depend on the clock and the machine: names and steps are compared'
    return Row(name, True, keys, numbers, why, part)
