# SPDX-License-Identifier: Apache-2.0
"""Callback that logs statistics of the inputs and outputs of modules at an interval."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from learnkit.callbacks.hooks import HookCallback
from learnkit.core.batch import tensors_in
from learnkit.core.time import Time
from learnkit.engine.dispatch import as_list

STATS = ('l2_norm', 'average', 'max', 'skewness', 'kurtosis')
OF_SPREAD = ('skewness', 'kurtosis')  # undefined for a row of equal numbers


class ActivationMonitor(HookCallback):
    """Log statistics of the inputs and outputs of modules, for training batches 0, n, 2n, ... of each fit.

    Each statistic is computed over the last dimension and averaged over all others. For an input
    (batch, sequence, features) it is the mean over batch and sequence of the L2 norm, average,
    maximum, skewness and kurtosis (m3 / m2^1.5 and m4 / m2^2: 0 and 3 for a normal distribution) of
    the features. Rows of equal numbers have no skewness and kurtosis and are left out of these.
    Several calls of a module in a batch, as with microbatches, are averaged together. Only
    floating-point tensors are measured. The input of an in-place module is measured after its
    output has overwritten it.

    Hooks are registered only during measured batches, and removed however these end. Statistics are
    computed on the device, in float32 (float64 for float64), and copied to the host once per
    measurement.

    Raises `OptionError` for unknown names of modules (before training), and `TimeError` for an
    `every` that is not a number of batches. Checkpointed: nothing.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(model=nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1)), cbs=ActivationMonitor())
    >>> with learn.no_bar(): learn.fit(1)
    >>> learn.history[0]['activations/l2_norm/0_output.0'] > 0
    True
    """

    order = 100
    needs_whole = 'layers'
    observer = True
    run_valid = False
    remove_on_find = True
    remove_on_fetch = True
    metric_names = {
        f'activations/{stat}/{{module}}_{side}.{{n}}': f'{stat} of the nth {side}, averaged over its rows'
        for stat in STATS
        for side in ('input', 'output')
    }

    def __init__(
        self,
        every: int | str | Time = '100ba',  # interval of measurements
        ignore: str | Iterable[str] = (),  # substring, or substrings, of names of modules to skip
        modules: Any = None,  # modules or their names, one or several; None: all layers
    ) -> None:
        super().__init__(modules, every, cpu=False, include_paramless=True)
        self.ignore = as_list(ignore)
        self._sums: dict[
            str, Tensor
        ] = {}  # sums over rows of this batch, by module, side and index

    @override
    def _find(self) -> None:
        super()._find()
        found = zip(self.layer_names, self.modules, strict=True)
        kept = [(name, m) for name, m in found if not any(word in name for word in self.ignore)]
        self.layer_names = [name for name, _ in kept]
        self.modules = [m for _, m in kept]
        self._names = {id(m): name or type(m).__name__ for name, m in kept}

    @override
    def before_batch(self) -> None:
        "Hook this batch if it is due."
        self._sums = {}
        super().before_batch()

    @torch.no_grad()
    @override
    def hook(self, m: nn.Module, inp: Any, out: Any) -> None:
        "Measure a module's inputs and outputs in the loop's own forward passes."
        learn = self.learn
        if not learn.training or learn.run.repeating or 'pred' in learn.__dict__:
            return
        for side, values in ('input', inp), ('output', out):
            for i, t in enumerate(tensors_in(values)):
                if t.dim() and t.numel() and t.is_floating_point():
                    name = f'{self._names[id(m)]}_{side}.{i}'
                    self._sums[name] = self._sums.get(name, 0) + _compute_sums(t)

    @override
    def after_batch(self) -> None:
        "Log the statistics, and remove the hooks."
        sums = self._sums
        self._sums = {}
        super().after_batch()
        for name, value in _compute_means(sums).items():
            self.learn.log(name, value, shown=False)

    @override
    def cleanup(self) -> None:
        "Remove the hooks; drop an interrupted batch."
        super().cleanup()
        self._sums = {}


def _compute_sums(t: Tensor) -> Tensor:
    "Return the sums over rows of each statistic, and the numbers of rows with a spread and of rows, on the device."
    x = (t if t.dtype is torch.float64 else t.float()).reshape(-1, t.shape[-1])
    mean = x.mean(-1, keepdim=True)
    d = x - mean
    m2, m3, m4 = (d.pow(k).mean(-1) for k in (2, 3, 4))
    has_spread = m2 > 0
    divisor = torch.where(has_spread, m2, 1.0)
    ratios = (m3 / divisor**1.5, m4 / divisor**2)
    of_spread = [torch.where(has_spread, v, 0.0).sum() for v in ratios]
    return torch.stack(
        [
            torch.linalg.vector_norm(x, dim=-1).sum(),
            mean.sum(),
            x.amax(-1).sum(),
            *of_spread,
            has_spread.sum().to(x.dtype),
            torch.full_like(m2, 1.0).sum(),
        ]
    )


def _compute_means(sums: dict[str, Tensor]) -> dict[str, float]:
    "Return the mean over all rows of each statistic, by name; waits for the device."
    if not sums:
        return {}
    device = next(iter(sums.values())).device
    numbers = torch.stack([t.to(device) for t in sums.values()]).tolist()
    means = {}
    for name, (*totals, n_with_spread, n_rows) in zip(sums, numbers, strict=True):
        for stat, total in zip(STATS, totals, strict=True):
            count = n_with_spread if stat in OF_SPREAD else n_rows
            if count:
                means[f'activations/{stat}/{name}'] = total / count
    return means
