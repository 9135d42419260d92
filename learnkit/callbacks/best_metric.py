# SPDX-License-Identifier: Apache-2.0
"""Metrics at the best value of another metric: the test score of a model chosen by validation."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import filter as fnfilter
from typing import Any

from typing_extensions import override

from learnkit.callbacks.nan_guard import print_line
from learnkit.callbacks.recorder import records
from learnkit.callbacks.tracking import Comparison, TrackerCallback
from learnkit.core.errors import MetricError, did_you_mean
from learnkit.core.time import Timestamp
from learnkit.metrics.direction import as_comparison


class BestMetric(TrackerCallback):
    """Record other metrics at the best value of one: the test accuracy at the best validation loss.

    After each evaluation that measured `source`, the columns `best/<source>` and `best/<target>`
    hold the values of the evaluation with the best `source` so far, in the history and in the
    loggers; NaN is never the best. `at_best` holds these values as a dict, and `best_at` the time
    (`learn.time`) of that evaluation; the end of the fit prints them. A target that the evaluation
    did not measure is None.

    `MetricProperties` defines the direction of `source`. Raises `OptionError` for a metric
    without a known direction, and `MetricError` before training for an unknown column.
    Checkpointed: `best`, `at_best`, `best_at`.

    >>> import torch
    >>> from learnkit.data.dataloaders import DataLoaders
    >>> from learnkit.testing import synth_learner
    >>> x = torch.randn(64, 1)
    >>> dls = DataLoaders.from_tensors((x, 2*x), {'valid': (x, 2*x), 'test': (x, 2*x + 1)}, bs=16)
    >>> learn = synth_learner(dls=dls, lr=0.05, cbs=BestMetric('valid_loss', 'test/*'))
    >>> with learn.no_bar(), learn.no_logging(): learn.fit(5)
    >>> best = min(learn.history, key=lambda row: row['valid_loss'])
    >>> learn.history[-1]['best/test/loss'] == best['test/loss']
    True
    """

    metric_names = {
        'best/{column}': 'what a column of evaluation was when the monitored one was best'
    }
    monitor: str
    targets: tuple[str, ...]
    at_best: dict[str, float | None]
    best_at: Timestamp | None

    def __init__(
        self,
        source: str = 'valid_loss',  # column that decides which evaluation is best
        targets: str | Iterable[str] = '*',  # columns of evaluations, or patterns
        comp: Comparison | None = None,  # comp(new, best), 'less', 'greater', or `MetricProperties`
    ) -> None:
        super().__init__(source, as_comparison(comp, source))
        self.targets = (targets,) if isinstance(targets, str) else tuple(targets)
        self.at_best = {}
        self.best_at = None

    @override
    def before_fit(self) -> None:
        "Find the columns."
        super().before_fit()
        self._match_columns()
        self.at_best = {}
        self.best_at = None

    def _match_columns(self) -> tuple[str, ...]:
        "Return the columns that match the targets, the source first."
        recorder = records(self)
        names = recorder.evaluated_columns()
        if not all(fnfilter(names, name) for name in (self.monitor, *self.targets)):
            names = recorder.columns.find_keys()
        columns: list[str] = []
        for name in (self.monitor, *self.targets):
            matches = fnfilter(names, name)
            if not matches:
                raise MetricError(
                    f'BestMetric({name!r}): no evaluation logs that, but {", ".join(names)}.'
                    f'{did_you_mean(name, names)}'
                )
            columns += matches
        return tuple(dict.fromkeys(columns))

    @override
    def after_epoch(self) -> None:
        "Do nothing: the values are compared after evaluations, before the epoch's row."

    def after_eval(self) -> None:
        "Compare the value, and record the metrics at the best value."
        measured = records(self).measured
        value = self._as_number(measured.get(self.monitor))
        self.new_best = False
        if value is None:
            return
        self._compare(value)
        if self.new_best:
            self.best_at = self.learn.time.replace(dur=None)
            columns = self._match_columns()  # a metric that returns a dict may have added some
            self.at_best = {name: self._as_number(measured.get(name)) for name in columns}
        for name, at_best in self.at_best.items():
            if at_best is not None:
                # replaces this epoch's earlier value, without the prefix of a loader
                self.learn.parts.callbacks.notify('receive_log', f'best/{name}', at_best, None)

    def after_fit(self) -> None:
        "Print the best values."
        if self.best_at is None:
            return
        values = ', '.join(
            f'{name} {value:.6g}' for name, value in self.at_best.items() if value is not None
        )
        print_line(self, f'Best {self.monitor} in epoch {self.best_at.ep}: {values}')

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the best value, and the metrics at the best value."
        at = None if self.best_at is None else self.best_at.state_dict()
        return {**super().state_dict(), 'at_best': dict(self.at_best), 'best_at': at}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the best values."
        super().load_state_dict(sd)
        self.at_best = dict(sd['at_best'])
        self.best_at = None if sd['best_at'] is None else Timestamp.from_state_dict(sd['best_at'])
