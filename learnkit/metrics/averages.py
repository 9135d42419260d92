"""What measures: averages and sums that stay on the device, torchmetrics objects as they are, and the list of them.

A metric is anything `as_metrics` takes: a function `f(pred, *targets)`, a torchmetrics object, or a `Metric`. Each
gives the value on the whole data set, also with an uneven last batch, and no batch makes the host wait."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from fastcore.basics import class2attr
from fastcore.foundation import L
from torch import Tensor, nn

from learnkit.core.batch import count_samples, describe, to_detach
from learnkit.core.denominator import denominator_of
from learnkit.core.errors import CancelException, MetricError, did_you_mean
from learnkit.metrics.base import Mean, Metric, flattened, is_number, paired, widened

__all__ = [
    'AvgMetric',
    'AvgLoss',
    'SumMetric',
    'ValueMetric',
    'TorchMetric',
    'as_metrics',
    'batch_weight',
    'check_column',
    'check_on',
    'dry_run',
    'loss_weight',
    'whole_set_metric',
    'measures_batches',
    'paired',
    'widened',
]

PHASES = ('train', 'valid', 'both')
F = TypeVar('F', bound=Callable[..., Any])
# columns of the history that are not metrics
RESERVED = ('fit', 'epoch', 'train_loss', 'valid_loss', 'time')


class AvgMetric(Mean, Metric):
    """Average `func(pred, *targets)` over the samples: a number, or a dict of numbers by name, a column each.

    The weight of a batch is its number of samples, or what `learn.weight_func(xb, yb)` says; for a loss function of
    torch it is the number of targets that count. Raises `MetricError` for what is no function, and for a result that is
    neither one number nor a dict of them.

    >>> mse = torch.nn.functional.mse_loss
    >>> AvgMetric(mse).name, AvgMetric(nn.L1Loss()).name, AvgMetric(mse, name='l2').name
    ('mse_loss', 'l1_loss', 'l2')
    """

    _name: str | None = None

    def __init__(
        self,
        func: Callable[..., Any],  # f(predictions, targets) of a batch -> one number
        name: str | None = None,  # default: the function's name
        on: str | None = None,  # 'train', 'valid' or 'both'; None: as the Recorder says
    ) -> None:
        if not callable(func):
            raise MetricError(f'AvgMetric averages a function f(pred, *targets), got {func!r}.')
        self.func, self._name, self.on = func, name, check_on(on)
        # of a loss function of torch what that averages over
        self._count = denominator_of(func).count

    def accumulate(self, learn: Any) -> None:
        self.add(self._compute(learn.pred, learn.yb), self._weight(learn))

    def _weight(self, learn: Any) -> Any:
        count = None if getattr(learn, 'weight_func', None) is not None else self._count(learn.yb)
        return batch_weight(learn) if count is None else count

    def add(self, value: Any, weight: Any = 1) -> None:
        "Take in a number, or a dict of them; of a dict, `total` and `count` are dicts too."
        if isinstance(value, dict) == isinstance(self.total, dict) or not self.count:
            totals = dict(self.total) if isinstance(self.total, dict) else {}
            counts = dict(self.count) if isinstance(self.count, dict) else {}
        else:
            raise MetricError(
                f'Metric `{self.name}` gave a dict for some batches, and a number for others.'
            )
        if not isinstance(value, dict):
            return super().add(value, weight)
        for key, number in value.items():
            mean = Mean()
            mean.total, mean.count = totals.get(key, 0.0), counts.get(key, 0)
            mean.add(number, weight)
            totals[key], counts[key] = mean.total, mean.count
        self.total, self.count = totals, counts

    @property
    def value(self) -> Any:
        "The mean, or a dict of means; None when nothing was added."
        if not isinstance(self.total, dict):
            return super().value
        means = {key: Mean() for key in self.total}
        for key, mean in means.items():
            mean.total, mean.count = self.total[key], self.count[key]
        return {key: mean.value for key, mean in means.items()}

    def _compute(self, pred: Any, yb: tuple[Any, ...]) -> Any:
        "The metric of one batch, a number or a tensor of one element, or a dict of them."
        if isinstance(self.func, nn.Module):
            _follow(self.func, pred)
        try:
            with torch.no_grad():
                result = self.func(*_detached(pred, yb))
            if is_number(result):
                return result
            numbers = flattened(result) if isinstance(result, Mapping) else {}
            if numbers and all(map(is_number, numbers.values())):
                return numbers
            raise MetricError(
                f'Metric `{self.name}` gave {describe(result)}, not one number: take its mean.'
            )
        except Exception as e:
            _note(e, self.name, pred, yb)
            raise

    @property
    def name(self) -> str:
        return self._name or _func_name(self.func)


class AvgLoss(Mean, Metric):
    """Average the loss over the samples, or whatever it is a mean of: the targets that count, or their class weights.

    >>> AvgLoss().name
    'loss'
    """

    def __init__(self, on: str | None = None) -> None:
        self.on = check_on(on)

    def accumulate(self, learn: Any) -> None:
        loss = learn.loss
        if isinstance(loss, Tensor) and loss.dim():
            loss = loss.detach().mean()
        self.add(loss, loss_weight(learn))

    @property
    def name(self) -> str:
        return 'loss'


class SumMetric(Metric):
    """Compute a number from sums over the set, where a mean of the batches' values would not do: a ratio, a root.

    Override `sums(pred, *targets)`, what a batch adds, a tensor or several numbers; and `final(sums)`, the value. The
    sums stay on their device, in float64 where it has that, until the value is read. Called with predictions and
    targets it gives the value of these alone.

    >>> class Bias(SumMetric):
    ...     def sums(self, pred, targ): return (pred - targ).sum(), targ.sum()
    ...     def final(self, sums): return float(sums[0]/sums[1])
    >>> Bias()(torch.tensor([3., 4.]), torch.tensor([2., 2.]))
    0.75
    """

    _name: str | None = None
    _sums: Tensor | None = None
    summed = ('_sums',)

    def __init__(
        self,
        name: str | None = None,  # default: the class name in snake_case
        on: str | None = None,  # 'train', 'valid' or 'both'; None: as the Recorder says
    ) -> None:
        self._name, self.on = name, check_on(on)

    def sums(self, pred: Any, *targs: Any) -> Any:
        "What a batch adds: a tensor, or a tuple of numbers."
        raise NotImplementedError(
            f'{type(self).__name__} is a SumMetric without `sums`: define that method.'
        )

    def final(self, sums: Tensor) -> Any:
        "The value, from the sums of the whole set on the CPU; None where it is not defined."
        raise NotImplementedError(
            f'{type(self).__name__} is a SumMetric without `final`: define that method.'
        )

    def reset(self) -> None:
        self._sums = None

    def accumulate(self, learn: Any) -> None:
        sums, so_far = self._compute(learn.pred, learn.yb), self._sums
        if so_far is not None and sums.shape != so_far.shape:
            raise MetricError(
                f'Metric `{self.name}` had sums of shape {list(so_far.shape)}, now of '
                f'{list(sums.shape)}: has the number of classes changed?'
            )
        self._sums = sums if so_far is None else so_far.to(sums.device) + sums

    def __call__(self, pred: Any, *targs: Any) -> Any:
        return self.final(self._compute(pred, targs).cpu())

    def _compute(self, pred: Any, yb: tuple[Any, ...]) -> Tensor:
        "What a batch adds, as one tensor."
        try:
            with torch.no_grad():
                sums = self.sums(*_detached(pred, yb))
            return widened(sums) if isinstance(sums, Tensor) else _stacked(sums, pred)
        except Exception as e:
            _note(e, self.name, pred, yb)
            raise

    @property
    def value(self) -> Any:
        return None if self._sums is None else self.final(self._sums.cpu())

    @property
    def name(self) -> str:
        return self._name or class2attr(self, 'Metric')


class ValueMetric(Metric):
    """Report `func()`, for a number that something else computed.

    >>> ValueMetric(lambda: 0.5, 'half').value
    0.5
    """

    def __init__(
        self,
        func: Callable[[], Any],  # gives the value
        metric_name: str | None = None,  # default: the function's name
        on: str | None = None,  # 'train', 'valid' or 'both'; None: as the Recorder says
    ) -> None:
        self.func, self.metric_name, self.on = func, metric_name, check_on(on)

    @property
    def value(self) -> Any:
        return self.func()

    @property
    def name(self) -> str:
        return self.metric_name or _func_name(self.func)


class TorchMetric(Metric):
    """Run a torchmetrics object, or anything with its `update(pred, *targets)`, `compute()` and `reset()`.

    It moves to the device of the predictions. A value that is no single number (one per class, for one) comes as a
    tensor on the CPU."""

    summed = ('_updates',)

    def __init__(
        self,
        metric: Any,  # the torchmetrics object, used as it is
        name: str | None = None,  # default: its class name in snake_case
        on: str | None = None,  # 'train', 'valid' or 'both'; None: as the Recorder says
    ) -> None:
        if not _is_torchmetric(metric):
            raise MetricError(f'{metric!r} has no update, compute and reset.')
        self.metric, self._name, self.on, self._updates = metric, name, check_on(on), 0
        self._follows: Any = None  # the device that it was moved to

    def reset(self) -> None:
        self.metric.reset()
        self._updates, self._follows = 0, None

    def accumulate(self, learn: Any) -> None:
        device = getattr(learn.pred, 'device', None)
        if device != self._follows:
            _follow(self.metric, learn.pred)
            self._follows = device
        self._update(self.metric, learn.pred, learn.yb)
        self._updates += 1

    def _try(self, pred: Any, yb: tuple[Any, ...]) -> None:
        "Update a copy."
        trial = copy.deepcopy(self.metric)
        _follow(trial, pred)
        self._update(trial, pred, yb)

    def _update(self, metric: Any, pred: Any, yb: tuple[Any, ...]) -> None:
        try:
            with torch.no_grad():
                metric.update(*_detached(pred, yb))
        except Exception as e:
            _note(e, self.name, pred, yb)
            raise

    @property
    def value(self) -> Any:
        if not self._updates:
            return None
        res = self.metric.compute()
        return float(res) if is_number(res) else to_detach(res)

    @property
    def name(self) -> str:
        return self._name or class2attr(self.metric, 'Metric')


class _Renamed(Metric):
    "A metric under another name; all else is its own."

    summed = ()

    def __init__(self, metric: Metric, name: str) -> None:
        self.metric, self._name, self.on = metric, name, metric.on

    def reset(self) -> None:
        self.metric.reset()

    def accumulate(self, learn: Any) -> None:
        self.metric.accumulate(learn)

    def __getattr__(self, k: str) -> Any:
        if k == 'metric':
            raise AttributeError(k)  # a copy in the making
        return getattr(self.metric, k)

    @property
    def value(self) -> Any:
        return self.metric.value

    @property
    def name(self) -> str:
        return self._name


def as_metrics(
    ms: Any,  # None, one metric, a list of them, or a dict name -> metric
) -> L:
    """Make a list of `Metric`s, each with a name of its own: the second `bias` becomes `bias_2`.

    A class is instantiated, a torchmetrics collection expanded into its members.

    >>> def bias(pred, targ): return (pred - targ).mean()
    >>> [m.name for m in as_metrics([bias, nn.L1Loss(), {'offset': bias}, bias])]
    ['bias', 'l1_loss', 'offset', 'bias_2']
    """
    seen: set[str] = set()
    metrics = L(_distinct(m, seen) for m in _expand(ms, None))
    for m in metrics:
        check_column(m.name)
    return metrics


def whole_set_metric(
    metric: Callable[..., Metric],  # takes the function's own options as keywords
) -> Callable[[F], F]:
    """Mark a function of one batch, whose value on a set is no mean over batches, with the metric that gives it.

    In a list of metrics the function, or a `partial` of it with keywords, stands for that metric."""

    def mark(func: F) -> F:
        vars(func)['whole_set_metric'] = metric
        return func

    return mark


def _of_whole_set(m: Any) -> Metric | None:
    "The metric that a function was marked with."
    func, options = (m.func, m.keywords) if isinstance(m, partial) and not m.args else (m, {})
    metric = getattr(func, '__dict__', {}).get('whole_set_metric')
    return None if metric is None else metric(**options)


def check_column(name: str) -> None:
    "Raise `MetricError` for a name that the history uses itself."
    if name in RESERVED:
        raise MetricError(f'`{name}` is a column of the history already: give it another name.')


def _expand(m: Any, name: str | None) -> Iterable[Metric]:
    "The metrics that `m` stands for."
    if m is None:
        return
    if isinstance(m, type):
        m = _instance(m)
    if isinstance(m, Metric):
        yield m if name is None or name == m.name else _Renamed(m, name)
    elif isinstance(m, Mapping) or (_is_torchmetric(m) and hasattr(m, 'items')):
        for k, v in m.items():
            yield from _expand(v, f'{name}_{k}' if name else str(k))
    elif _is_torchmetric(m):
        yield TorchMetric(m, name)
    elif (whole := _of_whole_set(m)) is not None:
        yield from _expand(whole, name)
    elif callable(m):
        yield AvgMetric(_not_sklearns(m), name)
    elif isinstance(m, Iterable) and not isinstance(m, (str, bytes, Tensor)):
        for o in m:
            yield from _expand(o, name)
    else:
        raise MetricError(
            f'{m!r} is no metric: give a function f(pred, *targets), a torchmetrics object or Metric.'
        )


def _not_sklearns(f: Any) -> Any:
    "Refuse a score of scikit-learn, which takes arrays of targets and predicted classes, and of the whole set."
    inner = f.func if isinstance(f, partial) else f
    if str(getattr(inner, '__module__', '')).partition('.')[0] != 'sklearn':
        return f
    name = _func_name(f)
    ours = {
        'f1': 'F1Score',
        'precision': 'Precision',
        'recall': 'Recall',
        'jaccard': 'Jaccard',
        'roc_auc': 'RocAuc',
        'accuracy': 'accuracy',
        'r2': 'R2Score',
    }.get(name.removesuffix('_score'))
    use = f'`metrics={ours}` of learnkit, or ' if ours else ''
    raise MetricError(
        f"{name} is scikit-learn's: it takes (y_true, y_pred) of a whole set. Use {use}"
        f'`metrics=skm_to_fastai({name})`, with `is_class=False` for a score of numbers.'
    )


def _distinct(m: Metric, seen: set[str]) -> Metric:
    name, i = m.name, 1
    while name in seen:
        name, i = f'{m.name}_{i + 1}', i + 1
    seen.add(name)
    return m if name == m.name else _Renamed(m, name)


def _instance(cls: type) -> Any:
    try:
        return cls()
    except Exception as e:
        raise MetricError(
            f'Metric {cls.__name__} cannot be made without arguments ({e}): give an instance.'
        ) from e


def dry_run(
    metric: Metric,  # what will be computed
    pred: Any,  # the predictions of a batch
    yb: tuple[Any, ...],  # its targets
) -> Any:  # its value on the batch where it is a function, else None
    """Check that `metric` can be computed from such a batch, without changing its state.

    A metric with its own `accumulate` is not tried. Raises `MetricError`, with what the metric raised as its cause."""
    while isinstance(metric, _Renamed):
        metric = metric.metric
    own = type(metric).accumulate
    try:
        if isinstance(metric, AvgMetric | SumMetric) and own in (
            AvgMetric.accumulate,
            SumMetric.accumulate,
        ):
            value = metric._compute(pred, yb)
            return value if isinstance(metric, AvgMetric) else None
        if isinstance(metric, TorchMetric) and own is TorchMetric.accumulate:
            metric._try(pred, yb)
    except (CancelException, torch.OutOfMemoryError):
        raise
    except MetricError as e:
        raise MetricError(f'{e} {_got(metric.name, pred, yb)}') from e  # it says what to do
    except Exception as e:
        raise MetricError(
            f'{_got(metric.name, pred, yb)} {_FORM} It raised {type(e).__name__}: {e}'
        ) from e


def measures_batches(metric: Metric) -> bool:
    "Tell a metric that accumulates over batches from one whose value comes from elsewhere."
    while isinstance(metric, _Renamed):
        metric = metric.metric
    return type(metric).accumulate is not Metric.accumulate


def _stacked(sums: Iterable[Any], pred: Any) -> Tensor:
    "Several numbers as one tensor, on the device of the predictions and without a transfer to it."
    device = pred.device if isinstance(pred, Tensor) else None
    return torch.stack(
        [widened(s if isinstance(s, Tensor) else torch.full((), s, device=device)) for s in sums]
    )


def batch_weight(learn: Any) -> Any:
    "Return how much a batch counts in a mean: its samples, or what `learn.weight_func(xb, yb)` says."
    if (func := getattr(learn, 'weight_func', None)) is not None:
        return func(learn.xb, learn.yb) if callable(func) else loss_weight(learn)
    return count_samples(learn)


def loss_weight(learn: Any) -> Any:
    "Return how much the loss of a batch counts in a mean: what it averages over, or what `learn.weight_func` says."
    weights = getattr(learn, 'loss_weights', None)
    count = None if weights is None else weights.count(learn, learn.xb, learn.yb)
    if count is not None:
        return count
    func = getattr(learn, 'weight_func', None)
    return func(learn.xb, learn.yb) if callable(func) else count_samples(learn)


def _follow(module: Any, pred: Any) -> None:
    "Move what holds tensors of its own to the device of the predictions."
    if isinstance(pred, Tensor) and hasattr(module, 'to'):
        module.to(pred.device)


def _detached(pred: Any, yb: tuple[Any, ...]) -> tuple[Any, ...]:
    "The arguments of a metric."
    return to_detach((pred, *yb), cpu=False)


def _note(e: Exception, name: str, pred: Any, yb: tuple[Any, ...]) -> None:
    "Add to an error of a metric what it got; one of our own says what to do."
    e.add_note(_got(name, pred, yb) + ('' if isinstance(e, MetricError) else f' {_FORM}'))


_FORM = 'It gets (pred, *targets) and has to give one number: wrap it in a function that brings these into its form.'


def _got(name: str, pred: Any, yb: tuple[Any, ...]) -> str:
    return f'Metric `{name}` cannot be computed from predictions {describe(pred)} and targets {describe(yb)}.'


def _func_name(func: Any) -> str:
    while isinstance(func, partial):
        func = func.func
    return getattr(func, '__name__', None) or class2attr(func, 'Metric')


def _is_torchmetric(m: Any) -> bool:
    return all(callable(getattr(m, k, None)) for k in ('update', 'compute', 'reset'))


def check_on(on: str | None) -> str | None:
    "Return where a metric is computed; raise `MetricError` for what is no such place."
    if on is None or on in PHASES:
        return on
    raise MetricError(
        f"A metric is on 'train', 'valid' or 'both', got {on!r}.{did_you_mean(str(on), PHASES)}"
    )
