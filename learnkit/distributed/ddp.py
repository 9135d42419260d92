# SPDX-License-Identifier: Apache-2.0
"""`Parallelism`, and strategy 'ddp': each rank has a replica of the model, and torch's DDP averages gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from learnkit.comm.dtensor import reshard
from learnkit.core.batch import apply_model, tensors_in, unpack_output
from learnkit.core.device import has_streams
from learnkit.engine.snapshot import preserved_forward

if TYPE_CHECKING:
    from learnkit.learner import Learner


class Parallelism:
    """How weights and gradients are distributed over ranks: `Replicas` (DDP) or `Sharded` (FSDP2).

    `DistributedTraining` owns one and calls its methods in the order in which they are defined. A
    new kind is a subclass whose constructor takes its options. `STRATEGIES` in `distributed/callback.py`
    has its name, and `make_parallelism` creates it.
    """

    tensor = 1  # ranks that train on the same samples, each with a part of every parallel layer

    def check_size(self, size: int) -> None:
        "Raise `OptionError` for a number of processes that the options do not fit."

    def enter(self, learn: Learner) -> None:
        "Change the Learner's model when the callback is added."

    def prepare(self, learn: Learner) -> None:
        "Prepare the model for a fit, after it was moved to its device."

    def begin_pass(
        self,
        learn: Learner,
        averages: bool,  # whether the gradients of this pass are averaged
    ) -> AbstractContextManager[Any] | None:
        "Begin a forward pass in training, and return a context for it."
        return None

    def average_gradients(self, learn: Learner) -> None:
        "Average gradients that each rank has accumulated alone."

    def share_buffers(self, learn: Learner) -> None:
        "Broadcast the first rank's buffers, such as running means, so that all ranks evaluate the same model."
        reshard(learn.model)
        broadcast_tensors(learn.model.buffers())

    def release(self, learn: Learner) -> None:
        "Release resources of the process group at the end of a fit or after a failure."

    def leave(self, learn: Learner) -> None:
        "Restore the Learner's model when the callback is removed."
        self.release(learn)


class Replicas(Parallelism):
    """Train replicas of the model with `DistributedDataParallel`; the model itself is not changed.

    Only forward passes of training go through the wrapper; an evaluation calls the bare model. Gradients are views of
    the wrapper's buckets (`gradient_as_bucket_view`), which saves a copy of the gradients, in memory and in time; the
    next backward pass overwrites the gradients.

    >>> Replicas(bucket_cap_mb=5).options
    {'gradient_as_bucket_view': True, 'bucket_cap_mb': 5}
    """

    def __init__(
        self,
        comm_hook: Callable[..., Any] | None = None,  # f(state, bucket), compresses gradients
        comm_state: Any = None,  # first argument of `comm_hook`
        **options: Any,  # options of DistributedDataParallel, such as `bucket_cap_mb`
    ) -> None:
        self.comm_hook = comm_hook
        self.comm_state = comm_state
        self.options = {'gradient_as_bucket_view': True, **options}
        self.wrapped: Any = None  # DistributedDataParallel
        self._layout: list[Any] = []  # description of the prepared parameters and buffers
        self._params: list[nn.Parameter] = []  # kept, so that their ids are not used again
        self._has_averaged = False  # True once a pass of the wrapper has averaged gradients

    @override
    def prepare(self, learn: Learner) -> None:
        "Wrap the model, unless it was prepared already with these parameters and buffers."
        model = learn.model
        params = list(learn.model.parameters())
        layout: list[Any] = [(id(p), p.requires_grad, p.dtype, p.device) for p in params]
        layout.append(sum(1 for _ in model.buffers()))
        if layout != self._layout:
            self.release(learn)
            self._wrap(model)
            self._layout = layout
            self._params = params
            self._has_averaged = False
        learn.seams.wrap_model(self.wrapped)

    def _wrap(self, model: nn.Module) -> None:
        device = next(model.parameters()).device
        ids = [device.index] if has_streams(device) else None
        self.wrapped = nn.parallel.DistributedDataParallel(model, device_ids=ids, **self.options)
        if self.comm_hook is not None:
            self.wrapped.register_comm_hook(self.comm_state, self.comm_hook)

    def _order_buckets(self, learn: Learner) -> None:
        """Let a new wrapper order its buckets by passes whose gradients are zeros, which are discarded.

        After its first backward pass, a wrapper rebuilds its buckets in the order in which gradients arrived. The
        position of a gradient in a bucket changes sums over more than two ranks in the last bit. With these passes,
        the first step of a resumed run equals the step of an uninterrupted run. The model does not take part, unless
        the wrapper depends on its graph; what the model's passes change is then restored."""
        model = self.wrapped.module
        # after a pass without averaging, the wrapper leaves the buffers of each rank as they are
        shares_buffers = self.wrapped.require_forward_param_sync
        grads = [(p, p.grad) for p in model.parameters()]
        for p, _ in grads:
            p.grad = None  # the passes must not add to accumulated gradients
        try:
            with torch.enable_grad():
                if self._records_graph():
                    with preserved_forward(model):
                        for _ in range(2):  # the first pass records a static graph
                            _run_backward(apply_model(self.wrapped, learn.xb))
                else:
                    self.wrapped.module = _SumOfParameters(model)
                    # the second pass rebuilds the buckets, while no gradient is there that the wrapper would move
                    # into them: gradients in buckets are divided, others multiplied by the reciprocal
                    for _ in range(2):
                        _run_backward(self.wrapped())
        finally:
            self.wrapped.module = model
            self.wrapped.require_forward_param_sync = shares_buffers
            for p, grad in grads:
                p.grad = grad

    def _records_graph(self) -> bool:
        "Return True if the wrapper depends on the passes of the model's own modules."
        return bool(self.options.get('static_graph') or self.options.get('mixed_precision'))

    def _rebuilds_buckets(self, learn: Learner) -> bool:
        "Return True if the order of gradients changes sums, and the wrapper will order its buckets by it."
        finds_unused = self.options.get('find_unused_parameters')
        return learn.world.size > 2 and (self.options.get('static_graph') or not finds_unused)

    @override
    def begin_pass(
        self,
        learn: Learner,
        averages: bool,  # the gradients of the pass are averaged; otherwise they stay on this rank
    ) -> AbstractContextManager[Any] | None:
        "Begin a forward pass in training, and return a context for it."
        must_average = self.options.get('static_graph') and not self._has_averaged
        if not (averages or must_average):  # torch requires it of the first pass of a static graph
            return self.wrapped.no_sync()
        if not self._has_averaged and self._rebuilds_buckets(learn):
            self._order_buckets(learn)
        self._has_averaged = True
        return None

    @override
    def average_gradients(self, learn: Learner) -> None:
        "Average gradients that each rank has accumulated alone."
        stepping = set(learn.step_parameters)
        average(p for p in learn.model.parameters() if p in stepping)

    @override
    def release(self, learn: Learner) -> None:
        "Remove the wrapper and its hooks on the parameters, even if a traceback still refers to the wrapper."
        wrapped = self.wrapped
        self.wrapped = None
        self._layout = []
        self._params = []
        learn.seams.wrapper = None
        if wrapped is None:
            return
        for name in ('reducer', 'logger', 'process_group'):
            # the reducer holds the hooks, and all of them keep the connections of the process group open
            wrapped.__dict__.pop(name, None)


class _SumOfParameters(nn.Module):
    "Stand-in for a model whose output depends on each parameter that requires a gradient."

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._trained = [p for p in model.parameters() if p.requires_grad]
        # a wrapper that broadcasts buffers expects one
        self.register_buffer('unused', torch.zeros(1, device=self._trained[0].device))

    def forward(self) -> Tensor:
        return torch.stack([p.float().sum() for p in self._trained]).sum()


def _run_backward(out: Any) -> None:
    "Run backward from all outputs of a model, with zeros as gradients."
    outputs = tensors_in(unpack_output(out))
    sums = [t.float().sum() for t in outputs if t.requires_grad]
    (0 * torch.stack(sums).sum()).backward()


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[Tensor],  # tensors, of the same shapes on every rank
    host_group: Any = None,  # process group for tensors on the host; None: the default group
) -> None:
    "Replace tensors by the first rank's tensors."
    for t in tensors:
        values = t.contiguous()
        dist.broadcast(values, 0, group=host_group if t.is_cpu else None)
        t.copy_(values)


@torch.no_grad()
def average(parameters: Iterable[nn.Parameter]) -> None:
    """Average gradients over ranks. Every rank must pass the same parameters.

    A rank without a gradient adds zeros; a parameter without a gradient on any rank keeps none."""
    params = list(parameters)
    if not params:
        return
    flags = [p.grad is not None for p in params]
    has_grad = torch.tensor(flags, dtype=torch.uint8, device=params[0].device)
    dist.all_reduce(has_grad, dist.ReduceOp.MAX)
    params = [p for p, has in zip(params, has_grad.tolist(), strict=True) if has]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    means = [(grad / dist.get_world_size()).contiguous() for grad in grads]
    for work in [dist.all_reduce(mean, async_op=True) for mean in means]:
        work.wait()
    for p, grad, mean in zip(params, grads, means, strict=True):
        p.grad = grad.copy_(mean)
