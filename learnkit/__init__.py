"""A training loop for PyTorch that a person can read, stop, change and trust.

    learn = Learner(DataLoaders(train, valid), model, loss_func, metrics=accuracy, cbs=[MyCallback()])
    learn.fit(5)

Start with `Learner`, `DataLoaders` and `Callback`. `EVENTS` names the moments of the loop at which callbacks run; the
`Cancel...Exception` classes skip what comes next."""
from learnkit.averages import AvgSmoothLoss, Metric
from learnkit.batch import detuplify, find_bs, to_detach, to_device
from learnkit.callback import Callback, Periodic
from learnkit.callbacks import (
    EMA,
    SAM,
    ActivationStats,
    BnFreeze,
    CastToTensor,
    ChannelsLast,
    CollectDataCallback,
    CutMix,
    EarlyStoppingCallback,
    FetchPredsCallback,
    GradientAccumulation,
    GradientClip,
    HookCallback,
    LRFinder,
    LRScheduler,
    MCDropoutCallback,
    MixedPrecision,
    MixUp,
    ModelResetter,
    NonFiniteGuard,
    ParamScheduler,
    ReduceLROnPlateau,
    RNNCallback,
    RNNRegularizer,
    SaveModelCallback,
    ShortEpochCallback,
    SkipToEpoch,
    TerminateOnNaNCallback,
    TrackerCallback,
    before_batch_cb,
)
from learnkit.data import DataLoaders, TensorLoader, default_device
from learnkit.errors import (
    BatchError,
    CallbackError,
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelError,
    CancelException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
    EmptyLoaderError,
    FitError,
    LearnkitError,
    LoaderError,
    LossError,
    MetricError,
    MissingExtraError,
    ModelError,
    OptimizerError,
    OptionError,
    OrderError,
    ScheduleError,
    TimeError,
    UnknownEventError,
    WeightsError,
)
from learnkit.events import EVENTS, LIFECYCLE, event
from learnkit.exchange import load_learner
from learnkit.hypers import params
from learnkit.learner import Learner, defaults, replacing_yield
from learnkit.loop import TrainEvalCallback
from learnkit.metrics import AvgLoss, AvgMetric, ValueMetric, accuracy, error_rate, mae, mse, rmse
from learnkit.optim import OptimWrapper, trainable_params
from learnkit.optimizers import SGD, Adam
from learnkit.predict import GatherPredsCallback
from learnkit.progress import ProgressCallback
from learnkit.recorder import History, Recorder
from learnkit.timing import Time, Timestamp

__version__ = '0.1.0'

__all__ = [
    'ActivationStats', 'Adam', 'AvgLoss', 'AvgMetric', 'AvgSmoothLoss', 'BatchError', 'BnFreeze', 'Callback',
    'CallbackError', 'CancelBackwardException', 'CancelBatchException', 'CancelEpochException', 'CancelError',
    'CancelException', 'CancelFitException', 'CancelStepException', 'CancelTrainException', 'CancelValidException',
    'CastToTensor', 'ChannelsLast', 'CollectDataCallback', 'CutMix', 'DataLoaders', 'EMA', 'EVENTS',
    'EarlyStoppingCallback', 'EmptyLoaderError', 'FetchPredsCallback', 'FitError', 'GatherPredsCallback',
    'GradientAccumulation', 'GradientClip', 'History', 'HookCallback', 'LIFECYCLE', 'LRFinder', 'LRScheduler',
    'Learner', 'LearnkitError', 'LoaderError', 'LossError', 'MCDropoutCallback', 'Metric', 'MetricError',
    'MissingExtraError', 'MixUp', 'MixedPrecision', 'ModelError', 'ModelResetter', 'NonFiniteGuard', 'OptimWrapper',
    'OptimizerError', 'OptionError', 'OrderError', 'ParamScheduler', 'Periodic', 'ProgressCallback', 'RNNCallback',
    'RNNRegularizer', 'Recorder', 'ReduceLROnPlateau', 'SAM', 'SGD', 'SaveModelCallback', 'ScheduleError',
    'ShortEpochCallback', 'SkipToEpoch', 'TensorLoader', 'TerminateOnNaNCallback', 'Time', 'TimeError', 'Timestamp',
    'TrackerCallback', 'TrainEvalCallback', 'UnknownEventError', 'ValueMetric', 'WeightsError', 'accuracy',
    'before_batch_cb', 'default_device', 'defaults', 'detuplify', 'error_rate', 'event', 'find_bs', 'load_learner',
    'mae', 'mse', 'params', 'replacing_yield', 'rmse', 'to_detach', 'to_device', 'trainable_params',
]
