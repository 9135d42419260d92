# SPDX-License-Identifier: Apache-2.0
"""Statistics of layer outputs in training: means, standard deviations, shares near zero, histograms."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from fastcore.foundation import L
from torch import Tensor, nn
from typing_extensions import override

from learnkit.callbacks.hooks import HookCallback
from learnkit.core.batch import tensors_in
from learnkit.core.device import synchronize
from learnkit.core.errors import OptionError
from learnkit.core.plotting import axes_or_new, color, new_axes
from learnkit.engine.dispatch import as_list

NEAR_ZERO = 0.05  # upper bound of values near zero, negative values included, as in fastai
# histograms have 40 bins from 0 to 10; other values are not counted
BINS = 40
TOP = 10
FIELDS = ('mean', 'std', 'near_zero')


class ActivationStats(HookCallback):
    """Record mean, standard deviation and share near zero of layer outputs, for each training batch.

    Values of at most 0.05 count as near zero, as in fastai: after a ReLU, the dead share.
    `layer_stats(idx)` returns the three series of a layer (by index or name), `stats` all series;
    `plot_layer_stats`, `color_dim` and `plot_hist` draw them. Statistics are computed on the
    device, in float32 (float64 for float64), and copied to the host without waiting.

    Of several calls of a layer in a batch (microbatches, a shared layer) the last one is measured, and
    of several outputs (an LSTM) the first one. With `is_forward=False` the gradients of the outputs
    are measured. A new fit discards earlier statistics.

    Checkpointed: everything recorded.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(n_train=3, cbs=ActivationStats())
    >>> with learn.no_bar(): learn.fit(1)
    >>> means, stds, near_zero = learn.activation_stats.layer_stats(0)
    >>> len(means), min(near_zero) >= 0
    (3, True)
    """

    order = -20
    needs_whole = 'layers'
    run_in = 'fit'
    remove_on_find = True

    def __init__(
        self,
        with_hist: bool = False,  # whether to record histograms, for `hist` and `color_dim`
        **options: Any,  # options of `HookCallback`; `cpu` is False
    ) -> None:
        super().__init__(**{'cpu': False, **options})
        self.with_hist = with_hist
        self._at: list[int] = []  # index in the fit of each measured batch
        self._rows: list[Tensor] = []  # statistics of each measured batch, [layers, 3 + bins]
        # statistics of the last call in the current batch, by layer
        self._calls: dict[int, Tensor] = {}

    # -- recording ---------------------------------------------------------------------------------

    @override
    def before_fit(self) -> None:
        "Discard earlier statistics."
        super().before_fit()
        self._at = []
        self._rows = []

    @override
    def before_batch(self) -> None:
        "Hook this batch if it is due."
        super().before_batch()
        if self.learn.training:
            self._calls = {}

    @override
    def hook(self, m: nn.Module, inp: Any, out: Any) -> None:
        "Measure the output of a layer in the loop's own forward passes in training."
        learn = self.learn
        if not learn.training or learn.run.repeating:
            return
        if self.is_forward and 'pred' in learn.__dict__:
            return
        outputs = [t for t in tensors_in(out) if t.numel()]
        if outputs:
            self._calls[self._layer_indices[id(m)]] = _measure(outputs[0], self.with_hist)

    @override
    def after_batch(self) -> None:
        "Record the statistics of this batch."
        if self.learn.training:
            if self._calls:
                self._at.append(self.learn.train_iter)
                self._rows.append(self._join_calls())
            self._calls = {}
        super().after_batch()

    def _join_calls(self) -> Tensor:
        "Return the statistics of this batch, copied to the host without waiting; NaN for layers not called."
        first = next(iter(self._calls.values()))
        no_call = torch.full_like(first, torch.nan)
        rows = [self._calls.get(i, no_call).to(first) for i in range(len(self.modules))]
        return torch.stack(rows).to('cpu', non_blocking=True)

    @override
    def cleanup(self) -> None:
        "Remove the hooks; drop an interrupted batch."
        super().cleanup()
        self._calls = {}

    @override
    def _find(self) -> None:
        super()._find()
        self._layer_indices = {id(m): i for i, m in enumerate(self.modules)}

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return everything recorded."
        table = self._table() if self._rows else None
        layers = list(self.layer_names)
        return {'at': list(self._at), 'table': table, 'layers': layers}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the record."
        self.layer_names = list(sd['layers'])
        self._rows = [] if sd['table'] is None else list(sd['table'])
        self._at = list(sd['at'])

    # -- reading -----------------------------------------------------------------------------------

    def _table(self) -> Tensor:
        "Return the statistics of all batches, [batches, layers, 3 + bins], after their copies have arrived."
        if not self._rows:
            raise OptionError('ActivationStats: nothing was measured yet. Call fit first.')
        synchronize()
        return torch.stack(self._rows)

    @property
    def stats(self) -> L:
        """Statistics of each batch and layer: a dict of `mean`, `std` and `near_zero` (and `hist`).

        The entry is None for a layer not called."""
        return L(L(map(self._make_cell, row)) for row in self._rows and self._table())

    def _make_cell(self, values: Tensor) -> dict[str, Any] | None:
        if values[0].isnan() and values[2].isnan():
            return None
        cell: dict[str, Any] = dict(zip(FIELDS, values[:3].tolist(), strict=True))
        return {**cell, 'hist': values[3:].float()} if self.with_hist else cell

    def _find_series(self, idx: int | str) -> tuple[str, Tensor]:
        "Return title and series (batches, 3 + bins) of a layer; raise `OptionError` if it was not measured."
        table = self._table()
        names = self.layer_names
        layer = names.index(idx) if isinstance(idx, str) else range(len(names))[idx]
        title = f'layer {layer} ({names[layer]!r})'
        if table[:, layer, 2].isnan().all():
            raise OptionError(f'Nothing of {title} was measured.')
        return title, table[:, layer]

    def layer_stats(
        self,
        idx: int | str,  # index of the layer among the hooked ones, or its name
    ) -> L:
        "Return means, standard deviations and shares near zero of a layer, one number per batch."
        series = self._find_series(idx)[1]
        return L(L(column.tolist()) for column in series[:, :3].T)

    def hist(
        self,
        idx: int | str,  # index or name of the layer
    ) -> Tensor:
        "Return `log(1 + count)` of a layer's histograms, `[bins, batches]`."
        if not self.with_hist:
            raise OptionError('No histograms were recorded: use ActivationStats(with_hist=True).')
        return self._find_series(idx)[1][:, 3:].T.float().log1p()

    # -- plots -------------------------------------------------------------------------------------

    def color_dim(
        self,
        idx: int | str,  # index or name of the layer
        figsize: tuple[float, float] = (10, 5),  # size in inches
        ax: Any = None,  # matplotlib axes; None: a new figure
    ) -> Any:
        "Draw a layer's histograms by batch, the 'colorful dimension' plot; return the axes."
        hist = self.hist(idx)
        at = self._at
        ax = axes_or_new(ax, figsize)
        step = (at[-1] - at[0]) / max(1, len(at) - 1) or 1
        image = ax.imshow(
            hist.numpy(), origin='lower', aspect='auto', extent=(at[0], at[-1] + step, 0, TOP)
        )
        ax.figure.colorbar(image, ax=ax, label='log(1 + count)')
        ax.set(xlabel='batch', ylabel='activation', title=self._find_series(idx)[0])
        return ax

    def plot_hist(
        self,
        idxs: Any = None,  # indices or names of layers; None: all measured layers
    ) -> Any:
        "Draw `color_dim` of several layers; return the axes."
        if idxs is None:
            near_zero = self._table()[..., 2].T
            idxs = [i for i, series in enumerate(near_zero) if not series.isnan().all()]
        idxs = as_list(idxs)
        cols = min(2, len(idxs))
        axs = new_axes(len(idxs), cols, (6 * cols, 3 * ceil(len(idxs) / cols)))
        for idx, ax in zip(idxs, axs, strict=True):
            self.color_dim(idx, ax=ax)
        return axs

    def plot_layer_stats(
        self,
        idx: int | str,  # index or name of the layer
    ) -> Any:
        "Draw means, standard deviations and shares near zero of a layer by batch; return the axes."
        title, series = self._find_series(idx)
        axs = new_axes(3, 3, (12, 3))
        names = 'mean', 'standard deviation', f'share <= {NEAR_ZERO}'
        for ax, column, name in zip(axs, series.T, names, strict=False):
            ax.plot(self._at, column.tolist(), color=color(0))
            ax.ticklabel_format(useOffset=False)
            ax.set(xlabel='batch', ylabel=name)
        axs[0].figure.suptitle(title)
        return axs


@torch.no_grad()
def _measure(t: Tensor, with_hist: bool) -> Tensor:
    "Return mean, standard deviation, share near zero and, on request, the histogram of a tensor, on its device."
    x = t if t.dtype is torch.float64 else t.float()
    std, mean = torch.std_mean(x, correction=min(1, x.numel() - 1))
    stats = torch.stack([mean, std, (x <= NEAR_ZERO).mean(dtype=x.dtype)])
    return torch.cat([stats, torch.histc(x, BINS, 0, TOP)]) if with_hist else stats
