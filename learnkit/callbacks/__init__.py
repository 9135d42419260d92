"""Callbacks, one small file a theme."""
from typing import TYPE_CHECKING

from learnkit.later import later

if TYPE_CHECKING:  # at run time they are imported when they are first used
    from learnkit.callbacks.accumulation import GradientAccumulation
    from learnkit.callbacks.activations import ActivationMonitor
    from learnkit.callbacks.best import BestMetric
    from learnkit.callbacks.checkpoint import Checkpoint
    from learnkit.callbacks.dataset import DatasetStats, ParamCount
    from learnkit.callbacks.ema import EMA
    from learnkit.callbacks.export import ExportForInference, LoadWeights
    from learnkit.callbacks.graph import ShowGraph, ShowGraphCallback
    from learnkit.callbacks.hooks import Hook, HookCallback, Hooks, has_params, hook_output, hook_outputs
    from learnkit.callbacks.memory import MemoryMonitor
    from learnkit.callbacks.mixup import CutMix, MixHandler, MixUp
    from learnkit.callbacks.mlperf import MLPerf
    from learnkit.callbacks.monitor import Monitor
    from learnkit.callbacks.nonfinite import GuardNonFinite, TerminateOnNaNCallback
    from learnkit.callbacks.oom import MemorySnapshot, OOMObserver
    from learnkit.callbacks.optimizer_monitor import LRMonitor, OptimizerMonitor
    from learnkit.callbacks.periodic import PeriodicData
    from learnkit.callbacks.preds import CollectDataCallback, FetchPredsCallback, MCDropoutCallback, mc_dropout_preds
    from learnkit.callbacks.replay import Replay
    from learnkit.callbacks.rnn import ModelResetter, RNNCallback, RNNRegularizer, rnn_cbs
    from learnkit.callbacks.sam import SAM
    from learnkit.callbacks.speed import RuntimeEstimator, SpeedMonitor
    from learnkit.callbacks.stats import ActivationStats
    from learnkit.callbacks.stoppers import EarlyStopper, EarlyStopping, FixedStopper, ThresholdStopper
    from learnkit.callbacks.summaries import (
        Summary,
        dummy_eval,
        model_sizes,
        num_features_model,
        summary,
        total_params,
    )
    from learnkit.callbacks.system import SystemMonitor
    from learnkit.callbacks.tracker import (
        EarlyStoppingCallback,
        ReduceLROnPlateau,
        SaveModelCallback,
        TrackerCallback,
    )
    from learnkit.callbacks.training import (
        BnFreeze,
        CastToTensor,
        ChannelsLast,
        GradientClip,
        GradientValueClip,
        ShortEpochCallback,
        SkipToEpoch,
        before_batch_cb,
    )
    from learnkit.callbacks.visualize import ImageVisualizer
    from learnkit.lrfind import LRFinder
    from learnkit.precision import AMPMode, MixedPrecision
    from learnkit.schedule import LRScheduler, ParamScheduler
else:
    __getattr__ = later(__name__, {
        'learnkit.callbacks.accumulation': 'GradientAccumulation',
        'learnkit.callbacks.activations': 'ActivationMonitor',
        'learnkit.callbacks.best': 'BestMetric',
        'learnkit.callbacks.checkpoint': 'Checkpoint',
        'learnkit.callbacks.dataset': 'DatasetStats ParamCount',
        'learnkit.callbacks.ema': 'EMA',
        'learnkit.callbacks.export': 'ExportForInference LoadWeights',
        'learnkit.callbacks.graph': 'ShowGraph ShowGraphCallback',
        'learnkit.callbacks.hooks': 'Hook HookCallback Hooks has_params hook_output hook_outputs',
        'learnkit.callbacks.memory': 'MemoryMonitor',
        'learnkit.callbacks.mixup': 'CutMix MixHandler MixUp',
        'learnkit.callbacks.mlperf': 'MLPerf',
        'learnkit.callbacks.monitor': 'Monitor',
        'learnkit.callbacks.nonfinite': 'GuardNonFinite TerminateOnNaNCallback',
        'learnkit.callbacks.oom': 'MemorySnapshot OOMObserver',
        'learnkit.callbacks.optimizer_monitor': 'LRMonitor OptimizerMonitor',
        'learnkit.callbacks.periodic': 'PeriodicData',
        'learnkit.callbacks.preds': 'CollectDataCallback FetchPredsCallback MCDropoutCallback mc_dropout_preds',
        'learnkit.callbacks.replay': 'Replay',
        'learnkit.callbacks.rnn': 'ModelResetter RNNCallback RNNRegularizer rnn_cbs',
        'learnkit.callbacks.sam': 'SAM',
        'learnkit.callbacks.speed': 'RuntimeEstimator SpeedMonitor',
        'learnkit.callbacks.stats': 'ActivationStats',
        'learnkit.callbacks.stoppers': 'EarlyStopper EarlyStopping FixedStopper ThresholdStopper',
        'learnkit.callbacks.summaries': 'Summary dummy_eval model_sizes num_features_model summary total_params',
        'learnkit.callbacks.system': 'SystemMonitor',
        'learnkit.callbacks.tracker': 'EarlyStoppingCallback ReduceLROnPlateau SaveModelCallback TrackerCallback',
        'learnkit.callbacks.training':
            'BnFreeze CastToTensor ChannelsLast GradientClip GradientValueClip ShortEpochCallback SkipToEpoch '
            'before_batch_cb',
        'learnkit.callbacks.visualize': 'ImageVisualizer',
        'learnkit.lrfind': 'LRFinder',
        'learnkit.precision': 'AMPMode MixedPrecision',
        'learnkit.schedule': 'LRScheduler ParamScheduler',
    }, globals())

__all__ = [
    'AMPMode', 'ActivationMonitor', 'ActivationStats', 'BestMetric', 'BnFreeze', 'CastToTensor', 'ChannelsLast',
    'Checkpoint', 'CollectDataCallback', 'CutMix', 'DatasetStats', 'EMA', 'EarlyStopper', 'EarlyStopping',
    'EarlyStoppingCallback', 'ExportForInference', 'FetchPredsCallback', 'FixedStopper', 'GradientAccumulation',
    'GradientClip', 'GradientValueClip', 'GuardNonFinite', 'Hook', 'HookCallback', 'Hooks', 'ImageVisualizer',
    'LRFinder', 'LRMonitor', 'LRScheduler', 'LoadWeights', 'MCDropoutCallback', 'MLPerf', 'MemoryMonitor',
    'MemorySnapshot', 'MixHandler', 'MixUp', 'MixedPrecision', 'ModelResetter', 'Monitor', 'OOMObserver',
    'OptimizerMonitor', 'ParamCount', 'ParamScheduler', 'PeriodicData', 'RNNCallback', 'RNNRegularizer',
    'ReduceLROnPlateau', 'Replay', 'RuntimeEstimator', 'SAM', 'SaveModelCallback', 'ShortEpochCallback', 'ShowGraph',
    'ShowGraphCallback', 'SkipToEpoch', 'SpeedMonitor', 'Summary', 'SystemMonitor', 'TerminateOnNaNCallback',
    'ThresholdStopper', 'TrackerCallback', 'before_batch_cb', 'dummy_eval', 'has_params', 'hook_output', 'hook_outputs',
    'mc_dropout_preds', 'model_sizes', 'num_features_model', 'rnn_cbs', 'summary', 'total_params',
]
