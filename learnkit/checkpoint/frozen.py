"""Checkpoints without the frozen weights of a model, which the model of a resumed run brings along."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from learnkit.checkpoint.digest import digest
from learnkit.core.errors import WeightsError
from learnkit.core.model import bare_model

__all__ = ['add_frozen_weights', 'find_changed', 'find_trainable', 'leave_out_frozen_weights']

Digests = dict[str, tuple[str, Any]]  # digest and version of each weight, by name

ENTRY = 'left_out'  # entry of a checkpoint: the digest of each weight that it leaves out


def find_trainable(model: nn.Module) -> set[str]:
    """Return the names of the trainable parameters, tied ones by each of their names.

    >>> find_trainable(nn.Linear(2, 1).requires_grad_(False))
    set()
    """
    named = bare_model(model).named_parameters(remove_duplicate=False)
    return {name for name, p in named if p.requires_grad}


def find_changed(
    model: nn.Module,
    trained: Collection[str],  # names of other parameters
    digests: Digests,  # digests of earlier calls; new ones are added
) -> set[str]:
    """Return the names of the parameters whose values differ from those in the first call.

    >>> model, digests = nn.Linear(2, 1).requires_grad_(False), {}
    >>> find_changed(model, (), digests)
    set()
    >>> _ = model.bias.add_(1)
    >>> find_changed(model, (), digests)
    {'bias'}
    """
    changed, weights = set(), bare_model(model).state_dict()
    for name, p in bare_model(model).named_parameters(remove_duplicate=False):
        if name in trained or name not in weights or is_lazy(p):
            continue
        # to compute a digest takes long, and a tensor counts what is written into it
        version = None if p.is_inference() else (p._version, p.data_ptr(), p.dtype)
        known = digests.get(name)
        if known is not None and known[1] == version:
            continue
        value = digest(weights[name])
        if known is not None and known[0] != value:
            changed.add(name)
        else:
            digests[name] = value, version
    return changed


def leave_out_frozen_weights(
    model: nn.Module,
    state: dict[str, Any],  # state of a checkpoint
    trained: Collection[str],  # names of the parameters to keep
    digests: Digests,  # digests of the others, of `find_changed`
) -> dict[str, Any]:
    "Return the state without the weights of other parameters, but with their digests. Buffers stay."
    named = bare_model(model).named_parameters(remove_duplicate=False)
    frozen = {name for name, _ in named if name in state['model'] and name not in trained}
    weights = {name: value for name, value in state['model'].items() if name not in frozen}
    return {**state, 'model': weights, ENTRY: {name: digests[name][0] for name in sorted(frozen)}}


def add_frozen_weights(
    model: nn.Module,
    state: Mapping[str, Any],  # state of a checkpoint
    path: Path | None = None,  # its file, for the message
) -> Mapping[str, Any]:
    """Return the state with the model's weights in place of the weights that the checkpoint leaves out.

    Raises `WeightsError` if the model lacks one of them, or has another value.
    """
    expected = state.get(ENTRY)
    if not expected:
        return state
    weights = bare_model(model).state_dict()
    frozen = {name: weights[name] for name in expected if name in weights}
    others = [name for name in expected if name not in frozen]
    others += [name for name, value in frozen.items() if digest(value) != expected[name]]
    if others:
        raise WeightsError(
            f'{path or "The checkpoint"} leaves out {len(expected)} frozen weights '
            f'(`trainable_only=True`), and {len(others)} of them differ in this model, such as '
            f'{others[0]}. Load the same base model first. Nothing was loaded.'
        )
    return {**state, 'model': {**frozen, **state['model']}}
