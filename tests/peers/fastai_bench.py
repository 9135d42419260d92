"""Run every callback that fastai ships in a learnkit Learner and in fastai's, and compare.

Both train the same model on the same fastai loaders with torch's SGD, and seed the random generators at the
beginning of each epoch, because evaluation restores them in learnkit."""

from __future__ import annotations

import contextlib
import io
import math
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import learnkit
from tests.peers import fastai_data as data
from tests.peers.rows import TOO_FAR, Row, compare_numbers

# isort: split
import fastai.learner as fastai_learner
import fastcore.basics
from fastai import optimizer
from fastai.callback import all as cb, mixup
from fastai.callback.core import Callback
from fastai.callback.fp16 import ModelToHalf
from fastai.callback.preds import MCDropoutCallback
from fastai.callback.tensorboard import TensorBoardCallback, TensorBoardProjectorCallback
from fastai.callback.wandb import WandbCallback
from fastai.distributed import ParallelTrainer
from fastai.losses import CrossEntropyLossFlat, MSELossFlat
from fastai.metrics import LossMetrics, accuracy
from fastai.test_utils import VerboseCallback
from fastai.vision import gan

TOLERANCE = 2e-6  # relative: a mean of float32 values is added up in another order
OPTIMIZERS = {
    fastai_learner.Learner: optimizer.SGD,
    learnkit.Learner: learnkit.SGD,
}
Observe = Callable[[Any], Mapping[str, Any]]


class SeedEpochs(Callback):
    "Seed every random generator with the number of the epoch."

    order = -100

    def before_epoch(self) -> None:
        data.seed_generators(self.epoch)


class CountSteps(Callback):
    "Count the optimizer's steps."

    def before_fit(self) -> None:
        self.n_steps = 0

    def after_step(self) -> None:
        self.n_steps += 1


@dataclass
class Case:
    "How a callback is trained with, and what is read from it afterwards."

    name: str
    make: Callable[[], list[Any]]
    observe: Observe = lambda learn: {}
    fit: Callable[[Any], Any] = lambda learn: learn.fit(2, 0.1)
    loaders: Callable[[Path], Any] = data.table
    model: Callable[[], Any] = data.classifier
    # keyword arguments of the Learner; `model` is the model
    options: Callable[[Any], dict[str, Any]] = lambda model: {}
    # whether the recorder's rows, rates and losses are compared
    rows: bool = True
    # momentum of both optimizers
    mom: float = 0.9
    why: str = ''


@dataclass
class Outcome:
    "What a fit left."

    weights: dict[str, torch.Tensor]
    values: dict[str, Any] = field(default_factory=dict)


def train(case: Case, library: type, folder: Path) -> Outcome:
    "Train a case with one of the two Learners."
    data.seed_generators(0)
    loaders = case.loaders(folder)
    model = case.model()
    options = {'loss_func': CrossEntropyLossFlat(), 'metrics': accuracy, **case.options(model)}
    count = CountSteps()
    cbs = [SeedEpochs(), count, *case.make()]
    learn = library(
        loaders,
        model,
        opt_func=partial(OPTIMIZERS[library], mom=case.mom),
        cbs=cbs,
        path=folder,
        **options,
    )
    if library is learnkit.Learner and hasattr(learn.recorder, 'train_loss'):
        learn.recorder.train_loss = 'smooth'  # as in fastai
    case.fit(learn)
    recorder = learn.recorder
    values = {
        'n_steps': count.n_steps,
        'names': list(recorder.metric_names),
        # fastai leaves out what was not measured, learnkit has None
        'values': [[v for v in row if v is not None] for row in recorder.values if row],
        'lrs': list(recorder.lrs),
        'losses': list(recorder.losses),
        'observed': dict(case.observe(learn)),
    }
    return Outcome(dict(learn.model.state_dict()), values)


def flatten(value: Any, name: str = '') -> Iterator[tuple[str, Any]]:
    "Yield each number, string and tensor of a nested value, with its path."
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(item, f'{name}.{key}')
    elif isinstance(value, (list, tuple)) or type(value).__name__ == 'L':
        for i, item in enumerate(value):
            yield from flatten(item, f'{name}[{i}]')
    elif isinstance(value, np.generic):
        yield name, value.item()
    else:
        yield name, value


def is_same(a: Any, b: Any) -> bool:
    "Return True if two leaves are equal; numbers, if they are within the tolerance."
    if isinstance(a, (torch.Tensor, np.ndarray)) or isinstance(b, (torch.Tensor, np.ndarray)):
        x, y = torch.as_tensor(a).double(), torch.as_tensor(b).double()
        return x.shape == y.shape and torch.allclose(x, y, TOLERANCE, TOLERANCE, equal_nan=True)
    if isinstance(a, float) and isinstance(b, float):
        both_nan = math.isnan(a) and math.isnan(b)
        return both_nan or math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(a == b)


def compare_case(case: Case) -> Row:
    "Return the row of a case."
    outcomes = []
    for library in OPTIMIZERS:
        try:
            with (
                tempfile.TemporaryDirectory() as folder,
                contextlib.chdir(folder),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                outcomes.append(train(case, library, Path(folder)))
        except Exception as error:
            traceback.print_exc()
            name = 'learnkit' if library is learnkit.Learner else 'fastai'
            why = f'fails in {name}: {type(error).__name__}: {str(error)[:200]}'
            return Row(case.name, False, False, TOO_FAR, why)
    for outcome in outcomes:
        if not case.rows:
            outcome.values = {
                name: outcome.values[name] for name in ('n_steps', 'names', 'observed')
            }
    expected, found = (dict(flatten(outcome.values)) for outcome in outcomes)
    numbers = compare_numbers(outcomes[0].weights, outcomes[1].weights)
    different = [
        path for path in expected.keys() & found.keys() if not is_same(expected[path], found[path])
    ]
    for path in sorted(different):
        print(f'{case.name}{path}: {expected[path]!r} in fastai, {found[path]!r} in learnkit')
    if expected.keys() != found.keys():
        print(f'{case.name}: only in one: {sorted(expected.keys() ^ found.keys())}')
    if different:
        numbers = TOO_FAR
    return Row(case.name, True, expected.keys() == found.keys(), numbers, case.why)


def read_scalars(folder: Path) -> dict[str, Any]:
    "Return the scalars of TensorBoard's files, by tag."
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()
    scalars = {tag: [(s.step, s.value) for s in events.Scalars(tag)] for tag in tags['scalars']}
    return {'images': sorted(tags['images']), 'scalars': scalars}


def fit_and_gather(learn: Any) -> None:
    gather = cb.GatherPredsCallback(with_input=True, with_loss=True)
    learn.fit(1, 0.1)
    with learn.loss_not_reduced():
        learn.validate(cbs=gather)
    learn.gathered = gather.all_tensors()


class Run:
    "The client of AzureML."

    parent = None

    def __init__(self) -> None:
        self.logged: dict[str, list[Any]] = {}

    def log(self, name: str, value: Any) -> None:
        if 'time' not in name:
            self.logged.setdefault(name, []).append(value)


def stub_azure() -> None:
    "Make the modules that `fastai.callback.azureml` imports."
    for name in ('azureml', 'azureml.core', 'azureml.core.run', 'azureml.exceptions'):
        sys.modules[name] = types.ModuleType(name)
    sys.modules['azureml.core.run'].Run = Run
    sys.modules['azureml.exceptions'].RunEnvironmentException = RuntimeError


stub_azure()
from fastai.callback.azureml import AzureMLCallback


def fit_and_project(learn: Any) -> None:
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ == 'CastToTensor'])
    learn.fit(1, 0.1)
    learn.get_preds(cbs=TensorBoardProjectorCallback('runs', layer=learn.model[1][1]))
    learn.projected = sorted(
        path.name for path in Path('runs').rglob('*') if path.suffix in ('.tsv', '.pbtxt', '.png')
    )


def fit_with_wandb(learn: Any) -> None:
    import wandb

    wandb.init(mode='disabled')
    logged: list[dict[str, Any]] = []

    def init_args(value: Any) -> dict[str, Any]:
        "Return {} for numbers and paths, for which fastcore's function raises."
        return fastcore.basics.init_args(value) if hasattr(value, '__dict__') else {}

    log = mock.patch('wandb.log', lambda values, step=None: logged.append({**values, 'step': step}))
    with log, mock.patch('fastai.callback.wandb.init_args', init_args):
        learn.fit(2, 0.1)
    learn.logged = [
        {
            name: None if name in ('train_samples_per_sec', 'Prediction_Samples') else value
            for name, value in row.items()
        }
        for row in logged
    ]


def to_float(cb: Any) -> None:
    cb.learn.pred = cb.pred.float()


def halve_inputs(cb: Any) -> None:
    cb.learn.xb = tuple(x.half() for x in cb.xb)


def keep_mean(module: Any, inputs: Any, output: Any) -> float:
    return output.float().mean().item()


def series_options(model: Any) -> dict[str, Any]:
    return {'loss_func': MSELossFlat(), 'metrics': None}


def gan_model() -> Any:
    n_pixels = 3 * data.SIZE**2
    shape = torch.nn.Unflatten(1, (3, data.SIZE, data.SIZE))
    generator = torch.nn.Sequential(torch.nn.Linear(8, n_pixels), shape)
    critic = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(n_pixels, 1))
    return gan.GANModule(generator, critic)


def gan_options(model: Any) -> dict[str, Any]:
    loss_func = gan.GANLoss(gan._tk_mean, gan._tk_diff, model)
    return {'loss_func': loss_func, 'metrics': list(LossMetrics('gen_loss,crit_loss'))}


def gan_case(name: str, *switchers: Callable[[], Any]) -> Case:
    "Return a case with a `GANTrainer` and callbacks that switch it."
    return Case(
        name,
        lambda: [gan.GANTrainer(clip=0.01), *(make() for make in switchers)],
        lambda learn: {
            'critic': learn.gan_trainer.crit_losses,
            'generator': learn.gan_trainer.gen_losses,
        },
        loaders=data.noise,
        model=gan_model,
        options=gan_options,
        fit=lambda learn: learn.fit(2, 0.01),
        mom=0.0,
        why='without momentum: with it fastai moves the network that is switched off',
    )


def fit_frozen(learn: Any) -> None:
    for parameter in learn.model[1].parameters():
        parameter.requires_grad_(False)
    learn.fit(2, 0.1)


def without_defaults(model: Any) -> dict[str, Any]:
    return {'default_cbs': False}


def tracker_case(cls: type, *args: Any, **kwargs: Any) -> Case:
    "Return a case of a callback that follows a metric."
    return Case(
        cls.__name__,
        lambda: [cls(*args, **kwargs)],
        lambda learn: {'best': float(learn.cbs[-1].best)},
        fit=lambda learn: learn.fit(5, 1.0),
    )


PICTURES = {'loaders': data.pictures, 'model': data.picture_classifier}
SERIES = {'loaders': data.series, 'model': data.Recurrent, 'options': series_options}
CASES = [
    Case(
        'TrainEvalCallback',
        lambda: [cb.TrainEvalCallback(), fastai_learner.Recorder()],
        options=without_defaults,
        rows=False,
        why="without learnkit's own nothing counts epochs: of two, the second is not validated",
    ),
    Case(
        'GatherPredsCallback',
        lambda: [],
        lambda learn: {'tensors': learn.gathered},
        fit=fit_and_gather,
        rows=False,
    ),
    Case(
        'FetchPredsCallback',
        lambda: [cb.FetchPredsCallback(with_input=True, with_decoded=True)],
        lambda learn: {'preds': learn.fetch_preds.preds},
    ),
    Case(
        'Recorder',
        lambda: [fastai_learner.Recorder(train_metrics=True)],
    ),
    Case('CastToTensor', lambda: [fastai_learner.CastToTensor()], **PICTURES),
    Case(
        'SkipToEpoch', lambda: [fastai_learner.SkipToEpoch(1)], fit=lambda learn: learn.fit(3, 0.1)
    ),
    Case('VerboseCallback', lambda: [VerboseCallback()]),
    Case(
        'CollectDataCallback',
        lambda: [cb.CollectDataCallback()],
        lambda learn: {'data': learn.collect_data.data},
    ),
    Case('ProgressCallback', lambda: [cb.ProgressCallback()]),
    Case('ShowGraphCallback', lambda: [cb.ShowGraphCallback()]),
    Case(
        'CSVLogger',
        lambda: [cb.CSVLogger()],
        lambda learn: {'log': learn.csv_logger.read_log().drop(columns='time').to_dict('list')},
    ),
    Case(
        'ParamScheduler',
        lambda: [cb.ParamScheduler({'lr': cb.SchedCos(0.1, 0.01), 'mom': cb.SchedLin(0.9, 0.5)})],
        lambda learn: {'hps': learn.recorder.hps},
    ),
    Case(
        'LRFinder',
        lambda: [],
        fit=lambda learn: learn.fit(3, cbs=cb.LRFinder(num_it=12)),
    ),
    Case('MixedPrecision', lambda: [cb.MixedPrecision()]),
    Case('MixedPrecision(bf16)', lambda: [cb.MixedPrecision(amp_mode='bf16')]),
    Case(
        'ModelToHalf',
        lambda: [ModelToHalf(), Callback(before_batch=halve_inputs, after_pred=to_float)],
    ),
    Case('ChannelsLast', lambda: [cb.ChannelsLast()], **PICTURES),
    Case(
        'HookCallback',
        lambda: [cb.HookCallback(hook=keep_mean)],
        lambda learn: {'means': learn.hook.hooks.stored},
    ),
    Case(
        'ActivationStats',
        lambda: [cb.ActivationStats(with_hist=True)],
        lambda learn: {'stats': learn.activation_stats.stats},
    ),
    Case('MixHandler', lambda: [mixup.MixHandler(0.4), cb.RNNCallback()], **SERIES),
    Case('MixUp', lambda: [cb.MixUp(0.4)], **PICTURES),
    Case('CutMix', lambda: [cb.CutMix()], **PICTURES),
    Case('MCDropoutCallback', lambda: [MCDropoutCallback()]),
    Case(
        'ModelResetter',
        lambda: [cb.ModelResetter(), cb.RNNCallback()],
        lambda learn: {'n': learn.model.n_resets},
        **SERIES,
    ),
    Case('RNNCallback', lambda: [cb.RNNCallback()], **SERIES),
    Case('RNNRegularizer', lambda: cb.rnn_cbs(2.0, 1.0), **SERIES),
    Case(
        'TerminateOnNaNCallback',
        lambda: [cb.TerminateOnNaNCallback()],
        fit=lambda learn: learn.fit(3, 1e6),
    ),
    tracker_case(cb.TrackerCallback),
    tracker_case(cb.EarlyStoppingCallback),
    tracker_case(cb.SaveModelCallback, 'accuracy'),
    tracker_case(cb.ReduceLROnPlateau, min_delta=0.2),
    Case(
        'ShortEpochCallback',
        lambda: [cb.ShortEpochCallback(0.5)],
        rows=False,
        why='learnkit measures and records the short epoch, fastai leaves it out',
    ),
    Case('GradientAccumulation', lambda: [cb.GradientAccumulation(16)]),
    Case('GradientClip', lambda: [cb.GradientClip(0.1)]),
    Case('BnFreeze', lambda: [cb.BnFreeze()], fit=fit_frozen),
    Case('ParallelTrainer', lambda: [ParallelTrainer(None)]),
    Case(
        'TensorBoardCallback',
        lambda: [TensorBoardCallback('runs')],
        lambda learn: read_scalars('runs'),
        **PICTURES,
    ),
    Case(
        'TensorBoardProjectorCallback',
        lambda: [],
        lambda learn: {'files': learn.projected},
        fit=fit_and_project,
        rows=False,
        **PICTURES,
    ),
    Case(
        'WandbCallback',
        lambda: [WandbCallback()],
        lambda learn: {'logged': learn.logged},
        fit=fit_with_wandb,
        **PICTURES,
    ),
    Case(
        'AzureMLCallback',
        lambda: [AzureMLCallback(Run())],
        lambda learn: {'logged': learn.azure_ml.azurerun.logged},
    ),
    gan_case('GANTrainer'),
    gan_case('FixedGANSwitcher', gan.FixedGANSwitcher),
    gan_case('AdaptiveGANSwitcher', gan.AdaptiveGANSwitcher),
    gan_case('GANDiscriminativeLR', gan.FixedGANSwitcher, gan.GANDiscriminativeLR),
]


def rows() -> list[Row]:
    "Return a row for each callback of fastai."
    return [compare_case(case) for case in CASES]


if __name__ == '__main__':
    import sys

    for case in CASES:
        if len(sys.argv) < 2 or case.name in sys.argv[1:]:
            print(compare_case(case))
