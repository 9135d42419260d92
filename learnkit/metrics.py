"""Metrics: averages that stay on the device, torchmetrics objects as they are, and a few functions to begin with.

A metric is anything `as_metrics` takes: a function `f(pred, *targets)`, a torchmetrics object, or a `Metric`. Each
gives the value on the whole data set, also with an uneven last batch, and no batch makes the host wait."""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from fastcore.basics import class2attr
from fastcore.foundation import L
from torch import Tensor, nn

from learnkit.averages import AvgSmoothLoss, Mean, Metric, is_number
from learnkit.batch import describe, find_bs, to_detach
from learnkit.errors import CancelException, MetricError, did_you_mean

__all__ = ['Metric', 'Mean', 'AvgMetric', 'AvgLoss', 'AvgSmoothLoss', 'ValueMetric', 'TorchMetric', 'RMSE',
           'as_metrics', 'check_column', 'dry_run', 'measures_batches', 'accuracy', 'error_rate', 'mse', 'rmse', 'mae']

PHASES = ('train', 'valid', 'both')
RESERVED = ('fit', 'epoch', 'train_loss', 'valid_loss', 'time')  # columns of the history that are not metrics


class AvgMetric(Mean, Metric):
    """Average `func(pred, *targets)` over the samples.

    The weight of a batch is its number of samples, or what `learn.weight_func(xb, yb)` says. Raises `MetricError` for
    what is no function, and for a result that is not one number.

    >>> AvgMetric(mse).name, AvgMetric(nn.L1Loss()).name, AvgMetric(mse, name='l2').name
    ('mse', 'l1_loss', 'l2')
    """
    _name: str | None = None

    def __init__(
        self,
        func: Callable[..., Any],  # called with the predictions and targets of a batch, gives one number
        name: str | None = None,   # default: the function's name
        on: str | None = None,     # 'train', 'valid' or 'both'; None: as the Recorder says
    ) -> None:
        if not callable(func): raise MetricError(f'AvgMetric averages a function f(pred, *targets), got {func!r}.')
        self.func, self._name, self.on = func, name, _check_on(on)

    def accumulate(self, learn: Any) -> None:
        self.add(self._compute(learn.pred, learn.yb), _weight(learn))

    def _compute(self, pred: Any, yb: tuple[Any, ...]) -> Any:
        "The metric of one batch, a number or a tensor of one element."
        if isinstance(self.func, nn.Module): _follow(self.func, pred)
        try:
            with torch.no_grad(): result = self.func(*_detached(pred, yb))
            if is_number(result): return result
            raise MetricError(f'Metric `{self.name}` gave {describe(result)}, not one number: take its mean.')
        except Exception as e:
            e.add_note(_where(self.name, pred, yb))
            raise

    @property
    def name(self) -> str:
        return self._name or _func_name(self.func)


class AvgLoss(Mean, Metric):
    "Average the loss over the samples."

    def accumulate(self, learn: Any) -> None:
        loss = learn.loss
        if isinstance(loss, Tensor) and loss.dim(): loss = loss.detach().mean()
        self.add(loss, _weight(learn))

    @property
    def name(self) -> str:
        return 'loss'


class ValueMetric(Metric):
    """Report `func()`, for a number that something else computed.

    >>> ValueMetric(lambda: 0.5, 'half').value
    0.5
    """

    def __init__(
        self,
        func: Callable[[], Any],          # gives the value
        metric_name: str | None = None,   # default: the function's name
    ) -> None:
        self.func, self.metric_name = func, metric_name

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

    def __init__(
        self,
        metric: Any,              # the torchmetrics object, used as it is
        name: str | None = None,  # default: its class name in snake_case
        on: str | None = None,    # 'train', 'valid' or 'both'; None: as the Recorder says
    ) -> None:
        if not _is_torchmetric(metric): raise MetricError(f'{metric!r} has no update, compute and reset.')
        self.metric, self._name, self.on, self._updates = metric, name, _check_on(on), 0

    def reset(self) -> None:
        self.metric.reset()
        self._updates = 0

    def accumulate(self, learn: Any) -> None:
        if not self._updates: _follow(self.metric, learn.pred)
        self._update(self.metric, learn.pred, learn.yb)
        self._updates += 1

    def _try(self, pred: Any, yb: tuple[Any, ...]) -> None:
        "Update a copy."
        trial = copy.deepcopy(self.metric)
        _follow(trial, pred)
        self._update(trial, pred, yb)

    def _update(self, metric: Any, pred: Any, yb: tuple[Any, ...]) -> None:
        try:
            with torch.no_grad(): metric.update(*_detached(pred, yb))
        except Exception as e:
            e.add_note(_where(self.name, pred, yb))
            raise

    @property
    def value(self) -> Any:
        if not self._updates: return None
        res = self.metric.compute()
        return float(res) if is_number(res) else to_detach(res)

    @property
    def name(self) -> str:
        return self._name or class2attr(self.metric, 'Metric')


class _Renamed(Metric):
    "A metric under another name; all else is its own."

    def __init__(self, metric: Metric, name: str) -> None:
        self.metric, self._name, self.on = metric, name, metric.on

    def reset(self) -> None: self.metric.reset()
    def accumulate(self, learn: Any) -> None: self.metric.accumulate(learn)

    def __getattr__(self, k: str) -> Any:
        if k == 'metric': raise AttributeError(k)  # a copy in the making
        return getattr(self.metric, k)

    @property
    def value(self) -> Any: return self.metric.value

    @property
    def name(self) -> str: return self._name


def as_metrics(
    ms: Any,  # None, one metric, a list of them, or a dict name -> metric
) -> L:
    """Make a list of `Metric`s, each with a name of its own: the second `mse` becomes `mse_2`.

    A class is instantiated, a torchmetrics collection expanded into its members.

    >>> [m.name for m in as_metrics([accuracy, mse, nn.MSELoss(), {'l2': mse}, mse])]
    ['accuracy', 'mse', 'mse_loss', 'l2', 'mse_2']
    """
    seen: set[str] = set()
    metrics = L(_distinct(m, seen) for m in _expand(ms, None))
    for m in metrics: check_column(m.name)
    return metrics


def check_column(name: str) -> None:
    "Raise `MetricError` for a name that the history uses itself."
    if name in RESERVED: raise MetricError(f'`{name}` is a column of the history already: give it another name.')


def _expand(m: Any, name: str | None) -> Iterable[Metric]:
    "The metrics that `m` stands for."
    if m is None: return
    if isinstance(m, type): m = _instance(m)
    if isinstance(m, Metric): yield m if name is None or name == m.name else _Renamed(m, name)
    elif isinstance(m, Mapping) or (_is_torchmetric(m) and hasattr(m, 'items')):
        for k, v in m.items(): yield from _expand(v, f'{name}_{k}' if name else str(k))
    elif _is_torchmetric(m): yield TorchMetric(m, name)
    elif m is rmse: yield from _expand(RMSE(), name)
    elif callable(m): yield AvgMetric(m, name)
    elif isinstance(m, Iterable) and not isinstance(m, (str, bytes, Tensor)):
        for o in m: yield from _expand(o, name)
    else: raise MetricError(f'{m!r} is no metric: give a function f(pred, *targets), a torchmetrics object or Metric.')


def _distinct(m: Metric, seen: set[str]) -> Metric:
    name, i = m.name, 1
    while name in seen: name, i = f'{m.name}_{i+1}', i+1
    seen.add(name)
    return m if name == m.name else _Renamed(m, name)


def _instance(cls: type) -> Any:
    try: return cls()
    except Exception as e:
        raise MetricError(f'Metric {cls.__name__} cannot be made without arguments ({e}): give an instance.') from e


def dry_run(
    metric: Metric,        # what will be computed
    pred: Any,             # the predictions of a batch
    yb: tuple[Any, ...],   # its targets
) -> None:
    """Check that `metric` can be computed from such a batch, without changing its state.

    A metric with its own `accumulate` is not tried. Raises `MetricError`, with what the metric raised as its cause."""
    while isinstance(metric, _Renamed): metric = metric.metric
    own = type(metric).accumulate
    try:
        if isinstance(metric, AvgMetric) and own is AvgMetric.accumulate: metric._compute(pred, yb)
        elif isinstance(metric, TorchMetric) and own is TorchMetric.accumulate: metric._try(pred, yb)
    except (CancelException, torch.OutOfMemoryError): raise
    except Exception as e:
        raise MetricError(f'{_where(metric.name, pred, yb)} It raised {type(e).__name__}: {e}') from e


def measures_batches(metric: Metric) -> bool:
    "Tell a metric that accumulates over batches from one whose value comes from elsewhere."
    while isinstance(metric, _Renamed): metric = metric.metric
    return type(metric).accumulate is not Metric.accumulate


def accuracy(
    pred: Tensor,    # scores, classes along `axis`
    targ: Tensor,    # class numbers, of pred's shape without `axis`
    axis: int = -1,  # where the classes are; 1 for images (B, C, H, W)
) -> Tensor:
    """Return the share of targets whose class scores highest.

    Raises `MetricError` when there is not one target for each prediction.

    >>> accuracy(torch.tensor([[.1, .9], [.8, .2]]), torch.tensor([1, 1]))
    tensor(0.5000)
    """
    best, targ = _flat('accuracy', pred.argmax(dim=axis), targ)
    return (best == targ).float().mean()


def error_rate(
    pred: Tensor,    # scores, classes along `axis`
    targ: Tensor,    # class numbers
    axis: int = -1,  # where the classes are
) -> Tensor:
    """Return 1 - `accuracy`.

    >>> error_rate(torch.tensor([[.1, .9], [.8, .2], [.7, .3], [.6, .4]]), torch.tensor([1, 0, 0, 1]))
    tensor(0.2500)
    """
    return 1 - accuracy(pred, targ, axis=axis)


def mse(pred: Tensor, targ: Tensor) -> Tensor:
    """Return the mean squared error. Raises `MetricError` when the sizes differ: nothing is broadcast.

    >>> mse(torch.tensor([1., 2.]), torch.tensor([[1.], [4.]]))
    tensor(2.)
    """
    pred, targ = _flat('mse', pred, targ)
    return (pred - targ).square().mean()


def mae(pred: Tensor, targ: Tensor) -> Tensor:
    """Return the mean absolute error. Raises `MetricError` when the sizes differ: nothing is broadcast.

    >>> mae(torch.tensor([1., 2.]), torch.tensor([1., 4.]))
    tensor(1.)
    """
    pred, targ = _flat('mae', pred, targ)
    return (pred - targ).abs().mean()


def rmse(pred: Tensor, targ: Tensor) -> Tensor:
    """Return the root of the mean squared error; as a metric that of the whole set (`RMSE`), no mean over batches.

    Raises `MetricError` when the sizes differ: nothing is broadcast.

    >>> rmse(torch.tensor([1., 2.]), torch.tensor([1., 2. + 2**0.5]))
    tensor(1.)
    """
    return mse(pred, targ).sqrt()


class RMSE(AvgMetric):
    "The root of the mean squared error of the whole set."

    def __init__(self, on: str | None = None) -> None:
        super().__init__(mse, 'rmse', on)

    @property
    def value(self) -> float | None:
        mean = super().value
        return None if mean is None else mean**0.5


def _weight(learn: Any) -> Any:
    "How much this batch counts."
    if (func := getattr(learn, 'weight_func', None)) is not None: return func(learn.xb, learn.yb)
    return find_bs(learn.yb if len(learn.yb) else learn.xb)


def _follow(module: Any, pred: Any) -> None:
    "Move what holds tensors of its own to the device of the predictions."
    if isinstance(pred, Tensor) and hasattr(module, 'to'): module.to(pred.device)


def _detached(pred: Any, yb: tuple[Any, ...]) -> tuple[Any, ...]:
    "The arguments of a metric."
    return to_detach((pred, *yb), cpu=False)


def _where(name: str, pred: Any, yb: tuple[Any, ...]) -> str:
    return (f'Metric `{name}` cannot be computed from predictions {describe(pred)} and targets {describe(yb)}. It gets '
            '(pred, *targets) and has to give one number: wrap it in a function that brings these into its form.')


def _flat(name: str, pred: Tensor, targ: Tensor) -> tuple[Tensor, Tensor]:
    "Both flattened; never broadcast, which would compare everything with everything."
    if pred.numel() == targ.numel(): return pred.reshape(-1), targ.reshape(-1)
    raise MetricError(f'{name}: {tuple(pred.shape)} predicted values do not fit targets of shape {tuple(targ.shape)}.')


def _func_name(func: Any) -> str:
    while isinstance(func, partial): func = func.func
    return getattr(func, '__name__', None) or class2attr(func, 'Metric')


def _is_torchmetric(m: Any) -> bool:
    return all(callable(getattr(m, k, None)) for k in ('update', 'compute', 'reset'))


def _check_on(on: str | None) -> str | None:
    if on is None or on in PHASES: return on
    raise MetricError(f"A metric is on 'train', 'valid' or 'both', got {on!r}.{did_you_mean(str(on), PHASES)}")
