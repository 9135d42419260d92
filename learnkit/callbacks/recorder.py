# SPDX-License-Identifier: Apache-2.0
"""Recorder: record of a training, with losses by step and losses and metrics by epoch."""

from __future__ import annotations

from difflib import get_close_matches
from math import isnan
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from fastcore.foundation import L
from typing_extensions import override

from learnkit.callbacks.columns import Columns
from learnkit.callbacks.epoch_metrics import (
    EpochMetrics,
    EvalLoss,
    KeptMicrobatch,
    clone_metric,
    load_metrics,
    metric_states,
    read_metrics,
    value_of,
)
from learnkit.callbacks.history import History, Values
from learnkit.callbacks.plots import Plots
from learnkit.callbacks.step_log import StepLog
from learnkit.core.errors import BatchError, MetricError, OptionError, did_you_mean
from learnkit.core.plain import to_storable
from learnkit.core.time import format_seconds
from learnkit.core.validation import warn_of_nan
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.engine.advice import check_metrics, contains_activation, warn_of_activation
from learnkit.engine.callback import Callback
from learnkit.engine.dispatch import contains_object
from learnkit.engine.run import is_open
from learnkit.engine.traits import trait_of
from learnkit.metrics.averages import RESERVED, check_column, measures_batches
from learnkit.metrics.base import AvgSmoothLoss, Mean, Metric, merge_losses
from learnkit.metrics.merge import check_mergeable, gather_on_host

if TYPE_CHECKING:
    from learnkit.learner import Learner

__all__ = [
    'Recorder',
    'History',
    'epoch_row',
    'check_monitor',
    'read_monitor',
    'recorder_of',
    'records',
]


class Recorder(Plots, Callback):  # type: ignore[misc]  # its own `loss` hides the Learner's
    """Record losses, metrics and hyperparameters, and pass one row an epoch to `learn.logger`.

    `learn.history` holds one row per epoch of all fits, and `evaluations` one row per evaluation,
    including evaluations within an epoch. An epoch gets its row in `after_epoch`, also a cancelled one,
    if it has trained, evaluated or logged anything. `learn.recorder` holds the steps of the last fit:
    `losses`, `lrs`, `hps`, and the plots `plot_loss()` and `plot_sched()`. `train_loss` of a row is
    the mean over the samples that the epoch trained on, as `valid_loss` is over the validation set;
    the progress bar, the plots and `losses` show the smoothed loss. No value is copied from the
    device at every step: losses are copied in groups (see `AvgSmoothLoss`), and metrics are read
    once, at the end of their loader.

    Checkpointed: everything recorded, and the measurements of the epoch in progress: values and
    means so far, training metrics (see `Metric`), elapsed seconds.

    >>> from learnkit.testing import synth_learner
    >>> with synth_learner(n_train=10, lr=0.1).no_bar() as learn: learn.fit(2)
    >>> learn.recorder, len(learn.recorder.losses), learn.recorder.lrs[0]
    (Recorder, 20, 0.1)
    >>> [sorted(row) for row in learn.history][0]
    ['epoch', 'fit', 'time', 'train_loss', 'valid_loss']
    """

    remove_on_fetch = True
    order = 50
    nondeterministic_state = ('seconds',)
    needs_events = False
    history: History

    def __init__(
        self,
        add_time: bool = True,  # whether rows end with the duration of the epoch
        train_metrics: bool = False,  # whether metrics are computed on the training batches
        valid_metrics: bool = True,  # whether loss and metrics are computed on validation loaders
        beta: float = 0.98,  # smoothing factor of the training loss
        train_loss: str = 'mean',  # loss of an epoch: the 'mean', or fastai's last 'smooth' loss
    ) -> None:
        if train_loss not in ('mean', 'smooth'):
            raise OptionError(f'Recorder: train_loss={train_loss!r}: pass `mean` or `smooth`.')
        self.train_loss = train_loss
        self.add_time = add_time
        self.train_metrics = train_metrics
        self.valid_metrics = valid_metrics
        self.loss = EvalLoss()
        self.smooth_loss = AvgSmoothLoss(beta=beta)
        self.history = History()
        self.n_fits = 0
        # one dict per evaluation, over all fits, including evaluations within an epoch
        self.evaluations: list[dict[str, Any]] = []
        self.values = L()
        self.iters = L()
        self.log = L()  # row of the epoch so far
        self.columns = Columns(self)
        self.logged_names: dict[str, bool] = {}  # with True for those that are printed
        # validation loaders whose evaluation in this fit had no loss, so that the column is left out
        self.loaders_without_loss: set[str] = set()
        self.steps = StepLog(self.smooth_loss)
        self._train: list[Metric] = []
        # metrics of training batches that a callback reads, and that have no column
        self._uncolumned: list[Metric] = []
        self._microbatches: list[KeptMicrobatch] = []  # microbatches of the current batch
        # measurements by depth of the run: 1 is the outermost
        self._metrics_by_depth = {1: EpochMetrics()}
        # measurements of the fit, or of a run outside of it, which checkpoints have
        self._of_fit = self._metrics_by_depth[1]

    # -- what is measured --------------------------------------------------------------------------

    def before_fit(self) -> None:
        learn = self.learn
        depth = max(learn.run.depth, 1)
        latest = self._metrics_by_depth[1].measured
        current = self._metrics_by_depth[depth] = EpochMetrics(own=depth > 1)
        if depth == 1 and learn.phase == 'predict':
            current.measured = latest  # a prediction measures nothing
        if depth == 1 or learn.fitting:
            self._of_fit = current
        if learn.world.size > 1:
            self._check_mergeable()
        if not learn.fitting:
            return
        self._begin_fit()
        callbacks = learn.parts.callbacks
        if learn.metrics or contains_activation(learn.loss_func):
            callbacks.check_once(self, 'before_backward', self._try_metrics)
        if self._train_metrics and learn.microbatch:
            callbacks.add_run_handler(self, 'after_loss', self._measure_microbatch)

    def _begin_fit(self) -> None:
        "Count a fit, and begin the record of its steps."
        self.n_fits += 1
        self.logged_names = {}
        self.loaders_without_loss = set()
        metrics = self.columns.select_metrics('train') if self.learn.metrics else []
        self._train = [clone_metric(m, self.learn) for m in metrics]
        others = self._select_uncolumned(metrics) if self.learn.metrics else []
        self._uncolumned = [clone_metric(m, self.learn) for m in others]
        self.values = L()
        self.iters = L()
        self.smooth_loss.reset()
        self.steps = StepLog(self.smooth_loss)

    def _select_uncolumned(self, metrics: list[Metric]) -> list[Metric]:
        "Return the metrics without a column in training that a callback reads of training batches."
        if not any(trait_of(cb, 'reads_train_metrics') for cb in self.learn.cbs):
            return []
        others = [m for m in self.learn.metrics if m.on is None and measures_batches(m)]
        return [m for m in others if not contains_object(metrics, m)]

    @property
    def _train_metrics(self) -> list[Metric]:
        "Metrics of training batches, with a column and without."
        return [*self._train, *self._uncolumned]

    def read_running(self) -> dict[str, Any]:
        "Return the metrics of the current pass over this rank's batches so far, by name; a copy from the device."
        learn = self.learn
        metrics = self._train_metrics if learn.training else self._valid_mets
        running: dict[str, Any] = {}
        for m in metrics:
            if measures_batches(m) and not isinstance(m, EvalLoss):
                running.update(self.columns.of_keys.values(m.name, value_of(m, 1)))
        return running

    def read_uncolumned(self) -> dict[str, Any]:
        "Return the metrics of the training batches of the last epoch that have no column, by name."
        return dict(self._of_fit.uncolumned)

    @property
    def epoch_metrics(self) -> EpochMetrics:
        "Measurements of the current epoch, or of the current evaluation inside another run."
        return self._metrics_by_depth.get(self.learn.run.depth, self._metrics_by_depth[1])

    def _try_metrics(self) -> None:
        "Compute the metrics on the first training batch, before any weight changes."
        learn = self.learn
        warn_of_activation(learn)
        values = check_metrics(learn, self._train, self.columns.select_metrics('valid'))
        self.columns.add_keys(values)

    def _measure_microbatch(self) -> None:
        "Compute the training metrics of a microbatch, or keep its predictions if its batch may be repeated."
        learn = self.learn
        if learn.run.repeating or not self._has_local_samples():
            return
        if learn.microbatch != 'auto':
            return self._accumulate(learn)
        if not learn.parts.microbatches.index:
            self._microbatches = []
        self._microbatches.append(KeptMicrobatch(learn))

    def _accumulate(self, batch: Any) -> None:
        for m in self._train_metrics:
            m.accumulate(batch)

    def before_epoch(self) -> None:
        current = self.epoch_metrics
        current.values = {}
        current.started = perf_counter()
        current.n_valid = 0
        if self.learn.fitting:
            self._of_fit.n_before = self.smooth_loss.count
        self.log = L([self.learn.epoch])

    def before_train(self) -> None:
        self._of_fit.is_training = True
        self._of_fit.uncolumned = {}
        for m in self._train_metrics:
            m.reset()

    def before_eval(self) -> None:
        self.epoch_metrics.measured = {}

    def before_validate(self) -> None:
        if self.learn.phase == 'predict':
            return
        for m in self._valid_mets:
            m.reset()

    def after_batch(self) -> None:
        learn = self.learn
        if 'loss_grad' not in learn.__dict__:
            return self._measure_without_loss()
        if learn.training:
            self.steps.record(learn, self._loss_weight())
            if not learn.microbatch and (self._train or self._uncolumned):
                if self._has_local_samples():
                    self._accumulate(learn)
            while self._microbatches:
                self._accumulate(self._microbatches.pop(0))
        elif learn.phase != 'predict':
            self._measure(self._valid_mets)

    def _has_local_samples(self) -> bool:
        "Return False for a batch that only fills up the round of the other ranks."
        return bool(self.learn.parts.processes.batch.has_local_samples(self.learn))

    def _loss_weight(self) -> Any:
        "Return the weight of the current batch's loss in the mean over the epoch or over ranks."
        learn = self.learn
        if learn.world.size > 1 and not self._has_local_samples():
            return 0
        if self.train_loss == 'smooth' and learn.world.size == 1:
            return 1
        try:
            return learn.parts.loss_weights.weigh_batch(learn, learn.xb, learn.yb)
        except BatchError:
            return 1  # the number of samples is unknown

    def _measure(self, metrics: list[Metric]) -> None:
        self.epoch_metrics.n_valid += 1
        for m in metrics:
            m.accumulate(self.learn)

    def _measure_without_loss(self) -> None:
        "Compute metrics if an evaluation has no loss; skip a batch cancelled before its loss."
        learn = self.learn
        if learn.training:
            self.steps.skipped.append(learn.train_iter - 1)  # the batch has already been counted
        has_pred = learn.phase == 'valid' and 'pred' in learn.__dict__
        has_no_loss = learn.loss_func is None or learn.loss is None
        if has_pred and has_no_loss and learn.yb:
            self._measure([m for m in self._valid_mets if not isinstance(m, EvalLoss)])

    def after_train(self) -> None:
        learn = self.learn
        values = self._of_fit.values
        n = self.smooth_loss.count - self._of_fit.n_before
        metrics = self._train_metrics
        measured, states = read_metrics(metrics, n, learn, self._local_losses())
        if states:
            self._merge_losses(states)
        values['train_loss'] = self._train_loss() if self._has_steps() else None
        if self._has_steps() and isnan(values['train_loss']):
            warn_of_nan(learn, self.smooth_loss.smooth, self._of_fit.n_before)
        for m, value in zip(self._train, measured, strict=False):
            values.update(self.columns.name_training_values(m, value))
        for m, value in zip(self._uncolumned, measured[len(self._train) :], strict=True):
            self.columns.add_keys({m.name: value})
            self._of_fit.uncolumned.update(self.columns.of_keys.values(m.name, value))
        self.log = L([learn.epoch, *values.values()])

    def _has_steps(self) -> bool:
        "Return True if this epoch has trained on a batch."
        return self.smooth_loss.count > self._of_fit.n_before

    def _train_loss(self) -> float:
        "Return the training loss of the epoch that ends."
        if self.train_loss == 'smooth':
            return self.smooth_loss.smooth[-1]
        return self.smooth_loss.mean_since(self._of_fit.n_before, self._reduction())

    def after_validate(self) -> None:
        if self.learn.phase == 'predict':
            return
        current = self.epoch_metrics
        dl = self.learn.dl_name
        metrics = self._valid_mets
        measured, _ = read_metrics(metrics, current.n_valid, self.learn)
        for m, value in zip(metrics, measured, strict=True):
            if self._has_no_loss(m, value):
                self.loaders_without_loss.add(dl)
                continue
            current.measured |= self.columns.name_values(m, value, dl)
        current.values |= current.measured
        current.n_valid = 0
        self.log = L([self.learn.epoch, *current.values.values()])

    def _has_no_loss(self, m: Metric, value: Any) -> bool:
        "Return True for the loss of an evaluation whose batches had none, as of a detector."
        is_missing = isinstance(m, EvalLoss) and value is None
        return is_missing and self.learn.world.any(self.epoch_metrics.n_valid > 0)

    def after_eval(self) -> None:
        learn = self.learn
        if learn.fitting:
            self.evaluations.append({'epoch': learn.epoch, 'ba': learn.time.ba, **self.measured})

    @property
    def measured(self) -> dict[str, Any]:
        "Values of the current or latest evaluation, by column."
        return dict(self.epoch_metrics.measured)

    def receive_log(
        self,
        name: str,  # name of the column
        value: Any,  # number, or tensor of one element on any device
        weight: Any = 1,  # weight in the average; None: keep the latest value only
        shown: bool = True,  # whether the printed table has the column too
    ) -> None:
        "Average a value over the epoch, on its device, as a column of the history."
        if self.learn.phase == 'predict':
            return
        check_column(name)
        current = self.epoch_metrics
        row = self._find_row()  # None until the epoch ends
        logged = current.logged if row is None else {}
        if name not in self.logged_names and name in self.columns.list_names():
            raise MetricError(f'learn.log({name!r}): a metric has this name. Rename the value.')
        mean = logged.setdefault(name, Mean())
        if weight is None:
            mean.reset()
            current.latest.add(name)
        elif self._is_idle():
            weight = 0
        mean.add(value, 1 if weight is None else weight)
        if row is not None:
            row[name] = mean.value
        if self.learn.fitting:
            self.logged_names.setdefault(name, shown and row is None)

    def _find_row(self) -> dict[str, Any] | None:
        "Return the row of the current epoch of a fit, if it was written."
        is_in_fit = self.learn.fitting and self.learn.run.depth == 1
        return epoch_row(self) if is_in_fit else None

    def _is_idle(self) -> bool:
        "Return True on a rank whose batch only fills up the round of the other ranks."
        learn = self.learn
        has_batch = is_open(learn, 'train') or is_open(learn, 'validate')
        return has_batch and not self._has_local_samples()

    def after_epoch(self) -> None:
        current = self.epoch_metrics
        learn = self.learn
        seconds = perf_counter() - current.started
        is_training = learn.fitting and current.is_training
        if is_training and 'train_loss' not in current.values and self._has_steps():
            self.after_train()  # the epoch was cancelled during its training
        if not learn.fitting and learn.phase == 'predict':
            return current.clear()  # nothing was measured
        if learn.world.size > 1:
            seconds = self._merge_logged(seconds)
        values = current.collect()
        current.clear()
        if not learn.fitting:
            columns = dict.fromkeys([*self.evaluated_columns(), *values])
            learn.final_record = Values({name: values[name] for name in columns if name in values})
            return
        current.is_training = False
        if values:  # else the epoch was skipped
            self._add_row(values, seconds)

    def _add_row(self, values: dict[str, Any], seconds: float) -> None:
        "Add the row of the epoch to the record, and pass it to the logger."
        learn = self.learn
        is_shown = self.columns.is_shown
        names = self.columns.list_names()[1:]
        learn.final_record = L([values[n] for n in names if n in values and is_shown(n)])
        self.values.append(learn.final_record)
        self.iters.append(self.smooth_loss.count)
        columns = {name: values.get(name) for name in names}
        self.history.append(
            {'fit': self.n_fits - 1, 'epoch': learn.epoch, **columns, 'time': seconds}
        )
        self.log = L([learn.epoch, *(v for name, v in columns.items() if is_shown(name))])
        if self.add_time:
            self.log.append(format_seconds(seconds))
        learn.logger(self.log)

    # -- several ranks -----------------------------------------------------------------------------

    def _check_mergeable(self) -> None:
        metrics = self.columns.select_metrics('train')
        if self.learn.metrics:
            metrics += self._select_uncolumned(metrics)
        for dl_name, _ in evaluation_loaders(self.learn.dls):
            metrics += self.columns.metrics_of_loader(dl_name)
        for m in {id(m): m for m in metrics}.values():
            if measures_batches(m):
                check_mergeable(m)

    def _local_losses(self) -> dict[str, Any]:
        "Return this rank's losses of the epoch, and their weights."
        if self.learn.world.size == 1:
            return {}
        losses, weights = self.smooth_loss.since(self._of_fit.n_before)
        return {'losses': losses, 'weights': weights}

    def _merge_losses(self, states: list[dict[str, Any]]) -> None:
        "Replace this epoch's losses by their sample-weighted mean over ranks."
        losses = [sd['losses'] for sd in states]
        weights = [sd['weights'] for sd in states]
        merged = merge_losses(losses, weights, self._reduction())
        self.smooth_loss.replace(self._of_fit.n_before, *merged)

    def _reduction(self) -> str:
        return 'sum' if self.learn.parts.loss_weights.is_sum(self.learn) else 'mean'

    def _merge_logged(self, seconds: float) -> float:
        "Merge the logged values of all ranks, and return the seconds of the first rank."
        current = self.epoch_metrics
        local = {'frame': current.state_dict(), 'logged': self.logged_names, 'seconds': seconds}
        states = gather_on_host(self.learn.world, local, 'logged values')
        current.merge_logged([sd['frame'] for sd in states])
        self.logged_names = {name: shown for sd in states for name, shown in sd['logged'].items()}
        return float(states[0]['seconds'])

    def cleanup(self) -> None:
        "Discard the state of an interrupted run."
        self._metrics_by_depth = {1: self._of_fit}
        self._microbatches = []
        self._of_fit.is_training = False
        self.steps.release_group()

    # -- names -------------------------------------------------------------------------------------

    @property
    def metric_names(self) -> L:
        "The columns of a row: epoch, losses, metrics, logged values, time."
        return self.columns.list_shown()

    def evaluated_columns(self) -> list[str]:
        "Return the columns of evaluations."
        return self.columns.list_evaluated()

    @property
    def _train_mets(self) -> L:
        return L(self.smooth_loss, *self._train)

    @property
    def _valid_mets(self) -> list[Metric]:
        current = self.epoch_metrics
        name = self.learn.dl_name
        if name not in current.valid:
            metrics = self.columns.metrics_of_loader(name)
            if current.own:
                metrics = [clone_metric(m, self.learn) for m in metrics]
            current.valid[name] = metrics
        return current.valid[name]

    # -- per step ----------------------------------------------------------------------------------

    @property
    def losses(self) -> L:
        "Smoothed training loss of every step of this fit, as 0-dim tensors on the CPU."
        return L(self.steps.losses)

    @property
    def lrs(self) -> list[float]:
        "Learning rate of every step of this fit, of the last param group."
        return self.steps.columns().get('lr', [])

    @property
    def hps(self) -> dict[str, list[float]]:
        "Hyperparameters of every step of this fit, by fastai's names, of the last param group."
        given = self.steps.given_hps
        return self.steps.columns() if given is None else given

    @hps.setter
    def hps(self, hps: dict[str, list[float]]) -> None:
        self.steps.given_hps = hps

    # -- checkpoints -------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return everything recorded, and the measurements of the epoch in progress."
        current = self._of_fit
        is_training = current.is_training
        changes = self.history.changes
        return {
            **({'changes': to_storable(changes)} if changes else {}),
            'history': [to_storable(row) for row in self.history],
            'n_fits': self.n_fits,
            'evaluations': [to_storable(row) for row in self.evaluations],
            'smooth_loss': self.smooth_loss.state_dict(),
            'skipped': torch.tensor(self.steps.skipped, dtype=torch.int64),
            'keys': {name: dict(columns) for name, columns in self.columns.of_keys.known.items()},
            'values': to_storable([list(row) for row in self.values]),
            'iters': list(self.iters),
            'logged_names': list(self.logged_names),
            'without_loss': sorted(self.loaders_without_loss),
            'unshown': sorted(name for name, shown in self.logged_names.items() if not shown),
            'steps': self.steps.state_dict(),
            'open': {
                **current.state_dict(),
                'n_before': current.n_before if is_training else 0,
                'metrics': metric_states(self._train_metrics) if is_training else None,
            },
            'seconds': perf_counter() - current.started if is_training else 0.0,
        }

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the records; inside a fit, also the measurements of the epoch in progress."
        self.history = History(map(dict, sd['history']), sd.get('changes', ()))
        self.n_fits = sd['n_fits']
        self.evaluations = [dict(row) for row in sd['evaluations']]
        self.values = L(map(L, sd['values']))
        self.iters = L(list(sd['iters']))
        self.logged_names = {name: name not in sd['unshown'] for name in sd['logged_names']}
        self.loaders_without_loss = set(sd['without_loss'])
        self.columns = Columns(self, sd['keys'])
        self.smooth_loss.load_state_dict(sd['smooth_loss'])
        self.steps = StepLog(self.smooth_loss)
        self.steps.load_state_dict(sd['steps'])
        self.steps.skipped = sd['skipped'].tolist()
        # outside a fit: the measurements of the last fit
        self._of_fit.load_state_dict(sd['open'])
        if getattr(self.learn, 'fitting', False):
            self._reopen(sd['open'], sd['seconds'])

    def _reopen(self, sd: dict[str, Any], seconds: float) -> None:
        "Continue the measurements of the epoch in progress."
        current = self._of_fit
        current.started = perf_counter() - seconds
        current.n_before = sd['n_before']
        self.log = L([self.learn.epoch, *current.values.values()])
        if sd['metrics'] is not None:
            saved = {state['name'] for state in sd['metrics']}
            # others are read by a callback that was added, which a warning names already
            uncolumned = [m for m in self._uncolumned if m.name in saved]
            load_metrics([*self._train, *uncolumned], sd['metrics'])


def recorder_of(learn: Learner) -> Recorder | None:
    "Return the Recorder of a Learner, or None."
    return next((cb for cb in learn.cbs if isinstance(cb, Recorder)), None)


# -- values that other callbacks monitor -----------------------------------------------------------


def records(cb: Any) -> Recorder:
    "Return the Recorder of a callback's Learner, or raise `MetricError`."
    found = recorder_of(cb.learn)
    if found is None:
        raise MetricError(f'{type(cb).__name__} reads the Recorder, which this Learner lacks.')
    return found


def check_monitor(cb: Any, monitor: str) -> None:
    """Raise `MetricError` for a name that neither a column has nor `learn.log` can write.

    A name that resembles a column is taken for a misspelled one. Any other name may be one of
    `learn.log`: `read_monitor` raises after the first epoch with an evaluation if nothing wrote it."""
    names = _list_columns(cb, monitor)
    metrics = [m.name for m in cb.learn.metrics]
    resembles = get_close_matches(monitor, names, n=1, cutoff=0.85)
    if monitor not in names and (resembles or monitor in (*RESERVED, *metrics)):
        raise _unknown_column(cb, monitor, names)


def read_monitor(cb: Any, monitor: str) -> Any:
    """Return the value of a column or of a name of `learn.log` in this epoch's row, or None if the epoch lacks it.

    The first rank's logged value counts. Raises `MetricError` if nothing has written the name by the
    first epoch with an evaluation."""
    row = epoch_row(cb)
    if row is None:
        return None
    recorder = records(cb)
    if monitor in recorder.columns.list_measured():
        return row.get(monitor)
    is_evaluated = bool(recorder.measured) or not evaluation_loaders(cb.learn.dls)
    is_missing = monitor not in row and is_evaluated
    is_missing, value = cb.learn.world.broadcast((is_missing, row.get(monitor)))
    if is_missing:
        raise _unknown_column(cb, monitor, _list_columns(cb, monitor))
    return value


def list_values(recorder: Recorder) -> list[str]:
    "Return the names of the values of a printed row, which `recorder.values[-1]` holds."
    return [name for name in recorder.metric_names[1:] if name != 'time']


def _list_columns(cb: Any, monitor: str) -> list[str]:
    "Return the names of `recorder.values[-1]`, after looking for the keys of metrics that return dicts."
    recorder = records(cb)
    if monitor not in recorder.metric_names:
        recorder.columns.find_keys()
    return list_values(recorder)


def _unknown_column(cb: Any, monitor: str, names: list[str]) -> MetricError:
    "Return the error of a name that no column has."
    hint = (
        did_you_mean(monitor, names)
        or ' Write it in each epoch with `learn.log`, or pass a function of the Learner.'
    )
    if records(cb).loaders_without_loss and monitor.endswith('loss'):
        hint = ' The evaluation has no loss: monitor one of its metrics.'
    elif not evaluation_loaders(cb.learn.dls):
        hint = f' Without validation data nothing is evaluated: `DataLoaders(train, valid)`.{hint}'
    return MetricError(
        f'{type(cb).__name__}(monitor={monitor!r}): no such value is recorded, but '
        f'{", ".join(names)}.{hint}'
    )


def epoch_row(cb: Any) -> dict[str, Any] | None:
    "Return this epoch's row of the history, or None if the epoch was skipped."
    recorder = records(cb)
    row = recorder.history[-1] if recorder.history else {}
    current = recorder.n_fits - 1, cb.learn.epoch
    return row if (row.get('fit'), row.get('epoch')) == current else None
