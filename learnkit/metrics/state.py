# SPDX-License-Identifier: Apache-2.0
"""State of a metric since its reset as plain values, for checkpoints within an epoch.

The state is collected from attributes, so that a metric needs no code for its state."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from fastcore.imports import noop
from torch import Tensor

from learnkit.core.errors import MetricError
from learnkit.core.plain import ATOMS, clone_view, map_plain


def collect_accumulated(o: Any) -> dict[str, Any]:
    """Return the accumulated state of an object, as plain values by attribute name.

    The state is all attributes that are tensors, numbers, strings, None, and lists, tuples and dicts of these, and the
    states of inner metrics of learnkit or torchmetrics (under `name/`). Attributes named like a constructor argument
    are configuration and are excluded, and so are callables. Raises `MetricError` for any other attribute.

    >>> class Best:
    ...     def __init__(self, k): self.k, self.seen = k, [3., 5.]
    >>> collect_accumulated(Best(k=2))
    {'seen': [3.0, 5.0]}
    """
    options = _list_options(type(o))
    state: dict[str, Any] = {}
    for name, value in vars(o).items():
        if is_metric(value):
            state[f'{name}/'] = _collect_inner(value)
        elif name.lstrip('_') not in options and not callable(value):
            state[name] = map_plain(value, _to_plain, f'its attribute `{name}`')
    return state


def restore_accumulated(
    o: Any,  # object after its reset
    sd: Mapping[str, Any],  # return value of `collect_accumulated`, not changed
) -> None:
    "Restore an accumulated state."
    for name, value in sd.items():
        if name.endswith('/'):
            _restore_inner(vars(o)[name[:-1]], value)
        else:
            setattr(o, name, _copy(value))


def _collect_inner(metric: Any) -> dict[str, Any]:
    if is_torchmetrics(metric):
        return collect_torchmetrics(metric)
    return metric.state_dict() if hasattr(metric, 'state_dict') else collect_accumulated(metric)


def _restore_inner(metric: Any, sd: Mapping[str, Any]) -> None:
    if is_torchmetrics(metric):
        _restore_torchmetrics(metric, sd)
    elif hasattr(metric, 'load_state_dict'):
        metric.load_state_dict(sd)
    else:
        restore_accumulated(metric, sd)


def is_metric(o: Any) -> bool:
    "Return True for a metric or mean of learnkit, a metric of fastai, or an object like those of torchmetrics."
    return any(hasattr(o, name) for name in ('sum_reduced', 'accumulate', 'compute'))


def _list_options(cls: type) -> set[str]:
    "Return the names of all constructor arguments."
    inits = [vars(c)['__init__'] for c in cls.__mro__[:-1] if '__init__' in vars(c)]
    names = {name for init in inits for name in inspect.signature(init).parameters}
    return {'on', *(name.lstrip('_') for name in names)}


def _to_plain(value: Any, where: str) -> Any:
    "Convert an entry of a state; a tensor is copied if it is a view of a larger storage."
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor):
        return clone_view(value)
    if type(value) in ATOMS:
        return value
    raise MetricError(f'{where} is a {type(value).__name__}')


def _copy(value: Any, device: Any = None) -> Any:
    "Copy a nested value and its tensors, to a device if given."
    return map_plain(
        value, lambda v, _: v.detach().to(device, copy=True) if isinstance(v, Tensor) else v
    )


# -- torchmetrics ----------------------------------------------------------------------------------


def is_torchmetrics(o: Any) -> bool:
    "Return True for a torchmetrics object or collection."
    return isinstance(o, torch.nn.Module) and hasattr(o, 'metric_state')


def collect_torchmetrics(o: Any) -> dict[str, Any]:
    "Return the states and numbers of updates of a torchmetrics object and the metrics in it, by path."
    return {
        path: {
            'states': map_plain(m.metric_state, _to_plain, 'its state'),
            'attributes': _collect_attributes(m),
            'n_updates': m.update_count,
        }
        for path, m in list_parts(o).items()
    }


def _collect_attributes(m: Any) -> dict[str, Any]:
    """Return the numbers and tensors that the class of a metric keeps besides its states.

    The window of `RunningMean` begins at such a number. Constructor arguments are left out."""
    known = {*m.metric_state, *_list_base_attributes()}
    options = _list_options(type(m))
    return {
        name: _to_plain(value, name)
        for name, value in vars(m).items()
        if name not in known
        and name.lstrip('_') not in options
        and (isinstance(value, Tensor) or type(value) in (int, float))
    }


@cache
def _list_base_attributes() -> frozenset[str]:
    "Return the names of the attributes that each object of torchmetrics has."
    from torchmetrics import Metric

    plain = type('Plain', (Metric,), {'update': noop, 'compute': noop})
    return frozenset(vars(plain()))


def list_parts(o: Any) -> dict[str, Any]:
    "Return a torchmetrics object and the metrics in it, by path."
    return {path: m for path, m in o.named_modules() if hasattr(m, 'add_state')}


def _restore_torchmetrics(o: Any, sd: Mapping[str, Any]) -> None:
    for path, m in list_parts(o).items():
        set_states(m, _copy(sd[path], m.device))


def set_states(
    m: Any,  # torchmetrics object
    saved: Mapping[str, Any],  # its part of the result of `collect_torchmetrics`
) -> None:
    "Set the states of a torchmetrics object."
    for name, value in {**saved['states'], **saved.get('attributes', {})}.items():
        setattr(m, name, value)
    m._update_count = saved['n_updates']
    m._computed = None  # the cached value belongs to other batches
