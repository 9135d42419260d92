"""Callbacks, one small file a theme."""
from learnkit.callbacks.training import SkipToEpoch, before_batch_cb

__all__ = ['SkipToEpoch', 'before_batch_cb']
