# SPDX-License-Identifier: Apache-2.0
"""Training metrics and logs of Composer's Trainer, for callbacks and logger destinations of Composer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from fastcore.basics import noop

from learnkit.core.model import bare_model, preserved_modes, takes_batches, whole_batch
from learnkit.engine.callback import Callback
from learnkit.engine.counters import token_count
from learnkit.interop.common.adapter import find_or_add, list_adapters
from learnkit.interop.common.hooks import collect_measured
from learnkit.interop.composer.run import ComposerRun
from learnkit.interop.composer.state import (
    destinations_of,
    label_of,
    measured_values,
    trainer_of,
)
from learnkit.metrics.averages import metrics_of_model

if TYPE_CHECKING:
    from learnkit.learner import Learner

# counts that are logged at the start of each batch
TIMES = ('batch', 'sample', 'batch_in_epoch', 'sample_in_epoch')
TOKENS = ('token', 'token_in_epoch')


class ComposerTrainer(Callback):
    """Compute a `ComposerModel`'s training metrics at each batch, and log as Composer's Trainer does.

    `from_composer` adds a `ComposerTrainer` to a Learner whose model has training metrics, or that
    has a logger destination of Composer. Destinations receive `time/...`, `loss/train/total`,
    `metrics/train/...` and `metrics/<label>/...`. As in Composer, the loss is copied to the host at
    each batch.
    """

    order = 58
    is_composer_trainer = True

    def __init__(
        self,
        batch_metrics: Mapping[str, Any] | None = None,  # torchmetrics objects by name
    ) -> None:
        self.batch_metrics = dict(batch_metrics or {})
        self._batch: Any = None  # the microbatch before algorithms change it
        self._outputs: Any = None  # outputs of the model for this microbatch
        self._has_new_batch = False  # True from the start of a batch until `begin_batch`

    def before_fit(self) -> None:
        "Log the names of the algorithms."
        adapters = list_adapters(self.learn, 'composer')
        names = [cb.wrapped_class.__name__ for cb in adapters if cb.is_algorithm]
        if self.learn.fitting and names:
            enabled = {f'enabled_algorithms/{name}': True for name in names}
            for cb in destinations_of(self.learn):
                getattr(cb.wrapped, 'log_hyperparameters', noop)(enabled)

    def before_epoch(self) -> None:
        "Log the index of the epoch."
        if self.learn.fitting:
            self._log(lambda: {'time/epoch': self.learn.time.ep})

    def before_batch(self) -> None:
        "Mark the start of a training batch."
        self._has_new_batch = self.learn.training

    def begin_batch(self) -> None:
        "Reset the metrics and log the counts, between `batch_start` and `before_train_batch`."
        if not self._has_new_batch:
            return
        self._has_new_batch = False
        for metric in self.batch_metrics.values():
            metric.reset()
        has_tokens = token_count(self.learn) > 0
        self._log(partial(self._collect_counts, (*TIMES, *TOKENS) if has_tokens else TIMES))

    def before_pred(self) -> None:
        "Update the metrics with the last microbatch, and keep the current one."
        if not self.learn.training:
            return
        self.begin_batch()
        self._measure()
        if self.batch_metrics and not self.learn.run.repeating:
            self._batch = whole_batch(self.learn)

    def after_backward(self) -> None:
        "Keep the outputs: Composer updates its metrics after this event."
        if self._batch is not None:
            self._outputs = self.learn.pred

    def before_step(self) -> None:
        "Update the metrics with the last microbatch."
        self._measure()

    def _measure(self) -> None:
        "Update the metrics with the kept microbatch, in evaluation mode."
        batch = self._batch
        outputs = self._outputs
        self._batch = self._outputs = None
        if outputs is None:
            return
        model: Any = bare_model(self.learn.model)
        with preserved_modes(self.learn.model), torch.no_grad():
            self.learn.model.eval()
            measured = model.eval_forward(batch, outputs)
            for metric in self.batch_metrics.values():
                model.update_metric(batch, measured, metric)

    def after_step(self) -> None:
        "Log loss and metrics of the batch."
        self._log(self._collect_batch_values)

    def after_train(self) -> None:
        "Log the metrics of the last batch of the epoch."
        if self.batch_metrics and not find_or_add(self.learn, ComposerRun).ends_within_epoch():
            self._log(self._compute_metrics)

    def after_validate(self) -> None:
        "Log loss and metrics of a validation loader."
        if self.learn.phase != 'predict':
            self._log(self._collect_validation_values)

    def after_fit(self) -> None:
        "Log the counts at the end of the fit."
        learn = self.learn
        if learn.fitting:
            names = ('epoch', *TIMES, *TOKENS) if learn.time.tok else ('epoch', *TIMES)
            self._log(partial(self._collect_counts, names))

    def _collect_batch_values(self) -> dict[str, Any]:
        size = find_or_add(self.learn, ComposerRun).view.device_train_microbatch_size
        return {
            'trainer/device_train_microbatch_size': size,
            'loss/train/total': self.learn.loss.item(),
            **self._compute_metrics(),
        }

    def _compute_metrics(self) -> dict[str, Any]:
        return {f'metrics/train/{name}': m.compute() for name, m in self.batch_metrics.items()}

    def _collect_validation_values(self) -> dict[str, Any]:
        learn = self.learn
        values = measured_values(learn, collect_measured(learn))
        label = label_of(learn.dl_name)
        return {f'metrics/{label}/{name}': value for name, value in values.items()}

    def _collect_counts(self, names: Iterable[str]) -> dict[str, Any]:
        counts = find_or_add(self.learn, ComposerRun).collect_counts()
        return {f'time/{name}': counts[name] for name in names}

    def _log(self, measure: Callable[[], dict[str, Any]]) -> None:
        "Call `measure` and log the result to the destinations; without destinations, do nothing."
        destinations = destinations_of(self.learn)
        metrics = measure() if destinations else {}
        if not metrics:
            return
        for cb in destinations:
            cb.wrapped.log_metrics(metrics, cb.host.collect_counts()['batch'])


def add_trainer(
    learn: Learner,
    has_destination: bool,  # whether the Learner has a logger destination of Composer
) -> ComposerTrainer | None:
    "Return the Learner's `ComposerTrainer`; add it if there are training metrics or a destination."
    trainer: ComposerTrainer | None = trainer_of(learn)
    if trainer is None:
        has_metrics = takes_batches(learn.model)
        metrics = metrics_of_model(learn.model, is_train=True) if has_metrics else []
        if not has_destination and not metrics:
            return None
        trainer = ComposerTrainer({m.name: m.metric for m in metrics})
        learn.add_cb(trainer)
    return trainer
