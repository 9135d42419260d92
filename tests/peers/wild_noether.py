"What Noether's own callbacks are trained with, from a copy of its repository."

from __future__ import annotations

import logging
import os
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import typing_extensions
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, default_collate

from learnkit.interop.ksuit.construct import find_config_class
from tests.peers import ksuit_bench as bench
from tests.peers.rows import Row
from tests.peers.wild_bench import SOURCES, Case

BIDICT = 'noether.core.utils.bidict'  # the one file with the syntax of Python 3.12


def import_noether() -> None:
    "Add the copy to the path, and what Python 3.11 lacks."
    source = Path(os.environ[SOURCES]) / 'Emmi-AI+noether' / 'src'
    sys.path.insert(0, str(source))
    vars(typing).setdefault('override', typing_extensions.override)
    text = (source / f'{BIDICT.replace(".", "/")}.py').read_text('utf-8')
    text = text.replace('class Bidict[KT, VT]:', 'class Bidict(Generic[KT, VT]):')
    module = types.ModuleType(BIDICT)
    names: dict[str, Any] = {name: typing.TypeVar(name) for name in ('KT', 'VT')}
    vars(module).update(names, Generic=typing.Generic)
    exec(text, vars(module))
    sys.modules[BIDICT] = module


import_noether()
# isort: split
from noether.core import callbacks  # noqa: E402  # after the copy is importable
from noether.core.models import Model  # noqa: E402
from noether.core.providers import MetricPropertyProvider, PathProvider  # noqa: E402
from noether.core.schedules import LinearDecreasingSchedule  # noqa: E402
from noether.core.schemas.dataset import DatasetBaseConfig  # noqa: E402
from noether.core.schemas.models import ModelBaseConfig  # noqa: E402
from noether.core.schemas.schedules import DecreasingProgressScheduleConfig  # noqa: E402
from noether.core.schemas.trainers import BaseTrainerConfig  # noqa: E402
from noether.core.trackers import NoopTracker  # noqa: E402
from noether.data import Dataset  # noqa: E402
from noether.data.container import DataContainer  # noqa: E402
from noether.data.pipeline import Collator  # noqa: E402
from noether.training.callbacks import OfflineLossCallback  # noqa: E402
from noether.training.trainers import BaseTrainer  # noqa: E402

LR, WD, BATCH, EPOCHS = bench.LR, bench.WD, bench.BATCH, bench.EPOCHS
N_UPDATES = EPOCHS * bench.N_TRAIN // BATCH
EPOCH, UPDATE, UPDATES = {'every_n_epochs': 1}, {'every_n_updates': 1}, {'every_n_updates': 2}
SAMPLES = {'every_n_samples': 16, 'batch_size': BATCH}
TEST, TEST_LOSS = 'loss/test/total', {**EPOCH, 'dataset_key': 'test'}
PART = 'Callbacks of Noether'
WITHOUT_DECAY = (
    'exclude_bias_from_weight_decay',
    'exclude_normalization_params_from_weight_decay',
)
CONDITIONS = {
    'scheduled': {'scheduled': True},
    'named_losses': {'loss_func': bench.mse_and_bias},
    'microbatches': {'microbatch': 4},
    'refuses_to_resume': {'refuses': True},
}
STAND_INS: dict[str, Any] = {}


class SampleLoss(OfflineLossCallback):
    "Log the mean of what `process_data` returns for each sample, as Noether's tutorials do."

    def process_data(self, batch: Any, *, trainer_model: Any, **_: Any) -> Any:
        error = trainer_model(batch['x'])['pred'] - batch['target']
        return {'total': error.square().mean(1)}, {'size': error.abs().mean(1)}


def describe(cls: type, **options: Any) -> SimpleNamespace:
    "Take the place of a class in the table: each trainer makes the callback itself."
    return SimpleNamespace(cls=cls, options=options)


CLASSES = [*(getattr(callbacks, name) for name in callbacks.__all__), OfflineLossCallback]
NAMES = {cls.__name__: partial(describe, cls) for cls in [*CLASSES, SampleLoss]}


class InputsAndTargets(Collator):
    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        "Return a batch without the indices of the samples."
        return default_collate([{'x': s['x'], 'target': s['target']} for s in samples])


class Rows(Dataset):
    "Samples of a regression."

    def __init__(self, n: int, seed: int) -> None:
        super().__init__(DatasetBaseConfig(kind='rows'))
        self.rows = bench.Rows(n, seed)
        self.pipeline = InputsAndTargets()

    def __len__(self) -> int:
        return len(self.rows)

    def getitem_x(self, i: int) -> Tensor:
        return self.rows.x[i]

    def getitem_target(self, i: int) -> Tensor:
        return self.rows.target[i]


class Net(Model):
    "A regression whose outputs are a dict."

    def __init__(self, config: ModelBaseConfig, **services: Any) -> None:
        super().__init__(config, **services)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 1)

    forward = bench.Net.forward


class Shuffled(Sampler[int]):
    "One permutation an epoch; torch's own sampler draws a second one if it is iterated to its end."

    def __init__(self, data_source: Any) -> None:
        self.data_source = data_source
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(len(self), generator=self.generator).tolist()


class Container(DataContainer):
    "Data in the same order in both trainers."

    def get_main_sampler(self, train_dataset: Any, **_: Any) -> Any:
        return Shuffled(train_dataset)


class Trainer(BaseTrainer):
    "Noether's trainer with a loss and named outputs."

    loss_func = staticmethod(bench.mse)

    def loss_compute(self, forward_output: Any, targets: Any) -> Any:
        return self.loss_func(forward_output, targets['target']), forward_output


class NoetherCase(bench.Case):
    "A callback with its options, on Noether's data and model."

    def options(self, config: dict[str, Any]) -> dict[str, Any]:
        return config

    def loaders(self) -> dict[str, DataLoader[Any]]:
        train, test = Rows(bench.N_TRAIN, 1), Rows(bench.N_TEST, 2)
        loader = partial(DataLoader, batch_size=BATCH, collate_fn=train.pipeline)
        return {'train': loader(train, sampler=Shuffled(train)), 'test': loader(test)}

    def make_model(self) -> tuple[Net, Callable[..., torch.optim.Optimizer]]:
        return self.make_net(), make_optimizer

    def make_net(self, **services: Any) -> Net:
        torch.manual_seed(0)
        optimizer: dict[str, Any] = {'kind': 'torch.optim.AdamW', 'lr': LR, 'weight_decay': WD}
        optimizer |= dict.fromkeys(WITHOUT_DECAY, False)
        if self.scheduled:
            kind = {'kind': 'noether.core.schedules.LinearDecreasingSchedule', 'end_value': 0.0}
            optimizer['schedule_config'] = {**kind, 'max_value': LR}
            optimizer['weight_decay_schedule'] = {**kind, 'max_value': WD}
        return Net(ModelBaseConfig(kind='net', name='net', optimizer_config=optimizer), **services)

    def schedule(self, value: float) -> Callable[[float], float]:
        config = DecreasingProgressScheduleConfig(max_value=value, end_value=0.0)
        schedule = LinearDecreasingSchedule(config)
        return lambda share: schedule.get_value(round(share * N_UPDATES), N_UPDATES)


def make_optimizer(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    "Return an optimizer whose group has a name, as Noether's has."
    groups = [{'params': list(parameters), 'name': 'default'}]
    return torch.optim.AdamW(groups, weight_decay=WD, **options)


class Lines(logging.Handler):
    "Keeps the lines that callbacks log, without those with seconds."

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.name in NAMES and 'sec]' not in text and 'Estimated' not in text:
            self.lines.append(re.sub(r'(train_time/.*): .*', r'\1', text))


def hear(run: bench.Run, case: bench.Case, folder: Path) -> bench.Outcome:
    "Run one side, and keep the lines that its callbacks log."
    lines = Lines()
    logging.getLogger().addHandler(lines)
    try:
        outcome = run(case, folder)
    finally:
        logging.getLogger().removeHandler(lines)
    outcome.printed_lines = lines.lines
    return outcome


def run_noether(case: Any, folder: Path) -> bench.Outcome:
    "Train in Noether's trainer."
    paths, provider = PathProvider(folder.parent, folder.name), MetricPropertyProvider()
    tracker = NoopTracker(MetricPropertyProvider(), paths)
    config = BaseTrainerConfig(
        kind='trainer',
        max_epochs=EPOCHS,
        effective_batch_size=BATCH,
        callbacks=[],
        add_default_callbacks=False,
        forward_properties=['x'],
        target_properties=['target'],
        disable_gradient_accumulation=case.microbatch is None,
        max_batch_size=case.microbatch,
    )
    rows = {'train': Rows(bench.N_TRAIN, 1), 'test': Rows(bench.N_TEST, 2)}
    container = Container(rows, 0, pin_memory=False)
    trainer = Trainer(config, container, 'cpu', tracker, paths, metric_property_provider=provider)
    trainer.loss_func = case.loss_func
    model = case.make_net(update_counter=trainer.update_counter, path_provider=paths)

    def make_callbacks(*_: Any, **__: Any) -> list[Any]:
        services = trainer._get_default_callback_kwargs(model)
        return [make_callback(cls, options, services) for cls, options in case.callbacks]

    trainer.get_user_callbacks = make_callbacks
    trainer.train(model)
    files, weights = bench.read_files(folder), dict(model.state_dict())
    return bench.Outcome(trainer.log_writer.log_entries, dict(tracker.summary), files, weights, [])


def make_callback(cls: type, options: dict[str, Any], services: dict[str, Any]) -> Any:
    if not options:
        return cls(**services)
    return cls(**services, callback_config=find_config_class(cls)(**options))


def compare(case: Case, make: Callable[[], list[Any]]) -> list[Row]:
    "Compare a whole run and a killed one with a run in Noether's trainer."
    logging.getLogger().setLevel(logging.INFO)
    warnings.simplefilter('ignore')
    *before, (cls, options) = [(made.cls, made.options) for made in make()]
    refuses = case.options.pop('refuses', False)
    reason = {'refuses' if refuses else 'why': case.why}
    compared = NoetherCase(cls, options, before, **case.options, **reason)
    hear_run, hear_reference = (partial(hear, run) for run in (bench.run_learner, run_noether))
    whole = bench.run_case(compared, hear_run, f'{PART}, in its own trainer', hear_reference)
    killed = bench.run_case(compared, bench.run_killed, f'{PART}, killed and resumed', run_noether)
    killed.callback += ', killed'
    return [whole, killed]
