"""Hyper-parameters by fastai's names, wherever torch's param groups keep them."""
from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ['HYPERS', 'OPTIONS', 'Hypers', 'place_of', 'torch_names', 'spread', 'is_many']

# fastai's name of a hyper-parameter, and where torch's param groups keep it: the first that is there counts, a pair
# stands for an element of a tuple
HYPERS: dict[str, tuple[str | tuple[str, int], ...]] = {
    'lr': ('lr',), 'mom': ('momentum', ('betas', 0)), 'sqr_mom': ('alpha', ('betas', 1)), 'wd': ('weight_decay',),
    'eps': ('eps',),
}
OPTIONS = ('lr', 'momentum', 'betas', 'alpha', 'weight_decay', 'eps')  # torch's names of all of them


def place_of(name: str, group: Mapping[str, Any]) -> str | tuple[str, int] | None:
    "Return where a param group keeps a hyper-parameter, None where it has none of that name."
    for where in HYPERS.get(name, (name,)):
        if (where if isinstance(where, str) else where[0]) in group: return where
    return None


class Hypers(MutableMapping[str, Any]):
    "One group's hyper-parameters by fastai's names (and torch's), read from and written to torch's param groups."

    def __init__(self, groups: list[dict[str, Any]], exempt: set[nn.Parameter]) -> None:
        self._groups, self._exempt = groups, exempt

    def _where(self, name: str) -> str | tuple[str, int]:
        where = place_of(name, self._groups[0])
        if where is None: raise KeyError(name)
        return where

    def __getitem__(self, name: str) -> Any:
        where = self._where(name)
        return self._groups[0][where] if isinstance(where, str) else self._groups[0][where[0]][where[1]]

    def __setitem__(self, name: str, value: Any) -> None:
        where = self._where(name)
        for group in self._groups:
            if where == 'weight_decay' and self._is_exempt(group): continue
            if isinstance(where, str): _put(group, where, value)
            else: group[where[0]] = tuple(value if i == where[1] else v for i, v in enumerate(group[where[0]]))

    def _is_exempt(self, group: dict[str, Any]) -> bool:
        return bool(group['params']) and all(p in self._exempt for p in group['params'])

    def __delitem__(self, name: str) -> None: raise TypeError(f'{name} cannot be deleted: an optimizer needs it.')
    def __iter__(self) -> Iterator[str]: return (n for n in HYPERS if n in self)
    def __len__(self) -> int: return sum(1 for _ in self)
    def __repr__(self) -> str: return repr(dict(self))

    def __contains__(self, name: object) -> bool:
        try: self._where(str(name))
        except KeyError: return False
        return True


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    "Set one option; a rate that lives in a tensor is filled, so that compiled steps see it."
    if isinstance(group[name], torch.Tensor): group[name].fill_(value)
    else: group[name] = value.clone() if isinstance(value, torch.Tensor) else value  # never the caller's own


def torch_names(opt: Any, hypers: Mapping[str, Any]) -> dict[str, Any]:
    "Translate fastai's names of hyper-parameters into those that `opt` takes."
    try: takes = inspect.signature(opt).parameters
    except (TypeError, ValueError): return dict(hypers)
    res = dict(hypers)
    for name in [n for n in hypers if n in HYPERS and n not in takes]:
        for where in HYPERS[name]:
            key = where if isinstance(where, str) else where[0]
            if key not in takes: continue
            value, pair = res.pop(name), res.get(key, takes[key].default)
            at = None if isinstance(where, str) else where[1]
            res[key] = value if at is None else tuple(value if i == at else v for i, v in enumerate(pair))
            break
    return res


def spread(values: slice, n: int) -> list[float]:
    """Spread a slice of rates over `n` groups: evenly on a log scale, or `slice(hi)`: a tenth of it but for the last.

    >>> spread(slice(1e-4, 1e-2), 3), spread(slice(1e-2), 2)
    ([0.0001, 0.001, 0.01], [0.001, 0.01])
    """
    lo, hi = values.start, values.stop
    if not lo: return [hi / 10] * (n - 1) + [hi]
    return [lo * (hi / lo) ** (i / (n - 1)) for i in range(n)] if n > 1 else [hi]


def is_many(value: Any) -> bool:
    "Tell several values from one."
    return isinstance(value, Sequence) or (hasattr(value, 'shape') and len(value.shape) > 0)
