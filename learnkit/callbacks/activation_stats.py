"""Statistics of what layers put out in training: means, standard deviations, shares near zero, histograms."""

from __future__ import annotations

from typing import Any

import torch
from fastcore.foundation import L
from torch import Tensor, nn

from learnkit.callbacks.hooks import HookCallback, tensors_in
from learnkit.core.errors import OptionError, did_you_mean
from learnkit.core.plotting import axes_or_new, color, new_axes
from learnkit.core.time import Time
from learnkit.engine.dispatch import as_list

__all__ = ['ActivationStats']

NEAR_ZERO = (
    0.05  # what is at most this counts as near zero, negative numbers too: fastai's definition
)
BINS, TOP = 40, 10  # of the histograms, from 0 to TOP; what lies outside is not counted
SEND_EVERY = 64  # batches whose numbers go to the host in one copy
FIELDS = ('mean', 'std', 'near_zero')


class ActivationStats(HookCallback):
    """Record mean, standard deviation and share near zero of what layers put out, for each training batch.

    Near zero is what is at most 0.05, as in fastai: after a ReLU, the dead share. `layer_stats(idx)` has the three
    series of a layer (by number or name), `stats` all of them, and `plot_layer_stats`, `color_dim` and `plot_hist` draw
    them. Numbers are computed on the device, in float32 (float64 for float64), and travel in groups of 64 batches.

    A batch is measured as a whole, also when it goes through a layer in pieces (`Learner(microbatch=n)`) or several
    times (a shared layer). A layer that puts out several tensors (an LSTM) has statistics of each: `part`. With
    `is_forward=False` it measures the gradients of the outputs. A new fit starts anew.

    Checkpointed: everything recorded.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(n_train=3, cbs=ActivationStats())
    >>> with learn.no_bar(): learn.fit(1)
    >>> means, stds, near_zero = learn.activation_stats.layer_stats(0)
    >>> len(means), min(near_zero) >= 0
    (3, True)
    """

    order, remove_on_find = -20, True

    def __init__(
        self,
        with_hist: bool = False,  # also histograms, 40 bins in 0 to 10, for `hist` and `color_dim`
        *,
        modules: Any = None,  # these as for `HookCallback`
        every: int | str | Time | None = None,
        remove_end: bool = True,
        is_forward: bool = True,
        detach: bool = True,
        cpu: bool = False,  # move whole activations to the CPU before they are measured: slow
        include_paramless: bool = False,
    ) -> None:
        super().__init__(modules, every, remove_end, is_forward, detach, cpu, include_paramless)
        self.with_hist, self._records = with_hist, _Records()
        self._batch: list[
            tuple[tuple[int, ...], Tensor]
        ] = []  # of each call so far: (layer, part, size), numbers

    # -- recording ---------------------------------------------------------------------------------

    def before_fit(self) -> None:
        "Start anew, unless this is an evaluation."
        super().before_fit()
        if self.learn.fitting:
            self._records = _Records()

    def before_batch(self) -> None:
        "Hook this batch, when it is due."
        super().before_batch()
        if self.learn.training:
            self._batch = []

    def hook(self, m: nn.Module, inp: Any, out: Any) -> None:
        "Measure the output of a layer in training: of the loop's own forward pass, not of a repetition."
        learn = self.learn
        if (
            not learn.training
            or learn.run.repeating
            or (self.is_forward and 'pred' in learn.__dict__)
        ):
            return
        layer = self._places[id(m)]
        for part, t in enumerate(t for t in tensors_in(out) if t.numel()):
            self._batch.append(((layer, part, t.numel()), _measured(t, self.with_hist)))

    def after_batch(self) -> None:
        "Keep what this batch has given."
        if self.learn.training and self._batch:
            self._records.add(self.learn.train_iter, self._batch)
        if self.learn.training:
            self._batch = []
        super().after_batch()

    def cleanup(self) -> None:
        "Take the hooks off; forget the batch that a failure cut short."
        super().cleanup()
        self._batch = []

    def _find(self) -> None:
        super()._find()
        self._places = {id(m): i for i, m in enumerate(self.modules)}

    def state_dict(self) -> dict[str, Any]:
        "Return everything recorded."
        return {
            **(super().state_dict() or {}),
            **self._records.state_dict(),
            'layers': list(self.layer_names),
        }

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Go on recording after what was recorded."
        if 'before' in sd:
            super().load_state_dict(sd)
        self._records, self.layer_names = _Records(), list(sd['layers'])
        self._records.load_state_dict(sd)

    # -- reading -----------------------------------------------------------------------------------

    @property
    def stats(self) -> L:
        """For each measured batch, for each layer, a dict of `mean`, `std` and `near_zero` (and `hist`).

        It is a list of such dicts for a layer with several outputs, and None for one that was not called."""
        columns = [self._cells(layer) for layer in range(len(self.layer_names))]
        return L(L(column[i] for column in columns) for i in range(len(self._records.at)))

    def _cells(self, layer: int) -> list[Any]:
        "Return the dicts of one layer, a batch each."
        parts = [
            [self._cell(v) for v in self._records.series(layer, p)]
            for p in self._records.parts(layer)
        ]
        if not parts:
            return [None] * len(self._records.at)
        return [
            row[0] if len(row) == 1 else row or None
            for row in ([c for c in cells if c] for cells in zip(*parts, strict=True))
        ]

    def _cell(self, values: Tensor) -> dict[str, Any] | None:
        size, *three = values[:4].tolist()
        if not size:
            return None
        cell: dict[str, Any] = dict(zip(FIELDS, three, strict=True))
        return {**cell, 'hist': values[4:].float()} if self.with_hist else cell

    def _chosen(self, idx: int | str, part: int) -> tuple[str, Tensor]:
        "Return a layer's title and its series, mean to histogram; raise `OptionError` when there is none."
        names = self.layer_names
        if isinstance(idx, str) and idx not in names:
            raise OptionError(
                f'No layer {idx!r} was hooked.{did_you_mean(idx, names)} See `layer_names`.'
            )
        if isinstance(idx, int) and not -len(names) <= idx < len(names):
            raise OptionError(
                f'There is no layer {idx}: {len(names)} were hooked.{" Call fit first." * (not names)}'
            )
        layer = names.index(idx) if isinstance(idx, str) else idx % len(names)
        title = f'layer {layer} ({names[layer]!r})' + (f', part {part}' if part else '')
        if part not in self._records.parts(layer):
            raise OptionError(
                f'Nothing of {title} was measured: it has the parts {self._records.parts(layer)}.'
            )
        return title, self._records.series(layer, part)[:, 1:]

    def layer_stats(
        self,
        idx: int | str,  # the layer's number among those hooked, or its name
        part: int = 0,  # which of several outputs
    ) -> L:
        "Return means, standard deviations and shares near zero of a layer, one number a batch each."
        return L(L(column.tolist()) for column in self._chosen(idx, part)[1][:, :3].T)

    def hist(
        self,
        idx: int | str,  # the layer's number or name
        part: int = 0,  # which of several outputs
    ) -> Tensor:
        "Return `log(1 + count)` of a layer's histograms, `[bins, batches]`."
        if not self.with_hist:
            raise OptionError('No histograms were recorded: use ActivationStats(with_hist=True).')
        return self._chosen(idx, part)[1][:, 3:].T.float().log1p()

    # -- plots -------------------------------------------------------------------------------------

    def color_dim(
        self,
        idx: int | str,  # the layer's number or name
        figsize: tuple[float, float] = (10, 5),  # inches
        ax: Any = None,  # matplotlib axes; None: a figure of its own
        part: int = 0,  # which of several outputs
    ) -> Any:
        "Draw a layer's histograms side by side, one column a batch: the 'colourful dimension' plot. Return the axes."
        hist, at = self.hist(idx, part), self._records.at
        ax = axes_or_new(ax, figsize)
        step = (at[-1] - at[0]) / max(1, len(at) - 1) or 1
        image = ax.imshow(
            hist.numpy(), origin='lower', aspect='auto', extent=(at[0], at[-1] + step, 0, TOP)
        )
        ax.figure.colorbar(image, ax=ax, label='log(1 + count)')
        ax.set(xlabel='batch', ylabel='activation', title=self._chosen(idx, part)[0])
        return ax

    def plot_hist(
        self,
        idxs: Any = None,  # numbers or names of layers; None: all that were measured
        figsize: tuple[float, float] | None = None,  # inches
    ) -> Any:
        "Draw `color_dim` of several layers; return the axes."
        if idxs is None:
            idxs = [i for i in range(len(self.layer_names)) if self._records.parts(i)]
        idxs = as_list(idxs)
        if not idxs:
            raise OptionError('Nothing was measured yet: call fit first.')
        cols = min(2, len(idxs))
        axs = new_axes(len(idxs), cols, figsize or (6 * cols, 3 * -(-len(idxs) // cols)))
        for idx, ax in zip(idxs, axs, strict=True):
            self.color_dim(idx, ax=ax)
        return axs

    def plot_layer_stats(
        self,
        idx: int | str,  # the layer's number or name
        part: int = 0,  # which of several outputs
    ) -> Any:
        "Draw means, standard deviations and shares near zero of a layer by batch; return the axes."
        title, series = self._chosen(idx, part)
        axs = new_axes(3, 3, (12, 3))
        names = 'mean', 'standard deviation', f'share <= {NEAR_ZERO}'
        for ax, column, name in zip(axs, series.T, names, strict=False):
            ax.plot(self._records.at, column.tolist(), color=color(0))
            ax.ticklabel_format(useOffset=False)
            ax.set(xlabel='batch', ylabel=name)
        axs[0].figure.suptitle(title)
        return axs


class _Records:
    "What was measured at each call of a layer: collected on the device, copied to the host in groups, joined there."

    def __init__(self) -> None:
        self.at: list[int] = []  # the number in the fit of each batch
        self.keys: list[
            tuple[int, ...]
        ] = []  # of calls since the last copy: place in `at`, layer, part, size
        self.pending: list[Tensor] = []  # of each batch since the last copy: [calls, 3 + bins]
        self.sent: list[
            tuple[Tensor, ...]
        ] = []  # on the host: keys [n, 4] and numbers [n, 3 + bins]
        self.device = torch.device('cpu')  # a GPU that copies may still come from

    def add(self, at: int, calls: list[tuple[tuple[int, ...], Tensor]]) -> None:
        "Keep what the layers gave in one batch."
        self.keys += [(len(self.at), *key) for key, _ in calls]
        self.pending.append(torch.stack([t.to(calls[0][1].device) for _, t in calls]))
        self.at.append(at)
        if len(self.pending) >= SEND_EVERY:
            self.send()

    def send(self) -> None:
        "Start the copy of what is pending to the host; only from a GPU it need not be waited for."
        numbers = torch.cat([t.to(self.pending[0].device) for t in self.pending])
        if numbers.is_cuda:
            self.device = numbers.device
        self.sent.append((torch.tensor(self.keys), numbers.to('cpu', non_blocking=numbers.is_cuda)))
        self.pending, self.keys = [], []

    def table(self) -> tuple[Tensor, ...]:
        "Return keys and numbers of all calls, once they have arrived."
        if self.pending:
            self.send()
        if self.device.type == 'cuda':
            torch.cuda.synchronize(self.device)
        self.device = torch.device('cpu')
        if not self.sent:
            return torch.empty(0, 4, dtype=torch.int64), torch.empty(0, 3)
        if len(self.sent) > 1:
            self.sent = [tuple(torch.cat(list(o)) for o in zip(*self.sent, strict=True))]
        return self.sent[0]

    def parts(self, layer: int) -> list[int]:
        "Return which outputs of a layer were measured."
        keys = self.table()[0]
        return keys[keys[:, 1] == layer, 2].unique().tolist()

    def series(self, layer: int, part: int) -> Tensor:
        "Return size, mean, std, near_zero and histogram of each batch [batches, 4 + bins], its calls taken together."
        keys, numbers = self.table()
        mine = (keys[:, 1] == layer) & (keys[:, 2] == part)
        batch, n, hist = keys[mine, 0], keys[mine, 3].double(), numbers[mine, 3:].double()
        mean, var, near = numbers[mine, :3].double().T

        def total(t: Tensor) -> Tensor:
            return torch.zeros(len(self.at), *t.shape[1:], dtype=t.dtype).index_add(0, batch, t)

        size = total(n)
        joint = total(n * mean) / size
        # the spread within calls and between them
        squares = total(n * (var + (mean - joint[batch]) ** 2))
        four = torch.stack([size, joint, (squares / (size - 1)).sqrt(), total(n * near) / size], 1)
        return torch.cat([four, total(hist)], 1)

    def state_dict(self) -> dict[str, Any]:
        keys, numbers = self.table()
        return {'keys': keys, 'numbers': numbers, 'at': list(self.at)}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self.at, self.sent = list(sd['at']), [(sd['keys'], sd['numbers'])]


@torch.no_grad()
def _measured(t: Tensor, with_hist: bool) -> Tensor:
    "Return mean, variance, share near zero and, if asked for, the histogram of a tensor, on its device."
    x = t if t.dtype is torch.float64 else t.float()
    var, mean = torch.var_mean(x, correction=0)
    three = torch.stack([mean, var, (x <= NEAR_ZERO).mean(dtype=x.dtype)])
    return torch.cat([three, torch.histc(x, BINS, 0, TOP)]) if with_hist else three
