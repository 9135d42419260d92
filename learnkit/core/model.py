"""The model inside of wrappers, the device of a model, and the modes of its modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from learnkit.core.learner_type import LearnerLike

__all__ = [
    'bare_model',
    'wrappers_of',
    'has_weights',
    'model_device',
    'move_to_device',
    'preserved_modes',
    'name_of',
    'unwrap_partial',
]


def bare_model(model: nn.Module) -> nn.Module:
    "Return the model inside of wrappers that prefix parameter names: torch.compile, DataParallel and DDP."
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def wrappers_of(model: nn.Module) -> list[nn.Module]:
    "Return the wrappers around the bare model, outermost first."
    wrappers = []
    while (inner := _inner(model)) is not None:
        wrappers.append(model)
        model = inner
    return wrappers


def _inner(model: nn.Module) -> nn.Module | None:
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return model.module
    return getattr(model, '_orig_mod', None)


def has_weights(o: Any) -> bool:
    "Return True for a module with parameters, and False for a function, such as a loss function."
    return isinstance(o, nn.Module) and next(o.parameters(), None) is not None


def model_device(model: nn.Module, dls: Any) -> torch.device:
    "Return the device of the model's first parameter, or the device of the data for a model without parameters."
    for p in model.parameters():
        return p.device
    return torch.device(getattr(dls, 'device', None) or 'cpu')


def move_to_device(learn: LearnerLike) -> None:
    "Move the model, and a loss function that is a module, to the device of the data, if it has one."
    device = getattr(learn.dls, 'device', None)
    if device is None:
        return
    for module in (learn.model, learn.loss_func):
        if isinstance(module, nn.Module):
            module.to(device)


@contextmanager
def preserved_modes(model: nn.Module) -> Iterator[None]:
    """Restore the training or evaluation mode of each module at the end of a context.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU().eval())
    >>> with preserved_modes(model): _ = model.eval()
    >>> [m.training for m in model.modules()]
    [True, True, False]
    """
    modes = [(m, m.training) for m in model.modules()]
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode


def name_of(f: Any) -> str:
    "Return the name of a function, or the class name of another object."
    return getattr(f, '__name__', None) or type(f).__name__


def unwrap_partial(f: Any) -> Any:
    """Return the function inside of nested `functools.partial` objects.

    >>> unwrap_partial(partial(partial(print, 1), 2))
    <built-in function print>
    """
    while isinstance(f, partial):
        f = f.func
    return f
