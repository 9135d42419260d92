"""Saving and loading weights, and the exchange of trained models."""
from __future__ import annotations

from learnkit.loop import Loop

__all__ = ['Saving']


class Saving(Loop):
    "The part of the Learner that saves and loads."
