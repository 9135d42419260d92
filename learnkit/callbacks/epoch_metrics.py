"""What the Recorder has measured in an epoch that is still open: in a run, a microbatch, a training metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch

from learnkit.core.batch import to_detach, to_device
from learnkit.core.errors import MetricError
from learnkit.core.model import model_device
from learnkit.core.validation import warn_user
from learnkit.metrics.averages import RESERVED, measures_batches
from learnkit.metrics.base import Mean, Metric, flattened
from learnkit.metrics.merge import gather_on_host, merge_states, shared_state, unsynced
from learnkit.metrics.state import storable

__all__ = [
    'EpochMetrics',
    'MetricColumns',
    'Microbatch',
    'clone_metric',
    'value_of',
    'read_metrics',
    'has_local_samples',
    'metric_states',
    'load_metrics',
    'packed_rows',
    'unpacked_rows',
]


class Microbatch:
    "A microbatch as metrics see a Learner: its predictions and targets are kept until its batch is through."

    def __init__(self, learn: Any) -> None:
        self.learn, self.xb, self.yb, self.loss = learn, learn.xb, learn.yb, learn.loss
        self.pred = to_detach(learn.pred, cpu=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.learn, name)


@dataclass
class EpochMetrics:
    "What is measured in one run: a validate() inside a fit has metrics and values of its own."

    own: bool = False  # whether sums are its own, apart from those of the fit
    valid: dict[str, list[Metric]] = field(default_factory=dict)  # loss and metrics, by loader
    values: dict[str, Any] = field(default_factory=dict)  # column: value, of the current epoch
    logged: dict[str, Mean] = field(default_factory=dict)  # column: what `learn.log` averages
    latest: set[str] = field(default_factory=set)  # those of which the latest value counts alone
    started: float = field(default_factory=perf_counter)
    n_valid: int = 0  # batches measured on the current loader
    measured: dict[str, Any] = field(default_factory=dict)  # value by column, latest evaluation

    def collect(self) -> dict[str, Any]:
        return {**self.values, **{name: mean.value for name, mean in self.logged.items()}}

    def clear(self) -> None:
        self.values, self.logged, self.latest = {}, {}, set()

    def merge_logged(
        self,
        frames: list[dict[str, Any]],  # from `state_dict` in each process
    ) -> None:
        "Take over what any process has logged: means are those of all, and of latest values the first process's."
        latest = {name for sd in frames for name in sd['latest']}
        for name in dict.fromkeys(name for sd in frames for name in sd['logged']):
            states = [sd['logged'][name] for sd in frames if name in sd['logged']]
            self.logged[name] = Mean()
            self.logged[name].merge(states[:1] if name in latest else states)

    def state_dict(self) -> dict[str, Any]:
        return {
            'values': storable(self.values),
            'measured': storable(self.measured),
            'latest': sorted(self.latest),
            'logged': {name: mean.state_dict() for name, mean in self.logged.items()},
        }

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        self.values, self.measured, self.logged = dict(sd['values']), dict(sd['measured']), {}
        self.latest = set(sd.get('latest', ()))
        for name, state in sd['logged'].items():
            mean = self.logged[name] = Mean()
            mean.load_state_dict(state)


class MetricColumns:
    """Name the columns of metrics whose value is a dict, once a value of each is known.

    A key is a column, unless another metric has that name, or another key: then it is `<metric>_<key>`. Who comes first
    keeps the name. Checkpointed, as part of the Recorder.

    >>> columns = MetricColumns()
    >>> columns.note('iou', {'cat': .5, 'loss': 1.}, ['iou', 'cat'])
    >>> columns.of('iou'), columns.of('cat')
    (['iou_cat', 'iou_loss'], ['cat'])
    """

    def __init__(self, known: Mapping[str, Mapping[str, str]] | None = None) -> None:
        # metric: {key: column}
        self.known = {name: dict(columns) for name, columns in (known or {}).items()}

    def of(self, name: str, space: str = '') -> list[str]:
        "Return the columns of a metric; of a metric without keys, as far as is known, its name."
        return list(self.known.get(space + name, {name: name}).values())

    def note(
        self,
        name: str,  # the metric
        value: Any,  # its value on some batches
        names: Iterable[str],  # all metrics that share the columns
        space: str = '',  # apart from other metrics of the same names: `night/`
    ) -> None:
        "Learn the keys of a metric from a value."
        if not isinstance(value, Mapping):
            return
        columns = self.known.setdefault(space + name, {})
        plain = {n for n in names if n != name and space + n not in self.known}
        named = {c for n in names if n != name for c in self.known.get(space + n, {}).values()}
        taken = {*RESERVED, 'loss'} | plain | named | set(columns.values())
        for key in flattened(value):
            if key in columns:
                continue
            column, i = key if key not in taken else f'{name}_{key}', 1
            while column in taken:
                column, i = f'{name}_{key}_{i + 1}', i + 1
            columns[key] = column
            taken.add(column)

    def values(self, name: str, value: Any, space: str = '') -> dict[str, Any]:
        "Return the values of a metric by column, on the host."
        columns = self.known.get(space + name)
        if columns is None:
            return {name: value}
        found = flattened(value) if isinstance(value, Mapping) else {}
        return {column: _number(found.get(key)) for key, column in columns.items()}


def clone_metric(m: Metric, learn: Any) -> Metric:
    "Return a metric like `m` whose sums are its own; what it computes with is shared."
    shared = (learn, learn.model, getattr(m, 'func', None))
    return deepcopy(m, {id(o): o for o in shared})


def value_of(m: Metric, n: int) -> Any:
    "Read a metric on the host; None when it was to measure batches and there was none."
    return _number(m.value) if n or not measures_batches(m) else None


def _number(value: Any) -> Any:
    "Bring a metric's value to the host as a plain number where it is one."
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return value.item() if getattr(value, 'size', None) == 1 and hasattr(value, 'item') else value


# -- of several processes --------------------------------------------------------------------------


def read_metrics(
    metrics: list[Metric],
    n: int,  # batches that they have measured here
    learn: Any,
    more: dict[str, Any] | None = None,  # what this process tells the others besides
) -> tuple[list[Any], list[dict[str, Any]]]:
    "Return the values of metrics on the host, of the batches of all processes; and what each process told."
    if learn.world.size == 1:
        return [value_of(m, n) for m in metrics], []
    mine = [shared_state(m) if measures_batches(m) else value_of(m, n) for m in metrics]
    told = gather_on_host(learn.world, {**(more or {}), 'n': n, 'metrics': mine}, 'metrics')
    n, device = sum(sd['n'] for sd in told), model_device(learn.model, learn.dls)
    return [
        _read(m, [sd['metrics'][i] for sd in told], n, device) for i, m in enumerate(metrics)
    ], told


def has_local_samples(learn: Any) -> bool:
    "Tell whether the batch at hand has a sample of this process: one may be there only to keep it in step with others."
    return learn.strategy.team is None or learn.strategy.team.has_samples


def _read(m: Metric, states: list[Any], n: int, device: torch.device) -> Any:
    "Merge a metric and read it; of a value from elsewhere, take the first process's."
    if not measures_batches(m):
        return states[0]
    if not n:
        return None
    merge_states(m, states if device.type == 'cpu' else to_device(states, device))
    with unsynced([m]):
        return value_of(m, n)


# -- for checkpoints -------------------------------------------------------------------------------


def metric_states(
    metrics: Iterable[Metric],  # of the training batches
) -> list[dict[str, Any]]:
    "Return what each metric has accumulated; of one that cannot be saved, why."
    return [{'name': m.name, 'kind': type(m).__name__, **_state(m)} for m in metrics]


def _state(m: Metric) -> dict[str, Any]:
    if not measures_batches(m):
        return {'state': {}}
    try:
        return {'state': m.state_dict()}
    except MetricError as e:
        return {'why': str(e)}


def load_metrics(
    metrics: Iterable[Metric],  # of the training batches, after their reset
    states: list[dict[str, Any]],  # from `metric_states`
) -> None:
    "Let each metric go on from its state, by name; those that cannot are named in a warning."
    left, anew = list(states), []
    for m in metrics:
        found = next((s for s in left if s['name'] == m.name), None)
        if found is not None:
            left.remove(found)
        if why := _load(m, found):
            anew.append(f'`{m.name}` ({why})')
    if anew:
        warn_user(
            f'{", ".join(anew)}: {"their" if len(anew) > 1 else "its"} training value of this epoch counts the '
            'batches after the resume only.'
        )


def _load(m: Metric, saved: dict[str, Any] | None) -> str:
    "Let a metric go on, or say why it cannot."
    if not measures_batches(m):
        return ''
    if saved is None:
        return 'the checkpoint has no metric of this name'
    if 'why' in saved:
        return f'it was not saved: {saved["why"]}'
    if saved['kind'] != type(m).__name__:
        return f'it was a {saved["kind"]}'
    try:
        m.load_state_dict(saved['state'])
    except MetricError as e:
        m.reset()
        return str(e)
    return ''


def packed_rows(rows: Iterable[Iterable[Any]]) -> Any:
    "Return rows of numbers as one float64 tensor, others as lists."
    lists = [list(row) for row in rows]
    if len({len(row) for row in lists}) == 1 and all(
        type(v) is float for row in lists for v in row
    ):
        return torch.from_numpy(np.array(lists))
    return [[storable(v) for v in row] for row in lists]


def unpacked_rows(rows: Any) -> list[list[Any]]:
    "Undo `packed_rows`."
    return rows.tolist() if isinstance(rows, torch.Tensor) else [list(row) for row in rows]
