"""What the parts of a batch weigh in its loss, and how large a microbatch memory allows."""

from __future__ import annotations

from typing import Any
from warnings import warn

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from learnkit.core.batch import count_samples, find_bs
from learnkit.core.denominator import (
    ClassTargets,
    Denominator,
    Samples,
    Tokens,
    denominator_of,
    denominator_of_model,
)
from learnkit.core.learner_type import LoopLike
from learnkit.core.random import capture_rng, restore_rng
from learnkit.engine.run import add_note

__all__ = ['LossWeights', 'restore_gradients', 'train_within_memory', 'weigh', 'weighted_loss']


class LossWeights:
    """What the loss of a batch averages over, so that its parts add up to the whole.

    For most losses these are the samples; for cross-entropy the targets that are not ignored, with
    their class weights; or what `weight_func` returns.
    """

    def __init__(self) -> None:
        # the loss, `weight_func` and class of the model that the denominator was found for
        self._asked: tuple[Any, Any, Any] = None, None, None
        self._denominator: Denominator | None = None

    def is_sum(self, learn: LoopLike) -> bool:
        "Return True if the loss adds up over samples, and is not their mean."
        of_partial = getattr(learn.loss_func, 'keywords', {}).get('reduction')
        return bool(getattr(learn.loss_func, 'reduction', of_partial) == 'sum')

    def are_samples(self, learn: LoopLike) -> bool:
        "Return True if batches with as many samples weigh the same."
        if callable(learn.weight_func):
            return False
        return learn.callbacks.average_samples() or not self.denominator(learn).varies(learn.yb)

    def of(self, learn: LoopLike, xb: Any, yb: Any) -> Any:
        "Return the weight of a batch, or a part of one: a number, or a tensor on its device."
        n = self.count(learn, xb, yb)
        return find_bs(xb, yb, learn.size_func) if n is None else n

    def count(self, learn: LoopLike, xb: Any, yb: Any) -> Any:
        "Return what the loss of a batch averages over; None for its samples."
        if callable(learn.weight_func):
            return learn.weight_func(xb, yb)
        if learn.training and learn.callbacks.average_samples():
            return None
        denominator = self.denominator(learn)
        if not learn.iter:
            denominator.look(yb)  # once a pass: it may wait for the device
        return denominator.count(yb)

    def denominator(self, learn: LoopLike) -> Denominator:
        "Return what the loss averages over, found once for a loss function."
        asked = learn.loss_func, learn.weight_func, learn.model.__class__
        if self._denominator is None or asked != self._asked:
            self._denominator = find_denominator(learn)
            self._asked = asked
        return self._denominator

    def __getstate__(self) -> dict[str, Any]:
        "Return nothing: a copy finds it again."
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        LossWeights.__init__(self)


def find_denominator(learn: LoopLike) -> Denominator:
    "Return what the loss of a Learner averages over."
    if learn.weight_func == 'samples':
        return Samples()
    if learn.loss_func is None:
        of_loss = denominator_of_model(learn.model)
    else:
        of_loss = denominator_of(learn.loss_func)
    if learn.weight_func != 'tokens':
        return of_loss
    return Tokens(of_loss.ignore_index) if isinstance(of_loss, ClassTargets) else Tokens()


def weigh(weight: Any, weights: list[Any] | None, dtype: torch.dtype) -> Any:
    "Return a part's share in the loss of its batch, in the loss's precision, without a sync."
    if weights is None:
        return 1.0
    if isinstance(weight, Tensor):
        weight = weight.to(dtype)
    return ratio(weight, sum(weights))


def ratio(part: Any, whole: Any) -> Any:
    """Return `part / whole`, and 0 if both are 0. Tensors stay on their device.

    >>> ratio(1, 4), ratio(0, 0), ratio(torch.tensor(0.), torch.tensor(0.))
    (0.25, 0.0, tensor(0.))
    """
    if isinstance(whole, Tensor):
        return torch.where(whole == 0, 0.0, part / whole)
    if isinstance(part, Tensor) or whole:
        return part / whole
    return 0.0


def weighted_loss(loss: Tensor, share: Any) -> Tensor:
    "Return a loss times its share; 0 without a share, as the mean of nothing is nan."
    if isinstance(share, Tensor):
        return torch.where(share == 0, torch.zeros_like(loss), loss * share)
    return loss * share if share else torch.zeros_like(loss)


# -- the size that memory allows -------------------------------------------------------------------


def train_within_memory(learn: LoopLike, pending: list[tuple[Tensor, Tensor]]) -> None:
    "Train on the whole batch; when memory runs out, restore everything and halve the size."
    rng = capture_rng()
    buffers = [
        (module, key, buffer, buffer.clone())
        for module in learn.model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    bs, tried = count_samples(learn), []
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
        # only here is the exception gone, and with it the frames that hold the failed pass's tensors
        restore_gradients(learn, [(p, grad.clone()) for p, grad in pending])
        learn.clear_pass()
        for module, key, buffer, value in buffers:
            module._buffers[key] = buffer.copy_(value)  # a forward pass may replace them
        restore_rng(rng)
        if learn.run.device is not None and learn.run.device.type == 'cuda':
            torch.cuda.empty_cache()
        learn.auto_microbatch = (size + 1) // 2
        warn_of_batch_norm(learn)


def warn_of_batch_norm(learn: LoopLike) -> None:
    "Warn if the model's batch norm layers would see the microbatches, and not the batch."
    if any(isinstance(m, _BatchNorm) and m.training for m in learn.model.modules()):
        warn(
            f"microbatch='auto': memory holds {learn.auto_microbatch} samples at a time. Batch norm "
            'layers see each piece on its own, so that the training differs from one with whole '
            'batches.',
            stacklevel=2,
        )


def restore_gradients(learn: LoopLike, pending: list[tuple[Tensor, Tensor]]) -> None:
    "Restore the gradients that were there before a batch."
    learn.opt.zero_grad()
    for p, grad in pending:
        p.grad = grad


def is_out_of_memory(e: RuntimeError) -> bool:
    "Return True for out-of-memory errors; on CPU torch raises a plain RuntimeError."
    return isinstance(e, torch.OutOfMemoryError) or 'DefaultCPUAllocator' in str(e)
