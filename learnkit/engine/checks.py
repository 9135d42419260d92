# SPDX-License-Identifier: Apache-2.0
"""Checks of user input before training starts, so that invalid input raises before any weight has changed."""

from __future__ import annotations

import torch

from learnkit.core.batch import short_repr
from learnkit.core.errors import FitError, LossError, ModelError, OptionError
from learnkit.core.kinds import LOSS, METRIC, MODEL, explain_kind, find_kind
from learnkit.core.validation import check_count, warn_user
from learnkit.engine.loop import Loop
from learnkit.losses import CrossEntropyLossFlat

CROSS_ENTROPIES = torch.nn.CrossEntropyLoss, CrossEntropyLossFlat

LARGE_RATE = 8  # a whole number this large is probably not a learning rate


def check_model(model: object) -> None:
    "Raise `ModelError` if `model` is not a module, such as a class, or is a loss or a metric."
    is_module = isinstance(model, torch.nn.Module)
    kind = find_kind(model)
    if kind in (LOSS, METRIC) or not (is_module or kind in (None, MODEL)):
        raise ModelError(explain_kind(model, 'a model'))
    if not is_module:
        name = f'{model.__name__}(...)' if isinstance(model, type) else 'MyModel()'
        raise ModelError(
            f'model={short_repr(model)} is not a torch.nn.Module: pass an instance as the second argument, as in '
            f'`Learner(dls, {name})`.'
        )


def check_loss(loss_func: object) -> None:
    "Raise `LossError` if `loss_func` cannot be called, is a class, or belongs elsewhere."
    if find_kind(loss_func) not in (None, LOSS, METRIC, MODEL):
        raise LossError(explain_kind(loss_func, 'a loss'))
    if isinstance(loss_func, type):
        raise LossError(f'loss_func={loss_func.__name__} is a class: write {loss_func.__name__}().')
    if loss_func is not None and not callable(loss_func):
        raise LossError(
            f'loss_func={short_repr(loss_func)} cannot be called: pass a function f(pred, *targets), such as '
            '`torch.nn.functional.mse_loss`.'
        )


def check_function(name: str, f: object) -> None:
    "Raise `OptionError` if `f` cannot be called, or is a module class: `nn.Softmax` instead of `nn.Softmax(-1)`."
    if isinstance(f, type) and issubclass(f, torch.nn.Module):
        raise OptionError(f'{name}={f.__name__} is a class: write `{name}={f.__name__}(...)`.')
    if f is not None and not callable(f):
        raise OptionError(f'{name}={f!r} cannot be called: pass a function.')


def warn_of_rate(lr: object) -> None:
    "Warn of a whole number as the learning rate, which was probably meant as the batch size: `fit(5, 32)`."
    if isinstance(lr, int) and not isinstance(lr, bool) and lr >= LARGE_RATE:
        warn_user(
            f'lr={lr}: the second argument of a fit is the learning rate. The batch size belongs to the data: '
            f'`DataLoaders.from_tensors(..., bs={lr})`. If the rate is meant, write {lr}.0.'
        )


def check_microbatch(learn: Loop, size: object) -> int | str | None:
    "Return the microbatch size; raise `FitError` if it is invalid or has no effect on this Learner."
    if size is None:
        return None
    if not (isinstance(size, str) and size == 'auto'):
        size = check_count('microbatch', size, 1, FitError)
    for name in ('_do_one_batch', 'train_batch', '_do_grad_opt'):
        if getattr(type(learn), name) is not getattr(Loop, name):
            raise FitError(
                f'microbatch={size} has no effect on a Learner that overrides `{name}`: split the batch '
                'there, or leave `microbatch` out.'
            )
    return size
