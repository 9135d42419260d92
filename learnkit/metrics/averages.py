# SPDX-License-Identifier: Apache-2.0
"""Metrics that average functions or sum over batches on the device, wrapped torchmetrics objects, and `as_metrics`.

A metric is a function `f(pred, *targets)`, a torchmetrics object, or a `Metric`. The value is exact on the whole data
set, also with a smaller last batch. No batch makes the host wait for the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from math import isclose, isfinite, nan
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from fastcore.foundation import L
from torch import Tensor, nn
from typing_extensions import override

from learnkit.core.batch import count_samples, describe, short_repr, to_detach
from learnkit.core.denominator import denominator_of
from learnkit.core.errors import CancelException, MetricError
from learnkit.core.kinds import LOSS, METRIC, MODEL, explain_kind, find_kind
from learnkit.core.model import bare_model, snake_case, unwrap_partial, whole_batch
from learnkit.core.validation import logits_hint, warn_user
from learnkit.metrics.base import Mean, Metric, is_scalar, measured_pred, widen
from learnkit.metrics.undefined import compute_or_nan

if TYPE_CHECKING:
    from learnkit.learner import Learner

PHASES = ('train', 'valid', 'both')
F = TypeVar('F', bound=Callable[..., Any])
# columns of the history that are not metrics
RESERVED = ('fit', 'epoch', 'train_loss', 'valid_loss', 'time')


class AvgMetric(Mean, Metric):
    """Average `func(pred, *targets)`, a number, over the samples.

    A fit also calls `func` with copies of its first training batch, to find errors before anything has changed. A batch
    is weighted by its number of samples, or by `learn.weight_func(xb, yb)`. With a torch loss function as
    `func`, a batch is weighted by its number of targets that are not ignored. The fit also compares the value of that
    batch with the mean of its halves: a warning names a score, such as F1, which is not a mean over batches.
    A `ValueError` of `func` is NaN in the history if a value of the batch is not finite or all its targets are equal.
    Raises `MetricError` for a result that is not a number.

    >>> mse = torch.nn.functional.mse_loss
    >>> AvgMetric(mse).name, AvgMetric(nn.L1Loss()).name, AvgMetric(mse, name='l2').name
    ('mse_loss', 'l1_loss', 'l2')
    """

    def __init__(
        self,
        func: Callable[..., Any],  # f(predictions, targets) of a batch that returns a number
        name: str | None = None,  # name of the column; None: the name of the function
        on: str | None = None,  # 'train', 'valid' or 'both'; None: the Recorder's setting
    ) -> None:
        self.func = func
        self._name = name or _func_name(func)
        self.on = check_on(on)
        self._count = denominator_of(func).count

    @override
    def accumulate(self, learn: Learner) -> None:
        self.add(self.try_batch(measured_pred(learn), learn.yb), self._weight(learn))

    def _weight(self, learn: Learner) -> Any:
        count = None if getattr(learn, 'weight_func', None) is not None else self._count(learn.yb)
        return batch_weight(learn) if count is None else count

    def try_batch(self, pred: Any, yb: tuple[Any, ...]) -> Any:
        "Return the metric of one batch: a number, or a tensor of one element."
        if isinstance(self.func, nn.Module):
            _move_to_device_of(pred, self.func)
        with torch.no_grad(), measuring(self.name, pred, yb):
            result = compute_or_nan(self.name, self.func, *to_detach((pred, *yb), cpu=False))
            if is_scalar(result):
                return result
            raise MetricError(
                f'Metric `{self.name}` returned {describe(result)}, not one number: take its mean.'
            )


def warn_unless_mean(metric: AvgMetric, learn: Learner) -> None:
    "Warn if the value of a batch is not the mean of the values of its halves, so that batches cannot be averaged."
    if type(metric) is not AvgMetric or learn.weight_func is not None:
        return
    if metric._count(learn.yb) is not None:
        return  # a loss with targets that do not count
    try:
        pred = measured_pred(learn)
        half = len(pred) // 2
        whole, *halves = (
            # copies, because the function may work in place
            float(metric.func(*(t[part].detach().clone() for t in (pred, *learn.yb))))
            for part in (slice(2 * half), slice(half), slice(half, 2 * half))
        )
    except Exception:
        return  # a function of whole batches, or an error that the caller raises
    mean = sum(halves) / 2
    if isfinite(whole - mean) and not isclose(whole, mean, rel_tol=1e-2, abs_tol=1e-6):
        warn_user(
            f'{metric.name} of a batch is {whole}, and the mean of its halves is {mean}: the mean over '
            'batches is not its value of the data set. Compute it once over all samples, with `AccumMetric(f)`, or '
            'pass `Learner(weight_func=)` if it is a mean over something else than samples.'
        )


class AvgLoss(Mean, Metric):
    """Average the loss over the units that the loss averages over: samples, targets not ignored, or class weights.

    For a loss with reduction 'sum', the value is the sum over the data set divided by its samples.

    >>> AvgLoss().name
    'loss'
    """

    _name = 'loss'

    def __init__(self, on: str | None = None) -> None:
        self.on = check_on(on)

    @override
    def accumulate(self, learn: Learner) -> None:
        loss = learn.loss
        if isinstance(loss, Tensor) and loss.dim():
            loss = loss.detach().mean()
        weight = loss_weight(learn)
        weights = getattr(getattr(learn, 'parts', None), 'loss_weights', None)
        is_sum = weights is not None and weights.is_sum(learn)
        self.add(loss / weight if is_sum else loss, weight)


class SumMetric(Metric):
    """Compute a metric from sums over the data set, such as a ratio or a root, which is not a mean over batches.

    Override `sums(pred, *targets)`, which returns the sums of a batch as a tensor or several numbers, and
    `final(sums)`, which returns the value, by default the ratio of two sums. The sums stay on their device until the
    value is read, in float64 if the device supports it. A call with predictions and targets returns their value
    without changing the state.

    >>> class Bias(SumMetric):
    ...     def sums(self, pred, targ): return (pred - targ).sum(), targ.sum()
    >>> Bias()(torch.tensor([3., 4.]), torch.tensor([2., 2.]))
    0.75
    """

    _sums: Tensor | None = None
    sum_reduced = ('_sums',)

    def __init__(
        self,
        name: str | None = None,  # name of the column; None: the class name in snake_case
        on: str | None = None,  # 'train', 'valid' or 'both'; None: the Recorder's setting
    ) -> None:
        self._name = name
        self.on = check_on(on)

    def sums(self, pred: Any, *targs: Any) -> Any:
        "Return the sums of a batch: a tensor, or a tuple of numbers."
        raise NotImplementedError

    def final(self, sums: Tensor) -> Any:
        "Return the value from the sums of the data set, on the CPU; None if undefined."
        return float(sums[0] / sums[1])

    @override
    def reset(self) -> None:
        self._sums = None

    @override
    def accumulate(self, learn: Learner) -> None:
        sums = self.try_batch(measured_pred(learn), learn.yb)
        self._sums = sums if self._sums is None else self._sums.to(sums.device) + sums

    def __call__(self, pred: Any, *targs: Any) -> Any:
        return self.final(self.try_batch(pred, targs).cpu())

    def try_batch(self, pred: Any, yb: tuple[Any, ...]) -> Tensor:
        "Return the sums of a batch as one tensor."
        with torch.no_grad(), measuring(self.name, pred, yb):
            sums = self.sums(*to_detach((pred, *yb), cpu=False))
            return widen(sums) if isinstance(sums, Tensor) else _stack_sums(sums, pred)

    @property
    @override
    def value(self) -> Any:
        return None if self._sums is None else self.final(self._sums.cpu())


class ValueMetric(Metric):
    """Report the return value of `func()`, a number computed elsewhere.

    >>> ValueMetric(lambda: 0.5, 'half').value
    0.5
    """

    def __init__(
        self,
        func: Callable[[], Any],  # function that returns the value
        metric_name: str | None = None,  # name of the column; None: the name of the function
        on: str | None = None,  # 'train', 'valid' or 'both'; None: the Recorder's setting
    ) -> None:
        self.func = func
        self._name = metric_name or _func_name(func)
        self.on = check_on(on)

    @property
    @override
    def value(self) -> Any:
        return self.func()


class TorchMetric(Metric):
    """Run a torchmetrics object, or any object with `update(pred, *targets)`, `compute()` and `reset()`.

    The object is moved to the device of the predictions. In several processes it is merged by the rules of
    torchmetrics, or by its own `merge_state`, as torcheval's metrics have it. A value with several numbers, such as
    one per class, is returned as a tensor on the CPU. The value is NaN, with a warning, if `compute` raises
    `ValueError`."""

    sum_reduced = ('_updates',)

    def __init__(
        self,
        metric: Any,  # torchmetrics object, not copied
        name: str | None = None,  # name of the column; None: the class name in snake_case
        on: str | None = None,  # 'train', 'valid' or 'both'; None: the Recorder's setting
    ) -> None:
        self.metric = metric
        self._name = name or snake_case(type(metric).__name__, 'Metric')
        self.on = check_on(on)
        self._updates = 0

    @override
    def reset(self) -> None:
        self.metric.reset()
        self._updates = 0

    @override
    def accumulate(self, learn: Learner) -> None:
        pred = measured_pred(learn)
        _move_to_device_of(pred, self.metric)
        self._update(self.metric, pred, learn.yb)
        self._updates += 1

    def try_batch(self, pred: Any, yb: tuple[Any, ...]) -> None:
        "Update a copy of the metric, to find errors."
        trial = copy.deepcopy(self.metric)
        _move_to_device_of(pred, trial)
        self._update(trial, pred, yb)

    def _update(self, metric: Any, pred: Any, yb: tuple[Any, ...]) -> None:
        with torch.no_grad(), measuring(self.name, pred, yb):
            metric.update(*to_detach((pred, *yb), cpu=False))

    @property
    @override
    def value(self) -> Any:
        return as_plain_value(self._compute()) if self._updates else None

    def _compute(self) -> Any:
        try:
            return self.metric.compute()
        # `update` has accepted the data, so the error is about their values
        except ValueError as e:
            warn_user(f'Metric `{self.name}` is NaN. {type(e).__name__}: {e}')
            return nan


class ModelMetric(TorchMetric):
    "Run a torchmetrics object that a model of whole batches updates, by its `update_metric`."

    outputs: Any = None  # what `update_metric` returned last

    @override
    def accumulate(self, learn: Learner) -> None:
        _move_to_device_of(learn.pred, self.metric)
        model: Any = bare_model(learn.model)
        with torch.no_grad():
            pred = to_detach(learn.pred, cpu=False)
            self.outputs = model.update_metric(whole_batch(learn), pred, self.metric)
        self._updates += 1


def metrics_of_model(
    model: nn.Module,  # model with `get_metrics`
    is_train: bool = False,  # whether to return the metrics of training batches
) -> list[ModelMetric]:
    "Return copies of the metrics that a model of whole batches names."
    bare: Any = bare_model(model)
    on = 'train' if is_train else 'valid'
    metrics = copy.deepcopy(bare.get_metrics(is_train))
    return [ModelMetric(metric, name, on) for name, metric in metrics.items()]


class _Renamed(Metric):
    "Metric with another name, or fastai's base class, that delegates to the wrapped metric."

    sum_reduced = ()

    def __init__(self, metric: Any, name: str) -> None:
        self.metric = metric
        self._name = name
        self.on = getattr(metric, 'on', None)

    @override
    def reset(self) -> None:
        self.metric.reset()

    @override
    def accumulate(self, learn: Learner) -> None:
        self.metric.accumulate(learn)

    def __getattr__(self, k: str) -> Any:
        if k == 'metric':
            raise AttributeError(k)  # a copy under construction has no attributes yet
        return getattr(self.metric, k)

    @property
    @override
    def value(self) -> Any:
        return self.metric.value


def as_metrics(
    ms: Any,  # None, a metric, a list of metrics, or a dict from names to metrics
) -> L:
    """Convert metrics to a list of `Metric` objects with unique names: the second `bias` is named `bias_2`.

    A class is instantiated. A torchmetrics collection is expanded to its members. Metrics of fastai itself are wrapped.

    >>> def bias(pred, targ): return (pred - targ).mean()
    >>> [m.name for m in as_metrics([bias, nn.L1Loss(), {'offset': bias}, bias])]
    ['bias', 'l1_loss', 'offset', 'bias_2']
    """
    names: set[str] = set()
    metrics = L([_make_unique(m, names) for m in _expand(ms, None)])
    for m in metrics:
        check_column(m.name)
    return metrics


def whole_set_metric(
    metric: Callable[..., Metric],  # class that takes the function's options as keywords
) -> Callable[[F], F]:
    """Mark a function of one batch with the metric that computes its value on a whole data set.

    In a list of metrics, the function or a `partial` of the function with keywords is replaced by that metric."""

    def mark(func: F) -> F:
        vars(func)['whole_set_metric'] = metric
        return func

    return mark


def _make_whole_set_metric(m: Any) -> Metric | None:
    "Return the metric that a function was marked with, or None."
    is_partial = isinstance(m, partial) and not m.args
    func = m.func if is_partial else m
    options = m.keywords if is_partial else {}
    metric = getattr(func, '__dict__', {}).get('whole_set_metric')
    return None if metric is None else metric(**options)


def check_column(name: str) -> None:
    "Raise `MetricError` for the name of another column of the history."
    if name in RESERVED:
        raise MetricError(f'`{name}` is a column of the history already: rename it.')


def _expand(m: Any, name: str | None) -> Iterable[Metric]:
    "Yield the metrics that `m` describes."
    if m is None:
        return
    if find_kind(m) not in (None, LOSS, METRIC, MODEL):
        raise MetricError(explain_kind(m, 'a metric'))
    if isinstance(m, type):
        m = m()
    whole_set = _make_whole_set_metric(m)
    if isinstance(m, Metric):
        yield m if name is None or name == m.name else _Renamed(m, name)
    elif _is_fastai_metric(m):
        yield _Renamed(m, name or m.name)
    elif isinstance(m, Mapping) or (_is_torchmetric(m) and hasattr(m, 'items')):
        for k, v in m.items():
            yield from _expand(v, f'{name}_{k}' if name else str(k))
    elif _is_torchmetric(m):
        yield TorchMetric(m, name)
    elif whole_set is not None:
        yield from _expand(whole_set, name)
    elif callable(m):
        _check_not_sklearn(m)
        yield AvgMetric(m, name)
    elif isinstance(m, Iterable) and not isinstance(m, (str, bytes, Tensor)):
        for o in m:
            yield from _expand(o, name)
    else:
        known = import_module('learnkit.metrics').__all__
        hint = f' Write `from learnkit import {m}`.' if m in known else ''
        raise MetricError(
            f'{short_repr(m)} is not a metric: pass a function f(pred, *targets), a torchmetrics object or Metric.'
            f'{hint}'
        )


def _check_not_sklearn(f: Any) -> None:
    "Raise `MetricError` for a score of scikit-learn, which takes targets and predicted classes of a whole set."
    if str(getattr(unwrap_partial(f), '__module__', '')).partition('.')[0] == 'sklearn':
        name = _func_name(f)
        raise MetricError(
            f"{name} is scikit-learn's: it takes (y_true, y_pred) of a whole set. Use "
            f'`metrics=skm_to_fastai({name})`, with `is_class=False` for a score of numbers, or a class such as '
            '`F1Score`.'
        )


def _make_unique(m: Metric, names: set[str]) -> Metric:
    "Number a metric's name that is in `names` already, and add the name."
    name = m.name
    i = 1
    while name in names:
        i += 1
        name = f'{m.name}_{i}'
    names.add(name)
    return m if name == m.name else _Renamed(m, name)


def dry_run(
    metric: Metric,  # metric to check
    pred: Any,  # predictions of a batch
    yb: tuple[Any, ...],  # targets of the batch
) -> Any:  # for an `AvgMetric` the value on the batch
    """Check that `metric` can be computed from a batch, without changing its state.

    A metric with its own `accumulate` is not checked. Raises `MetricError` from the metric's error."""
    while isinstance(metric, _Renamed):
        metric = metric.metric
    known: Any = metric
    owner = next(cls for cls in type(metric).__mro__ if 'accumulate' in vars(cls))
    try:
        return known.try_batch(pred, yb) if 'try_batch' in vars(owner) else None
    except (CancelException, torch.OutOfMemoryError):
        raise
    except Exception as e:
        what = '' if isinstance(e, MetricError) else f'{type(e).__name__}: '
        lines = (
            f'Metric `{metric.name}`: {what}{e}{logits_hint(pred, e)}',
            *getattr(e, '__notes__', ()),
        )
        raise MetricError('\n'.join(lines)) from e


def measures_batches(metric: Metric) -> bool:
    "Return True if a metric accumulates over batches, False if its value is computed elsewhere."
    while isinstance(metric, _Renamed):
        metric = metric.metric
    return type(metric).accumulate is not Metric.accumulate


def _stack_sums(sums: Iterable[Any], pred: Any) -> Tensor:
    "Stack numbers to a tensor on the device of the predictions, without a transfer from the host."
    device = pred.device if isinstance(pred, Tensor) else None
    return torch.stack(
        [widen(s if isinstance(s, Tensor) else torch.full((), s, device=device)) for s in sums]
    )


def batch_weight(learn: Learner) -> Any:
    "Return the weight of a batch in a mean: its number of samples, or `learn.weight_func(xb, yb)`."
    func = getattr(learn, 'weight_func', None)
    if callable(func):
        return func(learn.xb, learn.yb)
    return count_samples(learn) if func is None else loss_weight(learn)


def loss_weight(learn: Learner) -> Any:
    "Return the weight of a batch's loss in a mean: the denominator of the loss, or `learn.weight_func(xb, yb)`."
    weights = getattr(getattr(learn, 'parts', None), 'loss_weights', None)
    if weights is None:
        return batch_weight(learn)
    return weights.weigh_batch(learn, learn.xb, learn.yb)


def _move_to_device_of(pred: Any, module: Any) -> None:
    "Move a module or metric to the device of the predictions."
    if not isinstance(pred, Tensor) or getattr(module, 'device', None) == pred.device:
        return
    if hasattr(module, 'to'):
        module.to(pred.device)


@contextmanager
def measuring(name: str, pred: Any, yb: tuple[Any, ...]) -> Iterator[None]:
    "Add the metric's inputs to the errors of a context."
    try:
        yield
    except Exception as e:
        # a MetricError includes a fix
        fix = (
            '' if isinstance(e, MetricError) else ' It gets (pred, *targets), and returns a number.'
        )
        e.add_note(
            f'Metric `{name}` cannot be computed from predictions {describe(pred)} and targets '
            f'{describe(yb)}.{fix}'
        )
        raise


def _func_name(func: Any) -> str:
    func = unwrap_partial(func)
    return getattr(func, '__name__', None) or snake_case(type(func).__name__, 'Metric')


def _is_fastai_metric(m: Any) -> bool:
    "Return True for an object that follows fastai's protocol without our base class."
    return all(hasattr(type(m), k) for k in ('reset', 'accumulate', 'value', 'name'))


def _is_torchmetric(m: Any) -> bool:
    return all(callable(getattr(m, k, None)) for k in ('update', 'compute', 'reset'))


def as_plain_value(value: Any) -> Any:
    "Convert a number to a float; detach tensors, and move them to the CPU."
    return float(value) if is_scalar(value) else to_detach(value)


def check_on(on: str | None) -> str | None:
    "Return `on`; raise `MetricError` unless it is None, 'train', 'valid' or 'both'."
    if on is None or on in PHASES:
        return on
    raise MetricError(f"A metric is on 'train', 'valid' or 'both', got {on!r}.")
