"""A copy of weights, buffers and optimizer states in memory, and the way back to it.

It goes by names and is made of tensors, numbers, texts and containers of them, so that a checkpoint can carry it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from learnkit.callbacks.nan_diagnosis import named_parameters
from learnkit.core.dtensor import cut_again, distribute_like

__all__ = ['Snapshot', 'take_snapshot', 'put_back', 'slots_of', 'copied']

Snapshot = dict[str, Any]  # 'weights', 'buffers', 'optimizers' and 'callbacks', each by name
# where a module keeps a buffer: there it is found also when replaced
Slot = tuple[dict[str, Tensor | None], str]


def take_snapshot(
    learn: Any,  # a Learner with an optimizer, between two steps
) -> Snapshot:
    """Copy trainable parameters, buffers, optimizer states, and the states of callbacks that follow the weights.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner()
    >>> learn.create_opt()
    >>> kept = take_snapshot(learn)
    >>> _ = learn.model.a.data.zero_()
    >>> put_back(learn, kept)
    >>> bool(learn.model.a == kept['weights']['a'])
    True
    """
    named = named_parameters(learn)
    # of None there is no slot
    buffers = {name: slot[0][slot[1]].clone() for name, slot in slots_of(learn).items()}  # type: ignore[union-attr]
    return {
        'weights': {name: p.detach().clone() for name, p in named.items() if p.requires_grad},
        'buffers': buffers,
        'optimizers': {key: states_of(o, named) for key, o in learn.opt.optimizers.items()},
        'callbacks': {key: copied(cb.state_dict()) for key, cb in followers(learn).items()},
    }


@torch.no_grad()
def put_back(learn: Any, kept: Snapshot) -> None:
    "Write a snapshot back into the same tensors; rates and other hyper-parameters stay as they are."
    cut_again(learn.model)
    named = named_parameters(learn)
    for name, value in kept['weights'].items():
        if name in named:
            named[name].copy_(distribute_like(value, named[name]))
    for name, (store, key) in slots_of(learn).items():
        if name in kept['buffers']:
            store[key] = refilled(store[key], kept['buffers'][name])
    for key, o in learn.opt.optimizers.items():
        put_states_back(o, named, kept['optimizers'].get(key, {}))
    for key, cb in followers(learn).items():
        if key in kept['callbacks']:
            cb.load_state_dict(kept['callbacks'][key])


def slots_of(learn: Any) -> dict[str, Slot]:
    "Return where the model, and a loss function that is a module, keep their buffers, by name."
    roots = [
        ('', learn.model),
        *([('loss_func.', learn.loss_func)] if isinstance(learn.loss_func, nn.Module) else []),
    ]
    return {
        f'{start}{prefix}.{key}' if prefix else f'{start}{key}': (m._buffers, key)
        for start, root in roots
        for prefix, m in root.named_modules()
        for key, b in m._buffers.items()
        if b is not None
    }


def followers(learn: Any) -> dict[str, Any]:
    "Return the callbacks whose state belongs to the weights, by key: an average of them, for one."
    return {
        learn.callbacks.keys[id(cb)]: cb
        for cb in learn.cbs
        if getattr(cb, 'follows_weights', False)
    }


def states_of(o: torch.optim.Optimizer, named: dict[str, Any]) -> dict[str, Any]:
    "Copy the states of an optimizer, by the names of their parameters."
    return {name: copied(dict(o.state[p])) for name, p in named.items() if p in o.state}


def put_states_back(o: torch.optim.Optimizer, named: dict[str, Any], kept: dict[str, Any]) -> None:
    "Give an optimizer its states back, and take from parameters those that they did not have yet."
    for name, p in named.items():
        if p not in o.state:
            continue
        if name not in kept:
            del o.state[p]
        else:
            state = {k: refilled(o.state[p].get(k), v) for k, v in kept[name].items()}
            o.state[p].clear()
            o.state[p].update(state)


def copied(value: Any) -> Any:
    "Copy nested dicts, lists and tuples with the tensors in them."
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return type(value)(map(copied, value)) if type(value) in (list, tuple) else value


def refilled(now: Any, kept: Any) -> Any:
    "Return a kept value, in the tensor that is there now where it fits."
    fits = (
        isinstance(now, Tensor)
        and isinstance(kept, Tensor)
        and (now.shape, now.dtype) == (kept.shape, kept.dtype)
    )
    return now.copy_(distribute_like(kept, now)) if fits else copied(kept)
