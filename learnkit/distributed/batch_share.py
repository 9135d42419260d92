"""A rank's share of a training batch: samples, weight and tokens, with sums over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learnkit.distributed.comm import Comm

__all__ = ['BatchShare', 'Weights']


class Weights:
    "Weight of a batch on this rank, and its sum over all ranks, which is reduced asynchronously."

    def __init__(self, own: Any, world: Comm) -> None:
        self.own: Any = own
        self._total: Any = None
        self._on_device = isinstance(own, Tensor) and not own.is_cpu
        if self._on_device:
            self._sum = own.detach().to(torch.float64, copy=True)
            self._wait: Callable[[], Any] = dist.all_reduce(self._sum, async_op=True).wait
        else:
            self._wait = world.start_sum(torch.as_tensor(own, dtype=torch.float64))

    def total(self) -> Any:
        "Return the sum over all ranks: a number, or a tensor on the device of the weight."
        if self._total is None:
            result = self._wait()  # on a GPU only the stream waits, not the host
            self._total = self._sum if self._on_device else float(result)
        return self._total


@dataclass(slots=True)
class BatchShare:
    "This rank's share of the current training batch."

    share: tuple[int, int] | None = None  # samples of this rank, samples of all; None: unknown
    n_steps: int | None = None  # steps before the batch; None after `before_step`
    local: bool = True  # gradients may not be averaged yet
    tokens_before: int = 0  # tokens before the batch
    tokens: Callable[[], Tensor] | None = None  # f() -> tokens of all ranks
    weights: Weights | None = None  # weights, if the loss does not average over samples
