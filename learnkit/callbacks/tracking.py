# SPDX-License-Identifier: Apache-2.0
"""Callbacks that monitor a value: stop the fit, save the best weights, lower the learning rate."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from filecmp import cmp
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from learnkit.callbacks.ema import EMA
from learnkit.callbacks.nan_guard import TerminateOnNaNCallback, print_line
from learnkit.callbacks.recorder import epoch_row, find_column, records
from learnkit.checkpoint.saving import check_weights_path, find_weights_path
from learnkit.core.errors import OptionError
from learnkit.core.files import atomic_write, link_or_copy
from learnkit.core.time import Time, Timestamp, as_time
from learnkit.core.validation import warn_user
from learnkit.core.watched import as_number, is_better
from learnkit.engine.callback import Callback
from learnkit.engine.counters import check_countable
from learnkit.engine.run import is_open
from learnkit.metrics.direction import MetricProperties, as_comparison

if TYPE_CHECKING:
    pass

__all__ = [
    'TerminateOnNaNCallback',
    'TrackerCallback',
    'EarlyStoppingCallback',
    'SaveModelCallback',
    'ReduceLROnPlateau',
]

Monitor = str | Callable[[Any], Any]
Compare = Callable[[Any, Any], Any]
Comparison = Compare | MetricProperties | str  # types that `comp` accepts


class TrackerCallback(Callback):
    """Compare a value at the end of each epoch with the best value so far.

    `best` is the best value, and `new_best` is True if this epoch improved it. A monitored value is
    a column of the Recorder (`learn.recorder.metric_names`): a loss, a metric, `name/loss` of one
    of several validation loaders. For any other value, such as an average of `learn.log`, `monitor`
    is a function: `lambda learn: learn.history[-1].get('valid_part')`. An epoch without a value
    (None), such as one that `eval_every='2ep'` does not evaluate, is not compared. NaN is compared,
    and is never an improvement. Without `comp`, lower is better (`np.less`) for losses and errors,
    and higher is better (`np.greater`) for any other column.

    Raises `MetricError` before training for an unknown column, and for a value that is not a
    number. Checkpointed: `best` and `new_best`.

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
        self.idx = None if callable(self.monitor) else find_column(self, self.monitor)
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
        values = records(self).values[-1]
        # again, as a metric that returns a dict may have added columns
        self.idx = find_column(self, self.monitor)
        # the row of an interrupted epoch lacks some values
        is_complete = len(values) == len(row) - len(('fit', 'epoch', 'time'))
        return values[self.idx] if is_complete else row.get(self.monitor)

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the best value."
        return {'best': self.best, 'new_best': self.new_best}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the best value."
        self.best = sd['best']
        self.new_best = sd['new_best']


class _Patient(TrackerCallback):
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
        as_time(patience, 'ep')  # raises for what is no time
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
        if self._is_over():
            self.lose_patience()

    def _is_over(self) -> bool:
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


class EarlyStoppingCallback(_Patient):
    """Stop the fit when the monitored value has not improved for `patience` epochs.

    The other arguments are as in `TrackerCallback`. The epoch ends as usual, with its checkpoints.

    `patience` as a number is fastai's: 2 stops at the second epoch in a row without improvement;
    epochs without a value do not count. As a string or `Time` it is Composer's: '2ep' stops when more
    than 2 epochs have passed, at the third, or at the next epoch with a value.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(lr=0., cbs=EarlyStoppingCallback(patience=2))
    >>> with learn.no_bar(): learn.fit(10)
    >>> len(learn.history)
    3
    """

    order = TrackerCallback.order + 3

    @override
    def lose_patience(self) -> None:
        "Stop the fit."
        epoch = self.learn.epoch - (self.learn.time.ep - self._since.ep)
        since = f'since epoch {epoch}' if epoch >= 0 else 'in any epoch'
        print_line(self, f'No improvement {since}: early stopping')
        self.learn.stop()


class ReduceLROnPlateau(_Patient):
    """Divide the learning rates by `factor` when the monitored value has not improved for `patience` epochs.

    The other arguments are as in `TrackerCallback`, and `patience` as in `EarlyStoppingCallback`. A
    schedule that sets the rate at every batch overrides this callback, with a warning.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(lr=0., cbs=ReduceLROnPlateau(patience=2, factor=2., min_lr=1e-4))
    >>> with learn.no_bar(): learn.fit(2, lr=0.)
    >>> learn.opt.hypers[-1]['lr']
    0.0
    """

    order = TrackerCallback.order + 2
    sets_lr = True
    factor: float
    min_lr: float

    def __init__(
        self,
        monitor: Monitor = 'valid_loss',
        comp: Comparison | None = None,
        min_delta: float = 0.0,  # least change that counts as an improvement
        patience: int | str | Time = 1,  # epochs without improvement, or a time: '10m', '500ba'
        factor: float = 10.0,  # divisor of the rates
        min_lr: float = 0.0,  # lower bound of the rates
        reset_on_fit: bool = True,  # whether each fit resets `best`
    ) -> None:
        super().__init__(monitor, comp, min_delta, patience, reset_on_fit)
        if not isinstance(factor, Real) or not factor > 1:
            raise OptionError(f'factor={factor!r} divides the rate: give a number above 1.')
        self.factor = factor
        self.min_lr = min_lr

    @override
    def lose_patience(self) -> None:
        "Lower the rates, and restart the wait."
        opt = self.learn.opt
        before = opt.lrs
        opt.set_hypers(lr=[min(lr, max(lr / self.factor, self.min_lr)) for lr in before])
        self._restart_wait()
        lr = opt.lrs[-1]
        if lr < before[-1]:
            print_line(self, f'Epoch {self.learn.epoch}: reducing lr to {lr:.3g}')


class SaveModelCallback(TrackerCallback):
    """Save the weights whenever the monitored value improves, and load the best at the end of the fit.

    The best weights are the evaluated ones: the average if `EMA` is used, whose average restarts
    when they are loaded. A column that is evaluated within an epoch is also compared there, before
    the weights change. They are loaded however the fit ends: by its last epoch, a stop, an
    exception, Ctrl-C. Only a file written by this callback is loaded: if no epoch improved the
    value (all were NaN), the weights stay as they are, with a warning. `every_epoch` writes a file
    for each epoch (or each n-th), `fname_0`, `fname_1`, ..., and nothing is compared or loaded.
    `at_end` overwrites the best file with the last weights after a fit without error.

    Raises `OptionError` for options that contradict each other and, before training, for a folder
    that cannot be written. Checkpointed: also the file with the best weights, so that a run can
    resume on another machine.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=SaveModelCallback(fname='line', every_epoch=True))
    ...     with learn.no_bar(): learn.fit(2)
    ...     sorted(p.name for p in Path(folder, 'models').iterdir())
    ['line_0.pth', 'line_1.pth']
    """

    order = TrackerCallback.order + 1
    writes_files = True

    def __init__(
        self,
        monitor: Monitor = 'valid_loss',
        comp: Comparison | None = None,
        min_delta: float = 0.0,  # least change that counts as an improvement
        fname: str | Path = 'model',  # name of the file, as in `learn.save`
        every_epoch: bool | int = False,  # True or n: save each or each n-th epoch, not the best
        at_end: bool = False,  # whether to keep the last weights instead of loading the best
        with_opt: bool = False,  # whether to save and load the optimizer's state too
        reset_on_fit: bool = True,  # whether each fit resets `best`
    ) -> None:
        super().__init__(monitor, comp, min_delta, reset_on_fit)
        if every_epoch and at_end:
            raise OptionError('every_epoch and at_end contradict each other: choose one.')
        self.fname = fname
        self.every_epoch = every_epoch
        self.at_end = at_end
        self.with_opt = with_opt
        self.last_saved_path: Path | None = None
        self._has_best = False  # whether the file has the best weights, written by this callback
        self._is_in_fit = False  # whether the best or the last weights are still to be kept
        self._has_compared = False  # whether the fit has had a value to compare
        self._is_row_compared = False  # whether the value of the row was compared within the epoch
        self._stored: Path | None = None  # file of the best weights in the last checkpoint

    @override
    def before_fit(self) -> None:
        "Check that the files can be written."
        if not self.every_epoch:
            super().before_fit()
        check_weights_path(self.learn, self.fname)
        self._check_own_file()
        if self.reset_on_fit:
            self._has_best = False
        self._is_in_fit = True
        self._has_compared = False
        self._is_row_compared = False

    def _check_own_file(self) -> None:
        "Raise `OptionError` if another callback writes the same file."
        own = self.fname, bool(self.every_epoch)
        for cb in self.learn.cbs:
            if cb is self or not isinstance(cb, SaveModelCallback):
                continue
            if (cb.fname, bool(cb.every_epoch)) == own:
                raise OptionError(f'{self} and {cb} write the same file: give one another `fname`.')

    def after_eval(self) -> None:
        "Compare a value that is evaluated within an epoch, before later batches change the weights."
        if self.every_epoch or callable(self.monitor):
            return
        value = self._as_number(records(self).measured.get(self.monitor))
        if value is None:
            return
        self._is_row_compared = is_open(self.learn, 'train')
        if self._is_row_compared:
            self._compare(value)
            self.after_comparison()

    @override
    def after_epoch(self) -> None:
        "Save this epoch's weights if they are due or the best."
        if not self.every_epoch and self._is_row_compared:
            self._is_row_compared = False  # the weights are not the evaluated ones
            return None
        if not self.every_epoch:
            return super().after_epoch()
        if epoch_row(self) is not None and self.learn.epoch % self.every_epoch == 0:
            self._save(f'{self.fname}_{self.learn.epoch}')

    @override
    def after_comparison(self) -> None:
        "Save the weights if they are the best."
        self._is_in_fit = self._has_compared = True  # also if it was added during the fit
        if not self.new_best:
            return
        found = f'Better model found at epoch {self.learn.epoch}'
        print_line(self, f'{found} with {self._get_label()} value: {self.best:.6g}.')
        with ExitStack() as stack:
            for cb in self.learn.cbs:
                if isinstance(cb, EMA) and cb.has_begun:
                    stack.enter_context(cb.applied())
            self._save(self.fname)
        self._has_best = True
        self._stored = None

    def after_fit(self) -> None:
        "Load the best weights, or save the last ones with `at_end`."
        if self.at_end:
            self._is_in_fit = False
            self._has_best = False
            self._save(self.fname)
        else:
            self._load_best()

    def cleanup(self) -> None:
        "Load the best weights also after a failed fit."
        if self._is_in_fit:
            self._load_best()

    def _save(self, name: str | Path) -> None:
        self.last_saved_path = self.learn.save(name, with_opt=self.with_opt)

    def _load_best(self) -> None:
        self._is_in_fit = False
        if self.every_epoch or self.at_end:
            return
        if self._has_best:
            self.learn.load(self.fname, with_opt=self.with_opt)
        elif self._has_compared:
            warn_user(
                f'No epoch had a {self._get_label()} that could be the best, so no weights were saved or loaded.'
            )

    def _get_label(self) -> str:
        return self.monitor if isinstance(self.monitor, str) else 'monitored'

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the best value, and whether the file has the best weights."
        sd = super().state_dict()
        return {
            **sd,
            'has_best': self._has_best,
            'compared': self._has_compared,
            'row_compared': self._is_row_compared,
        }

    @override
    def save_to_checkpoint(self, folder: Path) -> None:
        "Keep the best weights in the checkpoint; checkpoints with the same ones share one file."
        path = find_weights_path(self.learn, self.fname)
        if not (self._has_best and path.exists()):
            return
        target = folder / path.name
        if self._stored is not None and self._stored.exists():
            link_or_copy(self._stored, target)
        else:
            shutil.copyfile(path, target)  # no link: other programs may change the user's file
        self._stored = target

    @override
    def resume_from_checkpoint(self, folder: Path, model: Any) -> None:
        "Restore the file of the best weights, which may be missing, or of a later epoch."
        path = find_weights_path(self.learn, self.fname)
        stored = folder / path.name
        if not (self._has_best and stored.exists()):
            return
        self._stored = stored
        if self.learn.world.is_first and not (path.exists() and cmp(stored, path, shallow=False)):
            with atomic_write(path) as tmp:
                shutil.copyfile(stored, tmp)

    def state_without_files(self) -> dict[str, Any]:
        "Return the state for a branch of a run; the file of the best weights belongs to the run."
        flags = ('new_best', 'has_best', 'compared', 'row_compared')
        return {'best': self._worst, **dict.fromkeys(flags, False)}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the best value and its file."
        super().load_state_dict(sd)
        self._has_best = sd['has_best']
        self._has_compared = sd['compared']
        self._is_row_compared = sd['row_compared']
