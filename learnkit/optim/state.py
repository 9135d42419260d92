# SPDX-License-Identifier: Apache-2.0
"""Read the state of optimizers, compare a saved state with the optimizers, and load it into the optimizers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Mapping
from copy import deepcopy
from numbers import Real
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from learnkit.comm.dtensor import distribute_like, is_dtensor
from learnkit.core.batch import children_of, rebuild
from learnkit.core.errors import OptionError
from learnkit.core.file_tensor import FileTensor, read_values
from learnkit.core.plain import copy_tensor, to_plain
from learnkit.optim.hyperparams import OPTIONS, OWN_MODULES, match_strides

# options that keep their current values, because they select an implementation for the current device
KEPT_OPTIONS = ('foreach', 'fused', 'capturable', 'differentiable', 'decoupled_weight_decay')

# entry of a state: the state dict of an optimizer that has another layout than torch's
OWN_LAYOUT = 'own_layout'

# entries of the states of torch's optimizers with the shape of their parameter
PARAM_SHAPED = frozenset(
    'exp_avg exp_avg_sq max_exp_avg_sq exp_inf momentum_buffer square_avg grad_avg sum acc_delta prev step_size ax '
    'slow_weights'.split()
)


class Optimizers(Protocol):
    "Attributes and methods of `OptimWrapper` that are needed to load a state."

    optimizers: dict[str, torch.optim.Optimizer]
    exempt: set[nn.Parameter]

    def split_groups(self, only: torch.optim.Optimizer | None = None) -> None: ...
    def class_names(self) -> str: ...


def is_torch_state(state: Any) -> bool:
    "Return True for the state dict of a torch optimizer, or a dict from names to such state dicts."
    if not isinstance(state, Mapping):
        return False
    return is_single(state) or (bool(state) and all(map(is_single, state.values())))


def is_single(state: Any) -> bool:
    "Return True for the state dict of one optimizer."
    return isinstance(state, Mapping) and {'state', 'param_groups'} <= set(state)


def read_state(o: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of one optimizer.

    An optimizer may have another layout than torch's (a wrapper, such as Lookahead). Its state dict is then an entry
    of the result, next to the param groups.
    """
    state = o.state_dict()
    if is_single(state):
        return state
    groups = []
    n = 0
    for group in o.param_groups:
        indices = list(range(n, n + len(group['params'])))
        groups.append({**{k: group[k] for k in OPTIONS if k in group}, 'params': indices})
        n += len(indices)
    return {'state': {}, 'param_groups': groups, OWN_LAYOUT: state}


def key_by_name(opt: Optimizers, state: Any) -> dict[str, Any]:
    "Return state dicts by optimizer name; the name of a single optimizer may differ from the saved name."
    if is_single(state):
        return dict.fromkeys(opt.optimizers, state) if len(opt.optimizers) == 1 else {'': state}
    return dict(state)


# -- comparison ------------------------------------------------------------------------------------


def find_differences(opt: Optimizers, state: Any, model: nn.Module | None = None) -> list[str]:
    "Return a line for each reason why the optimizers cannot load a state."
    if not is_torch_state(state):
        return ["optimizer: the saved state does not come from torch's optimizers"]
    states = key_by_name(opt, state)
    if set(states) != set(opt.optimizers):
        return [
            f'optimizer: there are {sorted(opt.optimizers)}, in the file {sorted(map(str, states))}'
        ]
    names = {p: name for name, p in model.named_parameters()} if model is not None else {}
    lines = []
    for name, o in opt.optimizers.items():
        label = f'optimizer {name or opt.class_names()}'
        lines += [f'{label}: {line}' for line in compare_state(opt, o, states[name], names)]
    return lines


def compare_state(
    opt: Optimizers, o: torch.optim.Optimizer, state: Any, names: Mapping[Any, str]
) -> list[str]:
    "Return a line for each reason why one optimizer cannot load a state."
    groups = state['param_groups']
    here, there = ([len(g['params']) for g in gs] for gs in (o.param_groups, groups))
    lists = find_lists(opt, o, there)
    if lists is None:
        return [
            f'param groups of {here} parameters, in the file {there}: another model, splitter or `wd_bn_bias`, or '
            'weight decay was set after the file was saved'
        ]
    lines = []
    if (OWN_LAYOUT in state) == is_single(o.state_dict()):
        lines.append('the saved state has the layout of another optimizer')
    for i, (own, saved) in enumerate(zip(o.param_groups, groups, strict=False)):
        unshared = sorted((set(own) ^ set(saved)) & set(OPTIONS))
        if unshared:
            side = 'here' if unshared[0] in own else 'in the file'
            lines.append(f'group {i} has {", ".join(unshared)} only {side}')
    if not type(o).__module__.startswith(OWN_MODULES):
        return lines  # another optimizer may keep anything under these names
    for params, group in zip(lists, groups, strict=True):
        for p, i in zip(params, group['params'], strict=True):
            entry = state['state'].get(i, {})
            if not isinstance(entry, Mapping):
                lines.append(f'the state of parameter {i} is a {type(entry).__name__} in the file')
                continue
            for key, value in entry.items():
                is_wrong = key in PARAM_SHAPED and isinstance(value, Tensor) and not is_lazy(p)
                if is_wrong and value.shape != p.shape:
                    name = names.get(p, f'parameter {i}')
                    lines.append(f'{key} of {name} is {[*p.shape]}, in the file {[*value.shape]}')
    return lines


def find_lists(
    opt: Optimizers, o: torch.optim.Optimizer, sizes: list[int]
) -> list[list[Any]] | None:
    "Return the parameters of the groups of these sizes, now or after `split_groups`; None if there are none."
    now = [g['params'] for g in o.param_groups]
    decayed = []
    exempt = []
    for group in o.param_groups:
        rest = [p for p in group['params'] if p not in opt.exempt]
        is_split = 'weight_decay' in group and 0 < len(rest) < len(group['params'])
        decayed.append(rest if is_split else group['params'])
        exempt += [[p for p in group['params'] if p in opt.exempt]] if is_split else []
    for lists in (now, decayed + exempt):
        if [*map(len, lists)] == sizes:
            return lists
    return None


# -- loading ---------------------------------------------------------------------------------------


def load_state(
    opt: Optimizers,
    state: Any,  # state for which `find_differences` is empty
    converted: Container[Any] = (),  # parameters whose states are cast to their dtype
    copy: bool = True,  # whether the tensors of `state` are copied
) -> None:
    "Load a state into the optimizers."
    states = key_by_name(opt, state)
    for name, o in opt.optimizers.items():
        if len(states[name]['param_groups']) > len(o.param_groups):
            opt.split_groups(o)
        if OWN_LAYOUT in states[name]:
            o.load_state_dict(copy_value(states[name][OWN_LAYOUT], clone_tensor))
        else:
            load_single(o, states[name], converted, copy)
        match_strides(o)


def release_state(opt: Optimizers) -> None:
    "Clear the states that torch's `load_state_dict` replaces, so that their memory is free for the new ones."
    for o in opt.optimizers.values():
        if type(o).load_state_dict is torch.optim.Optimizer.load_state_dict:
            o.state.clear()


def load_single(
    o: torch.optim.Optimizer, state: Mapping[str, Any], converted: Container[Any], copy: bool
) -> None:
    "Load a state in torch's layout into one optimizer."
    own = o.param_groups
    groups = read_values(state['param_groups'])
    params: dict[Any, Any] = {}
    for group, saved in zip(own, groups, strict=True):
        params.update(zip(saved['params'], group['params'], strict=True))
    # torch keeps references to the tensors that it gets
    copies: dict[int, Tensor] = {}
    copied = {i: adapt_state(s, params.get(i), copy, copies) for i, s in state['state'].items()}
    # an optimizer may add entries to its state dict
    added = {k: v for k, v in state.items() if k not in ('state', 'param_groups')}
    merged = [merge_group(group, saved) for group, saved in zip(own, groups, strict=True)]
    o.load_state_dict({**copy_value(added, clone_tensor), 'state': copied, 'param_groups': merged})
    kept = {p: copied[i] for i, p in params.items() if i in copied and p not in converted}
    restore_dtypes(o, kept)
    for group, saved, loaded in zip(own, groups, o.param_groups, strict=True):
        unsaved = find_unsaved(group, saved)  # torch copies them
        group.clear()
        group.update({**loaded, **unsaved})
    # other objects (such as a wrapped optimizer) hold references to the group dicts
    o.param_groups[:] = own


def restore_dtypes(o: torch.optim.Optimizer, saved: Mapping[Any, Any]) -> None:
    """Set the saved values where torch has converted them, on the device that torch has chosen.

    `torch.optim.Optimizer.load_state_dict` casts every tensor to its parameter's dtype. `step` is left out: torch casts
    it only for fused and capturable steps, which require float32.
    """
    is_torch = type(o).load_state_dict is torch.optim.Optimizer.load_state_dict
    for p, state in saved.items():
        loaded = o.state.get(p)
        if isinstance(loaded, dict) and isinstance(state, Mapping):
            for key, value in state.items():
                if key in loaded and key != 'step':
                    loaded[key] = restore_value(value, loaded[key], p.dtype, is_torch)
        elif loaded is not None:
            o.state[p] = restore_value(state, loaded, p.dtype, is_torch)


def restore_value(
    value: Any,  # saved value
    loaded: Any,
    dtype: torch.dtype,  # of the parameter
    is_torch: bool,  # False: the optimizer has its own `load_state_dict`, which may convert integers
) -> Any:
    """Return a loaded value of a state with the saved dtype, and a string as it was saved.

    Other values, which the optimizer has replaced by another type or length, are returned as they were loaded.
    """
    if isinstance(value, Tensor) and isinstance(loaded, Tensor):
        is_cast = loaded.dtype == dtype != value.dtype
        if not is_cast or is_torch or value.is_floating_point():
            return value.to(loaded.device) if is_cast else loaded
        # integers that differ from a mere cast were decoded
        own = value.to(loaded.device)
        return own if torch.equal(own.to(loaded.dtype), loaded) else loaded
    if type(value) is not type(loaded):
        return loaded
    if isinstance(value, deque):
        return deque(restore_value([*value], [*loaded], dtype, is_torch), value.maxlen)
    saved_children = children_of(value)
    children = children_of(loaded)
    if saved_children is None or children is None:
        return value if isinstance(value, str) else loaded  # torch rebuilds strings as iterables
    if len(saved_children) != len(children):
        return loaded
    pairs = zip(saved_children, children, strict=True)
    return rebuild(loaded, [restore_value(a, b, dtype, is_torch) for a, b in pairs])


def adapt_state(
    state: Any,
    p: Any,  # the parameter
    copy: bool,  # False: only containers are copied, and tensors in a file are read
    copies: dict[int, Tensor],  # copies by the ids of their originals; new ones are added
) -> Any:
    "Return a copy of a parameter's state, sharded if the parameter is. Entries that share a tensor share its copy."

    def adapt(t: Tensor) -> Any:
        if is_dtensor(p) and t.shape == p.shape:
            return distribute_like(read_values(t), p)
        if not copy and not isinstance(t, FileTensor):
            return t
        if id(t) not in copies:
            copies[id(t)] = clone_tensor(t)
        return copies[id(t)]

    return copy_value(state, adapt)


def clone_tensor(t: Tensor) -> Tensor:
    "Return a copy of a tensor; `Tensor.clone(t)` would not read the values of a `FileTensor`."
    return copy_tensor(t, lambda part: part.clone())


def copy_value(value: Any, convert: Callable[[Tensor], Any]) -> Any:
    """Return a copy of a value in a state, with the result of a function for each tensor.

    >>> copy_value({'norms': deque([torch.ones(2)], maxlen=3)}, torch.neg)
    {'norms': deque([tensor([-1., -1.])], maxlen=3)}
    """
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, deque):
        return deque([copy_value(v, convert) for v in value], value.maxlen)
    children = children_of(value)
    if children is None:
        return deepcopy(value)
    return rebuild(value, [copy_value(v, convert) for v in children])


def merge_group(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    "Return a saved param group with the current `KEPT_OPTIONS`, and the current options that no file can hold."
    kept = {n: own[n] for n in KEPT_OPTIONS if n in own}
    group = {**find_unsaved(own, saved), **saved, **kept}
    for name in own.keys() & saved.keys():
        if name in OPTIONS:
            group[name] = adapt_number(own[name], saved[name])
        elif isinstance(own[name], Tensor) and isinstance(saved[name], Tensor):
            group[name] = saved[name].to(own[name].device, copy=True)
    return group


def find_unsaved(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    "Return the options of a param group that a saved group lacks, because no file can hold them."
    return {name: v for name, v in own.items() if name not in saved and not is_plain(v)}


def adapt_number(here: Any, there: Any) -> Any:
    "Return a saved number, or a tuple of them, with the current type: a tensor, NumPy's or Python's number."
    if isinstance(here, Tensor):
        return here.detach().clone().fill_(there)
    if isinstance(here, np.number) and isinstance(there, (int, float)):
        make: Any = type(here)
        return make(there)
    if isinstance(here, Real) and isinstance(there, Tensor):
        return there.item()
    if isinstance(here, tuple) and isinstance(there, tuple) and len(here) == len(there):
        return tuple(map(adapt_number, here, there))
    return there


def is_plain(value: Any) -> bool:
    "Return True for a value that a file can hold."
    try:
        to_plain(value, '')
    except OptionError:
        return False
    return True
