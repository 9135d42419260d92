# SPDX-License-Identifier: Apache-2.0
"""Schema of a checkpoint's state: every entry with its type, checked before any of them is used.

A schema is a type, a function that returns True for a valid value, a dict of the schemas of entries
that must exist, or one of `Maybe`, `Optional` and `Each`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learnkit.checkpoint.optimizer_state import decode_optimizer
from learnkit.core.batch import short_repr, tensors_in
from learnkit.core.errors import CheckpointError
from learnkit.core.plain import ATOMS, is_dense
from learnkit.core.random import preserved_rng, restore_generator, restore_rng
from learnkit.engine.counters import COUNTER_OF_UNIT
from learnkit.engine.fields import SAVED
from learnkit.optim.state import is_single, is_torch_state

State = Mapping[str, Any]


@dataclass(frozen=True)
class Maybe:
    "Schema of a value that may be None."

    schema: Any


@dataclass(frozen=True)
class Optional:
    "Schema of an entry that may be missing."

    schema: Any


@dataclass(frozen=True)
class Each:
    "Schema of the values of a mapping with any keys, or of the entries of a list."

    schema: Any
    kind: type = Mapping


def is_count(value: Any) -> bool:
    "a number that is not negative"
    return type(value) is int and value >= 0


def is_epoch(value: Any) -> bool:
    "a number that is not negative, or -1 before the first epoch"
    return type(value) is int and value >= -1


def is_amount(value: Any) -> bool:
    "a finite number that is not negative"
    return type(value) in (int, float) and isfinite(value) and value >= 0


def is_atom(value: Any) -> bool:
    "a number, a string or None"
    return isinstance(value, ATOMS)


def has_dense_tensors(value: Any) -> bool:
    "a mapping with dense tensors"
    return isinstance(value, Mapping) and is_dense_value(value)


def is_dense_value(value: Any) -> bool:
    "a value with dense tensors"
    return all(map(is_dense, tensors_in(value)))


def is_tensor(value: Any) -> bool:
    "a dense tensor"
    return isinstance(value, Tensor) and is_dense(value)


def is_index(value: Any) -> bool:
    "a whole number"
    return type(value) is int


def is_optimizer(value: Any) -> bool:
    "the state of torch's optimizers, with dense tensors"
    if not is_torch_state(value):
        return False
    states = [value] if is_single(value) else value.values()
    if any(problem for state in states for problem in find_problems(state, _OPTIMIZER)):
        return False
    return _takes(lambda: decode_optimizer(value))


def is_digest(value: Any) -> bool:
    "the version and the hash of an entry of a batch"
    return isinstance(value, (tuple, list)) and [*map(type, value)] == [int, str]


def is_rng(value: Any) -> bool:
    "the states of the global generators"
    with preserved_rng():
        return isinstance(value, Mapping) and _takes(lambda: restore_rng(dict(value)))


def is_generator(value: Any) -> bool:
    "the kind and the state of a generator"
    if not isinstance(value, (tuple, list)) or len(value) != 2 or type(value[0]) is not str:
        return False
    kind, state = value
    make = _GENERATORS.get(kind)
    return make is None or _takes(lambda: restore_generator(make(), (kind, state)))


def is_part(value: Any) -> bool:
    "the position of one of several loaders"
    return not any(find_problems(value, _PART))


def _takes(restore: Callable[[], object]) -> bool:
    "Return True if generators take a state."
    try:
        restore()
    except Exception:  # a wrong state raises almost any type of error
        return False
    return True


_GENERATORS: dict[str, Callable[[], Any]] = {
    'torch.Generator': torch.Generator,
    'random.Random': random.Random,
    'numpy.RandomState': np.random.RandomState,
    **{
        f'numpy.{name}': getattr(np.random, name)
        for name in ('MT19937', 'PCG64', 'PCG64DXSM', 'Philox', 'SFC64')
    },
}

# each optimizer's part of a state; an entry that is not the state of a parameter may be any value
_OPTIMIZER = {
    'state': Each(is_dense_value),
    'param_groups': Each({'params': Each(is_index, list)}, list),
}
_COUNTS = dict.fromkeys(COUNTER_OF_UNIT, is_count)
_TIMESTAMP = {**_COUNTS, 'sec': Maybe(is_amount), 'dur': Maybe(is_amount)}
_EVALUATIONS = {'evaluated': Each(_TIMESTAMP), 'fit_began': _TIMESTAMP}
_LOADER = {'own': Each(is_generator), 'epochs': Each(int), 'counts': Each(Mapping)}
_POSITION = {
    'loader': Each(is_atom),
    'drawn': Each(is_atom),
    'n': is_count,
    'n_before': is_count,
    'ranks': is_count,
    'number': Maybe(int),
    'draws': Maybe(Each(str, list)),
    'before_last': Maybe(is_rng),
    'digest': Maybe(Each(is_digest)),
    'is_ended': bool,
    'holds_last': Optional(bool),  # of a pass that is read ahead
    'start': Maybe({**_LOADER, 'rng': Optional(is_rng)}),
    'now': _LOADER,
    'workers': is_count,
    'workers_ran': bool,
    'workers_run': bool,
    # of a CombinedLoader
    'turn': Optional(is_count),
    'parts': Optional(Each(is_part, list)),
}
_PART = {
    'position': _POSITION,
    'before_first': Maybe({**_LOADER, 'rng': Optional(is_rng)}),
    'is_open': bool,
    'is_used_up': bool,
}
_LOOP = {
    **{name: {int: is_count, float: is_amount}.get(kind, kind) for name, kind in SAVED.items()},
    'epoch': is_epoch,
    'point': lambda value: value in ('', 'batch', 'epoch', 'iteration'),
    'n_drawn': is_count,
    'step': Maybe(is_count),
    'stage': Maybe(is_count),
    'n_iter': Maybe(is_count),
    'length': Maybe(is_count),  # batches of a complete epoch, if not the loader's `len()`
    'usual_length': Maybe(is_count),  # batches of each complete epoch, 0 if they differ
    'n_epoch': Maybe(is_count),
    'stopping': bool,
    'done': _COUNTS,
    'n_steps': is_count,
    'seconds': is_amount,
    'loss': Maybe(is_tensor),
    'fitting_size': Maybe(is_count),
    'evaluations': _EVALUATIONS,
}
SCHEMA = {
    'model': Mapping,
    'loss_func': Maybe(Mapping),
    'optimizer': Maybe(is_optimizer),
    'buffers': Each(is_tensor),
    'persistent': Each(str, list),
    'loss_buffers': Each(is_tensor),
    'generators': Each(Each(is_generator)),
    'grads': Each(is_tensor),
    'frozen': {
        'names': Each(str, list),
        'left_out': Each(str, list),
        'frozen_idx': int,
    },
    'loop': _LOOP,
    'rng': is_rng,
    'position': Maybe(_POSITION),
    'callbacks': has_dense_tensors,
    'nondeterministic_state': Each(Each(str, list)),
}


def check_state(state: Any, path: Path | None = None) -> State:
    """Return a checkpoint's state.

    Raises `CheckpointError` for anything else, which names the file and the first entry that is wrong.
    """
    name = path or 'This state'
    if not isinstance(state, Mapping) or not {'model', 'loop'} <= state.keys():
        raise CheckpointError(
            f'{name} is not a checkpoint of a Learner. Weights alone are loaded by `learn.load(path)`.'
        )
    problem = next(find_problems(state, SCHEMA), None)
    if problem is not None:
        raise CheckpointError(f'{name} cannot be resumed: {problem}. Nothing was loaded.')
    return state


def find_problems(
    value: Any,
    schema: Any,
    place: str = '',  # keys that lead to the value
) -> Iterator[str]:
    """Yield a line for each entry that does not fit its schema.

    >>> list(find_problems({'epoch': -1}, {'epoch': is_count, 'iter': is_count}))
    ['epoch is -1, not a number that is not negative', 'iter is missing']
    """
    if isinstance(schema, Optional):
        yield from find_problems(value, schema.schema, place)
    elif isinstance(schema, Maybe):
        if value is not None:
            yield from find_problems(value, schema.schema, place)
    elif isinstance(schema, Each):
        if not isinstance(value, schema.kind):
            yield f'{place} is {short_repr(value)}, not a {schema.kind.__name__.lower()}'
            return
        entries: Any = value  # mypy takes it for an object after the check of its type
        items = entries if isinstance(entries, Mapping) else dict(enumerate(entries))
        for key, entry in items.items():
            yield from find_problems(entry, schema.schema, f'{place}[{key!r}]')
    elif isinstance(schema, dict):
        yield from _find_in_mapping(value, schema, place)
    elif isinstance(schema, type):
        if not isinstance(value, schema):
            yield f'{place} is {short_repr(value)}, not a {schema.__name__.lower()}'
    elif not schema(value):
        yield f'{place} is {short_repr(value)}, not {schema.__doc__ or "a known value"}'


def _find_in_mapping(value: Any, schema: dict[str, Any], place: str) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f'{place} is {short_repr(value)}, not a mapping'
        return
    for key, part in schema.items():
        name = f'{place}.{key}'.removeprefix('.')
        if key not in value:
            if not isinstance(part, Optional):
                yield f'{name} is missing'
        else:
            yield from find_problems(value[key], part, name)
