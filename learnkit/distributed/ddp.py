"""Strategy 'ddp': each rank has a replica of the model, and `DistributedDataParallel` averages the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor, nn

from learnkit.core.batch import apply_model, tensors_in, unpack_output
from learnkit.core.comm import Comm
from learnkit.core.errors import DistributedError, OptionError, did_you_mean
from learnkit.core.learner_type import LearnerLike
from learnkit.core.model import call_module
from learnkit.core.random import preserved_rng
from learnkit.distributed.parallel import Parallelism
from learnkit.engine.loss import call_model

__all__ = [
    'GradientMessage',
    'Replicas',
    'average',
    'broadcast_tensors',
    'can_rescale',
    'gather_if_different',
    'is_too_big',
]

# maximum number of gradient elements for one message after the backward pass; DistributedDataParallel sends more
# elements during the pass
MAX_AT_ONCE = 2**20
HOLDER = 'DistributedDataParallel'  # of the seam `model`
# maximum number of gradient elements to rescale; for more, waiting for a message takes less time
MAX_RESCALED = 10**7
# maximum number of elements that ranks exchange in pairs; for more, an all-reduce takes less time
MAX_EXCHANGED = 2**17
# bytes of a message of joined tensors, as large as the buckets of DistributedDataParallel
MESSAGE_BYTES = 25 << 20
# tag that distinguishes messages in pairs from a user's messages
TAG = 20_113

T = TypeVar('T', bound=Tensor)


class Replicas(Parallelism):
    """Train replicas of the model with `DistributedDataParallel`; the model itself is not changed.

    Only forward passes of training go through the wrapper. An evaluation calls the bare model, so that ranks may
    evaluate different numbers of batches. Gradients are views of the wrapper's buckets (`gradient_as_bucket_view`),
    which saves a copy of the gradients, in memory and in time; the next backward pass overwrites the gradients.

    A small model on CPUs is not wrapped, unless an option is given: a `GradientMessage` takes less time.

    Raises `OptionError` for unknown options.

    >>> Replicas(bucket_cap=5)
    Traceback (most recent call last):
    learnkit.core.errors.OptionError: bucket_cap: the options of strategy 'ddp' are comm_hook, comm_state, ...
    """

    def __init__(
        self,
        comm_hook: Callable[..., Any] | None = None,  # f(state, bucket), compresses gradients
        comm_state: Any = None,  # first argument of `comm_hook`
        **options: Any,  # options of DistributedDataParallel, such as `bucket_cap_mb`
    ) -> None:
        super().__init__()
        known = list_wrapper_options()
        unknown = set(options) - set(known)
        if unknown:
            raise OptionError(
                f"{min(unknown)}: the options of strategy 'ddp' are comm_hook, comm_state, and the options of torch's "
                f'DistributedDataParallel, {", ".join(known)}.{did_you_mean(min(unknown), known)}'
            )
        self.comm_hook = comm_hook
        self.comm_state = comm_state
        self.options = {'gradient_as_bucket_view': True, **options}
        self.wrapped: nn.parallel.DistributedDataParallel | None = None
        self._needs_wrapper = bool(options) or comm_hook is not None
        self._layout: list[Any] = []  # description of the prepared parameters and buffers
        self._params: list[nn.Parameter] = []  # kept, so that their ids are not used again
        self._has_buffers = False
        self._broadcasts = True  # buffers are broadcast before the next pass without a wrapper

    def prepare(self, learn: LearnerLike) -> None:
        "Wrap the model, unless it was prepared already with these parameters and buffers."
        model = learn.model
        params = list(learn.model.parameters())
        layout: list[Any] = [(id(p), p.requires_grad, p.dtype, p.device) for p in params]
        n_buffers = sum(1 for _ in model.buffers())
        layout.append(n_buffers)
        if layout == self._layout:
            self.take_seam(learn)
            return
        self.release(learn)
        self.trained = [p for p in params if p.requires_grad]
        check_same_parameters(model, learn.world)
        if not self.trained:
            return
        if self._can_send_at_once(model):
            broadcast_tensors([*params, *model.buffers()])
            self.message = GradientMessage(self.trained, learn.world.rank, learn.world.size)
        else:
            self._wrap(model)
        self._layout = layout
        self._params = params
        self._has_buffers = n_buffers > 0
        self._broadcasts = True
        self.take_seam(learn)
        self.has_synced = False

    def take_seam(self, learn: LearnerLike) -> None:
        "Call the wrapper in place of the model in training."
        if self.wrapped is not None:
            learn.seams.take(HOLDER, model=self.call)

    def call(self, learn: LearnerLike) -> Any:
        "Call the wrapper in training, and the model itself in evaluation."
        module = self.wrapped if learn.training else None
        return call_module(learn, learn.model if module is None else module)

    def _can_send_at_once(self, model: nn.Module) -> bool:
        "Return True if all gradients fit into a `GradientMessage`, which takes less time than the wrapper."
        has_sparse = any(getattr(module, 'sparse', False) is True for module in model.modules())
        has_options = self._needs_wrapper or hasattr(model, '_ddp_params_and_buffers_to_ignore')
        has_one_dtype = len({p.dtype for p in self.trained}) == 1
        is_small = sum(p.numel() for p in self.trained) <= MAX_AT_ONCE
        is_plain = is_small and has_one_dtype and can_rescale(self.trained)
        return is_plain and not has_sparse and not has_options

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

    def begin_pass(
        self,
        learn: LearnerLike,
        averages: bool,  # the gradients of the pass are averaged; otherwise they stay on this rank
    ) -> AbstractContextManager[Any] | None:
        "Begin a forward pass in training, and return a context for it."
        if self.wrapped is None:
            if self._broadcasts and self._has_buffers:
                broadcast_tensors(learn.model.buffers())
            self._broadcasts = averages  # like the wrapper, not between accumulated batches
            return None
        must_average = self.options.get('static_graph') and not self.has_synced
        if averages or must_average:  # torch requires it of the first pass of a static graph
            self.has_synced = True
            return None
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
        self.wrapped = self.message = None
        self.trained = []
        self._layout = []
        self._params = []
        if learn.seams.holders.get('model') == HOLDER:
            learn.seams.give_back({'model': call_model})
        if wrapped is None or 'reducer' not in vars(wrapped):
            return
        wrapped._remove_autograd_hooks()  # torch has no public method
        for name in ('reducer', 'logger', 'process_group'):
            # these attributes would keep the connections of the process group open
            vars(wrapped).pop(name, None)

    def leave(self, learn: LearnerLike) -> None:
        "Remove the wrapper."
        self.release(learn)


def check_same_parameters(model: nn.Module, world: Comm) -> None:
    "Raise `DistributedError` unless all ranks train the same parameters: equal names, shapes and dtypes."
    trained = {
        name: f'{tuple(p.shape)} {p.dtype}'
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    for rank, other in enumerate(gather_if_different(trained, world)):
        for name in sorted({*trained, *other}):
            if trained.get(name) != other.get(name):
                raise DistributedError(
                    f'The processes train different parameters: {name} is {trained.get(name, "not trained")} in '
                    f'process {world.rank}, and {other.get(name, "not trained")} in process {rank}. Set '
                    '`requires_grad_()` alike in all of them.'
                )


def gather_if_different(
    own: dict[str, str],  # descriptions by name
    world: Comm,
) -> list[dict[str, str]]:
    "Return the descriptions of all ranks in rank order; an empty list if they are equal."
    checksums = world.gather(crc32(repr(own).encode()))
    return [] if len(set(checksums)) == 1 else world.gather(own)


class GradientMessage:
    """Average the gradients of a small model on CPUs in one message, which holds the weight of a batch as well.

    `DistributedDataParallel` runs Python code in each forward pass and hooks in each backward pass, and the weight
    would be another message: together a fifth of a step of 1.5 ms. Ranks exchange a short message in pairs, because
    gloo starts an all-reduce in another thread: that is a third of such a step. The averages are the same; with more
    than two ranks, the order of their sums may differ from the wrapper's."""

    def __init__(
        self,
        parameters: list[nn.Parameter],  # the same on every rank, of one dtype and device
        rank: int,
        size: int,  # number of ranks
    ) -> None:
        sizes = [p.numel() for p in parameters]
        n = sum(sizes)
        self.parameters = parameters
        self.size = size
        self.data = parameters[0].detach().new_zeros(n + len(sizes) + 1)
        self._averages = self.data[:n]
        self._weight = self.data[-1]
        self._n_grads = self.data[n:-1]  # number of ranks with a gradient, by parameter
        parts = self._averages.split(sizes)
        self._parts = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
        self._received = torch.empty_like(self.data)
        self._partners = list_partners(rank, size, n) if self.data.is_cpu else []

    @torch.no_grad()
    def average(
        self,
        weight: float = 0.0,  # number to sum over the ranks
    ) -> None:
        """Replace the gradients by their averages over the ranks.

        A rank without a gradient adds zeros. A parameter that has no gradient on any rank keeps none."""
        self._n_grads.fill_(1)
        missing = [i for i, p in enumerate(self.parameters) if p.grad is None]
        for i in missing:
            self.parameters[i].grad = torch.zeros_like(self.parameters[i])
            self._n_grads[i] = 0
        grads: list[Any] = [p.grad for p in self.parameters]
        torch._foreach_copy_(self._parts, grads)
        torch.mul(self._averages, 1 / self.size, out=self._averages)
        self._weight.fill_(weight)
        sum_over_ranks(self.data, self._partners, self._received)
        torch._foreach_copy_(grads, self._parts)
        for i in missing:
            if not self._n_grads[i]:
                self.parameters[i].grad = None

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

    An empty list stands for an all-reduce, which takes less time for a long message.

    >>> list_partners(1, 4, 1000), list_partners(1, 3, 1000), list_partners(1, 2, 10**6)
    ([0, 3], [], [])
    """
    is_power_of_two = size & (size - 1) == 0
    if not is_power_of_two or n_elements > MAX_EXCHANGED:
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


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[Tensor],  # tensors, of the same shapes on every rank
    host_group: Any = None,  # process group for tensors on the host; None: the default group
) -> None:
    "Replace tensors by the first rank's tensors."
    import torch.distributed as dist

    for group in group_tensors(tensors):
        flat = torch.cat([t.reshape(-1) for t in group])
        dist.broadcast(flat, 0, group=host_group if flat.is_cpu else None)
        for t, value in zip(group, flat.split([t.numel() for t in group]), strict=True):
            t.copy_(value.view_as(t))


def average(parameters: Iterable[nn.Parameter]) -> None:
    """Average gradients over ranks. Every rank must give the same parameters.

    A sparse gradient is averaged by itself, and every rank must have it."""
    import torch.distributed as dist

    rank = dist.get_rank()
    size = dist.get_world_size()
    dense = []
    for p in parameters:
        if p.grad is None or not p.grad.is_sparse:
            dense.append(p)
            continue
        p.grad.div_(size)
        dist.all_reduce(p.grad)
    for group in group_tensors(dense):
        GradientMessage(group, rank, size).average()


def group_tensors(tensors: Iterable[T]) -> list[list[T]]:
    "Group tensors by dtype and device, in groups of up to `MESSAGE_BYTES` or of one larger tensor."
    groups: list[list[T]] = []
    last: dict[Any, tuple[list[T], int]] = {}  # last group of each kind, and its number of bytes
    for t in tensors:
        if not t.numel():
            continue
        kind = t.dtype, t.device
        group, n_bytes = last.get(kind, ([], 0))
        if not group or n_bytes + t.nbytes > MESSAGE_BYTES:
            group = []
            n_bytes = 0
            groups.append(group)
        group.append(t)
        last[kind] = group, n_bytes + t.nbytes
    return groups


def is_too_big(model: nn.Module) -> bool:
    "Return True if weights, gradients and Adam's two averages would fill more than half of the GPU."
    if not torch.cuda.is_available():
        return False
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return 4 * weight_bytes > gpu.total_memory / 2
