"""Copies of weights, buffers and optimizer states in memory, to roll back to.

A rollback point is a dict by name of tensors, numbers, strings and containers, so a checkpoint can
hold it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from learnkit.callbacks.nan_diagnosis import named_parameters
from learnkit.core.dtensor import distribute_like, reshard
from learnkit.core.learner_type import LearnerLike
from learnkit.engine.callback import declared

__all__ = ['RollbackPoint', 'make_rollback_point', 'roll_back', 'find_buffers', 'copy_nested']

RollbackPoint = dict[str, Any]  # 'weights', 'buffers', 'optimizers' and 'callbacks', each by name
# dict and key of a buffer in its module, which stay valid when the buffer is replaced
Slot = tuple[dict[str, Tensor | None], str]


def make_rollback_point(
    learn: LearnerLike,  # a Learner with an optimizer, between two steps
) -> RollbackPoint:
    """Copy trainable parameters, buffers, optimizer states, and the states of weight averages.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner()
    >>> learn.create_opt()
    >>> point = make_rollback_point(learn)
    >>> _ = learn.model.a.data.zero_()
    >>> roll_back(learn, point)
    >>> bool(learn.model.a == point['weights']['a'])
    True
    """
    named = named_parameters(learn)
    # a slot never holds None
    buffers = {name: slot[0][slot[1]].clone() for name, slot in find_buffers(learn).items()}  # type: ignore[union-attr]
    return {
        'weights': {name: p.detach().clone() for name, p in named.items() if p.requires_grad},
        'buffers': buffers,
        'optimizers': {key: copy_states(o, named) for key, o in learn.opt.optimizers.items()},
        'callbacks': {
            key: copy_nested(cb.state_dict()) for key, cb in find_followers(learn).items()
        },
    }


@torch.no_grad()
def roll_back(learn: LearnerLike, point: RollbackPoint) -> None:
    "Copy a rollback point into the current tensors; rates and other hyperparameters do not change."
    reshard(learn.model)
    named = named_parameters(learn)
    for name, value in point['weights'].items():
        if name in named:
            named[name].copy_(distribute_like(value, named[name]))
    for name, (store, key) in find_buffers(learn).items():
        if name in point['buffers']:
            store[key] = copy_into(store[key], point['buffers'][name])
    for key, o in learn.opt.optimizers.items():
        restore_states(o, named, point['optimizers'].get(key, {}))
    for key, cb in find_followers(learn).items():
        if key in point['callbacks']:
            cb.load_state_dict(point['callbacks'][key])


def find_buffers(learn: LearnerLike) -> dict[str, Slot]:
    "Return the locations of the buffers of the model and of a loss function that is a module, by name."
    slots = find_module_buffers(learn.model)
    if isinstance(learn.loss_func, nn.Module):
        for name, slot in find_module_buffers(learn.loss_func).items():
            slots[f'loss_func.{name}'] = slot
    return slots


def find_module_buffers(root: nn.Module) -> dict[str, Slot]:
    "Return the locations of a module's buffers by name."
    return {
        f'{prefix}.{key}' if prefix else key: (m._buffers, key)
        for prefix, m in root.named_modules()
        for key, b in m._buffers.items()
        if b is not None
    }


def find_followers(learn: LearnerLike) -> dict[str, Any]:
    "Return the callbacks whose state belongs to the weights, such as an average, by key."
    return {learn.callbacks.keys[id(cb)]: cb for cb in learn.cbs if declared(cb, 'follows_weights')}


def copy_states(o: torch.optim.Optimizer, named: dict[str, Any]) -> dict[str, Any]:
    "Copy the states of an optimizer, by the names of their parameters."
    return {name: copy_nested(dict(o.state[p])) for name, p in named.items() if p in o.state}


def restore_states(o: torch.optim.Optimizer, named: dict[str, Any], kept: dict[str, Any]) -> None:
    "Restore the states of an optimizer, and delete states that the rollback point does not have."
    for name, p in named.items():
        if p not in o.state:
            continue
        if name not in kept:
            del o.state[p]
        else:
            state = {k: copy_into(o.state[p].get(k), v) for k, v in kept[name].items()}
            o.state[p].clear()
            o.state[p].update(state)


def copy_nested(value: Any) -> Any:
    "Copy nested dicts, lists and tuples with the tensors in them."
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: copy_nested(v) for k, v in value.items()}
    return type(value)(map(copy_nested, value)) if type(value) in (list, tuple) else value


def copy_into(now: Any, kept: Any) -> Any:
    "Return a kept value, copied into the current tensor if shape and dtype match."
    matches = (
        isinstance(now, Tensor)
        and isinstance(kept, Tensor)
        and (now.shape, now.dtype) == (kept.shape, kept.dtype)
    )
    return now.copy_(distribute_like(kept, now)) if matches else copy_nested(kept)
