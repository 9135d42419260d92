"""Statistics of what goes into modules and what comes out, logged every so often."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from learnkit.callbacks.hooks import HookCallback, tensors_in
from learnkit.core.errors import OptionError
from learnkit.core.time import Time
from learnkit.engine.dispatch import as_list

__all__ = ['ActivationMonitor']

STATS = ('l2_norm', 'average', 'max', 'skewness', 'kurtosis')
OF_SPREAD = ('skewness', 'kurtosis')  # a row of equal numbers has none


class ActivationMonitor(HookCallback):
    """Log statistics of the inputs and outputs of modules, for training batches 0, n, 2n, ... of each fit.

    Each is taken over the last dimension and averaged over all others: of (batch, sequence, features), the mean over
    batch and sequence of the L2 norm, average, maximum, skewness and kurtosis (m3 / m2^1.5 and m4 / m2^2: 0 and 3 for a
    normal distribution) of the features. Rows whose numbers are all equal have no skewness and no kurtosis and do not
    count there. What a batch sends through a module in pieces or several times is taken together. Only
    floating-point tensors are looked at. A module that works in place has written its output over its input by then.

    Hooks are there only in the batches that are looked at; however these end, they are taken off. All is computed on
    the device, in float32 (float64 for float64), and comes to the host in one transfer a look.

    Raises `OptionError` for names that the model does not have (before training), and `TimeError` for a bad `every`.
    Checkpointed: when it last looked.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(model=nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1)), cbs=ActivationMonitor())
    >>> with learn.no_bar(): learn.fit(1)
    >>> learn.history[0]['activations/l2_norm/0_output.0'] > 0
    True
    """

    order, observer, run_valid, remove_on_find, remove_on_fetch = 100, True, False, True, True
    metric_names = {
        f'activations/{stat}/{{module}}_{side}.{{n}}': f'{stat} of the nth {side}, averaged over its rows'
        for stat in STATS
        for side in ('input', 'output')
    }

    def __init__(
        self,
        every: int | str | Time = '100ba',  # how often it looks
        ignore: str | Iterable[str] = (),  # skip modules whose name contains this, or one of these
        modules: Any = None,  # modules or their names, one or several; None: all layers
    ) -> None:
        super().__init__(modules, every, cpu=False, include_paramless=True)
        self.ignore = as_list(ignore)
        for word in self.ignore:
            if not isinstance(word, str) or not word:
                raise OptionError(f'ignore: {word!r} is no part of a name.')
        self._calls: dict[
            tuple[str, str], list[tuple[int, Tensor]]
        ] = {}  # (module, side and number): rows, their sums

    def _find(self) -> None:
        super()._find()
        kept = [
            (name, m)
            for name, m in zip(self.layer_names, self.modules, strict=True)
            if not any(word in name for word in self.ignore)
        ]
        self.layer_names, self.modules = [name for name, _ in kept], [m for _, m in kept]
        self._names = {id(m): name or type(m).__name__ for name, m in kept}

    def before_batch(self) -> None:
        "Hook this batch, when it is due."
        self._calls = {}
        super().before_batch()

    @torch.no_grad()
    def hook(self, m: nn.Module, inp: Any, out: Any) -> None:
        "Measure a module's inputs and outputs in the loop's own forward pass, not in a repetition."
        learn = self.learn
        if not learn.training or learn.run.repeating or 'pred' in learn.__dict__:
            return
        for side, values in ('input', inp), ('output', out):
            for i, t in enumerate(tensors_in(values)):
                if not t.dim() or not t.numel() or not t.is_floating_point():
                    continue
                calls = self._calls.setdefault((self._names[id(m)], f'{side}.{i}'), [])
                calls.append((t.numel() // t.shape[-1], _sums(t)))

    def after_batch(self) -> None:
        "Log what was measured; take the hooks off."
        calls, self._calls = self._calls, {}
        super().after_batch()
        for name, value in _means(calls).items():
            self.learn.log(name, value, shown=False)

    def cleanup(self) -> None:
        "Take the hooks off; forget the batch that a failure cut short."
        super().cleanup()
        self._calls = {}


def _sums(t: Tensor) -> Tensor:
    "Return the sums over rows of each statistic, and the number of rows with a spread, on the device."
    x = (t if t.dtype is torch.float64 else t.float()).reshape(-1, t.shape[-1])
    mean = x.mean(-1, keepdim=True)
    d = x - mean
    m2, m3, m4 = (d.pow(k).mean(-1) for k in (2, 3, 4))
    spread = m2 > 0
    safe = torch.where(spread, m2, 1.0)
    of_spread = [torch.where(spread, v, 0.0).sum() for v in (m3 / safe**1.5, m4 / safe**2)]
    return torch.stack(
        [
            torch.linalg.vector_norm(x, dim=-1).sum(),
            mean.sum(),
            x.amax(-1).sum(),
            *of_spread,
            spread.sum().to(x.dtype),
        ]
    )


def _means(calls: dict[tuple[str, str], list[tuple[int, Tensor]]]) -> dict[str, float]:
    "Return the mean over all rows of each statistic by name; the one place where the host waits for the device."
    sums = [s for each in calls.values() for _, s in each]
    if not sums:
        return {}
    arrived = iter(torch.stack([s.to(sums[0].device) for s in sums]).tolist())
    found = {}
    for (module, side), each in calls.items():
        rows = [next(arrived) for _ in each]
        n, n_spread = sum(n for n, _ in each), math.fsum(row[-1] for row in rows)
        for stat, *values in zip(STATS, *rows, strict=False):
            count = n_spread if stat in OF_SPREAD else n
            if count:
                found[f'activations/{stat}/{module}_{side}'] = sum(values) / count
    return found
