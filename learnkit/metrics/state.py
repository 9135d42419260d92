"""What a metric has accumulated since its reset, as plain values: they survive a checkpoint in the middle of an epoch.

What is accumulated is found in the attributes, so that a metric need not know of states."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learnkit.core.errors import MetricError

__all__ = ['accumulated', 'is_metric', 'is_torchmetrics', 'joined', 'put_back', 'storable']

ATOMS = (bool, int, float, complex, str, bytes)
# what is computed with; and whatever can be called
TOOLS = (torch.device, torch.dtype, Enum, PurePath)
Pairs = list[tuple[Tensor, Tensor]]


def accumulated(
    o: Any,
    but: Collection[str] = (),  # attributes to leave out
) -> dict[str, Any]:
    """Return the attributes of an object that hold what it accumulates, as plain values.

    These are tensors, numbers, texts, None, and lists, tuples and dicts of them; and metrics, ours or those of
    torchmetrics, whose own states are taken (under `name/`). Left out are the attributes named like an argument of the
    constructor, which are its configuration, and what can be called. Raises `MetricError` for an attribute of any other
    kind.

    >>> class Best:
    ...     def __init__(self, k): self.k, self.seen = k, [3., 5.]
    >>> accumulated(Best(k=2))
    {'seen': [3.0, 5.0]}
    """
    if is_torchmetrics(o):
        return _of_torchmetrics(o)
    if not hasattr(o, '__dict__'):
        raise MetricError(f'a {type(o).__name__} keeps its attributes to itself')
    options, state = _options(type(o)), {}
    for name, value in vars(o).items():
        if name in but:
            continue
        if is_metric(value):
            state[f'{name}/'] = _state_of(value)
        elif (
            name.lstrip('_') not in options and not isinstance(value, TOOLS) and not callable(value)
        ):
            state[name] = _plain(value, f'its attribute `{name}`')
    return state


def put_back(
    o: Any,  # what accumulates, after its reset
    sd: Mapping[str, Any],  # from `accumulated`, of such an object; it is left as it is
) -> None:
    "Go on from what was accumulated. Raises `MetricError` for the state of something else."
    if is_torchmetrics(o):
        return _into_torchmetrics(o, sd)
    for name, value in sd.items():
        if not name.endswith('/'):
            setattr(o, name, _copied(value))
        elif is_metric(part := vars(o).get(name[:-1])):
            _put_state(part, value)
        else:
            raise MetricError(
                f'{type(o).__name__} has no metric `{name[:-1]}` that could go on from its state.'
            )


def _state_of(metric: Any) -> dict[str, Any]:
    has_own = hasattr(metric, 'state_dict') and not is_torchmetrics(metric)
    return metric.state_dict() if has_own else accumulated(metric)


def _put_state(metric: Any, sd: dict[str, Any]) -> None:
    has_own = hasattr(metric, 'load_state_dict') and not is_torchmetrics(metric)
    if has_own:
        metric.load_state_dict(sd)
    else:
        put_back(metric, sd)


def is_metric(o: Any) -> bool:
    "Tell what accumulates: a metric of ours, a mean, or what works like those of torchmetrics."
    if isinstance(o, type) or not hasattr(o, 'reset'):
        return False
    return (
        hasattr(o, 'accumulate')
        or hasattr(o, 'merge')
        or (hasattr(o, 'update') and hasattr(o, 'compute'))
    )


def _options(cls: type) -> set[str]:
    "The names of all arguments of the constructors; but the fields of a dataclass may be anything."
    names = {'on'}
    for c in cls.__mro__[:-1]:
        if '__init__' in vars(c) and '__dataclass_fields__' not in vars(c):
            with suppress(TypeError, ValueError):
                names |= set(inspect.signature(vars(c)['__init__']).parameters)
    return {name.lstrip('_') for name in names}


# -- torchmetrics ----------------------------------------------------------------------------------


def is_torchmetrics(o: Any) -> bool:
    "Tell an object of torchmetrics, or a collection of them."
    return isinstance(o, torch.nn.Module) and hasattr(o, 'metric_state')


def _of_torchmetrics(o: Any) -> dict[str, Any]:
    "The states of a metric and of those inside it, by their paths, and what they count without calling it a state."
    for m in o.modules():
        if hasattr(m, 'compute_groups'):
            m.values(copy_state=False)  # members of a group get its state when asked for
    return {
        path: {
            'states': {k: _plain(v, f'its state `{k}`') for k, v in _states(m).items()},
            'counts': _counts(m),
        }
        for path, m in o.named_modules()
        if '_defaults' in vars(m)
    }


def _states(m: Any) -> dict[str, Any]:
    return {name: getattr(m, name) for name in m._defaults}


def _counts(m: Any) -> dict[str, Any]:
    skip = {'computed', 'forward_cache', *m._defaults, *_options(type(m))}
    return {
        k: v for k, v in vars(m).items() if type(v) in (int, float) and k.lstrip('_') not in skip
    }


def _into_torchmetrics(o: Any, sd: Mapping[str, Any]) -> None:
    inside = {path: m for path, m in o.named_modules() if '_defaults' in vars(m)}
    if set(inside) != set(sd) or not all(_fit(m, sd[path]['states']) for path, m in inside.items()):
        raise MetricError(
            f'The state is not that of this {type(o).__name__}: other metrics, or other sizes.'
        )
    for path, m in inside.items():
        for k, v in sd[path]['states'].items():
            setattr(m, k, _copied(v, m.device))
        for k, v in sd[path]['counts'].items():
            setattr(m, k, v)
        m._computed = None  # what it remembers having computed is of other batches


def _fit(m: Any, states: Mapping[str, Any]) -> bool:
    now = _states(m)
    return set(now) == set(states) and all(
        type(v) is type(states[k])
        and (not isinstance(v, Tensor) or v.numel() in (1, states[k].numel()))
        for k, v in now.items()
    )


# -- plain values ----------------------------------------------------------------------------------


def _plain(value: Any, what: str) -> Any:
    "A copy of the containers, and the tensors themselves: each with a storage that holds nothing else."
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in ATOMS:
        return value
    if isinstance(value, Tensor):
        return _on_its_own(value)
    if type(value) in (list, tuple):
        return type(value)(_plain(v, what) for v in value)
    if type(value) is dict and all(type(k) in ATOMS for k in value):
        return {k: _plain(v, what) for k, v in value.items()}
    raise MetricError(f'{what} holds a {type(value).__name__}')


def _on_its_own(t: Tensor) -> Tensor:
    "A slice would be saved with all that it is a slice of."
    t = t.detach() if type(t) is Tensor else t.detach().as_subclass(Tensor)
    if (
        t.layout is not torch.strided
        or t.untyped_storage().nbytes() <= t.numel() * t.element_size()
    ):
        return t
    return t.clone()


def _copied(value: Any, device: Any = None) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(v, device) for v in value)
    return {k: _copied(v, device) for k, v in value.items()} if isinstance(value, dict) else value


def storable(value: Any) -> Any:
    """Return the value of a metric as it can be saved: arrays as tensors, and None for what cannot be.

    >>> storable({'per class': np.array([0.5, 1.]), 'figure': object()})
    {'per class': tensor([0.5000, 1.0000], dtype=torch.float64), 'figure': None}
    """
    if type(value) in (float, int, str) or value is None:
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in 'biufc':
        return torch.tensor(value)
    if isinstance(value, Mapping):
        return {k: storable(v) for k, v in value.items() if type(k) in ATOMS}
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(map(storable, value))
    try:
        return _plain(value, '')
    except MetricError:
        return None


def joined(pairs: Pairs) -> Pairs:
    "Return a copy of the predictions and targets of several batches as one pair, where the last ones are."
    if not pairs:
        return pairs
    pred, targ = (
        torch.cat([t.to(parts[-1].device) for t in parts]) for parts in zip(*pairs, strict=True)
    )
    return [(pred, targ)]
