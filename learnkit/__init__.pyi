# SPDX-License-Identifier: Apache-2.0

from .callbacks.accumulation import (
    GradientAccumulation as GradientAccumulation,
)
from .callbacks.best_metric import (
    BestMetric as BestMetric,
)
from .callbacks.checkpoint import (
    Checkpoint as Checkpoint,
)
from .callbacks.early_stopping import (
    EarlyStoppingCallback as EarlyStoppingCallback,
)
from .callbacks.ema import (
    EMA as EMA,
)
from .callbacks.history import (
    History as History,
)
from .callbacks.hooks import (
    HookCallback as HookCallback,
)
from .callbacks.live_plot import (
    ShowGraph as ShowGraph,
    ShowGraphCallback as ShowGraphCallback,
)
from .callbacks.lr_finder import (
    LRFinder as LRFinder,
)
from .callbacks.mixed_precision import (
    MixedPrecision as MixedPrecision,
)
from .callbacks.mixup import (
    CutMix as CutMix,
    MixUp as MixUp,
)
from .callbacks.nan_guard import (
    GuardNonFinite as GuardNonFinite,
    TerminateOnNaNCallback as TerminateOnNaNCallback,
)
from .callbacks.predictions import (
    CollectDataCallback as CollectDataCallback,
    FetchPredsCallback as FetchPredsCallback,
    MCDropoutCallback as MCDropoutCallback,
)
from .callbacks.progress import (
    ProgressCallback as ProgressCallback,
)
from .callbacks.recorder import (
    Recorder as Recorder,
)
from .callbacks.reduce_lr_on_plateau import (
    ReduceLROnPlateau as ReduceLROnPlateau,
)
from .callbacks.replay import (
    Replay as Replay,
)
from .callbacks.rnn import (
    ModelResetter as ModelResetter,
    RNNCallback as RNNCallback,
    RNNRegularizer as RNNRegularizer,
)
from .callbacks.sam import (
    SAM as SAM,
)
from .callbacks.save_model import (
    SaveModelCallback as SaveModelCallback,
)
from .callbacks.schedule import (
    ParamScheduler as ParamScheduler,
)
from .callbacks.stoppers import (
    FixedStopper as FixedStopper,
    ThresholdStopper as ThresholdStopper,
)
from .callbacks.torch_scheduler import (
    LRScheduler as LRScheduler,
)
from .callbacks.tracking import (
    TrackerCallback as TrackerCallback,
)
from .callbacks.training import (
    BnFreeze as BnFreeze,
    CastToTensor as CastToTensor,
    ChannelsLast as ChannelsLast,
    GradientClip as GradientClip,
    ShortEpochCallback as ShortEpochCallback,
    before_batch_cb as before_batch_cb,
)
from .core.batch import (
    detuplify as detuplify,
    find_bs as find_bs,
    to_detach as to_detach,
    to_device as to_device,
)
from .core.contexts import (
    replacing_yield as replacing_yield,
)
from .core.errors import (
    BatchError as BatchError,
    CallbackError as CallbackError,
    CancelBackwardException as CancelBackwardException,
    CancelBatchException as CancelBatchException,
    CancelEpochException as CancelEpochException,
    CancelError as CancelError,
    CancelException as CancelException,
    CancelFitException as CancelFitException,
    CancelStepException as CancelStepException,
    CancelTrainException as CancelTrainException,
    CancelValidException as CancelValidException,
    CheckpointError as CheckpointError,
    DamagedError as DamagedError,
    DistributedError as DistributedError,
    EmptyLoaderError as EmptyLoaderError,
    FitError as FitError,
    FolderInUseError as FolderInUseError,
    LearnkitError as LearnkitError,
    LoaderError as LoaderError,
    LossError as LossError,
    MetricError as MetricError,
    MissingExtraError as MissingExtraError,
    ModelError as ModelError,
    OptimizerError as OptimizerError,
    OptionError as OptionError,
    OrderError as OrderError,
    ScheduleError as ScheduleError,
    TimeError as TimeError,
    UnknownEventError as UnknownEventError,
    WeightsError as WeightsError,
)
from .core.time import (
    Time as Time,
    Timestamp as Timestamp,
)
from .data.combined import (
    CombinedLoader as CombinedLoader,
)
from .data.dataloaders import (
    DataLoaders as DataLoaders,
    TensorLoader as TensorLoader,
    default_device as default_device,
)
from .data.evaluator import (
    Evaluator as Evaluator,
)
from .debug.difference import (
    first_difference as first_difference,
)
from .debug.doc import (
    doc as doc,
)
from .distributed.callback import (
    DistributedTraining as DistributedTraining,
)
from .engine.callback import (
    Callback as Callback,
    Periodic as Periodic,
)
from .engine.events import (
    EVENTS as EVENTS,
    LIFECYCLE as LIFECYCLE,
    event as event,
)
from .engine.train_eval import (
    SkipToEpoch as SkipToEpoch,
    TrainEvalCallback as TrainEvalCallback,
)
from .inference.gather import (
    GatherPredsCallback as GatherPredsCallback,
)
from .inference.interpretation import (
    ClassificationInterpretation as ClassificationInterpretation,
    Interpretation as Interpretation,
)
from .interop.composer import (
    from_composer as from_composer,
)
from .interop.ksuit import (
    from_ksuit as from_ksuit,
)
from .learner import (
    Learner as Learner,
    defaults as defaults,
    load_learner as load_learner,
)
from .loggers.api import (
    log_images as log_images,
    log_text as log_text,
)
from .loggers.base import (
    Logger as Logger,
)
from .loggers.console import (
    ConsoleLogger as ConsoleLogger,
)
from .loggers.files import (
    CSVLogger as CSVLogger,
    JSONLinesLogger as JSONLinesLogger,
)
from .loggers.mlflow import (
    MlflowLogger as MlflowLogger,
)
from .loggers.tensorboard import (
    TensorBoardLogger as TensorBoardLogger,
)
from .loggers.wandb import (
    WandbLogger as WandbLogger,
)
from .losses import (
    BCELossFlat as BCELossFlat,
    BCEWithLogitsLossFlat as BCEWithLogitsLossFlat,
    CrossEntropyLossFlat as CrossEntropyLossFlat,
    DiceLoss as DiceLoss,
    FocalLoss as FocalLoss,
    FocalLossFlat as FocalLossFlat,
    L1LossFlat as L1LossFlat,
    LabelSmoothingCrossEntropy as LabelSmoothingCrossEntropy,
    LabelSmoothingCrossEntropyFlat as LabelSmoothingCrossEntropyFlat,
    MSELossFlat as MSELossFlat,
)
from .metrics import (
    RMSE as RMSE,
    AccumMetric as AccumMetric,
    APScoreBinary as APScoreBinary,
    APScoreMulti as APScoreMulti,
    AvgLoss as AvgLoss,
    AvgMetric as AvgMetric,
    AvgSmoothLoss as AvgSmoothLoss,
    BalancedAccuracy as BalancedAccuracy,
    BrierScore as BrierScore,
    BrierScoreMulti as BrierScoreMulti,
    CohenKappa as CohenKappa,
    CorpusBLEUMetric as CorpusBLEUMetric,
    Dice as Dice,
    DiceMulti as DiceMulti,
    ElementMean as ElementMean,
    ExplainedVariance as ExplainedVariance,
    ExpRMSPE as ExpRMSPE,
    F1Score as F1Score,
    F1ScoreMulti as F1ScoreMulti,
    FBeta as FBeta,
    FBetaMulti as FBetaMulti,
    ForegroundAcc as ForegroundAcc,
    HammingLoss as HammingLoss,
    HammingLossMulti as HammingLossMulti,
    Jaccard as Jaccard,
    JaccardCoeff as JaccardCoeff,
    JaccardCoeffMulti as JaccardCoeffMulti,
    JaccardMulti as JaccardMulti,
    LossMetric as LossMetric,
    LossMetrics as LossMetrics,
    MatthewsCorrCoef as MatthewsCorrCoef,
    MatthewsCorrCoefMulti as MatthewsCorrCoefMulti,
    Metric as Metric,
    PearsonCorrCoef as PearsonCorrCoef,
    Perplexity as Perplexity,
    Precision as Precision,
    PrecisionMulti as PrecisionMulti,
    R2Score as R2Score,
    Recall as Recall,
    RecallMulti as RecallMulti,
    RocAuc as RocAuc,
    RocAucBinary as RocAucBinary,
    RocAucMulti as RocAucMulti,
    SpearmanCorrCoef as SpearmanCorrCoef,
    SumMetric as SumMetric,
    TorchMetric as TorchMetric,
    ValueMetric as ValueMetric,
    accuracy as accuracy,
    accuracy_multi as accuracy_multi,
    error_rate as error_rate,
    exp_rmspe as exp_rmspe,
    foreground_acc as foreground_acc,
    mae as mae,
    mse as mse,
    msle as msle,
    perplexity as perplexity,
    rmse as rmse,
    skm_to_fastai as skm_to_fastai,
    top_k_accuracy as top_k_accuracy,
)
from .metrics.direction import (
    MetricProperties as MetricProperties,
)
from .monitors.activation_stats import (
    ActivationStats as ActivationStats,
)
from .monitors.memory import (
    MemoryMonitor as MemoryMonitor,
)
from .monitors.optimizer_monitor import (
    LRMonitor as LRMonitor,
    OptimizerMonitor as OptimizerMonitor,
)
from .monitors.periodic import (
    PeriodicData as PeriodicData,
)
from .monitors.profiler import (
    TorchProfiler as TorchProfiler,
)
from .monitors.speed import (
    RuntimeEstimator as RuntimeEstimator,
    SpeedMonitor as SpeedMonitor,
)
from .monitors.step_time import (
    StepTimeMonitor as StepTimeMonitor,
)
from .monitors.system_monitor import (
    SystemMonitor as SystemMonitor,
)
from .optim import (
    SGD as SGD,
    Adam as Adam,
    Annealer as Annealer,
    Lamb as Lamb,
    Lookahead as Lookahead,
    MuonAdamW as MuonAdamW,
    OptimWrapper as OptimWrapper,
    QHAdam as QHAdam,
    RAdam as RAdam,
    RMSProp as RMSProp,
    SchedCos as SchedCos,
    SchedExp as SchedExp,
    SchedLin as SchedLin,
    SchedNo as SchedNo,
    SchedPoly as SchedPoly,
    annealer as annealer,
    combine_scheds as combine_scheds,
    combined_cos as combined_cos,
    norm_bias_params as norm_bias_params,
    params as params,
    ranger as ranger,
    trainable_params as trainable_params,
)
