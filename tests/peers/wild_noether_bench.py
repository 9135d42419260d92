"""Run Noether's own callbacks in a learnkit Learner and in its own `BaseTrainer`, from a copy of its repository.

python -m tests.peers.wild_noether_bench [CLASS ...]   # in the environment: print rows"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, default_collate

from learnkit import DataLoaders, Learner, ParamScheduler
from learnkit.interop import from_ksuit
from learnkit.interop.ksuit_construct import find_config_class
from tests.peers import noether_source
from tests.peers.ksuit_bench import Outcome, compare, mse, mse_and_bias, read_files
from tests.peers.repeated import train_killed
from tests.peers.rows import TOO_FAR, Row

# isort: split
from noether.core import callbacks
from noether.core.models import Model
from noether.core.providers import MetricPropertyProvider, PathProvider
from noether.core.schedules import LinearDecreasingSchedule
from noether.core.schemas.dataset import DatasetBaseConfig
from noether.core.schemas.models import ModelBaseConfig
from noether.core.schemas.schedules import DecreasingProgressScheduleConfig
from noether.core.schemas.trainers import BaseTrainerConfig
from noether.core.trackers import NoopTracker
from noether.data import Dataset
from noether.data.container import DataContainer
from noether.data.pipeline import Collator
from noether.training.callbacks import OfflineLossCallback
from noether.training.trainers import BaseTrainer

N_TRAIN, N_TEST, BATCH, EPOCHS = 24, 16, 8, 3
N_UPDATES = EPOCHS * N_TRAIN // BATCH
LR, WD = 0.01, 0.05
SCHEDULE = 'noether.core.schedules.LinearDecreasingSchedule'


class InputsAndTargets(Collator):
    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        "Return a batch without the indices of the samples."
        return default_collate([{'x': s['x'], 'target': s['target']} for s in samples])


class Rows(Dataset):
    "Samples of a regression."

    def __init__(self, n: int, seed: int) -> None:
        super().__init__(DatasetBaseConfig(kind='rows'))
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 4, generator=g)
        self.target = self.x.sum(1, keepdim=True) + torch.randn(n, 1, generator=g)
        self.pipeline = InputsAndTargets()

    def __len__(self) -> int:
        return len(self.x)

    def getitem_x(self, i: int) -> Tensor:
        return self.x[i]

    def getitem_target(self, i: int) -> Tensor:
        return self.target[i]


class Net(Model):
    "A regression whose outputs are a dict."

    def __init__(self, config: ModelBaseConfig, **services: Any) -> None:
        super().__init__(config, **services)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        return {'pred': self.head(hidden), 'hidden_norm': hidden.norm()}


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

    loss_func = staticmethod(mse)

    def loss_compute(self, forward_output: Any, targets: Any) -> Any:
        return self.loss_func(forward_output, targets['target']), forward_output


@dataclass
class Case:
    "A callback with its options, and others that log what it reads."

    cls: type
    options: dict[str, Any] | None = None  # None: without a configuration
    before: list[tuple[type, dict[str, Any] | None]] = field(default_factory=list)
    loss_func: Any = mse
    microbatch: int | None = None
    is_scheduled: bool = False
    why: str = ''
    refuses: str = ''  # why it cannot be resumed in its own trainer either

    @property
    def callbacks(self) -> list[tuple[type, dict[str, Any] | None]]:
        return [*self.before, (self.cls, self.options)]

    def __str__(self) -> str:
        shown = [f'{k}={v}' for k, v in (self.options or {}).items() if k[:5] in ('every', 'stop_')]
        return f'{self.cls.__name__}({", ".join(shown)})'


EPOCH, UPDATE, UPDATES = {'every_n_epochs': 1}, {'every_n_updates': 1}, {'every_n_updates': 2}
SAMPLES = {'every_n_samples': 16, 'batch_size': BATCH}
ONLINE = (callbacks.OnlineLossCallback, EPOCH)
OFFLINE = (OfflineLossCallback, {**EPOCH, 'dataset_key': 'test'})
TEST = 'loss/test/total'


class SampleLoss(OfflineLossCallback):
    "Log the mean of what `process_data` returns for each sample, as Noether's tutorials do."

    def process_data(self, batch: Any, *, trainer_model: Any, **_: Any) -> Any:
        error = trainer_model(batch['x'])['pred'] - batch['target']
        return {'total': error.square().mean(1)}, {'size': error.abs().mean(1)}


SAMPLE_LOSS = (SampleLoss, {**EPOCH, 'dataset_key': 'test'})
CASES = [
    Case(callbacks.DatasetStatsCallback),
    Case(callbacks.ParamCountCallback),
    *(Case(callbacks.EtaCallback, every) for every in (EPOCH, UPDATES, SAMPLES)),
    *(Case(callbacks.LrCallback, every, is_scheduled=True) for every in (UPDATE, EPOCH)),
    Case(*ONLINE, loss_func=mse_and_bias, microbatch=4),
    Case(callbacks.OnlineLossCallback, {**UPDATES, 'verbose': False}),
    Case(callbacks.OnlineLossCallback, SAMPLES),
    Case(callbacks.PeakMemoryCallback, EPOCH, why='its line for CUDA needs a GPU'),
    *(Case(callbacks.ProgressCallback, every) for every in (EPOCH, UPDATES, SAMPLES)),
    Case(
        callbacks.TrainTimeCallback,
        EPOCH,
        why="the times inside of Noether's own loader, `getitem` and `collate`, are missing",
    ),
    Case(
        callbacks.BestCheckpointCallback,
        {**UPDATE, 'metric_key': 'loss/online/total/U1'},
        before=[(callbacks.OnlineLossCallback, UPDATE)],
    ),
    Case(
        callbacks.BestCheckpointCallback,
        {**EPOCH, 'metric_key': TEST, 'tolerances': [1, 100], 'model_names': ['net']},
        before=[SAMPLE_LOSS],
        refuses='with tolerances it refuses to be resumed, in Noether too',
    ),
    Case(callbacks.CheckpointCallback, {**EPOCH, 'save_optim': True}),
    Case(callbacks.CheckpointCallback, {**UPDATES, 'save_latest_optim': True}),
    Case(callbacks.CheckpointCallback, {**EPOCH, 'save_weights': False, 'model_names': ['net']}),
    Case(callbacks.CheckpointCallback, {**SAMPLES, 'save_weights': False}),
    Case(
        callbacks.EmaCallback,
        {**UPDATES, 'target_factors': [0.5, 0.9], 'save_latest_weights': True},
    ),
    Case(
        callbacks.EmaCallback,
        {**EPOCH, 'target_factors': [0.5]},
        refuses='without `save_latest_weights` it cannot be resumed, in Noether too',
    ),
    Case(
        callbacks.BestMetricCallback,
        {**EPOCH, 'source_metric_key': TEST, 'target_metric_keys': ['loss/online/total/E1']},
        before=[ONLINE, SAMPLE_LOSS],
    ),
    Case(
        callbacks.BestMetricCallback,
        {**EPOCH, 'source_metric_key': TEST, 'optional_target_metric_keys': ['absent']},
        before=[SAMPLE_LOSS],
    ),
    Case(
        callbacks.TrackAdditionalOutputsCallback,
        {**EPOCH, 'keys': ['pred'], 'patterns': ['norm'], 'save_output': True},
        microbatch=4,
    ),
    Case(
        callbacks.TrackAdditionalOutputsCallback,
        {**UPDATES, 'patterns': ['norm'], 'reduce': 'last', 'verbose': True},
    ),
    *(
        Case(callbacks.FixedEarlyStopper, {f'stop_at_{unit}': n})
        for unit, n in (('epoch', 2), ('update', 4), ('sample', 40))
    ),
    Case(
        callbacks.MetricEarlyStopper,
        {**EPOCH, 'metric_key': TEST, 'tolerance': 1},
        before=[SAMPLE_LOSS],
    ),
    Case(*OFFLINE, before=[ONLINE], loss_func=mse_and_bias),
    Case(
        OfflineLossCallback,
        {**UPDATES, 'dataset_key': 'test', 'output_patterns_to_log': ['norm']},
    ),
    Case(*SAMPLE_LOSS, before=[ONLINE]),
    Case(SampleLoss, {**UPDATES, 'dataset_key': 'test'}),
    Case(SampleLoss, {**SAMPLES, 'dataset_key': 'test', 'output_patterns_to_log': ['size']}),
]


def configuration(cls: type, options: dict[str, Any] | None) -> Any:
    "Return the object that Noether's constructor takes, with the options."
    return None if options is None else find_config_class(cls)(**options)


def make_model(case: Case, **services: Any) -> Net:
    torch.manual_seed(0)
    optimizer: dict[str, Any] = {
        'kind': 'torch.optim.AdamW',
        'lr': LR,
        'weight_decay': WD,
        'exclude_bias_from_weight_decay': False,
        'exclude_normalization_params_from_weight_decay': False,
    }
    if case.is_scheduled:
        optimizer['schedule_config'] = {'kind': SCHEDULE, 'max_value': LR, 'end_value': 0.0}
        optimizer['weight_decay_schedule'] = {'kind': SCHEDULE, 'max_value': WD, 'end_value': 0.0}
    return Net(ModelBaseConfig(kind='net', name='net', optimizer_config=optimizer), **services)


def falling(value: float) -> Callable[[float], float]:
    "Return Noether's schedule as a function of the share of training that is done."
    config = DecreasingProgressScheduleConfig(max_value=value, end_value=0.0)
    schedule = LinearDecreasingSchedule(config)
    return lambda share: schedule.get_value(round(share * N_UPDATES), N_UPDATES)


def make_optimizer(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    "Return an optimizer whose group has a name, as Noether's has."
    groups = [{'params': list(parameters), 'name': 'default'}]
    return torch.optim.AdamW(groups, weight_decay=WD, **options)


def run_noether(case: Case, folder: Path) -> Outcome:
    "Train in Noether's trainer."
    paths = PathProvider(folder.parent, folder.name)
    tracker = NoopTracker(MetricPropertyProvider(), paths)
    microbatch = case.microbatch
    trainer = Trainer(
        BaseTrainerConfig(
            kind='trainer',
            max_epochs=EPOCHS,
            effective_batch_size=BATCH,
            callbacks=[],
            add_default_callbacks=False,
            forward_properties=['x'],
            target_properties=['target'],
            disable_gradient_accumulation=microbatch is None,
            max_batch_size=microbatch,
        ),
        Container({'train': Rows(N_TRAIN, 1), 'test': Rows(N_TEST, 2)}, 0, pin_memory=False),
        'cpu',
        tracker,
        paths,
        metric_property_provider=MetricPropertyProvider(),
    )
    trainer.loss_func = case.loss_func
    model = make_model(case, update_counter=trainer.update_counter, path_provider=paths)
    made = []

    def make_callbacks(*_: Any, **__: Any) -> list[Any]:
        services = trainer._get_default_callback_kwargs(model)
        for cls, options in case.callbacks:
            config = configuration(cls, options)
            made.append(cls(**services, **({} if config is None else {'callback_config': config})))
        return made

    trainer.get_user_callbacks = make_callbacks
    with LINES:
        trainer.train(model)
    return outcome(trainer.log_writer.log_entries, tracker.summary, folder, model)


def make_learner(case: Case, folder: Path) -> Learner:
    "Return a Learner with the callbacks of a case."
    train, test = Rows(N_TRAIN, 1), Rows(N_TEST, 2)
    loader = partial(DataLoader, batch_size=BATCH, collate_fn=train.pipeline)
    dls = DataLoaders(loader(train, sampler=Shuffled(train)), {'test': loader(test)})
    cbs: list[Any] = [from_ksuit(cls, **(options or {})) for cls, options in case.callbacks]
    if case.is_scheduled:
        cbs.append(ParamScheduler({'lr': falling(LR), 'wd': falling(WD)}))
    learn = Learner(
        dls,
        make_model(case),
        case.loss_func,
        opt_func=make_optimizer,
        lr=LR,
        microbatch=case.microbatch,
        path=folder,
        cbs=cbs,
    )
    learn.logger = lambda *_: None
    return learn


def run_learner(case: Case, folder: Path) -> Outcome:
    "Train in a Learner."
    learn = make_learner(case, folder)
    with learn.no_bar(), LINES:
        learn.fit(EPOCHS)
    return read_learner(learn)


def run_killed(case: Case, folder: Path) -> Outcome:
    "Train in a Learner that is killed in the middle of an epoch, and resume in another one."
    return read_learner(train_killed(partial(make_learner, case, folder), EPOCHS))


def read_learner(learn: Learner) -> Outcome:
    services = next(cb for cb in learn.cbs if hasattr(cb, 'services')).services
    services['writer'].flush()
    return outcome(
        services['writer'].log_entries, services['tracker'].summary, learn.path, learn.model
    )


class Lines(logging.Handler):
    "Keeps the lines that callbacks log, without those with seconds."

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.name in LOGGERS and 'sec]' not in text and 'Estimated' not in text:
            self.lines.append(re.sub(r'(train_time/.*): .*', r'\1', text))

    def __enter__(self) -> None:
        self.lines = []
        logging.getLogger().addHandler(self)

    def __exit__(self, *_: Any) -> None:
        logging.getLogger().removeHandler(self)


WHOLE = 'Callbacks of Noether, in its own trainer'
KILLED = 'Callbacks of Noether, killed and resumed'
LINES = Lines()
LOGGERS = {cls.__name__ for case in CASES for cls, _ in case.callbacks}


def outcome(entries: Any, summary: Any, folder: Path, model: Net) -> Outcome:
    "Return what a run logged, wrote and trained."
    return Outcome(
        entries, dict(summary), read_files(folder), dict(model.state_dict()), LINES.lines
    )


def run_case(case: Case, run: Any, part: str) -> Row:
    "Compare a run in a Learner with one in Noether's trainer."
    name = f'{noether_source.REPOSITORY}: {case}'
    if run is run_killed:
        name += ', killed'
    with TemporaryDirectory() as own, TemporaryDirectory() as other:
        theirs = run_noether(case, Path(other))
        try:
            ours = run(case, Path(own))
        except Exception as e:
            why = case.refuses or f'{type(e).__name__}: {e}'
            return Row(name, False, False, TOO_FAR, why, part)
    keys, numbers = compare(case, ours, theirs)
    return Row(name, True, keys, numbers, case.why, part)


def rows(names: list[str] | None = None) -> list[Row]:
    "Return a row for each callback and interval, whole and killed."
    logging.getLogger().setLevel(logging.INFO)
    warnings.simplefilter('ignore')
    found = []
    for part, run in ((WHOLE, run_learner), (KILLED, run_killed)):
        for case in CASES:
            if not names or case.cls.__name__ in names:
                found.append(run_case(case, run, part))
    return found


if __name__ == '__main__':
    for row in rows(sys.argv[1:]):
        print(row)
