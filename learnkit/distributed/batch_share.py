"""A rank's share of a training batch: samples, weight, and the backward pass in which weights are summed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from learnkit.core.comm import Comm
from learnkit.core.dtensor import is_dtensor
from learnkit.distributed.ddp import GradientMessage
from learnkit.engine.microbatch import divide

__all__ = ['AveragedPass', 'BatchShare', 'RescaledPass', 'Weights']


class Weights:
    "Weight of a batch on this rank, and its sum over all ranks, which is reduced asynchronously."

    def __init__(self, own: Any, world: Comm) -> None:
        self.own: Any = own
        self._total: Any = None
        self._on_device = isinstance(own, Tensor) and not own.is_cpu
        if self._on_device:
            self._wait = start_sum_on_device(own)
        else:
            self._wait = world.start_sum(torch.as_tensor(own, dtype=torch.float64))

    def total(self) -> Any:
        "Return the sum over all ranks: a number, or a tensor on the device of the weight."
        if self._total is None:
            total = self._wait()
            self._total = total if self._on_device else float(total)
        return self._total


def start_sum_on_device(t: Tensor) -> Callable[[], Tensor]:
    "Start an all-reduce of a tensor on its device, and return a function that waits for the sum."
    import torch.distributed as dist

    total = t.detach().double()
    total = total.clone() if total is t else total
    work = dist.all_reduce(total, async_op=True)

    def wait() -> Tensor:
        work.wait()  # on a GPU only the stream waits, not the host
        return total

    return wait


@dataclass(slots=True)
class BatchShare:
    "This rank's share of the current training batch."

    share: tuple[int, int] | None = None  # samples of this rank, samples of all; None: unknown
    n_steps: int | None = None  # steps before the batch; None after `before_step`
    local: bool = True  # gradients may not be averaged yet
    syncs: bool = False  # the backward pass averages gradients
    tokens_before: int = 0  # tokens before the batch
    tokens: Callable[[], Tensor] | None = None  # f() -> tokens of all ranks
    weights: Weights | None = None  # weights, if the loss does not average over samples
    # weight of this rank, and guess of the sum over ranks, if gradients are rescaled to the actual sum
    guess: tuple[float, float] | None = None


class RescaledPass:
    """Context of a backward pass in which the sum of the ranks' weights arrives.

    At its end, the gradients that the pass has added are divided by this sum."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        guess: float,  # sum of the weights by which the loss was divided
        sums: Any,  # object with a method `total`, which returns the sum of the weights
    ) -> None:
        self.parameters = parameters
        self.guess = guess
        self.sums = sums
        self.before: list[tuple[nn.Parameter, Tensor]] = []  # gradients of a cancelled batch

    def __enter__(self) -> None:
        self.before = [(p, p.grad.clone()) for p in self.parameters if p.grad is not None]

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            return
        total = self.sums.total()
        if total != self.guess:
            self._rescale(divide(self.guess, total))

    @torch.no_grad()
    def _rescale(self, factor: float) -> None:
        import torch.distributed as dist

        torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)
        for p, grad in self.before:
            if not is_dtensor(grad):  # the pass has averaged it with the gradient that it added
                dist.all_reduce(grad.div_(dist.get_world_size()))
            p.grad.add_(grad, alpha=1 - factor)  # type: ignore[union-attr]


class AveragedPass(RescaledPass):
    "Context of a backward pass whose gradients are averaged over the ranks at its end, in one message."

    def __init__(
        self,
        message: GradientMessage,
        batch: BatchShare,  # its `local` is set to False once the gradients are averages
    ) -> None:
        self.weight, guess = batch.guess or (0.0, 0.0)
        super().__init__(message.parameters, guess, message)
        self.message = message
        self.batch = batch

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            return
        self.message.average(self.weight)
        self.batch.local = False
        super().__exit__(None)
