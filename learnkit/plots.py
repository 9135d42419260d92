"""The plots of the Recorder: losses and hyper-parameters by step, and the search for a learning rate."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fastcore.foundation import L

from learnkit.averages import AvgSmoothLoss, Metric
from learnkit.data import evaluation_loaders
from learnkit.errors import MetricError

__all__ = ['Plots']


class Plots:
    "The part of the Recorder that draws what was recorded; matplotlib is imported then."
    learn: Any
    loss: Metric
    smooth_loss: AvgSmoothLoss
    iters: L
    values: L
    hps: Any
    metric_names: L
    _valid_name: Callable[[Metric, str], str]

    def plot_loss(
        self,
        skip_start: int = 5,        # leave out this many of the first steps
        with_valid: bool = True,    # also draw the validation losses
        log: bool = False,          # logarithmic axes
        show_epochs: bool = False,  # mark the ends of epochs
        ax: Any = None,             # matplotlib axes; None: the current ones
    ) -> Any:
        "Draw the smoothed training loss by step, and the validation losses at the ends of epochs; return the axes."
        ax = ax or _current_axes()
        draw = ax.loglog if log else ax.plot
        losses = self.smooth_loss.smooth
        draw(range(skip_start, len(losses)), losses[skip_start:], label='train')
        if show_epochs:
            for step in self.iters: ax.axvline(step, color='grey', linestyle=':')
        for name, points in self._valid_losses(skip_start) if with_valid else ():
            draw(*points, 'o-', markersize=3, label=name)
        ax.set(xlabel='step', ylabel='loss', title='learning curve')
        ax.legend()
        return ax

    def _valid_losses(self, skip_start: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
        columns = self.metric_names[1:]
        for dl_name, _ in evaluation_loaders(self.learn.dls):
            name = self._valid_name(self.loss, dl_name)
            if name not in columns: continue
            i = columns.index(name)
            points = [(s, v[i]) for s, v in zip(self.iters, self.values, strict=True) if s >= skip_start and len(v) > i]
            if points: yield name.removesuffix('_loss').removesuffix('/loss'), tuple(zip(*points, strict=True))

    def plot_sched(
        self,
        keys: Any = None,                            # hyper-parameters to draw; None: those that changed, at least lr
        figsize: tuple[float, float] | None = None,  # inches
    ) -> Any:
        "Draw hyper-parameters by step, one plot each; return the axes."
        import matplotlib.pyplot as plt
        hps = self.hps
        if unknown := [k for k in L(keys) if k not in hps]:
            raise MetricError(f'{unknown[0]} was not recorded: there is {", ".join(hps) or "nothing yet"}.')
        keys = L(keys) if keys is not None else [k for k, v in hps.items() if k == 'lr' or len(set(v)) > 1]
        fig, axs = plt.subplots(1, max(1, len(keys)), figsize=figsize or (5 * max(1, len(keys)), 3.5), squeeze=False)
        for key, ax in zip(keys, axs[0], strict=False):
            ax.plot(hps[key])
            ax.set(xlabel='step', ylabel=key)
        fig.tight_layout()
        return list(axs[0])

    def plot_lr_find(
        self,
        skip_end: int = 5,          # leave out so many of the last rates
        suggestions: Any = None,    # points (rate, loss) to mark; None: those that `lr_find` suggested
        nms: Any = None,            # their names
        ax: Any = None,             # matplotlib axes; None: those of a new figure
    ) -> Any:
        "Draw the losses of the last `learn.lr_find()` over its rates; return the axes."
        search = self.learn.lr_search
        if search is None: raise MetricError('There is no search to draw: call `learn.lr_find()` first.')
        return search.plot(skip_end, suggestions, nms, ax)


def _current_axes() -> Any:
    import matplotlib.pyplot as plt
    return plt.gca()
