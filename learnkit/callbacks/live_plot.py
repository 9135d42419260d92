# SPDX-License-Identifier: Apache-2.0
"""Callback that plots the losses during training in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import perf_counter
from typing import Any

from learnkit.callbacks.plots import Points
from learnkit.callbacks.recorder import records
from learnkit.core.html import DisplayHandle, in_notebook
from learnkit.core.plotting import color, encode_figure, pyplot
from learnkit.engine.callback import Callback

PATIENCE_S = 0.5  # a fit that ends sooner is drawn once
INTERVAL_S = 2.5  # least number of seconds between two plots
SKIP = 5  # number of first steps to leave out, whose losses are much higher


class ShowGraph(Callback):
    """Plot the training and validation losses during training in a notebook, in one updated figure.

    The figure is below the table, and its last state is saved with the notebook. The training loss
    is smoothed, as in the table, and shown as far as it has arrived from the device, without
    waiting. A plot takes some 50 ms, and the next one comes after 2.5 s at the earliest. Outside of a
    notebook nothing is drawn: call `learn.recorder.plot_loss()` afterwards.

    Raises `MissingExtraError` without matplotlib, and `MetricError` without a Recorder. No state.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=ShowGraph())
    >>> with learn.no_logging(): learn.fit(2)
    ShowGraph draws in a notebook. Elsewhere, call `learn.recorder.plot_loss()` at the end.
    >>> [step for step, loss in learn.show_graph.valid_losses['valid']]
    [10, 20]
    """

    order = 65
    run_valid = False
    first_process_only = True
    remove_on_fetch = remove_on_find = writes_files = True

    def __init__(self) -> None:
        self._graph: LossGraph | None = None  # figure of the running fit
        self._due = inf
        self._has_printed = False

    def before_fit(self) -> None:
        "Create the figure in a notebook; elsewhere print a hint once."
        if not self._is_outer_fit():
            return
        if in_notebook():
            self._graph = LossGraph()
            self._due = perf_counter() + PATIENCE_S
        elif not self._has_printed:
            self._has_printed = True
            print(
                'ShowGraph draws in a notebook. Elsewhere, call `learn.recorder.plot_loss()` at the end.'
            )

    def after_batch(self) -> None:
        "Update the figure if it is due; otherwise only read the clock."
        if perf_counter() >= self._due:
            self._draw()

    @property
    def valid_losses(self) -> dict[str, Points]:
        "Validation losses of the last fit, by loader."
        return records(self).valid_losses

    def cleanup(self) -> None:
        "Show the final figure, also after an error."
        try:
            self._draw()
        finally:
            self._due = inf
            self._graph = None

    def _is_outer_fit(self) -> bool:
        return bool(self.learn.fitting and self.learn.run.depth == 1)

    def _draw(self) -> None:
        if self._graph is not None:
            self._graph.draw(records(self).smooth_loss.arrived, self.valid_losses)
        self._due = perf_counter() + INTERVAL_S


ShowGraphCallback = ShowGraph  # fastai's name


class LossGraph:
    "Figure of the losses, unknown to pyplot, and the notebook output that shows it."

    def __init__(self) -> None:
        pyplot()  # raises if matplotlib is missing
        self.area = DisplayHandle()
        self.fig: Any = None
        self.ax: Any = None

    def draw(
        self,
        losses: list[float],  # training losses by step
        valid: dict[str, Points],  # points of evaluations by loader
    ) -> None:
        "Update the figure, if anything was trained."
        if not losses and not valid:
            return
        if self.fig is None:
            from matplotlib.figure import Figure

            self.fig = Figure(figsize=(6, 3.2), layout='constrained')
            self.ax = self.fig.add_subplot()
        ax = self.ax
        ax.clear()
        first = SKIP if len(losses) > 2 * SKIP else 0
        steps = range(first + 1, len(losses) + 1)
        ax.plot(steps, losses[first:], color=color(0), label='train')
        for i, (name, points) in enumerate(valid.items(), 1):
            ax.plot(*zip(*points, strict=True), 'o-', markersize=3, color=color(i), label=name)
        ax.set(xlabel='step', ylabel='loss')
        ax.legend(loc='upper right')
        image = encode_figure(self.fig)
        self.area.show({'image/png': image, 'text/plain': f'losses of {len(losses)} steps'})


class MasterBar:
    "Part of fastai's progress bar that fastai's own `ShowGraphCallback` calls; it draws in a notebook."

    def __init__(self) -> None:
        self.graph: LossGraph | None = None

    def update_graph(
        self,
        graphs: Sequence[tuple[Any, Any]],  # steps and training losses, steps and validation losses
        x_bounds: tuple[float, float] | None = None,  # ignored: the graph fits its losses
        y_bounds: tuple[float, float] | None = None,  # ignored
    ) -> None:
        "Draw the losses, replacing the previous graph."
        if not in_notebook():
            return
        self.graph = self.graph or LossGraph()
        (_, losses), (steps, valid_losses) = graphs
        points = [[float(x), float(y)] for x, y in zip(steps, valid_losses, strict=True)]
        self.graph.draw([float(loss) for loss in losses], {'valid': points})
