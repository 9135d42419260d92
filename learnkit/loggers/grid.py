# SPDX-License-Identifier: Apache-2.0
"""Arrange images with captions as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from learnkit.core.optional import import_library
from learnkit.core.plotting import choose_columns
from learnkit.data.tables import shorten
from learnkit.loggers.values import as_images

GAP = 2  # pixels between images
MIN_WIDTH = 96  # least width of a captioned image, in pixels
LINE_HEIGHT = 15  # pixels per line of a caption
CHAR_WIDTH = 6  # pixels per average character
MAX_LINES = 3  # lines of a caption

Pixels = np.ndarray[Any, Any]


def arrange_images(
    images: Any,  # images, as in `log_images`
    captions: Sequence[Any] | None = None,  # text above each image
    grid: bool = True,  # whether several images become one picture
) -> Pixels:  # bytes (N, H, W, C)
    "Return images with their captions, as one picture or separately; raise `OptionError` for wrong arguments."
    pixels: Pixels = as_images(images)
    if captions is not None:
        pixels = add_captions(pixels, captions)
    return make_grid(pixels) if grid else pixels


def make_grid(
    images: Pixels,  # bytes (N, H, W, C)
) -> Pixels:  # one picture (1, H', W', C)
    """Return images as one picture on a white background, with about as many rows as columns.

    >>> make_grid(np.zeros((5, 8, 6, 3), np.uint8)).shape
    (1, 18, 22, 3)
    """
    n, height, width, channels = images.shape
    cols = choose_columns(n)
    rows = -(-n // cols)
    shape = rows * (height + GAP) - GAP, cols * (width + GAP) - GAP, channels
    grid = np.full(shape, 255, np.uint8)
    for i, image in enumerate(images):
        y = i // cols * (height + GAP)
        x = i % cols * (width + GAP)
        grid[y : y + height, x : x + width] = image
    return grid[None]


def add_captions(
    images: Pixels,  # bytes (N, H, W, C)
    captions: Sequence[Any],  # text above each image
) -> Pixels:  # (N, H', W', 3)
    """Write a caption above each image; images narrower than 96 pixels are enlarged by a whole factor.

    Raises `MissingExtraError` without Pillow.

    >>> add_captions(np.zeros((1, 8, 6, 3), np.uint8), ['cat']).shape
    (1, 143, 96, 3)
    """
    image_module = import_library('PIL.Image', 'A caption')
    draw_module = import_library('PIL.ImageDraw', 'A caption')
    scale = max(1, -(-MIN_WIDTH // images.shape[2]))
    images = images.repeat(scale, 1).repeat(scale, 2)
    _, height, width, channels = images.shape
    fitted = [_fit_caption(caption, width) for caption in captions]
    top = LINE_HEIGHT * max(caption.count('\n') + 1 for caption in fitted)
    pictures = []
    for pixels, caption in zip(images, fitted, strict=True):
        picture = image_module.new('RGB', (width, top + height), 'white')
        picture.paste(
            image_module.fromarray(pixels[:, :, 0] if channels == 1 else pixels), (0, top)
        )
        draw = draw_module.Draw(picture)
        draw.multiline_text((width / 2, 0), caption, fill='black', anchor='ma', align='center')
        pictures.append(np.asarray(picture))
    return np.stack(pictures)


def _fit_caption(caption: Any, width: int) -> str:
    "Return the first lines of a caption, shortened to the width of an image."
    lines = str(caption).splitlines()[:MAX_LINES]
    return '\n'.join(shorten(line, max(width // CHAR_WIDTH, 4)) for line in lines)
