"""The learning rate finder: a short training with a growing rate that leaves nothing behind."""
from __future__ import annotations

from learnkit.loop import Loop

__all__ = ['LRFind']


class LRFind(Loop):
    "The part of the Learner that looks for a learning rate."
