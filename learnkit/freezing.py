"""Freezing: which param groups are trained."""
from __future__ import annotations

from learnkit.loop import Loop

__all__ = ['Freezing']


class Freezing(Loop):
    "The part of the Learner that freezes param groups."
