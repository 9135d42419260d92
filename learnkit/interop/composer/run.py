# SPDX-License-Identifier: Apache-2.0
"""What Composer's state reports and the Learner does not: counts, metrics and gradients, once per Learner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from time import perf_counter
from typing import Any

from typing_extensions import override

from learnkit.callbacks.recorder import recorder_of
from learnkit.core.time import Timestamp
from learnkit.engine.budget import find_budget
from learnkit.engine.callback import Callback
from learnkit.engine.counters import sample_count
from learnkit.interop.common.hooks import collect_epoch_values
from learnkit.interop.composer.state import (
    ComposerLogger,
    ComposerState,
    label_of,
    measured_values,
    wrap_values,
)
from learnkit.interop.composer.time import types_for
from learnkit.metrics.averages import ModelMetric


class _Pass:
    "Count the batches, samples and seconds of one pass over a loader outside of training."

    def __init__(self) -> None:
        self.batches = 0
        self.samples = 0
        self.started_at = perf_counter()

    def make_timestamp(
        self,
        types: Any,  # result of `types_for`
    ) -> Any:
        return types.Timestamp(
            batch=self.batches,
            sample=self.samples,
            batch_in_epoch=self.batches,
            sample_in_epoch=self.samples,
            total_wct=timedelta(seconds=perf_counter() - self.started_at),
        )


class ComposerRun(Callback):
    """Hold the `state` and the `logger` that all Composer callbacks of a Learner share, and count for them.

    `from_composer` adds it. It runs before the adapters, so that they see the counts of their event.
    Checkpointed: the position in the epoch, and the last metric values.
    """

    order = 57
    remove_on_find = True
    nondeterministic_state = ('evaluated', 'walls')

    def __init__(self) -> None:
        self.view = ComposerState(self)
        self.logs = ComposerLogger(self)
        self.passes = {'eval': _Pass(), 'predict': _Pass()}
        self.measured: dict[str, dict[str, Any]] = {}  # metrics by label of the loader
        self._values: dict[str, dict[str, float]] = {}  # their values, which a checkpoint holds
        self.types = types_for(None)  # event and time classes of the callback that runs
        self.given_loader: tuple[Any, Any, Any] | None = None  # by `state.set_dataloader`
        self.in_fit = self.is_split = self.has_graph = False
        # loader in Composer's state: 'train', 'eval' or 'predict'; empty during `init`
        self.loader_kind = 'train'
        self.last_loss: Any = None  # loss of the last microbatch
        self.batch_loss: Any = None  # loss of the last batch
        self._grads: list[tuple[Any, Any]] = []  # gradients of the last step
        self._training_modules: list[Any] = []  # modules in training mode before an evaluation
        self._iteration_start = self._epoch_start = Timestamp()
        # counts before the last batch or the last end of an epoch
        self.previous_counts: dict[str, Any] | None = None
        self._batch_start_counts: dict[str, Any] = {}
        self._given_end: tuple[Any, str] | None = None  # end of the fit that a callback has set
        self._is_epoch_over = False  # True after training until the Learner counts the epoch
        # counts at the end of a fit that stopped within an epoch
        self.unfinished_counts: dict[str, Any] | None = None
        self._eval_seconds = 0.0
        self._eval_start = 0.0
        self._n_previous_epochs = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_grads': [], '_training_modules': []}

    @contextmanager
    def composer_modes(self) -> Iterator[None]:
        "Restore the last step's gradients and Composer's module modes in a context."
        # a module's mode before or after an evaluation differs from its mode in Composer
        is_train = self.loader_kind == 'train'
        changed = [m for m in self._training_modules if is_train and not m.training]
        cleared = [(p, grad) for p, grad in self._grads if p.grad is None]
        for m in changed:
            m.training = not m.training
        for p, grad in cleared:
            p.grad = grad
        try:
            yield
        finally:
            for p, grad in cleared:
                if p.grad is grad:
                    p.grad = None
            for m in changed:
                m.training = not m.training

    # -- counting ----------------------------------------------------------------------------------

    def before_fit(self) -> None:
        "Start to count a fit."
        self._training_modules = []
        if not self.learn.fitting:
            return
        self.in_fit = True
        self._n_previous_epochs = self.learn.finished('ep')
        self._given_end = self.unfinished_counts = None
        # a failed fit may not have reset these attributes
        self._is_epoch_over = False
        self._eval_start = 0.0

    def cleanup(self) -> None:
        "End the count of a fit."
        self.in_fit = False
        self._grads = []

    def before_iteration(self) -> None:
        "Note where the iteration starts."
        self._iteration_start = self.learn.time

    def before_epoch(self) -> None:
        "Note where the epoch starts."
        if self.learn.fitting:
            self._start_epoch()

    def _start_epoch(self) -> None:
        self._epoch_start = self.learn.time
        self._is_epoch_over = False

    def before_train(self) -> None:
        "Forget the modes and the loader of the last evaluation."
        self._training_modules = []
        self.given_loader = None

    def before_batch(self) -> None:
        "Note the counts before a training batch, or forget what an evaluation is about to replace."
        if self.learn.training:
            self._batch_start_counts = self.collect_counts()
            self._training_modules = []
        elif self.learn.phase != 'predict':
            self.measured.pop(label_of(self.learn.dl_name), None)

    def before_pred(self) -> None:
        "Drop the gradients of the last step: Composer clears them before the forward pass."
        if self.learn.training:
            self._grads = []

    def after_loss(self) -> None:
        "Keep the loss of a training microbatch."
        if self.learn.training:
            self.last_loss = self.learn.loss.detach()

    def after_step(self) -> None:
        "Keep loss and gradients of the batch."
        self.batch_loss = self.learn.loss.detach()
        self._grads = [(p, p.grad) for p in self.learn.opt.parameters() if p.grad is not None]

    def after_train(self) -> None:
        "Measure the epoch's training, and count its end."
        self._measure_training()
        if self.ends_within_epoch():
            self.unfinished_counts = self.collect_counts()
            return
        self.previous_counts = self.collect_counts()
        self._is_epoch_over = True

    def ends_within_epoch(self) -> bool:
        "Return True if the fit stops before the last batch of the epoch."
        learn = self.learn
        return learn.run.stopping and (learn.n_iter is None or learn.iter + 1 < learn.n_iter)

    def after_epoch(self) -> None:
        "Note where the next epoch starts: the Learner counts the epoch before this event."
        if self.learn.fitting:
            self._start_epoch()
            self._stop_at_given_end()

    def before_eval(self) -> None:
        "Start the clock of the evaluation, and note the modes of the modules."
        self._eval_start = perf_counter()
        training = [m for m in self.learn.model.modules() if m.training]
        self._training_modules = training or self._training_modules

    def after_eval(self) -> None:
        "Stop the clock of the evaluation."
        if self.in_fit:
            self._eval_seconds += perf_counter() - self._eval_start
        self._eval_start = 0.0

    def before_predict(self) -> None:
        "Count predictions from zero."
        self.passes['predict'] = _Pass()
        self.given_loader = None

    def before_validate(self) -> None:
        "Count an evaluation from zero."
        self.given_loader = None
        if self.learn.phase != 'predict':
            self.passes['eval'] = _Pass()

    def after_batch(self) -> None:
        "Count a batch."
        if self.learn.training:
            self.previous_counts = self._batch_start_counts
            self._stop_at_given_end()
            return
        current = self.passes['predict' if self.learn.phase == 'predict' else 'eval']
        current.batches += 1
        current.samples += sample_count(self.learn)

    def after_validate(self) -> None:
        "Keep the metrics of a loader: the objects of a `ComposerModel`, and the values of others."
        learn = self.learn
        recorder = recorder_of(learn)
        if learn.phase == 'predict' or recorder is None:
            return
        objects = {m.name: deepcopy(m.metric) for m in learn.metrics if isinstance(m, ModelMetric)}
        self._keep(label_of(learn.dl_name), measured_values(learn, recorder.measured), objects)

    def _measure_training(self) -> None:
        "Store the Recorder's training loss and metrics of the epoch."
        values = collect_epoch_values(self.learn)
        own = {k.removeprefix('train_'): v for k, v in values.items() if k.startswith('train_')}
        self._keep('train', own, {})

    def _keep(self, label: str, values: dict[str, Any], objects: dict[str, Any]) -> None:
        wrapped = wrap_values(values)
        self._values[label] = {name: float(value) for name, value in wrapped.items()}
        self.measured[label] = wrapped | objects

    def collect_counts(self) -> dict[str, Any]:
        "Return the fields of a Composer timestamp."
        if self.unfinished_counts is not None:
            return self.unfinished_counts
        now = self.learn.time
        iteration_start = self._iteration_start
        epoch_start = now if self._is_epoch_over else self._epoch_start
        epoch = now.ep + self._is_epoch_over
        eval_seconds = self._eval_seconds
        if self._eval_start and self.in_fit:
            eval_seconds += perf_counter() - self._eval_start
        return {
            'iteration': now.iter,
            'epoch': epoch,
            'batch': now.ba,
            'sample': now.sp,
            'token': now.tok,
            'epoch_in_iteration': epoch - iteration_start.ep,
            'token_in_iteration': now.tok - iteration_start.tok,
            'batch_in_epoch': now.ba - epoch_start.ba,
            'sample_in_epoch': now.sp - epoch_start.sp,
            'token_in_epoch': now.tok - epoch_start.tok,
            'total_wct': timedelta(seconds=max(0.0, now.sec - eval_seconds)),
            'epoch_wct': timedelta(seconds=max(0.0, now.sec - epoch_start.sec)),
        }

    def stop(self) -> None:
        "End the fit, and set the end of training to the current time, as Composer's `stop_training` does."
        end = self.find_end()
        unit = 'ba' if end is None or end[1] == 'ep' else end[1]
        self._given_end = self.view.timestamp.get(unit).value, unit
        self.learn.stop()

    def set_end(self, end: tuple[Any, str] | None) -> None:
        "End the fit at this value in this unit; None: at its own end."
        self._given_end = end

    def _stop_at_given_end(self) -> None:
        end = self._given_end
        if end is not None and self.view.timestamp.get(end[1]).value >= end[0]:
            self.learn.stop()

    def find_end(self) -> tuple[Any, str] | None:
        "Return value and unit of the fit's end over all fits; None outside, if unknown or not of Composer."
        if self._given_end is not None:
            return self._given_end
        if not self.in_fit:
            return None
        budget = find_budget(self.learn)
        if budget is not None:
            unit = budget.total.unit
            return None if unit == 'st' else (budget.total_at_start + budget.total.value, unit)
        n_epoch = self.learn.n_epoch
        return (self._n_previous_epochs + n_epoch, 'ep') if isinstance(n_epoch, int) else None

    # -- state -------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the counts and the last metric values."
        counts = self.previous_counts or {}
        durations = {k: v.total_seconds() for k, v in counts.items() if isinstance(v, timedelta)}
        return {
            'epoch': self._epoch_start.state_dict(),
            'iteration': self._iteration_start.state_dict(),
            'previous': {k: v for k, v in counts.items() if k not in durations} or None,
            'walls': durations,
            'over': self._is_epoch_over,
            'evaluated': self._eval_seconds,
            'epochs': self._n_previous_epochs,
            'end': self._given_end,
            'losses': [self.last_loss, self.batch_loss],
            'measured': self._values,
            'passes': {name: (p.batches, p.samples) for name, p in self.passes.items()},
        }

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the counts and the last metric values."
        self._epoch_start = Timestamp.from_state_dict(sd['epoch'])
        self._iteration_start = Timestamp.from_state_dict(sd['iteration'])
        self._is_epoch_over = sd['over']
        durations = {name: timedelta(seconds=seconds) for name, seconds in sd['walls'].items()}
        self.previous_counts = {**sd['previous'], **durations} if sd['previous'] else None
        self._eval_seconds = sd['evaluated']
        self._n_previous_epochs = sd['epochs']
        self._given_end = None if sd['end'] is None else tuple(sd['end'])
        self.last_loss, self.batch_loss = sd['losses']
        for name, counts in sd['passes'].items():
            self.passes[name].batches, self.passes[name].samples = counts
        self._values = {label: dict(values) for label, values in sd['measured'].items()}
        self.measured = {label: wrap_values(values) for label, values in self._values.items()}
