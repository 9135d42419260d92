"""Axes, colors and pictures of plots, compared with matplotlib's own."""

import base64
from io import BytesIO

import matplotlib.pyplot as plt

from learnkit.core.plotting import COLORS, axes_or_new, color, encode_figure, new_axes


def test_a_grid_has_the_axes_that_are_asked_for() -> None:
    axs = new_axes(5, 3, figsize=(2, 1))
    assert [ax.get_subplotspec().num1 for ax in axs] == [0, 1, 2, 3, 4]
    assert axs.figure.axes == list(axs) and axes_or_new(axs[2]) is axs[2]
    image = plt.imread(BytesIO(base64.b64decode(encode_figure(axs.figure, dpi=50))))
    assert image.shape[:2] == (50, 100)
    plt.close('all')


def test_colors_of_the_user_come_first() -> None:
    assert color(len(COLORS) + 1) == COLORS[1]
    with plt.rc_context({'axes.prop_cycle': plt.cycler(color=['red', 'blue'])}):
        assert color(1) == 'C1'
