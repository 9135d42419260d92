# SPDX-License-Identifier: Apache-2.0
"""Callback that reports a metric to a trial of Optuna, and prunes the trial."""

from __future__ import annotations

from typing import Any

from learnkit.callbacks.recorder import check_monitor, read_monitor, records
from learnkit.callbacks.tracking import TrackerCallback
from learnkit.core.errors import OptionError
from learnkit.core.optional import check_libraries, import_library
from learnkit.core.watched import as_number
from learnkit.engine.callback import Callback
from learnkit.metrics.direction import MetricProperties


class OptunaPruning(Callback):
    """Report a column of the history to a trial of Optuna, and end the fit if Optuna prunes the trial.

    With `at='epoch'` the step of a report is the number of the epoch, over all fits of the Learner and from 0, and
    with `at='evaluation'` the number of batches. A pruned fit ends after its epoch, or after its batch and the epoch's
    evaluation, with all events. Once every callback has cleaned up, `fit` raises `optuna.TrialPruned`, which is not
    recorded as a failure of the run. Optuna counts a value that is NaN as worse than all others; an epoch that did not
    evaluate the column is not reported.

    In several processes the first one has the trial and the others get None. All of them raise `TrialPruned`.

    Raises `MissingExtraError` without optuna, `OptionError` if the study minimizes a metric that is better when higher,
    or the opposite, and before training `MetricError` for an unknown column. It has no
    checkpointed state.

    >>> import optuna
    >>> from learnkit.testing import synth_learner
    >>> def objective(trial):
    ...     learn = synth_learner(lr=trial.suggest_float('lr', 0.001, 0.1))
    ...     with learn.no_bar(), learn.no_logging(): learn.fit(3, cbs=OptunaPruning(trial))
    ...     return learn.history[-1]['valid_loss']
    >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
    >>> study = optuna.create_study()
    >>> study.optimize(objective, n_trials=2)
    >>> sorted(study.trials[0].intermediate_values)
    [0, 1, 2]
    """

    order = TrackerCallback.order + 4
    run_valid = False
    remove_on_find = True
    run_in = 'fit'

    def __init__(
        self,
        trial: Any,  # trial of Optuna; None on all ranks but the first
        monitor: str = 'valid_loss',  # column of the history
        at: str = 'epoch',  # when to report: 'epoch', or 'evaluation', also within an epoch
    ) -> None:
        check_libraries('OptunaPruning', 'optuna')
        if at not in ('epoch', 'evaluation'):
            raise OptionError(f"at={at!r}: choose 'epoch' or 'evaluation'.")
        self.trial = trial
        self.monitor = monitor
        self.at = at
        self._reason = ''  # why the trial was pruned
        self._check_direction()

    def _check_direction(self) -> None:
        "Raise `OptionError` if the study searches for the worst value."
        study = getattr(self.trial, 'study', None)  # a `FixedTrial` belongs to no study
        if study is None:
            return
        better = MetricProperties().get(self.monitor)
        wanted = {'minimize': 'lower', 'maximize': 'higher'}[study.direction.name.lower()]
        if better in ('lower', 'higher') and better != wanted:
            raise OptionError(
                f'OptunaPruning(monitor={self.monitor!r}): {better} is better, and the study is to '
                f'{study.direction.name.lower()} it: pass `optuna.create_study(direction=...)`.'
            )

    def before_fit(self) -> None:
        "Find the column. Raises `OptionError` if the first rank has no trial."
        if self.trial is None and self.learn.world.is_first:
            raise OptionError('OptunaPruning(None): the first process needs the trial.')
        check_monitor(self, self.monitor)
        self._reason = ''

    def after_eval(self) -> None:
        "Report the value of this evaluation."
        if self.at == 'evaluation':
            self._report(records(self).measured.get(self.monitor), self.learn.time.ba)

    def after_epoch(self) -> None:
        "Report the value of this epoch."
        if self.at == 'epoch':
            self._report(read_monitor(self, self.monitor), self.learn.time.ep - 1)

    def _report(self, value: Any, step: int) -> None:
        "Report a value unless it is absent, and end the fit on all ranks if the trial is pruned."
        learn = self.learn
        number = as_number(self, self.monitor, value)
        if number is None or self._reason:
            return
        pruned = False
        if learn.world.is_first:
            self.trial.report(number, step)
            pruned = self.trial.should_prune()
        if learn.world.broadcast(pruned):
            self._reason = f'{self.monitor} is {number:.6g} at step {step}.'
            learn.run.stop(type(self).__name__)

    def cleanup(self) -> None:
        "Raise `TrialPruned`, which ends the run after the cleanup of all other callbacks."
        reason = self._reason
        self._reason = ''
        if reason:
            raise import_library('optuna', 'OptunaPruning').TrialPruned(reason)
