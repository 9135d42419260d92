"""What the pictures share: matplotlib, imported when one is drawn, a palette, and new axes."""

from __future__ import annotations

from typing import Any

from learnkit.core.errors import MissingExtraError

__all__ = ['COLORS', 'WRONG', 'AxesList', 'pyplot', 'color', 'new_axes', 'axes_or_new']

# Okabe and Ito's, without those that are lost on white: told apart by the colour-blind, on white and on black
COLORS = '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9'
WRONG = COLORS[1]  # marks a mistake, never alone: bold and a frame go with it


class AxesList(list[Any]):
    """The axes of one figure; shown as their number, so that a cell that ends with them shows the picture alone.

    >>> AxesList([])
    <0 axes>
    """

    @property
    def figure(self) -> Any:
        "The figure that they are on, `savefig` among its methods."
        return self[0].figure

    def __repr__(self) -> str:
        return f'<{len(self)} axes>'


def pyplot() -> Any:
    "Import matplotlib's interface of figures; raise `MissingExtraError` without it."
    try:
        import matplotlib.pyplot as plt
    except ImportError as e:
        raise MissingExtraError('Plots need matplotlib: pip install matplotlib') from e
    return plt


def color(i: int) -> str:
    "Return the color number `i`: of the palette, or of the style that was chosen in matplotlib."
    plt = pyplot()
    own = plt.rcParams['axes.prop_cycle'] != plt.rcParamsDefault['axes.prop_cycle']
    return f'C{i}' if own else COLORS[i % len(COLORS)]


def new_axes(
    n: int = 1,  # how many axes
    cols: int = 1,  # in so many columns
    figsize: tuple[float, float] | None = None,  # inches; None: matplotlib's
) -> AxesList:
    "Return the axes of a new figure, row by row; places that are left over stay empty."
    cols, n = min(cols, max(n, 1)), max(n, 1)
    axs = pyplot().subplots(
        -(-n // cols), cols, figsize=figsize, squeeze=False, layout='constrained'
    )[1]
    for ax in axs.flat[n:]:
        ax.remove()
    return AxesList(axs.flat[:n])


def axes_or_new(
    ax: Any,  # matplotlib axes, or None
    figsize: tuple[float, float] | None = None,  # inches, of a new figure
) -> Any:
    "Return these axes, or those of a new figure."
    return new_axes(figsize=figsize)[0] if ax is None else ax
