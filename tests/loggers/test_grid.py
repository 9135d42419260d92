"""Captions above images."""

from __future__ import annotations

import numpy as np
import pytest

from learnkit.loggers.grid import add_captions


@pytest.mark.parametrize('channels', [1, 3, 4])
def test_captions_are_above_their_images(channels: int) -> None:
    pytest.importorskip('PIL')
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 40, channels), np.uint8)
    names = ['$x_{$ <b>\N{CJK UNIFIED IDEOGRAPH-732B}', 'W' * 200, '']
    captioned = add_captions(pixels, names)
    assert captioned.shape == (3, 15 + 15, 120, channels)
    assert np.array_equal(captioned[:, 15::3, ::3], pixels)  # enlarged three times
    assert np.array_equal(captioned[:, 17::3, 2::3], pixels)
    ink = (captioned[:, :15, :, 0] < 128).sum((1, 2))
    assert ink[0] > 50 and ink[1] > 200 and ink[2] == 0
    edges = captioned[:, :15, [0, -1]]
    assert (edges[[0, 2]] == 255).all() and (captioned[2, :15] == 255).all()
    # another text is another picture, and the same text the same one
    again = add_captions(pixels, ['other', 'W' * 200, ''])
    assert not np.array_equal(again[0, :15], captioned[0, :15])
    assert np.array_equal(again[1:], captioned[1:])
    two_lines = add_captions(pixels, ['a\nb', 'c', 'd\ne\nf\ng'])
    assert two_lines.shape[1] == 3 * 15 + 15
    wide = np.zeros((1, 4, 200, channels), np.uint8)
    assert add_captions(wide, [3]).shape == (1, 19, 200, channels)
