"""Merging of the metric states of all ranks.

A merged metric equals the metric of a single-process run over all batches. Kept predictions are in the order of that
run's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from itertools import zip_longest
from operator import add
from pickle import PicklingError
from typing import Any, TypeVar

import numpy as np
import torch
from fastcore.imports import noop
from torch import Tensor

from learnkit.core.batch import are_equal, map_tensors, to_device
from learnkit.core.errors import BatchError, MetricError
from learnkit.distributed.comm import Comm
from learnkit.metrics.state import (
    collect_accumulated,
    is_metric,
    is_torchmetrics,
    list_parts,
    restore_accumulated,
)

T = TypeVar('T')


class Accumulates:
    "Base class of objects with an accumulated state that can be checkpointed and merged over ranks."

    sum_reduced: tuple[str, ...] = ()  # attributes that are summed over ranks that train together

    def reset(self) -> None:
        "Clear the accumulated state."

    def state_dict(self) -> dict[str, Any]:
        "Return the state since `reset`; raise `MetricError` for attributes that are not plain values."
        return collect_accumulated(self)

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore a state of `state_dict`; raise `MetricError` for the state of another metric."
        self.reset()
        restore_accumulated(self, sd)

    def merge(
        self,
        states: list[dict[str, Any]],  # states of all ranks, in rank order
    ) -> None:
        """Replace the state by the merged states of all ranks.

        Attributes in `sum_reduced` are added: numbers, tensors and arrays; dicts by key; lists are concatenated. Inner
        metrics are merged by their own rules. Any other attribute must equal its value after `reset`, or `MetricError`
        is raised. An override gets the return values of `state_dict` as `states`."""
        _merge_sum_reduced(self, states)


def shared_state(o: Any) -> dict[str, Any]:
    "Return the state that a rank sends to the other ranks."
    if is_torchmetrics(o):
        return collect_accumulated(o)
    if _overrides_merge(o):
        return dict(o.state_dict() if hasattr(o, 'state_dict') else collect_accumulated(o))
    sum_reduced = getattr(o, 'sum_reduced', ())
    inner = _list_inner_metrics(o)
    return {
        **collect_accumulated(o, but={*sum_reduced, *inner}),
        **{f'{name}/': shared_state(metric) for name, metric in inner.items()},
        **{name: getattr(o, name) for name in sum_reduced},
    }


def merge_states(
    o: Any,  # metric, whose own state is replaced
    states: list[dict[str, Any]],  # return values of `shared_state` on each rank
) -> None:
    "Replace the state by the merged states of all ranks. Raises `MetricError` if no rule exists."
    if is_torchmetrics(o):
        _merge_torchmetrics(o, states)
    elif _overrides_merge(o):
        o.merge(states)
    else:
        _merge_sum_reduced(o, states)


def check_mergeable(metric: Any) -> None:
    """Raise `MetricError` for a metric without a merge rule, at the start of a run with several ranks.

    A class that overrides `reset` has its own state, and has to define its own merge rule."""
    if is_torchmetrics(metric):
        return
    for cls in type(metric).__mro__:
        if cls is Accumulates or cls is object:
            break
        if 'merge' in vars(cls) or 'sum_reduced' in vars(cls):
            for inner_metric in _list_inner_metrics(metric).values():
                check_mergeable(inner_metric)
            return
        if 'reset' in vars(cls):
            break
    name = type(metric).__name__
    raise MetricError(
        f'{name}: several processes train together, and it is not known how to merge what each of them has '
        f'accumulated. If attributes add up, list their names in the class: `class {name}: '
        "sum_reduced = ('total', 'n')`, or `()` for none. Otherwise define "
        '`merge(self, states)`, which sets the attributes from what `state_dict()` has returned in each.'
    )


def _overrides_merge(o: Any) -> bool:
    "Return True if an object's class defines its own merge rule."
    merge = getattr(type(o), 'merge', None)
    return merge is not None and merge is not Accumulates.merge


def _list_inner_metrics(o: Any) -> dict[str, Any]:
    "Return the metrics among the attributes of an object, by name."
    return {name: value for name, value in vars(o).items() if is_metric(value)}


def gather_on_host(
    world: Comm,
    value: Any,  # nested value, whose tensors are copied to the host
    what: str,  # name of the value in errors
) -> list[Any]:
    """Return the values of all ranks in rank order.

    Raises `BatchError` for a value that cannot be pickled."""
    if world.size == 1:
        return [value]
    try:
        return world.gather(map_tensors(value, lambda t: t.detach().cpu()), what)
    except (PicklingError, AttributeError, TypeError) as e:  # pickle raises each of these
        raise BatchError(
            f'The {what} cannot be sent to the other processes: {e}. Give tensors, arrays, numbers and '
            'strings in dicts, lists and tuples, or classes that an import finds by their name.'
        ) from e


# -- attributes ------------------------------------------------------------------------------------


def _merge_sum_reduced(o: Any, states: list[dict[str, Any]]) -> None:
    "Add the attributes in `sum_reduced`, merge inner metrics, and check that other attributes are unchanged."
    o.reset()
    initial = shared_state(o)
    sum_reduced = getattr(o, 'sum_reduced', ())
    for name in dict.fromkeys(name for sd in states for name in sd):
        values = [sd[name] for sd in states if name in sd]
        if name.endswith('/'):
            merge_states(vars(o)[name[:-1]], values)
        elif name in sum_reduced:
            setattr(o, name, _add_up(values, f'{type(o).__name__}.{name}'))
        elif name not in initial or not all(are_equal(v, initial[name]) for v in values):
            raise MetricError(
                f'{type(o).__name__}.{name} has changed since the metric was reset, and it is not known '
                'how to merge what several processes have in it. Name it in `sum_reduced`, a tuple in the '
                'class, if it adds up; or define `merge(self, states)`.'
            )


def _add_up(
    values: list[Any],  # values of the ranks, in rank order
    what: str,  # name of the attribute, for messages
) -> Any:
    "Add values, without None; dicts are added by key, and lists are concatenated."
    values = [v for v in values if v is not None]
    if not values:
        return None
    if any(isinstance(v, dict) for v in values):
        by_key: dict[Any, list[Any]] = {}
        for v in values:
            for k, number in (
                v.items() if isinstance(v, dict) else ()
            ):  # 0 on a rank without batches
                by_key.setdefault(k, []).append(number)
        return {k: _add_up(numbers, what) for k, numbers in by_key.items()}
    shapes = {tuple(v.shape) for v in values if isinstance(v, (Tensor, np.ndarray)) and v.ndim}
    if len(shapes) > 1:
        raise MetricError(
            f'{what} has other shapes in other processes, {sorted(shapes)}: is the number of classes '
            'not the same everywhere?'
        )
    try:
        return reduce(add, values)
    except TypeError as e:
        raise MetricError(f'{what} does not add up: {e}. Define `merge(self, states)`.') from e


def interleave(lists: Iterable[list[T]]) -> list[T]:
    """Interleave lists: the first entry of each, then the second of each, as rounds deal batches to ranks.

    >>> interleave([['a', 'c', 'e'], ['b', 'd']])
    ['a', 'b', 'c', 'd', 'e']
    """
    missing: Any = object()
    rows = zip_longest(*lists, fillvalue=missing)
    return [x for row in rows for x in row if x is not missing]


# -- torchmetrics ----------------------------------------------------------------------------------


def _merge_torchmetrics(o: Any, states: list[dict[str, Any]]) -> None:
    "Reduce each state by its `dist_reduce_fx`, without communication by torchmetrics."
    for path, m in list_parts(o).items():
        found = [sd[path] for sd in states]
        # ranks without batches are skipped: their initial zeros would change a minimum
        found = [sd for sd in found if sd['counts']['_update_count']] or found
        counts = [sd['counts']['_update_count'] for sd in found]
        for name, how in m._reductions.items():
            value = _reduce([sd['states'][name] for sd in found], counts, how)
            setattr(m, name, to_device(value, m.device))
        for name, value in found[0]['counts'].items():
            setattr(m, name, value)
        m._update_count = sum(counts)
        m._computed = None  # the cached value belongs to this rank's batches
        m.distributed_available_fn = noop  # the states are merged already


def _reduce(
    values: list[Any],  # values of a state on each rank
    counts: list[int],  # number of updates on each rank
    how: Callable[[Any], Any] | None,  # `dist_reduce_fx` of the state
) -> Any:
    "Reduce the values of one state; a mean is weighted by the number of updates."
    from torchmetrics.utilities import dim_zero_cat, dim_zero_mean

    if len(values) == 1:
        return values[0]
    if not isinstance(values[0], Tensor):
        flat = interleave(values)
        return flat if how is None or how is dim_zero_cat or not flat else how(flat)
    if how is dim_zero_cat and values[0].ndim:
        return torch.cat(values)
    stacked = torch.stack(values)
    if how is None:
        return stacked
    if how is not dim_zero_mean or not any(counts):
        return how(stacked)
    weights = torch.tensor(counts, dtype=torch.float64, device=stacked.device) / sum(counts)
    mean = (stacked.double() * weights.view(-1, *[1] * (stacked.ndim - 1))).sum(0)
    return mean.to(stacked.dtype) if stacked.is_floating_point() else mean.float()
