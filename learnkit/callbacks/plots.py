# SPDX-License-Identifier: Apache-2.0
"""Plots of the Recorder: losses and hyperparameters by step, metrics by epoch, the LR search."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any

from fastcore.foundation import L

from learnkit.callbacks.columns import Columns
from learnkit.callbacks.history import describe_change
from learnkit.core.errors import MetricError, did_you_mean
from learnkit.core.plotting import AxesList, axes_or_new, color, new_axes
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.metrics.base import AvgSmoothLoss, Metric, is_scalar

if TYPE_CHECKING:
    from learnkit.learner import Learner

Point = tuple[int, float]  # epoch and value
Points = list[list[float]]  # [step, loss] each
Rows = Sequence[Mapping[str, Any]]  # of a history


class Plots:
    "Plotting methods of the Recorder; matplotlib is imported by the first plot."

    learn: Learner
    loss: Metric
    smooth_loss: AvgSmoothLoss
    iters: L
    evaluations: list[dict[str, Any]]
    hps: Any
    history: Any
    columns: Columns

    def plot_loss(
        self,
        skip_start: int = 5,  # number of first steps to leave out
        with_valid: bool = True,  # whether to draw the validation losses
        log: bool = False,  # whether the axes are logarithmic
        show_epochs: bool = False,  # whether to mark the ends of epochs
        ax: Any = None,  # matplotlib axes; None: a new figure
    ) -> Any:
        """Draw the smoothed training loss by step and the validation losses by epoch; return the axes.

        The plot shows the last fit; a dashed line marks what was changed before `learn.resume()`. All
        steps are drawn if there are no more than `skip_start`.
        Raises `MetricError` before the first step.
        """
        losses = self.smooth_loss.smooth
        if not losses:
            raise MetricError('There is no loss to draw yet: call `learn.fit(1)` first.')
        if len(losses) <= skip_start:
            skip_start = 0
        ax = axes_or_new(ax)
        draw = ax.loglog if log else ax.plot
        draw(range(skip_start, len(losses)), losses[skip_start:], color=color(0), label='train')
        if show_epochs:
            for step in self.iters:
                ax.axvline(step, color='grey', linestyle=':', linewidth=1)
        valid_losses = self.valid_losses if with_valid else {}
        for i, (name, points) in enumerate(valid_losses.items(), 1):
            draw(*zip(*points, strict=True), 'o-', color=color(i), markersize=4, label=name)
        self._mark_changes(ax, with_text=True)
        ax.set(xlabel='step', ylabel='loss', title='learning curve')
        ax.legend()
        return ax

    @property
    def valid_losses(self) -> dict[str, Points]:
        "Validation losses of every evaluation of the last fit, by loader."
        n_before = self._count_earlier()
        losses: dict[str, Points] = {}
        for evaluation in self.evaluations:
            step = evaluation['ba'] - n_before
            for name, value in evaluation.items():
                dl_name = 'valid' if name == 'valid_loss' else name.removesuffix('/loss')
                if step > 0 and dl_name != name and value is not None:
                    losses.setdefault(dl_name, []).append([step, float(value)])
        return losses

    def _count_earlier(self) -> int:
        "Return the number of batches of earlier fits."
        n: int = self.learn.time.ba - self.smooth_loss.count
        return n

    def _mark_changes(self, ax: Any, with_text: bool = False) -> None:
        "Mark the steps of the last fit at which it was paused and changed."
        texts: dict[int, list[str]] = {}
        for change in self.history.changes:
            step = change['ba'] - self._count_earlier()
            if step > 0:
                texts.setdefault(step, []).append(describe_change(change))
        for step, lines in texts.items():
            draw_change(ax, step, '\n'.join(lines) if with_text else '')

    def plot_metrics(
        self,
        names: Any = None,  # names of metrics ('accuracy') or columns; None: all printed columns
        figsize: tuple[float, float] | None = None,  # size of a new figure in inches
    ) -> Any:
        """Draw losses and metrics by epoch, training and validation in one panel; return the axes.

        The plot shows all fits, also from before a resume; a dotted line marks the start of each
        further fit, a dashed line what was changed before `learn.resume()`. Raises `MetricError` for
        a name that was not recorded, and before the first epoch.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> with learn.no_bar(), learn.no_logging(): learn.fit(2)
        >>> [ax.get_ylabel() for ax in learn.recorder.plot_metrics()]
        ['loss']
        """
        loader_names = {name for name, _ in evaluation_loaders(self.learn.dls)}
        columns = None if names is None else L(names)
        panels = make_panels(self.history, loader_names, self.columns.is_shown, columns)
        return draw_panels(panels, self.history, figsize)

    def plot_sched(
        self,
        keys: Any = None,  # hyperparameters to draw; None: lr, and those that changed
        figsize: tuple[float, float] | None = None,  # size of the figure in inches
    ) -> Any:
        "Draw hyperparameters by step, one plot each; return the axes."
        hps = self.hps
        unknown = [k for k in L(keys) if k not in hps]
        if unknown:
            raise MetricError(f'{unknown[0]} was not recorded, but {", ".join(hps) or "nothing"}.')
        if keys is None:
            keys = [k for k, v in hps.items() if k == 'lr' or len(set(v)) > 1]
        else:
            keys = L(keys)
        if not keys:
            raise MetricError('There is no step to draw yet: call `learn.fit(1)` first.')
        axs = new_axes(len(keys), len(keys), figsize or (4.5 * len(keys), 3.2))
        for key, ax in zip(keys, axs, strict=True):
            ax.plot(hps[key], color=color(0))
            self._mark_changes(ax)
            ax.set(xlabel='step', ylabel=key)
        return axs

    def plot_lr_find(
        self,
        skip_end: int = 5,  # number of last rates to leave out
        suggestions: Any = None,  # points (rate, loss) to mark; None: the suggestions of `lr_find`
        nms: Any = None,  # names of the suggestions
        ax: Any = None,  # matplotlib axes; None: a new figure
    ) -> Any:
        "Draw the losses of the last `learn.lr_find()` by learning rate; return the axes."
        search = self.learn.lr_search
        if search is None:
            raise MetricError('There is no search to draw: call `learn.lr_find()` first.')
        return search.plot(skip_end, suggestions, nms, ax)


def make_panels(
    history: Rows,
    loader_names: Collection[str],  # names of the validation loaders
    is_shown: Callable[[str], bool],  # whether a column is drawn by default
    names: Iterable[str] | None = None,  # metrics or columns; None: those that are shown
) -> dict[str, dict[str, list[Point]]]:
    "Return the points of each metric by the loader that they were measured on."
    requested = set(names or ())
    known: set[str] = set()
    panels: dict[str, dict[str, list[Point]]] = {}
    for column in dict.fromkeys(name for row in history for name in row):
        values: list[tuple[int, Any]] = [
            (epoch, row.get(column)) for epoch, row in enumerate(history)
        ]
        points = [(epoch, float(v)) for epoch, v in values if is_scalar(v)]
        if column in ('fit', 'epoch', 'time') or not points:
            continue
        metric, source = _split_column(column, loader_names)
        known |= {column, metric}
        is_default = names is None and is_shown(column)
        if is_default or {column, metric} & requested:
            panels.setdefault(metric, {})[source] = points
    if not known:
        raise MetricError('There is no epoch to draw yet: call `learn.fit(1)` first.')
    for name in sorted(requested - known):
        raise MetricError(
            f'{name} was not recorded.{did_you_mean(name, known)} There is {", ".join(sorted(known))}.'
        )
    return panels


def draw_panels(
    panels: Mapping[str, dict[str, list[Point]]],  # result of `make_panels`
    history: Rows,
    figsize: tuple[float, float] | None = None,  # size of the figure in inches
) -> AxesList:
    "Draw a panel for each metric in a new figure, and return the axes."
    pairs = enumerate(pairwise(history), 1)
    starts = [epoch for epoch, (before, row) in pairs if before['fit'] != row['fit']]
    cols = min(len(panels), 3)
    rows = ceil(len(panels) / cols)
    axs = new_axes(len(panels), cols, figsize or (4.2 * cols, 3.2 * rows))
    for panel, (metric, lines) in zip(axs, panels.items(), strict=True):
        draw_epochs(panel, starts, lines)
        for epoch in dict.fromkeys(change['ep'] for change in getattr(history, 'changes', [])):
            draw_change(panel, epoch - 0.5)
        panel.set_ylabel(metric)
    return axs


def _split_column(column: str, loader_names: Collection[str]) -> tuple[str, str]:
    "Split a column name into metric and loader: 'train_loss' is ('loss', 'train')."
    for source in ('train', 'valid'):
        if column.startswith(f'{source}_'):
            return column.removeprefix(f'{source}_'), source
    source, _, metric = column.rpartition('/')
    return (metric, source) if metric and source in loader_names else (column, 'valid')


def draw_change(
    ax: Any,  # matplotlib axes
    x: float,  # step or epoch
    text: str = '',  # text at the top of the line
) -> None:
    "Mark a change of a paused fit by a dashed line."
    ax.axvline(x, color='grey', linestyle='--', linewidth=1)
    if text:
        ax.annotate(
            text,
            (x, 1),
            xycoords=('data', 'axes fraction'),
            xytext=(3, -3),
            textcoords='offset points',
            va='top',
            rotation='vertical',
            fontsize='small',
            color='grey',
        )


def draw_epochs(
    ax: Any,  # matplotlib axes
    starts: list[int],  # first epochs of further fits
    lines: dict[str, list[Point]],  # points by label
) -> None:
    "Draw values by epoch, training dashed and in the first color, and mark where fits begin."
    from matplotlib.ticker import MaxNLocator

    for i, (label, points) in enumerate(lines.items(), 'train' not in lines):
        ax.plot(
            *zip(*points, strict=True),
            '--' if label == 'train' else '-',
            color=color(i),
            label=label,
            marker='o' if len(points) <= 30 else None,
            markersize=4,
        )
    for start in starts:
        ax.axvline(start - 0.5, color='grey', linestyle=':', linewidth=1)
    ax.set_xlabel('epoch (of all fits)' if starts else 'epoch')
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if len(lines) > 1:
        ax.legend()
