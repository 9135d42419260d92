"""Arrange images with captions as one picture."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np

from learnkit.core.batch import short_repr
from learnkit.core.errors import OptionError
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
        is_list = isinstance(captions, Sized) and not isinstance(captions, str)
        if not is_list or len(captions) != len(pixels):
            raise OptionError(
                f'captions={short_repr(captions)}: give a list of {len(pixels)}, one for each image.'
            )
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
) -> Pixels:  # (N, H', W', C)
    """Write a caption above each image; images narrower than 96 pixels are enlarged by a whole factor.

    Raises `MissingExtraError` without Pillow.

    >>> add_captions(np.zeros((1, 8, 6, 3), np.uint8), ['cat']).shape
    (1, 143, 96, 3)
    """
    scale = max(1, -(-MIN_WIDTH // images.shape[2]))
    images = images.repeat(scale, 1).repeat(scale, 2)
    n, height, width, channels = images.shape
    fitted = [_fit_caption(caption, width) for caption in captions]
    top = LINE_HEIGHT * max(caption.count('\n') + 1 for caption in fitted)
    captioned = np.empty((n, top + height, width, channels), np.uint8)
    for picture, caption in zip(captioned, fitted, strict=True):
        # black on white: each channel holds the text
        picture[:top] = _draw_caption(caption, width, top)[:, :, None]
        picture[:top, :, 3:] = 255  # opaque
    captioned[:, top:] = images
    return captioned


def _fit_caption(caption: Any, width: int) -> str:
    "Return the first lines of a caption, shortened to the width of an image."
    # file names may contain bytes that are not valid text
    text = str(caption).encode('utf-8', 'replace').decode()
    lines = text.splitlines()[:MAX_LINES]
    return '\n'.join(shorten(line, max(width // CHAR_WIDTH, 4)) for line in lines)


def _draw_caption(caption: str, width: int, height: int) -> Pixels:
    "Return a gray picture (height, width) of a caption."
    picture = import_library('PIL.Image', 'A caption').new('L', (width, height), 255)
    draw = import_library('PIL.ImageDraw', 'A caption').Draw(picture)
    draw.multiline_text((width / 2, 0), caption, fill=0, anchor='ma', align='center')
    return np.asarray(picture)
