"""Captions above images."""

import numpy as np
import pytest

from learnkit.loggers.grid import add_captions


@pytest.mark.parametrize('channels', [1, 3, 4])
def test_captions_are_above_their_images(channels: int) -> None:
    pytest.importorskip('PIL')
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 40, channels), np.uint8)
    captioned = add_captions(pixels, ['cat', 'W' * 200, ''])
    assert captioned.shape == (3, 15 + 15, 120, 3)
    assert np.array_equal(captioned[:, 15::3, ::3, :1], pixels[..., :1])  # enlarged three times
    ink = (captioned[:, :15, :, 0] < 128).sum((1, 2))
    assert ink[1] > 200 and 0 < ink[0] < ink[1] and ink[2] == 0
    two_lines = add_captions(pixels, ['a\nb', 'c', 'd\ne\nf\ng'])
    assert two_lines.shape[1] == 3 * 15 + 15
