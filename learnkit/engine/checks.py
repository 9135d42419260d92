# SPDX-License-Identifier: Apache-2.0
"""Checks of user input before training starts, so that invalid input raises before any weight has changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from learnkit.core.activation import outputs_of
from learnkit.core.batch import apply_model, form_of, map_tensors, short_repr, unpack_output
from learnkit.core.errors import FitError, LossError, MetricError, ModelError, OptionError
from learnkit.core.kinds import LOSS, METRIC, MODEL, explain_kind, find_kind
from learnkit.core.model import name_of
from learnkit.core.random import preserved_generators, preserved_rng
from learnkit.core.validation import (
    check_count,
    check_pairing,
    warn_of_order,
    warn_user,
)
from learnkit.data.dataloaders import evaluation_loaders, n_batches
from learnkit.engine.loop import Loop
from learnkit.engine.run import preserved_state
from learnkit.engine.snapshot import preserved_forward
from learnkit.losses import CrossEntropyLossFlat
from learnkit.metrics.averages import AvgMetric, dry_run, warn_unless_mean
from learnkit.metrics.base import Metric, measured_pred

if TYPE_CHECKING:
    from learnkit.learner import Learner

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
            f'model={short_repr(model)} is no torch.nn.Module: give an instance, after the data, as in '
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
            f'loss_func={short_repr(loss_func)} cannot be called: give a function f(pred, *targets), such as '
            '`torch.nn.functional.mse_loss`.'
        )


def check_function(name: str, f: object) -> None:
    "Raise `OptionError` if `f` cannot be called, or is a module class: `nn.Softmax` instead of `nn.Softmax(-1)`."
    if isinstance(f, type) and issubclass(f, torch.nn.Module):
        raise OptionError(f'{name}={f.__name__} is a class: write `{name}={f.__name__}(...)`.')
    if f is not None and not callable(f):
        raise OptionError(f'{name}={f!r} cannot be called: give a function.')


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


def contains_activation(loss_func: Any) -> str:
    "Return 'softmax' or 'sigmoid' if a loss function of logits contains one, else an empty string."
    return outputs_of(loss_func).contains


def warn_of_activation(learn: Learner) -> None:
    """Warn of a model that ends with the softmax or sigmoid that its loss function contains.

    Checks the last layer and, on the CPU, where reading values needs no sync, whether the predictions sum to 1.
    """
    kind = contains_activation(learn.loss_func)
    *_, last = learn.model.modules()
    layers = {'softmax': torch.nn.Softmax, 'sigmoid': torch.nn.Sigmoid}
    if not kind:
        return
    is_last = isinstance(last, layers[kind])
    if is_last or (kind == 'softmax' and _are_probabilities(vars(learn).get('pred'))):
        warn_user(
            f'The model ends with a {kind}, and the loss function {name_of(learn.loss_func)} contains another one, '
            f'which makes gradients far too small. Leave the {kind} out of the model: `get_preds` returns '
            'probabilities in any case.'
        )


def _are_probabilities(pred: Any) -> bool:
    "Return True for scores (B, C, ...) of two classes or more on the CPU that are positive and sum to 1."
    if not isinstance(pred, torch.Tensor) or not pred.is_cpu or not pred.is_floating_point():
        return False
    if pred.ndim < 2 or pred.shape[1] < 2 or not pred.numel():
        return False
    scores = pred.detach().float()
    return bool((scores >= 0).all() and ((scores.sum(1) - 1).abs() < 1e-2).all())


def check_metrics(learn: Learner, train: list[Metric], valid: list[Metric]) -> dict[str, Any]:
    """Try the metrics on the current training batch; return the values of metric functions by name.

    Validation may have another kind of targets (soft labels in training, classes in validation). A validation metric
    that fails is therefore tried again on a validation batch, and accepted if no batch is available. A custom
    training loop may have no predictions yet; then no metric is tried. Raises `MetricError`.
    """
    values: dict[str, Any] = {}
    if 'pred' not in vars(learn):
        return values
    with preserved_rng():
        for m in train:
            values[m.name] = _try_metric(m, learn)
        n_batches_of_each = [n_batches(dl) for _, dl in evaluation_loaders(learn.dls)]
        for m in valid:
            if isinstance(m, AvgMetric) and any(n != 1 for n in n_batches_of_each):
                warn_unless_mean(m, learn)
            try:
                values[m.name] = _try_metric(m, learn)
            except MetricError:
                for _ in first_validation_batches(learn):
                    values[m.name] = _try_metric(m, learn)
    return values


def _try_metric(m: Metric, learn: Learner) -> Any:
    "Check a metric on copies of the batch; return the value of a metric function."
    pred, yb = map_tensors((measured_pred(learn), learn.yb), lambda t: t.detach().clone())
    if isinstance(m, AvgMetric):
        warn_of_order(m.func)
        try:
            check_pairing(m.func, pred, yb)
        except LossError as e:
            warn_user(str(e))
    return dry_run(m, pred, yb)


def first_validation_batches(learn: Learner) -> Iterator[str]:
    """Predict on the first batch of each validation loader, and yield the loader's name; restore the state afterwards.

    Yields nothing if callbacks change the batches.
    """
    events = ('after_draw', 'before_batch', 'before_pred', 'after_pred')
    if any(learn.ordered_cbs(name, False) for name in events):
        return
    with preserved_state(learn), preserved_forward(learn.model), torch.no_grad():
        learn.model.eval()
        for name, dl in evaluation_loaders(learn.dls):
            with preserved_generators(dl):
                batches = iter(dl)
                # a batch drawn from an iterator would be missing later
                batch = None if batches is dl else next(batches, None)
            if batch is None:
                continue
            learn.batch_form = form_of(learn.dls, name)
            learn._split(learn._set_device(batch))
            learn.pred = unpack_output(apply_model(learn.model, learn.xb))[0]
            yield name
