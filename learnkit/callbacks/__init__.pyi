# SPDX-License-Identifier: Apache-2.0

import learnkit.monitors as _monitors

from .accumulation import (
    GradientAccumulation as GradientAccumulation,
)
from .activation_checkpointing import (
    ActivationCheckpointing as ActivationCheckpointing,
)
from .best_metric import (
    BestMetric as BestMetric,
)
from .checkpoint import (
    Checkpoint as Checkpoint,
)
from .early_stopping import (
    EarlyStopper as EarlyStopper,
    EarlyStopping as EarlyStopping,
    EarlyStoppingCallback as EarlyStoppingCallback,
)
from .ema import (
    EMA as EMA,
)
from .export_for_inference import (
    ExportForInference as ExportForInference,
)
from .hooks import (
    Hook as Hook,
    HookCallback as HookCallback,
    Hooks as Hooks,
    has_params as has_params,
    hook_output as hook_output,
    hook_outputs as hook_outputs,
)
from .live_plot import (
    ShowGraph as ShowGraph,
    ShowGraphCallback as ShowGraphCallback,
)
from .load_weights import (
    LoadWeights as LoadWeights,
)
from .lr_finder import (
    LRFinder as LRFinder,
)
from .mixed_precision import (
    AMPMode as AMPMode,
    MixedPrecision as MixedPrecision,
)
from .mixup import (
    CutMix as CutMix,
    MixHandler as MixHandler,
    MixUp as MixUp,
)
from .model_summary import (
    Summary as Summary,
    dummy_eval as dummy_eval,
    layer_info as layer_info,
    model_sizes as model_sizes,
    num_features_model as num_features_model,
    summary as summary,
    total_params as total_params,
)
from .nan_guard import (
    GuardNonFinite as GuardNonFinite,
    TerminateOnNaNCallback as TerminateOnNaNCallback,
)
from .optuna import (
    OptunaPruning as OptunaPruning,
)
from .predictions import (
    CollectDataCallback as CollectDataCallback,
    FetchPredsCallback as FetchPredsCallback,
    MCDropoutCallback as MCDropoutCallback,
)
from .reduce_lr_on_plateau import (
    ReduceLROnPlateau as ReduceLROnPlateau,
)
from .replay import (
    Replay as Replay,
)
from .rnn import (
    ModelResetter as ModelResetter,
    RNNCallback as RNNCallback,
    RNNRegularizer as RNNRegularizer,
    rnn_cbs as rnn_cbs,
)
from .sam import (
    SAM as SAM,
)
from .save_model import (
    SaveModelCallback as SaveModelCallback,
)
from .schedule import (
    ParamScheduler as ParamScheduler,
)
from .stoppers import (
    FixedStopper as FixedStopper,
    ThresholdStopper as ThresholdStopper,
)
from .torch_scheduler import (
    LRScheduler as LRScheduler,
)
from .tracking import (
    TrackerCallback as TrackerCallback,
)
from .training import (
    BnFreeze as BnFreeze,
    CastToTensor as CastToTensor,
    ChannelsLast as ChannelsLast,
    GradientClip as GradientClip,
    GradientValueClip as GradientValueClip,
    ShortEpochCallback as ShortEpochCallback,
    SkipToEpoch as SkipToEpoch,
    before_batch_cb as before_batch_cb,
)

ActivationMonitor = _monitors.ActivationMonitor
ActivationStats = _monitors.ActivationStats
DatasetStats = _monitors.DatasetStats
ImageVisualizer = _monitors.ImageVisualizer
LRMonitor = _monitors.LRMonitor
MLPerf = _monitors.MLPerf
MemoryMonitor = _monitors.MemoryMonitor
Monitor = _monitors.Monitor
OptimizerMonitor = _monitors.OptimizerMonitor
ParamCount = _monitors.ParamCount
PeriodicData = _monitors.PeriodicData
RuntimeEstimator = _monitors.RuntimeEstimator
SpeedMonitor = _monitors.SpeedMonitor
StepTimeMonitor = _monitors.StepTimeMonitor
SystemMonitor = _monitors.SystemMonitor
TorchProfiler = _monitors.TorchProfiler
