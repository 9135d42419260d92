"""What is checked before training starts, so that bad input is told before any weight has changed."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from learnkit.core.batch import apply_model, form_of, unpack_output
from learnkit.core.errors import FitError, LossError, MetricError, ModelError, OptionError
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
    "Raise `ModelError` for what is no module, a class above all."
    if isinstance(model, torch.nn.Module):
        return
    if isinstance(model, type):
        what, hint = f'class {model.__name__}', f'write {model.__name__}(...)'
    else:
        what, hint = (
            type(model).__name__,
            'Learner(dls, model) takes the data first, then the model',
        )
    raise ModelError(f'model is a {what}, no torch.nn.Module: {hint}.')


def check_loss(loss_func: object) -> None:
    "Raise `LossError` for what cannot be called as a loss: a class above all."
    if isinstance(loss_func, type):
        raise LossError(f'loss_func={loss_func.__name__} is a class: write {loss_func.__name__}().')
    if loss_func is not None and not callable(loss_func):
        raise LossError(f'loss_func={loss_func!r} cannot be called.')


def check_function(name: str, f: object) -> None:
    "Raise `OptionError` for what is no function: a class of modules above all, `nn.Softmax` for `nn.Softmax(-1)`."
    if isinstance(f, type) and issubclass(f, torch.nn.Module):
        raise OptionError(f'{name}={f.__name__} is a class: write `{name}={f.__name__}(...)`.')
    if f is not None and not callable(f):
        raise OptionError(f'{name}={f!r} cannot be called: give a function.')


def check_takes(name: str, f: Callable[..., Any], what: str) -> None:
    "Raise `OptionError` for a function that does not take one argument alone."
    try:
        inspect.signature(f).bind(None)
    except TypeError as e:
        raise OptionError(
            f'{name}={getattr(f, "__name__", f)} cannot be called with `{what}` alone ({e}). Write it as '
            f'`lambda {what}: ...`.'
        ) from None
    except ValueError:
        return  # written in C: calling it will tell


def check_count(name: str, value: object, least: int) -> int:
    "Return a whole number; raise `FitError` for anything else, and below `least`."
    try:
        # whether it has an index is the question
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least:
        raise FitError(f'{name}={value!r}: give a whole number, {least} or more.')
    return number


def check_microbatch(learn: Loop, size: object) -> int | str | None:
    "Return the microbatch size; raise `FitError` when it is no size or cannot act on this Learner."
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
    learn: Any, n_epoch: object, start_epoch: object, has_budget: bool = False
) -> int | None:
    "Return the number of epochs, None where only a budget is known; raise `FitError` for what `fit` cannot follow."
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


def check_metrics(learn: Any, train: list[Metric], valid: list[Metric]) -> dict[str, Any]:
    """Try the metrics on the training batch at hand; return the values of functions, by name.

    Validation may have targets of another kind (soft labels in training, classes in validation), so that a metric of
    validation that fails is tried again on a validation batch, and is let through where that cannot be told.
    Raises `MetricError`."""
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
    "Check a metric, and what its targets are; return the value of a function."
    if takes_class_numbers(m):
        check_class_numbers(m.name, yb)
    return dry_run(m, pred, yb)


def first_validation_batches(learn: Any) -> Iterator[str]:
    """Predict on the first batch of each validation loader, and yield the loader's name; then all is as before.

    There is none where callbacks change the batches.
    """
    if any(
        learn.ordered_cbs(e, False)
        for e in ('after_draw', 'before_batch', 'before_pred', 'after_pred')
    ):
        return
    with preserved_state(learn), torch.no_grad():
        learn.model.eval()
        for name, dl in evaluation_loaders(learn.dls):
            with preserved_generators(dl):
                drawn = iter(dl)
                # from an iterator a batch would be taken away
                batch = None if drawn is dl else next(drawn, None)
            if batch is None:
                continue
            learn.batch_form = form_of(learn.dls, name)
            learn._split(learn._set_device(batch))
            learn.pred = unpack_output(apply_model(learn.model, learn.xb))[0]
            yield name
