# SPDX-License-Identifier: Apache-2.0
"""Helpers for plots: import of matplotlib, color palette, new axes, and figures as PNG."""

from __future__ import annotations

import math
from base64 import b64encode
from io import BytesIO
from typing import Any

from learnkit.core.optional import import_library

# color-blind safe palette of Okabe and Ito, without the colors that have little contrast on white
COLORS = '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9'
WRONG = COLORS[1]  # marks a mistake, together with bold text and a frame


class AxesList(list[Any]):
    """Axes of one figure, with a short repr so that a notebook cell that returns the axes shows only the figure.

    >>> AxesList([])
    <0 axes>
    """

    @property
    def figure(self) -> Any:
        "The figure of the axes, for example for `figure.savefig`."
        return self[0].figure

    def __repr__(self) -> str:
        return f'<{len(self)} axes>'


def pyplot() -> Any:
    "Import `matplotlib.pyplot`; raise `MissingExtraError` if matplotlib is not installed."
    return import_library('matplotlib.pyplot', 'A plot')


def color(i: int) -> str:
    "Return color `i` of the palette, or of matplotlib's property cycle if the user has set one."
    plt = pyplot()
    has_cycle = plt.rcParams['axes.prop_cycle'] != plt.rcParamsDefault['axes.prop_cycle']
    return f'C{i}' if has_cycle else COLORS[i % len(COLORS)]


def choose_columns(
    n: int,  # number of images
) -> int:
    """Return the number of columns of a grid: one row for up to 4 images, otherwise about a square.

    >>> [choose_columns(n) for n in (1, 4, 5, 9, 10)]
    [1, 4, 3, 3, 4]
    """
    return n if n <= 4 else math.ceil(math.sqrt(n))


def new_axes(
    n: int = 1,  # number of axes
    cols: int = 1,  # number of columns
    figsize: tuple[float, float] | None = None,  # size in inches; None: matplotlib's default
    layout: str = 'constrained',  # matplotlib's layout; 'compressed' for images
) -> AxesList:
    "Return the axes of a new figure in row-major order; unused grid cells are empty."
    cols = min(cols, max(n, 1))
    n = max(n, 1)
    axs = pyplot().subplots(-(-n // cols), cols, figsize=figsize, squeeze=False, layout=layout)[1]
    for ax in axs.flat[n:]:
        ax.remove()
    return AxesList(axs.flat[:n])


def axes_or_new(
    ax: Any,  # matplotlib axes, or None
    figsize: tuple[float, float] | None = None,  # size of a new figure, in inches
) -> Any:
    "Return `ax`, or the axes of a new figure if `ax` is None."
    return new_axes(figsize=figsize)[0] if ax is None else ax


def encode_figure(
    figure: Any,  # matplotlib figure
    **options: Any,  # options of `savefig`: `dpi`, `transparent`, ...
) -> str:
    "Return a figure as PNG in base64, as notebooks and HTML store images."
    file = BytesIO()
    figure.savefig(file, format='png', **options)
    return b64encode(file.getvalue()).decode()
