# SPDX-License-Identifier: Apache-2.0
"""Search for the origin of NaN and infinity: entries of a batch, samples, parameters, modules.

These functions run only after a value that is not finite was found, so they may be slow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from learnkit.callbacks.hooks import Hooks, run_uncompiled
from learnkit.callbacks.model_summary import restored_model
from learnkit.comm.dtensor import local_shard, total_norm
from learnkit.core.batch import apply_model, form_of, tensors_in
from learnkit.core.model import bare_model, name_of

if TYPE_CHECKING:
    from learnkit.learner import Learner

# -- checks ----------------------------------------------------------------------------------------


@torch.no_grad()
def all_finite(
    tensors: list[Tensor],  # tensors on one device; on a GPU the host waits for the result
) -> bool:
    """Return True if every number in a list of tensors is finite.

    >>> all_finite([torch.full((3,), 1e30)]), all_finite([torch.ones(2), torch.tensor([1., -torch.inf])])
    (True, False)
    """
    dense = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    return not dense or bool(total_norm(dense, float('inf')).isfinite())


def is_finite(value: Any) -> bool:
    "Return True if all floating-point and complex numbers in a nested structure are finite."
    tensors = [local_shard(t) for t in tensors_in(value)]
    return all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point() or t.is_complex())


# -- names -----------------------------------------------------------------------------------------


def named_parameters(learn: Learner) -> dict[str, nn.Parameter]:
    "Return the parameters of the model and of a loss function that is a module, by name."
    found = dict(learn.model.named_parameters())
    if isinstance(learn.loss_func, nn.Module):
        found |= {f'loss_func.{name}': p for name, p in learn.loss_func.named_parameters()}
    return found


def find_bad_gradients(learn: Learner) -> list[str]:
    "Return the names of the parameters whose gradients are not finite."
    return [
        name
        for name, p in named_parameters(learn).items()
        if p.grad is not None and not is_finite(p.grad)
    ]


def format_few(items: list[Any], most: int = 5) -> str:
    """Return the first items of a list as a string, with the number of further items.

    >>> format_few([3, 1, 2]), format_few(list('abcdefg'), 2)
    ('3, 1, 2', 'a, b and 5 more')
    """
    text = ', '.join(map(str, items[:most]))
    return f'{text} and {len(items) - most} more' if len(items) > most else text


# -- origin ----------------------------------------------------------------------------------------


def explain_nonfinite(
    learn: Learner,  # a Learner within a batch, after its loss
) -> str:
    """Return the origin of the loss's NaN or infinity in a sentence or two.

    The search checks, in this order: the batch as the loader returned it, with its samples; the batch
    as callbacks left it; parameters and buffers; and the outputs of modules in a second forward
    pass with the same random numbers, after which buffers are restored.
    """
    indices = learn.parts.positions.indices(learn)
    if learn.loss.isfinite():
        return f'The loss function returned {learn.loss.item():g}: a callback has changed it since.'
    names = find_bad_data(learn, indices) or find_bad_weights(learn)
    if names:
        return f'Not finite: {format_few(names)}.'
    if is_finite(learn.__dict__.get('pred')):
        text = f'Inputs, targets and predictions are finite: see the loss function, {name_of(learn.loss_func)}.'
    else:
        text = f'Not finite: {find_bad_module(learn) or "the predictions"}.'
    return text + describe_samples(learn)


def describe_samples(learn: Learner) -> str:
    "Return a sentence with the samples of the batch, or '' if unknown."
    indices = learn.parts.positions.indices(learn)
    return f' The batch has the samples {format_few(indices)} of the data set.' if indices else ''


def find_bad_data(learn: Learner, indices: list[int] | None) -> list[str]:
    "Return the entries of the batch that are not finite, each with its samples."
    raw = learn.xb, learn.yb
    if learn.batch is not None:  # an overridden `all_batches` does not set it
        raw = form_of(learn.dls, learn.dl_name).split(learn.batch, predicting=True)
    bad = [name + describe_rows(rows, indices) for name, rows in iter_bad_entries(*raw)]
    left = iter_bad_entries(learn.xb, learn.yb)
    return bad or [f'{name}, as a callback left it' for name, _ in left]


def iter_bad_entries(xb: tuple[Any, ...], yb: tuple[Any, ...]) -> Iterator[tuple[str, list[int]]]:
    "Yield name and rows of each entry of a batch that is not finite; rows are [] if not samples."
    for kind, entries in ('input', xb), ('target', yb):
        leaves = [leaf for i, o in enumerate(entries) for leaf in iter_leaves(f'{kind} {i}', o)]
        for name, value in leaves:
            if is_finite(value):
                continue
            has_rows = isinstance(value, Tensor) and not value.is_sparse and value.ndim > 0
            rows = enumerate(value) if has_rows else ()
            yield name, [i for i, sample in rows if not is_finite(sample)]


def iter_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    "Yield a value, or the entries of a mapping one by one."
    if not isinstance(value, Mapping):
        yield name, value
    else:
        for k, v in value.items():
            yield from iter_leaves(f'{name}[{k!r}]', v)


def describe_rows(rows: list[int], indices: list[int] | None) -> str:
    "Return the samples of some rows as a phrase, by data-set indices or by rows."
    if not rows:
        return ''
    s = 's' * (len(rows) > 1)
    if not indices or rows[-1] >= len(indices):
        return f' in row{s} {format_few(rows)} of the batch'
    return f' in sample{s} {format_few([indices[r] for r in rows])} of the data set (row{s} {format_few(rows)})'


def find_bad_weights(learn: Learner) -> list[str]:
    "Return the parameters that are not finite, and buffers with NaN: a mask may be infinite."
    bad = [f'parameter {name}' for name, p in named_parameters(learn).items() if not is_finite(p)]
    return bad + [f'buffer {name}' for name, b in learn.model.named_buffers() if b.isnan().any()]


def find_bad_module(learn: Learner) -> str | None:
    "Run the forward pass again; return the first module with an output that is not finite."
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None  # the other ranks do not join the forward pass
    model = bare_model(learn.model)
    found = list[str]()
    names = {m: name for name, m in model.named_modules()}

    def check_output(module: nn.Module, inputs: Any, out: Any) -> None:
        if found or is_finite(out):
            return
        kind = type(module).__name__
        name = f'{names[module]} ({kind})' if names[module] else f'the model, {kind}'
        if is_finite(inputs):
            found.append(f'the output of {name}')
        else:
            found.append(f'what is given to {name}, made outside of any module')

    try:
        with restored_model(model), run_uncompiled(model), Hooks(names, check_output, detach=False):
            with learn.contexts('forward'):
                apply_model(model, learn.xb)
    except Exception:
        pass  # the message then names no module
    return found[0] if found else None
