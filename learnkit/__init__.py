"""A training loop for PyTorch that a person can read, stop, change and trust.

    learn = Learner(DataLoaders(train, valid), model, loss_func, metrics=accuracy, cbs=[MyCallback()])
    learn.fit(5)

Start with `Learner`, `DataLoaders` and `Callback`. `EVENTS` names the moments of the loop at which callbacks run; the
`Cancel...Exception` classes skip what comes next. `doc(Learner.fit)` shows what each parameter means."""
from typing import TYPE_CHECKING

from learnkit.averages import AvgSmoothLoss, Metric
from learnkit.batch import detuplify, find_bs, to_detach, to_device
from learnkit.callback import Callback, Periodic
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
    CheckpointError,
    DamagedError,
    DistributedError,
    EmptyLoaderError,
    FitError,
    FolderInUseError,
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
from learnkit.evaluator import Evaluator
from learnkit.events import EVENTS, LIFECYCLE, event
from learnkit.hypers import params
from learnkit.later import later
from learnkit.learner import Learner, defaults, replacing_yield
from learnkit.optim import OptimWrapper, trainable_params
from learnkit.optimizers import SGD, Adam
from learnkit.predict import GatherPredsCallback
from learnkit.progress import ProgressCallback
from learnkit.recorder import History, Recorder
from learnkit.timing import Time, Timestamp
from learnkit.traineval import TrainEvalCallback

if TYPE_CHECKING:  # at run time they are imported when they are first used
    from learnkit.callbacks import (
        EMA,
        SAM,
        ActivationStats,
        BestMetric,
        BnFreeze,
        CastToTensor,
        ChannelsLast,
        Checkpoint,
        CollectDataCallback,
        CutMix,
        EarlyStoppingCallback,
        FetchPredsCallback,
        FixedStopper,
        GradientAccumulation,
        GradientClip,
        GuardNonFinite,
        HookCallback,
        LRFinder,
        LRMonitor,
        LRScheduler,
        MCDropoutCallback,
        MemoryMonitor,
        MixedPrecision,
        MixUp,
        ModelResetter,
        OptimizerMonitor,
        ParamScheduler,
        PeriodicData,
        ReduceLROnPlateau,
        Replay,
        RNNCallback,
        RNNRegularizer,
        RuntimeEstimator,
        SaveModelCallback,
        ShortEpochCallback,
        ShowGraph,
        ShowGraphCallback,
        SkipToEpoch,
        SpeedMonitor,
        SystemMonitor,
        TerminateOnNaNCallback,
        ThresholdStopper,
        TrackerCallback,
        before_batch_cb,
    )
    from learnkit.distributed import DistributedTraining
    from learnkit.exchange import load_learner
    from learnkit.interop import from_composer, from_ksuit
    from learnkit.interpretation import ClassificationInterpretation, Interpretation
    from learnkit.loggers import (
        ConsoleLogger,
        CSVLogger,
        JSONLinesLogger,
        Logger,
        MlflowLogger,
        TensorBoardLogger,
        WandbLogger,
        log_images,
        log_text,
    )
    from learnkit.metric_properties import MetricProperties
    from learnkit.metrics import AvgLoss, AvgMetric, ValueMetric, accuracy, error_rate, mae, mse, rmse
    from learnkit.reference import doc
else:
    __getattr__ = later(__name__, {
        'learnkit.callbacks':
            'EMA SAM ActivationStats BestMetric BnFreeze CastToTensor ChannelsLast Checkpoint CollectDataCallback '
            'CutMix EarlyStoppingCallback FetchPredsCallback FixedStopper GradientAccumulation GradientClip '
            'GuardNonFinite HookCallback LRFinder LRMonitor LRScheduler MCDropoutCallback MemoryMonitor MixedPrecision '
            'MixUp ModelResetter OptimizerMonitor ParamScheduler PeriodicData ReduceLROnPlateau Replay RNNCallback '
            'RNNRegularizer RuntimeEstimator SaveModelCallback ShortEpochCallback ShowGraph ShowGraphCallback '
            'SkipToEpoch SpeedMonitor SystemMonitor TerminateOnNaNCallback ThresholdStopper TrackerCallback '
            'before_batch_cb',
        'learnkit.distributed': 'DistributedTraining',
        'learnkit.exchange': 'load_learner',
        'learnkit.interop': 'from_composer from_ksuit',
        'learnkit.interpretation': 'ClassificationInterpretation Interpretation',
        'learnkit.loggers':
            'ConsoleLogger CSVLogger JSONLinesLogger Logger MlflowLogger TensorBoardLogger WandbLogger '
            'log_images log_text',
        'learnkit.metric_properties': 'MetricProperties',
        'learnkit.metrics': 'AvgLoss AvgMetric ValueMetric accuracy error_rate mae mse rmse',
        'learnkit.reference': 'doc',
    }, globals(), also={  # found too, by those who look for them here
        'learnkit.losses':
            'BCELossFlat BCEWithLogitsLossFlat CrossEntropyLossFlat DiceLoss FocalLoss FocalLossFlat L1LossFlat '
            'LabelSmoothingCrossEntropy LabelSmoothingCrossEntropyFlat MSELossFlat',
        'learnkit.metrics':
            'RMSE APScoreBinary APScoreMulti AccumMetric BalancedAccuracy BrierScore BrierScoreMulti CohenKappa '
            'CorpusBLEUMetric Dice DiceMulti ElementMean ExpRMSPE ExplainedVariance F1Score F1ScoreMulti FBeta '
            'FBetaMulti ForegroundAcc HammingLoss HammingLossMulti Jaccard JaccardCoeff JaccardCoeffMulti '
            'JaccardMulti LossMetric LossMetrics MatthewsCorrCoef MatthewsCorrCoefMulti PearsonCorrCoef Perplexity '
            'Precision PrecisionMulti R2Score Recall RecallMulti RocAuc RocAucBinary RocAucMulti SpearmanCorrCoef '
            'SumMetric TorchMetric accuracy_multi exp_rmspe foreground_acc msle perplexity skm_to_fastai '
            'top_k_accuracy',
        'learnkit.optimizers':
            'Lamb Larc Lookahead MuonAdamW QHAdam RAdam RMSProp ranger',
    })

__version__ = '0.1.0'

__all__ = [
    'ActivationStats', 'Adam', 'AvgLoss', 'AvgMetric', 'AvgSmoothLoss', 'BatchError', 'BestMetric', 'BnFreeze',
    'CSVLogger', 'Callback', 'CallbackError', 'CancelBackwardException', 'CancelBatchException', 'CancelEpochException',
    'CancelError', 'CancelException', 'CancelFitException', 'CancelStepException', 'CancelTrainException',
    'CancelValidException', 'CastToTensor', 'ChannelsLast', 'Checkpoint', 'CheckpointError',
    'ClassificationInterpretation', 'CollectDataCallback', 'ConsoleLogger', 'CutMix', 'DamagedError', 'DataLoaders',
    'DistributedError', 'DistributedTraining',
    'EMA', 'EVENTS', 'EarlyStoppingCallback', 'EmptyLoaderError', 'Evaluator', 'FetchPredsCallback', 'FitError',
    'FixedStopper', 'FolderInUseError', 'GatherPredsCallback', 'GradientAccumulation', 'GradientClip', 'GuardNonFinite',
    'History', 'HookCallback', 'Interpretation', 'JSONLinesLogger', 'LIFECYCLE', 'LRFinder', 'LRMonitor', 'LRScheduler',
    'Learner', 'LearnkitError', 'LoaderError', 'Logger', 'LossError', 'MCDropoutCallback', 'MemoryMonitor', 'Metric',
    'MetricError', 'MetricProperties', 'MissingExtraError', 'MixUp', 'MixedPrecision', 'MlflowLogger', 'ModelError',
    'ModelResetter', 'OptimWrapper', 'OptimizerError', 'OptimizerMonitor', 'OptionError', 'OrderError',
    'ParamScheduler', 'Periodic', 'PeriodicData', 'ProgressCallback', 'RNNCallback', 'RNNRegularizer', 'Recorder',
    'ReduceLROnPlateau', 'Replay', 'RuntimeEstimator', 'SAM', 'SGD', 'SaveModelCallback', 'ScheduleError',
    'ShortEpochCallback', 'ShowGraph', 'ShowGraphCallback', 'SkipToEpoch', 'SpeedMonitor', 'SystemMonitor',
    'TensorBoardLogger', 'TensorLoader', 'TerminateOnNaNCallback', 'ThresholdStopper', 'Time', 'TimeError', 'Timestamp',
    'TrackerCallback', 'TrainEvalCallback', 'UnknownEventError', 'ValueMetric', 'WandbLogger', 'WeightsError',
    'accuracy', 'before_batch_cb', 'default_device', 'defaults', 'detuplify', 'doc', 'error_rate', 'event', 'find_bs',
    'from_composer', 'from_ksuit', 'load_learner', 'log_images', 'log_text', 'mae', 'mse', 'params', 'replacing_yield',
    'rmse', 'to_detach', 'to_device', 'trainable_params',
]
