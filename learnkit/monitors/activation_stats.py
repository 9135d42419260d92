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
from learnkit.core.errors import OptionError
from learnkit.core.plotting import axes_or_new, color, new_axes
from learnkit.engine.dispatch import as_list

__all__ = ['ActivationStats']

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

    A batch is measured as a whole, also if it passes through a layer in microbatches
    (`Learner(microbatch=n)`) or several times (a shared layer). A layer with several outputs (an
    LSTM) has statistics of each: `part`. With `is_forward=False` the gradients of the outputs are
    measured. A new fit discards earlier statistics.

    Checkpointed: everything recorded.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(n_train=3, cbs=ActivationStats())
    >>> with learn.no_bar(): learn.fit(1)
    >>> means, stds, near_zero = learn.activation_stats.layer_stats(0)
    >>> len(means), min(near_zero) >= 0
    (3, True)
    """

    order = -20
    run_in = 'fit'
    remove_on_find = True

    def __init__(
        self,
        with_hist: bool = False,  # whether to record histograms, for `hist` and `color_dim`
        **options: Any,  # options of `HookCallback`; `cpu` is False
    ) -> None:
        super().__init__(**{'cpu': False, **options})
        self.with_hist = with_hist
        self._records = _Records()
        # (layer, part, size) and statistics of each call in the current batch
        self._batch: list[tuple[tuple[int, ...], Tensor]] = []

    # -- recording ---------------------------------------------------------------------------------

    @override
    def before_fit(self) -> None:
        "Discard earlier statistics."
        super().before_fit()
        self._records = _Records()

    @override
    def before_batch(self) -> None:
        "Hook this batch if it is due."
        super().before_batch()
        if self.learn.training:
            self._batch = []

    @override
    def hook(self, m: nn.Module, inp: Any, out: Any) -> None:
        "Measure the output of a layer in the loop's own forward passes in training."
        learn = self.learn
        if not learn.training or learn.closure.repeating:
            return
        if self.is_forward and 'pred' in learn.__dict__:
            return
        layer = self._layer_indices[id(m)]
        outputs = [t for t in tensors_in(out) if t.numel()]
        for part, t in enumerate(outputs):
            self._batch.append(((layer, part, t.numel()), _measure(t, self.with_hist)))

    @override
    def after_batch(self) -> None:
        "Record the statistics of this batch."
        if self.learn.training:
            if self._batch:
                self._records.add(self.learn.train_iter, self._batch)
            self._batch = []
        super().after_batch()

    @override
    def cleanup(self) -> None:
        "Remove the hooks; drop an interrupted batch."
        super().cleanup()
        self._batch = []

    @override
    def _find(self) -> None:
        super()._find()
        self._layer_indices = {id(m): i for i, m in enumerate(self.modules)}

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return everything recorded."
        layers = {'layers': list(self.layer_names)}
        return {**super().state_dict(), **self._records.state_dict(), **layers}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the record."
        super().load_state_dict(sd)
        self._records = _Records()
        self.layer_names = list(sd['layers'])
        self._records.load_state_dict(sd)

    # -- reading -----------------------------------------------------------------------------------

    @property
    def stats(self) -> L:
        """Statistics of each batch and layer: a dict of `mean`, `std` and `near_zero` (and `hist`).

        The entry is a list of dicts for a layer with several outputs, None for a layer not
        called."""
        columns = [self._list_cells(layer) for layer in range(len(self.layer_names))]
        return L(L(cells) for cells in zip(*columns, strict=True))

    def _list_cells(self, layer: int) -> list[Any]:
        "Return the statistics of one layer, one entry per batch."
        cells: list[list[Any]] = [[] for _ in self._records.at]
        for part in self._records.parts(layer):
            for found, values in zip(cells, self._records.series(layer, part), strict=True):
                if values[0]:
                    found.append(self._make_cell(values[1:]))
        return [found[0] if len(found) == 1 else found or None for found in cells]

    def _make_cell(self, values: Tensor) -> dict[str, Any]:
        cell: dict[str, Any] = dict(zip(FIELDS, values[:3].tolist(), strict=True))
        return {**cell, 'hist': values[3:].float()} if self.with_hist else cell

    def _find_series(self, idx: int | str, part: int) -> tuple[str, Tensor]:
        "Return title and series (batches, 3 + bins) of a layer; raise `OptionError` if unknown."
        layer = self._find_layer(idx)
        title = f'layer {layer} ({self.layer_names[layer]!r})' + (f', part {part}' if part else '')
        parts = self._records.parts(layer)
        if part not in parts:
            raise OptionError(f'Nothing of {title} was measured: it has the parts {parts}.')
        return title, self._records.series(layer, part)[:, 1:]

    def _find_layer(self, idx: int | str) -> int:
        "Return the index of a hooked layer, given by its index or name."
        names = self.layer_names
        try:
            return names.index(idx) if isinstance(idx, str) else range(len(names))[idx]
        except (ValueError, IndexError):
            raise OptionError(
                f'There is no layer {idx!r}: a fit hooks layers, and `layer_names` lists the {len(names)} of '
                'the last fit.'
            ) from None

    def layer_stats(
        self,
        idx: int | str,  # index of the layer among the hooked ones, or its name
        part: int = 0,  # index of one of several outputs
    ) -> L:
        "Return means, standard deviations and shares near zero of a layer, one number per batch."
        series = self._find_series(idx, part)[1]
        return L(L(column.tolist()) for column in series[:, :3].T)

    def hist(
        self,
        idx: int | str,  # index or name of the layer
        part: int = 0,  # index of one of several outputs
    ) -> Tensor:
        "Return `log(1 + count)` of a layer's histograms, `[bins, batches]`."
        if not self.with_hist:
            raise OptionError('No histograms were recorded: use ActivationStats(with_hist=True).')
        return self._find_series(idx, part)[1][:, 3:].T.float().log1p()

    # -- plots -------------------------------------------------------------------------------------

    def color_dim(
        self,
        idx: int | str,  # index or name of the layer
        figsize: tuple[float, float] = (10, 5),  # size in inches
        ax: Any = None,  # matplotlib axes; None: a new figure
        part: int = 0,  # index of one of several outputs
    ) -> Any:
        "Draw a layer's histograms by batch, the 'colorful dimension' plot; return the axes."
        hist = self.hist(idx)
        at = self._records.at
        ax = axes_or_new(ax, figsize)
        step = (at[-1] - at[0]) / max(1, len(at) - 1) or 1
        image = ax.imshow(
            hist.numpy(), origin='lower', aspect='auto', extent=(at[0], at[-1] + step, 0, TOP)
        )
        ax.figure.colorbar(image, ax=ax, label='log(1 + count)')
        ax.set(xlabel='batch', ylabel='activation', title=self._find_series(idx, part)[0])
        return ax

    def plot_hist(
        self,
        idxs: Any = None,  # indices or names of layers; None: all measured layers
        figsize: tuple[float, float] | None = None,  # size in inches
    ) -> Any:
        "Draw `color_dim` of several layers; return the axes."
        if idxs is None:
            table = self._table() if self._rows else torch.empty(0, 0, 3)
            idxs = [i for i, near in enumerate(table[..., 2].T) if not near.isnan().all()]
        idxs = as_list(idxs)
        if not idxs:
            raise OptionError('Nothing was measured yet: call fit first.')
        cols = min(2, len(idxs))
        rows = ceil(len(idxs) / cols)
        axs = new_axes(len(idxs), cols, figsize or (6 * cols, 3 * rows))
        for idx, ax in zip(idxs, axs, strict=True):
            self.color_dim(idx, ax=ax)
        return axs

    def plot_layer_stats(
        self,
        idx: int | str,  # index or name of the layer
        part: int = 0,  # index of one of several outputs
    ) -> Any:
        "Draw means, standard deviations and shares near zero of a layer by batch; return the axes."
        title, series = self._find_series(idx, part)
        axs = new_axes(3, 3, (12, 3))
        names = 'mean', 'standard deviation', f'share <= {NEAR_ZERO}'
        for ax, column, name in zip(axs, series.T, names, strict=False):
            ax.plot(self._records.at, column.tolist(), color=color(0))
            ax.ticklabel_format(useOffset=False)
            ax.set(xlabel='batch', ylabel=name)
        axs[0].figure.suptitle(title)
        return axs


class _Records:
    "Statistics of each call of a layer, copied to the host without waiting."

    def __init__(self) -> None:
        self.at: list[int] = []  # index in the fit of each batch
        # of each call: index in `at`, layer, part, size; and its statistics, [n calls, 3 + bins]
        self.keys = torch.empty(0, 4, dtype=torch.int64)
        self.numbers = torch.empty(0, 3)
        # calls that are not in these tables yet
        self.new_keys: list[tuple[int, ...]] = []
        self.new_numbers: list[Tensor] = []

    def add(self, at: int, calls: list[tuple[tuple[int, ...], Tensor]]) -> None:
        "Record the calls of one batch."
        self.new_keys += [(len(self.at), *key) for key, _ in calls]
        numbers = torch.stack([t.to(calls[0][1].device) for _, t in calls])
        self.new_numbers.append(numbers.to('cpu', non_blocking=True))
        self.at.append(at)

    def table(self) -> tuple[Tensor, Tensor]:
        "Return keys and statistics of all calls, after waiting for unfinished copies."
        if self.new_keys:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            old = [self.numbers] if len(self.numbers) else []
            self.keys = torch.cat([self.keys, torch.tensor(self.new_keys)])
            self.numbers = torch.cat([*old, *self.new_numbers])
            self.new_keys = []
            self.new_numbers = []
        return self.keys, self.numbers

    def parts(self, layer: int) -> list[int]:
        "Return the indices of the measured outputs of a layer."
        keys = self.table()[0]
        return keys[keys[:, 1] == layer, 2].unique().tolist()

    def series(self, layer: int, part: int) -> Tensor:
        "Return size, mean, std, near_zero and histogram of each batch [batches, 4 + bins], over its calls."
        keys, numbers = self.table()
        is_selected = (keys[:, 1] == layer) & (keys[:, 2] == part)
        batch = keys[is_selected, 0]
        n = keys[is_selected, 3].double()
        hist = numbers[is_selected, 3:].double()
        mean, var, near = numbers[is_selected, :3].double().T

        def total(t: Tensor) -> Tensor:
            return torch.zeros(len(self.at), *t.shape[1:], dtype=t.dtype).index_add(0, batch, t)

        size = total(n)
        joint_mean = total(n * mean) / size
        # sum of squares within calls and between them
        squares = total(n * (var + (mean - joint_mean[batch]) ** 2))
        std = (squares / (size - 1)).sqrt()
        columns = torch.stack([size, joint_mean, std, total(n * near) / size], 1)
        return torch.cat([columns, total(hist)], 1)

    def state_dict(self) -> dict[str, Any]:
        keys, numbers = self.table()
        return {'keys': keys, 'numbers': numbers, 'at': list(self.at)}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self.at = list(sd['at'])
        self.keys = sd['keys']
        self.numbers = sd['numbers']


@torch.no_grad()
def _measure(t: Tensor, with_hist: bool) -> Tensor:
    "Return mean, variance, share near zero and, on request, the histogram of a tensor, on its device."
    x = t if t.dtype is torch.float64 else t.float()
    var, mean = torch.var_mean(x, correction=0)
    stats = torch.stack([mean, var, (x <= NEAR_ZERO).mean(dtype=x.dtype)])
    return torch.cat([stats, torch.histc(x, BINS, 0, TOP)]) if with_hist else stats
