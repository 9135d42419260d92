"""The hyper-parameters of every step, kept compactly: a float64 tensor for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learnkit.optim.hyperparams import HYPERS, OPTIONS, place_of

__all__ = ['HyperparamLog']

BLOCK = 4096  # steps that are packed together

Where = str | tuple[str, int]
Packed = Tensor | list[Any]  # what is no number (Adafactor's `eps` is a pair) stays as it is


class HyperparamLog:
    """Record the hyper-parameters of a param group at every step; a step costs one tuple appended to a list.

    >>> steps = HyperparamLog()
    >>> for lr in (0.5, 0.25): steps.record({'lr': lr, 'betas': (0.9, 0.99), 'params': []})
    >>> steps.columns()
    {'lr': [0.5, 0.25], 'mom': [0.9, 0.9], 'sqr_mom': [0.99, 0.99]}
    """

    def __init__(self) -> None:
        self._group: Mapping[str, Any] | None = None  # the param group that is read
        self._read: Callable[[Mapping[str, Any]], tuple[Any, ...]] = _nothing
        self._options: tuple[str, ...] = ()  # what is read from it
        self._rows: list[tuple[Any, ...]] = []  # of the latest steps
        self._packed: dict[str, list[Packed]] = {}  # hyper-parameter: the steps before, in blocks
        self._n_packed = 0

    def __len__(self) -> int:
        return self._n_packed + len(self._rows)

    def record(
        self,
        group: Mapping[str, Any],  # the param group, as it was used for the step
    ) -> None:
        "Take in one step."
        if group is not self._group:
            self._choose(group)
        self._rows.append(self._read(group))
        if len(self._rows) >= BLOCK:
            self._pack()

    def let_go(self) -> None:
        "Forget the param group, which holds parameters."
        self._group = None

    def _choose(self, group: Mapping[str, Any]) -> None:
        "Read from this param group from now on; options that an earlier one did not have are nan for its steps."
        options = tuple(o for o in OPTIONS if o in group)
        if options != self._options:
            self._pack()
            before = {name: self._places().get(name) for name in HYPERS}
            self._options = options
            self._packed = {
                name: self._packed[name] if before[name] == where else self._unknown()
                for name, where in self._places().items()
            }
        # a rate that is filled at every step
        has_tensor = any(isinstance(group[o], Tensor) for o in options)
        # two or more: a tuple is read
        read = itemgetter(*options, *options[:1]) if options else _nothing
        self._group, self._read = group, partial(_snapshot, read) if has_tensor else read

    def _unknown(self) -> list[Packed]:
        return (
            [torch.full((self._n_packed,), torch.nan, dtype=torch.float64)]
            if self._n_packed
            else []
        )

    def _places(self) -> dict[str, Where]:
        "Where each hyper-parameter is in the options that are read."
        found = {name: place_of(name, dict.fromkeys(self._options)) for name in HYPERS}
        return {name: where for name, where in found.items() if where is not None}

    def _pack(self) -> None:
        rows, self._rows = self._rows, []
        if not rows:
            return
        for name, where in self._places().items():
            option, at = (where, None) if isinstance(where, str) else where
            i = self._options.index(option)
            values = [row[i] for row in rows]
            if type(values[0]) in (float, int, tuple) and values.count(values[0]) == len(rows):
                values = values[:1]
            column = _packed(values if at is None else [v[at] for v in values])
            self._packed[name].append(
                _repeated(column, len(rows)) if len(values) < len(rows) else column
            )
        self._n_packed += len(rows)

    def _joined(self, name: str) -> Packed:
        "All steps so far, for a hyper-parameter."
        blocks = self._packed[name]
        if len(blocks) > 1:
            tensors = [b for b in blocks if isinstance(b, Tensor)]
            all_numbers = len(tensors) == len(blocks)
            blocks[:] = [
                torch.cat(tensors) if all_numbers else [v for b in blocks for v in _as_list(b)]
            ]
        return blocks[0] if blocks else torch.empty(0, dtype=torch.float64)

    def columns(self) -> dict[str, list[Any]]:
        "Return the values of every step, by fastai's names of the hyper-parameters."
        return {name: _as_list(values) for name, values in self._all().items()}

    def column(self, name: str) -> list[Any]:
        "Return the values of every step for one of them, none where it was not recorded."
        if name not in self._packed:
            return []
        self._pack()
        return _as_list(self._joined(name))

    def _all(self) -> dict[str, Packed]:
        self._pack()
        return {name: self._joined(name) for name in self._packed}

    def state_dict(self) -> dict[str, Any]:
        "Return what was recorded: a float64 tensor for each hyper-parameter, a list where one is no number."
        return {'options': list(self._options), 'columns': self._all()}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        "Go on recording after what was recorded."
        self.__init__()  # type: ignore[misc]  # anew
        self._options = tuple(sd['options'])
        self._packed = {
            name: [column.clone() if isinstance(column, Tensor) else list(column)]
            for name, column in sd['columns'].items()
        }
        self._n_packed = max(map(len, sd['columns'].values()), default=0)


def _nothing(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return ()


def _snapshot(
    read: Callable[[Mapping[str, Any]], tuple[Any, ...]], group: Mapping[str, Any]
) -> tuple[Any, ...]:
    return tuple(v.clone() if isinstance(v, Tensor) else v for v in read(group))


def _packed(values: list[Any]) -> Packed:
    kinds = set(map(type, values))
    if kinds <= {float, int}:
        return torch.from_numpy(np.array(values, dtype=np.float64))
    if kinds <= {Tensor}:
        return torch.stack([v.reshape(()) for v in values]).double().cpu()  # in one transfer
    if not all(isinstance(v, (Real, Tensor)) for v in values):
        return values
    return torch.tensor([float(v) for v in values], dtype=torch.float64)


def _repeated(one: Packed, n: int) -> Packed:
    return one.repeat(n) if isinstance(one, Tensor) else one * n


def _as_list(values: Packed) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)
