"""Every callback class of the package, how to construct each, and a Learner to train with it."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import learnkit
from learnkit import Callback, DataLoaders, Learner, Periodic
from learnkit.callbacks import LRFinder, LRScheduler, MLPerf, ParamScheduler, TorchProfiler
from learnkit.callbacks.activation_checkpointing import ActivationCheckpointing
from learnkit.callbacks.load_weights import LoadWeights
from learnkit.callbacks.optuna import OptunaPruning
from learnkit.callbacks.progress import ProgressCallback
from learnkit.callbacks.recorder import Recorder
from learnkit.callbacks.schedule import SchedCos
from learnkit.callbacks.stoppers import FixedStopper, ThresholdStopper
from learnkit.core.optional import import_library
from learnkit.debug.moment import MeasureSamples, StopBefore
from learnkit.debug.samples import LayerNorms
from learnkit.distributed.callback import GradientMean
from learnkit.engine.callback import IntervalCallback
from learnkit.engine.train_eval import SkipToEpoch, TrainEvalCallback
from learnkit.inference.gather import BatchCollector, PredictionSink
from learnkit.interop.common.adapter import CallbackAdapter

DEFAULTS = (TrainEvalCallback, Recorder, ProgressCallback)  # those that every Learner has


def classes() -> list[type[Callback]]:
    "Return every public subclass of `Callback` in the package."
    for module in pkgutil.walk_packages(learnkit.__path__, 'learnkit.'):
        importlib.import_module(module.name)

    def below(cls: type) -> Iterator[type]:
        for sub in cls.__subclasses__():
            yield from (sub, *below(sub))

    found = {
        c
        for c in below(Callback)
        if c.__module__.startswith('learnkit.') and not c.__name__.startswith('_')
    } - {
        BatchCollector,
        CallbackAdapter,
        GradientMean,
        LayerNorms,
        PredictionSink,
        StopBefore,
        MeasureSamples,
    }  # parts of `get_preds`, `DistributedTraining` and `rewind`, and a base that holds nothing
    return sorted(found, key=lambda c: c.__name__)


@cache
def shared_folder() -> TemporaryDirectory[str]:
    "Return a folder that is deleted when this process ends."
    return TemporaryDirectory()


@cache
def weights() -> Path:
    "Return a file of weights for `Net`."
    path = Path(shared_folder().name) / 'net.pth'
    torch.save(Net(returns_activations=False).state_dict(), path)
    return path


def needing_arguments() -> dict[type[Callback], Callable[[], Callback]]:
    "Return functions that create callbacks with required arguments."
    step_lr = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    return {
        IntervalCallback: lambda: IntervalCallback('1ba', 'ba'),
        Periodic: lambda: Periodic(every='1ba', on_every=lambda cb: None),
        SkipToEpoch: lambda: SkipToEpoch(1),
        ParamScheduler: lambda: ParamScheduler({'lr': SchedCos(0.1, 0.0)}),
        FixedStopper: lambda: FixedStopper('1000ep'),
        LoadWeights: lambda: LoadWeights(weights()),
        ThresholdStopper: lambda: ThresholdStopper('valid_loss', 0.0),
        ActivationCheckpointing: lambda: ActivationCheckpointing(nn.Linear),
        LRScheduler: lambda: LRScheduler(step_lr),
        OptunaPruning: lambda: OptunaPruning(_fixed_trial()),
    }


def _fixed_trial() -> Any:
    "Return a trial without a study."
    return import_library('optuna', 'OptunaPruning').trial.FixedTrial({})


CLASSES = classes()


MADE_BY = needing_arguments()


class Net(nn.Module):
    "A model with what callbacks look for: convolution, batch norm, dropout, a hidden state to reset."

    def __init__(self, returns_activations: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(4 * 36, 3)
        self.returns_activations = returns_activations
        self.register_buffer('resets', torch.tensor(0))

    def reset(self) -> None:
        self.resets += 1

    def forward(self, x: Tensor) -> Any:
        "Return scores [B, 3], with raw and dropped-out activations like fastai's recurrent models if requested."
        raw = self.norm(self.conv(x)).relu()
        dropped = self.drop(raw)
        out = self.head(dropped.flatten(1))
        return (out, [raw.flatten(2)], [dropped.flatten(2)]) if self.returns_activations else out


# options with which there is something to remember at every place; all that count in batches do so every second one
OPTIONS: dict[str, dict[str, Any]] = {
    'ActivationStats': {'with_hist': True},
    'BestMetric': {'targets': 'valid_*'},
    'Budget': {'total': '7ba'},
    'Checkpoint': {'background': False},
    'EMA': {'every': 2, 'start': '3ba'},
    'FixedStopper': {'at': '7ba'},
    'GradientAccumulation': {'n_acc': 30},
    'HookCallback': {'every': '3ba'},
    'LRMonitor': {'every': '2ba', 'mom': True},
    'PeriodicData': {'every': '3ba'},
    'RNNRegularizer': {'alpha': 1.0, 'beta': 1.0},
    'SaveModelCallback': {'with_opt': True},
    'ShortEpochCallback': {'pct': 0.5},
    'TensorBoardLogger': {'folder': 'events', 'every': '2ba'},
    'ThresholdStopper': {'monitor': 'valid_loss', 'threshold': 0.0},
}


# the first undoes what it has trained, the others record a resumed fit anew
RESUMED = [c for c in CLASSES if c not in (LRFinder, MLPerf, TorchProfiler)]


def make_to_resume(cls: type[Callback]) -> Callback:
    if cls.__name__ in OPTIONS:
        return cls(**OPTIONS[cls.__name__])
    if cls in MADE_BY:
        return MADE_BY[cls]()
    every = inspect.signature(cls).parameters.get('every')
    return cls(
        **({'every': '2ba'} if every is not None and str(every.default).endswith('ba') else {})
    )


def learner(path: Path, *cbs: Any, rnn: bool = False, **kwargs: Any) -> Learner:
    "Return a Learner of 4 training and 2 validation batches."
    torch.manual_seed(0)
    x, y = torch.randn(64, 1, 6, 6), torch.randint(3, (64,))
    dls = DataLoaders.from_tensors((x[:48], y[:48]), (x[48:], y[48:]), bs=12)
    model = Net(rnn)
    return Learner(dls, model, nn.CrossEntropyLoss(), lr=0.01, path=path, cbs=list(cbs), **kwargs)
