"""Schedules: hyper-parameters as functions of the progress of a fit."""
from __future__ import annotations

from learnkit.loop import Loop

__all__ = ['Schedules']


class Schedules(Loop):
    "The part of the Learner that trains along a schedule."
