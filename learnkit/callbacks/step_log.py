# SPDX-License-Identifier: Apache-2.0
"""Log of the steps of a fit: the loss and the hyperparameters of each step."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from learnkit.metrics.base import AvgSmoothLoss
from learnkit.optim.hyperparams import HYPERS, GroupKey, find_group_key

if TYPE_CHECKING:
    from learnkit.learner import Learner

BLOCK = 4096  # number of steps that are converted together


class StepLog:
    """Log of the steps of a fit, which a Recorder begins at the start of each fit.

    The hyperparameters are one column of numbers each: those of the latest param group. A value that is not a number
    is nan, as is a hyperparameter in the steps of earlier groups that lacked it.

    >>> from types import SimpleNamespace
    >>> steps, loss = StepLog(AvgSmoothLoss()), torch.tensor(1.0)
    >>> for lr in (0.5, 0.25):
    ...     group = {'lr': lr, 'betas': (0.9, 0.99), 'params': []}
    ...     steps.record(SimpleNamespace(loss=loss, opt=SimpleNamespace(last_group=group)))
    >>> steps.columns()
    {'lr': [0.5, 0.25], 'mom': [0.9, 0.9], 'sqr_mom': [0.99, 0.99]}
    >>> steps.losses
    [tensor(1.), tensor(1.)]
    """

    def __init__(
        self,
        smooth_loss: AvgSmoothLoss,  # losses of the steps
    ) -> None:
        self.smooth_loss = smooth_loss
        self.skipped: list[int] = []  # numbers of the training batches that had no loss
        self.given_hps: dict[str, list[float]] | None = None  # set by a user, in place of `columns`
        self._losses: list[Tensor] = []  # smoothed losses that were read
        self._group: Mapping[str, Any] | None = None  # current param group
        self._places: dict[str, GroupKey] = {}  # where the group has each hyperparameter
        self._has_tensor = False  # whether the group has a hyperparameter in a tensor
        self._rows: list[list[Any]] = []  # latest steps, not yet in the columns
        self._columns: dict[str, array[float]] = {}
        self._n_steps = 0  # number of steps in the columns

    def record(
        self,
        learn: Learner,
        weight: Any = 1,  # weight of the loss in the mean over the epoch
    ) -> None:
        "Record the loss of a step, and the hyperparameters that it used."
        self.smooth_loss.accumulate(learn, weight)
        if learn.opt is None:
            return
        group = learn.opt.last_group
        if group is not self._group:
            self._select_group(group)
        row = [group[key] for key, _ in self._places.values()]
        if self._has_tensor:
            # the optimizer overwrites a rate in a tensor at every step
            row = [v.clone() if isinstance(v, Tensor) else v for v in row]
        self._rows.append(row)
        if len(self._rows) == BLOCK:
            self._convert_rows()

    @property
    def losses(self) -> list[Tensor]:
        "Smoothed loss of every step, as 0-dim tensors on the CPU."
        smooth = self.smooth_loss.smooth
        if len(self._losses) > len(smooth):
            self._losses = []
        new_losses = smooth[len(self._losses) :]
        if new_losses:
            self._losses += torch.tensor(new_losses, dtype=torch.float32).unbind()
        return self._losses

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
        "Return the hyperparameters of every step, by fastai's names."
        self._convert_rows()
        return {name: column.tolist() for name, column in self._columns.items()}

    def state_dict(self) -> dict[str, Any]:
        "Return the hyperparameters, each as a float64 tensor."
        self._convert_rows()
        columns = {k: torch.from_numpy(np.array(v)) for k, v in self._columns.items()}
        return {'columns': columns}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        "Restore the hyperparameters of the recorded steps."
        for name, column in sd['columns'].items():
            self._columns[name] = array('d', column.tolist())
            self._n_steps = len(column)


def _as_numbers(values: list[Any]) -> list[float]:
    if values and all(isinstance(v, Tensor) for v in values):
        return torch.stack([v.reshape(()) for v in values]).double().tolist()
    return [float(v) if isinstance(v, (Real, Tensor)) else torch.nan for v in values]
