"""Axes, colors and pictures of plots, compared with matplotlib's own."""

from __future__ import annotations

import base64
from io import BytesIO

import matplotlib.pyplot as plt
import numpy as np

from learnkit.core.plotting import COLORS, axes_or_new, color, encode_figure, new_axes


def test_a_grid_has_the_axes_that_are_asked_for() -> None:
    axs = new_axes(5, 3)
    places = [ax.get_subplotspec().get_topmost_subplotspec().num1 for ax in axs]
    assert places == [0, 1, 2, 3, 4] and axs.figure.axes == list(axs)
    assert axes_or_new(axs[2]) is axs[2]
    assert axes_or_new(None, (3, 2)).figure.get_size_inches().tolist() == [3, 2]
    assert len(new_axes(0, 4)) == 1
    plt.close('all')


def test_a_palette_of_the_user_takes_precedence() -> None:
    n = len(COLORS)
    assert [color(0), color(n + 1)] == [COLORS[0], COLORS[1]]
    with plt.rc_context({'axes.prop_cycle': plt.cycler(color=['red', 'blue'])}):
        assert color(1) == 'C1'


def test_an_encoded_figure_is_a_png_of_its_size() -> None:
    (ax,) = new_axes(figsize=(2, 1))
    image = plt.imread(BytesIO(base64.b64decode(encode_figure(ax.figure, dpi=50))))
    assert image.shape[:2] == (50, 100) and np.isfinite(image).all()
    plt.close('all')
