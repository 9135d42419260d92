"""What metrics are made of: the `Metric` protocol, a mean that stays on its device, and the smoothed training loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import fsum, nan
from typing import Any

import torch
from fastcore.basics import class2attr
from torch import Tensor

from learnkit.core.batch import describe
from learnkit.core.errors import MetricError
from learnkit.metrics.merge import Accumulates

__all__ = [
    'Metric',
    'Mean',
    'AvgSmoothLoss',
    'flattened',
    'is_number',
    'merged_losses',
    'merged_weights',
    'paired',
    'widened',
]

SEND_EVERY = 64  # losses that go to the host in one copy
MAX_IN_FLIGHT = 2  # copies the host may be behind


class Metric(Accumulates):
    """Compute a number from the batches of one pass: override `reset`, `accumulate` and `value`.

    A `value` may also be a dict of numbers by name: each becomes a column of that name, or of `<metric>_<name>` where
    another column has the name already.

    A checkpoint in the middle of an epoch saves what a metric of training batches has accumulated. That is every
    attribute that is plain (tensors, numbers, texts, None, and lists, tuples and dicts of them) or a metric itself;
    those named like an argument of the constructor are taken for configuration, and whatever can be called for a tool.
    Where an attribute is of another kind (a set, an array) the metric is left out, and a resume says so: override
    `state_dict()` and `load_state_dict(sd)`, the one to return plain values, the other to go on from them.

    >>> class Batches(Metric):
    ...     def reset(self): self.n = 0
    ...     def accumulate(self, learn): self.n += 1
    ...     @property
    ...     def value(self): return self.n
    >>> Batches().name
    'batches'
    """

    on: str | None = None  # 'train', 'valid' or 'both'; None: as the Recorder says

    def reset(self) -> None:
        "Forget the batches seen so far."

    def accumulate(self, learn: Any) -> None:
        "Take in the batch that `learn` holds: its `xb`, `yb`, `pred` and `loss`."

    @property
    def value(self) -> Any:
        "The metric of all batches since `reset`; None before the first."
        raise NotImplementedError(
            f'{type(self).__name__} is a Metric without a `value`: define that property.'
        )

    @property
    def name(self) -> str:
        "The class name in snake_case, without a trailing 'Metric'."
        return class2attr(self, 'Metric')

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self.name}{f", on={self.on!r}" if self.on else ""})'


class Mean(Accumulates):
    """Average numbers on their device, with weights; in float64 where the device has it.

    >>> m = Mean()
    >>> m.add(torch.tensor(1.), weight=3)
    >>> m.add(5.)
    >>> m.value
    2.0
    """

    summed = ('total', 'count')
    total: Any = 0.0  # the weighted sum: a float, or a 0-dim tensor on the device
    count: Any = 0  # the sum of the weights, likewise

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def add(
        self,
        value: Any,  # a number, or a tensor or array of one element
        weight: Any = 1,  # how much it counts: its number of samples, for one
    ) -> None:
        "Take in `value`; no transfer, and nothing at all when the weight is 0 (the mean of an empty batch is NaN)."
        x, w = _wide(value), weight if isinstance(weight, int) else _wide(weight)
        if isinstance(w, Tensor):
            x = torch.where(w == 0, w, x)
        elif w == 0:
            return
        self.total = self.total + x * w
        self.count = self.count + w

    @property
    def value(self) -> float | None:
        "The mean, brought to the host in one transfer; None when nothing was added."
        total, count = self.total, self.count
        if isinstance(count, Tensor):
            total, count = torch.stack([torch.as_tensor(total).to(count), count]).tolist()
        return float(total) / count if count else None


class AvgSmoothLoss(Metric):
    """Smooth the loss exponentially, without bias: `v_t = beta*v_{t-1} + (1-beta)*x_t`, given as `v_t/(1 - beta**t)`.

    A step costs one number appended to a list. On a device the losses wait there and travel in groups while the
    training goes on; `latest` shows how far they have come, and `smooth`, `val` and `value` wait for the rest. A step
    with a weight of 0, in which nothing counts, leaves the smoothed loss as it is. Its state, for a checkpoint, is
    every loss, its weight and its smoothed value.

    >>> from types import SimpleNamespace
    >>> s = AvgSmoothLoss(beta=0.5)
    >>> for x, n in ((1., 1), (4., 2)): s.accumulate(SimpleNamespace(loss=torch.tensor(x)), weight=n)
    >>> s.smooth, s.mean_since(0)
    ([1.0, 3.0], 3.0)
    """

    def __init__(
        self,
        beta: float = 0.98,  # the share of the past in the running mean
        deferred: bool = False,  # group the transfers on the CPU too
    ) -> None:
        if not 0 <= beta < 1:
            raise MetricError(f'AvgSmoothLoss: beta is a share from 0 to below 1, got {beta!r}.')
        self.beta, self.deferred = beta, deferred
        self.reset()

    def reset(self) -> None:
        self._steps = Arrivals(self.deferred)
        self._smooth: list[
            float
        ] = []  # of the losses that have arrived, as far as anyone has asked
        # v_t, and t: the steps so far in which something counts
        self._mean, self._n_counted = 0.0, 0
        self._mark = 0, 0.0, 0  # a step, with v_t and t there
        # losses, weights and smoothed losses, as a checkpoint has them
        self._saved = _Column(), _Column(), _Column()

    def accumulate(
        self,
        learn: Any,
        weight: Any = 1,  # how much this loss counts in `mean_since`; 0: nothing of it does
    ) -> None:
        self._steps.add(learn.loss, weight)

    def _finish(self) -> None:
        "Wait for every loss accumulated so far and smooth it."
        self._steps.wait()
        self._catch_up()

    def _catch_up(self) -> None:
        n = len(self._smooth)
        for x, weight in zip(self._steps.losses[n:], self._steps.weights[n:], strict=True):
            self._advance(x, weight)

    def _advance(self, x: float, weight: float) -> None:
        if weight:
            self._mean = self.beta * self._mean + (1 - self.beta) * x
            self._n_counted += 1
        self._smooth.append(self._mean / (1 - self.beta**self._n_counted) if self._n_counted else x)

    @property
    def count(self) -> int:
        "Steps accumulated, also those that have not arrived."
        return len(self._steps)

    @property
    def raw(self) -> list[float]:
        "The losses that have arrived, as they were; never waits."
        self._steps.look()
        return self._steps.losses

    @property
    def latest(self) -> float | None:
        "The smoothed loss of the last step that has arrived, None before the first; never waits."
        self._steps.look(asks=True)
        self._catch_up()
        return self._smooth[-1] if self._smooth else None

    @property
    def arrived(self) -> list[float]:
        "The smoothed losses of the steps that have arrived; never waits."
        return self._smooth if self.latest is not None else []

    @property
    def smooth(self) -> list[float]:
        "The smoothed loss of every step."
        self._finish()
        return self._smooth

    @property
    def val(self) -> Tensor:
        "The running mean before its bias is taken out."
        self._finish()
        return torch.tensor(self._mean, dtype=torch.float32)

    @property
    def value(self) -> Tensor | None:
        "The smoothed loss of the last step."
        return torch.tensor(self.smooth[-1], dtype=torch.float32) if self.count else None

    def mean_since(
        self,
        n: int,  # a number of steps, up to all
    ) -> float:
        "Return the mean of the losses after `n` steps by their weights; nan where nothing counts."
        self._finish()
        counted = [
            (x, w)
            for x, w in zip(self._steps.losses[n:], self._steps.weights[n:], strict=True)
            if w
        ]
        return fsum(x * w for x, w in counted) / fsum(w for _, w in counted) if counted else nan

    def mark(
        self,
        n: int,  # a number of steps, up to all
    ) -> None:
        "Remember the state after `n` steps, to which `replace` goes back."
        self._finish()
        now = self._smooth, self._mean, self._n_counted
        if n < len(self._smooth):
            self._smooth, self._mean, self._n_counted = [], 0.0, 0
            for x, weight in zip(self._steps.losses[:n], self._steps.weights[:n], strict=True):
                self._advance(x, weight)
        self._mark = n, self._mean, self._n_counted
        self._smooth, self._mean, self._n_counted = now

    @property
    def since_mark(self) -> list[float]:
        "The losses of the steps after the mark, as they were."
        self._finish()
        return self._steps.losses[self._mark[0] :]

    @property
    def weights_since_mark(self) -> list[float]:
        "How much the losses of the steps after the mark count."
        self._finish()
        return [float(weight) for weight in self._steps.weights[self._mark[0] :]]

    def replace(
        self,
        losses: list[float],  # of all steps after the mark
        weights: list[float] | None = None,  # None: all count alike
    ) -> None:
        "Replace the losses accumulated since the mark by those of all processes."
        self._finish()
        n, self._mean, self._n_counted = self._mark
        self._steps.losses[n:], self._smooth[n:] = losses, []
        self._steps.weights[n:] = [1.0] * len(losses) if weights is None else weights
        for column in self._saved:
            column.cut(n)
        self._catch_up()

    def state_dict(self) -> dict[str, Any]:
        self._finish()
        columns = self._steps.losses, self._steps.weights, self._smooth
        raw, weights, smooth = (
            column.of(xs) for column, xs in zip(self._saved, columns, strict=True)
        )
        return {
            'beta': self.beta,
            'mean': self._mean,
            'raw': raw,
            'weights': weights,
            'smooth': smooth,
        }

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self.reset()
        self.beta, self._mean = sd['beta'], sd['mean']
        self._steps.losses, self._smooth = sd['raw'].tolist(), sd['smooth'].tolist()
        weights = sd.get('weights')  # checkpoints of older versions do not have them
        self._steps.weights = [1.0] * len(self._smooth) if weights is None else weights.tolist()
        self._n_counted = sum(map(bool, self._steps.weights))


class Arrivals:
    "The loss and the weight of every step; what is on a device travels to the host in groups."

    def __init__(self, deferred: bool = False) -> None:
        self.losses: list[float] = []
        self.weights: list[float] = []
        self._pending: list[tuple[Tensor, Any]] = []  # on the device
        self._flying: deque[_Copy] = deque()  # on the way
        self._defer = deferred  # once a loss came from a device, all wait in line behind it

    def __len__(self) -> int:
        return len(self.losses) + sum(len(c) for c in self._flying) + len(self._pending)

    def add(
        self,
        loss: Tensor,
        weight: Any,  # a number, or a tensor on the same device
    ) -> None:
        "Take in one step, without a transfer from a device."
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
        "Start the copy of what is pending."
        self._flying.append(_Copy(self._pending))
        self._pending = []
        self._land(MAX_IN_FLIGHT)

    def _land(self, allowed: int) -> None:
        "Take over the copies that have arrived; wait only while more than `allowed` are on the way."
        while self._flying and (len(self._flying) > allowed or self._flying[0].arrived):
            losses, weights = self._flying.popleft().wait()
            self.losses += losses
            self.weights += weights

    def look(
        self,
        asks: bool = False,  # send what waits, so that the next look gets something newer
    ) -> None:
        "Take over what has arrived; never waits."
        self._land(MAX_IN_FLIGHT)
        if asks and self._pending and not self._flying:
            self._send()

    def wait(self) -> None:
        "Wait for all of it."
        if self._pending:
            self._send()
        self._land(0)


class _Column:
    "A growing list as a float64 tensor, to which only what is new is added."

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.float64)

    def of(self, xs: list[float]) -> Tensor:
        if new := xs[len(self.tensor) :]:
            self.tensor = torch.cat([self.tensor, torch.tensor(new, dtype=torch.float64)])
        return self.tensor

    def cut(self, n: int) -> None:
        self.tensor = self.tensor[:n]


class _Copy:
    "Losses on their way to the host, and their weights: with them where these are on the device too."

    def __init__(self, steps: list[tuple[Tensor, Any]]) -> None:
        losses, self.weights = (
            torch.stack([loss for loss, _ in steps]),
            [weight for _, weight in steps],
        )
        numbers, self.n = losses, len(steps)
        if any(isinstance(weight, Tensor) for weight in self.weights):
            own = [
                torch.as_tensor(weight, device=losses.device).reshape(()) for weight in self.weights
            ]
            numbers, self.weights = torch.cat([widened(losses), widened(torch.stack(own))]), []
        on_cuda = numbers.is_cuda  # elsewhere the copy is waited for, once in `SEND_EVERY` losses
        self.host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=on_cuda)
        self.host.copy_(numbers, non_blocking=on_cuda)
        self.event = torch.cuda.current_stream(numbers.device).record_event() if on_cuda else None

    def __len__(self) -> int:
        return self.n

    @property
    def arrived(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> tuple[list[float], list[float]]:
        if self.event is not None:
            self.event.synchronize()
        numbers = self.host.tolist()
        return numbers[: self.n], self.weights or numbers[self.n :]


def merged_losses(
    losses: list[list[float]],  # of each process, by step
    weights: list[list[float]],  # how much each of them counts there
    reduction: str = 'mean',  # how the loss reduces a batch; 'sum' adds up what counts at all
) -> list[float]:
    """Return the loss of each step over the samples of all processes; the last steps belong together.

    A step in which none counts (of a run in another number of processes) keeps the mean of what they have.

    >>> merged_losses([[1., 2.], [3.]], [[1., 3.], [1.]])
    [1.0, 2.25]
    """
    n = max(map(len, losses), default=0)
    padded = ([[0.0] * (n - len(row)) + row for row in rows] for rows in (losses, weights))
    x, w = (torch.tensor(rows, dtype=torch.float64) for rows in padded)
    if reduction == 'sum':
        return torch.where(w == 0, 0, x).sum(0).tolist()
    return torch.where(
        w.sum(0) == 0, x.mean(0), torch.where(w == 0, 0, x * w).sum(0) / w.sum(0)
    ).tolist()


def flattened(
    values: Mapping[Any, Any],  # values by name, of which some may be mappings again
    prefix: str = '',
) -> dict[str, Any]:
    """Return values by name, with names of inner mappings joined by `_`.

    >>> flattened({'all': 1, 'iou': {'cat': 2, 3: 4}})
    {'all': 1, 'iou_cat': 2, 'iou_3': 4}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f'{prefix}{key}'
        flat |= flattened(value, f'{name}_') if isinstance(value, Mapping) else {name: value}
    return flat


def merged_weights(
    weights: list[list[float]],  # of each process, by step
) -> list[float]:
    """Return how much each step counts in all processes; the last steps belong together.

    >>> merged_weights([[1., 3.], [1.]])
    [1.0, 4.0]
    """
    n = max(map(len, weights), default=0)
    padded = ([0.0] * (n - len(row)) + row for row in weights)
    return [fsum(step) for step in zip(*padded, strict=True)]


def is_number(value: Any) -> bool:
    "A number, or a tensor or array of one element?"
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) or getattr(value, 'size', None) == 1


def _wide(value: Any) -> Any:
    "One number as a float, or, from a device, as a 0-dim float64 tensor that stays there."
    if type(value) is Tensor and value.is_cpu and value.numel() == 1:
        return float(value.item())
    if not is_number(value):
        raise MetricError(f'A mean is taken of numbers, got {describe(value)}: reduce it to one.')
    if not isinstance(value, Tensor):
        return float(value.item() if hasattr(value, 'item') else value)
    value = value.detach().reshape(())
    return value.to(torch.float32 if value.device.type == 'mps' else torch.float64)


def paired(
    name: str,  # the metric's, for the message
    pred: Tensor,  # any shape
    targ: Tensor,  # any shape of as many elements
) -> tuple[Tensor, Tensor]:
    """Return both flattened.

    Raises `MetricError` where the sizes differ: nothing is broadcast, which would compare everything with everything.

    >>> paired('mse', torch.zeros(2, 1), torch.ones(2))
    (tensor([0., 0.]), tensor([1., 1.]))
    """
    if pred.numel() == targ.numel():
        return pred.reshape(-1), targ.reshape(-1)
    raise MetricError(
        f'{name}: {tuple(pred.shape)} predicted values do not fit targets of shape {tuple(targ.shape)}: '
        f'{_fix(pred, targ)}'
    )


def _fix(pred: Tensor, targ: Tensor) -> str:
    one = 'give one target for each predicted value.'
    if targ.is_floating_point():
        return one
    if targ.numel() * pred.shape[-1] == pred.numel():
        return f'{one} If these are class numbers, `accuracy` takes them, or this `F.one_hot(targ, {pred.shape[-1]})`.'
    if pred.numel() and targ.numel() % pred.numel() == 0 and targ.ndim > pred.ndim:
        return f'{one} If they are one-hot, give class numbers, `targ.argmax(-1)`.'
    return f'{one} Are the classes along another `axis`?'


def widened(t: Tensor) -> Tensor:
    "Return a tensor in float64, or in float32 on a device that has none."
    return t.to(torch.float32 if t.device.type == 'mps' else torch.float64)
