# SPDX-License-Identifier: Apache-2.0
"""Convert values for loggers: numbers from devices, rows for checkpoints, the configuration of a Learner, images."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from learnkit.core.errors import OptionError
from learnkit.core.model import name_of, unwrap_partial
from learnkit.core.optional import import_library
from learnkit.core.plain import as_atom
from learnkit.core.time import Time
from learnkit.engine.callback import defined_on_class
from learnkit.metrics.base import Mean, widen

if TYPE_CHECKING:
    from learnkit.learner import Learner

PLAIN = (bool, int, float, str, type(None))


def fetch(
    rows: list[dict[str, Any]],  # numbers, tensors with one element and `Mean`s, by name
) -> list[dict[str, Any]]:
    """Return the rows as Python numbers, with one transfer per device.

    A `Mean` without values is left out.

    >>> fetch([{'loss': torch.tensor([0.5]), 'lr': 0.1}])
    [{'loss': 0.5, 'lr': 0.1}]
    """
    parts = [part for row in rows for value in row.values() for part in _split_mean(value)]
    tensors = [part.detach().reshape(()) for part in parts if isinstance(part, Tensor)]
    device = next((t.device for t in tensors if not t.is_cpu), None)
    values = torch.stack([widen(t.to(device)) for t in tensors]).tolist() if tensors else []
    waiting = iter(values)

    def read_mean(value: Any) -> float | None:
        total, count = (
            next(waiting) if isinstance(part, Tensor) else part for part in _split_mean(value)
        )
        if not isinstance(value, Mean):
            return total
        return total / count if count else None

    means = [{name: read_mean(value) for name, value in row.items()} for row in rows]
    return [{name: v for name, v in row.items() if v is not None} for row in means]


def encode_rows(
    rows: list[tuple[int, dict[str, Any]]],  # number of batches, and logged values by name
) -> list[tuple[int, dict[str, Any]]]:
    "Return rows as a checkpoint stores them: with the state of each `Mean`."
    return _map_values(rows, lambda v: {'mean': v.state_dict()} if isinstance(v, Mean) else v)


def decode_rows(rows: list[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    "Return the rows that `encode_rows` converted."
    return _map_values(rows, lambda v: _load_mean(v['mean']) if isinstance(v, dict) else v)


def _map_values(rows: list[Any], f: Callable[[Any], Any]) -> list[tuple[int, dict[str, Any]]]:
    return [(ba, {name: f(value) for name, value in row.items()}) for ba, row in rows]


def _load_mean(sd: dict[str, Any]) -> Mean:
    mean = Mean()
    mean.load_state_dict(sd)
    return mean


def _split_mean(value: Any) -> tuple[Any, Any]:
    "Return the total and count of a `Mean`; the count of a single value is 1."
    return (value.total, value.count) if isinstance(value, Mean) else (value, 1)


# -- configuration ---------------------------------------------------------------------------------


def configuration(learn: Learner) -> dict[str, Any]:
    """Return the configuration of a Learner as plain values by name.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(lr=0.1)
    >>> learn.create_opt()
    >>> {k: v for k, v in configuration(learn).items() if not k.startswith('callback')}
    {'model': 'RegModel', 'parameters': 2, 'trained_parameters': 2, 'loss': 'MSELoss', 'batch_size': 16, 'epochs': 1,
     'optimizer': '...SGD', 'lr': 0.1, 'mom': 0.9, 'wd': 0.0}
    """
    params = list(learn.model.parameters())
    config: dict[str, Any] = {
        'model': type(learn.model).__name__,
        'parameters': sum(p.numel() for p in params),
        'trained_parameters': sum(p.numel() for p in params if p.requires_grad),
        'loss': learn.loss_func,
        'batch_size': getattr(learn.dls.train, 'bs', getattr(learn.dls.train, 'batch_size', None)),
        'epochs': learn.n_epoch,
    }
    if learn.microbatch:
        config['microbatch'] = learn.microbatch
    if learn.opt is not None:
        config |= _optimizer_settings(learn)
    config['callbacks'] = ', '.join(type(cb).__name__ for cb in learn.cbs)
    for cb in learn.cbs:
        key = learn.parts.callbacks.keys.get(id(cb), cb.name)
        # constructor arguments that the callback keeps under the same name
        for name in inspect.signature(type(cb)).parameters:
            if name in cb.__dict__:
                config[f'callback/{key}/{name}'] = cb.__dict__[name]
        if defined_on_class(cb, 'configuration'):
            config |= cb.configuration()  # settings that the callback found during the run
    return {name: to_loggable(value) for name, value in config.items()}


def _optimizer_settings(learn: Learner) -> dict[str, Any]:
    "Return hyperparameters by name; during a fit the rates it was called with, of schedules the peak."
    opt = learn.opt
    hypers = [dict(group.items()) for group in opt.hypers]
    if learn.fitting:
        for group, lr in zip(hypers, learn.opt.last_lrs, strict=False):  # a group may be new
            group['lr'] = lr
    settings = {'optimizer': '+'.join(type(o).__name__ for o in opt.optimizers.values())}
    for i, group in enumerate(hypers):
        suffix = f'/{i}' if len(hypers) > 1 else ''
        settings |= {f'{name}{suffix}': value for name, value in group.items()}
    return settings


def to_loggable(value: Any) -> Any:
    "Return a plain value unchanged, a tensor with one element as a number, and other values as a string or a name."
    if isinstance(value, PLAIN):
        return as_atom(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (Time, PurePath, slice, Mapping)):
        return str(value)
    if isinstance(value, Sequence):  # also the list types of configuration libraries
        return f'[{", ".join(str(to_loggable(v)) for v in value)}]'
    return name_of(unwrap_partial(value))


# -- images ----------------------------------------------------------------------------------------


def as_images(
    images: Any,  # (N, C, H, W), (C, H, W) or (H, W), floats in [0, 1] or bytes
) -> Any:
    """Return images as an array (N, H, W, C) of bytes; raise `OptionError` for other shapes and types.

    >>> as_images(torch.rand(3, 8, 6)).shape
    (1, 8, 6, 3)
    """
    if isinstance(images, (list, tuple)) and images:
        images = torch.stack([torch.as_tensor(i) for i in images])
    t = torch.as_tensor(images).detach()
    while t.ndim in (2, 3):
        t = t[None]
    if t.ndim != 4 or t.shape[1] not in (1, 3, 4):
        raise OptionError(
            f'Images are tensors (N, C, H, W), (C, H, W) or (H, W) with 1, 3 or 4 channels, got {tuple(t.shape)}.'
        )
    if t.is_floating_point():
        t = t.float().nan_to_num(0.0, 1.0, 0.0).clamp(0, 1).mul(255).round()
    elif t.dtype != torch.uint8:
        raise OptionError(f'Images are floats within 0 and 1 or bytes, got {t.dtype}.')
    return t.to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy()


def encode_png(
    image: Any,  # array (H, W, C) of bytes, with 1, 3 or 4 channels
) -> bytes:
    "Encode an image as PNG with Pillow; raise `MissingExtraError` without Pillow."
    pixels = image[:, :, 0] if image.shape[2] == 1 else image
    file = BytesIO()
    import_library('PIL.Image', 'An image in a log').fromarray(pixels).save(file, 'PNG')
    return file.getvalue()
