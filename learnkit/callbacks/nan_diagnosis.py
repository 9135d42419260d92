"""Where NaN and infinity come from: which entry of a batch, which of its samples, which parameter, which module.

Nothing here runs before something has gone wrong, so that it may be slow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from learnkit.core.batch import apply_model, find_bs, form_of, is_sample_list, map_tensors
from learnkit.core.dtensor import grouped, local
from learnkit.core.errors import BatchError
from learnkit.core.model import bare_model, name_of
from learnkit.core.random import preserved_rng

__all__ = [
    'all_finite',
    'is_finite',
    'listed_few',
    'named_parameters',
    'samples_of',
    'samples_told',
    'why_not_finite',
    'bad_gradients',
]


# What is finite


@torch.no_grad()
def all_finite(
    tensors: list[Tensor],  # of one device; on a GPU the host waits for it
) -> bool:
    """Tell whether every number in a list of tensors is finite, in one look.

    What a scaler asks of gradients is three times as fast as a norm; it multiplies them by 1.

    >>> all_finite([torch.full((3,), 1e30)]), all_finite([torch.ones(2), torch.tensor([1., -torch.inf])])
    (True, False)
    """
    if not tensors:
        return True
    mine, _, group = grouped(tensors)
    dense = [t._values() if t.is_sparse else t for t in mine]
    found, one = torch.zeros(1, device=dense[0].device), torch.ones(1, device=dense[0].device)
    try:
        torch._amp_foreach_non_finite_check_and_unscale_(dense, found, one)
    except (RuntimeError, NotImplementedError):
        found.fill_(not all(map(is_finite, dense)))  # or of several devices
    if group is not None:
        torch.distributed.all_reduce(found, group=group)
    return not found.item()


def is_finite(value: Any) -> bool:
    "Tell whether every number in a nested structure is finite; what is no floating-point tensor is."
    seen: list[bool] = []

    def look(t: Tensor) -> Tensor:
        t = local(t)
        seen.append(not (t.is_floating_point() or t.is_complex()) or bool(t.isfinite().all()))
        return t

    map_tensors(value, look)
    return all(seen)


# Names


def named_parameters(learn: Any) -> dict[str, nn.Parameter]:
    "Return the parameters of model and loss function by name, and what else the optimizer has."
    found = dict(learn.model.named_parameters())
    known = {id(p) for p in found.values()}
    if isinstance(learn.loss_func, nn.Module):
        own = learn.loss_func.named_parameters()
        found |= {f'loss_func.{name}': p for name, p in own if id(p) not in known}
        known = {id(p) for p in found.values()}
    others = (
        [p for p in learn.opt.parameters() if id(p) not in known] if learn.opt is not None else []
    )
    return found | {f'{i} outside the model': p for i, p in enumerate(others)}


def bad_gradients(learn: Any) -> list[str]:
    "Return the names of the parameters whose gradient is not finite."
    return [
        name
        for name, p in named_parameters(learn).items()
        if p.grad is not None and not is_finite(p.grad)
    ]


def listed_few(items: list[Any], most: int = 5) -> str:
    """Write a list, and of a long one the beginning.

    >>> listed_few([3, 1, 2]), listed_few(list('abcdefg'), 2)
    ('3, 1, 2', 'a, b and 5 more')
    """
    return ', '.join(map(str, items[:most])) + (
        f' and {len(items) - most} more' if len(items) > most else ''
    )


def samples_of(learn: Any) -> list[int] | None:
    "Return the data set's indices of the batch at hand, None where they are not known."
    passes = getattr(learn, 'passes', None)
    return None if passes is None else passes.indices(learn)


# What is to blame


def why_not_finite(
    learn: Any,  # within a batch, after its loss
) -> str:
    """Say in a sentence or two where the loss's NaN or infinity comes from.

    In this order: entries of the batch as the loader gave it, with the samples; the same as callbacks left it;
    parameters and buffers; and else the first module to return it, found by a second forward pass with the same random
    numbers, after which buffers are as before.
    """
    indices = samples_of(learn)
    if learn.loss.isfinite():
        return f'The loss function gave {learn.loss.item():g}: a callback has changed it since.'
    if blamed := bad_data(learn, indices) or bad_weights(learn):
        return f'Not finite: {listed_few(blamed)}.'
    if is_finite(learn.__dict__.get('pred')):
        text = f'Inputs, targets and predictions are finite: see the loss function, {name_of(learn.loss_func)}.'
    else:
        text = f'Not finite: {first_bad_module(learn) or "the predictions"}.'
    return text + samples_told(learn)


def samples_told(learn: Any) -> str:
    "Say which samples the batch has, where that is known."
    indices = samples_of(learn)
    return f' The batch has the samples {listed_few(indices)} of the data set.' if indices else ''


def bad_data(learn: Any, indices: list[int] | None) -> list[str]:
    "Name the entries of the batch that are not finite, each with its samples."
    form = form_of(learn.dls, learn.dl_name)
    raw = (
        form.split(learn.batch, predicting=True)
        if learn.batch is not None
        else (learn.xb, learn.yb)
    )
    if blamed := [name + where(rows, indices) for name, rows in bad_entries(*raw)]:
        return blamed
    whole = 'microbatch' if learn.microbatch else 'batch'
    left = bad_entries(learn.xb, learn.yb)
    return [f'{name}{where(rows, None, whole)}, as a callback left it' for name, rows in left]


def bad_entries(xb: tuple[Any, ...], yb: tuple[Any, ...]) -> Iterator[tuple[str, list[int]]]:
    "Yield the names of the entries of a batch that are not finite, with their rows where rows are samples."
    try:
        bs = find_bs(xb, yb)
    except BatchError:
        bs = 0
    entries = [
        *((f'input {i}', x) for i, x in enumerate(xb)),
        *((f'target {i}', y) for i, y in enumerate(yb)),
    ]
    for name, value in (part for entry in entries for part in parts_of(*entry)):
        if is_finite(value):
            continue
        if is_sample_list(value, bs):
            yield name, [i for i, sample in enumerate(value) if not is_finite(sample)]
            continue
        by_row = (
            isinstance(value, Tensor) and not value.is_sparse and value.ndim and len(value) == bs
        )
        yield (
            name,
            (~value.isfinite()).reshape(bs, -1).any(1).nonzero().flatten().tolist()
            if by_row
            else [],
        )


def parts_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    "Yield a value, or the entries of a mapping one by one."
    if not isinstance(value, Mapping):
        yield name, value
    else:
        for k, v in value.items():
            yield from parts_of(f'{name}[{k!r}]', v)


def where(rows: list[int], indices: list[int] | None, whole: str = 'batch') -> str:
    "Say which samples it is, by the data set's indices or by their rows."
    if not rows:
        return ''
    s = 's' * (len(rows) > 1)
    if not indices or rows[-1] >= len(indices):
        return f' in row{s} {listed_few(rows)} of the {whole}'
    return f' in sample{s} {listed_few([indices[r] for r in rows])} of the data set (row{s} {listed_few(rows)})'


def bad_weights(learn: Any) -> list[str]:
    "Name the parameters that are not finite, and the buffers with NaN: infinite ones may be meant, in a mask."
    bad = [f'parameter {name}' for name, p in named_parameters(learn).items() if not is_finite(p)]
    return bad + [f'buffer {name}' for name, b in learn.model.named_buffers() if b.isnan().any()]


def first_bad_module(learn: Any) -> str | None:
    "Run the forward pass again and name the first module that returns, or is given, what is not finite."
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None  # the others do not join in
    model, found = bare_model(learn.model), list[str]()
    names = {m: name for name, m in model.named_modules()}

    def look(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if found or is_finite(out):
            return
        name = (
            f'{names[module]} ({type(module).__name__})'
            if names[module]
            else f'the model, {type(module).__name__}'
        )
        came_in = not is_finite((args, kwargs))
        found.append(
            f'what is given to {name}, made outside of any module'
            if came_in
            else f'the output of {name}'
        )

    hooks = []
    buffers = [
        (m, key, b, b.clone())
        for m in model.modules()
        for key, b in m._buffers.items()
        if b is not None
    ]
    # it would be compiled anew with the hooks
    compiled = vars(model).pop('_compiled_call_impl', None)
    try:
        hooks += [m.register_forward_hook(look, with_kwargs=True) for m in names]
        with torch.no_grad(), preserved_rng(), learn.contexts('forward'):
            apply_model(model, learn.xb)
    except Exception:
        pass  # this is but a help: what went wrong is told without it
    finally:
        if compiled is not None:
            model._compiled_call_impl = compiled
        for hook in hooks:
            hook.remove()
        for m, key, b, value in buffers:
            m._buffers[key] = b.copy_(value)
    return found[0] if found else None
