"""Run what Noether's callbacks ask of a trainer in a learnkit Learner and in a plain loop, and compare.

Noether is on no index: `ksuit_callbacks` states its callbacks by the interface of ksuit, and `ksuit_trainer`
its loop."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from learnkit import DataLoaders, Learner, ParamScheduler
from learnkit.interop import from_ksuit
from tests.peers import ksuit_callbacks as ks
from tests.peers.ksuit_trainer import Trainer
from tests.peers.repeated import train_killed
from tests.peers.rows import EQUAL, TOO_FAR, Row, compare_numbers

N_TRAIN, N_TEST, BATCH, EPOCHS = 24, 16, 8, 3
LR, WD = 0.01, 0.05


class Rows(Dataset[dict[str, Tensor]]):
    "Samples by name, with a pipeline as Noether's data sets have."

    pipeline = None

    def __init__(self, n: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 4, generator=g)
        self.target = self.x.sum(1, keepdim=True) + torch.randn(n, 1, generator=g)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {'x': self.x[i], 'target': self.target[i]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        return {'pred': self.head(hidden), 'hidden_norm': hidden.norm()}


def mse(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    return (outputs['pred'] - target).square().mean()


def mse_and_bias(outputs: dict[str, Tensor], target: Tensor) -> dict[str, Tensor]:
    error = outputs['pred'] - target
    return {'mse': error.square().mean(), 'bias': 0.1 * error.mean().abs()}


def falling(share: float) -> float:
    return 1 - share / 2


@dataclass
class Case:
    "A callback with its options, and others that log what it reads."

    cls: type
    config: Any = None  # None: without `callback_config`
    before: list[tuple[type, Any]] = field(default_factory=list)
    loss_func: Callable[..., Any] = mse
    microbatch: int | None = None
    scheduled: bool = False
    evaluates: bool = False  # evaluated once more after training
    why: str = ''
    refuses: str = ''  # why it cannot be resumed in its own package either

    @property
    def callbacks(self) -> list[tuple[type, Any]]:
        return [*self.before, (self.cls, self.config)]

    def options(self, config: Any) -> dict[str, Any]:
        "Return the options of a configuration."
        return {} if config is None else asdict(config)

    def loaders(self) -> dict[str, DataLoader[Any]]:
        g = torch.Generator().manual_seed(3)
        return {
            'train': DataLoader(Rows(N_TRAIN, 1), BATCH, shuffle=True, generator=g),
            'test': DataLoader(Rows(N_TEST, 2), BATCH),
        }

    def make_model(self) -> tuple[nn.Module, Callable[..., torch.optim.Optimizer]]:
        torch.manual_seed(0)
        return Net(), partial(torch.optim.AdamW, weight_decay=WD)

    def schedule(self, value: float) -> Callable[[float], float]:
        "Return a value as a function of the share of training that is done."
        return lambda share: value * falling(share)


EPOCH, UPDATES = {'every_n_epochs': 1}, {'every_n_updates': 2}
SAMPLES = {'every_n_samples': 16, 'batch_size': BATCH}
OFFLINE = (ks.OfflineLossCallback, ks.OfflineLossConfig(**EPOCH, dataset_key='test'))
ONLINE = (ks.OnlineLossCallback, ks.OnlineLossConfig(**EPOCH))
LOSS = 'loss/test/total'
CASES = [
    Case(ks.DatasetStatsCallback),
    Case(ks.ParamCountCallback),
    Case(ks.EtaCallback, ks.Interval(**EPOCH)),
    Case(ks.EtaCallback, ks.Interval(**UPDATES)),
    Case(ks.EtaCallback, ks.Interval(**SAMPLES)),
    Case(ks.LrCallback, ks.Interval(every_n_updates=1), scheduled=True),
    Case(*ONLINE, loss_func=mse_and_bias, microbatch=4, evaluates=True),
    Case(ks.OnlineLossCallback, ks.OnlineLossConfig(**UPDATES, verbose=False)),
    Case(ks.PeakMemoryCallback, ks.Interval(**EPOCH), why='its line for CUDA needs a GPU'),
    Case(ks.ProgressCallback, ks.Interval(**EPOCH)),
    Case(ks.ProgressCallback, ks.Interval(**UPDATES)),
    Case(ks.ProgressCallback, ks.Interval(**SAMPLES)),
    Case(ks.TrainTimeCallback, ks.Interval(**EPOCH), why='seconds are not compared'),
    Case(
        ks.BestCheckpointCallback,
        ks.BestCheckpointConfig(every_n_updates=1, metric_key='loss/online/total/U1'),
        before=[(ks.OnlineLossCallback, ks.OnlineLossConfig(every_n_updates=1))],
    ),
    Case(
        ks.BestCheckpointCallback,
        ks.BestCheckpointConfig(
            every_n_updates=1, metric_key='accuracy/test', tolerances=[1, 100], model_names=['Net']
        ),
        before=[(ks.AccuracyCallback, ks.OfDataSet(every_n_updates=1, dataset_key='test'))],
        refuses='with tolerances it refuses to be resumed, in Noether too',
    ),
    Case(ks.CheckpointCallback, ks.CheckpointConfig(**EPOCH, save_optim=True), evaluates=True),
    Case(ks.CheckpointCallback, ks.CheckpointConfig(**UPDATES, save_latest_optim=True)),
    Case(ks.CheckpointCallback, ks.CheckpointConfig(**SAMPLES, save_weights=False)),
    Case(
        ks.EmaCallback,
        ks.EmaConfig(**UPDATES, target_factors=[0.5, 0.9], save_latest_weights=True),
        evaluates=True,
    ),
    Case(
        ks.BestMetricCallback,
        ks.BestMetricConfig(
            **EPOCH,
            source_metric_key=LOSS,
            target_metric_keys=['loss/online/total/E1'],
            optional_target_metric_keys=['absent'],
        ),
        before=[ONLINE, OFFLINE],
    ),
    Case(
        ks.TrackAdditionalOutputsCallback,
        ks.TrackOutputsConfig(**EPOCH, keys=['pred'], patterns=['norm'], save_output=True),
        microbatch=4,
    ),
    Case(
        ks.TrackAdditionalOutputsCallback,
        ks.TrackOutputsConfig(**UPDATES, patterns=['norm'], reduce='last', verbose=True),
    ),
    Case(ks.FixedEarlyStopper, ks.FixedConfig(stop_at_update=4)),
    Case(ks.FixedEarlyStopper, ks.FixedConfig(stop_at_epoch=2)),
    Case(
        ks.MetricEarlyStopper,
        ks.MetricStopperConfig(every_n_epochs=1, metric_key='accuracy/test', tolerance=1),
        before=[(ks.AccuracyCallback, ks.OfDataSet(**EPOCH, dataset_key='test'))],
        evaluates=True,
    ),
    Case(*OFFLINE, before=[ONLINE], loss_func=mse_and_bias, evaluates=True),
    Case(
        ks.OfflineLossCallback,
        ks.OfflineLossConfig(**UPDATES, dataset_key='test', output_patterns_to_log=['norm']),
    ),
    Case(ks.AccuracyCallback, ks.OfDataSet(**SAMPLES, dataset_key='test')),
]


@dataclass
class Outcome:
    "What a run logged, wrote and trained."

    entries: list[dict[str, Any]]
    summary: dict[str, Any]
    files: dict[str, Any]
    weights: dict[str, Tensor]
    printed_lines: list[str]


Run = Callable[[Case, Path], Outcome]


def read_files(folder: Path) -> dict[str, Any]:
    "Return the weights in each file of the callbacks below a folder; None for one without weights."
    files = sorted(folder.rglob('*.th'))
    found: dict[str, Any] = {}
    for file in files:
        name = str(file.relative_to(folder))
        state = torch.load(file, weights_only=True)
        if isinstance(state, Tensor):
            found[name] = {'value': state}
        else:
            found[name] = state.get('state_dict') if name.endswith('_model.th') else None
    return found


def run_plain(case: Case, folder: Path) -> Outcome:
    "Train in the plain loop."
    model, opt_func = case.make_model()
    opt = opt_func(model.parameters(), lr=LR)
    schedule = falling if case.scheduled else None
    trainer = Trainer(
        model, case.loaders(), case.loss_func, opt, folder, EPOCHS, case.microbatch, schedule
    )
    made = [trainer.add(*callback) for callback in case.callbacks]
    trainer.train()
    if case.evaluates:
        trainer.evaluate()
    return Outcome(
        trainer.writer.entries,
        trainer.tracker.summary,
        read_files(folder),
        dict(model.state_dict()),
        said_by(made[-1]),
    )


def make_learner(case: Case, folder: Path) -> Learner:
    "Return a Learner with the callbacks of a case, each constructed from its class."
    model, opt_func = case.make_model()
    dls = case.loaders()
    cbs: list[Any] = [from_ksuit(cls, **case.options(config)) for cls, config in case.callbacks]
    if case.scheduled:
        cbs.append(ParamScheduler({'lr': case.schedule(LR), 'wd': case.schedule(WD)}))
    learn = Learner(
        DataLoaders(dls['train'], {'test': dls['test']}),
        model,
        case.loss_func,
        opt_func=opt_func,
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
    with learn.no_bar():
        learn.fit(EPOCHS)
    return read_learner(case, learn)


def run_killed(case: Case, folder: Path) -> Outcome:
    "Train in a Learner that is killed in the middle of an epoch, and resume in another one."
    return read_learner(case, train_killed(partial(make_learner, case, folder), EPOCHS))


def read_learner(case: Case, learn: Learner) -> Outcome:
    "Return what a trained Learner logged, wrote and trained."
    if case.evaluates:
        with learn.no_bar():
            learn.validate()
    adapters = [cb for cb in learn.cbs if hasattr(cb, 'services')]
    writer, tracker = adapters[0].services['writer'], adapters[0].services['tracker']
    writer.flush()
    return Outcome(
        writer.log_entries,
        tracker.summary,
        read_files(learn.path),
        dict(learn.model.state_dict()),
        said_by(adapters[-1].wrapped),
    )


def said_by(cb: Any) -> list[str]:
    return [*getattr(cb, 'lines', []), *getattr(cb, 'printed_lines', [])]


def compare(case: Case, a: Outcome, b: Outcome) -> tuple[bool, str]:
    "Return whether the keys are the same, and how close the numbers are."
    keys = [[list(entry) for entry in o.entries] for o in (a, b)]
    same = keys[0] == keys[1] and list(a.summary) == list(b.summary) and [*a.files] == [*b.files]
    numbers = [compare_numbers(as_tensors(case, a), as_tensors(case, b))]
    for name, weights in a.files.items():
        if weights is not None:
            numbers.append(compare_numbers(weights, b.files.get(name) or {}))
    if a.printed_lines != b.printed_lines:
        numbers.append(TOO_FAR)
    apart = [n for n in numbers if n != EQUAL]
    return same, TOO_FAR if TOO_FAR in apart else max(apart, default=EQUAL)


def as_tensors(case: Case, o: Outcome) -> dict[str, Tensor]:
    values = {
        f'{i} {key}': torch.tensor(float(value))
        for i, entry in enumerate(o.entries)
        for key, value in entry.items()
        if not key.startswith('train_time/')
    }
    summary = {key: torch.tensor(float(value)) for key, value in o.summary.items()}
    return {**o.weights, **values, **summary}


def run_case(case: Case, run: Run, part: str, reference: Run = run_plain) -> Row:
    "Compare a run in a Learner with one in the plain loop, or in another trainer."
    try:
        with TemporaryDirectory() as own, TemporaryDirectory() as other:
            ours, theirs = run(case, Path(own)), reference(case, Path(other))
        keys, numbers = compare(case, ours, theirs)
    except Exception as e:
        why = case.refuses or f'{type(e).__name__}: {e}'
        return Row(name_of(case), False, False, TOO_FAR, why, part)
    return Row(name_of(case), True, keys, numbers, case.why, part)


def name_of(case: Case) -> str:
    options = case.options(case.config).items()
    every = [f'{key}={n}' for key, n in options if key.startswith(('every', 'stop')) and n]
    return f'{case.cls.__name__}({", ".join(every)})'


# Statements


@contextmanager
def counting(lines: set[int]) -> Iterator[None]:
    "Add the lines of the callbacks' module that run in a context."

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != ks.__file__:
            return None
        lines.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def statements() -> dict[int, str]:
    "Return the first line and the text of each statement in the callbacks' methods."
    source = Path(ks.__file__).read_text('utf-8')
    found = {}
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            is_doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if isinstance(node, ast.stmt) and node is not function and not is_doc:
                found[node.lineno] = source.splitlines()[node.lineno - 1].strip()
    return found


def run_statements() -> Row:
    "Run all cases, and the errors that the callbacks raise, in Learners; count the statements that ran."
    lines: set[int] = set()
    with counting(lines):
        for case in CASES:
            with TemporaryDirectory() as folder:
                run_learner(case, Path(folder))
        run_errors()
        run_resumes()
    wanted = statements()
    missed = [text for line, text in wanted.items() if line not in lines]
    name = f'{len(wanted) - len(missed)} of {len(wanted)} statements'
    why = f'not run: `{"`, `".join(missed)}`' if missed else ''
    return Row(name, all('cuda' in text for text in missed), True, EQUAL, why, 'Statements')


def run_errors() -> None:
    "Run the callbacks into each error that they raise."
    key = {'metric_key': 'loss/absent'}
    cases = [
        (Case(*ONLINE, loss_func=lambda o, t: mse(o, t) * float('nan')), RuntimeError),
        (Case(ks.BestCheckpointCallback, ks.BestCheckpointConfig(**EPOCH, **key)), KeyError),
        (
            Case(ks.MetricEarlyStopper, ks.MetricStopperConfig(**EPOCH, **key, tolerance=1)),
            ValueError,
        ),
        (
            Case(ks.BestMetricCallback, ks.BestMetricConfig(**EPOCH, source_metric_key='loss/no')),
            ValueError,
        ),
    ]
    for case, error in cases:
        with TemporaryDirectory() as folder, pytest.raises(error):
            run_learner(case, Path(folder))


def run_resumes() -> None:
    "Resume callbacks with a state and with files, and one that cannot be resumed."
    for case in CASES:
        if case.cls in (ks.BestCheckpointCallback, ks.EmaCallback):
            refuses = pytest.raises(NotImplementedError) if case.refuses else nullcontext()
            with TemporaryDirectory() as folder, refuses:
                run_killed(case, Path(folder))


def rows() -> list[Row]:
    "Return a row for each callback and interval, one for each resumed run, and the statements."
    whole = [run_case(case, run_learner, 'Callbacks') for case in CASES]
    resumed = [run_case(case, run_killed, 'Killed and resumed') for case in CASES]
    return [*whole, *resumed, run_statements()]
