# SPDX-License-Identifier: Apache-2.0
"""Merging of the metric states of all ranks.

A merged metric equals the metric of a single-process run over all batches. Kept predictions are in the order of that
run's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import reduce
from itertools import zip_longest
from operator import add
from pickle import PicklingError
from typing import Any, TypeVar

import torch
from fastcore.imports import noop
from torch import Tensor

from learnkit.comm.ranks import Comm
from learnkit.core.batch import map_tensors, to_device
from learnkit.core.errors import BatchError, MetricError
from learnkit.metrics.state import (
    collect_accumulated,
    collect_torchmetrics,
    is_metric,
    is_torchmetrics,
    list_parts,
    restore_accumulated,
    set_states,
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

        Attributes in `sum_reduced` are added: numbers, tensors and arrays; lists are concatenated. Inner metrics are
        merged by their own rules. An override gets the return values of `state_dict` as `states`."""
        for name in self.sum_reduced:
            values = [sd[name] for sd in states if sd.get(name) is not None]
            if values:
                setattr(self, name, reduce(add, values))
        for name, metric in _list_inner_metrics(self).items():
            merge_states(metric, [sd[f'{name}/'] for sd in states])


def shared_state(o: Any) -> dict[str, Any]:
    "Return the state that a rank sends to the other ranks."
    if is_torchmetrics(o):
        return collect_torchmetrics(o)
    if merges_itself(o) or type(o).merge is not Accumulates.merge:
        return dict(o.state_dict())
    inner = _list_inner_metrics(o)
    return {
        **{f'{name}/': shared_state(metric) for name, metric in inner.items()},
        **{name: getattr(o, name) for name in o.sum_reduced},
    }


def merge_states(
    o: Any,  # metric, whose own state is replaced
    states: list[dict[str, Any]],  # return values of `shared_state` on each rank
) -> None:
    "Replace the state by the merged states of all ranks."
    if is_torchmetrics(o):
        _merge_torchmetrics(o, states)
    elif merges_itself(o):
        _merge_by_itself(o, states)
    else:
        o.merge(states)


def check_mergeable(metric: Any) -> None:
    """Raise `MetricError` for a metric without a merge rule, at the start of a run with several ranks.

    A class that overrides `reset` has its own state, and has to define its own merge rule."""
    if is_torchmetrics(metric) or merges_itself(metric):
        return
    rules = ('merge', 'sum_reduced')
    owner = next(c for c in type(metric).__mro__ if {*rules, 'reset'}.intersection(vars(c)))
    if owner is not Accumulates and any(rule in vars(owner) for rule in rules):
        for inner_metric in _list_inner_metrics(metric).values():
            check_mergeable(inner_metric)
        return
    name = type(metric).__name__
    raise MetricError(
        f'{name}: several processes train together, and it is not known how to merge what each of them has '
        f'accumulated. If attributes add up, list their names in the class: `class {name}: '
        "sum_reduced = ('total', 'n')`. Otherwise define `merge(self, states)`."
    )


def _list_inner_metrics(o: Any) -> dict[str, Any]:
    "Return the metrics among the attributes of an object, by name."
    return {name: value for name, value in vars(o).items() if is_metric(value)}


def gather_on_host(
    world: Comm,
    value: Any,  # nested value, whose tensors are copied to the host
    what: str,  # name of the value in errors
) -> list[Any]:
    """Return the values of all ranks in rank order, one for each shard of the data.

    Raises `BatchError` for a value that cannot be pickled."""
    if world.size == 1:
        return [value]
    try:
        gathered = world.gather(map_tensors(value, lambda t: t.detach().cpu()), what)
    except (PicklingError, AttributeError, TypeError) as e:  # pickle raises each of these
        raise BatchError(
            f'The {what} cannot be sent to the other processes: {e}. Pass tensors, arrays, numbers and '
            'strings in dicts, lists and tuples, or classes that an import finds by their name.'
        ) from e
    return gathered[:: world.copies]


def interleave(lists: Iterable[list[T]]) -> list[T]:
    """Interleave lists: the first entry of each, then the second of each, as rounds deal batches to ranks.

    >>> interleave([['a', 'c', 'e'], ['b', 'd']])
    ['a', 'b', 'c', 'd', 'e']
    """
    missing: Any = object()
    rows = zip_longest(*lists, fillvalue=missing)
    return [x for row in rows for x in row if x is not missing]


# -- torcheval -------------------------------------------------------------------------------------


def merges_itself(o: Any) -> bool:
    "Return True for a metric that merges others of its class into itself, as those of torcheval."
    return all(hasattr(o, name) for name in ('merge_state', 'state_dict', 'load_state_dict'))


def _merge_by_itself(o: Any, states: list[dict[str, Any]]) -> None:
    "Replace a metric's state by the merged states of all ranks."
    ranks = [deepcopy(o) for _ in states]
    for rank, state in zip(ranks, states, strict=True):
        rank.load_state_dict(state)
        rank.to(o.device)
    o.load_state_dict(ranks[0].state_dict())
    o.merge_state(ranks[1:])
    # kept in lists, values of batches are in the order of one process
    names = [name for name, value in states[0].items() if isinstance(value, list)]
    kept = {name: interleave(state[name] for state in states) for name in names}
    o.load_state_dict({**o.state_dict(), **kept})
    o.to(o.device)


# -- torchmetrics ----------------------------------------------------------------------------------


def _merge_torchmetrics(o: Any, states: list[dict[str, Any]]) -> None:
    "Reduce each state by its `dist_reduce_fx`, without communication by torchmetrics."
    for path, m in list_parts(o).items():
        found = [sd[path] for sd in states]
        # ranks without batches are skipped: their initial zeros would change a minimum
        found = [sd for sd in found if sd['n_updates']] or found
        merged = {
            name: to_device(_reduce([sd['states'][name] for sd in found], how), m.device)
            for name, how in m._reductions.items()
        }
        set_states(m, {'states': merged, 'n_updates': sum(sd['n_updates'] for sd in found)})
        m.distributed_available_fn = noop  # the states are merged already


def _reduce(
    values: list[Any],  # values of a state on each rank
    how: Callable[[Any], Any] | None,  # `dist_reduce_fx` of the state
) -> Any:
    "Reduce the values of one state as torchmetrics does."
    from torchmetrics.utilities import dim_zero_cat

    if len(values) == 1:
        return values[0]
    if not isinstance(values[0], Tensor):
        return interleave(values)
    if how is dim_zero_cat and values[0].ndim:
        return torch.cat(values)
    return torch.stack(values) if how is None else how(torch.stack(values))
