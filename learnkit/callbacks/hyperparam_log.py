# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters of every step, as one column of numbers each."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learnkit.optim.hyperparams import HYPERS, GroupKey, find_group_key

BLOCK = 4096  # number of steps that are converted together


class HyperparamLog:
    """Record the hyperparameters of a param group at every step; a value that is not a number is nan.

    The columns are those of the latest param group; a hyperparameter that earlier groups lacked is nan before.

    >>> steps = HyperparamLog()
    >>> for lr in (0.5, 0.25): steps.record({'lr': lr, 'betas': (0.9, 0.99), 'params': []})
    >>> steps.columns()
    {'lr': [0.5, 0.25], 'mom': [0.9, 0.9], 'sqr_mom': [0.99, 0.99]}
    """

    def __init__(self) -> None:
        self._group: Mapping[str, Any] | None = None  # current param group
        self._places: dict[str, GroupKey] = {}  # where the group has each hyperparameter
        self._has_tensor = False  # whether the group has a hyperparameter in a tensor
        self._rows: list[list[Any]] = []  # latest steps, not yet in the columns
        self._columns: dict[str, array[float]] = {}
        self._n_steps = 0  # number of steps in the columns

    def record(
        self,
        group: Mapping[str, Any],  # param group as the step used it
    ) -> None:
        "Record one step."
        if group is not self._group:
            self._select_group(group)
        row = [group[key] for key, _ in self._places.values()]
        if self._has_tensor:
            # the optimizer overwrites a rate in a tensor at every step
            row = [v.clone() if isinstance(v, Tensor) else v for v in row]
        self._rows.append(row)
        if len(self._rows) == BLOCK:
            self._convert_rows()

    def release_group(self) -> None:
        "Drop the reference to the param group, which holds parameters."
        self._group = None

    def _select_group(self, group: Mapping[str, Any]) -> None:
        "Record this param group from now on."
        self._convert_rows()
        places = {name: find_group_key(name, group) for name in HYPERS}
        self._places = {name: place for name, place in places.items() if place is not None}
        missing = array('d', [torch.nan]) * self._n_steps
        self._columns = {name: self._columns.get(name, missing[:]) for name in self._places}
        self._has_tensor = any(isinstance(group[key], Tensor) for key, _ in self._places.values())
        self._group = group

    def _convert_rows(self) -> None:
        "Move the latest steps to the columns, with one transfer from the device for each column."
        rows = self._rows
        self._rows = []
        for i, (name, (_, index)) in enumerate(self._places.items()):
            values = [row[i] if index is None else row[i][index] for row in rows]
            self._columns[name].extend(_as_numbers(values))
        self._n_steps += len(rows)

    def columns(self) -> dict[str, list[float]]:
        "Return the values of every step, by fastai's names of the hyperparameters."
        self._convert_rows()
        return {name: column.tolist() for name, column in self._columns.items()}

    def state_dict(self) -> dict[str, Any]:
        "Return a float64 tensor per hyperparameter."
        self._convert_rows()
        columns = {k: torch.from_numpy(np.array(v)) for k, v in self._columns.items()}
        return {'columns': columns}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        "Restore the recorded steps."
        self.__init__()  # type: ignore[misc]
        for name, column in sd['columns'].items():
            self._columns[name] = array('d', column.tolist())
            self._n_steps = len(column)


def _as_numbers(values: list[Any]) -> list[float]:
    if values and all(isinstance(v, Tensor) for v in values):
        return torch.stack([v.reshape(()) for v in values]).double().tolist()
    return [float(v) if isinstance(v, (Real, Tensor)) else torch.nan for v in values]
