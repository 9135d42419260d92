"""Checks of user input before training starts, so that invalid input raises before any weight has changed."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from learnkit.core.batch import apply_model, form_of, unpack_output
from learnkit.core.errors import FitError, LossError, MetricError, ModelError, OptionError
from learnkit.core.learner_type import LearnerLike
from learnkit.core.random import preserved_generators, preserved_rng
from learnkit.core.time import as_time
from learnkit.core.validation import check_class_numbers, takes_class_numbers
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.engine.loop import Loop
from learnkit.engine.run import preserved_state
from learnkit.metrics.averages import dry_run
from learnkit.metrics.base import Metric

__all__ = [
    'check_model',
    'check_loss',
    'check_function',
    'check_takes',
    'check_fit',
    'check_iteration',
    'check_microbatch',
    'check_metrics',
    'first_validation_batches',
]


def check_model(model: object) -> None:
    "Raise `ModelError` if `model` is not a module, such as a class."
    if isinstance(model, torch.nn.Module):
        return
    kind = type(model).__name__
    hint = 'Learner(dls, model) takes the data first, then the model'
    if isinstance(model, type):
        kind = f'class {model.__name__}'
        hint = f'write {model.__name__}(...)'
    raise ModelError(f'model is a {kind}, no torch.nn.Module: {hint}.')


def check_loss(loss_func: object) -> None:
    "Raise `LossError` if `loss_func` cannot be called, or is a class."
    if isinstance(loss_func, type):
        raise LossError(f'loss_func={loss_func.__name__} is a class: write {loss_func.__name__}().')
    if loss_func is not None and not callable(loss_func):
        raise LossError(f'loss_func={loss_func!r} cannot be called.')


def check_function(name: str, f: object) -> None:
    "Raise `OptionError` if `f` cannot be called, or is a module class: `nn.Softmax` instead of `nn.Softmax(-1)`."
    if isinstance(f, type) and issubclass(f, torch.nn.Module):
        raise OptionError(f'{name}={f.__name__} is a class: write `{name}={f.__name__}(...)`.')
    if f is not None and not callable(f):
        raise OptionError(f'{name}={f!r} cannot be called: give a function.')


def check_takes(name: str, f: Callable[..., Any], what: str) -> None:
    "Raise `OptionError` for a function that cannot be called with one argument."
    try:
        inspect.signature(f).bind(None)
    except TypeError as e:
        raise OptionError(
            f'{name}={getattr(f, "__name__", f)} cannot be called with `{what}` alone ({e}). Write it as '
            f'`lambda {what}: ...`.'
        ) from None
    except ValueError:
        return  # a C function without a signature


def check_count(name: str, value: object, least: int) -> int:
    "Return `value` as an int; raise `FitError` if it is not a whole number, or below `least`."
    try:
        # the annotation is ignored because `operator.index` is the check itself
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least:
        raise FitError(f'{name}={value!r}: give a whole number, {least} or more.')
    return number


def check_microbatch(learn: Loop, size: object) -> int | str | None:
    "Return the microbatch size; raise `FitError` if it is invalid or has no effect on this Learner."
    if size is None:
        return None
    size = size if isinstance(size, str) and size == 'auto' else check_count('microbatch', size, 1)
    for name in ('_do_one_batch', 'train_batch', '_do_grad_opt'):
        if getattr(type(learn), name) is not getattr(Loop, name):
            raise FitError(
                f'microbatch={size} has no effect on a Learner that overrides `{name}`: split the batch '
                'there, or leave `microbatch` out.'
            )
    return size


def check_fit(
    learn: LearnerLike, n_epoch: object, start_epoch: object, has_budget: bool = False
) -> int | None:
    "Return the number of epochs, or None for a budget; raise `FitError` for invalid arguments of `fit`."
    n = None if n_epoch is None and has_budget else check_count('n_epoch', n_epoch, 0)
    start = check_count('start_epoch', start_epoch, 0)
    if n is None and start:
        raise FitError(
            f'start_epoch={start} needs a fit of epochs, `fit(10)`, and no budget of another unit.'
        )
    if n is not None and start > n:
        raise FitError(
            f'start_epoch={start_epoch} is past n_epoch={n}, which counts '
            f'those that are skipped: `fit({start} + epochs to train)`.'
        )
    if learn.run.kind:
        raise FitError(
            f'fit() was called inside the {learn.run.kind} of the same Learner. Train on in the running one, '
            'end it with `learn.stop()`, or use another Learner.'
        )
    return n


def check_iteration(every: Any) -> int | None:
    "Return the number of epochs of an iteration; raise `FitError` for another unit."
    if every is None:
        return None
    every = as_time(every, 'ep')
    if every.unit != 'ep':
        raise FitError(f'iteration={str(every)!r}: give a number of epochs, such as 2 or `2ep`.')
    return int(every.value)


def check_metrics(learn: LearnerLike, train: list[Metric], valid: list[Metric]) -> dict[str, Any]:
    """Try the metrics on the current training batch; return the values of functions, by name.

    Validation may have another kind of targets (soft labels in training, classes in validation). A validation metric
    that fails is therefore tried again on a validation batch, and accepted if no batch is available. Raises
    `MetricError`.
    """
    values: dict[str, Any] = {}
    with preserved_rng():
        for m in train:
            values[m.name] = _try(m, learn.pred, learn.yb)
        for m in valid:
            try:
                values[m.name] = _try(m, learn.pred, learn.yb)
            except MetricError:
                for _ in first_validation_batches(learn):
                    values[m.name] = _try(m, learn.pred, learn.yb)
    return values


def _try(m: Metric, pred: Any, yb: tuple[Any, ...]) -> Any:
    "Check a metric and the kind of its targets; return the value of a function."
    if takes_class_numbers(m):
        check_class_numbers(m.name, yb)
    return dry_run(m, pred, yb)


def first_validation_batches(learn: LearnerLike) -> Iterator[str]:
    """Predict on the first batch of each validation loader, and yield the loader's name; restore the state afterwards.

    Yields nothing if callbacks change the batches.
    """
    events = ('after_draw', 'before_batch', 'before_pred', 'after_pred')
    if any(learn.ordered_cbs(name, False) for name in events):
        return
    with preserved_state(learn), torch.no_grad():
        learn.model.eval()
        for name, dl in evaluation_loaders(learn.dls):
            with preserved_generators(dl):
                batches = iter(dl)
                # a batch drawn from an iterator would be lost
                batch = None if batches is dl else next(batches, None)
            if batch is None:
                continue
            learn.batch_form = form_of(learn.dls, name)
            learn._split(learn._set_device(batch))
            learn.pred = unpack_output(apply_model(learn.model, learn.xb))[0]
            yield name
