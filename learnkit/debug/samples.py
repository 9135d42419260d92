# SPDX-License-Identifier: Apache-2.0
"""Loss and gradient of each sample of a batch, and norms of each layer's activations and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from math import isnan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from learnkit.core.batch import (
    find_bs,
    map_tensors,
    microbatches,
    size_func_of,
    take_rows,
    tensors_in,
)
from learnkit.core.errors import LossError
from learnkit.core.html import never_raising, table, text_table
from learnkit.core.plotting import encode_figure, pyplot
from learnkit.data.show import show_samples
from learnkit.engine.callback import Callback
from learnkit.engine.snapshot import preserved_forward

if TYPE_CHECKING:
    from learnkit.learner import Learner

_MOST = 1 << 26  # elements of per-sample gradients that are computed together
_SHOWN = 8  # samples in the display
# errors of `torch.func` for models that it cannot transform
_UNSUPPORTED = (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError)


class Rows(list[dict[str, Any]]):
    "Rows of a table as dicts; a table in a notebook."

    def _repr_html_(self) -> str | None:
        names = [*self[0]] if self else []
        return table(names, [[_format(row[name]) for name in names] for row in self])


class Samples(Rows):
    """Samples of a batch as dicts, worst first.

    They are displayed as a table of the first eight, in a notebook with their pictures. Each picture
    has its own scale, and its largest value in the title."""

    def __init__(
        self,
        rows: list[dict[str, Any]],
        xb: tuple[Any, ...],  # inputs of the batch
    ) -> None:
        super().__init__(rows)
        self._xb = xb

    def __repr__(self) -> str:
        first = self[:_SHOWN]
        names = [*first[0]] if first else []
        rows = [[str(_format(row[name])) for name in names] for row in first]
        lines = [text_table([names, *rows], range(len(names)))] if first else ['no samples']
        return '\n'.join([*lines, *self._list_hidden()])

    @never_raising
    def _repr_html_(self) -> str:
        rows = Rows(self[:_SHOWN])._repr_html_() or ''
        hidden = ''.join(f'<div>{line}</div>' for line in self._list_hidden())
        return rows + hidden + self._draw()

    def _list_hidden(self) -> list[str]:
        "Return a line about the samples that are not displayed, if there are any."
        hidden = len(self) - _SHOWN
        return [f'... and {hidden} more samples, with smaller losses'] if hidden > 0 else []

    def _draw(self) -> str:
        "Return the inputs of the first samples as HTML."
        first = self[:_SHOWN]
        rows = [row['position'] for row in first]
        xb = take_rows(self._xb, len(self), rows)
        details = {name: [row[name] for row in first] for name in ('index', 'loss')}
        shown = show_samples(xb, details, scale_each=True)
        if not hasattr(shown, 'figure'):
            return str(shown._repr_html_())
        content = encode_figure(shown.figure)
        pyplot().close(shown.figure)
        text = f'Inputs of the {len(first)} samples with the largest losses, each with its index, loss and maximum'
        return f'<img class="picture" alt="{text}" src="data:image/png;base64,{content}">'


def _format(value: Any) -> Any:
    if value is None:
        return ''
    return f'{value:.4g}' if isinstance(value, float) else value


# -- samples ---------------------------------------------------------------------------------------


class _Loss(nn.Module):
    "Loss of a batch as a module, whose parameters `functional_call` replaces."

    def __init__(self, learn: Learner) -> None:
        super().__init__()
        self.model = learn.model
        self._learn = [learn]  # in a list, because it is not a part

    def forward(self, xb: tuple[Any, ...], yb: tuple[Any, ...], index: Tensor) -> Tensor:
        learn = self._learn[0]
        learn.xb, learn.yb = xb, yb
        output = learn.pred = learn.seams.model(learn)
        # a loss function that knows more about each sample than the targets, such as MixUp's
        narrowed = getattr(learn.loss_func, 'narrowed', None)
        with nullcontext() if narrowed is None else narrowed(index):
            loss: Tensor | None = learn.seams.loss(learn, output)
        if loss is None:
            raise LossError('samples(): the batch has no loss, so its samples have no losses.')
        return loss.mean()


def measure_samples(
    learn: Learner,
    vectorized: bool = True,  # use `torch.func` where the model allows it
) -> list[dict[str, Any]]:
    """Return position, loss and share of the gradient's norm of each sample of the current batch, worst first.

    Each sample goes through the model alone, in evaluation mode: BatchNorm uses its running statistics."""
    xb, yb = learn.xb, learn.yb
    owner = getattr(learn.loss_func, '__self__', None)
    if any(owner is cb for cb in learn.cbs):
        raise LossError(
            f'samples(): {type(owner).__name__} computes the loss of the whole batch at once, not of single samples. '
            '`moment.step(without=[i])` leaves samples out.'
        )
    loss = _Loss(learn)
    params = {name: p for name, p in loss.named_parameters() if p.requires_grad}
    contexts = learn.contexts('forward')
    with preserved_forward(learn.model), torch.enable_grad(), contexts:
        loss.eval()
        found = _measure_together(loss, params, xb, yb) if vectorized else None
        if found is None:
            n = find_bs(xb, yb, size_func_of(learn))
            device = tensors_in(xb)[0].device if tensors_in(xb) else None
            parts = zip(microbatches(xb, yb, 1, n), torch.arange(n, device=device), strict=True)
            found = [_measure_one(loss, params, *part, i[None]) for part, i in parts]
    learn.xb, learn.yb = xb, yb
    total = sum(norm for _, norm in found if not isnan(norm)) or 1.0
    rows = [
        {'position': i, 'loss': value, 'share': norm / total}
        for i, (value, norm) in enumerate(found)
    ]
    return sorted(rows, key=lambda row: (not isnan(row['loss']), -row['loss']))


def _measure_one(
    loss: nn.Module,
    params: Mapping[str, Tensor],
    xb: tuple[Any, ...],
    yb: tuple[Any, ...],
    index: Tensor,  # position of the sample in the batch, shape (1,)
) -> tuple[float, float]:
    "Return the loss of one sample, and the norm of its gradient."
    value = loss(xb, yb, index)
    grads = torch.autograd.grad(value, [*params.values()], allow_unused=True)
    return value.item(), _norm([g for g in grads if g is not None]).item()


def _measure_together(
    loss: nn.Module, params: Mapping[str, Tensor], xb: tuple[Any, ...], yb: tuple[Any, ...]
) -> list[tuple[float, float]] | None:
    "Return losses and norms of all samples by `torch.func`, or None for a model or batch that it cannot transform."
    n = len(tensors_in(xb)[0]) if tensors_in(xb) else 0
    if any(not t.ndim or len(t) != n for t in tensors_in((xb, yb))):
        return None

    def measure(
        values: Mapping[str, Tensor], xb: Any, yb: Any, index: Tensor
    ) -> tuple[Tensor, Tensor]:
        one = map_tensors((xb, yb, index), lambda t: t.unsqueeze(0))
        grads, value = grad_and_value(lambda p: functional_call(loss, p, one))(values)
        return value, _norm([*grads.values()])

    size = sum(p.numel() for p in params.values())
    values = {name: p.detach() for name, p in params.items()}
    index = torch.arange(n, device=tensors_in(xb)[0].device)
    together = vmap(
        measure, (None, 0, 0, 0), randomness='different', chunk_size=max(1, _MOST // max(size, 1))
    )
    try:
        losses, norms = together(values, xb, yb, index)
    except _UNSUPPORTED:
        return None
    return list(zip(losses.tolist(), norms.tolist(), strict=True))


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    "Return the norm of several tensors as of one vector."
    if not tensors:
        return torch.zeros(())
    return torch.stack([t.float().square().sum() for t in tensors]).sum().sqrt()


# -- layers ----------------------------------------------------------------------------------------


class LayerNorms(Callback):
    """Measure the norms of each layer's output and gradient at one batch.

    >>> from learnkit.testing import synth_learner
    >>> norms = LayerNorms(2)
    >>> with synth_learner(model=nn.Sequential(nn.Linear(1, 1)), cbs=norms).no_bar() as learn: learn.fit(1)
    >>> [sorted(row) for row in norms.norms.values()]
    [['activation', 'gradient']]
    """

    order = 9_000  # after callbacks that change gradients
    run_in = 'fit'
    run_valid = False

    def __init__(
        self,
        ba: int,  # number of the batch, over all fits
    ) -> None:
        self._ba = ba
        self._hooks: list[Any] = []
        # by the name of the layer; the gradient is None for a layer without parameters
        self.norms: dict[str, dict[str, float | None]] = {}

    def before_batch(self) -> None:
        "Observe the layers without parts in this batch."
        if self.learn.time.ba != self._ba:
            return
        for name, module in self.learn.model.named_modules():
            if next(module.children(), None) is None:
                hook = lambda module, inputs, output, name=name: self._note(name, output)
                self._hooks.append(module.register_forward_hook(hook))

    def _note(self, name: str, output: Any) -> None:
        found = [t.detach() for t in tensors_in(output) if t.is_floating_point()]
        self.norms[name] = {'activation': _norm(found).item(), 'gradient': None}

    def after_backward(self) -> None:
        self._read_gradients()

    def before_step(self) -> None:
        self._read_gradients()

    def _read_gradients(self) -> None:
        "Record the gradients: in `before_step` the gradients of the step, unscaled and clipped."
        for name, row in self.norms.items() if self._hooks else ():
            params = self.learn.model.get_submodule(name).parameters()
            grads = [p.grad for p in params if p.grad is not None]
            if grads:
                row['gradient'] = _norm(grads).item()

    def after_batch(self) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        "Remove the hooks."
        while self._hooks:
            self._hooks.pop().remove()
