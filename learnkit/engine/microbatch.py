# SPDX-License-Identifier: Apache-2.0
"""Microbatches: train on a batch in parts, whose weighted gradients add up to the batch's gradient."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from learnkit.core.batch import list_sizes
from learnkit.core.device import empty_cache
from learnkit.core.errors import (
    CancelBackwardException,
    CancelBatchException,
    add_note,
)
from learnkit.core.model import copy_buffers, restore_buffers
from learnkit.core.random import capture_rng, restore_rng
from learnkit.core.roles import has_batch_statistics
from learnkit.core.validation import warn_user
from learnkit.engine.loss import release_loss
from learnkit.engine.run import clear_pass

if TYPE_CHECKING:
    from learnkit.learner import Learner


class Microbatches:
    """Training on a batch in parts of at most `learn.microbatch` samples.

    Takes the seam `batch` in a fit of a Learner with `microbatch`. A size of 'auto' is halved until
    a part fits into memory.
    """

    holder = 'microbatch'

    def __init__(self) -> None:
        self.index = 0  # number of the current microbatch
        self.is_last = True  # whether the current microbatch is the last of its batch
        self.share: Any = 1.0  # weight of the microbatch in the loss of its batch
        self._weights: list[Any] | None = (
            None  # weights of the microbatches; None: their sum counts
        )
        self.fitting_size: int | None = None  # size that fits into memory
        # whether the layers were looked at that see each microbatch on its own
        self._has_checked_layers = False

    def seams(self, learn: Learner) -> dict[str, Any] | None:
        "Return the training on a batch in parts."
        return {'batch': self} if learn.microbatch else None

    def __call__(self, learn: Learner) -> None:
        "Train on the current batch."
        pending = [(p, p.grad.clone()) for p in learn.opt.parameters() if p.grad is not None]
        try:
            if learn.microbatch == 'auto':
                self.run_within_memory(learn, pending)
            else:
                self.run(learn, learn.microbatch)
        except CancelBatchException:  # the gradient of a part of the batch is useless
            restore_gradients(learn, pending)
            learn.__dict__.pop('loss_grad', None)
            raise
        learn._take_step()
        learn.opt.zero_grad()

    def run(
        self,
        learn: Learner,
        size: Any,  # number of samples, or 'auto'
    ) -> None:
        "Accumulate the gradients of microbatches, weighted so that their sum is the batch's gradient."
        loss_weights = learn.parts.loss_weights
        if size == 'auto':
            size = self._find_size(learn)
        xb = learn.xb
        yb = learn.yb
        parts = learn.parts.processes.batch.split(learn, xb, yb, size)
        if not loss_weights.is_sum(learn):
            self._weights = [loss_weights.weigh_batch(learn, *part) for part in parts]
        run_passes = learn.seams.passes or self.run_passes
        losses = []
        try:
            for i, part in enumerate(parts):
                learn.xb, learn.yb = part
                self.index = i
                self.is_last = i + 1 == len(parts)
                clear_pass(learn)
                run_passes(learn)
                losses.append(weighted_loss(learn.loss.detach(), self.share))
                release_loss(learn)
        finally:
            learn.xb = xb
            learn.yb = yb
            self.is_last = True
            self.share = 1.0
            self._weights = None
        learn.loss = sum(losses[1:], losses[0])
        if len(parts) > 1 and not self._has_checked_layers:
            self._has_checked_layers = True
            warn_of_layers(learn, size)

    def run_passes(self, learn: Learner) -> None:
        "Run forward and backward of the current microbatch."
        learn._do_pred_loss()
        self._find_share(learn.loss.dtype)
        backward = partial(self._backward, learn)
        learn._with_events(backward, 'backward', CancelBackwardException)

    def _find_share(self, dtype: torch.dtype) -> None:
        "Set the share of the current microbatch, in the precision of the loss."
        if self._weights is not None:
            weight = to_dtype(self._weights[self.index], dtype)
            self.share = divide(weight, sum(self._weights))

    def compiled_step(self, learn: Learner) -> dict[str, Any]:
        "Return the weighting of the loss in a compiled step, as `compiled_step` of a callback does."

        def read_share() -> dict[str, Any]:
            self._find_share(learn.loss.dtype)  # the loss before has the same precision
            return {'share': self.share}

        return {'state': read_share, 'before_backward': scale_loss}

    def _find_size(self, learn: Learner) -> int:
        n = max(list_sizes(learn))
        return min(self.fitting_size or n, n)

    def _backward(self, learn: Learner) -> None:
        "Run backward on the weighted loss; the weight also applies to terms that callbacks added."
        learn.loss_grad = learn.loss_grad * self.share
        learn._backward()

    def run_within_memory(self, learn: Learner, pending: list[tuple[Tensor, Tensor]]) -> None:
        "Run on the whole batch. Out of memory, restore the state before the batch and halve the size."
        rng = capture_rng()
        buffers = copy_buffers(learn.model)
        while True:
            size = self._find_size(learn)
            try:
                self.run(learn, size)
                return
            except RuntimeError as e:
                if not is_out_of_memory(e):
                    raise
                if size == 1:
                    add_note(e, "microbatch='auto': not even one sample fits")
                    raise
            # outside of `except`, where the frames that hold the failed pass's tensors are released
            restore_gradients(learn, [(p, grad.clone()) for p, grad in pending])
            clear_pass(learn)
            restore_buffers(buffers)
            restore_rng(rng)
            empty_cache()
            self.fitting_size = (size + 1) // 2
            self._has_checked_layers = False


def scale_loss(loss: Tensor, state: dict[str, Any]) -> Tensor:
    "Return the loss of a compiled step times its share, if it has one."
    return loss * state['share'] if 'share' in state else loss


def find_microbatch_size(learn: Learner) -> int | None:
    """Return the number of samples of a microbatch, for 'auto' the size that fits into memory; None for whole batches.

    >>> from learnkit.testing import synth_learner
    >>> find_microbatch_size(synth_learner(microbatch=4)), find_microbatch_size(synth_learner())
    (4, None)
    """
    size: Any = learn.microbatch
    if size == 'auto':
        size = learn.parts.microbatches.fitting_size
    return size or None


def to_dtype(weight: Any, dtype: torch.dtype) -> Any:
    "Convert a weight that is a tensor to the precision of the loss."
    return weight.to(dtype) if isinstance(weight, Tensor) else weight


def divide(part: Any, whole: Any) -> Any:
    """Return `part / whole`, and 0 if both are 0. Tensors stay on their device.

    >>> divide(1, 4), divide(0, 0), divide(torch.tensor(0.), torch.tensor(0.))
    (0.25, 0.0, tensor(0.))
    """
    if isinstance(whole, Tensor):
        return torch.where(whole == 0, 0.0, part / whole)
    if isinstance(part, Tensor) or whole:
        return part / whole
    return 0.0


def weighted_loss(loss: Tensor, share: Any) -> Tensor:
    "Return a loss times its share. With a share of 0 it is 0, because the mean loss of no samples is nan."
    if isinstance(share, Tensor):
        return torch.where(share == 0, 0.0, loss * share)
    return loss * share if share else torch.zeros_like(loss)


def warn_of_layers(
    learn: Learner,
    size: int,  # largest number of samples of a microbatch
) -> None:
    "Warn of norm layers with statistics of the batch, which are of each microbatch."
    names = [
        f'{name or "the model"} ({type(m).__name__})'
        for name, m in learn.model.named_modules()
        if m.training and has_batch_statistics(m)
    ]
    if not names:
        return
    others = f' and {len(names) - 1} other layers' if len(names) > 1 else ''
    verb = 'see' if others else 'sees'
    warn_user(
        f'microbatch={learn.microbatch!r}: {names[0]}{others} {verb} each microbatch of {size} samples on its own, so '
        'that the training differs from one with whole batches. Layers without statistics of a batch, such as '
        'nn.GroupNorm, see no difference.'
    )


def restore_gradients(learn: Learner, pending: list[tuple[Tensor, Tensor]]) -> None:
    "Restore the gradients from before a batch."
    learn.opt.zero_grad()
    for p, grad in pending:
        p.grad = grad


# parts of messages of plain RuntimeErrors, from the CPU's allocator and from libraries that allocate on a GPU
OUT_OF_MEMORY_MESSAGES = (
    'DefaultCPUAllocator',
    'CUBLAS_STATUS_ALLOC_FAILED',
    'CUDNN_STATUS_ALLOC_FAILED',
)


def is_out_of_memory(e: RuntimeError) -> bool:
    """Return True for out-of-memory errors.

    >>> is_out_of_memory(RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`'))
    True
    """
    message = str(e)
    is_message = any(part in message for part in OUT_OF_MEMORY_MESSAGES)
    return isinstance(e, torch.OutOfMemoryError) or is_message
