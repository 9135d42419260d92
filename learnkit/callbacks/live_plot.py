"""Callback that plots the losses during training in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from math import inf
from time import perf_counter
from typing import Any

from typing_extensions import override

from learnkit.callbacks.recorder import recorder_of
from learnkit.core.html import DisplayHandle, in_notebook
from learnkit.core.plotting import color, encode_figure, pyplot
from learnkit.data.dataloaders import epoch_length
from learnkit.engine.callback import Callback

__all__ = ['LossGraph', 'MasterBar', 'ShowGraph', 'ShowGraphCallback']

PATIENCE_S = 0.5  # a fit that ends sooner is drawn once
INTERVAL_S = 1.0  # least number of seconds between two plots
SHARE = 50  # the time between two plots is at least this many times as long as a plot takes
SKIP = 5  # number of first steps to leave out, whose losses are much higher
MAX_POINTS = 1000  # largest number of points of the training loss

Points = list[list[float]]  # [step, loss] each


class ShowGraph(Callback):
    """Plot the training and validation losses during training in a notebook, in one updated figure.

    The figure is below the table, and its last state is saved with the notebook. The training loss
    is smoothed, as in the table, and shown as far as it has arrived from the device, without
    waiting. A plot takes some 50 ms, and the next one comes after 50 times as long at the earliest:
    apart from the first and the last plot a training takes at most 2% longer. Outside of a notebook
    nothing is drawn: call `learn.recorder.plot_loss()` afterwards.

    Raises `MissingExtraError` without matplotlib. Checkpointed: the validation losses of the fit.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=ShowGraph())
    >>> with learn.no_logging(): learn.fit(2)
    ShowGraph draws in a notebook. Elsewhere, `learn.recorder.plot_loss()` does when the training is over.
    >>> [step for step, loss in learn.show_graph.valid_losses['valid']]
    [10, 20]
    """

    order = 65
    run_valid = False
    first_process_only = True
    remove_on_fetch = remove_on_find = True

    def __init__(self) -> None:
        self.valid_losses: dict[str, Points] = {}  # points of the fit, by loader
        self._graph: LossGraph | None = None  # figure of the running fit
        self._due = inf
        self._has_printed = False

    def before_fit(self) -> None:
        "Create the figure in a notebook; elsewhere print a hint once."
        if not self._is_outer_fit():
            return
        self.valid_losses = {}
        if in_notebook():
            n = epoch_length(self.learn.dls, self.learn.dls.train)[0]
            n_epoch = self.learn.n_epoch
            self._graph = LossGraph(n * n_epoch if n and n_epoch else None)
            self._due = perf_counter() + PATIENCE_S
        elif not self._has_printed:
            self._has_printed = True
            print(
                'ShowGraph draws in a notebook. Elsewhere, `learn.recorder.plot_loss()` does when the training is '
                'over.'
            )

    def after_batch(self) -> None:
        "Update the figure if it is due; otherwise only read the clock."
        if perf_counter() >= self._due:
            self._draw()

    def after_eval(self) -> None:
        "Add the losses of the evaluation."
        recorder = recorder_of(self.learn)
        if recorder is None or not self._is_outer_fit():
            return
        for name, value in recorder.measured.items():
            dl_name = 'valid' if name == 'valid_loss' else name.removesuffix('/loss')
            if dl_name == name or value is None:
                continue
            point = [recorder.smooth_loss.count, float(value)]
            self.valid_losses.setdefault(dl_name, []).append(point)
        self.after_batch()

    def after_fit(self) -> None:
        "Show the final figure."
        if self._is_outer_fit():
            self._end()

    def cleanup(self) -> None:
        "Show the final figure also after an error."
        self._end()

    def _is_outer_fit(self) -> bool:
        return bool(self.learn.fitting and self.learn.run.depth == 1)

    def _draw(self, is_over: bool = False) -> None:
        recorder = recorder_of(self.learn)
        graph = self._graph
        began = perf_counter()
        if graph is None or recorder is None:
            return
        is_first = graph.draw(recorder.smooth_loss.arrived, self.valid_losses, is_over)
        now = perf_counter()
        self._due = now + max(INTERVAL_S, 0 if is_first else SHARE * (now - began))

    def _end(self) -> None:
        "Draw the final figure, once."
        self._due = inf
        try:
            self._draw(is_over=True)
        finally:
            self._graph = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {'valid_losses': deepcopy(self.valid_losses)}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self.valid_losses = deepcopy(sd['valid_losses'])


ShowGraphCallback = ShowGraph  # fastai's name


class LossGraph:
    "Figure of the losses, unknown to pyplot, and the notebook output that shows it."

    def __init__(
        self,
        n_steps: int | None = None,  # number of steps of the whole fit, if known
    ) -> None:
        pyplot()  # raises if matplotlib is missing
        self.n_steps = n_steps
        self.area = DisplayHandle()
        self.fig: Any = None
        self.ax: Any = None

    def draw(
        self,
        losses: list[float],  # training losses by step
        valid: dict[str, Points],  # points of evaluations by loader
        is_over: bool = False,  # whether the fit has ended
    ) -> bool:
        "Update the figure; return whether it was shown for the first time."
        is_first = self.area.handle is None
        if not losses and not valid and is_first:
            return False  # nothing was trained
        if self.fig is None:
            from matplotlib.figure import Figure

            self.fig = Figure(figsize=(6, 3.2), layout='constrained')
            self.ax = self.fig.add_subplot()
        draw_losses(self.ax, thin_losses(losses), valid)
        if self.n_steps and not is_over:
            self.ax.set_xlim(0, max(self.n_steps, len(losses)))
        image = encode_figure(self.fig)
        self.area.show({'image/png': image, 'text/plain': describe_losses(losses, valid)})
        return is_first


class MasterBar:
    "Part of fastai's progress bar that fastai's own `ShowGraphCallback` calls; it draws in a notebook."

    def __init__(self) -> None:
        self.graph: LossGraph | None = None

    def update_graph(
        self,
        graphs: Sequence[tuple[Any, Any]],  # steps and training losses, steps and validation losses
        x_bounds: tuple[float, float] | None = None,  # first and last step of the fit
        y_bounds: tuple[float, float] | None = None,  # ignored: the graph fits its losses
    ) -> None:
        "Draw the losses, replacing the previous graph."
        if not in_notebook():
            return
        if self.graph is None:
            self.graph = LossGraph(int(x_bounds[1]) if x_bounds else None)
        (_, losses), (steps, valid_losses) = graphs
        points = [[float(x), float(y)] for x, y in zip(steps, valid_losses, strict=True)]
        self.graph.draw([float(loss) for loss in losses], {'valid': points})


def draw_losses(ax: Any, points: Points, valid: dict[str, Points]) -> None:
    "Clear the axes and draw the losses."
    ax.clear()
    steps = [step for step, _ in points]
    losses = [loss for _, loss in points]
    ax.plot(steps, losses, color=color(0), label='train')
    for i, (name, valid_points) in enumerate(valid.items(), 1):
        ax.plot(*zip(*valid_points, strict=True), 'o-', markersize=3, color=color(i), label=name)
    ax.set(xlabel='step', ylabel='loss')
    ax.legend(loc='upper right')


def thin_losses(losses: list[float]) -> Points:
    """Return at most `MAX_POINTS` points (step, loss), always with the last step.

    >>> points = thin_losses([1.] * 100_000)
    >>> len(points) <= MAX_POINTS, points[-1]
    (True, [100000, 1.0])
    """
    n = len(losses)
    first = SKIP if n > 2 * SKIP else 0
    every = (n - first) // MAX_POINTS + 1
    return [[i + 1, losses[i]] for i in range(n - 1, first - 1, -every)][::-1]


def describe_losses(losses: list[float], valid: dict[str, Points]) -> str:
    """Return the last losses as text.

    >>> describe_losses([3., 1.], {'valid': [[2, 0.5]]})
    'loss after 2 steps: train 1.0000, valid 0.5000'
    """
    last = {'train': losses[-1]} if losses else {}
    last |= {name: points[-1][1] for name, points in valid.items()}
    values = ', '.join(f'{name} {loss:.4f}' for name, loss in last.items())
    return f'loss after {len(losses)} steps: {values}'
