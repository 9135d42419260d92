"""A training loop for PyTorch that a person can read, stop, change and trust.

    learn = Learner(DataLoaders(train, valid), model, loss_func, metrics=accuracy, cbs=[MyCallback()])
    learn.fit(5)

Start with `Learner`, `DataLoaders` and `Callback`. `EVENTS` names the moments of the loop at which callbacks run; the
`Cancel...Exception` classes skip what comes next."""
from learnkit.averages import AvgSmoothLoss, Metric
from learnkit.batch import detuplify, find_bs, to_detach, to_device
from learnkit.callback import Callback, Periodic
from learnkit.callbacks import SkipToEpoch, before_batch_cb
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
    ModelError,
    OptimizerError,
    OrderError,
    TimeError,
    UnknownEventError,
)
from learnkit.events import EVENTS, LIFECYCLE, event
from learnkit.learner import Learner, defaults, replacing_yield
from learnkit.loop import TrainEvalCallback
from learnkit.metrics import AvgLoss, AvgMetric, ValueMetric, accuracy, error_rate, mae, mse, rmse
from learnkit.optim import SGD, Adam, OptimWrapper, trainable_params
from learnkit.predict import GatherPredsCallback
from learnkit.progress import ProgressCallback
from learnkit.recorder import History, Recorder
from learnkit.timing import Time, Timestamp

__version__ = '0.1.0'

__all__ = [
    'EVENTS', 'LIFECYCLE', 'SGD', 'Adam', 'AvgLoss', 'AvgMetric', 'AvgSmoothLoss', 'BatchError', 'Callback',
    'CallbackError', 'CancelBackwardException', 'CancelBatchException', 'CancelEpochException', 'CancelError',
    'CancelException', 'CancelFitException', 'CancelStepException', 'CancelTrainException', 'CancelValidException',
    'DataLoaders', 'EmptyLoaderError', 'FitError', 'GatherPredsCallback', 'History', 'Learner', 'LearnkitError',
    'LoaderError', 'LossError', 'Metric', 'MetricError', 'ModelError', 'OptimWrapper', 'OptimizerError',
    'OrderError', 'Periodic', 'ProgressCallback', 'Recorder', 'SkipToEpoch', 'TensorLoader', 'Time', 'TimeError',
    'Timestamp', 'TrainEvalCallback', 'UnknownEventError', 'ValueMetric', 'accuracy', 'before_batch_cb',
    'default_device', 'defaults', 'detuplify', 'error_rate', 'event', 'find_bs', 'mae', 'mse', 'replacing_yield',
    'rmse', 'to_detach', 'to_device', 'trainable_params',
]
