"""Replicas: every process has the whole model, and torch's DistributedDataParallel averages their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from learnkit.core.batch import apply_model, map_tensors, unpack_output
from learnkit.core.errors import OptionError, did_you_mean
from learnkit.core.learner_type import LearnerLike
from learnkit.core.random import preserved_rng

__all__ = ['Replicas', 'average', 'share_first']


class Replicas:
    """Train with `DistributedDataParallel` around the model, which itself stays as it is.

    Only training's forward passes go through the wrapper: an evaluation calls the bare model, so that processes may
    have different numbers of batches in it. Gradients lie in the wrapper's messages (`gradient_as_bucket_view`), which
    saves a copy of them, in memory and in time; the next pass writes over them.

    Raises `OptionError` for options that are none.

    >>> Replicas(bucket_cap=5)
    Traceback (most recent call last):
    learnkit.core.errors.OptionError: bucket_cap: the options of strategy 'ddp' are comm_hook, comm_state, ...
    """

    # whether all processes must evaluate the same number of batches
    needs_equal_evaluations = False
    averages_late = True  # gradients that no pass has averaged wait for `average_gradients`
    has_synced = False  # whether gradients have been averaged by the wrapper that is there

    def __init__(
        self,
        comm_hook: Callable[..., Any] | None = None,  # compresses gradients: f(state, bucket)
        comm_state: Any = None,  # its first argument
        **options: Any,  # for DistributedDataParallel: `bucket_cap_mb`, `static_graph`
    ) -> None:
        if unknown := set(options) - set(known := wrapper_options()):
            raise OptionError(
                f"{min(unknown)}: the options of strategy 'ddp' are comm_hook, comm_state, and those of torch's "
                f'DistributedDataParallel, {", ".join(known)}.{did_you_mean(min(unknown), known)}'
            )
        self.comm_hook, self.comm_state = comm_hook, comm_state
        self.options = {'gradient_as_bucket_view': True, **options}
        self.wrapped: nn.parallel.DistributedDataParallel | None = None
        self._trained: list[bool] = []  # which parameters required gradients when it was made

    def enter(self, learn: LearnerLike) -> None:
        "Begin: there is nothing to do before the model is on its device."

    def prepare(self, learn: LearnerLike) -> None:
        "Wrap the model, unless it is wrapped already, for the parameters that are trained now."
        trained = [p.requires_grad for p in learn.model.parameters()]
        if (
            self.wrapped is not None
            and trained == self._trained
            and self.wrapped.module is learn.model
        ):
            learn.replica = self.wrapped
            return
        self.release(learn)
        if not any(trained):
            return
        device = next(learn.model.parameters()).device
        ids = [device.index] if device.type == 'cuda' else None
        self.wrapped = nn.parallel.DistributedDataParallel(
            learn.model, device_ids=ids, **self.options
        )
        if self.comm_hook is not None:
            self.wrapped.register_comm_hook(self.comm_state, self.comm_hook)
        self._trained, learn.replica, self.has_synced = trained, self.wrapped, False

    def catch_up(self, learn: LearnerLike) -> None:
        """Let the wrapper order its messages as it did in the run that is gone on from.

        It groups gradients anew after its first backward pass, in the order in which they came, and sums of more than
        two numbers depend on their places in a group in the last bit. A pass over the batch at hand, whose gradients
        are thrown away, shows it that order."""
        if self.wrapped is None:
            return
        self.has_synced = True
        grads = [(p, p.grad) for p in learn.model.parameters()]
        buffers = [(b, b.clone()) for b in learn.model.buffers()]
        for p, _ in grads:
            p.grad = None  # those that wait are not to be added to
        try:
            with preserved_rng(), torch.enable_grad():
                out = unpack_output(apply_model(self.wrapped, learn.xb))
                parts = [t.float().sum() for t in tensors_of(out) if t.requires_grad]
                (0 * torch.stack(parts).sum()).backward()
        finally:
            for p, grad in grads:
                p.grad = grad
            with torch.no_grad():
                for b, value in buffers:
                    b.copy_(value)

    def pass_without_sync(self) -> AbstractContextManager[Any]:
        "Return a context for a pass whose gradients are only added up here."
        if self.wrapped is None:
            return nullcontext()
        if self.options.get('static_graph') and not self.has_synced:  # its first pass must send
            self.has_synced = True
            return nullcontext()
        return self.wrapped.no_sync()

    def share_buffers(self, learn: LearnerLike) -> None:
        "Give every process the first one's buffers (running means, for one), so that all evaluate the same model."
        share_first(learn.model.buffers())

    def average_gradients(self, learn: LearnerLike) -> None:
        "Average gradients that were added up in each process alone."
        if learn.turn is None:
            average(learn.model.parameters())
            return
        stepping = set(learn.step_parameters)
        average(p for p in learn.model.parameters() if p in stepping)

    def release(self, learn: LearnerLike) -> None:
        "Let go of the wrapper, and of its hooks on the parameters, also where a traceback still holds it."
        wrapped, self.wrapped, learn.replica = self.wrapped, None, None
        if wrapped is None or 'reducer' not in vars(wrapped):
            return
        wrapped._remove_autograd_hooks()  # torch has no public name for it
        for name in ('reducer', 'logger', 'process_group'):
            # they would keep the process group, and its connections, open
            vars(wrapped).pop(name, None)

    def leave(self, learn: LearnerLike) -> None:
        self.release(learn)


def wrapper_options() -> list[str]:
    "Return what torch's wrapper takes, besides what a Learner gives it."
    own = ('self', 'module', 'device_ids', 'output_device', 'dim', 'process_group')
    return [
        name
        for name in signature(nn.parallel.DistributedDataParallel.__init__).parameters
        if name not in own
    ]


@torch.no_grad()
def share_first(
    tensors: Iterable[Tensor],
    host_group: Any = None,  # for those on the host; None: the group of all, as for others
) -> None:
    "Give every process the first one's values of tensors: one message for those of a type."
    import torch.distributed as dist

    alike: dict[Any, list[Tensor]] = {}
    for t in tensors:
        if t.numel():
            alike.setdefault((t.dtype, t.device), []).append(t)
    for (_, device), group in alike.items():
        flat = torch.cat([t.reshape(-1) for t in group])
        dist.broadcast(flat, 0, group=host_group if device.type == 'cpu' else None)
        for t, value in zip(group, flat.split([t.numel() for t in group]), strict=True):
            t.copy_(value.view_as(t))


def average(parameters: Iterable[nn.Parameter]) -> None:
    "Average gradients over all processes, each of which has those of the same parameters."
    import torch.distributed as dist

    for p in parameters:
        if p.grad is None:
            continue
        p.grad.div_(dist.get_world_size())
        dist.all_reduce(p.grad)


def tensors_of(nested: Any) -> list[Tensor]:
    "Return every tensor in a nesting of them."
    found: list[Tensor] = []
    # it returns None
    map_tensors(nested, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    return found


def is_too_big(model: nn.Module) -> bool:
    "Tell whether a model, its gradients and Adam's averages would fill more than half of this process's GPU."
    if not torch.cuda.is_available():
        return False
    return (
        4 * sum(p.numel() * p.element_size() for p in model.parameters())
        > torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2
    )
