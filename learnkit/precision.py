"""Mixed precision: autocast, and the scaler that fp16 needs."""
from __future__ import annotations

from learnkit.loop import Loop

__all__ = ['Precision']


class Precision(Loop):
    "The part of the Learner that chooses the precision of the forward pass."
