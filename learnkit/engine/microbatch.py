"""Microbatches: a batch in pieces, whose gradients add up to those of the whole."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any
from warnings import warn

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from learnkit.core.batch import count_samples, cut_batch, find_bs, microbatches
from learnkit.core.denominator import (
    ClassTargets,
    Denominator,
    Samples,
    Tokens,
    denominator_of,
    denominator_of_model,
)
from learnkit.core.errors import CancelBackwardException, CancelBatchException, CancelStepException
from learnkit.core.random import capture_rng, restore_rng
from learnkit.engine.evaluation import Evaluations
from learnkit.engine.run import add_note

__all__ = ['Pieces']


class Pieces(Evaluations):
    "The part of the loop that trains on a batch in pieces."
    _do_pred_loss: Callable[[], None]
    _backward: Callable[[], None]
    _step: Callable[[], None]
    _with_events: Callable[..., None]
    _piece, _is_last_piece = 0, True           # number of the piece at hand; whether none follows it
    _fitting_size: int | None = None           # size that fits in memory, with 'auto'; None: any so far
    _share: Any = 1.                           # of the piece at hand in the loss of its batch
    _known_denominator: tuple[Any, ...] = None, None, None, None  # by loss, `weight_func`, model

    def _forget_pass(self) -> None:
        for name in ('pred', 'loss_grad'): self.__dict__.pop(name, None)

    def _do_microbatches(self, size: int | str) -> None:
        pending = [(p, p.grad.clone()) for p in self.opt.parameters() if p.grad is not None]
        try: self._do_pieces_that_fit(pending) if size == 'auto' else self._do_pieces(size)
        except CancelBatchException:
            # part of a batch's gradient means nothing: back to what was there before it
            self._put_gradients_back(pending)
            self.__dict__.pop('loss_grad', None)
            raise
        self._with_events(self._step, 'step', CancelStepException)
        self.opt.zero_grad()

    def _put_gradients_back(self, pending: list[tuple[Tensor, Tensor]]) -> None:
        self.opt.zero_grad()
        for p, grad in pending: p.grad = grad

    def _do_pieces(self, size: Any) -> None:
        "Add up the gradients of the pieces, each weighted so that the sum is the gradient of the whole batch."
        xb, yb, total = self.xb, self.yb, None
        if size == 'auto':
            n = count_samples(self)
            size = min(self._fitting_size or n, n)
        pieces = self._cut(xb, yb, size)
        weights = self._weights(pieces)
        try:
            for self._piece, (piece, weight) in enumerate(zip(pieces, weights or pieces, strict=True)):
                self.xb, self.yb = piece
                self._is_last_piece = self._piece + 1 == len(pieces)
                self._forget_pass()
                self._do_pred_loss()
                self._share = share_of(weight, weights, self.loss.dtype)
                counted = counted_part(self.loss, self._share)
                total = counted if total is None else total + counted
                self._with_events(self._backward_of_piece, 'backward', CancelBackwardException)
        finally:
            self.xb, self.yb = xb, yb
            for name in ('_is_last_piece', '_share'): self.__dict__.pop(name, None)
        self.loss = total

    def _backward_of_piece(self) -> None:
        "Run the backward pass of a piece by its share: what callbacks have added to its loss has that share too."
        self.loss_grad = self.loss_grad * self._share
        self._backward()

    def _cut(self, xb: Any, yb: Any, size: int) -> list[tuple[Any, Any]]:
        "Cut a batch into pieces."
        return microbatches(xb, yb, size, find_bs(xb, yb, self.size_func))

    def _check_cut(self) -> None:
        "Raise `BatchError` for a batch that cannot be cut, also where it is small enough."
        n = count_samples(self)
        cut_batch(self.xb, self.yb, n, [slice(0, n)])

    def _weights(self, pieces: list[tuple[Any, Any]]) -> list[Any] | None:
        "Return what each piece weighs, which is what its loss averages over; None for a loss that is a sum."
        if self._loss_is_sum(): return None
        return [self._weight_of(*piece) for piece in pieces]

    def _weight_of(self, xb: Any, yb: Any) -> Any:
        count = self._count_for_loss(xb, yb)
        return find_bs(xb, yb, self.size_func) if count is None else count

    def _count_for_loss(self, xb: Any, yb: Any) -> Any:
        "Return what the loss of a batch, or a piece of one, averages over; None for its samples."
        if callable(self.weight_func):
            return self.weight_func(xb, yb)
        if self.training and self._blends_loss():
            return None
        denominator = self._denominator()
        if not self.iter:
            denominator.look(yb)   # once a pass: it may wait for the device
        return denominator.count(yb)

    def _weighs_samples(self) -> bool:
        "Return True where batches with as many samples weigh the same."
        if callable(self.weight_func): return False
        return self._blends_loss() or not self._denominator().varies(self.yb)

    def _blends_loss(self) -> bool:
        "Return True while a callback makes the training loss a mean over samples, whatever the loss function says."
        callbacks = self._callbacks
        if callbacks.blending is None:
            callbacks.blending = [cb for cb in callbacks if getattr(type(cb), 'averages_samples', False)]
        return bool(callbacks.blending) and any(cb.run for cb in callbacks.blending)

    def _denominator(self) -> Denominator:
        "Return what the loss averages over, decided once for a loss function."
        loss_func, weight_func, model_class, denominator = self._known_denominator
        asked = self.loss_func, self.weight_func, self.model.__class__
        if denominator is None or (loss_func, weight_func, model_class) != asked:
            denominator = self._find_denominator()
            self._known_denominator = *asked, denominator
        return denominator

    def _find_denominator(self) -> Denominator:
        if self.weight_func == 'samples': return Samples()
        of_loss = denominator_of_model(self.model) if self.loss_func is None else denominator_of(self.loss_func)
        if self.weight_func != 'tokens': return of_loss
        return Tokens(of_loss.ignore_index) if isinstance(of_loss, ClassTargets) else Tokens()

    def _loss_is_sum(self) -> bool:
        "Tell whether the loss adds up over samples, where others are their mean."
        of_partial = getattr(self.loss_func, 'keywords', {}).get('reduction')
        return bool(getattr(self.loss_func, 'reduction', of_partial) == 'sum')

    def _samples(self) -> int:
        "Return the number of samples of the batch at hand, in all processes that train together."
        return count_samples(self)

    def _whole_weight(self) -> Any:
        "Return what the batch at hand weighs, in all processes that train together; None for a loss that is a sum."
        weights = self._weights([(self.xb, self.yb)])
        return weights and weights[0]

    # -- the size that memory allows -----------------------------------------------------------------------------------

    def _do_pieces_that_fit(self, pending: list[tuple[Tensor, Tensor]]) -> None:
        "Do the batch whole; when memory runs out, put everything back and do it in pieces of half the size."
        rng = capture_rng()
        buffers = [(m, k, b, b.clone()) for m in self.model.modules() for k, b in m._buffers.items() if b is not None]
        bs, tried = count_samples(self), []
        while True:
            size = min(self._fitting_size or bs, bs)
            try: return self._do_pieces(size)
            except RuntimeError as e:
                tried.append(size)
                if not is_out_of_memory(e): raise
                if size == 1:
                    add_note(e, f"microbatch='auto': not even one sample fits; tried {', '.join(map(str, tried))}")
                    raise
            # only here is the exception gone, and with it the frames that hold the tensors of the failed pass
            self._put_gradients_back([(p, g.clone()) for p, g in pending])
            self._forget_pass()
            for m, key, b, value in buffers: m._buffers[key] = b.copy_(value)  # a forward pass may replace them
            restore_rng(rng)
            if self._device is not None and self._device.type == 'cuda': torch.cuda.empty_cache()
            self._shrink_to((size + 1) // 2)

    def _shrink_to(self, size: int) -> None:
        self._fitting_size = size
        if any(isinstance(m, _BatchNorm) and m.training for m in self.model.modules()):
            warn(f"microbatch='auto': memory holds {size} samples at a time. Batch norm layers see each piece on its "
                 'own, so that the training differs from one with whole batches.', stacklevel=2)


def is_out_of_memory(e: RuntimeError) -> bool:
    "Tell an error of a device's memory; that of the CPU has no type of its own."
    return isinstance(e, torch.OutOfMemoryError) or 'DefaultCPUAllocator' in str(e)


def share_of(weight: Any, weights: list[Any] | None, dtype: torch.dtype) -> Any:
    "Return a piece's share in the loss of its batch, without leaving the device, in the loss's precision."
    if weights is None: return 1.
    weight = weight.to(dtype) if isinstance(weight, Tensor) else weight
    return ratio(weight, sum(weights))


def ratio(part: Any, whole: Any) -> Any:
    """Return `part / whole`, and 0 where both are 0: what does not count has no share. Tensors stay on their device.

    >>> ratio(1, 4), ratio(0, 0), ratio(torch.tensor(0.), torch.tensor(0.))
    (0.25, 0.0, tensor(0.))
    """
    if not isinstance(whole, Tensor): return part / whole if isinstance(part, Tensor) or whole else 0.
    return torch.where(whole == 0, 0., part / whole)


def counted_part(loss: Tensor, share: Any) -> Tensor:
    "Return a loss times its share; 0 without a share, as the mean of nothing is nan."
    if isinstance(share, Tensor): return torch.where(share == 0, torch.zeros_like(loss), loss * share)
    return loss * share if share else torch.zeros_like(loss)
