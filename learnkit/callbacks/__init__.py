"""Callbacks, one small file a theme."""
from learnkit.callbacks.accumulation import GradientAccumulation
from learnkit.callbacks.ema import EMA
from learnkit.callbacks.hooks import Hook, HookCallback, Hooks, has_params, hook_output, hook_outputs
from learnkit.callbacks.mixup import CutMix, MixHandler, MixUp
from learnkit.callbacks.nonfinite import NonFiniteGuard, TerminateOnNaNCallback
from learnkit.callbacks.preds import CollectDataCallback, FetchPredsCallback, MCDropoutCallback, mc_dropout_preds
from learnkit.callbacks.rnn import ModelResetter, RNNCallback, RNNRegularizer, rnn_cbs
from learnkit.callbacks.sam import SAM
from learnkit.callbacks.stats import ActivationStats
from learnkit.callbacks.summary import (
    Summary,
    dummy_eval,
    model_sizes,
    num_features_model,
    summary,
    total_params,
)
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
from learnkit.lrfind import LRFinder
from learnkit.precision import AMPMode, MixedPrecision
from learnkit.schedule import LRScheduler, ParamScheduler

__all__ = [
    'AMPMode', 'ActivationStats', 'BnFreeze', 'CastToTensor', 'ChannelsLast', 'CollectDataCallback', 'CutMix', 'EMA',
    'EarlyStoppingCallback', 'FetchPredsCallback', 'GradientAccumulation', 'GradientClip', 'GradientValueClip', 'Hook',
    'HookCallback', 'Hooks', 'LRFinder', 'LRScheduler', 'MCDropoutCallback', 'MixHandler', 'MixUp', 'MixedPrecision',
    'ModelResetter', 'NonFiniteGuard', 'ParamScheduler', 'RNNCallback', 'RNNRegularizer', 'ReduceLROnPlateau', 'SAM',
    'SaveModelCallback', 'ShortEpochCallback', 'SkipToEpoch', 'Summary', 'TerminateOnNaNCallback', 'TrackerCallback',
    'before_batch_cb', 'dummy_eval', 'has_params', 'hook_output', 'hook_outputs', 'mc_dropout_preds', 'model_sizes',
    'num_features_model', 'rnn_cbs', 'summary', 'total_params',
]
