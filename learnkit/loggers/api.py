# SPDX-License-Identifier: Apache-2.0
"""Functions that log images, text and settings to all loggers of a Learner, from callbacks or other code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import list_running
from learnkit.loggers.base import Logger
from learnkit.loggers.values import to_loggable

if TYPE_CHECKING:
    from learnkit.learner import Learner


def log_images(
    learn: Learner,  # the Learner, or one of its callbacks
    name: str,  # name of the images in the log
    images: Any,  # (N, C, H, W), (C, H, W) or (H, W); floats in [0, 1] or bytes; or a list
    captions: Sequence[Any] | None = None,  # text above each image
    grid: bool = True,  # log several images as one picture; False: one by one
) -> None:
    """Log images to all loggers of a Learner, at the current step.

    C is 1, 3 or 4. Several images become one picture, a grid. Captions are drawn into the picture,
    and small images are enlarged for them. `validate()` and `get_preds()` log nothing. Raises
    `OptionError` for other shapes and types and for a wrong number of captions, and
    `MissingExtraError` for captions without Pillow.

    >>> import torch
    >>> from learnkit.testing import synth_learner
    >>> class Shapes(Logger):
    ...     def log_images(self, step, name, images): print(step, name, images.shape)
    >>> learn = synth_learner(cbs=Shapes())
    >>> log_images(learn, 'noise', torch.rand(4, 3, 8, 8))
    0 noise (1, 8, 38, 3)
    >>> log_images(learn, 'noise', torch.rand(4, 3, 8, 8), grid=False)
    0 noise (4, 8, 8, 3)
    """
    for cb in _active_loggers(learn):
        cb.receive_images(name, images, captions, grid)


def log_params(
    learn: Learner,  # the Learner, or one of its callbacks
    params: dict[str, Any],  # settings by name
) -> None:
    "Log settings to all loggers of a Learner, as part of the configuration of this fit and later fits."
    settings = {name: to_loggable(value) for name, value in params.items()}
    for cb in _active_loggers(learn):
        cb.add_settings(settings)


def log_text(
    learn: Learner,  # the Learner, or one of its callbacks
    name: str,  # name of the text in the log
    text: str,
) -> None:
    """Log text to all loggers of a Learner, at the current step.

    >>> from learnkit.testing import synth_learner
    >>> class Texts(Logger):
    ...     def log_text(self, step, name, text): print(step, name, text)
    >>> log_text(synth_learner(cbs=Texts()), 'note', 'before the first step')
    0 note before the first step
    """
    for cb in _active_loggers(learn):
        cb.send_text(name, str(text))


def _active_loggers(learn: Learner) -> list[Logger]:
    "Return the loggers of a Learner, or an empty list in an evaluation or prediction outside of a fit."
    learn = learn.learn if isinstance(learn, Callback) else learn
    # a block `with learn:` fires the events of an evaluation; the code in the block logs
    is_in_block = not learn.run.kind and not list_running(learn)
    if learn.run.depth and not learn.fitting and not is_in_block:
        return []
    return [cb for cb in learn.cbs if isinstance(cb, Logger)]
