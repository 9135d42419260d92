"""Show samples: images in a grid, anything else in a table, with their targets and what a model made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit.core.batch import BatchForm, find_bs, form_of, microbatches, to_detach
from learnkit.core.errors import OptionError
from learnkit.core.plotting import WRONG, AxesList, new_axes
from learnkit.core.random import preserved_generators
from learnkit.data.preserve import preserve_loaders
from learnkit.data.tables import as_table, cell, readable, shorten
from learnkit.data.torch_loader import forget_workers

__all__ = [
    'Shows',
    'show_samples',
    'own_method',
    'check_max_n',
    'first_batch',
    'first_samples',
    'as_targets',
    'class_axis',
    'binary_cut',
    'wrong_ones',
    'find_images',
    'as_pictures',
    'draw_images',
]


class Shows:
    "The part of `DataLoaders` that shows samples."

    n_inp: int | Mapping[str, int] | None

    def show_batch(
        self,
        b: Any = None,  # a batch to show instead of a loader's first
        max_n: int = 9,  # the most samples
        ds_idx: int | str = 0,  # which loader: 0 training, 1 validation, or its name
        **kwargs: Any,  # more for the data's own method; for images `figsize`, in inches
    ) -> Any:
        """Show samples of a batch with their targets: images in a grid, anything else as a table; return what it drew.

        Images are (N, C, H, W) or (N, H, W), of uint8 or floats; what is not within 0 and 1 is stretched to it, all
        images alike. Targets have their names in `dls.vocab`, where there is one. A method `show_batch(max_n=...)` of
        the loader or its data set is used instead, if there is one. Loaders and random generators are afterwards as
        they were: the training order does not change.

        Raises `OptionError` where there is no batch to look at.

        >>> from learnkit import DataLoaders
        >>> dls = DataLoaders.from_tensors((torch.tensor([[0.5, 1.], [2., 4.]]), torch.tensor([0, 1])), shuffle=False)
        >>> dls.vocab = ['cat', 'dog']
        >>> dls.show_batch()
        x[0]  x[1]  target
         0.5     1     cat
           2     4     dog
        """
        dls: Any = self
        check_max_n(max_n)
        dl = dls[ds_idx]
        if (own := own_method(dl, 'show_batch')) is not None:
            return own(max_n=max_n, **kwargs) if b is None else own(b, max_n=max_n, **kwargs)
        name = ds_idx if isinstance(ds_idx, str) else dls._named()[ds_idx][0]
        xb, yb = first_samples(first_batch(dl) if b is None else b, form_of(dls, name), max_n)
        return show_samples(xb, {'target': yb}, getattr(dls, 'vocab', None), **kwargs)


def show_samples(
    xb: tuple[Any, ...],  # inputs of some samples
    told: dict[str, Any],  # details by name: a tensor or list each, or a tuple of several
    vocab: Any = None,  # names of classes
    wrong: Sequence[int] = (),  # samples to mark
    figsize: tuple[float, float] | None = None,  # inches, of images
) -> Any:
    "Draw images with what is told about them as titles, and return the axes; return anything else as a `Table`."
    xb, told = to_detach(
        (xb, {k: v for k, v in told.items() if not (isinstance(v, tuple) and not v)})
    )
    n, images = find_bs(xb, tuple(told.values())), find_images(xb)
    if images is None:
        return as_table(xb, {k: readable(v, n, vocab) for k, v in told.items()}, wrong)

    all_masks = {k: as_mask(v, images) for k, v in told.items()}
    masks = [mask for mask in all_masks.values() if mask is not None]
    lines = {k: readable(v, n, vocab) for k, v in told.items() if all_masks[k] is None}
    if len(masks) == 2:
        lines['right'] = [f'{a.eq(b).float().mean():.1%}' for a, b in zip(*masks, strict=True)]
    named = [
        [f'{k} ' * (len(told) > 1) + cell(value) for value in values] for k, values in lines.items()
    ]
    titles = ['\n'.join(shorten(text, 24) for text in texts) for texts in zip(*named, strict=True)]
    return draw_images(images, titles, wrong, masks[-1] if masks else None, figsize)


# Samples of a loader


def own_method(dl: Any, name: str) -> Any:
    "Return the method of that name of a loader or of its data set, None where they have none."
    found = next(
        (o for o in (dl, getattr(dl, 'dataset', None)) if callable(getattr(o, name, None))), None
    )
    return None if found is None else getattr(found, name)


def check_max_n(max_n: Any) -> None:
    "Raise `OptionError` unless it is a number of samples."
    if isinstance(max_n, bool) or not isinstance(max_n, int) or max_n < 1:
        raise OptionError(f'max_n={max_n!r}: it is a whole number from 1 up, of samples to show.')


def first_batch(dl: Any) -> Any:
    "Return a loader's first batch, and leave it and every generator as they were."
    with preserve_loaders([dl]), preserved_generators(dl):
        forget_workers(dl)  # a training that is under way goes on with them
        drawn = iter(dl)
        if drawn is dl:
            raise OptionError('The loader is an iterator: taking a batch to look at would lose it.')
        for batch in islice(drawn, 1):
            return batch
    raise OptionError(f'{type(dl).__name__} has no batch to look at.')


def first_samples(
    batch: Any, form: BatchForm, max_n: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    "Return inputs and targets of the first samples of a batch."
    return microbatches(*form.split(batch, predicting=True), max_n)[0]


# Predictions as targets


def binary_cut(loss_func: Any) -> float | None:
    "Return the prediction above which torch's binary losses mean class 1, None for other losses."
    while isinstance(loss_func, partial):
        loss_func = loss_func.func
    if (
        isinstance(loss_func, nn.BCEWithLogitsLoss)
        or loss_func is F.binary_cross_entropy_with_logits
    ):
        return 0.0
    return 0.5 if isinstance(loss_func, nn.BCELoss) or loss_func is F.binary_cross_entropy else None


def as_targets(
    decoded: Any,  # predictions, as `loss_func.decodes` gives them or as they are
    targs: Any,  # targets
    cut: float | None = None,  # threshold above which it is class 1, for a single score
) -> Any:  # classes in the shape of the targets; `decoded` where nothing can be told
    """Return predictions as targets are: of scores the best class, along the dimension that targets do not have.

    >>> as_targets(torch.tensor([[0.1, 0.9], [3., 2.]]), torch.tensor([1, 1]))
    tensor([1, 0])
    >>> as_targets(torch.tensor([[-0.1], [0.9]]), torch.tensor([0., 1.]), cut=0.)
    tensor([0., 1.])
    """
    if (
        not (isinstance(decoded, Tensor) and isinstance(targs, Tensor))
        or not targs.ndim
        or len(decoded) != len(targs)
    ):
        return decoded
    if decoded.is_floating_point() and decoded.ndim == targs.ndim + 1:
        axis = class_axis(decoded, targs)
        if axis is None:
            return decoded
        if decoded.shape[axis] > 1:
            return decoded if targs.is_floating_point() else decoded.argmax(axis)
    if decoded.numel() != targs.numel():
        return decoded
    if not decoded.is_floating_point():
        return decoded.reshape(targs.shape).to(targs.dtype)
    if cut is None or not bool(((targs == 0) | (targs == 1)).all()):
        return decoded
    return (decoded.reshape(targs.shape) > cut).to(targs.dtype)


def class_axis(scores: Tensor, targs: Tensor) -> int | None:
    "Return the dimension of the classes in scores, None where the other dimensions are not those of the targets."
    fits = [a for a in (1, -1) if scores.shape[:a] + scores.shape[a:][1:] == targs.shape]
    return fits[0] if fits else None


def wrong_ones(preds: Any, targs: Any) -> list[int]:
    """Return which predicted classes are wrong; none where these are no classes of samples.

    >>> wrong_ones(torch.tensor([1, 2, 0]), torch.tensor([1, 1, 0]))
    [1]
    """
    both = preds, targs
    if (
        not all(isinstance(t, Tensor) and t.ndim in (1, 2) for t in both)
        or preds.shape != targs.shape
    ):
        return []
    if any(t.is_floating_point() and not bool(((t == 0) | (t == 1)).all()) for t in both):
        return []
    return [
        i
        for i, same in enumerate((preds == targs).reshape(len(preds), -1).all(1).tolist())
        if not same
    ]


# Images


def find_images(xb: tuple[Any, ...]) -> Tensor | None:
    "Return the first input that can be drawn, (N, C, H, W), (N, H, W) or a list of (C, H, W); also one with a name."
    entries = [v for o in xb for v in (o.values() if isinstance(o, Mapping) else (o,))]
    return next((t for t in map(_stacked, entries) if _is_image(t)), None)


def _stacked(o: Any) -> Any:
    "Return a list of images (C, H, W) of one size as a tensor, and anything else as it is."
    if not isinstance(o, (list, tuple)) or not all(
        isinstance(t, Tensor) and t.ndim == 3 for t in o
    ):
        return o
    return torch.stack(list(o)) if len({t.shape for t in o}) == 1 else o


def _is_image(t: Any) -> bool:
    if not isinstance(t, Tensor) or t.is_complex() or not t.numel():
        return False
    return t.ndim == 4 or (
        t.ndim == 3 and min(t.shape[1:]) > 1 and (t.is_floating_point() or t.dtype == torch.uint8)
    )


def as_pictures(
    images: Tensor,  # (n, C, H, W), (n, H, W, C) or (n, H, W) of one channel
) -> Tensor:  # (n, C, H, W) on the CPU, within 0 and 1
    """Return images as they can be shown.

    >>> as_pictures(torch.tensor([[[-2., 2.], [0., 1.]]])).flatten().tolist()
    [0.0, 1.0, 0.5, 0.75]
    """
    images = (images[:, None] if images.ndim == 3 else images).detach().cpu()
    if images.shape[1] not in (1, 3, 4) and images.shape[3] in (1, 3, 4):
        images = images.permute(0, 3, 1, 2)
    if images.dtype == torch.uint8:
        images = images / 255
    images = images.float()
    if images.shape[1] not in (1, 3, 4):
        images = images.mean(1, keepdim=True)
    low, high = (
        images.nan_to_num(0.0, 0.0, 0.0).aminmax()
        if images.numel()
        else (torch.zeros(()), torch.ones(()))
    )
    if low < 0 or high > 1:
        images = (images - low) / (high - low).clamp(min=1e-12)
    return images.nan_to_num(0.0, 1.0, 0.0).clamp(0, 1)


def as_mask(told: Any, images: Tensor) -> Tensor | None:
    "Return classes of pixels, (n, H, W), None where this is something else."
    mask = told[0] if isinstance(told, tuple) and len(told) == 1 else told
    if not isinstance(mask, Tensor) or mask.is_floating_point():
        return None
    if mask.ndim == 4 and mask.shape[1] == 1:
        mask = mask[:, 0]
    return (
        mask.cpu()
        if mask.ndim == 3 and mask.shape[1:] == as_pictures(images[:1]).shape[2:]
        else None
    )


def draw_images(
    images: Tensor,  # (n, C, H, W) or (n, H, W)
    titles: Sequence[str] = (),  # one each
    wrong: Sequence[int] = (),  # those that get a frame and a bold title
    masks: Tensor | None = None,  # classes of pixels, laid over the images
    figsize: tuple[float, float] | None = None,  # inches
) -> AxesList:
    "Draw images in a grid, in shades of grey where they have one channel, and return the axes."
    pictures = as_pictures(images).permute(0, 2, 3, 1)
    n = len(pictures)
    cols = n if n <= 4 else math.ceil(math.sqrt(n))  # a single row of few
    lines = max((t.count('\n') + 1 for t in titles if t), default=0)
    axs = new_axes(n, cols, figsize or (1.7 * cols, (1.6 + 0.17 * lines) * -(-n // cols)))
    for i, (ax, picture) in enumerate(zip(axs, pictures, strict=True)):
        if picture.shape[2] == 1:
            ax.imshow(picture[:, :, 0].numpy(), cmap='gray', vmin=0, vmax=1)
        else:
            ax.imshow(picture.numpy())
        if masks is not None:
            ax.imshow(
                masks[i].numpy(), cmap='viridis', vmin=0, vmax=max(int(masks.max()), 1), alpha=0.5
            )
        ax.set(xticks=[], yticks=[])
        style = {'color': WRONG, 'fontweight': 'bold'} if i in wrong else {}
        if titles:
            ax.set_title(titles[i], fontsize=9, **style)
        for spine in ax.spines.values():
            if i in wrong:
                spine.set(color=WRONG, linewidth=2.5)
            else:
                spine.set_visible(False)
    return axs
