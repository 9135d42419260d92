# SPDX-License-Identifier: Apache-2.0
"""Param groups: parameters, hyperparameters by fastai's names, and the memory layout that fused kernels require."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import nn

from learnkit.comm.dtensor import local_shard
from learnkit.core.errors import OptimizerError
from learnkit.core.model import unwrap_partial
from learnkit.core.plain import has_parts
from learnkit.core.roles import norm_bias_params as norm_bias_params

# where torch's param group has a hyperparameter: a key, and an index if its value is a tuple
GroupKey = tuple[str, int | None]
# fastai's name of a hyperparameter -> possible keys; the first key that exists is used
HYPERS: dict[str, tuple[GroupKey, ...]] = {
    'lr': (('lr', None),),
    'mom': (('momentum', None), ('betas', 0)),
    'sqr_mom': (('alpha', None), ('betas', 1)),
    'wd': (('weight_decay', None),),
    'eps': (('eps', None),),
}
DECAYS = ('wd', 'weight_decay')  # names of the weight decay
OPTIONS = ('lr', 'momentum', 'betas', 'alpha', 'weight_decay', 'eps')  # torch's keys
# exclusive upper bounds of hyperparameters that are decays of averages
UPPER_BOUNDS = dict.fromkeys(('mom', 'sqr_mom', 'momentum', 'alpha'), 1.0)
# modules of optimizers with torch's `step`, and with states of the names and shapes that torch documents
OWN_MODULES = ('torch.optim.', 'learnkit.optim.')


def find_group_key(name: str, group: Mapping[str, Any]) -> GroupKey | None:
    "Return the key and index of a hyperparameter in a param group, or None if absent."
    for key, index in HYPERS.get(name, ((name, None),)):
        if key in group:
            return key, index
    return None


def set_value(group: dict[str, Any], key: str, index: int | None, value: Any) -> None:
    "Set the hyperparameter at a key of a param group."
    old: Any = group.get(key)
    if index is not None:
        group[key] = (*old[:index], value, *old[index + 1 :])
    elif isinstance(old, torch.Tensor):
        old.fill_(value)  # compiled steps hold the tensor
    else:
        group[key] = value


class Hypers(Mapping[str, Any]):
    """Mapping of one group's hyperparameters by fastai's (and torch's) names to the values in torch's param groups.

    A value is read from the first param group that has the key, and written to each param group that has the key.
    `weight_decay` stays 0 in param groups of exempt parameters.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        exempt: set[nn.Parameter],
        split: Callable[[], list[dict[str, Any]]] | None = None,  # splits off exempt parameters
    ) -> None:
        self.groups = groups
        self._exempt = exempt
        self._split = split

    def find(
        self,
        name: str,
        with_exempt: bool = False,  # include the weight decay of exempt parameters, which stays 0
    ) -> list[tuple[dict[str, Any], str, int | None]]:
        "Return the param groups that have a hyperparameter, each with the key and index in it."
        found = []
        for group in self.groups:
            group_key = find_group_key(name, group)
            if group_key is None:
                continue
            is_exempt = group['params'] and self._exempt.issuperset(group['params'])
            if with_exempt or group_key[0] != 'weight_decay' or not is_exempt:
                found.append((group, *group_key))
        return found

    def __getitem__(self, name: str) -> Any:
        found = self.find(name) or self.find(name, with_exempt=True)
        if not found:
            raise KeyError(name)
        group, key, index = found[0]
        return group[key] if index is None else group[key][index]

    def __setitem__(self, name: str, value: Any) -> None:
        if not self.find(name, with_exempt=True):
            raise KeyError(name)
        if not isinstance(value, tuple):  # torch's `betas`
            [value] = list_values(name, [value], 1)
        if name in DECAYS and value and self._exempt and self._split is not None:
            self.groups = self._split()
        self.write(name, value)

    def write(self, name: str, value: Any) -> None:
        "Set a value that has been checked."
        for group, key, index in self.find(name):
            # the caller may change the tensor later
            own = value.clone() if isinstance(value, torch.Tensor) else value
            set_value(group, key, index, own)

    def __iter__(self) -> Iterator[str]:
        return (n for n in HYPERS if n in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


def torch_names(opt: Any, hypers: Mapping[str, Any]) -> dict[str, Any]:
    """Translate fastai's names of hyperparameters to the parameter names of `opt`.

    >>> torch_names(torch.optim.Adam, {'mom': 0.8, 'wd': 0.1})
    {'betas': (0.8, 0.999), 'weight_decay': 0.1}
    """
    accepted = inspect.signature(opt).parameters
    res: dict[str, Any] = {}
    for name, value in hypers.items():
        group_key = None if name in accepted else find_group_key(name, accepted)
        key, index = group_key or (name, None)
        if index is not None:
            res.setdefault(key, accepted[key].default)
        set_value(res, key, index, value)
    return res


def list_values(name: str, value: Any, n: int) -> list[Any]:
    """Return a hyperparameter's values for `n` groups; a single value is repeated, and a slice is spread (`spread`).

    Raises `OptimizerError` for a value that no optimizer can use.

    >>> list_values('wd', 0.1, 2), list_values('lr', [0.1, 0.2], 2)
    ([0.1, 0.1], [0.1, 0.2])
    >>> list_values('lr', -0.1, 2)
    Traceback (most recent call last):
    learnkit.core.errors.OptimizerError: lr=-0.1: pass a number, 0 or more.
    """
    if isinstance(value, slice):
        values = spread(value, n)
    elif (isinstance(value, Sequence) and not isinstance(value, str)) or getattr(
        value, 'ndim', False
    ):
        values = list(value)
    else:
        values = [value] * n
    values = [as_number(v) for v in values]
    bound = UPPER_BOUNDS.get(name, math.inf)
    least = 0 if name in HYPERS or name in OPTIONS else -math.inf
    for v in values:
        if not isinstance(v, (Real, torch.Tensor)) or not least <= float(v) < bound:
            raise OptimizerError(
                f'{name}={v!r}: pass a number, 0 or more{" and below 1" * (bound == 1)}.'
            )
    return values


def as_number(value: Any) -> Any:
    "Convert NumPy's numbers, and numbers as text (YAML's 1e-3), to Python's, which checkpoints hold."
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value.item() if isinstance(value, np.generic) else value


def spread(values: slice, n: int) -> list[float]:
    """Spread a slice over `n` groups: `slice(lo, hi)` evenly on a log scale, `slice(hi)` as `hi / 10` except the last.

    >>> spread(slice(1e-4, 1e-2), 3), spread(slice(1e-2), 2)
    ([0.0001, 0.001, 0.01], [0.001, 0.01])
    """
    lo = values.start
    hi = values.stop
    if not lo:
        return [hi / 10] * (n - 1) + [hi]
    return [lo * (hi / lo) ** (i / (n - 1)) for i in range(n)] if n > 1 else [hi]


# -- parameters ------------------------------------------------------------------------------------

SPLIT = ' Groups come from the `splitter`: `lambda m: [params(m.body), params(m.head)]`.'


def trainable_params(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients.

    >>> [tuple(p.shape) for p in trainable_params(nn.Linear(3, 2))]
    [(2, 3), (2,)]
    """
    return [p for p in model.parameters() if p.requires_grad]


def params(m: nn.Module) -> list[nn.Parameter]:
    """Return all parameters of a module: `splitter=lambda m: [params(m.body), params(m.head)]`.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    >>> [len(params(layer)) for layer in model], len(params(model))
    ([2, 2], 4)
    """
    return list(m.parameters())


def as_groups(params: Any) -> list[dict[str, Any]]:
    "Convert parameters, lists of parameters, or torch's dicts to torch's param groups."
    groups = [params] if isinstance(params, torch.Tensor) else list(params)
    if not groups:
        raise OptimizerError(f'There are no parameters to optimize.{SPLIT}')
    if isinstance(groups[0], torch.Tensor):
        groups = [groups]
    res = []
    for group in groups:
        options = group if isinstance(group, dict) else {'params': group}
        own = options['params']
        own = [own] if isinstance(own, torch.Tensor) or not isinstance(own, Iterable) else list(own)
        modules = [type(p).__name__ for p in own if isinstance(p, nn.Module)]
        if modules:
            raise OptimizerError(
                f'A param group has a {modules[0]}, which is not a parameter.{SPLIT}'
            )
        res.append({**options, 'params': own})
    return res


def check_maker(opt: Any) -> None:
    "Raise `OptimizerError` for a class that is not an optimizer class."
    cls = unwrap_partial(opt)
    if isinstance(cls, type) and not issubclass(cls, torch.optim.Optimizer):
        raise OptimizerError(
            f'{cls.__name__} is not a torch.optim.Optimizer: pass one of their classes, or a function of '
            '(params, lr) that returns one.'
        )


def iterate_params(groups: list[dict[str, Any]]) -> list[torch.Tensor]:
    "Return the parameters in the groups that `as_groups` returns."
    return [p for group in groups for p in group['params']]


def iterate_states(
    opt: torch.optim.Optimizer,
) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Iterate over the parameters that have a state, each with its state.

    Other entries of `opt.state` are left out: an optimizer may keep a counter there, as MADGRAD does (`state['k']`).

    >>> p = nn.Parameter(torch.zeros(2))
    >>> opt = torch.optim.SGD([p], lr=0.1)
    >>> opt.state['k'] = 3
    >>> list(iterate_states(opt))
    []
    """
    for p, state in opt.state.items():
        if isinstance(p, torch.Tensor) and isinstance(state, dict):
            yield p, state


# -- fused optimizers ------------------------------------------------------------------------------


def match_strides(opt: torch.optim.Optimizer) -> None:
    """Match the strides of an optimizer's states to their parameters, as fused optimizers require.

    torch's CPU kernels ignore strides: a state from before `model.to(memory_format=torch.channels_last)` would be
    applied to the wrong weights without an error.
    """
    for p, state in iterate_states(opt):
        for name, value in state.items():
            has_shape = isinstance(value, torch.Tensor) and value.shape == p.shape
            # a state of parts would lose its class, and is not for fused kernels
            if has_shape and value.stride() != p.stride() and not has_parts(value):
                state[name] = torch.empty_like(p).copy_(value)


FUSED = ('cpu', 'cuda', 'xpu', 'mps')  # devices for which torch has fused kernels


def can_fuse(params: Iterable[torch.Tensor]) -> bool:
    """Return True if torch's fused kernels support parameters: floating point, dense, without gaps.

    A fit may move them to the accelerator, which has to have these kernels too.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type not in FUSED:
        return False
    return all(map(_is_fusible, params))


def _is_fusible(p: torch.Tensor) -> bool:
    p = local_shard(p)
    return (
        type(p) in (torch.Tensor, nn.Parameter)
        and p.is_floating_point()
        and p.device.type in FUSED
        and torch.empty_like(p).stride() == p.stride()
    )
