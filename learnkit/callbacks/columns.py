# SPDX-License-Identifier: Apache-2.0
"""Columns of the Recorder's table, and the metrics whose values they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fastcore.foundation import L

from learnkit.callbacks.epoch_metrics import EvalLoss, as_number, clone_metric
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.engine.advice import first_validation_batches
from learnkit.metrics.averages import RESERVED, as_metrics, measures_batches
from learnkit.metrics.base import Metric, flatten_mapping

if TYPE_CHECKING:
    from learnkit.learner import Learner


class MetricColumns:
    """Assign column names to the keys of metrics that return dicts.

    A key is the name of its column. If another metric or key has that name already, the column is
    `<metric>_<key>`. The first to claim a name keeps it. Checkpointed as part of the Recorder.

    >>> columns = MetricColumns()
    >>> columns.add('iou', {'cat': .5, 'loss': 1.}, ['iou', 'cat'])
    >>> columns.columns('iou'), columns.columns('cat')
    (['iou_cat', 'iou_loss'], ['cat'])
    """

    def __init__(self, known: Mapping[str, Mapping[str, str]] | None = None) -> None:
        # metric: {key: column}
        self.known = {name: dict(columns) for name, columns in (known or {}).items()}

    def columns(self, name: str, prefix: str = '') -> list[str]:
        "Return the columns of a metric: its name if no keys are known."
        return list(self.known.get(prefix + name, {name: name}).values())

    def add(
        self,
        name: str,  # name of the metric
        value: Any,  # value of the metric on some batches
        names: Iterable[str],  # names of all metrics that share the columns
        prefix: str = '',  # prefix for the metrics of one loader, such as 'night/'
    ) -> None:
        "Add the keys of a metric's value."
        if not isinstance(value, Mapping):
            return
        columns = self.known.setdefault(prefix + name, {})
        taken = {*RESERVED, 'loss', *columns.values()}
        for other in names:
            if other != name:
                taken.update(self.columns(other, prefix))
        for key in flatten_mapping(value):
            if key in columns:
                continue
            columns[key] = column = key if key not in taken else f'{name}_{key}'
            taken.add(column)

    def values(self, name: str, value: Any, prefix: str = '') -> dict[str, Any]:
        "Return the values of a metric by column, on the host."
        columns = self.known.get(prefix + name)
        if columns is None:
            return {name: value}
        if isinstance(value, Mapping):
            found = flatten_mapping(value)
        else:
            # None without batches, and NaN if the metric cannot be computed
            found = dict.fromkeys(columns, value)
        return {column: as_number(found.get(key)) for key, column in columns.items()}


class Columns:
    """Columns of a Recorder's table: epoch, losses, metrics and logged values, in this order.

    A metric on the training batches has the column `train_<metric>` if it is computed in evaluations too. A metric
    on a validation loader `night` has the column `night/<metric>`.

    >>> from learnkit import accuracy
    >>> from learnkit.testing import synth_learner
    >>> columns = synth_learner(metrics=accuracy).recorder.columns
    >>> columns.list_names(), columns.list_evaluated()
    (['epoch', 'train_loss', 'valid_loss', 'accuracy'], ['valid_loss', 'accuracy'])
    """

    def __init__(
        self,
        recorder: Any,  # the Recorder, which has the options and the logged names
        keys: Mapping[str, Mapping[str, str]] | None = None,  # `MetricColumns.known`
    ) -> None:
        self.recorder = recorder
        self.of_keys = MetricColumns(keys)

    @property
    def learn(self) -> Learner:
        learn: Learner = self.recorder.learn
        return learn

    # -- metrics -----------------------------------------------------------------------------------

    def select_metrics(self, phase: str, metrics: Any = None) -> list[Metric]:
        "Return the metrics that are computed in training or in evaluation."
        metrics = self.learn.metrics if metrics is None else metrics
        recorder = self.recorder
        default = recorder.train_metrics if phase == 'train' else recorder.valid_metrics
        return [m for m in metrics if m.on in (phase, 'both') or (m.on is None and default)]

    def metrics_of_loader(self, dl_name: str) -> list[Metric]:
        "Return the metrics of a validation loader, or the Learner's if it defines none."
        evaluator = self._find_evaluator(dl_name)
        own = None if evaluator is None else evaluator.as_metrics(as_metrics)
        metrics = self.select_metrics('valid', own)
        return [self.recorder.loss, *metrics] if self.recorder.valid_metrics else metrics

    def _has_column(self, m: Metric, dl_name: str) -> bool:
        "Return False for the loss of a loader whose evaluation had none."
        return not isinstance(m, EvalLoss) or dl_name not in self.recorder.loaders_without_loss

    def _find_evaluator(self, dl_name: str) -> Any:
        "Return the evaluator of a validation loader that has its own metrics, or None."
        evaluator = getattr(self.learn.dls, 'evaluators', {}).get(dl_name)
        return None if evaluator is None or evaluator.metrics is None else evaluator

    # -- names -------------------------------------------------------------------------------------

    def list_names(self) -> list[str]:
        "Return the names of the columns, in order."
        names = ['epoch', *self.list_measured(), *self.recorder.logged_names]
        return list(dict.fromkeys(names))

    def list_measured(self) -> list[str]:
        "Return the columns of losses and metrics, which are known without `learn.log`."
        train_columns = [
            column for m in self.select_metrics('train') for column in self.of_keys.columns(m.name)
        ]
        train = ['train_loss', *map(self._name_in_training, train_columns)]
        return [*train, *self.list_evaluated()]

    def list_shown(self) -> L:
        "Return the names of the columns of a printed row."
        names = [name for name in self.list_names() if self.is_shown(name)]
        if self.recorder.add_time:
            names.append('time')
        return L(names)

    def is_shown(self, name: str) -> bool:
        "Return False for a logged value that is not printed."
        return bool(self.recorder.logged_names.get(name, True))

    def list_evaluated(self) -> list[str]:
        "Return the columns of evaluations."
        loaders = evaluation_loaders(self.learn.dls)
        return [name for dl_name, _ in loaders for name in self._list_of_loader(dl_name)]

    def _list_of_loader(self, dl_name: str) -> list[str]:
        prefix = self._find_prefix(dl_name)
        return [
            self._name_in_evaluation(m, dl_name, column)
            for m in self.metrics_of_loader(dl_name)
            if self._has_column(m, dl_name)
            for column in self.of_keys.columns(m.name, prefix)
        ]

    def _name_in_training(self, column: str) -> str:
        return f'train_{column}' if self.recorder.valid_metrics else column

    def _name_in_evaluation(self, m: Metric, dl_name: str, column: str) -> str:
        if dl_name != 'valid':
            return f'{dl_name}/{column}'
        is_marked = isinstance(m, EvalLoss) or self.recorder.train_metrics
        return f'valid_{column}' if is_marked else column

    def _find_prefix(self, dl_name: str) -> str:
        "Return the prefix that separates a loader's own metrics from the Learner's."
        return '' if self._find_evaluator(dl_name) is None else f'{dl_name}/'

    # -- values ------------------------------------------------------------------------------------

    def add_keys(self, values: Mapping[str, Any]) -> None:
        "Add columns for the keys of metrics that return dicts, given their values by the names of the metrics."
        names = [m.name for m in self.learn.metrics]
        for name, value in values.items():
            self.of_keys.add(name, value, names)

    def name_training_values(self, m: Metric, value: Any) -> dict[str, Any]:
        "Return the values of a metric on the training batches by column."
        self.add_keys({m.name: value})
        values = self.of_keys.values(m.name, value)
        return {self._name_in_training(column): v for column, v in values.items()}

    def name_values(self, m: Metric, value: Any, dl_name: str) -> dict[str, Any]:
        "Return the values of a metric on a validation loader by column."
        prefix = self._find_prefix(dl_name)
        names = [m.name for m in self.metrics_of_loader(dl_name)]
        self.of_keys.add(m.name, value, names, prefix)
        values = self.of_keys.values(m.name, value, prefix)
        return {self._name_in_evaluation(m, dl_name, column): v for column, v in values.items()}

    def find_keys(self) -> list[str]:
        """Find the keys of metrics that return dicts, from a batch of each validation loader; return all columns.

        Callbacks call this function to look up an unknown column before the first batch of a fit.
        """
        for dl_name in first_validation_batches(self.learn):
            for m in self.metrics_of_loader(dl_name):
                if not measures_batches(m) or isinstance(m, EvalLoss):
                    continue
                trial = clone_metric(m, self.learn)
                trial.reset()
                try:
                    trial.accumulate(self.learn)
                    value = trial.value
                except Exception:
                    continue  # the first batch of the fit raises the error again
                self.name_values(m, value, dl_name)
        return self.list_evaluated()
