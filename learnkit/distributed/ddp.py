"""Strategy 'ddp': each rank has a replica of the model, and `DistributedDataParallel` averages the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from learnkit.core.batch import apply_model, tensors_in, unpack_output
from learnkit.core.errors import OptionError, did_you_mean
from learnkit.core.learner_type import LearnerLike
from learnkit.core.random import preserved_rng
from learnkit.engine.microbatch import divide

if TYPE_CHECKING:
    from torch.distributed import GradBucket

__all__ = ['Replicas', 'RescaledPass', 'average', 'broadcast_tensors', 'can_rescale', 'is_too_big']

MAX_CARRYING = 2**16  # elements of all gradients; copying more takes longer than another message
MAX_RESCALED = (
    10**7
)  # elements of all gradients; rescaling more takes longer than waiting for a message
# options of DistributedDataParallel under which gradients can carry the weight of a batch
CARRYING_OPTIONS = {'gradient_as_bucket_view', 'bucket_cap_mb', 'find_unused_parameters'}


class Replicas:
    """Strategy that trains replicas of the model with `DistributedDataParallel`; the model itself is not changed.

    Only forward passes of training go through the wrapper. An evaluation calls the bare model, so that ranks may
    evaluate different numbers of batches. Gradients are views of the wrapper's buckets (`gradient_as_bucket_view`),
    which saves a copy of the gradients, in memory and in time; the next backward pass overwrites the gradients.

    Raises `OptionError` for unknown options.

    >>> Replicas(bucket_cap=5)
    Traceback (most recent call last):
    learnkit.core.errors.OptionError: bucket_cap: the options of strategy 'ddp' are comm_hook, comm_state, ...
    """

    needs_equal_evaluations = False  # True if all ranks must evaluate the same number of batches
    averages_late = True  # True if `average_gradients` averages what no backward pass has averaged
    has_synced = False  # True once the current wrapper has averaged gradients

    def __init__(
        self,
        comm_hook: Callable[..., Any] | None = None,  # f(state, bucket), compresses gradients
        comm_state: Any = None,  # first argument of `comm_hook`
        **options: Any,  # options of DistributedDataParallel, such as `bucket_cap_mb`
    ) -> None:
        known = list_wrapper_options()
        unknown = set(options) - set(known)
        if unknown:
            raise OptionError(
                f"{min(unknown)}: the options of strategy 'ddp' are comm_hook, comm_state, and the options of torch's "
                f'DistributedDataParallel, {", ".join(known)}.{did_you_mean(min(unknown), known)}'
            )
        self.comm_hook, self.comm_state = comm_hook, comm_state
        self.options = {'gradient_as_bucket_view': True, **options}
        self.wrapped: nn.parallel.DistributedDataParallel | None = None
        self.trained: list[nn.Parameter] = []  # parameters of the wrapper that require gradients
        self.carrier: WeightCarrier | None = None  # None if gradients cannot carry a weight
        self._requires_grad: list[bool] = []  # flags of the parameters when the model was wrapped

    def enter(self, learn: LearnerLike) -> None:
        "Do nothing; `prepare` wraps the model once the model is on its device."

    def prepare(self, learn: LearnerLike) -> None:
        "Wrap the model, unless it is wrapped already for the parameters that require gradients."
        requires_grad = [p.requires_grad for p in learn.model.parameters()]
        if (
            self.wrapped is not None
            and requires_grad == self._requires_grad
            and self.wrapped.module is learn.model
        ):
            learn.replica = self.wrapped
            return
        self.release(learn)
        if not any(requires_grad):
            return
        device = next(learn.model.parameters()).device
        ids = [device.index] if device.type == 'cuda' else None
        self.wrapped = nn.parallel.DistributedDataParallel(
            learn.model, device_ids=ids, **self.options
        )
        self.trained = trained = [p for p in learn.model.parameters() if p.requires_grad]
        if self.comm_hook is not None:
            self.wrapped.register_comm_hook(self.comm_state, self.comm_hook)
        elif self._can_carry(trained):
            self.carrier = carrier = WeightCarrier(learn.world.size)
            self.wrapped.register_comm_hook(None, lambda state, bucket: carrier.reduce(bucket))
        self._requires_grad = requires_grad
        learn.replica = self.wrapped
        self.has_synced = False

    def _can_carry(self, trained: list[nn.Parameter]) -> bool:
        "Return True if a number can be sent with the gradients: exactly, in less time than by itself, without a GPU."
        is_small = sum(p.numel() for p in trained) <= MAX_CARRYING
        return is_small and can_rescale(trained) and self.options.keys() <= CARRYING_OPTIONS

    def catch_up(self, learn: LearnerLike) -> None:
        """Give a new wrapper the buckets that the wrapper of the resumed run had.

        After its first backward pass, a wrapper rebuilds its buckets in the order in which gradients arrived. The
        position of a gradient in a bucket changes sums over more than two ranks in the last bit. A pass over the
        current batch, whose gradients are discarded, establishes this order."""
        if self.wrapped is None:
            return
        self.has_synced = True
        grads = [(p, p.grad) for p in learn.model.parameters()]
        buffers = [(b, b.clone()) for b in learn.model.buffers()]
        for p, _ in grads:
            p.grad = None  # the pass must not add to accumulated gradients
        try:
            with preserved_rng(), torch.enable_grad():
                out = unpack_output(apply_model(self.wrapped, learn.xb))
                sums = [t.float().sum() for t in tensors_in(out) if t.requires_grad]
                (0 * torch.stack(sums).sum()).backward()
        finally:
            for p, grad in grads:
                p.grad = grad
            with torch.no_grad():
                for b, value in buffers:
                    b.copy_(value)

    def pass_without_sync(self) -> AbstractContextManager[Any]:
        "Return a context for a backward pass that accumulates gradients on this rank only."
        if self.wrapped is None:
            return nullcontext()
        if self.options.get('static_graph') and not self.has_synced:
            # torch requires that the first pass of a static graph reduces gradients
            self.has_synced = True
            return nullcontext()
        return self.wrapped.no_sync()

    def share_buffers(self, learn: LearnerLike) -> None:
        "Broadcast the first rank's buffers, such as running means, so that all ranks evaluate the same model."
        broadcast_tensors(learn.model.buffers())

    def average_gradients(self, learn: LearnerLike) -> None:
        "Average gradients that each rank has accumulated alone."
        if learn.turn is None:
            average(learn.model.parameters())
            return
        stepping = set(learn.step_parameters)
        average(p for p in learn.model.parameters() if p in stepping)

    def release(self, learn: LearnerLike) -> None:
        "Remove the wrapper and its hooks on the parameters, even if a traceback still refers to the wrapper."
        wrapped = self.wrapped
        self.wrapped = self.carrier = None
        self.trained = []
        learn.replica = None
        if wrapped is None or 'reducer' not in vars(wrapped):
            return
        wrapped._remove_autograd_hooks()  # torch has no public method
        for name in ('reducer', 'logger', 'process_group'):
            # these attributes would keep the connections of the process group open
            vars(wrapped).pop(name, None)

    def leave(self, learn: LearnerLike) -> None:
        "Remove the wrapper."
        self.release(learn)


class WeightCarrier:
    """Communication hook of `DistributedDataParallel` for small models on CPUs: a number is sent with the gradients.

    The gradients are averaged to the last bit as without the hook. A separate message for the number would take
    a third of the time of a step of 2 ms (two processes on two cores)."""

    def __init__(
        self,
        size: int,  # number of ranks
    ) -> None:
        self.size = size
        self.weight: float | None = None  # number to send with the next message
        self._total: Tensor | None = None  # sum over ranks of the number last sent
        self._message: Tensor | None = None  # gradients of a bucket, followed by the number

    def total(self) -> float:
        "Return the sum over ranks of the weight last sent."
        assert self._total is not None
        return float(self._total)

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        "Start to average a bucket of gradients over the ranks."
        import torch.distributed as dist

        grads, message = bucket.buffer(), self._message
        if self.weight is None:
            torch.mul(grads, 1 / self.size, out=grads)
            return send(dist.group.WORLD, grads, lambda: grads)
        if message is None or len(message) != len(grads) + 1 or message.dtype != grads.dtype:
            message = self._message = grads.new_empty(len(grads) + 1)
        averages, self._total = message[:-1], message[-1]
        torch.mul(grads, 1 / self.size, out=averages)
        self._total.fill_(self.weight)
        self.weight = None
        return send(dist.group.WORLD, message, lambda: grads.copy_(averages))


def send(group: Any, message: Tensor, unpack: Callable[[], Tensor]) -> torch.futures.Future[Tensor]:
    """Sum a message over the ranks of a process group, and return a future of what `unpack()` returns then.

    The method of the group takes half the time of `torch.distributed.all_reduce`, which logs its arguments."""

    def finish(done: Any) -> Tensor:
        done.value()  # raises the error of a message that has failed
        return unpack()

    return group.allreduce([message]).get_future().then(finish)


def list_wrapper_options() -> list[str]:
    "Return the names of the options of DistributedDataParallel that a user may set."
    reserved = ('self', 'module', 'device_ids', 'output_device', 'dim', 'process_group')
    return [
        name
        for name in signature(nn.parallel.DistributedDataParallel.__init__).parameters
        if name not in reserved
    ]


def can_rescale(parameters: list[nn.Parameter]) -> bool:
    "Return True if rescaling is quick and exact: for at most `MAX_RESCALED` parameters of 32 or 64 bits on the CPU."
    is_wide = all(p.is_cpu and p.dtype in (torch.float32, torch.float64) for p in parameters)
    return is_wide and sum(p.numel() for p in parameters) <= MAX_RESCALED


class RescaledPass:
    """Context of a backward pass in which the sum of the ranks' weights arrives.

    At its end, the gradients that the pass has added are divided by this sum."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        weight: float,  # weight of this rank's batch
        guess: float,  # sum of the weights by which the loss was divided
        sums: Any,  # object with a method `total`: the `WeightCarrier`, or a sum that was started
    ) -> None:
        self.parameters, self.weight, self.guess, self.sums = parameters, weight, guess, sums
        self.before: list[tuple[nn.Parameter, Tensor]] = []  # gradients of a cancelled batch

    def __enter__(self) -> None:
        self.before = [(p, p.grad.clone()) for p in self.parameters if p.grad is not None]
        if isinstance(self.sums, WeightCarrier):
            self.sums.weight = self.weight

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        is_sent = True
        if isinstance(self.sums, WeightCarrier):
            is_sent = self.sums.weight is None
            self.sums.weight = None
        # without gradients of some parameters nothing is sent, and the next forward pass raises
        if error is not None or not is_sent:
            return
        total = self.sums.total()
        if total != self.guess:
            self._rescale(divide(self.guess, total))

    @torch.no_grad()
    def _rescale(self, factor: float) -> None:
        torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)
        for p, grad in self.before:
            p.grad.add_(grad, alpha=1 - factor)  # type: ignore[union-attr]


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[Tensor],  # tensors, of the same shapes on every rank
    host_group: Any = None,  # process group for tensors on the host; None: the default group
) -> None:
    "Broadcast the first rank's tensors, in one message for each dtype and device."
    import torch.distributed as dist

    groups: dict[Any, list[Tensor]] = {}
    for t in tensors:
        if t.numel():
            groups.setdefault((t.dtype, t.device), []).append(t)
    for (_, device), group in groups.items():
        flat = torch.cat([t.reshape(-1) for t in group])
        dist.broadcast(flat, 0, group=host_group if device.type == 'cpu' else None)
        for t, value in zip(group, flat.split([t.numel() for t in group]), strict=True):
            t.copy_(value.view_as(t))


def average(parameters: Iterable[nn.Parameter]) -> None:
    "Average gradients over ranks; every rank must have gradients of the same parameters."
    import torch.distributed as dist

    for p in parameters:
        if p.grad is None:
            continue
        p.grad.div_(dist.get_world_size())
        dist.all_reduce(p.grad)


def is_too_big(model: nn.Module) -> bool:
    "Return True if weights, gradients and Adam's two averages would fill more than half of the GPU."
    if not torch.cuda.is_available():
        return False
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return 4 * weight_bytes > gpu.total_memory / 2
