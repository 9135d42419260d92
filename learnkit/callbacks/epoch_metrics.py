# SPDX-License-Identifier: Apache-2.0
"""Measurements of an epoch in progress: values of a run, microbatches, training metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from learnkit.core.batch import to_detach, to_device
from learnkit.core.errors import MetricError
from learnkit.core.model import model_device
from learnkit.core.plain import to_storable
from learnkit.core.validation import warn_user
from learnkit.metrics.averages import AvgLoss, measures_batches
from learnkit.metrics.base import Mean, Metric
from learnkit.metrics.merge import gather_on_host, merge_states, shared_state

if TYPE_CHECKING:
    from learnkit.learner import Learner


class EvalLoss(AvgLoss):
    "Validation loss; the class distinguishes it from an `AvgLoss` given as a metric."


class KeptMicrobatch:
    "Predictions and targets of a microbatch, kept until the end of its batch for the metrics."

    def __init__(self, learn: Learner) -> None:
        self.learn = learn
        self.xb = learn.xb
        self.yb = learn.yb
        self.loss = learn.loss.detach()
        self.pred = to_detach(learn.pred, cpu=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.learn, name)


@dataclass
class EpochMetrics:
    "Measurements of one run; a validate() inside a fit keeps its own metrics and values."

    own: bool = False  # whether the run accumulates apart from the fit
    valid: dict[str, list[Metric]] = field(default_factory=dict)  # loss and metrics, by loader
    values: dict[str, Any] = field(default_factory=dict)  # value by column, of the current epoch
    logged: dict[str, Mean] = field(default_factory=dict)  # averages of `learn.log`, by column
    latest: set[str] = field(default_factory=set)  # logged names that keep the latest value only
    started: float = field(default_factory=perf_counter)
    n_before: int = 0  # number of steps of the fit before the epoch
    is_training: bool = False  # True from the start of an epoch's training to the end of the epoch
    n_valid: int = 0  # number of batches measured on the current loader
    measured: dict[str, Any] = field(default_factory=dict)  # value by column, latest evaluation
    # value by name of training metrics that have no column, of the last training
    uncolumned: dict[str, Any] = field(default_factory=dict)

    def collect(self) -> dict[str, Any]:
        return {**self.values, **{name: mean.value for name, mean in self.logged.items()}}

    def clear(self) -> None:
        self.values = {}
        self.logged = {}
        self.latest = set()

    def merge_logged(
        self,
        frames: list[dict[str, Any]],  # `state_dict` of each rank
    ) -> None:
        "Merge the logged values of all ranks; of latest values keep the first rank's."
        latest = {name for sd in frames for name in sd['latest']}
        for name in dict.fromkeys(name for sd in frames for name in sd['logged']):
            states = [sd['logged'][name] for sd in frames if name in sd['logged']]
            self.logged[name] = Mean()
            self.logged[name].merge(states[:1] if name in latest else states)

    def state_dict(self) -> dict[str, Any]:
        return {
            'values': to_storable(self.values),
            'measured': to_storable(self.measured),
            'latest': sorted(self.latest),
            'logged': {name: mean.state_dict() for name, mean in self.logged.items()},
        }

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        self.values = dict(sd['values'])
        self.measured = dict(sd['measured'])
        self.logged = {}
        self.latest = set(sd['latest'])
        for name, state in sd['logged'].items():
            mean = self.logged[name] = Mean()
            mean.load_state_dict(state)


def clone_metric(m: Metric, learn: Learner) -> Metric:
    "Return a copy of a metric with its own sums; the model and functions are shared."
    shared = (learn, learn.model, getattr(m, 'func', None))
    return deepcopy(m, {id(o): o for o in shared})


def value_of(m: Metric, n: int) -> Any:
    "Return the value of a metric on the host; None if it measures batches and got none."
    return as_number(m.value) if n or not measures_batches(m) else None


def as_number(value: Any) -> Any:
    "Convert a tensor or array of one element to a plain number on the host."
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    is_scalar = getattr(value, 'size', None) == 1 and hasattr(value, 'item')
    return value.item() if is_scalar else value


# -- several ranks ---------------------------------------------------------------------------------


def read_metrics(
    metrics: list[Metric],
    n: int,  # number of batches that the metrics have measured on this rank
    learn: Learner,
    extra: dict[str, Any] | None = None,  # further values to gather from every rank
) -> tuple[list[Any], list[dict[str, Any]]]:
    "Return the values of metrics over the batches of all ranks, and the gathered states."
    if learn.world.size == 1:
        return [value_of(m, n) for m in metrics], []
    local = [shared_state(m) if measures_batches(m) else value_of(m, n) for m in metrics]
    gathered = gather_on_host(learn.world, {**(extra or {}), 'n': n, 'metrics': local}, 'metrics')
    n_batches = sum(sd['n'] for sd in gathered)
    device = model_device(learn.model, learn.dls)
    values = []
    for i, m in enumerate(metrics):
        states = [sd['metrics'][i] for sd in gathered]
        values.append(_read_merged(m, states, n_batches, device))
    return values, gathered


def _read_merged(m: Metric, states: list[Any], n: int, device: torch.device) -> Any:
    "Merge the states of a metric and return its value; other values are the first rank's."
    if not measures_batches(m):
        return states[0]
    if not n:
        return None
    merge_states(m, states if device.type == 'cpu' else to_device(states, device))
    return value_of(m, n)


# -- checkpoints -----------------------------------------------------------------------------------


def metric_states(
    metrics: Iterable[Metric],  # training metrics
) -> list[dict[str, Any]]:
    "Return the name and the accumulated state of each metric; None for a state that cannot be saved."
    return [{'name': m.name, 'state': _metric_state(m)} for m in metrics]


def _metric_state(m: Metric) -> dict[str, Any] | None:
    try:
        return m.state_dict() if measures_batches(m) else {}
    except MetricError:
        return None


def load_metrics(
    metrics: Iterable[Metric],  # training metrics, after their reset
    states: list[dict[str, Any]],  # result of `metric_states`
) -> None:
    "Load the state of each metric, by name, and warn of metrics without a usable state."
    saved = {sd['name']: sd.get('state') for sd in states}
    for m in metrics:
        if not measures_batches(m):
            continue
        state = saved.get(m.name)
        if state is not None:
            m.load_state_dict(state)
        else:
            m.reset()
            warn_user(
                f'The checkpoint has no state of `{m.name}`: its training value counts the batches '
                'after the resume only.'
            )
