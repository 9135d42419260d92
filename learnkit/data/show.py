# SPDX-License-Identifier: Apache-2.0
"""Display of samples with targets and predictions: images in a grid, other inputs in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from colorsys import hsv_to_rgb
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from learnkit.core.batch import BatchForm, find_bs, microbatches, to_detach
from learnkit.core.errors import OptionError
from learnkit.core.optional import import_library
from learnkit.core.plotting import WRONG, AxesList, choose_columns, new_axes
from learnkit.data.preserve import undisturbed_loader
from learnkit.data.tables import as_table, cell, find_class_name, format_targets, shorten

MAX_LEGEND = 24  # maximum number of classes in a legend


def show_samples(
    xb: tuple[Any, ...],  # inputs of the samples
    details: dict[str, Any],  # tensors or lists by name, or tuples of them
    vocab: Any = None,  # class names
    wrong: Sequence[int] = (),  # indices of the samples to mark
    figsize: tuple[float, float] | None = None,  # size of the figure of images, in inches
    scale_each: bool = False,  # draw each image on its own scale, with its maximum in the title
) -> Any:
    "Draw images with details as titles and return the axes; return other inputs as a `Table`."
    details = {k: v for k, v in details.items() if not (isinstance(v, tuple) and not v)}
    xb, details = to_detach((xb, details))
    n = find_bs(xb, tuple(details.values()))
    images = find_images(xb)
    if images is None:
        return as_table(xb, {k: format_targets(v, n, vocab) for k, v in details.items()}, wrong)

    if scale_each:
        details = {**details, 'max': [format(image.max().item(), '.3g') for image in images]}
    all_masks = {k: as_mask(v, images) for k, v in details.items()}
    masks = {k: mask for k, mask in all_masks.items() if mask is not None}
    lines = {k: format_targets(v, n, vocab) for k, v in details.items() if all_masks[k] is None}
    columns = []
    for name, values in lines.items():
        prefix = f'{name} ' if len(details) > 1 else ''
        columns.append([shorten(prefix + cell(value), 24) for value in values])
    titles = ['\n'.join(row) for row in zip(*columns, strict=True)]
    if masks:
        return draw_masks(images, masks, titles, vocab, figsize)
    if scale_each:
        images = torch.cat([as_pictures(image[None]) for image in images])
    return draw_images(images, titles, wrong, figsize)


# -- samples of a loader ---------------------------------------------------------------------------


def own_method(dl: Any, name: str) -> Any:
    "Return the method called `name` of a loader or of its data set, or None."
    for owner in (dl, getattr(dl, 'dataset', None)):
        method = getattr(owner, name, None)
        if callable(method):
            return method
    return None


def first_batch(dl: Any) -> Any:
    "Return a loader's first batch, and restore the loader and every generator."
    with undisturbed_loader(dl):
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


# -- predictions as targets ------------------------------------------------------------------------


def as_targets(
    decoded: Any,  # predictions, possibly decoded by `loss_func.decodes`
    targs: Any,  # targets
    threshold: float | None = None,  # for a single score, above which the class is 1
) -> Any:  # classes in the shape of the targets, or `decoded` if they do not fit
    """Convert predictions to the form of targets: of scores, the best class along the extra dimension.

    >>> as_targets(torch.tensor([[0.1, 0.9], [3., 2.]]), torch.tensor([1, 1]))
    tensor([1, 0])
    >>> as_targets(torch.tensor([[-0.1], [0.9]]), torch.tensor([0., 1.]), threshold=0.)
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
    if threshold is None or not bool(((targs == 0) | (targs == 1)).all()):
        return decoded
    return (decoded.reshape(targs.shape) > threshold).to(targs.dtype)


def class_axis(scores: Tensor, targs: Tensor) -> int | None:
    "Return the class dimension of scores, or None if the other dimensions differ from the targets' dimensions."
    fits = [a for a in (1, -1) if scores.shape[:a] + scores.shape[a:][1:] == targs.shape]
    return fits[0] if fits else None


def find_errors(preds: Any, targs: Any) -> list[int]:
    """Return the indices of samples with a wrong predicted class; an empty list for anything but classes.

    >>> find_errors(torch.tensor([1, 2, 0]), torch.tensor([1, 1, 0]))
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


# -- images ----------------------------------------------------------------------------------------


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
    low, high = images.nan_to_num(0.0, 0.0, 0.0).aminmax()
    if low < 0 or high > 1:
        images = (images - low) / (high - low).clamp(min=1e-12)
    return images.nan_to_num(0.0, 1.0, 0.0).clamp(0, 1)


def as_mask(detail: Any, images: Tensor) -> Tensor | None:
    "Return a segmentation mask (N, H, W) of the images' size, or None if `detail` is not a mask."
    mask = detail[0] if isinstance(detail, tuple) and len(detail) == 1 else detail
    if not isinstance(mask, Tensor):
        return None
    if mask.is_floating_point():
        if mask.ndim < 3 or not bool(((mask == 0) | (mask == 1)).all()):
            return None
        mask = mask.long()  # of a binary loss
    if mask.ndim == 4 and mask.shape[1] == 1:
        mask = mask[:, 0]
    if mask.ndim == 3 and mask.shape[1:] == as_pictures(images[:1]).shape[2:]:
        return mask.cpu()
    return None


def class_colors(
    classes: Tensor,  # class indices (n, H, W); negative ones are ignored
) -> Tensor:  # image (n, 3, H, W) on the CPU, in [0, 1]
    """Return an image of class indices: 0 is black, ignored pixels are grey, others have one color each.

    >>> class_colors(torch.tensor([[[0, 1, -100]]]))[0, :, 0].T
    tensor([[0.0000, 0.0000, 0.0000],
            [0.2375, 0.4454, 0.9500],
            [0.5000, 0.5000, 0.5000]])
    """
    classes = classes.detach().cpu().long()
    n = max(int(classes.max()), 0) + 1
    # hues at multiples of the golden ratio are far apart for any number of classes
    colors = [
        (0.0, 0.0, 0.0),
        *(hsv_to_rgb(k * 0.618034 % 1, 0.75, 0.95) for k in range(1, n)),
        (0.5, 0.5, 0.5),
    ]
    return torch.tensor(colors)[classes.where(classes >= 0, n)].permute(0, 3, 1, 2)


def draw_masks(
    images: Tensor,  # (N, C, H, W) or (N, H, W)
    masks: Mapping[str, Tensor],  # segmentation masks (N, H, W) by name, the target first
    titles: Sequence[str] = (),  # title of each image
    vocab: Any = None,  # class names
    figsize: tuple[float, float] | None = None,  # size of the figure, in inches
) -> AxesList:
    "Draw each image and its masks next to each other, with one legend for the classes; return the axes."
    n = len(images)
    width = 1 + len(masks)
    samples_per_row = 1 if n <= 3 else 2
    cols = samples_per_row * width
    rows = -(-n // samples_per_row)
    axs = new_axes(n * width, cols, figsize or (1.7 * cols + 1.3, 2.0 * rows), 'compressed')
    draw_pictures(axs[::width], as_pictures(images), titles)
    for i, (name, mask) in enumerate(masks.items(), 1):
        draw_pictures(axs[i::width], class_colors(mask), [name] * n)
    _add_legend(axs.figure, masks, vocab)
    return axs


def _add_legend(figure: Any, masks: Mapping[str, Tensor], vocab: Any) -> None:
    "Add a legend of the first classes that occur in the masks; negative ones are ignored pixels."
    patches = import_library('matplotlib.patches', 'A plot')
    classes = torch.cat([mask.flatten() for mask in masks.values()]).unique()[:MAX_LEGEND]
    colors = class_colors(classes[None, None])[0, :, 0].T.tolist()
    handles = []
    for k, color in zip(classes.tolist(), colors, strict=True):
        label = shorten(find_class_name(k, vocab), 24) if k >= 0 else 'ignored'
        handles.append(patches.Patch(facecolor=color, edgecolor='grey', label=label))
    legend = figure.legend(handles=handles, loc='outside right upper', fontsize=9)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a dollar sign in a name starts no formula


def draw_pictures(
    axs: Sequence[Any],
    pictures: Tensor,  # (N, C, H, W) within 0 and 1
    titles: Sequence[str] = (),
) -> None:
    "Draw a picture on each of the axes, without ticks and frame; one channel is drawn in grayscale."
    for ax, picture in zip(axs, pictures.permute(0, 2, 3, 1), strict=True):
        if picture.shape[2] == 1:
            ax.imshow(picture[:, :, 0].numpy(), cmap='gray', vmin=0, vmax=1)
        else:
            ax.imshow(picture.numpy())
        ax.set(xticks=[], yticks=[])
        for spine in ax.spines.values():
            spine.set_visible(False)
    for ax, title in zip(axs, titles, strict=False):
        ax.set_title(title, fontsize=9)


def draw_images(
    images: Tensor,  # (N, C, H, W) or (N, H, W)
    titles: Sequence[str] = (),  # title of each image
    wrong: Sequence[int] = (),  # indices of images with a frame and a bold title
    figsize: tuple[float, float] | None = None,  # size of the figure, in inches
) -> AxesList:
    "Draw images in a grid, single-channel images in grayscale, and return the axes."
    pictures = as_pictures(images)
    n = len(pictures)
    cols = choose_columns(n)
    lines = max((t.count('\n') + 1 for t in titles if t), default=0)
    size = figsize or (1.7 * cols, (1.6 + 0.17 * lines) * -(-n // cols))
    # a constrained layout of images cuts titles of several lines off in the first saved file (matplotlib 3.11)
    axs = new_axes(n, cols, size, 'compressed')
    draw_pictures(axs, pictures, titles)
    for i in wrong:
        axs[i].title.set(color=WRONG, fontweight='bold')
        for spine in axs[i].spines.values():
            spine.set(visible=True, color=WRONG, linewidth=2.5)
    return axs
