"""Hyperparameters of every step, stored as one float64 tensor each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learnkit.optim.hyperparams import HYPERS, OPTIONS, GroupKey, find_group_key

__all__ = ['HyperparamLog']

BLOCK = 4096  # number of steps that are packed together

Packed = Tensor | list[Any]  # a value that is not a number stays as it is (Adafactor's `eps`)


class HyperparamLog:
    """Record the hyperparameters of a param group at every step, as one tuple per step.

    >>> steps = HyperparamLog()
    >>> for lr in (0.5, 0.25): steps.record({'lr': lr, 'betas': (0.9, 0.99), 'params': []})
    >>> steps.columns()
    {'lr': [0.5, 0.25], 'mom': [0.9, 0.9], 'sqr_mom': [0.99, 0.99]}
    """

    def __init__(self) -> None:
        self._group: Mapping[str, Any] | None = None  # current param group
        self._read: Callable[[Mapping[str, Any]], tuple[Any, ...]] = _read_nothing
        self._options: tuple[str, ...] = ()  # keys that are read from the param group
        self._rows: list[tuple[Any, ...]] = []  # latest steps, not yet packed
        self._packed: dict[str, list[Packed]] = {}  # earlier steps in blocks, by hyperparameter
        self._n_packed = 0

    def __len__(self) -> int:
        return self._n_packed + len(self._rows)

    def record(
        self,
        group: Mapping[str, Any],  # param group as the step used it
    ) -> None:
        "Record one step."
        if group is not self._group:
            self._select_group(group)
        self._rows.append(self._read(group))
        if len(self._rows) >= BLOCK:
            self._pack()

    def release_group(self) -> None:
        "Drop the reference to the param group, which holds parameters."
        self._group = None

    def _select_group(self, group: Mapping[str, Any]) -> None:
        "Read this param group from now on; earlier steps are nan for options that are new."
        options = tuple(o for o in OPTIONS if o in group)
        if options != self._options:
            self._pack()
            before = self._locations()
            self._options = options
            self._packed = {
                name: self._packed[name] if before.get(name) == location else self._nan_blocks()
                for name, location in self._locations().items()
            }
        # a rate in a tensor is overwritten at every step, so it has to be copied
        has_tensor = any(isinstance(group[o], Tensor) for o in options)
        # the first option twice: `itemgetter` returns a tuple only for two keys or more
        read = itemgetter(*options, *options[:1]) if options else _read_nothing
        self._group = group
        self._read = partial(_read_copy, read) if has_tensor else read

    def _nan_blocks(self) -> list[Packed]:
        if not self._n_packed:
            return []
        return [torch.full((self._n_packed,), torch.nan, dtype=torch.float64)]

    def _locations(self) -> dict[str, GroupKey]:
        "Return where the current options hold each hyperparameter."
        found = {name: find_group_key(name, dict.fromkeys(self._options)) for name in HYPERS}
        return {name: location for name, location in found.items() if location is not None}

    def _pack(self) -> None:
        rows = self._rows
        self._rows = []
        if not rows:
            return
        for name, (option, index) in self._locations().items():
            i = self._options.index(option)
            values = [row[i] for row in rows]
            # a constant is converted once and repeated
            if type(values[0]) in (float, int, tuple) and values.count(values[0]) == len(rows):
                values = values[:1]
            column = _pack_values(values if index is None else [v[index] for v in values])
            if len(values) < len(rows):
                column = _repeat(column, len(rows))
            self._packed[name].append(column)
        self._n_packed += len(rows)

    def _join_blocks(self, name: str) -> Packed:
        "Return the values of all steps for a hyperparameter."
        blocks = self._packed[name]
        if len(blocks) > 1:
            tensors = [b for b in blocks if isinstance(b, Tensor)]
            if len(tensors) == len(blocks):
                joined: Packed = torch.cat(tensors)
            else:
                joined = [v for b in blocks for v in _as_list(b)]
            blocks[:] = [joined]
        return blocks[0] if blocks else torch.empty(0, dtype=torch.float64)

    def columns(self) -> dict[str, list[Any]]:
        "Return the values of every step, by fastai's names of the hyperparameters."
        return {name: _as_list(values) for name, values in self._packed_columns().items()}

    def column(self, name: str) -> list[Any]:
        "Return the values of a hyperparameter at every step, an empty list if not recorded."
        if name not in self._packed:
            return []
        self._pack()
        return _as_list(self._join_blocks(name))

    def _packed_columns(self) -> dict[str, Packed]:
        self._pack()
        return {name: self._join_blocks(name) for name in self._packed}

    def state_dict(self) -> dict[str, Any]:
        "Return a float64 tensor per hyperparameter, or a list if a value is not a number."
        return {'options': list(self._options), 'columns': self._packed_columns()}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        "Restore the recorded steps."
        self.__init__()  # type: ignore[misc]
        self._options = tuple(sd['options'])
        self._packed = {
            name: [column.clone() if isinstance(column, Tensor) else list(column)]
            for name, column in sd['columns'].items()
        }
        self._n_packed = max(map(len, sd['columns'].values()), default=0)


def _read_nothing(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return ()


def _read_copy(
    read: Callable[[Mapping[str, Any]], tuple[Any, ...]], group: Mapping[str, Any]
) -> tuple[Any, ...]:
    return tuple(v.clone() if isinstance(v, Tensor) else v for v in read(group))


def _pack_values(values: list[Any]) -> Packed:
    kinds = set(map(type, values))
    if kinds <= {float, int}:
        return torch.from_numpy(np.array(values, dtype=np.float64))
    if kinds <= {Tensor}:
        # one transfer from the device for all steps
        return torch.stack([v.reshape(()) for v in values]).double().cpu()
    if not all(isinstance(v, (Real, Tensor)) for v in values):
        return values
    return torch.tensor([float(v) for v in values], dtype=torch.float64)


def _repeat(value: Packed, n: int) -> Packed:
    return value.repeat(n) if isinstance(value, Tensor) else value * n


def _as_list(values: Packed) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)
