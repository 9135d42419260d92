# SPDX-License-Identifier: Apache-2.0
"""Base classes of callbacks that monitor a value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from typing_extensions import override

from learnkit.callbacks.recorder import (
    check_monitor,
    epoch_row,
    list_values,
    read_monitor,
    records,
)
from learnkit.core.time import Time, Timestamp, as_time
from learnkit.core.validation import warn_user
from learnkit.core.watched import as_number, is_better
from learnkit.engine.callback import Callback
from learnkit.engine.counters import check_countable
from learnkit.metrics.direction import MetricProperties, as_comparison

Monitor = str | Callable[[Any], Any]
Compare = Callable[[Any, Any], Any]
Comparison = Compare | MetricProperties | str  # types that `comp` accepts


class TrackerCallback(Callback):
    """Compare a value at the end of each epoch with the best value so far.

    `best` is the best value, and `new_best` is True if this epoch improved it. A monitored value is
    a column of the Recorder (`learn.recorder.metric_names`): a loss, a metric, `name/loss` of one
    of several validation loaders, or a name of `learn.log`. For any other value, `monitor` is a
    function of the Learner. An epoch without a value (None), such as one that `eval_every='2ep'`
    does not evaluate, is not compared. NaN is compared, and is never an improvement. Without
    `comp`, lower is better (`np.less`) for losses and errors, and higher is better (`np.greater`)
    for any other column.

    Raises `MetricError` for a value that is not a number, before training for a name that resembles
    a column, and after the first epoch with an evaluation for a name that nothing has logged.
    Checkpointed: `best` and `new_best`.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(lr=0.05, cbs=TrackerCallback())
    >>> with learn.no_bar(): learn.fit(3)
    >>> learn.tracker.best == min(row['valid_loss'] for row in learn.history)
    True
    """

    order = 60
    remove_on_fetch = True
    remove_on_find = True
    run_in = 'fit'
    monitor: Monitor
    reset_on_fit: bool
    min_delta: float
    best: float
    new_best: bool

    def __init__(
        self,
        monitor: Monitor = 'valid_loss',  # name of a column, or function of the learner
        comp: Comparison | None = None,  # f(new, best), or `MetricProperties`; None: by the column
        min_delta: float = 0.0,  # least change that counts as an improvement
        reset_on_fit: bool = True,  # whether each fit resets `best`; False: `best` of all fits
    ) -> None:
        name = monitor if isinstance(monitor, str) else getattr(monitor, '__name__', '')
        # without `comp`, the direction follows fastai's rule
        default = np.less if 'loss' in name or 'error' in name else np.greater
        self.comp: Compare = default if comp is None else as_comparison(comp, name)
        is_known = default is np.less or MetricProperties().get(name) == 'higher'
        self._is_guess = comp is None and isinstance(monitor, str) and not is_known
        prefers_lower = bool(self.comp(0.0, 1.0))
        self.monitor = monitor
        self.reset_on_fit = reset_on_fit
        self.min_delta = min_delta
        self._margin = -min_delta if prefers_lower else min_delta  # with the sign that `comp` needs
        self._worst = math.inf if prefers_lower else -math.inf
        self.best = self._worst
        self.new_best = False
        self.idx: int | None = None  # index of the column in `recorder.values[-1]`

    def before_fit(self) -> None:
        "Find the column, and reset the best value."
        records(self)  # raises without a Recorder
        self.idx = None
        if not callable(self.monitor):
            check_monitor(self, self.monitor)
            self.idx = self._find_index()
        if self._is_guess:
            self._is_guess = False
            warn_user(
                f'monitor={self.monitor!r}: higher counts as better for every name without "loss" or "error" '
                "in it. Pass `comp='less'`, or `comp='greater'` if that is meant."
            )
        if self.reset_on_fit:
            self.best = self._worst
        self.new_best = False

    def after_epoch(self) -> None:
        "Compare this epoch's value with the best value."
        self.new_best = False
        row = epoch_row(self)
        if row is None:
            return
        value = self._as_number(self._get_value(row))
        if value is None:
            return  # this epoch has not evaluated the value
        self._compare(value)
        self.after_comparison()

    def _compare(self, value: float) -> None:
        "Compare with the best value, and keep the better one; ignore differences below single precision."
        is_equal = math.isclose(value, self.best, rel_tol=1e-7)
        compared = self.best if is_equal else value
        self.new_best = is_better(compared - self._margin, self.best, self.comp)
        if self.new_best:
            self.best = value

    def after_comparison(self) -> None:
        "Act on `new_best` after a value was compared; subclasses override this method."

    def _as_number(self, value: Any) -> float | None:
        "Return a value as a number; the value of a function is the first rank's."
        number = as_number(self, self.monitor, value)
        return self.learn.world.broadcast(number) if callable(self.monitor) else number

    def _get_value(self, row: dict[str, Any]) -> Any:
        "Return the monitored value. Callbacks before this one may have changed `recorder.values`."
        if callable(self.monitor):
            return self.monitor(self.learn)
        value = read_monitor(self, self.monitor)
        # again, as `learn.log` or a metric that returns a dict may have added columns
        self.idx = self._find_index()
        if self.idx is None:
            return value
        values = records(self).values[-1]
        # the row of an interrupted epoch lacks some values
        is_complete = len(values) == len(row) - len(('fit', 'epoch', 'time'))
        return values[self.idx] if is_complete else value

    def _find_index(self) -> int | None:
        "Return the index of the column in `recorder.values[-1]`, or None if the printed table lacks it."
        names = list_values(records(self))
        return names.index(self.monitor) if self.monitor in names else None

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the best value."
        return {'best': self.best, 'new_best': self.new_best}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the best value."
        self.best = sd['best']
        self.new_best = sd['new_best']


class PatientTracker(TrackerCallback):
    """Wait for an improvement, then lose patience. Checkpointed: also the time waited.

    A number counts epochs with a value, as in fastai, which evaluates every epoch: patience is lost
    when it is reached. A time is the longest accepted time since the last improvement, as in
    Composer: patience is lost in an epoch with a value once more time has passed.
    """

    def __init__(
        self,
        monitor: Monitor = 'valid_loss',
        comp: Comparison | None = None,
        min_delta: float = 0.0,  # least change that counts as an improvement
        patience: int | str | Time = 1,  # epochs without improvement, or a time: '10m', '500ba'
        reset_on_fit: bool = True,  # whether each fit resets `best`
    ) -> None:
        super().__init__(monitor, comp, min_delta, reset_on_fit)
        as_time(patience, 'ep')  # raises unless it is a time
        self.patience = patience
        self.wait = 0  # number of evaluated epochs without improvement
        self._since = Timestamp()  # time of the last improvement

    @override
    def before_fit(self) -> None:
        "Start waiting."
        super().before_fit()
        check_countable(self.learn, as_time(self.patience, 'ep'))
        self._restart_wait()

    @override
    def after_comparison(self) -> None:
        "Count the epoch unless it improved the value."
        if self.new_best:
            return self._restart_wait()
        self.wait += 1
        if self.has_lost_patience():
            self.lose_patience()

    def has_lost_patience(self) -> bool:
        "Return True if the value has not improved for longer than `patience`."
        if not isinstance(self.patience, (str, Time)):
            return self.wait >= self.patience
        limit = as_time(self.patience)
        return self.learn.time[limit.unit] - self._since[limit.unit] > limit

    def lose_patience(self) -> None:
        "Act when patience is lost; subclasses override this method."

    def _restart_wait(self) -> None:
        self.wait = 0
        self._since = self.learn.time

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), 'wait': self.wait, 'since': self._since.state_dict()}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        super().load_state_dict(sd)
        self.wait = sd['wait']
        self._since = Timestamp.from_state_dict(sd['since'])
