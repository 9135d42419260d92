"""What the bench of fastai trains: each callback that fastai ships, and what is done with a Learner."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.peers import fastai_data as data

# isort: split
import fastai.learner as fastai_learner
import fastcore.basics
from fastai.callback import all as cb, mixup
from fastai.callback.core import Callback
from fastai.callback.fp16 import ModelToHalf
from fastai.callback.hook import layer_info
from fastai.callback.preds import MCDropoutCallback
from fastai.callback.tensorboard import TensorBoardCallback, TensorBoardProjectorCallback
from fastai.callback.wandb import WandbCallback
from fastai.distributed import ParallelTrainer
from fastai.losses import MSELossFlat
from fastai.metrics import CohenKappa, F1Score, LossMetrics, Perplexity, accuracy
from fastai.test_utils import VerboseCallback
from fastai.vision import gan

Observe = Callable[[Any], Mapping[str, Any]]


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
    # the part of the table
    part: str = 'Callbacks'
    # whether the recorder's rows, rates and losses are compared
    rows: bool = True
    # momentum of both optimizers
    mom: float = 0.9
    # a class of torch, instead of SGD
    optimizer: Any = None
    why: str = ''


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
from fastai.callback.azureml import AzureMLCallback  # noqa: E402  # after its client


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
    Case('Recorder', lambda: [fastai_learner.Recorder(train_metrics=True)]),
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
    Case('LRFinder', lambda: [], fit=lambda learn: learn.fit(3, cbs=cb.LRFinder(num_it=12))),
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

NOT_RUN = {
    'NonNativeMixedPrecision': 'needs a GPU',
    'DistributedTrainer': 'needs several processes with a GPU each; learnkit has `learn.distributed()`',
    'CometCallback': 'fails in fastai 2.8.12: its constructor reads a name that is not defined',
}


# -- the Learner's methods, as fastai's code calls them --------------------------------------------


def learner_case(name: str, use: Callable[[Any], Mapping[str, Any]], **options: Any) -> Case:
    "Return a case that trains an epoch, calls `use` and compares what it returns."

    def fit(learn: Any) -> None:
        learn.fit(1, 0.1)
        learn.used = use(learn)

    options = {'part': "The Learner in fastai's code", 'rows': False, **options}
    return Case(name, lambda: [], lambda learn: learn.used, fit, **options)


def load_again(learn: Any) -> dict[str, Any]:
    "Load weights as `SaveModelCallback` does, and without an optimizer."
    learn.save('again', with_opt=False)
    learn.opt = None
    same = learn.load('again', with_opt=False, weights_only=False) is learn
    return {'same': same, 'lrs': [float(h['lr']) for h in learn.opt.hypers]}


def detach(learn: Any) -> dict[str, Any]:
    x = torch.ones(2, requires_grad=True)
    return {'x': learn.to_detach([2 * x], gather=False)[0].requires_grad}


def describe_layers(learn: Any) -> dict[str, Any]:
    "Call fastai's `layer_info`, and the one of the Learner's package."
    x = learn.dls.one_batch()[0]
    package = sys.modules[type(learn).__module__.partition('.')[0]]
    own = package.callbacks.layer_info if package.__name__ == 'learnkit' else layer_info
    return {'fastai': layer_info(learn, x), 'own': own(learn, x)}


class Trace(Callback):
    "A callback whose name is one of the attributes of learnkit's Learner."

    def before_epoch(self) -> None:
        self.epochs = self.epoch + 1


def measure(learn: Any) -> dict[str, Any]:
    "Validate with fastai's metric objects."
    learn.metrics = [F1Score(average='macro'), CohenKappa(), accuracy, Perplexity()]
    return {'values': [float(value) for value in learn.validate()]}


def predict_rows(learn: Any) -> dict[str, Any]:
    options = {'with_input': True, 'with_loss': True, 'with_decoded': True, 'pickle_protocol': 2}
    return {'valid': learn.get_preds(**options), 'train': learn.get_preds(ds_idx=0)}


CASES += [
    learner_case('learn.load(weights_only=)', load_again),
    learner_case('learn.to_detach(gather=)', detach),
    learner_case('learn.get_preds(pickle_protocol=)', predict_rows),
    learner_case('layer_info(learn, x)', describe_layers),
    learner_case('metrics=[F1Score(), ...] of fastai', measure),
    Case(
        'nn.LSTM',
        lambda: [],
        loaders=data.series,
        model=data.LongMemory,
        options=series_options,
        part="The Learner in fastai's code",
    ),
    Case(
        'nn.LSTM with wd=0.1',
        lambda: [],
        loaders=data.series,
        model=data.LongMemory,
        options=lambda model: {**series_options(model), 'wd': 0.1},
        part="The Learner in fastai's code",
        rows=False,
        why='fastai decays the biases of recurrent layers, learnkit no bias: 0.0283 apart after two epochs',
    ),
    Case(
        'nn.PReLU with wd=0.1',
        lambda: [],
        model=data.sloped,
        options=lambda model: {'wd': 0.1},
        part="The Learner in fastai's code",
        rows=False,
        why='fastai decays slopes and scales, learnkit no parameter of at most one dimension',
    ),
    Case(
        'a language model of LSTMs with a state, ModelResetter and RNNRegularizer',
        lambda: [cb.ModelResetter(), cb.RNNCallback(), cb.RNNRegularizer(alpha=2, beta=1)],
        loaders=data.words,
        model=data.LanguageModel,
        fit=lambda learn: learn.fit(2, 1e-2),
        part="The Learner in fastai's code",
    ),
    Case(
        'WGAN: RMSProp, five steps of the critic',
        lambda: [
            gan.GANTrainer(clip=0.01, switch_eval=False),
            gan.FixedGANSwitcher(n_crit=5, n_gen=1),
        ],
        lambda learn: {'critic': learn.gan_trainer.crit_losses},
        loaders=data.noise,
        model=gan_model,
        options=gan_options,
        optimizer=torch.optim.RMSprop,
        fit=lambda learn: learn.fit(2, 2e-4),
        part="The Learner in fastai's code",
    ),
    Case(
        'class Trace(Callback)',
        lambda: [Trace()],
        lambda learn: {'epochs': learn.cbs[-1].epochs},
        part="The Learner in fastai's code",
        why='`learn.trace` stays the method of the Learner, with a warning; `learn.cbs` has the callback',
    ),
]
