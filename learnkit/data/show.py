"""Display of samples with targets and predictions: images in a grid, other inputs in a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learnkit.core.batch import BatchForm, find_bs, form_of, microbatches, to_detach
from learnkit.core.errors import OptionError
from learnkit.core.model import unwrap_partial
from learnkit.core.numbers import check_count
from learnkit.core.plotting import WRONG, AxesList, new_axes
from learnkit.core.random import preserved_generators
from learnkit.data.preserve import preserve_loaders
from learnkit.data.tables import as_table, cell, readable, shorten
from learnkit.data.torch_loader import forget_workers

__all__ = [
    'Shows',
    'show_samples',
    'own_method',
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
    "Mixin of `DataLoaders` that shows samples."

    n_inp: int | Mapping[str, int] | None

    def show_batch(
        self,
        b: Any = None,  # batch to show; None: the first batch of the loader
        max_n: int = 9,  # maximum number of samples
        ds_idx: int | str = 0,  # loader: 0 for training, 1 for validation, or a name
        **kwargs: Any,  # `figsize` in inches for images; arguments of the data's own `show_batch`
    ) -> Any:
        """Show samples of a batch with their targets, images in a grid, other inputs as a table; return the drawing.

        Images are (N, C, H, W) or (N, H, W), uint8 or float. Float values outside of 0 to 1 are rescaled to that
        range, all images alike. Class names come from `dls.vocab` if the attribute exists. A method
        `show_batch(max_n=...)` of the loader or its data set takes precedence. Loaders and random generators are
        restored afterwards: the training order does not change.

        Raises `OptionError` if there is no batch to show.

        >>> from learnkit import DataLoaders
        >>> dls = DataLoaders.from_tensors((torch.tensor([[0.5, 1.], [2., 4.]]), torch.tensor([0, 1])), shuffle=False)
        >>> dls.vocab = ['cat', 'dog']
        >>> dls.show_batch()
        x[0]  x[1]  target
         0.5     1     cat
           2     4     dog
        """
        dls: Any = self
        check_count('max_n', max_n)
        dl = dls[ds_idx]
        show = own_method(dl, 'show_batch')
        if show is not None:
            return show(max_n=max_n, **kwargs) if b is None else show(b, max_n=max_n, **kwargs)
        name = ds_idx if isinstance(ds_idx, str) else dls._named()[ds_idx][0]
        xb, yb = first_samples(first_batch(dl) if b is None else b, form_of(dls, name), max_n)
        return show_samples(xb, {'target': yb}, getattr(dls, 'vocab', None), **kwargs)


def show_samples(
    xb: tuple[Any, ...],  # inputs of the samples
    details: dict[str, Any],  # tensors or lists by name, or tuples of them
    vocab: Any = None,  # class names
    wrong: Sequence[int] = (),  # indices of the samples to mark
    figsize: tuple[float, float] | None = None,  # size of the figure of images, in inches
) -> Any:
    "Draw images with details as titles and return the axes; return other inputs as a `Table`."
    details = {k: v for k, v in details.items() if not (isinstance(v, tuple) and not v)}
    xb, details = to_detach((xb, details))
    n = find_bs(xb, tuple(details.values()))
    images = find_images(xb)
    if images is None:
        return as_table(xb, {k: readable(v, n, vocab) for k, v in details.items()}, wrong)

    all_masks = {k: as_mask(v, images) for k, v in details.items()}
    masks = [mask for mask in all_masks.values() if mask is not None]
    lines = {k: readable(v, n, vocab) for k, v in details.items() if all_masks[k] is None}
    if len(masks) == 2:
        lines['right'] = [f'{a.eq(b).float().mean():.1%}' for a, b in zip(*masks, strict=True)]
    columns = []
    for name, values in lines.items():
        prefix = f'{name} ' if len(details) > 1 else ''
        columns.append([shorten(prefix + cell(value), 24) for value in values])
    titles = ['\n'.join(row) for row in zip(*columns, strict=True)]
    return draw_images(images, titles, wrong, masks[-1] if masks else None, figsize)


# Samples of a loader


def own_method(dl: Any, name: str) -> Any:
    "Return the method called `name` of a loader or of its data set, or None."
    for owner in (dl, getattr(dl, 'dataset', None)):
        method = getattr(owner, name, None)
        if callable(method):
            return method
    return None


def first_batch(dl: Any) -> Any:
    "Return a loader's first batch, and restore the loader and every generator."
    with preserve_loaders([dl]), preserved_generators(dl):
        forget_workers(dl)  # running workers belong to the training in progress
        batches = iter(dl)
        if batches is dl:
            raise OptionError('The loader is an iterator: taking a batch to look at would lose it.')
        for batch in islice(batches, 1):
            return batch
    raise OptionError(f'{type(dl).__name__} has no batch to look at.')


def first_samples(
    batch: Any, form: BatchForm, max_n: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    "Return inputs and targets of the first `max_n` samples of a batch."
    return microbatches(*form.split(batch, predicting=True), max_n)[0]


# Predictions as targets


def binary_cut(loss_func: Any) -> float | None:
    "Return the probability above which torch's binary losses mean class 1, or None for other losses."
    loss_func = unwrap_partial(loss_func)
    classes = nn.BCEWithLogitsLoss, nn.BCELoss
    functions = F.binary_cross_entropy_with_logits, F.binary_cross_entropy
    return 0.5 if isinstance(loss_func, classes) or loss_func in functions else None


def as_targets(
    decoded: Any,  # predictions, possibly decoded by `loss_func.decodes`
    targs: Any,  # targets
    cut: float | None = None,  # threshold of a single score, above which the class is 1
) -> Any:  # classes in the shape of the targets, or `decoded` if they do not fit
    """Convert predictions to the form of targets: of scores, the best class along the extra dimension.

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
    "Return the class dimension of scores, or None if the other dimensions differ from the targets' dimensions."
    fits = [a for a in (1, -1) if scores.shape[:a] + scores.shape[a:][1:] == targs.shape]
    return fits[0] if fits else None


def wrong_ones(preds: Any, targs: Any) -> list[int]:
    """Return the indices of samples with a wrong predicted class; an empty list for anything but classes.

    >>> wrong_ones(torch.tensor([1, 2, 0]), torch.tensor([1, 1, 0]))
    [1]
    """
    both = preds, targs
    if not all(isinstance(t, Tensor) and t.ndim in (1, 2) for t in both):
        return []
    if preds.shape != targs.shape:
        return []
    if any(t.is_floating_point() and not bool(((t == 0) | (t == 1)).all()) for t in both):
        return []
    is_right = (preds == targs).reshape(len(preds), -1).all(1)
    return [i for i, right in enumerate(is_right.tolist()) if not right]


# Images


def find_images(xb: tuple[Any, ...]) -> Tensor | None:
    "Return the first input of shape (N, C, H, W), (N, H, W) or list of (C, H, W), also as an entry of a dict."
    entries = [v for o in xb for v in (o.values() if isinstance(o, Mapping) else (o,))]
    return next((t for t in map(_stack_images, entries) if _is_image(t)), None)


def _stack_images(o: Any) -> Any:
    "Stack a list of images (C, H, W) of one size; return anything else unchanged."
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
    images: Tensor,  # (N, C, H, W), (N, H, W, C) or (N, H, W)
) -> Tensor:  # (N, C, H, W) on the CPU, within 0 and 1
    """Convert images to floats that matplotlib can draw.

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


def as_mask(detail: Any, images: Tensor) -> Tensor | None:
    "Return a segmentation mask (N, H, W) of the images' size, or None if `detail` is not a mask."
    mask = detail[0] if isinstance(detail, tuple) and len(detail) == 1 else detail
    if not isinstance(mask, Tensor) or mask.is_floating_point():
        return None
    if mask.ndim == 4 and mask.shape[1] == 1:
        mask = mask[:, 0]
    if mask.ndim == 3 and mask.shape[1:] == as_pictures(images[:1]).shape[2:]:
        return mask.cpu()
    return None


def draw_images(
    images: Tensor,  # (N, C, H, W) or (N, H, W)
    titles: Sequence[str] = (),  # title of each image
    wrong: Sequence[int] = (),  # indices of images with a frame and a bold title
    masks: Tensor | None = None,  # segmentation masks (N, H, W), drawn over the images
    figsize: tuple[float, float] | None = None,  # size of the figure, in inches
) -> AxesList:
    "Draw images in a grid, single-channel images in grayscale, and return the axes."
    pictures = as_pictures(images).permute(0, 2, 3, 1)
    n = len(pictures)
    cols = n if n <= 4 else math.ceil(math.sqrt(n))
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
