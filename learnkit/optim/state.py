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
from learnkit.optim.hyperparams import OPTIONS, Split

__all__ = ['is_torch_state', 'differences', 'load_state']

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
    splits: list[Split]

    def split_groups(self, o: torch.optim.Optimizer) -> None: ...
    def join_groups(self, o: torch.optim.Optimizer) -> None: ...
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


def differences(opt: Optimizers, state: Any, model: nn.Module | None = None) -> list[str]:
    "Return a line for each reason why the optimizers cannot load a state."
    if not is_torch_state(state):
        return ["optimizer: the saved state does not come from torch's optimizers"]
    states = key_by_name(opt, state)
    if set(states) != set(opt.optimizers):
        return [
            f'optimizer: there are {sorted(opt.optimizers)}, in the file {sorted(map(str, states))}'
        ]
    names = {p: name for name, p in model.named_parameters()} if model is not None else {}
    try:
        return [
            line
            for name, o in opt.optimizers.items()
            for line in compare_state(opt, o, states[name], name, names)
        ]
    except (TypeError, KeyError, AttributeError, ValueError) as e:
        return [f'optimizer: the saved state cannot be read ({e!r})']


def compare_state(
    opt: Optimizers, o: torch.optim.Optimizer, state: Any, name: str, names: Mapping[Any, str]
) -> list[str]:
    "Return a line for each reason why one optimizer cannot load a state."
    label = f'optimizer {name or opt.class_names()}'
    groups = state['param_groups']
    _, params = find_layout(opt, o, groups)
    if params is None:
        here = [len(g['params']) for g in o.param_groups]
        sizes = [len(g['params']) for g in groups]
        return [
            f'{label}: param groups of {here} parameters, in the file {sizes}: another model, splitter or '
            '`wd_bn_bias`'
        ]
    lines = []
    for i, (own, saved) in enumerate(zip(o.param_groups, groups, strict=False)):
        lines += [f'{label}: group {i} has {line}' for line in _compare_options(own, saved)]
    for group_params, group in zip(params, groups, strict=True):
        for p, i in zip(group_params, group['params'], strict=True):
            param_name = names.get(p, f'parameter {i}')
            shapes = _find_wrong_shapes(p, state['state'].get(i, {}))
            lines += [
                f'{label}: {k} of {param_name} is {[*p.shape]}, in the file {[*shape]}'
                for k, shape in shapes.items()
            ]
    return lines


def _compare_options(own: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    "Return a line for the options that only one of two param groups has."
    unshared = sorted((set(own) ^ set(saved)) & set(OPTIONS))
    if not unshared:
        return []
    side = 'here' if unshared[0] in own else 'in the file'
    return [f'{", ".join(unshared)} only {side}']


def _find_wrong_shapes(p: Any, state: Mapping[str, Any]) -> dict[str, torch.Size]:
    "Return the shapes of the saved tensors that differ from their parameter's shape."
    if is_lazy(p):
        return {}
    tensors = {k: v for k, v in state.items() if k in PARAM_SHAPED and isinstance(v, Tensor)}
    return {k: t.shape for k, t in tensors.items() if t.shape != p.shape}


def find_layout(
    opt: Optimizers, o: torch.optim.Optimizer, groups: list[Any]
) -> tuple[str, list[list[Any]] | None]:
    "Return the name and the parameters of the layout with the sizes of saved param groups, or ('', None)."
    sizes = [len(g['params']) for g in groups]
    for name, params in layouts(opt, o).items():
        if [*map(len, params)] == sizes:
            return name, params
    return '', None


def layouts(opt: Optimizers, o: torch.optim.Optimizer) -> dict[str, list[list[Any]]]:
    "Return the parameters by group: 'now', after `split_groups` ('split') and after `join_groups` ('joined')."
    now = [list(g['params']) for g in o.param_groups]
    decayed: list[list[Any]] = []
    exempt: list[list[Any]] = []
    for group in o.param_groups:
        params = group['params']
        spared = [p for p in params if p in opt.exempt]
        if 'weight_decay' in group and 0 < len(spared) < len(params):
            params = [p for p in params if p not in opt.exempt]
            exempt.append(spared)
        decayed.append(params)
    joined = list(now)
    for split in [split for split in reversed(opt.splits) if split.opt is o]:
        if split.exempt_index != len(joined) - 1:
            break
        joined[split.index] = split.params
        joined.pop()
    return {'now': now, 'split': decayed + exempt, 'joined': joined}


# -- loading ---------------------------------------------------------------------------------------


def load_state(opt: Optimizers, state: Any) -> None:
    "Load a copy of a state, for which `differences` is empty, into the optimizers."
    states = key_by_name(opt, state)
    for name, o in opt.optimizers.items():
        groups = states[name]['param_groups']
        layout, _ = find_layout(opt, o, groups)
        if layout == 'split':
            opt.split_groups(o)
        if layout == 'joined':
            opt.join_groups(o)
        own = o.param_groups
        params: dict[Any, Any] = {}
        for group, saved in zip(own, groups, strict=True):
            params.update(zip(saved['params'], group['params'], strict=True))
        # torch would keep references to the tensors of the state
        copies = {i: _copy_state(s, params.get(i)) for i, s in states[name]['state'].items()}
        merged = [merge_group(group, saved) for group, saved in zip(own, groups, strict=True)]
        o.load_state_dict({'state': copies, 'param_groups': merged})
        for group, loaded in zip(own, o.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        # other objects (such as a wrapped optimizer) hold references to the group dicts
        o.param_groups[:] = own


def _copy_state(state: Any, p: Any) -> Any:
    "Return a copy of a parameter's state, sharded if the parameter is sharded."
    return map_tensors(
        state,
        lambda t: distribute_like(t, p) if is_dtensor(p) and t.shape == p.shape else t.clone(),
    )


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
