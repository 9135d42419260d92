"""Microbatches: weight of each in the loss of its batch, and the size that fits into memory."""

from __future__ import annotations

from typing import Any
from warnings import warn

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from learnkit.core.batch import count_samples
from learnkit.core.errors import add_note
from learnkit.core.learner_type import LoopLike
from learnkit.core.model import copy_buffers, restore_buffers
from learnkit.core.random import capture_rng, restore_rng

__all__ = ['restore_gradients', 'train_within_memory', 'weigh', 'weighted_loss']


def weigh(weight: Any, weights: list[Any] | None, dtype: torch.dtype) -> Any:
    "Return a microbatch's share in the loss of its batch, in the loss's precision, without a device sync."
    if weights is None:
        return 1.0
    if isinstance(weight, Tensor):
        weight = weight.to(dtype)
    return divide(weight, sum(weights))


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
    "Return a loss times its share. A share of 0 gives 0, because the mean loss of no samples is nan."
    if isinstance(share, Tensor):
        return torch.where(share == 0, torch.zeros_like(loss), loss * share)
    return loss * share if share else torch.zeros_like(loss)


# -- size that fits into memory --------------------------------------------------------------------


def train_within_memory(learn: LoopLike, pending: list[tuple[Tensor, Tensor]]) -> None:
    "Train on the whole batch. Out of memory, restore the state before the batch and halve the microbatch size."
    rng = capture_rng()
    buffers = copy_buffers(learn.model)
    bs = count_samples(learn)
    tried = []
    while True:
        size = min(learn.auto_microbatch or bs, bs)
        try:
            learn.run_microbatches(size)
            return
        except RuntimeError as e:
            tried.append(size)
            if not is_out_of_memory(e):
                raise
            if size == 1:
                sizes = ', '.join(map(str, tried))
                add_note(e, f"microbatch='auto': not even one sample fits; tried {sizes}")
                raise
        # outside of `except`, where the frames that hold the failed pass's tensors are released
        restore_gradients(learn, [(p, grad.clone()) for p, grad in pending])
        learn.clear_pass()
        restore_buffers(buffers)
        restore_rng(rng)
        if learn.run.device is not None and learn.run.device.type == 'cuda':
            torch.cuda.empty_cache()
        learn.auto_microbatch = (size + 1) // 2
        warn_of_batch_norm(learn)


def warn_of_batch_norm(learn: LoopLike) -> None:
    "Warn if the model has batch norm layers, which normalize each microbatch separately."
    if any(isinstance(m, _BatchNorm) and m.training for m in learn.model.modules()):
        warn(
            f"microbatch='auto': memory holds {learn.auto_microbatch} samples at a time. Batch norm "
            'layers see each microbatch on its own, so that the training differs from one with whole '
            'batches.',
            stacklevel=2,
        )


def restore_gradients(learn: LoopLike, pending: list[tuple[Tensor, Tensor]]) -> None:
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
