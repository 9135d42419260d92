"""Callbacks that watch a value: stop when it stops improving, keep the best weights, lower the rate."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import ExitStack
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from learnkit.callbacks.ema import EMA
from learnkit.callbacks.monitored import as_number, epoch_row, find_column, records
from learnkit.callbacks.nan_guard import TerminateOnNaNCallback, say
from learnkit.checkpoint.saving import check_weights_path, find_weights_path, resolve_path
from learnkit.core.errors import MetricError, OptionError, TimeError
from learnkit.core.time import Time, Timestamp, as_time
from learnkit.core.validation import warn_user
from learnkit.engine.callback import Callback
from learnkit.engine.checks import check_takes
from learnkit.engine.moving import found_path, kept_path
from learnkit.metrics.direction import MetricProperties, as_comparison

__all__ = [
    'TerminateOnNaNCallback',
    'TrackerCallback',
    'EarlyStoppingCallback',
    'SaveModelCallback',
    'ReduceLROnPlateau',
]

Monitor = str | Callable[[Any], Any]
Compare = Callable[[Any, Any], Any]
Comparison = Compare | MetricProperties | str  # how `comp` may be given

_PATHS = ('last_saved_path', 'best_path')  # in the state of `SaveModelCallback`
# measures of an error
_ERROR_NAMES = re.compile(r'(^|_)(r?mse|mae|msle|mape|exp_rmspe|perplexity|wer|cer)$')


class TrackerCallback(Callback):
    """Compare a value at the end of each epoch with the best so far.

    `best` is that value, `new_best` tells whether this epoch brought it. The values are the Recorder's columns
    (`learn.recorder.metric_names`): losses, metrics, `name/loss` of several validation loaders. For anything else, what
    `learn.log` averages for one, `monitor` is a function: `lambda learn: learn.history[-1]['valid_part']`. A value that
    is NaN, or that was not measured, is no improvement and changes nothing. Without `comp`, a value is better if it is
    lower (`np.less`) for a loss or an error, and higher (`np.greater`) for any other column.

    Raises `MetricError` before anything is trained when there is no such column, and for a value that is no number;
    `OptionError` for a `min_delta` below 0. Checkpointed: `best` and `new_best`.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(lr=0.05, cbs=TrackerCallback())
    >>> with learn.no_bar(): learn.fit(3)
    >>> learn.tracker.best == min(row['valid_loss'] for row in learn.history)
    True
    """

    order, remove_on_fetch, remove_on_find = 60, True, True
    monitor: Monitor
    reset_on_fit: bool
    min_delta: float
    best: float | None
    new_best: bool
    _lower: bool
    _has_begun: bool = False  # `before_fit` has been

    def __init__(
        self,
        monitor: Monitor = 'valid_loss',  # a column, or a function of the learner
        comp: Comparison | None = None,  # f(new, best), or `MetricProperties`; None: by the column
        min_delta: float = 0.0,  # a smaller change is no improvement
        reset_on_fit: bool = True,  # each fit forgets `best`; False: `best` is over all fits
    ) -> None:
        if not isinstance(min_delta, Real) or not 0 <= min_delta < math.inf:
            raise OptionError(
                f'min_delta={min_delta!r}: give a number, 0 or more. What counts as better says `comp`.'
            )
        if not callable(monitor) and not (isinstance(monitor, str) and monitor):
            raise OptionError(
                f'{type(self).__name__}(monitor={monitor!r}) has nothing to watch: give a column of the '
                'history, such as `valid_loss`, or a function of the learner.'
            )
        name = monitor if isinstance(monitor, str) else getattr(monitor, '__name__', '')
        self.comp: Compare = _comparison(name) if comp is None else as_comparison(comp, name)
        self._lower = bool(self.comp(0.0, 1.0))
        if callable(monitor):
            check_takes('monitor', monitor, 'learn')
        self.monitor, self.reset_on_fit = monitor, reset_on_fit
        self.min_delta = -min_delta if self._lower else min_delta
        self.best, self.new_best = None, False
        self.idx: int | None = None  # of the column in `recorder.values[-1]`

    def before_fit(self) -> None:
        "Find the column, and start comparing."
        if not self.learn.fitting:
            return
        self._records()
        self.idx, self._has_begun = (
            None if callable(self.monitor) else self._find(self.monitor),
            True,
        )
        if self.reset_on_fit or self.best is None:
            self.best = math.inf if self._lower else -math.inf
        self.new_best = False

    def after_epoch(self) -> None:
        "Compare this epoch's value with the best."
        if not self.learn.fitting:
            return
        if not self._has_begun:
            self.before_fit()  # it came in the middle of the fit
        self.new_best = False
        if (row := self._row()) is None:
            return
        value = self._number(
            self.monitor(self.learn) if callable(self.monitor) else self._measured(row)
        )
        self.new_best = value is not None and self._is_better(value)
        if self.new_best:
            self.best = value
        self.after_comparison()

    def _is_better(self, value: float) -> bool:
        "Compare with the best; a difference that single precision cannot show is none."
        assert self.best is not None  # before_fit has seen to it
        if math.isclose(value, self.best, rel_tol=1e-7):
            value = self.best
        return bool(self.comp(value - self.min_delta, self.best))

    def after_comparison(self) -> None:
        "Act on `new_best`; for subclasses."

    def cleanup(self) -> None:
        self._has_begun = False

    def _records(self) -> Any:
        return records(self)

    def _row(self) -> dict[str, Any] | None:
        return epoch_row(self)

    def _find(self, monitor: str) -> int | None:
        "Find the column; where a fit is resumed, also in the history that is still to be put in place."
        try:
            return find_column(self, monitor)
        except MetricError:
            if not self.learn.resumed or not any(
                monitor in row for row in history_to_come(self.learn)
            ):
                raise
            return None

    def _number(self, value: Any) -> float | None:
        "Return a value as a number; where a function gives each process another one, the first one's counts."
        number = as_number(self, self.monitor, value)
        return self.learn.world.broadcast(number) if callable(self.monitor) else number

    def _measured(self, row: dict[str, Any]) -> Any:
        "Return the monitored value. Callbacks before this one may have changed `recorder.values`."
        values = self._records().values[-1]
        if self.idx is not None:  # a metric that returns a dict may have given more columns since
            self.idx = self._find(str(self.monitor))
        # an epoch cut short lacks some
        complete = len(values) == len(row) - len(('fit', 'epoch', 'time'))
        return values[self.idx] if complete and self.idx is not None else row.get(str(self.monitor))

    def __repr__(self) -> str:
        return super().__repr__().replace('min_delta=-', 'min_delta=')  # the sign is inner

    def state_dict(self) -> dict[str, Any]:
        "Return the best value."
        return {'best': self.best, 'new_best': self.new_best}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Go on from the best value."
        self.best, self.new_best = sd['best'], sd['new_best']


def _comparison(name: str) -> Compare:
    "Return which way is better, by the rule of fastai; its trap is told."
    if 'loss' in name or 'error' in name:
        return np.less
    if _ERROR_NAMES.search(name.rpartition('/')[2]):
        warn_user(
            f'monitor={name!r}: higher counts as better for every name without "loss" or "error" in it. Pass '
            '`comp=np.less`, or `comp=np.greater` if that is meant.'
        )
    return np.greater


def history_to_come(learn: Any) -> list[dict[str, Any]]:
    "Return the history of the checkpoint that a fit goes on from, until it is in place."
    states = learn.run.resume.state['callbacks'] if learn.run.resume is not None else {}
    return next((sd['history'] for sd in states.values() if 'history' in sd), [])


def check_counted(
    learn: Any,  # the Learner, in a fit
    time: Time,  # what is waited for
    option: str,  # what it was given as
) -> None:
    "Raise `TimeError` for a unit that this fit does not count: waiting would have no end."
    if time.unit == 'sp':
        learn.run.counts_samples = f'{option}={str(time)!r}'  # the first batch will tell
    if time.unit == 'tok' and getattr(learn, 'token_func', None) is None:
        raise TimeError(
            f'{option}={str(time)!r}: this Learner counts no tokens. Use another unit, or tell it how: '
            '`Learner(..., token_func=lambda xb, yb: ...)`.'
        )
    if time.unit == 'iter' and learn.epochs_per_iteration is None:
        raise TimeError(
            f'{option}={str(time)!r}: this fit has no iterations. Use another unit, or group its epochs: '
            '`fit(..., iteration=2)`.'
        )


class _Patient(TrackerCallback):
    "Waits for an improvement for so long, then loses patience. Checkpointed: also how long it has waited."

    def __init__(
        self,
        monitor: Monitor = 'valid_loss',
        comp: Comparison | None = None,
        min_delta: float = 0.0,  # as for the tracker
        patience: int | str | Time = 1,  # epochs without improvement, or a time: '10m', '500ba'
        reset_on_fit: bool = True,
    ) -> None:
        super().__init__(monitor, comp, min_delta, reset_on_fit)
        try:
            as_time(patience, 'ep')
        except TimeError as e:
            raise TimeError(f'patience={patience!r}: {e}') from None
        self.patience, self.wait = patience, 0  # epochs waited
        self._since = Timestamp()  # when the waiting began

    def before_fit(self) -> None:
        "Start waiting."
        super().before_fit()
        if not self.learn.fitting:
            return
        check_counted(self.learn, as_time(self.patience, 'ep'), 'patience')
        self._wait_anew()

    def after_comparison(self) -> None:
        "Count the epoch, unless it brought an improvement."
        if self.new_best:
            return self._wait_anew()
        self.wait += 1
        limit = as_time(self.patience, 'ep')
        if (
            (self.wait >= limit.value)
            if limit.unit == 'ep'
            else (self.learn.time - self._since >= limit)
        ):
            self.lose_patience()

    def lose_patience(self) -> None:
        "Do what is due; for subclasses."

    def _wait_anew(self) -> None:
        self.wait, self._since = 0, self.learn.time

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), 'wait': self.wait, 'since': self._since.state_dict()}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        super().load_state_dict(sd)
        self.wait, self._since = sd['wait'], Timestamp.from_state_dict(sd['since'])


class EarlyStoppingCallback(_Patient):
    """Stop the fit when the monitored value has not improved for `patience` epochs.

    The other arguments are those of `TrackerCallback`. The epoch ends as usual, with its checkpoints.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(lr=0., cbs=EarlyStoppingCallback(patience=2))
    >>> with learn.no_bar(): learn.fit(10)
    >>> len(learn.history)
    3
    """

    order = TrackerCallback.order + 3

    def lose_patience(self) -> None:
        "Stop."
        say(self, f'No improvement since epoch {self.learn.epoch - self.wait}: early stopping')
        self.learn.stop()


class ReduceLROnPlateau(_Patient):
    """Divide the learning rates by `factor` when the monitored value has not improved for `patience` epochs.

    The other arguments are those of `TrackerCallback`. A schedule that sets the rate at every batch goes over it,
    with a warning.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(lr=0., cbs=ReduceLROnPlateau(patience=2, factor=2., min_lr=1e-4))
    >>> with learn.no_bar(): learn.fit(2, lr=0.)
    >>> learn.opt.hypers[-1]['lr']
    0.0
    """

    order, sets_lr = TrackerCallback.order + 2, True
    factor: float
    min_lr: float

    def __init__(
        self,
        monitor: Monitor = 'valid_loss',
        comp: Comparison | None = None,
        min_delta: float = 0.0,  # as for the tracker
        patience: int | str | Time = 1,  # epochs without improvement, or a time: '10m', '500ba'
        factor: float = 10.0,  # rates are divided by it
        min_lr: float = 0.0,  # no rate is brought below this
        reset_on_fit: bool = True,
    ) -> None:
        super().__init__(monitor, comp, min_delta, patience, reset_on_fit)
        if not isinstance(factor, Real) or not factor > 1:
            raise OptionError(
                f'factor={factor!r} divides the rate: give a number above 1, such as 10.'
            )
        if not isinstance(min_lr, Real) or not min_lr >= 0:
            raise OptionError(f'min_lr={min_lr!r}: give 0 or more.')
        self.factor, self.min_lr = factor, min_lr

    def lose_patience(self) -> None:
        "Lower the rates, and wait again."
        before = self._rates()
        for h, lr in zip(self.learn.opt.hypers, before, strict=True):
            h['lr'] = min(lr, max(lr / self.factor, self.min_lr))
        self._wait_anew()
        if (now := self._rates())[-1] < before[-1]:
            say(self, f'Epoch {self.learn.epoch}: reducing lr to {now[-1]:.3g}')

    def _rates(self) -> list[float]:
        return [float(h['lr']) for h in self.learn.opt.hypers]


class SaveModelCallback(TrackerCallback):
    """Save the weights whenever the monitored value improves, and load the best at the end of the fit.

    The best are those that were evaluated: the averaged ones where `EMA` averages, which begins anew when they are
    loaded. That happens whatever ended the fit: its last epoch, a stop, an exception, Ctrl-C. Only a file that
    this callback has written counts: where no epoch improved the value (all were NaN), the weights stay as they are and
    a warning says so. With `every_epoch` each epoch (or each so many) has a file, `fname_0`, `fname_1`, ..., and
    nothing is compared or loaded; with `at_end` the last weights replace the best's file when the fit has ended well.

    Raises `OptionError` for options that contradict each other and, before training, for a folder that cannot be
    written. Checkpointed: also the paths of the best and the last file; those below `learn.path` are found again where
    that folder has been moved.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=SaveModelCallback(fname='line', every_epoch=True))
    ...     with learn.no_bar(): learn.fit(2)
    ...     sorted(p.name for p in Path(folder, 'models').iterdir())
    ['line_0.pth', 'line_1.pth']
    """

    order = TrackerCallback.order + 1

    def __init__(
        self,
        monitor: Monitor = 'valid_loss',
        comp: Comparison | None = None,
        min_delta: float = 0.0,  # as for the tracker
        fname: str | Path = 'model',  # as for `learn.save`
        every_epoch: bool | int = False,  # save every epoch, or every so many, instead of the best
        at_end: bool = False,  # keep the last weights instead of loading the best
        with_opt: bool = False,  # save (and load) the optimizer's state too
        reset_on_fit: bool = True,
    ) -> None:
        super().__init__(monitor, comp, min_delta, reset_on_fit)
        if every_epoch and at_end:
            raise OptionError('every_epoch and at_end contradict each other: choose one.')
        if not isinstance(every_epoch, int) or every_epoch < 0:
            raise OptionError(
                f'every_epoch={every_epoch!r}: give True, False, or a number of epochs.'
            )
        resolve_path(fname, Path())
        self.fname, self.every_epoch, self.at_end, self.with_opt = (
            fname,
            every_epoch,
            at_end,
            with_opt,
        )
        self.last_saved_path: Path | None = None
        self._best_path: Path | None = None  # of the best so far, written by this callback
        self._watching = self._compared = False  # a fit is running; it has had a value to compare

    def before_fit(self) -> None:
        "See that files can be written."
        if not self.learn.fitting:
            return
        if not self.every_epoch:
            super().before_fit()
        check_weights_path(self.learn, self.fname)
        self._check_own_file()
        if self.reset_on_fit:
            self._best_path = None
        self._watching, self._compared, self._has_begun = True, False, True

    def _check_own_file(self) -> None:
        "Raise `OptionError` if another one writes the same file: each would load the other's best."
        mine = find_weights_path(self.learn, self.fname), bool(self.every_epoch)
        for cb in self.learn.cbs:
            if cb is self or not isinstance(cb, SaveModelCallback):
                continue
            if (find_weights_path(self.learn, cb.fname), bool(cb.every_epoch)) == mine:
                raise OptionError(
                    f'{self} and {cb} would both write {mine[0]}, each over what the other has saved: '
                    'give one of them another `fname`.'
                )

    def after_epoch(self) -> None:
        "Save this epoch's weights, if it is its turn or if they are the best."
        if not self.every_epoch:
            return super().after_epoch()
        if self.learn.fitting and not self._has_begun:
            self.before_fit()
        due = (
            self.learn.fitting
            and self._row() is not None
            and self.learn.epoch % self.every_epoch == 0
        )
        if due:
            self._save(f'{self.fname}_{self.learn.epoch}')

    def after_comparison(self) -> None:
        "Save the best."
        self._compared = True
        if not self.new_best:
            return
        say(
            self,
            f'Better model found at epoch {self.learn.epoch} with {self._label()} value: {self.best:.6g}.',
        )
        with ExitStack() as stack:
            for cb in self.learn.cbs:
                if isinstance(cb, EMA) and cb.has_begun:
                    stack.enter_context(cb.applied())
            self._best_path = self._save(self.fname)

    def after_fit(self) -> None:
        "Load the best weights, or save the last."
        if not self.learn.fitting or not self._watching:
            return
        if self.at_end:
            self._watching, self._best_path = False, None
            self._save(self.fname)
        else:
            self._load_best()

    def cleanup(self) -> None:
        "Load the best weights after a fit that failed, too."
        super().cleanup()
        if self._watching:
            self._load_best()

    def _save(self, name: str | Path) -> Path:
        self.last_saved_path = path = self.learn.save(name, with_opt=self.with_opt)
        return path

    def _load_best(self) -> None:
        self._watching = False
        if self.every_epoch or self.at_end:
            return
        if self._best_path is not None:
            self.learn.load(self._best_path, with_opt=self.with_opt)
        elif self._compared:
            warn_user(
                f'No epoch had a {self._label()} that could be the best, so no weights were saved or loaded.'
            )

    def _label(self) -> str:
        return self.monitor if isinstance(self.monitor, str) else 'monitored'

    def state_dict(self) -> dict[str, Any]:
        "Return the best value, and what was saved."
        paths = (kept_path(self.learn, p) for p in (self.last_saved_path, self._best_path))
        return {
            **super().state_dict(),
            **dict(zip(_PATHS, paths, strict=True)),
            'compared': self._compared,
        }

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Go on from the best value and its file."
        super().load_state_dict(sd)
        own = None if self.learn is None else find_weights_path(self.learn, self.fname).parent
        self.last_saved_path, self._best_path = (found_path(self.learn, sd[k], own) for k in _PATHS)
        self._compared = sd['compared']
