"""What a model is made of: sizes of its layers, and a table of them."""
from __future__ import annotations

from learnkit.loop import Loop

__all__ = ['Summaries']


class Summaries(Loop):
    "The part of the Learner that describes its model."
