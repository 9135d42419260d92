# SPDX-License-Identifier: Apache-2.0
"""`Metric`, the base class of metrics, `Mean`, a weighted mean on the device, and the smoothed training loss."""

from __future__ import annotations

from collections.abc import Mapping
from math import fsum, nan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from learnkit.core.activation import find_scores
from learnkit.core.batch import describe
from learnkit.core.device import has_streams
from learnkit.core.errors import MetricError
from learnkit.core.model import snake_case
from learnkit.metrics.merge import Accumulates

if TYPE_CHECKING:
    from learnkit.learner import Learner

SEND_EVERY = 64  # losses per copy to the host


def measured_pred(learn: Learner) -> Any:
    "Return what metrics are computed from: the predictions, or the scores that the loss computes from features."
    return find_scores(getattr(learn, 'loss_func', None), learn.pred)


class Metric(Accumulates):
    """Compute a number from the batches of one pass: override `reset`, `accumulate` and `value`.

    `value` may also be a dict of numbers. Each number becomes a column named by its key, or `<metric>_<key>` if the
    name is taken.

    A checkpoint within an epoch saves the accumulated state of metrics of training batches: all attributes that are
    plain values (tensors, numbers, strings, None, and lists, tuples and dicts of these) or metrics. Attributes named
    like a constructor argument are configuration and are not saved. Callables are not saved. A metric with any other
    attribute (a set, an array) is not saved, and a resume warns. Such a metric overrides `state_dict()`, which returns
    plain values, and `load_state_dict(sd)`.

    >>> class Batches(Metric):
    ...     def reset(self): self.n = 0
    ...     def accumulate(self, learn): self.n += 1
    ...     @property
    ...     def value(self): return self.n
    >>> Batches().name
    'batches'
    """

    on: str | None = None  # 'train', 'valid' or 'both'; None: the Recorder's setting
    _name: str | None = None  # name of the column; None: the class name in snake_case

    @override
    def reset(self) -> None:
        "Clear the accumulated state."

    def accumulate(self, learn: Learner) -> None:
        "Add the current batch: `learn.xb`, `learn.yb`, `learn.pred` and `learn.loss`."

    @property
    def value(self) -> Any:
        "The metric of all batches since `reset`; None before the first."
        raise NotImplementedError(f'{type(self).__name__} has no `value`: define that property.')

    @property
    def name(self) -> str:
        "Name of the column; by default the class name in snake_case, without a trailing 'Metric'."
        return self._name or snake_case(type(self).__name__, 'Metric')

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self.name})'


class Mean(Accumulates):
    """Compute a weighted mean on the device of the numbers, in float64 if the device supports it.

    >>> m = Mean()
    >>> m.add(torch.tensor(1.), weight=3)
    >>> m.add(5.)
    >>> m.value
    2.0
    """

    sum_reduced = ('total', 'count')
    total: Any = 0.0  # weighted sum: a float, or a 0-dim tensor on the device
    count: Any = 0  # sum of the weights: a number, or a 0-dim tensor on the device

    @override
    def reset(self) -> None:
        self.total = 0.0
        self.count = 0

    def add(
        self,
        value: Any,  # number, or tensor or array of one element
        weight: Any = 1,  # weight of the value, such as a number of samples
    ) -> None:
        "Add `value` without a transfer; ignore it if the weight is 0 (the mean of an empty batch is NaN)."
        x = _to_scalar(value)
        w = weight if isinstance(weight, int) else _to_scalar(weight)
        if isinstance(w, Tensor):
            x = torch.where(w == 0, w, x)
        elif w == 0:
            return
        self.total = self.total + x * w
        self.count = self.count + w

    @property
    def value(self) -> float | None:
        "The mean, copied to the host in one transfer; None before the first value."
        total = self.total
        count = self.count
        if isinstance(count, Tensor):
            total, count = torch.stack([torch.as_tensor(total).to(count), count]).tolist()
        return float(total) / count if count else None


class AvgSmoothLoss(Metric):
    """Smooth the loss exponentially with bias correction: `v_t/(1 - beta**t)` of `v_t = beta*v_{t-1} + (1-beta)*x_t`.

    A step appends one number to a list. Losses on a device are copied to the host asynchronously in groups. `latest`
    returns the newest smoothed loss on the host; `smooth`, `val` and `value` wait for all losses. A step of weight 0
    does not change the smoothed loss. The checkpointed state is every loss and its weight.

    >>> from types import SimpleNamespace
    >>> s = AvgSmoothLoss(beta=0.5)
    >>> for x, n in ((1., 1), (4., 2)): s.accumulate(SimpleNamespace(loss=torch.tensor(x)), weight=n)
    >>> s.smooth, s.mean_since(0)
    ([1.0, 3.0], 3.0)
    """

    def __init__(
        self,
        beta: float = 0.98,  # decay of the running mean
        deferred: bool = False,  # whether to group transfers on the CPU too
    ) -> None:
        if not 0 <= beta < 1:
            raise MetricError(f'AvgSmoothLoss: beta is a share from 0 to below 1, got {beta!r}.')
        self.beta = beta
        self.deferred = deferred
        self.reset()

    @override
    def reset(self) -> None:
        self._steps = LossTransfer(self.deferred)
        self._forget_smoothed()

    def _forget_smoothed(self) -> None:
        self._smooth: list[float] = []  # smoothed losses, computed when requested
        self._mean = 0.0  # v_t
        self._n_counted = 0  # t: steps of nonzero weight

    @override
    def accumulate(
        self,
        learn: Learner,
        weight: Any = 1,  # weight of the loss in `mean_since`
    ) -> None:
        self._steps.add(learn.loss, weight)

    def _finish(self) -> None:
        "Wait for all losses and smooth them."
        self._steps.wait()
        self._catch_up()

    def _catch_up(self) -> None:
        n = len(self._smooth)
        for x, weight in zip(self._steps.losses[n:], self._steps.weights[n:], strict=True):
            if weight:
                self._mean = self.beta * self._mean + (1 - self.beta) * x
                self._n_counted += 1
            correction = 1 - self.beta**self._n_counted
            self._smooth.append(self._mean / correction if self._n_counted else x)

    @property
    def count(self) -> int:
        "Number of steps, including losses not yet on the host."
        return len(self._steps)

    @property
    def raw(self) -> list[float]:
        "The unsmoothed losses on the host; never waits."
        self._steps.receive()
        return self._steps.losses

    @property
    def latest(self) -> float | None:
        "The newest smoothed loss on the host, or None; never waits."
        self._steps.receive(send=True)
        self._catch_up()
        return self._smooth[-1] if self._smooth else None

    @property
    def arrived(self) -> list[float]:
        "The smoothed losses on the host; never waits."
        return self._smooth if self.latest is not None else []

    @property
    def smooth(self) -> list[float]:
        "The smoothed loss of every step."
        self._finish()
        return self._smooth

    @property
    def val(self) -> Tensor:
        "The running mean before bias correction."
        self._finish()
        return torch.tensor(self._mean, dtype=torch.float32)

    @property
    @override
    def value(self) -> Tensor | None:
        "The smoothed loss of the last step."
        return torch.tensor(self.smooth[-1], dtype=torch.float32) if self.count else None

    def since(self, n: int) -> tuple[list[float], list[float]]:
        "Return the unsmoothed losses of the steps after the first `n`, and their weights."
        self._finish()
        weights = [float(weight) for weight in self._steps.weights[n:]]
        return self._steps.losses[n:], weights

    def mean_since(
        self,
        n: int,  # number of steps to skip
        reduction: str = 'mean',  # reduction of the loss; 'sum' divides the sum of losses by the weights
    ) -> float:
        "Return the weighted mean of the losses after `n` steps; nan if all weights are 0."
        counted = [(x, w) for x, w in zip(*self.since(n), strict=True) if w]
        if not counted:
            return nan
        total = add_exactly([x if reduction == 'sum' else x * w for x, w in counted])
        return total / add_exactly([w for _, w in counted])

    def replace(
        self,
        n: int,  # number of steps to keep
        losses: list[float],  # losses of all steps after these
        weights: list[float] | None = None,  # weights of the losses; None: 1
    ) -> None:
        "Replace the losses after `n` steps, by the losses reduced over all ranks."
        self._finish()
        self._steps.losses[n:] = losses
        self._steps.weights[n:] = [1.0] * len(losses) if weights is None else weights
        self._forget_smoothed()

    @override
    def state_dict(self) -> dict[str, Any]:
        losses, weights = self.since(0)
        columns = {'raw': losses, 'weights': weights}
        tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in columns.items()}
        return {'beta': self.beta, **tensors}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self.reset()
        self.beta = sd['beta']
        self.replace(0, sd['raw'].tolist(), sd['weights'].tolist())


class LossTransfer:
    "Losses and weights of all steps, copied from a device to the host in groups."

    def __init__(self, deferred: bool = False) -> None:
        self.losses: list[float] = []
        self.weights: list[float] = []
        self._pending: list[tuple[Tensor, Any]] = []  # losses on the device
        self._copy: _Copy | None = None  # copy in flight
        self._defer = deferred  # set by the first loss on a device, to keep the order of all losses

    def __len__(self) -> int:
        in_flight = len(self._copy.weights) if self._copy is not None else 0
        return len(self.losses) + in_flight + len(self._pending)

    def add(
        self,
        loss: Tensor,
        weight: Any,  # number, or tensor on the same device
    ) -> None:
        "Add the loss of one step, without waiting for a device."
        if self._defer or not loss.is_cpu:
            self._queue(loss, weight)
        else:
            self.losses.append(loss.mean().item() if loss.dim() else loss.item())
            self.weights.append(weight.item() if isinstance(weight, Tensor) else weight)

    def _queue(self, loss: Tensor, weight: Any) -> None:
        if self._pending and self._pending[0][0].device != loss.device:
            self._send()
        self._defer = True
        self._pending.append((loss.detach().mean() if loss.dim() else loss.detach(), weight))
        if len(self._pending) >= SEND_EVERY:
            self._send()

    def _send(self) -> None:
        "Start to copy the pending losses; the copy before has had `SEND_EVERY` steps of time."
        self._land()
        self._copy = _Copy(self._pending)
        self._pending = []

    def _land(self) -> None:
        "Wait for the copy in flight, and append its losses."
        if self._copy is None:
            return
        losses, weights = self._copy.wait()
        self._copy = None
        self.losses += losses
        self.weights += weights

    def receive(
        self,
        send: bool = False,  # also start to copy pending losses if no copy is in flight
    ) -> None:
        "Append the losses of a finished copy; never waits."
        if self._copy is not None and self._copy.arrived:
            self._land()
        if send and self._pending and self._copy is None:
            self._send()

    def wait(self) -> None:
        "Wait for all losses."
        if self._pending:
            self._send()
        self._land()


class _Copy:
    "Asynchronous copy of losses to the host, together with their weights."

    def __init__(self, steps: list[tuple[Tensor, Any]]) -> None:
        losses, self.weights = map(list, zip(*steps, strict=True))
        numbers = torch.stack(losses)
        weights = [weight for weight in self.weights if isinstance(weight, Tensor)]
        if weights:
            numbers = torch.cat([widen(numbers), widen(torch.stack(weights).flatten())])
        device = numbers.device
        # other devices copy synchronously, once per `SEND_EVERY` losses
        ahead = has_streams(device)
        self.host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=ahead)
        self.host.copy_(numbers, non_blocking=ahead)
        self.event = torch.accelerator.current_stream(device).record_event() if ahead else None

    @property
    def arrived(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> tuple[list[float], list[float]]:
        if self.event is not None:
            self.event.synchronize()
        numbers = iter(self.host.tolist())
        losses = [next(numbers) for _ in self.weights]
        weights = [next(numbers) if isinstance(w, Tensor) else w for w in self.weights]
        return losses, weights


def merge_losses(
    losses: list[list[float]],  # losses of each rank by step
    weights: list[list[float]],  # weights of the losses
    reduction: str = 'mean',  # reduction of the loss; 'sum' adds losses of nonzero weight
) -> tuple[list[float], list[float]]:
    """Return the weighted mean over ranks of each step's loss, and the sum of its weights.

    Lists of different length are aligned at the end. A step with weight 0 on every rank (of a run with another number
    of ranks) gets the unweighted mean.

    >>> merge_losses([[1., 2.], [3.]], [[1., 3.], [1.]])
    ([1.0, 2.25], [1.0, 4.0])
    """
    x = _align(losses)
    w = _align(weights)
    total = w.sum(0)
    if reduction == 'sum':
        merged = torch.where(w == 0, 0, x).sum(0)
    else:
        merged = torch.where(total == 0, x.mean(0), torch.where(w == 0, 0, x * w).sum(0) / total)
    return merged.tolist(), total.tolist()


def add_exactly(numbers: list[float]) -> float:
    """Return the sum of numbers, rounded once; NaN for opposite infinities, which `fsum` refuses to add.

    >>> add_exactly([0.1] * 10), add_exactly([float('inf'), float('-inf')])
    (1.0, nan)
    """
    try:
        return fsum(numbers)
    except (ValueError, OverflowError):
        return sum(numbers)


def flatten_mapping(
    values: Mapping[Any, Any],  # values or nested mappings by name
    prefix: str = '',  # prefix of all names
) -> dict[str, Any]:
    """Flatten nested mappings, joining names by `_`.

    >>> flatten_mapping({'all': 1, 'iou': {'cat': 2, 3: 4}})
    {'all': 1, 'iou_cat': 2, 'iou_3': 4}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f'{prefix}{key}'
        flat |= flatten_mapping(value, f'{name}_') if isinstance(value, Mapping) else {name: value}
    return flat


def _align(rows: list[list[float]]) -> Tensor:
    "Stack lists aligned at the end, with zeros at the start of shorter lists."
    n = max(map(len, rows), default=0)
    return torch.tensor([[0.0] * (n - len(row)) + row for row in rows], dtype=torch.float64)


def is_scalar(value: Any) -> bool:
    "Return True for a number, or a tensor or array of one element."
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) or getattr(value, 'size', None) == 1


def _to_scalar(value: Any) -> Any:
    "Convert a number to a float, or a tensor on a device to a 0-dim float64 tensor."
    if type(value) is Tensor and value.is_cpu and value.numel() == 1:
        return float(value.item())
    if not is_scalar(value):
        raise MetricError(f'A mean is taken of numbers, got {describe(value)}: reduce it to one.')
    if not isinstance(value, Tensor):
        return float(value.item() if hasattr(value, 'item') else value)
    value = value.detach().reshape(())
    return value.to(torch.float32 if value.device.type == 'mps' else torch.float64)


def flatten_pair(
    name: str,  # name of the metric in errors
    pred: Tensor,  # predictions of any shape
    targ: Tensor,  # targets of any shape with the same number of elements
) -> tuple[Tensor, Tensor]:
    """Flatten predictions and targets.

    Raises `MetricError` for different sizes. Broadcasting would compare every prediction with every target.

    >>> flatten_pair('mse', torch.zeros(2, 1), torch.ones(2))
    (tensor([0., 0.]), tensor([1., 1.]))
    """
    if pred.numel() == targ.numel():
        return pred.reshape(-1), targ.reshape(-1)
    raise MetricError(
        f'{name}: {tuple(pred.shape)} predicted values do not fit targets of shape {tuple(targ.shape)}: pass one '
        'target for each predicted value. One-hot targets become class numbers by `targ.argmax(-1)`.'
    )


def widen(t: Tensor) -> Tensor:
    "Convert a tensor to float64, or to float32 on a device without float64."
    return t.to(torch.float32 if t.device.type == 'mps' else torch.float64)
