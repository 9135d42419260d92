"""The plots of the Recorder: losses and hyper-parameters by step, metrics by epoch, the search for a learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from fastcore.foundation import L

from learnkit.core.errors import MetricError, did_you_mean
from learnkit.core.plotting import axes_or_new, color, new_axes
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.metrics.base import AvgSmoothLoss, Metric, is_number

__all__ = ['Plots', 'draw_epochs', 'epochs_of']

Point = tuple[int, float]  # an epoch, and a value there


class Plots:
    "The part of the Recorder that draws what was recorded; matplotlib is imported then."

    learn: Any
    loss: Metric
    smooth_loss: AvgSmoothLoss
    iters: L
    values: L
    hps: Any
    history: Any
    metric_names: L
    _unshown: set[str]
    _valid_name: Callable[[Metric, str], str]

    def plot_loss(
        self,
        skip_start: int = 5,  # leave out this many of the first steps
        with_valid: bool = True,  # also draw the validation losses
        log: bool = False,  # logarithmic axes
        show_epochs: bool = False,  # mark the ends of epochs
        ax: Any = None,  # matplotlib axes; None: those of a new figure
    ) -> Any:
        """Draw the smoothed training loss by step, and the validation losses at the ends of epochs; return the axes.

        The steps are those of the last fit. Where there are no more than `skip_start`, none is left out. Raises
        `MetricError` before the first step.
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
        for i, (name, points) in enumerate(self._valid_losses(skip_start) if with_valid else (), 1):
            draw(*points, 'o-', color=color(i), markersize=4, label=name)
        ax.set(xlabel='step', ylabel='loss', title='learning curve')
        ax.legend()
        return ax

    def _valid_losses(self, skip_start: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
        columns = self.metric_names[1:]
        for dl_name, _ in evaluation_loaders(self.learn.dls):
            name = self._valid_name(self.loss, dl_name)
            if name not in columns:
                continue
            i = columns.index(name)
            points = [
                (s, v[i])
                for s, v in zip(self.iters, self.values, strict=True)
                if s >= skip_start and len(v) > i
            ]
            if points:
                yield (
                    name.removesuffix('_loss').removesuffix('/loss'),
                    tuple(zip(*points, strict=True)),
                )

    def plot_metrics(
        self,
        names: Any = None,  # of metrics ('accuracy') or columns; None: all that are printed
        ax: Any = None,  # matplotlib axes that take all of them; None: a panel for each
        figsize: tuple[float, float] | None = None,  # inches, of a new figure
    ) -> Any:
        """Draw losses and metrics by epoch, training and validation of one metric together; return the axes.

        The epochs are those of all fits, also before a resume; a dotted line is where a further fit begins. Raises
        `MetricError` for a name that was not recorded, and before the first epoch.

        >>> from learnkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> with learn.no_bar(), learn.no_logging(): learn.fit(2)
        >>> [ax.get_ylabel() for ax in learn.recorder.plot_metrics()]
        ['loss']
        """
        epochs, starts = epochs_of(self.history)
        panels = self._panels(names, epochs)
        if ax is not None:
            draw_epochs(
                ax,
                starts,
                {
                    f'{where} {metric}' if len(lines) > 1 else metric: points
                    for metric, lines in panels.items()
                    for where, points in lines.items()
                },
            )
            return ax
        cols = min(len(panels), 3)
        axs = new_axes(len(panels), cols, figsize or (4.2 * cols, 3.2 * -(-len(panels) // cols)))
        for panel, (metric, lines) in zip(axs, panels.items(), strict=True):
            draw_epochs(panel, starts, lines)
            panel.set_ylabel(metric)
        return axs

    def _panels(self, names: Any, epochs: list[int]) -> dict[str, dict[str, list[Point]]]:
        "Return epochs and values by metric, and by where they were measured."
        places = {name for name, _ in evaluation_loaders(self.learn.dls)}
        columns = dict.fromkeys(
            k for row in self.history for k in row if k not in ('fit', 'epoch', 'time')
        )
        of = {
            k: _metric_and_place(k, places) for k in columns if any(map(is_number, self._column(k)))
        }
        if not of:
            raise MetricError('There is no epoch to draw yet: call `learn.fit(1)` first.')

        known = {*of, *(metric for metric, _ in of.values())}
        for name in L(names):
            if name not in known:
                raise MetricError(
                    f'{name} was not recorded.{did_you_mean(str(name), known)} There is '
                    f'{", ".join(sorted(known))}.'
                )
        panels: dict[str, dict[str, list[Point]]] = {}
        for k, (metric, where) in of.items():
            if k not in self._unshown if names is None else {k, metric} & {*L(names)}:
                points = [
                    (e, float(v))
                    for e, v in zip(epochs, self._column(k), strict=True)
                    if is_number(v)
                ]
                panels.setdefault(metric, {})[where] = points
        return panels

    def _column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self.history]

    def plot_sched(
        self,
        keys: Any = None,  # hyper-parameters to draw; None: those that changed, at least lr
        figsize: tuple[float, float] | None = None,  # inches
    ) -> Any:
        "Draw hyper-parameters by step, one plot each; return the axes."
        hps = self.hps
        if unknown := [k for k in L(keys) if k not in hps]:
            raise MetricError(
                f'{unknown[0]} was not recorded: there is {", ".join(hps) or "nothing yet"}.'
            )
        keys = (
            L(keys)
            if keys is not None
            else [k for k, v in hps.items() if k == 'lr' or len(set(v)) > 1]
        )
        if not keys:
            raise MetricError('There is no step to draw yet: call `learn.fit(1)` first.')
        axs = new_axes(len(keys), len(keys), figsize or (4.5 * len(keys), 3.2))
        for key, ax in zip(keys, axs, strict=True):
            ax.plot(hps[key], color=color(0))
            ax.set(xlabel='step', ylabel=key)
        return axs

    def plot_lr_find(
        self,
        skip_end: int = 5,  # leave out so many of the last rates
        suggestions: Any = None,  # points (rate, loss) to mark; None: the suggestions of `lr_find`
        nms: Any = None,  # their names
        ax: Any = None,  # matplotlib axes; None: those of a new figure
    ) -> Any:
        "Draw the losses of the last `learn.lr_find()` over its rates; return the axes."
        search = self.learn.lr_search
        if search is None:
            raise MetricError('There is no search to draw: call `learn.lr_find()` first.')
        return search.plot(skip_end, suggestions, nms, ax)


def epochs_of(
    history: list[dict[str, Any]],  # a row an epoch, with `fit` and `epoch`
) -> tuple[list[int], list[int]]:  # place of each row on an axis of epochs; where later fits begin
    """Number the epochs of all fits; a fit that begins where none of the others has been goes on from there.

    >>> epochs_of([{'fit': 0, 'epoch': 0}, {'fit': 0, 'epoch': 1}, {'fit': 1, 'epoch': 0}, {'fit': 2, 'epoch': 3}])
    ([0, 1, 2, 3], [2, 3])
    """
    places: list[int] = []
    starts: list[int] = []
    for _, rows in groupby(history, lambda row: row['fit']):
        numbers = [row['epoch'] for row in rows]
        shift = max(0, places[-1] + 1 - numbers[0]) if places else 0
        if places:
            starts.append(numbers[0] + shift)
        places += [n + shift for n in numbers]
    return places, starts


def _metric_and_place(column: str, places: set[str]) -> tuple[str, str]:
    "Split the name of a column: 'train_loss' is ('loss', 'train'), 'night/accuracy' is ('accuracy', 'night')."
    for where in ('train', 'valid'):
        if column.startswith(f'{where}_'):
            return column.removeprefix(f'{where}_'), where
    where, _, metric = column.partition('/')
    return (metric, where) if metric and where in places else (column, 'valid')


def draw_epochs(
    ax: Any,  # matplotlib axes
    starts: list[int],  # epochs that a further fit begins with
    lines: dict[str, list[Point]],  # by label
) -> None:
    "Draw values by epoch, those of training dashed and in the first color, and mark where fits begin."
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
