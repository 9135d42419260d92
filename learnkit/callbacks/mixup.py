# SPDX-License-Identifier: Apache-2.0
"""MixUp and CutMix: train on blends of samples, with losses blended in the same shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta
from typing_extensions import override

from learnkit.callbacks.mixed_precision import to_single
from learnkit.callbacks.training import bad_option
from learnkit.core.batch import (
    count_samples,
    describe,
    find_bs,
    has_listed_samples,
    map_tensors,
    slice_batch,
    tensors_in,
)
from learnkit.core.errors import BatchError, LossError, OptionError
from learnkit.core.model import name_of
from learnkit.core.validation import is_number
from learnkit.engine.advice import warn_of_plain_loss
from learnkit.engine.callback import Callback
from learnkit.engine.custom_batch import list_overrides
from learnkit.losses import BaseLoss

if TYPE_CHECKING:
    from learnkit.learner import Learner


class MixHandler(Callback):
    """Blend the loss of each training batch between its own targets and its partners': base of `MixUp`.

    In `before_batch` a subclass draws the partner of each sample, changes `learn.xb`, and sets
    `yb1` (targets of the partners) and `lam` (share of the sample itself): a tensor with one number
    per sample, or one for all. If `stack_y` is True, the loss becomes `lam * loss(pred, y) + (1 -
    lam) * loss(pred, y1)` for each sample, with the loss function's reduction. Otherwise the
    subclass blends the targets.

    During a forward pass in training `learn.loss_func` is replaced by a function that blends, and
    restored afterwards, also after an error. Evaluation, also within an epoch, uses the plain loss.
    Metrics on training batches get the predictions for the blended inputs, and the targets `yb`:
    the classes of the samples themselves, or blended numbers. A 'mean' is divided by the divisor of
    the loss function, blended in the same shares: with class weights by the weights of the targets,
    with an `ignore_index` by the number of targets that count. At `lam = 1` it is the plain loss.
    (fastai divides by the number of elements.) For a loss function that is not torch's, the divisor
    is measured by the mean and the sum over the batch.

    A batch for which a subclass sets no partners, or that it skips (`run = False`), has the plain
    loss.

    All random numbers are drawn on the CPU from torch's global generator, so that a resumed run
    draws the same ones. Checkpointed: nothing; every checkpoint holds the progress of the fit.

    Raises `OptionError` unless `alpha` is positive. Raises before any weight changes: `OptionError`
    for two such callbacks in one fit, `LossError` for a loss function without a `reduction`, and
    `BatchError` for a batch that cannot be blended.
    """

    run_in = 'fit'
    run_valid = False
    draws_for_batch = True
    needs_events = False  # `_check_blended` finds losses that were not blended

    def __init__(
        self,
        alpha: float = 0.5,  # parameter of Beta(alpha, alpha); larger values blend more
    ) -> None:
        super().__init__()
        if not is_number(alpha) or not 0 < alpha < float('inf'):
            raise bad_option(
                self, 'a number above 0; for no blending, leave the callback out', alpha=alpha
            )
        self.distrib = Beta(torch.tensor(float(alpha)), torch.tensor(float(alpha)))
        self._has_blended = False  # whether any loss of this fit was blended
        self._has_masks_only = False
        self._reduction: tuple[Any, str] = None, ''  # loss function, and its reduction
        self._forget()

    def _forget(self) -> None:
        "Drop the last batch."
        for name in ('lam', 'yb1'):
            self.__dict__.pop(name, None)
        self._order: Tensor | None = None  # indices of the partners in the batch
        self._n_taken = 0  # number of samples of the microbatches up to the current one

    def after_draw(self) -> None:
        "Drop the partners of the last batch."
        self._forget()

    @property
    def stack_y(self) -> bool:
        "Whether the loss is blended instead of the targets: for `y_int` losses and non-float targets."
        if getattr(self.learn.loss_func, 'y_int', False):
            return True
        return any(not t.is_floating_point() for t in tensors_in(self.learn.yb))

    def before_fit(self) -> None:
        if self.learn.loss_func is None:
            raise LossError(
                f'{type(self).__name__} needs a loss function to blend: pass `loss_func=` to the Learner.'
            )
        others = [cb for cb in self.learn.cbs if isinstance(cb, MixHandler) and cb is not self]
        if others:
            raise OptionError(
                f'{self} and {others[0]} both blend each batch, and the loss of only one would be right. '
                'Use one of them in a fit.'
            )
        self.learn.parts.loss_weights.averages_samples = (
            True  # whatever the plain loss averages over
        )
        if list_overrides(self.learn):
            self._has_blended = False
            self.learn.parts.callbacks.check_once(self, 'after_batch', self._check_blended)

    def _check_blended(self) -> bool:
        "Warn if the loss of a user's own loop was not blended; return False for a batch without a loss."
        if 'loss_grad' not in self.learn.__dict__:
            return False
        if self.stack_y and not self._has_blended and 'lam' in self.__dict__:
            warn_of_plain_loss(self.learn, self)
        return True

    def before_step(self) -> None:
        "Check that the microbatches were split from the blended batch."
        if self._order is not None and self._n_taken:
            self._check_size(count_samples(self.learn), len(self._order))

    def _check_size(self, n: int, n_blended: int) -> None:
        if n != n_blended:
            raise BatchError(
                f'{type(self).__name__}: a callback that runs after it made {n} samples of '
                f'{n_blended} in before_batch. Set a lower `order`, or leave `microbatch` out.'
            )

    def cleanup(self) -> None:
        self.learn.parts.loss_weights.averages_samples = False
        self._forget()

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        "Return a context in which the loss is blended."
        if 'lam' not in self.__dict__ or not self.stack_y:
            yield
            return
        learn = self.learn
        plain = learn.loss_func
        if self._reduction[0] is not plain:
            self._reduction = plain, find_reduction(plain, type(self).__name__)
        partners = self._take_targets() if learn.microbatch else (self.yb1, self.lam)
        blended = learn.loss_func = BlendedLoss(learn, plain, partners, self._reduction[1])
        try:
            yield
        finally:
            learn.loss_func = plain
            self._has_blended = self._has_blended or blended.n_calls > 0

    def compiled_step(self) -> dict[str, Any] | None:
        """Return the blended loss of a compiled step; the inputs are blended in `before_batch` as usual.

        None with microbatches, each of which has its own partners.
        """
        if self.learn.microbatch:
            return None
        reduction = find_reduction(self.learn.loss_func, type(self).__name__)
        return {
            'state': self._read_state,
            'loss': partial(blend_compiled, reduction=reduction),
        }

    def _read_state(self) -> dict[str, Any]:
        if 'lam' not in self.__dict__ or not self.stack_y:
            return {}
        return {'lam': self.lam, 'yb1': self.yb1}

    def _take_targets(self) -> tuple[Any, Any]:
        "Return targets of partners and shares for the current microbatch; microbatches come in order."
        learn = self.learn
        start = self._n_taken if learn.parts.microbatches.index else 0
        self._n_taken = start + count_samples(learn)
        batch = self.yb1 if self._order is None else (self._order,)
        n = find_bs(batch)
        self._check_size(max(self._n_taken, n), n)
        rows = slice(start, self._n_taken)
        [(_, partners)] = slice_batch(batch, (self.yb1, self.lam), n, [rows])
        return partners

    def _pair(self, n: int) -> Tensor:
        "Draw the partner of each of `n` samples, and set the partners' targets."
        learn = self.learn
        if has_listed_samples((*learn.xb, *learn.yb), n):
            raise BatchError(
                f'{type(self).__name__} cannot blend {describe((*learn.xb, *learn.yb))}, a list with one '
                'entry a sample: pass stacked tensors as inputs and targets.'
            )
        device = tensors_in(learn.xb)[0].device
        self._order = order = torch.randperm(n).to(device, non_blocking=True)
        if not any(is_of_samples(t, n) for t in tensors_in(learn.yb)):
            raise BatchError(
                f'{type(self).__name__} cannot blend the targets {describe(learn.yb)}: there is no '
                f'tensor with one entry for each of {n} samples.'
            )
        self.yb1 = take_partners(learn.yb, order)
        return order

    def _blend_targets(
        self,
        order: Tensor,
        is_kept: Callable[[Tensor], bool] | None = None,  # whether a tensor stays as it is
    ) -> None:
        "Blend the targets unless the loss is blended."
        if not self.stack_y:
            self.learn.yb = blend_tensors(self.learn.yb, order, self.lam, is_kept)


class BlendedLoss:
    "Blended loss of training batches; an evaluation meanwhile uses the plain loss function."

    def __init__(
        self,
        learn: Learner,
        plain: Callable[..., Any],  # loss function to blend
        partners: tuple[Any, Any],  # targets and shares
        reduction: str,  # reduction of the loss function
    ) -> None:
        self.__dict__.update(
            learn=learn,
            plain=plain,
            partners=partners,
            _reduction=reduction,
            n_calls=0,
            __name__=name_of(plain),
        )

    def __call__(self, pred: Any, *yb: Any, **kwargs: Any) -> Any:
        "Return the loss of a training batch, blended between its own and its partners' targets."
        plain = self.plain
        yb1, lam = self.partners
        reduction = self._reduction
        self.__dict__['n_calls'] += 1
        if not self.learn.training:
            return plain(pred, *yb, **kwargs)
        return blend_loss(plain, pred, yb, yb1, lam, reduction)

    @contextmanager
    def narrowed(
        self,
        index: Tensor,  # positions of samples in the batch, shape (sample,)
    ) -> Iterator[None]:
        "Return a context in which the batch has only some of its samples, as in `moment.samples()`."
        partners = self.partners
        n = find_bs(partners[0])
        own = map_tensors(
            partners, lambda t: t.index_select(0, index) if is_of_samples(t, n) else t
        )
        self.__dict__['partners'] = own
        try:
            yield
        finally:
            self.__dict__['partners'] = partners

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__['plain'], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.plain, name, value)


def blend_loss(
    plain: Callable[..., Any],  # loss function to blend
    pred: Any,
    yb: tuple[Any, ...],
    yb1: tuple[Any, ...],  # targets of the partners
    lam: Tensor,  # shares of the samples themselves
    reduction: str,  # reduction of the loss function
) -> Tensor:
    "Return the loss blended between the samples' own and their partners' targets."
    own = compute_unreduced(plain, pred, yb)
    other = compute_unreduced(plain, pred, yb1)
    share = expand_shares(lam, own, plain)
    loss = torch.lerp(other, own, share)
    if reduction == 'sum':
        return loss.sum()
    if reduction != 'mean':
        return loss
    own_divisor = compute_divisor(plain, pred, yb, own)
    other_divisor = compute_divisor(plain, pred, yb1, other)
    if own_divisor is None or other_divisor is None:
        return loss.mean()
    divisor = torch.lerp(other_divisor, own_divisor, share)
    return loss.sum() / divisor.expand_as(loss).sum()


def blend_compiled(
    loss_func: Callable[..., Any],
    pred: Any,
    yb: tuple[Any, ...],
    state: dict[str, Any],
    reduction: str,
) -> Any:
    "Return the blended loss of a compiled step, or the plain loss for a batch without partners."
    if 'lam' not in state:
        return loss_func(pred, *yb)
    pred = map_tensors(pred, to_single)  # mixed precision leaves this to torch's cross-entropy
    return blend_loss(loss_func, pred, yb, state['yb1'], state['lam'], reduction)


class MixUp(MixHandler):
    """Train on weighted means of samples (Zhang et al., 2018, https://arxiv.org/abs/1710.09412).

    Each sample is blended with another sample of its batch: `x = lam * x + (1 - lam) * x1`. `lam`
    is drawn from Beta(alpha, alpha) for each sample, and the larger of `lam` and `1 - lam` is used.
    All floating-point input tensors with one entry per sample are blended. For the loss see
    `MixHandler`; `lam` has the shape `(bs,)`.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=MixUp(0.2))
    >>> with learn.no_bar(): learn.fit(1)
    """

    def __init__(
        self,
        alpha: float = 0.4,  # parameter of Beta(alpha, alpha); larger values blend more
    ) -> None:
        super().__init__(alpha)

    def before_batch(self) -> None:
        "Blend the batch with a permutation of itself."
        learn = self.learn
        n = count_samples(learn)
        if not any(t.is_floating_point() and is_of_samples(t, n) for t in tensors_in(learn.xb)):
            raise BatchError(
                f'MixUp cannot blend the inputs {describe(learn.xb)}: there is no floating-point tensor '
                'with one entry a sample. Turn them into floats first, in a callback of lower order.'
            )
        lam = self.distrib.sample((n,))
        order = self._pair(n)
        self.lam = torch.maximum(lam, 1 - lam).to(order.device, non_blocking=True)
        learn.xb = blend_tensors(learn.xb, order, self.lam)
        self._blend_targets(order)


class CutMix(MixHandler):
    """Train on images with a box of another image pasted in (Yun et al., 2019, https://arxiv.org/abs/1905.04899).

    Each batch has one box at a random place that covers a share `1 - lam` of the image, with `lam`
    from Beta(alpha, alpha). The part outside the image is cut off, and `lam` becomes the exact
    share that is left of the image itself. Every input of the same height and width `(bs, ..., H,
    W)` gets the box, other inputs stay as they are. Every target of that height and width (a mask)
    gets the box too and is then exact, so only the loss of other targets is blended. For the loss
    see `MixHandler`; `lam` has the shape `(1,)`.

    >>> from learnkit.testing import synth_learner
    >>> images, classes = torch.rand(32, 3, 8, 8), torch.randint(10, (32,))
    >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, classes), batch_size=8)
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))
    >>> learn = synth_learner(dls=loader, model=model, loss_func=torch.nn.functional.cross_entropy, cbs=CutMix)
    >>> with learn.no_bar(): learn.fit(1)
    """

    def __init__(
        self,
        alpha: float = 1.0,  # parameter of Beta(alpha, alpha); 1 makes all shares equally likely
    ) -> None:
        super().__init__(alpha)

    @property
    @override
    def stack_y(self) -> bool:
        "Whether the loss is blended: not if all targets are masks, which are cut like the images."
        return super().stack_y and not self._has_masks_only

    def before_batch(self) -> None:
        "Paste a box of a permutation of the batch into the batch."
        learn = self.learn
        n = count_samples(learn)
        sizes = [t.shape[-2:] for t in tensors_in(learn.xb) if t.ndim > 2 and is_of_samples(t, n)]
        if not sizes:
            raise BatchError(
                f'CutMix found no images (bs, ..., height, width) in the inputs {describe(learn.xb)}.'
            )
        h, w = sizes[0]
        lam = self.distrib.sample((1,))
        order = self._pair(n)
        x1, y1, x2, y2 = self.rand_bbox(w, h, lam)
        box = (..., slice(y1, y2), slice(x1, x2))
        area = torch.tensor([(x2 - x1) * (y2 - y1)])
        self.lam = (1 - area / (w * h)).to(order.device, non_blocking=True)

        def is_image(t: Tensor) -> bool:
            return t.ndim > 2 and t.shape[-2:] == (h, w) and is_of_samples(t, n)

        def paste_box(t: Tensor) -> Tensor:
            if not is_image(t):
                return t
            new = t.clone()  # a loader may return the same tensor again, so that it must not change
            new[box] = t[box][order]
            return new

        learn.xb = map_tensors(learn.xb, paste_box)
        are_masks = [is_image(t) for t in tensors_in(learn.yb) if is_of_samples(t, n)]
        if any(are_masks):
            learn.yb = map_tensors(learn.yb, paste_box)
            self.yb1 = take_partners(learn.yb, order, is_image)
        self._has_masks_only = all(are_masks)
        self._blend_targets(order, is_image)

    def rand_bbox(
        self,
        W: int,  # width of the images
        H: int,  # height of the images
        lam: Tensor,  # share of the image outside the box, one element on the CPU
    ) -> tuple[int, int, int, int]:  # x1, y1, x2, y2; the last two are exclusive
        "Draw the center of a box, and return the part of the box inside the image."
        side = torch.sqrt(1 - lam)
        x1, x2 = draw_interval(W, int(torch.round(W * side)))
        y1, y2 = draw_interval(H, int(torch.round(H * side)))
        return x1, y1, x2, y2


def draw_interval(size: int, length: int) -> tuple[int, int]:
    "Draw an interval of about `length` with its middle in `range(size)`, clipped to that range."
    middle = int(torch.randint(0, size, (1,)))
    return max(0, middle - length // 2), min(size, middle + length // 2)


def is_of_samples(t: Tensor, n: int) -> bool:
    "Return True if a tensor has one entry for each of `n` samples."
    return t.ndim > 0 and t.shape[0] == n


def take_partners(
    b: Any,
    order: Tensor,  # indices of the partners
    is_kept: Callable[[Tensor], bool] | None = None,  # whether a tensor stays as it is
) -> Any:
    "Replace each sample of a nested batch by its partner."
    n = len(order)

    def take(t: Tensor) -> Tensor:
        if not is_of_samples(t, n) or (is_kept is not None and is_kept(t)):
            return t
        return t[order]

    return map_tensors(b, take)


def blend_tensors(
    b: Any,
    order: Tensor,  # indices of the partners
    lam: Tensor,  # shares of the samples themselves
    is_kept: Callable[[Tensor], bool] | None = None,  # whether a tensor stays as it is
) -> Any:
    "Blend each sample of a nested batch's floating-point tensors with its partner."
    n = len(order)

    def blend(t: Tensor) -> Tensor:
        if not t.is_floating_point() or not is_of_samples(t, n):
            return t
        if is_kept is not None and is_kept(t):
            return t
        return torch.lerp(t[order], t, lam.to(t).view(-1, *[1] * (t.ndim - 1)))

    return map_tensors(b, blend)


def find_reduction(loss_func: Any, who: str) -> str:
    "Return the reduction of a loss function; raise `LossError` if it cannot be set to 'none'."
    if hasattr(loss_func, 'reduction'):
        return loss_func.reduction
    try:
        params = signature(getattr(loss_func, 'forward', loss_func)).parameters
    except (TypeError, ValueError):
        return 'mean'  # a function written in C: the first call raises if it lacks `reduction`
    if 'reduction' in params:
        return params['reduction'].default
    if any(p.kind is p.VAR_KEYWORD for p in params.values()):
        return 'mean'
    raise LossError(
        f'{who} needs the loss of each sample, and {name_of(loss_func)} has no `reduction`. Add that '
        "keyword (with 'none' it returns one number per sample), or use targets that can be blended: floats."
    )


def compute_unreduced(loss_func: Any, pred: Any, yb: tuple[Any, ...]) -> Tensor:
    "Return the loss of each element."
    if not hasattr(loss_func, 'reduction'):
        return loss_func(pred, *yb, reduction='none')
    reduction = loss_func.reduction
    try:
        loss_func.reduction = 'none'
        return loss_func(pred, *yb)
    finally:
        loss_func.reduction = reduction


# losses whose mean is divided by the weights of the targets, and leaves out ignored targets
_BY_WEIGHT = (nn.CrossEntropyLoss, nn.NLLLoss, F.cross_entropy, F.nll_loss)


def compute_divisor(loss_func: Any, pred: Any, yb: tuple[Any, ...], each: Tensor) -> Tensor | None:
    """Return the share of each element of an unreduced loss in the divisor of the mean; None for 1.

    For an unknown loss function all shares are equal, and measured: the sum over the mean.
    """
    base = loss_func
    options: dict[str, Any] = {}
    while isinstance(base, (partial, BaseLoss)):
        if isinstance(base, partial):
            options = {**base.keywords, **options}
        base = base.func
    kind = type(base) if isinstance(base, nn.Module) else base
    if kind in _BY_WEIGHT:
        targ = yb[0]
        if (
            isinstance(targ, Tensor)
            and not targ.is_floating_point()
            and targ.numel() == each.numel()
        ):
            weight = options.get('weight', getattr(base, 'weight', None))
            ignored = options.get('ignore_index', getattr(base, 'ignore_index', -100))
            counts = targ != ignored
            if weight is not None:
                counts = torch.where(counts, weight[torch.where(counts, targ, 0)], 0)
            return counts.to(each.dtype).reshape(each.shape)
    elif str(getattr(kind, '__module__', '')).startswith('torch.'):
        return None
    with torch.no_grad():
        mean = loss_func(pred, *yb)
        total = each.sum()
        return torch.where(mean == 0, 1.0, total / mean / each.numel()).to(each)


def expand_shares(lam: Tensor, loss: Tensor, loss_func: Any) -> Tensor:
    "Return the shares in the shape of an unreduced loss (samples, ...) or (samples * elements,)."
    n = len(lam)
    if not isinstance(loss, Tensor):
        found = describe(loss)
    elif n == 1:
        return lam.to(loss).view(())
    elif is_of_samples(loss, n):
        return lam.to(loss).view(-1, *[1] * (loss.ndim - 1))
    elif loss.ndim == 1 and len(loss) % n == 0:
        return lam.to(loss).repeat_interleave(len(loss) // n)
    else:
        found = f'a tensor of shape {tuple(loss.shape)}'
    raise LossError(
        f"{name_of(loss_func)} with reduction='none' returned {found} for {n} samples. To blend it, one number "
        'for each sample or each of its elements is needed.'
    )
