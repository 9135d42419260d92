# SPDX-License-Identifier: Apache-2.0
"""Learning rate finder: a short training with a growing rate, which is undone afterwards."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from learnkit.callbacks.lr_suggestions import (
    Point,
    Suggestion,
    SuggestionMethod,
    minimum,
    slide,
    steep,
    valley,
)
from learnkit.callbacks.schedule import ParamScheduler
from learnkit.core.contexts import replacing_yield
from learnkit.core.errors import (
    CancelFitException,
    LossError,
    MissingExtraError,
    ScheduleError,
)
from learnkit.core.interrupts import deferred_interrupts
from learnkit.core.model import name_of, unwrap_partial
from learnkit.core.plotting import axes_or_new, color
from learnkit.core.validation import warn_user
from learnkit.engine.budget import check_not_running
from learnkit.engine.dispatch import as_list
from learnkit.engine.evaluation_schedule import EvaluationSchedule
from learnkit.engine.lengths import epoch_length
from learnkit.engine.snapshot import initialize_lazy, restored, restored_objects
from learnkit.engine.traits import trait_of
from learnkit.metrics.base import AvgSmoothLoss
from learnkit.optim.annealing import SchedExp

if TYPE_CHECKING:
    from learnkit.learner import Learner

__all__ = ['LRFinder', 'LRSearch', 'SuggestionMethod', 'valley', 'slide', 'minimum', 'steep']

DIVERGED = 4  # the search ends when the smoothed loss is this multiple of its minimum
UNSURE = 5  # number of last rates that are never suggested
MARKERS = 'oDs^v'  # markers of the suggestions in a plot


@dataclass
class LRSearch:
    "Result of a search: the smoothed loss at each rate, and the suggested points by name."

    lrs: list[float]
    losses: list[float]
    n_sure: int  # number of points that suggestions are made from
    points: dict[str, Point] = field(default_factory=dict)
    # suggested rates by name; a rate may differ from the rate of its point
    suggested: dict[str, float] = field(default_factory=dict)

    def plot(
        self,
        skip_end: int = UNSURE,  # number of last rates to leave out
        suggestions: Any = None,  # points (rate, loss) to mark; None: the suggested points
        nms: Any = None,  # names of the points
        ax: Any = None,  # matplotlib axes; None: a new figure
    ) -> Any:
        """Draw the loss by learning rate, and the suggestions; return the axes.

        A dotted line marks a suggested rate that differs from the rate of its point, as for
        `minimum`. Raises `MissingExtraError` without matplotlib."""
        ax = axes_or_new(ax)
        n = len(self.lrs) - skip_end if len(self.lrs) > skip_end + 1 else len(self.lrs)
        ax.plot(self.lrs[:n], self.losses[:n], color=color(0))
        ax.set(
            xscale='log',
            xlabel='learning rate',
            ylabel='loss (smoothed)',
            title='learning rate search',
        )
        if suggestions is None:
            points: dict[Any, Point] = dict(self.points)
        else:
            points = dict(zip(nms or range(len(suggestions)), suggestions, strict=True))
        for i, (name, (lr, loss)) in enumerate(points.items()):
            rate = self.suggested.get(name, lr) if suggestions is None else lr
            ax.plot(
                lr,
                loss,
                MARKERS[i % len(MARKERS)],
                color=color(i + 1),
                markersize=8,
                label=f'{name} {rate:.2e}',
            )
            if not math.isclose(rate, lr):
                ax.axvline(rate, color=color(i + 1), linestyle=':')
        if points:
            ax.legend()
        return ax


class LRFinder(ParamScheduler):
    """Train up to `num_it` batches with a rate that grows by equal factors, then undo the training.

    No evaluation takes place. `learn.fit(n, cbs=LRFinder())` restores model, loss function,
    optimizer, loaders and random generators; `learn.lr_search` holds the rates and losses, and the
    Recorder keeps its record. `learn.lr_find()` restores everything else too. The search ends early
    if the smoothed loss is not finite or, with `stop_div`, four times its minimum.

    Raises `ScheduleError` unless 0 < `start_lr` < `end_lr`.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner()
    >>> with learn.no_bar(): learn.fit(10, cbs=LRFinder(num_it=50, stop_div=False))
    >>> len(learn.lr_search.lrs), learn.lr_search.lrs[0]
    (50, 1e-07)
    """

    _undoes_fit = True  # False in `lr_find`, which restores everything itself

    def __init__(
        self,
        start_lr: Any = 1e-7,  # first rate, or one per param group
        end_lr: Any = 10,  # rate that `num_it` batches lead up to
        num_it: int = 100,  # number of batches; below 6 count as 6, as in fastai
        stop_div: bool = True,  # whether to stop when the loss diverges
    ) -> None:
        low: Any = np.asarray(start_lr, dtype=float)
        high: Any = np.asarray(end_lr, dtype=float)
        if low.shape != high.shape or not ((low > 0) & (low < high) & (high < math.inf)).all():
            raise ScheduleError(
                f'LRFinder: the rate cannot grow from {start_lr!r} to {end_lr!r}: pass 0 < start_lr < '
                'end_lr.'
            )
        if not low.ndim:
            low, high = float(low), float(high)
        super().__init__({'lr': SchedExp(low, high)})
        self.num_it = max(int(num_it), 6)
        self.stop_div = stop_div
        self._cleanups = ExitStack()
        self._clear_search()

    def _clear_search(self) -> None:
        "Forget the steps of an earlier search."
        self._pos = 0.0
        self._positions: list[float] = []  # positions in the schedule of steps with a loss
        self._smooth = AvgSmoothLoss()
        self._least = math.inf

    @override
    def before_fit(self) -> None:
        super().before_fit()
        self._clear_search()
        learn = self.learn
        if self._undoes_fit:
            initialize_lazy(learn)
            state = [learn.model, learn.loss_func, learn.opt]
            self._cleanups.enter_context(restored_objects(learn, state))
        self._cleanups.enter_context(replacing_yield(learn.parts, 'evaluations', NoEvaluations()))

    @override
    def before_batch(self) -> None:
        self._pos = self.learn.train_iter / self.num_it
        self._update_val(self._pos)

    def after_batch(self) -> None:
        learn = self.learn
        if 'loss_grad' in learn.__dict__:
            self._positions.append(self._pos)
            self._smooth.accumulate(learn)
            loss = self._smooth.latest  # of the losses that have arrived: no wait for the device
            if learn.world.any(loss is not None and self._ends_search(loss)):
                raise CancelFitException
        if learn.train_iter >= self.num_it:
            raise CancelFitException

    def _ends_search(self, loss: float) -> bool:
        "Return True if a smoothed loss is not finite or, with `stop_div`, far above the least one so far."
        self._least = min(self._least, loss)
        return not math.isfinite(loss) or (self.stop_div and loss > DIVERGED * self._least)

    def after_fit(self) -> None:
        "Replace the losses by their mean over ranks."
        world = self.learn.world
        if world.size == 1:
            return
        losses, _ = self._smooth.since(0)
        self._smooth.replace(0, (world.sum(torch.tensor(losses)) / world.size).tolist())

    @override
    def cleanup(self) -> None:
        super().cleanup()
        self._cleanups.close()
        if self._positions:
            self.learn.lr_search = self.found()

    def found(self) -> LRSearch:
        "Return the search so far, without losses that arrived from the device after its end."
        losses = []
        self._least = math.inf
        for loss in self._smooth.smooth:
            losses.append(loss)
            if self._ends_search(loss):
                break
        n_sure = len(losses) - UNSURE
        if losses and not math.isfinite(losses[-1]):
            if math.isnan(losses.pop()):
                n_sure = min(len(losses), self.num_it - UNSURE)
        rates = [
            float(np.atleast_1d(self.scheds['lr'](pos))[-1])
            for pos in self._positions[: len(losses)]
        ]
        return LRSearch(rates, losses, max(n_sure, 0))


class NoEvaluations(EvaluationSchedule):
    "Evaluation schedule without evaluations."

    @override
    def list_due(self, learn: Learner, at_epoch_end: bool) -> list[tuple[str, Any]]:
        "Return no loaders."
        return []


def lr_find(
    learn: Learner,
    *,
    start_lr: Any,
    end_lr: Any,
    num_it: int,
    stop_div: bool,
    show_plot: bool,
    suggest_funcs: Any,
    ax: Any,
) -> Any:
    "Train a few batches with a growing rate, undo the training, and return suggested rates."
    funcs = {name_of(unwrap_partial(f)): f for f in as_list(suggest_funcs)}
    finder = LRFinder(start_lr, end_lr, num_it, stop_div)
    finder._undoes_fit = False
    check_not_running(learn)
    initialize_lazy(learn)
    n = epoch_length(learn, learn.dls.train)[0]
    left_out = [cb for cb in learn.cbs if trait_of(cb, 'remove_on_find')]
    with (
        deferred_interrupts() as deferred,
        learn.run.lock,
        learn.removed_cbs(left_out),
        restored(learn),
        learn.no_logging(),
        deferred.paused(),
    ):
        learn.fit(finder.num_it // n + 1 if n else finder.num_it, cbs=finder)

    learn.lr_search = search = finder.found()
    suggested = _suggest(search, funcs, finder.num_it) if funcs else None
    if show_plot:
        try:
            search.plot(ax=ax)
        except MissingExtraError as e:
            warn_user(f'{e}, or pass show_plot=False.')
    return suggested


def _suggest(search: LRSearch, funcs: dict[str, Callable[..., Suggestion]], num_it: int) -> Any:
    "Call each function on the curve without its noisy ends, or on all of a short curve."
    lrs, losses = torch.tensor([search.lrs, search.losses], dtype=torch.float64)
    if len(lrs) < 2:
        raise LossError(
            'The loss was not finite from the beginning, so no rate can be suggested. Look at the data '
            'and the loss function, or begin lower with `start_lr`.'
        )
    sure = slice(num_it // 10, search.n_sure)
    if len(lrs[sure]) > 1:
        lrs = lrs[sure]
        losses = losses[sure]
    suggestions = {name: f(lrs, losses, num_it) for name, f in funcs.items()}
    search.points = {name: point for name, (_, point) in suggestions.items()}
    search.suggested = {name: float(rate) for name, (rate, _) in suggestions.items()}
    rates = [lr for lr, _ in suggestions.values()]
    named = namedtuple('SuggestedLRs', list(suggestions), rename=True)  # type: ignore[misc]
    return named(*rates)
