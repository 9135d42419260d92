"""Images, texts and settings for all loggers of a Learner, from a callback or from outside."""

from __future__ import annotations

from typing import Any

from learnkit.engine.callback import Callback
from learnkit.loggers.base import Logger
from learnkit.loggers.values import plain

__all__ = ['log_images', 'log_params', 'log_text']


def log_images(
    learn: Any,  # the Learner (or a callback of it)
    name: str,  # what they are called
    images: Any,  # (N, C, H, W), (C, H, W) or (H, W); floats in [0, 1] or bytes; or a list
) -> None:
    """Send images to all loggers of a Learner, at the current step.

    C is 1, 3 or 4. In `validate()` and `get_preds()` nothing is logged. Raises `OptionError` for what is no image.

    >>> import torch
    >>> from learnkit.testing import synth_learner
    >>> class Shapes(Logger):
    ...     def log_images(self, step, name, images): print(step, name, images.shape)
    >>> learn = synth_learner(cbs=Shapes())
    >>> log_images(learn, 'noise', torch.rand(4, 3, 8, 8))
    0 noise (4, 8, 8, 3)
    """
    for cb in _listening(learn):
        cb.send_images(name, images)


def log_params(
    learn: Any,  # the Learner (or a callback of it)
    params: dict[str, Any],  # settings by name
) -> None:
    "Send settings to all loggers of a Learner: they are logged with the configuration, also that of later fits."
    settings = {name: plain(value) for name, value in params.items()}
    for cb in _listening(learn):
        cb._settings |= settings
        if cb._handle is not None and not cb._new_fit:
            cb._log_settings()


def log_text(
    learn: Any,  # the Learner (or a callback of it)
    name: str,  # what it is called
    text: str,
) -> None:
    """Send a text to all loggers of a Learner, at the current step.

    >>> from learnkit.testing import synth_learner
    >>> class Texts(Logger):
    ...     def log_text(self, step, name, text): print(step, name, text)
    >>> log_text(synth_learner(cbs=Texts()), 'note', 'before the first step')
    0 note before the first step
    """
    for cb in _listening(learn):
        cb._send(cb.log_text, name, str(text))


def _listening(learn: Any) -> list[Logger]:
    "Return the loggers of a Learner; none in an evaluation or prediction on its own, which is not logged."
    learn = learn.learn if isinstance(learn, Callback) else learn
    if learn.run.depth and not learn.fitting:
        return []
    return [cb for cb in learn.cbs if isinstance(cb, Logger)]
