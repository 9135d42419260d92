"""State of a metric since its reset as plain values, for checkpoints within an epoch.

The state is collected from attributes, so that a metric needs no code for its state."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learnkit.core.errors import MetricError
from learnkit.core.plain import ATOMS, clone_view, map_plain

TOOLS = (torch.device, torch.dtype, Enum, PurePath)  # types that are not state, like callables


def collect_accumulated(
    o: Any,
    but: Collection[str] = (),  # attributes to leave out
) -> dict[str, Any]:
    """Return the accumulated state of an object, as plain values by attribute name.

    The state is all attributes that are tensors, numbers, strings, None, and lists, tuples and dicts of these, and the
    states of inner metrics of learnkit or torchmetrics (under `name/`). Attributes named like a constructor argument
    are configuration and are excluded, and so are callables. Raises `MetricError` for any other attribute.

    >>> class Best:
    ...     def __init__(self, k): self.k, self.seen = k, [3., 5.]
    >>> collect_accumulated(Best(k=2))
    {'seen': [3.0, 5.0]}
    """
    if is_torchmetrics(o):
        return _collect_torchmetrics(o)
    options = _list_options(type(o))
    state: dict[str, Any] = {}
    for name, value in vars(o).items():
        if name in but or name.startswith('__'):  # fastcore's `store_attr` keeps a list of options
            continue
        if is_metric(value):
            own = _has_own_state(value)
            state[f'{name}/'] = value.state_dict() if own else collect_accumulated(value)
            continue
        is_option = name.lstrip('_') in options
        if not (is_option or isinstance(value, TOOLS) or callable(value)):
            state[name] = _make_plain(value, f'its attribute `{name}`')
    return state


def restore_accumulated(
    o: Any,  # object after its reset
    sd: Mapping[str, Any],  # return value of `collect_accumulated`, not changed
) -> None:
    "Restore an accumulated state. Raises `MetricError` for the state of another object."
    if is_torchmetrics(o):
        return _restore_torchmetrics(o, sd)
    for name, value in sd.items():
        if not name.endswith('/'):
            setattr(o, name, _copy(value))
            continue
        metric = vars(o).get(name[:-1])
        if not is_metric(metric):
            raise MetricError(
                f'{type(o).__name__} has no metric `{name[:-1]}` to which its state could be loaded.'
            )
        load = (
            metric.load_state_dict
            if _has_own_state(metric)
            else partial(restore_accumulated, metric)
        )
        load(value)


def _has_own_state(metric: Any) -> bool:
    "Return True for a metric whose own methods collect and restore its state."
    return hasattr(metric, 'state_dict') and not is_torchmetrics(metric)


def is_metric(o: Any) -> bool:
    "Return True for a metric of learnkit, a mean, or an object like a torchmetrics metric."
    if isinstance(o, type) or not hasattr(o, 'reset'):
        return False
    return (
        hasattr(o, 'accumulate')
        or hasattr(o, 'merge')
        or (hasattr(o, 'update') and hasattr(o, 'compute'))
    )


def _list_options(cls: type) -> set[str]:
    "Return the names of all constructor arguments, except for fields of dataclasses, which may be state."
    names = {'on'}
    for c in cls.__mro__[:-1]:
        if '__init__' in vars(c) and '__dataclass_fields__' not in vars(c):
            with suppress(TypeError, ValueError):
                names |= set(inspect.signature(vars(c)['__init__']).parameters)
    return {name.lstrip('_') for name in names}


# -- torchmetrics ----------------------------------------------------------------------------------


def is_torchmetrics(o: Any) -> bool:
    "Return True for a torchmetrics object or collection."
    return isinstance(o, torch.nn.Module) and hasattr(o, 'metric_state')


def _collect_torchmetrics(o: Any) -> dict[str, Any]:
    "Return the states and counters of a torchmetrics object and the metrics in it, by path."
    for m in o.modules():
        if hasattr(m, 'compute_groups'):
            m.values(copy_state=False)  # copies the shared state of a compute group to its members
    return {
        path: {'states': _make_plain(m.metric_state, 'its state'), 'counts': _list_counts(m)}
        for path, m in list_parts(o).items()
    }


def list_parts(o: Any) -> dict[str, Any]:
    "Return a torchmetrics object and the metrics in it, by path."
    return {path: m for path, m in o.named_modules() if hasattr(m, 'add_state')}


def _list_counts(m: Any) -> dict[str, Any]:
    "Return the numbers among a torchmetrics object's attributes that are not options, by name."
    skipped = {'computed', 'forward_cache', *m.metric_state, *_list_options(type(m))}
    numbers = {k: v for k, v in vars(m).items() if type(v) in (int, float)}
    return {k: v for k, v in numbers.items() if k.lstrip('_') not in skipped}


def _restore_torchmetrics(o: Any, sd: Mapping[str, Any]) -> None:
    "Restore the states and counters of a torchmetrics object and the metrics in it."
    metrics = list_parts(o)
    if set(metrics) != set(sd) or not all(
        _fits(m, sd[path]['states']) for path, m in metrics.items()
    ):
        raise MetricError(
            f'The state does not fit this {type(o).__name__}: other metrics, or other sizes.'
        )
    for path, m in metrics.items():
        for k, v in sd[path]['states'].items():
            setattr(m, k, _copy(v, m.device))
        for k, v in sd[path]['counts'].items():
            setattr(m, k, v)
        m._computed = None  # the cached value belongs to other batches


def _fits(m: Any, states: Mapping[str, Any]) -> bool:
    "Return True if states have the names, types and sizes of a torchmetrics object's states."
    current = m.metric_state
    return set(current) == set(states) and all(
        type(v) is type(states[k])
        and (not isinstance(v, Tensor) or v.numel() in (1, states[k].numel()))
        for k, v in current.items()
    )


# -- plain values ----------------------------------------------------------------------------------


def _make_plain(value: Any, what: str) -> Any:
    """Copy containers, but not tensors, except for views of a larger storage.

    Raises `MetricError` for a value of another type; `what` names it in the message."""
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in ATOMS:
        return value
    if isinstance(value, Tensor):
        return clone_view(value)
    if type(value) in (list, tuple):
        return type(value)(_make_plain(v, what) for v in value)
    if type(value) is dict and all(type(k) in ATOMS for k in value):
        return {k: _make_plain(v, what) for k, v in value.items()}
    raise MetricError(f'{what} holds a {type(value).__name__}')


def _copy(value: Any, device: Any = None) -> Any:
    "Copy a nested value and its tensors, to a device if given."
    return map_plain(
        value, lambda v, _: v.detach().to(device, copy=True) if isinstance(v, Tensor) else v
    )
