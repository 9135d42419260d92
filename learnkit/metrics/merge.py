"""Merging of the metric states of all ranks.

A merged metric equals the metric of a single-process run over all batches. Kept predictions are in the order of that
run's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from pickle import PicklingError
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from learnkit.core.batch import map_tensors
from learnkit.core.comm import Comm
from learnkit.core.errors import BatchError, MetricError
from learnkit.metrics.state import Pairs, accumulated, is_metric, is_torchmetrics, restore_state

__all__ = [
    'Accumulates',
    'check_mergeable',
    'gather_on_host',
    'in_turn',
    'merge_states',
    'merged_pairs',
    'shared_state',
    'unsynced',
]

T = TypeVar('T')


class Accumulates:
    "Base class of objects with an accumulated state that can be checkpointed and merged over ranks."

    summed: tuple[str, ...] = ()  # attributes that are summed over ranks that train together

    def reset(self) -> None:
        "Clear the accumulated state."

    def state_dict(self) -> dict[str, Any]:
        "Return the state since `reset`; raise `MetricError` for attributes that are not plain values."
        return accumulated(self)

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore a state of `state_dict`; raise `MetricError` for the state of another metric."
        self.reset()
        restore_state(self, sd)

    def merge(
        self,
        states: list[dict[str, Any]],  # states of all ranks, in rank order
    ) -> None:
        """Replace the state by the merged states of all ranks.

        Attributes in `summed` are added: numbers, tensors and arrays; dicts by key; lists are concatenated. Inner
        metrics are merged by their own rules. Any other attribute must equal its value after `reset`, or `MetricError`
        is raised. An override gets the return values of `state_dict` as `states`."""
        _merge_summed(self, states)


def shared_state(o: Any) -> dict[str, Any]:
    "Return the state that a rank sends to the other ranks."
    if is_torchmetrics(o):
        return accumulated(o)
    if _merges_itself(o):
        return dict(o.state_dict() if hasattr(o, 'state_dict') else accumulated(o))
    summed, parts = getattr(o, 'summed', ()), _parts(o)
    return {
        **accumulated(o, but={*summed, *parts}),
        **{f'{k}/': shared_state(part) for k, part in parts.items()},
        **{name: getattr(o, name) for name in summed},
    }


def merge_states(
    o: Any,  # metric, whose own state is replaced
    states: list[dict[str, Any]],  # return values of `shared_state` on each rank
) -> None:
    "Replace the state by the merged states of all ranks. Raises `MetricError` if no rule exists."
    if is_torchmetrics(o):
        _merge_torchmetrics(o, states)
    elif _merges_itself(o):
        o.merge(states)
    else:
        _merge_summed(o, states)


def check_mergeable(metric: Any) -> None:
    """Raise `MetricError` for a metric without a merge rule, at the start of a run with several ranks.

    A class that overrides `reset` has its own state, and has to define its own merge rule."""
    if is_torchmetrics(metric):
        return
    for cls in type(metric).__mro__:
        if cls is Accumulates or cls is object:
            break
        if 'merge' in vars(cls) or 'summed' in vars(cls):
            for part in _parts(metric).values():
                check_mergeable(part)
            return
        if 'reset' in vars(cls):
            break
    name = type(metric).__name__
    raise MetricError(
        f'{name}: several processes train together, and it is not known how what each of them has '
        f'accumulated makes the metric of all. Where it adds up, say so in the class: `class {name}: '
        "summed = ('total', 'n')`, the names of those attributes, `()` for none. Or else define "
        '`merge(self, states)`, which sets the attributes from what `state_dict()` has returned in each.'
    )


def _merges_itself(o: Any) -> bool:
    own = getattr(type(o), 'merge', None)
    return own is not None and own is not Accumulates.merge


def _parts(o: Any) -> dict[str, Any]:
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
    except (PicklingError, AttributeError, TypeError) as e:  # as pickle raises them
        raise BatchError(
            f'The {what} cannot be sent to the other processes: {e}. Give tensors, arrays, numbers and '
            'strings in dicts, lists and tuples, or classes that an import finds by their name.'
        ) from e


# -- attributes ------------------------------------------------------------------------------------


def _merge_summed(o: Any, states: list[dict[str, Any]]) -> None:
    o.reset()
    fresh, summed = shared_state(o), getattr(o, 'summed', ())
    for name in dict.fromkeys(name for sd in states for name in sd):
        values = [sd[name] for sd in states if name in sd]
        if name.endswith('/'):
            merge_states(vars(o)[name[:-1]], values)
        elif name in summed:
            setattr(o, name, _added(values, f'{type(o).__name__}.{name}'))
        elif name not in fresh or not all(_same(v, fresh[name]) for v in values):
            raise MetricError(
                f'{type(o).__name__}.{name} has changed since the metric was reset, and it is not known '
                'how to merge what several processes have in it. Name it in `summed`, a tuple in the '
                'class, where it adds up; or define `merge(self, states)`.'
            )


def _added(values: list[Any], what: str) -> Any:
    "Add up, from the first to the last; None counts for nothing."
    there = [v for v in values if v is not None]
    if not there:
        return None
    if any(isinstance(v, dict) for v in there):  # a process without batches still has the number 0
        there = [v for v in there if isinstance(v, dict) or v != 0]
    if all(isinstance(v, dict) for v in there):
        return {
            k: _added([v[k] for v in there if k in v], what)
            for k in dict.fromkeys(k for v in there for k in v)
        }
    if all(isinstance(v, list) for v in there):
        return [x for v in there for x in v]
    shapes = {tuple(v.shape) for v in there if isinstance(v, (Tensor, np.ndarray)) and v.ndim}
    if len(shapes) > 1:
        raise MetricError(
            f'{what} has other shapes in other processes, {sorted(shapes)}: is the number of classes '
            'not the same everywhere?'
        )
    if not all(isinstance(v, (int, float, complex, Tensor, np.ndarray, np.generic)) for v in there):
        raise MetricError(
            f'{what}: numbers, tensors, arrays, lists and dicts of them add up, not '
            f'{" and ".join(sorted({type(v).__name__ for v in there}))}. Define `merge(self, states)`.'
        )
    total = there[0]
    for v in there[1:]:
        total = total + v
    return total


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return (
            isinstance(a, Tensor)
            and isinstance(b, Tensor)
            and a.shape == b.shape
            and torch.equal(a.cpu(), b.cpu())
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    return bool(a == b or (a != a and b != b))


# -- predictions that wait -------------------------------------------------------------------------


def in_turn(lists: Iterable[list[T]]) -> list[T]:
    """Return the first entry of each list, then the second of each: the batches of processes in the data's order.

    >>> in_turn([['a', 'c', 'e'], ['b', 'd']])
    ['a', 'b', 'c', 'd', 'e']
    """
    none: Any = object()
    return [x for row in zip_longest(*lists, fillvalue=none) for x in row if x is not none]


def merged_pairs(
    states: Iterable[Mapping[str, Any]],  # each: `waiting` pairs and the `lengths` of their batches
) -> tuple[Pairs, list[tuple[int, int]]]:
    "Return the batches of all processes in the order of the data, and their lengths."
    pairs = in_turn([_cut(sd['waiting'], sd['lengths']) for sd in states])
    return pairs, [(len(pred), len(targ)) for pred, targ in pairs]


def _cut(pairs: Pairs, lengths: list[tuple[int, int]]) -> Pairs:
    "Undo the joining of batches."
    if len(pairs) == len(lengths) or not pairs:
        return pairs
    preds, targs = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    n_preds, n_targs = zip(*lengths, strict=True)
    return list(zip(preds.split(n_preds), targs.split(n_targs), strict=True))


# -- torchmetrics ----------------------------------------------------------------------------------


def _merge_torchmetrics(o: Any, states: list[dict[str, Any]]) -> None:
    "Reduce each state by its `dist_reduce_fx`, without communication by torchmetrics."
    for path, m in o.named_modules():
        if '_defaults' not in vars(m):
            continue
        found = [sd[path] for sd in states if path in sd]
        # ranks without batches are skipped: their initial zeros would change a minimum
        found = [sd for sd in found if sd['counts'].get('_update_count')] or found
        counts = [sd['counts'].get('_update_count', 0) for sd in found]
        for name, how in m._reductions.items():
            value = _reduced([sd['states'][name] for sd in found], counts, how)
            setattr(m, name, _to(value, m.device))
        for name, value in found[0]['counts'].items():
            setattr(m, name, value)
        if '_update_count' in found[0]['counts']:
            m._update_count = sum(counts)
        m._computed = None  # the cached value belongs to this rank's batches


def _reduced(values: list[Any], counts: list[int], how: Callable[[Any], Any] | None) -> Any:
    from torchmetrics.utilities import dim_zero_cat, dim_zero_mean

    if len(values) == 1:
        return values[0]
    if not isinstance(values[0], Tensor):
        flat = in_turn(values)
        return flat if how is None or how is dim_zero_cat or not flat else how(flat)
    if how is dim_zero_cat and values[0].ndim:
        return torch.cat(values)
    stacked = torch.stack(values)
    if how is None:
        return stacked
    if how is not dim_zero_mean or not any(counts):
        return how(stacked)
    # a mean over its updates
    shares = torch.tensor(counts, dtype=torch.float64, device=stacked.device) / sum(counts)
    mean = (stacked.double() * shares.view(-1, *[1] * (stacked.ndim - 1))).sum(0)
    return mean.to(stacked.dtype) if stacked.is_floating_point() else mean.float()


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return type(value)(_to(v, device) for v in value) if isinstance(value, (list, tuple)) else value


@contextmanager
def unsynced(metrics: Iterable[Any]) -> Iterator[None]:
    "Disable torchmetrics' synchronization within the block, because states are merged already."
    inside = [
        m
        for metric in metrics
        for o in _torchmetrics_in(metric)
        for m in o.modules()
        if 'distributed_available_fn' in vars(m)
    ]
    before = [m.distributed_available_fn for m in inside]
    for m in inside:
        m.distributed_available_fn = _alone
    try:
        yield
    finally:
        for m, fn in zip(inside, before, strict=True):
            m.distributed_available_fn = fn


def _torchmetrics_in(o: Any) -> list[Any]:
    return (
        [o]
        if is_torchmetrics(o)
        else [found for part in _parts(o).values() for found in _torchmetrics_in(part)]
    )


def _alone() -> bool:
    return False
