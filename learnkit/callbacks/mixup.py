"""MixUp and CutMix: train on blends of samples, with the loss blended alike."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Beta

from learnkit.batch import describe, find_bs, map_tensors, microbatches
from learnkit.callback import Callback
from learnkit.callbacks.hooks import tensors_in
from learnkit.callbacks.training import bad_option, is_number
from learnkit.errors import BatchError, LossError, OptionError
from learnkit.loop import name_of

__all__ = ['MixHandler', 'MixUp', 'CutMix']


class MixHandler(Callback):
    """Blend the loss of each training batch between its own targets and those of its partners: the base of `MixUp`.

    A subclass draws in `before_batch` how the samples are paired. It changes `learn.xb`, and sets `yb1` (the partners'
    targets) and `lam`, the share of the sample itself: a tensor with one number a sample, or with one for all. Where
    `stack_y` holds, the loss becomes `lam * loss(pred, y) + (1 - lam) * loss(pred, y1)` for each sample, reduced as the
    loss function says; otherwise the subclass blends the targets themselves.

    For the time of a forward pass in training `learn.loss_func` is a function that does this, and it is put back
    whatever happens. Evaluation, also in the middle of training, has the plain loss. Metrics on training batches get
    the predictions for the blended inputs, and the targets `yb`: whole classes of the samples themselves, or blended
    numbers. 'mean' is the plain mean over the elements, as in fastai, also with class weights or an `ignore_index`.

    Everything random is drawn on the CPU, from torch's global generator, so that a resumed run draws the same.
    Checkpointed: nothing.

    Raises `OptionError` unless `alpha` is positive, and before any weight has changed: for two of them in one fit,
    `LossError` for a loss function that cannot be computed without its reduction, and `BatchError` for a batch in which
    there is nothing to blend.
    """
    run_valid = False
    averages_samples = True   # whatever the plain loss averages over

    def __init__(
        self,
        alpha: float = 0.5,   # of the distribution Beta(alpha, alpha) of the shares: the larger, the more is blended
    ) -> None:
        super().__init__()
        if not is_number(alpha) or not 0 < alpha < float('inf'):
            raise bad_option(self, 'a number above 0; for no blending, leave the callback out', alpha=alpha)
        self.distrib = Beta(torch.tensor(float(alpha)), torch.tensor(float(alpha)))
        self._forget()

    def _forget(self) -> None:
        "Let go of the last batch."
        for name in ('lam', 'yb1'): self.__dict__.pop(name, None)
        self._order: Tensor | None = None                         # of the partners in their batch
        self._pieces: tuple[Any, Iterator[Any]] = None, iter(())  # a batch's `yb1`, and its microbatches to come
        self._reduction: tuple[Any, str] = None, ''               # a loss function, and how it reduces

    @property
    def stack_y(self) -> bool:
        "Whether the loss is blended and not the targets: the loss says so (`y_int`), or a target is no float."
        if getattr(self.learn.loss_func, 'y_int', False): return True
        return any(not t.is_floating_point() for t in tensors_in(self.learn.yb))

    def before_fit(self) -> None:
        if self.fitting and self.learn.loss_func is None:
            raise LossError(f'{type(self).__name__} needs a loss function to blend: pass `loss_func=` to the Learner.')
        others = [cb for cb in self.learn.cbs if isinstance(cb, MixHandler) and cb is not self]
        if self.fitting and others:
            raise OptionError(f'{self} and {others[0]} both blend each batch, and the loss of only one would be right. '
                              'Use one of them in a fit.')

    def before_step(self) -> None:
        "See that the microbatches were pieces of the batch that was blended."
        if self._order is None or self._pieces[0] is not self.yb1: return
        if (n := find_bs(self.learn.xb)) != len(self._order):
            raise BatchError(f'{type(self).__name__}: a callback that runs after it made {n} samples of '
                             f'{len(self._order)} in before_batch. Give it a lower order, or leave `microbatch` out.')

    def cleanup(self) -> None: self._forget()

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        "Return a context in which the loss is blended."
        if 'lam' not in self.__dict__ or not self.stack_y: yield; return
        learn, plain = self.learn, self.learn.loss_func
        if self._reduction[0] is not plain: self._reduction = plain, reduction_of(plain, type(self).__name__)
        partners = self._next_piece(learn.microbatch) if learn.microbatch else (self.yb1, self.lam)
        learn.loss_func = BlendedLoss(learn, plain, partners, self._reduction[1])
        try: yield
        finally: learn.loss_func = plain

    def _next_piece(self, size: int) -> tuple[Any, Any]:
        "Return partners' targets and shares of the next microbatch, or of the first when the batch is repeated."
        of, pieces = self._pieces
        piece = next(pieces, None) if of is self.yb1 else None
        if piece is None:
            whole = self.yb1 if self._order is None else (self._order,)
            pieces = iter(microbatches(whole, (self.yb1, self.lam), size))
            self._pieces, piece = (self.yb1, pieces), next(pieces)
        return piece[1]

    def _pair(self, n: int) -> Tensor:
        "Draw with which one each of `n` samples is blended, and set the partners' targets."
        self._order = order = torch.randperm(n).to(tensors_in(self.learn.xb)[0].device, non_blocking=True)
        if not any(is_of_samples(t, n) for t in tensors_in(self.learn.yb)):
            raise BatchError(f'{type(self).__name__} cannot blend the targets {describe(self.learn.yb)}: there is no '
                             f'tensor with one entry for each of {n} samples.')
        self.yb1 = map_tensors(self.learn.yb, lambda t: t[order] if is_of_samples(t, n) else t)
        return order

    def _blend_targets(self, order: Tensor) -> None:
        "Blend the targets, unless the loss does it."
        if not self.stack_y: self.learn.yb = blended_tensors(self.learn.yb, order, self.lam)


class BlendedLoss:
    "A loss function that is blended in training; in an evaluation meanwhile, and for the rest, it is the plain one."

    def __init__(
        self,
        learn: Any,
        plain: Callable[..., Any],
        partners: tuple[Any, Any],   # targets and share
        reduction: str,              # of the plain one
    ) -> None:
        self.__dict__.update(_learn=learn, _plain=plain, _partners=partners, _reduction=reduction,
                             __name__=name_of(plain))

    def __call__(self, pred: Any, *yb: Any, **kwargs: Any) -> Any:
        "Compute the loss of a training batch from that to its own targets and that to its partners'."
        plain, (yb1, lam), reduction = self._plain, self._partners, self._reduction
        if not self._learn.training: return plain(pred, *yb, **kwargs)
        own, other = unreduced(plain, pred, yb), unreduced(plain, pred, yb1)
        loss = torch.lerp(other, own, share_of_each(lam, own, plain))
        return loss.mean() if reduction == 'mean' else loss.sum() if reduction == 'sum' else loss

    def __getattr__(self, name: str) -> Any: return getattr(self.__dict__['_plain'], name)
    def __setattr__(self, name: str, value: Any) -> None: setattr(self._plain, name, value)


class MixUp(MixHandler):
    """Train on weighted means of samples (Zhang et al., 2018, https://arxiv.org/abs/1710.09412).

    Each sample is blended with another one of its batch: `x = lam * x + (1 - lam) * x1`, with a `lam` of its own from
    Beta(alpha, alpha), the larger of it and `1 - lam`. All floating-point tensors of the input with one entry a sample
    are blended. For the loss see `MixHandler`; `lam` has the shape `(bs,)`.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=MixUp(0.2))
    >>> with learn.no_bar(): learn.fit(1)
    """

    def __init__(
        self,
        alpha: float = 0.4,   # of Beta(alpha, alpha): the larger, the more is blended
    ) -> None: super().__init__(alpha)

    def before_batch(self) -> None:
        "Blend the batch with itself in another order."
        learn, n = self.learn, find_bs(self.learn.xb)
        if not any(t.is_floating_point() and is_of_samples(t, n) for t in tensors_in(learn.xb)):
            raise BatchError(f'MixUp cannot blend the inputs {describe(learn.xb)}: there is no floating-point tensor '
                             'with one entry a sample. Turn them into floats first, in a callback of lower order.')
        lam = self.distrib.sample((n,))
        order = self._pair(n)
        self.lam = torch.maximum(lam, 1 - lam).to(order.device, non_blocking=True)
        learn.xb = blended_tensors(learn.xb, order, self.lam)
        self._blend_targets(order)


class CutMix(MixHandler):
    """Train on images with a box of another one pasted in (Yun et al., 2019, https://arxiv.org/abs/1905.04899).

    One box a batch, of a share `1 - lam` of the image with `lam` from Beta(alpha, alpha), at a random place; what lies
    outside the image is cut off, and `lam` becomes the share that is left of the image itself, exactly. Every input
    of the same height and width `(bs, ..., H, W)` gets the box, other ones stay as they are. For the loss see
    `MixHandler`; `lam` has the shape `(1,)`.

    >>> from learnkit.testing import synth_learner
    >>> images, classes = torch.rand(32, 3, 8, 8), torch.randint(10, (32,))
    >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, classes), batch_size=8)
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))
    >>> learn = synth_learner(dls=loader, model=model, loss_func=torch.nn.functional.cross_entropy, cbs=CutMix)
    >>> with learn.no_bar(): learn.fit(1)
    """

    def __init__(
        self,
        alpha: float = 1.,    # of Beta(alpha, alpha): 1 makes all shares equally likely
    ) -> None: super().__init__(alpha)

    def before_batch(self) -> None:
        "Paste a box of the batch in another order into the batch."
        learn, n = self.learn, find_bs(self.learn.xb)
        sizes = [t.shape[-2:] for t in tensors_in(learn.xb) if t.ndim > 2 and is_of_samples(t, n)]
        if not sizes:
            raise BatchError(f'CutMix found no images (bs, ..., height, width) in the inputs {describe(learn.xb)}.')
        h, w = sizes[0]
        lam = self.distrib.sample((1,))
        order = self._pair(n)
        x1, y1, x2, y2 = self.rand_bbox(w, h, lam)
        area = torch.tensor([(x2 - x1) * (y2 - y1)])
        self.lam = (1 - area / (w * h)).to(order.device, non_blocking=True)

        def with_box(t: Tensor) -> Tensor:
            if t.ndim < 3 or t.shape[-2:] != (h, w) or not is_of_samples(t, n): return t
            new, box = t.clone(), (..., slice(y1, y2), slice(x1, x2))  # a loader may give the same tensor again
            new[box] = t[box][order]
            return new
        learn.xb = map_tensors(learn.xb, with_box)
        self._blend_targets(order)

    def rand_bbox(
        self,
        W: int,       # width of the images
        H: int,       # their height
        lam: Tensor,  # the share of the image that is to stay, of one element on the CPU
    ) -> tuple[int, int, int, int]:  # x1, y1, x2, y2; the last two are exclusive
        "Draw the centre of a box, and cut off what lies outside."
        side = torch.sqrt(1 - lam)
        (x1, x2), (y1, y2) = (interval(size, int(torch.round(size * side))) for size in (W, H))
        return x1, y1, x2, y2


def interval(size: int, length: int) -> tuple[int, int]:
    "Draw an interval of about `length` with its middle in `range(size)`, and return what of it lies in that range."
    middle = int(torch.randint(0, size, (1,)))
    return max(0, middle - length // 2), min(size, middle + length // 2)


def is_of_samples(t: Tensor, n: int) -> bool:
    "Tell whether a tensor has an entry for each of `n` samples."
    return t.ndim > 0 and t.shape[0] == n


def blended_tensors(b: Any, order: Tensor, lam: Tensor) -> Any:
    "Blend each sample of a nested batch's floating-point tensors with the one that has its place in `order`."
    def blended(t: Tensor) -> Tensor:
        if not t.is_floating_point() or not is_of_samples(t, len(order)): return t
        return torch.lerp(t[order], t, lam.to(t).view(-1, *[1] * (t.ndim - 1)))
    return map_tensors(b, blended)


def reduction_of(loss_func: Any, who: str) -> str:
    "Return how a loss function reduces, or raise `LossError` when it cannot be asked not to."
    if hasattr(loss_func, 'reduction'): return loss_func.reduction
    try: params = signature(getattr(loss_func, 'forward', loss_func)).parameters
    except (TypeError, ValueError): return 'mean'  # written in C: calling it will tell
    if 'reduction' in params: return params['reduction'].default
    if any(p.kind is p.VAR_KEYWORD for p in params.values()): return 'mean'
    raise LossError(f'{who} needs the loss of each sample, and {name_of(loss_func)} has no `reduction`. Give it that '
                    "keyword (with 'none' it returns one number a sample), or targets that can be blended: floats.")


def unreduced(loss_func: Any, pred: Any, yb: tuple[Any, ...]) -> Tensor:
    "Compute the loss of each element."
    if not hasattr(loss_func, 'reduction'): return loss_func(pred, *yb, reduction='none')
    reduction = loss_func.reduction
    try:
        loss_func.reduction = 'none'
        return loss_func(pred, *yb)
    finally: loss_func.reduction = reduction


def share_of_each(lam: Tensor, loss: Tensor, loss_func: Any) -> Tensor:
    "Return the shares in the shape of an unreduced loss: samples first, or all elements in a row, sample by sample."
    n = len(lam)
    if not isinstance(loss, Tensor): found = describe(loss)
    elif n == 1: return lam.to(loss).view(())
    elif is_of_samples(loss, n): return lam.to(loss).view(-1, *[1] * (loss.ndim - 1))
    elif loss.ndim == 1 and len(loss) % n == 0: return lam.to(loss).repeat_interleave(len(loss) // n)
    else: found = f'a tensor of shape {tuple(loss.shape)}'
    raise LossError(f"{name_of(loss_func)} with reduction='none' gave {found} for {n} samples. To blend it, one number "
                    'for each sample or each of its elements is needed.')
