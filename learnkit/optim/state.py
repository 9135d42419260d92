# SPDX-License-Identifier: Apache-2.0
"""Compare a saved optimizer state with the optimizers, and load the state into the optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from learnkit.core.batch import map_tensors
from learnkit.distributed.dtensor import distribute_like, is_dtensor
from learnkit.optim.hyperparams import OPTIONS, match_strides

# options that keep their current values, because they select an implementation for the current device
KEPT_OPTIONS = ('foreach', 'fused', 'capturable', 'differentiable', 'decoupled_weight_decay')

# entries of a state with the shape of their parameter
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
    for i, (own, saved) in enumerate(zip(o.param_groups, groups, strict=False)):
        unshared = sorted((set(own) ^ set(saved)) & set(OPTIONS))
        if unshared:
            side = 'here' if unshared[0] in own else 'in the file'
            lines.append(f'group {i} has {", ".join(unshared)} only {side}')
    for params, group in zip(lists, groups, strict=True):
        for p, i in zip(params, group['params'], strict=True):
            for key, value in state['state'].get(i, {}).items():
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
    copy: bool = True,  # whether the tensors of `state` are copied
) -> None:
    "Load a state into the optimizers."
    states = key_by_name(opt, state)
    for name, o in opt.optimizers.items():
        groups = states[name]['param_groups']
        if len(groups) > len(o.param_groups):
            opt.split_groups(o)
        own = o.param_groups
        params: dict[Any, Any] = {}
        for group, saved in zip(own, groups, strict=True):
            params.update(zip(saved['params'], group['params'], strict=True))
        # torch keeps references to the tensors that it is given
        copies = {i: _adapt_state(s, params.get(i), copy) for i, s in states[name]['state'].items()}
        merged = [merge_group(group, saved) for group, saved in zip(own, groups, strict=True)]
        o.load_state_dict({'state': copies, 'param_groups': merged})
        for group, loaded in zip(own, o.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        # other objects (such as a wrapped optimizer) hold references to the group dicts
        o.param_groups[:] = own
        match_strides(o)


def _adapt_state(state: Any, p: Any, copy: bool) -> Any:
    "Return a parameter's state or a copy of it, sharded if the parameter is sharded."

    def adapt(t: Tensor) -> Any:
        if is_dtensor(p) and t.shape == p.shape:
            return distribute_like(t, p)
        return t.clone() if copy else t

    return map_tensors(state, adapt)


def merge_group(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    "Return a saved param group with the current `KEPT_OPTIONS`; an option is a tensor if it is one in `own`."
    group = {**saved, **{n: own[n] for n in KEPT_OPTIONS if n in own}}
    for name in (n for n in OPTIONS if n in own and n in saved):
        here = own[name]
        there = saved[name]
        if isinstance(here, Tensor):
            group[name] = here.detach().clone().fill_(there)
        elif isinstance(here, Real) and isinstance(there, Tensor):
            group[name] = there.item()
    return group
