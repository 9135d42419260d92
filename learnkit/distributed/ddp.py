"""Strategy 'ddp': each rank has a replica of the model, and `DistributedDataParallel` averages the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from learnkit.core.batch import apply_model, tensors_in, unpack_output
from learnkit.core.errors import DistributedError, OptionError, did_you_mean
from learnkit.core.learner_type import LearnerLike
from learnkit.core.random import preserved_rng

__all__ = [
    'GradientMessage',
    'Replicas',
    'average',
    'broadcast_tensors',
    'can_rescale',
    'is_too_big',
]

MAX_AT_ONCE = 2**20  # elements of all gradients; more are sent while the backward pass runs
MESSAGE_BYTES = (
    25 << 20
)  # joined tensors are copied; DistributedDataParallel's buckets are as large
MAX_EXCHANGED = 2**16  # elements of a message that more than two ranks exchange in pairs
TAG = 20_113  # tag of these messages, so that they are not taken for those of a user
MAX_RESCALED = (
    10**7
)  # elements of all gradients; rescaling more takes longer than waiting for a message


class Replicas:
    """Strategy that trains replicas of the model with `DistributedDataParallel`; the model itself is not changed.

    Only forward passes of training go through the wrapper. An evaluation calls the bare model, so that ranks may
    evaluate different numbers of batches. Gradients are views of the wrapper's buckets (`gradient_as_bucket_view`),
    which saves a copy of the gradients, in memory and in time; the next backward pass overwrites the gradients.

    A small model on CPUs is not wrapped, unless an option is given: a `GradientMessage` takes less time.

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
        self.message: GradientMessage | None = None  # None if the model is wrapped
        self.trained: list[nn.Parameter] = []  # parameters that required gradients in `prepare`
        self._has_buffers = False
        self._needs_wrapper = bool(options) or comm_hook is not None
        self._prepared: tuple[nn.Module | None, list[bool]] = (
            None,
            [],
        )  # model, and flags of its parameters

    def enter(self, learn: LearnerLike) -> None:
        "Do nothing; `prepare` wraps the model once the model is on its device."

    def prepare(self, learn: LearnerLike) -> None:
        "Wrap the model, unless it was prepared already for the parameters that require gradients."
        model = learn.model
        requires_grad = [p.requires_grad for p in model.parameters()]
        prepared, flags = self._prepared
        if model is prepared and requires_grad == flags:
            learn.replica = self.wrapped
            return
        self.release(learn)
        if not any(requires_grad):
            return
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self._has_buffers = any(True for _ in model.buffers())
        if self._can_send_at_once(model):
            broadcast_tensors([*model.parameters(), *model.buffers()])
            self.message = GradientMessage(model, learn.world.rank, learn.world.size)
        else:
            self._wrap(model)
        self._prepared = model, requires_grad
        learn.replica = self.wrapped
        self.has_synced = False

    def _can_send_at_once(self, model: nn.Module) -> bool:
        "Return True if all gradients fit into a `GradientMessage`, which takes less time than the wrapper."
        sends_sparse = any(getattr(module, 'sparse', False) for module in model.modules())
        has_one_dtype = len({p.dtype for p in self.trained}) == 1
        is_small = sum(p.numel() for p in self.trained) <= MAX_AT_ONCE
        is_plain = has_one_dtype and not sends_sparse and can_rescale(self.trained)
        return is_small and is_plain and not self._needs_wrapper

    def _wrap(self, model: nn.Module) -> None:
        device = next(model.parameters()).device
        ids = [device.index] if device.type == 'cuda' else None
        self.wrapped = nn.parallel.DistributedDataParallel(model, device_ids=ids, **self.options)
        if self.comm_hook is not None:
            self.wrapped.register_comm_hook(self.comm_state, self.comm_hook)

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

    def pass_with_sync(self, learn: LearnerLike) -> None:
        "Broadcast the first rank's buffers before a forward pass, as the wrapper does."
        self.has_synced = True
        if self._has_buffers and self.wrapped is None:
            broadcast_tensors(learn.model.buffers())

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
        self.wrapped = self.message = None
        self.trained, self._prepared = [], (None, [])
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


class GradientMessage:
    """Average the gradients of a small model on CPUs in one message, which holds the weight of a batch as well.

    `DistributedDataParallel` runs Python code in each forward pass and hooks in each backward pass, and the weight
    would be another message: together a fifth of a step of 1.5 ms. Two ranks exchange their messages directly, because
    gloo starts an all-reduce in another thread: that is a third of such a step. The averages are the same; with more
    than two ranks, the order of their sums may differ from the wrapper's."""

    def __init__(
        self,
        model: nn.Module,  # model whose trained parameters have one dtype
        rank: int,
        size: int,  # number of ranks
    ) -> None:
        self.model, self.size = model, size
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        sizes = [p.numel() for p in self.parameters]
        self.data = self.parameters[0].detach().new_zeros(sum(sizes) + 1)
        self._averages, self._weight = self.data[:-1], self.data[-1]
        parts = self._averages.split(sizes)
        self._parts = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]
        self._received = torch.empty_like(self.data)
        self._partners = list_partners(rank, size, len(self.data))

    @torch.no_grad()
    def average(
        self,
        weight: float = 0.0,  # number to sum over the ranks
    ) -> None:
        "Replace the gradients by their averages over the ranks; raise `DistributedError` if one is missing."
        grads: list[Any] = [p.grad for p in self.parameters]
        if any(grad is None for grad in grads):
            raise self._make_missing_error()
        torch._foreach_copy_(self._parts, grads)
        torch.mul(self._averages, 1 / self.size, out=self._averages)
        self._weight.fill_(weight)
        sum_over_ranks(self.data, self._partners, self._received)
        torch._foreach_copy_(grads, self._parts)

    def _make_missing_error(self) -> DistributedError:
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        missing = [name for name, p in trained if p.grad is None]
        return DistributedError(
            f'{", ".join(missing)}: no gradient, because the loss does not depend on it, and other processes wait '
            "for its average. `learn.distributed('ddp', find_unused_parameters=True)` allows for that; to train "
            'without it, set `requires_grad_(False)` before the fit.'
        )

    def total(self) -> float:
        "Return the sum over ranks of the weight last sent."
        return float(self._weight)


def sum_over_ranks(
    t: Tensor,  # dense tensor; replaced by its sum over ranks
    partners: list[int],  # ranks to exchange sums with, see `list_partners`
    received: Tensor,  # memory for the sums of the partners
) -> None:
    "Sum a tensor over ranks. The methods of the group take half the time of torch's functions, which log."
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    if not partners:
        group.allreduce([t]).wait()
    for partner in partners:
        arriving = group.recv([received], partner, TAG)
        group.send([t], partner, TAG).wait()
        arriving.wait()
        t.add_(received)


def list_partners(
    rank: int,
    size: int,  # number of ranks
    n_elements: int,  # length of the message
) -> list[int]:
    """Return the ranks with which a rank exchanges sums, one after another, until all have the sum over all ranks.

    An empty list stands for an all-reduce, which sends less if there are many ranks or a long message.

    >>> list_partners(1, 4, 1000), list_partners(1, 3, 1000), list_partners(1, 2, 10**6)
    ([0, 3], [], [0])
    """
    is_power_of_two = size & (size - 1) == 0
    if not is_power_of_two or (size > 2 and n_elements > MAX_EXCHANGED):
        return []
    n_exchanges = size.bit_length() - 1
    return [rank ^ 2**i for i in range(n_exchanges)]


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


def broadcast_tensors(
    tensors: Iterable[Tensor],  # tensors, of the same shapes on every rank
    host_group: Any = None,  # process group for tensors on the host; None: the default group
) -> None:
    "Replace tensors by the first rank's tensors."
    import torch.distributed as dist

    def broadcast(flat: Tensor) -> None:
        dist.broadcast(flat, 0, group=host_group if flat.is_cpu else None)

    send_joined(tensors, broadcast)


def average(parameters: Iterable[nn.Parameter]) -> None:
    "Average gradients over ranks; every rank must have gradients of the same parameters."
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()

    def reduce(flat: Tensor) -> None:
        flat.div_(size)
        if not flat.is_cpu or flat.is_sparse:
            dist.all_reduce(flat)
            return
        partners = list_partners(rank, size, len(flat))
        sum_over_ranks(flat, partners, torch.empty_like(flat))

    send_joined((p.grad for p in parameters if p.grad is not None), reduce)


@torch.no_grad()
def send_joined(
    tensors: Iterable[Tensor],
    send: Callable[[Tensor], None],  # changes a flat tensor in place, on all ranks
) -> None:
    "Send tensors in messages of up to `MESSAGE_BYTES` for each dtype and device; a sparse tensor is sent by itself."
    groups: dict[Any, list[Tensor]] = {}
    for t in tensors:
        if t.is_sparse:
            send(t)
        elif t.numel():
            groups.setdefault((t.dtype, t.device), []).append(t)
    for group in groups.values():
        for part in split_by_bytes(group):
            flat = torch.cat([t.reshape(-1) for t in part])
            send(flat)
            for t, value in zip(part, flat.split([t.numel() for t in part]), strict=True):
                t.copy_(value.view_as(t))


def split_by_bytes(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    "Split a list of tensors into parts of up to `MESSAGE_BYTES`, or of one larger tensor."
    part: list[Tensor] = []
    n_bytes = 0
    for t in tensors:
        if part and n_bytes + t.nbytes > MESSAGE_BYTES:
            yield part
            part, n_bytes = [], 0
        part.append(t)
        n_bytes += t.nbytes
    yield part


def is_too_big(model: nn.Module) -> bool:
    "Return True if weights, gradients and Adam's two averages would fill more than half of the GPU."
    if not torch.cuda.is_available():
        return False
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return 4 * weight_bytes > gpu.total_memory / 2
