"""The states of optimizers: compared with the optimizers that are to take them, then copied."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from learnkit.core.batch import map_tensors
from learnkit.core.dtensor import distribute_like, is_dtensor
from learnkit.optim.hyperparams import OPTIONS

__all__ = ['is_torch_state', 'differences', 'load_state']

# of these the optimizer at hand keeps its own: how a step is computed, and where, is not the file's business
OWN = ('foreach', 'fused', 'capturable', 'differentiable', 'decoupled_weight_decay')

# the entries of a state that have the shape of their parameter
AS_PARAMETER = frozenset(
    {
        'exp_avg',
        'exp_avg_sq',
        'max_exp_avg_sq',
        'momentum_buffer',
        'square_avg',
        'grad_avg',
        'sum',
        'acc_delta',
        'exp_inf',
        'prev',
        'step_size',
        'ax',
        'slow_weights',
    }
)


class Optimizers(Protocol):
    "What an `OptimWrapper` has for its states: its optimizers, and how their groups were split."

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]: ...
    @property
    def exempt(self) -> Any: ...  # parameters that weight decay spares
    @property
    def splits(
        self,
    ) -> list[
        tuple[Any, ...]
    ]: ...  # groups that were split: optimizer, index, index of the rest, all parameters
    def split_groups(self, o: torch.optim.Optimizer) -> None: ...
    def join_groups(self, o: torch.optim.Optimizer) -> None: ...
    def class_names(self) -> str: ...


def is_torch_state(state: Any) -> bool:
    "Tell the states of torch's optimizers, one or several by name, from fastai's and from anything else."
    if not isinstance(state, Mapping):
        return False
    return is_one(state) or (bool(state) and all(map(is_one, state.values())))


def is_one(state: Any) -> bool:
    "Tell the state of one optimizer from a dict of several by their names."
    return isinstance(state, Mapping) and {'state', 'param_groups'} <= set(state)


def by_name(opt: Optimizers, state: Any) -> dict[str, Any]:
    "Return states by the optimizers' names, whatever the one optimizer of a file or a Learner is called."
    if is_one(state):
        return dict.fromkeys(opt.optimizers, state) if len(opt.optimizers) == 1 else {'': state}
    return dict(state)


# Comparing


def differences(opt: Optimizers, state: Any, model: nn.Module | None = None) -> list[str]:
    "Return a line for everything in a state that the optimizers cannot take."
    if not is_torch_state(state):
        return ["optimizer: the saved state is not that of torch's optimizers"]
    states = by_name(opt, state)
    if set(states) != set(opt.optimizers):
        return [
            f'optimizer: there are {sorted(opt.optimizers)}, in the file {sorted(map(str, states))}'
        ]
    names = {p: name for name, p in model.named_parameters()} if model is not None else {}
    try:
        return [
            line
            for name, o in opt.optimizers.items()
            for line in one_differs(opt, o, states[name], name, names)
        ]
    except (TypeError, KeyError, AttributeError, ValueError) as e:
        return [f'optimizer: the saved state cannot be read ({e!r})']


def one_differs(
    opt: Optimizers, o: torch.optim.Optimizer, state: Any, name: str, names: Mapping[Any, str]
) -> list[str]:
    "Return in words what does not fit one optimizer."
    label, groups = f'optimizer {name or opt.class_names()}', state['param_groups']
    sizes = [len(g['params']) for g in groups]
    params = next((ps for ps in layouts(opt, o).values() if [*map(len, ps)] == sizes), None)
    if params is None:
        here = [len(g['params']) for g in o.param_groups]
        return [
            f'{label}: param groups of {here} parameters, in the file {sizes}: another model, splitter or '
            '`wd_bn_bias`'
        ]
    lines = []
    for i, (own, saved) in enumerate(zip(o.param_groups, groups, strict=False)):
        if odd := sorted((set(own) ^ set(saved)) & set(OPTIONS)):
            lines.append(
                f'{label}: group {i} has {", ".join(odd)} only {"here" if odd[0] in own else "in the file"}'
            )
        lines += [
            f'{label}: group {i} has {n}={saved[n]!r} in the file'
            for n in OPTIONS
            if n in saved and not is_rate(saved[n])
        ]
    for p, i in (
        (p, i)
        for ps, g in zip(params, groups, strict=True)
        for p, i in zip(ps, g['params'], strict=True)
    ):
        lines += [
            f'{label}: {k} of {names.get(p, f"parameter {i}")} is {[*p.shape]}, in the file {[*v.shape]}'
            for k, v in state['state'].get(i, {}).items()
            if k in AS_PARAMETER and isinstance(v, Tensor) and not is_lazy(p) and v.shape != p.shape
        ]
    return lines


def is_rate(value: Any) -> bool:
    "Tell an option of an optimizer that is a number, or a few."
    if not isinstance(value, (tuple, list)):
        return isinstance(value, (Real, Tensor))
    # Adafactor's first eps may be None
    return all(v is None or isinstance(v, (Real, Tensor)) for v in value)


def layouts(opt: Optimizers, o: torch.optim.Optimizer) -> dict[str, list[list[Any]]]:
    "Return the parameters by group: as they are, with those apart that weight decay spares, and with these put back."
    now = [list(g['params']) for g in o.param_groups]
    spared = [[p for p in ps if p in opt.exempt] for ps in now]
    moves = [
        'weight_decay' in g and 0 < len(s) < len(ps)
        for g, s, ps in zip(o.param_groups, spared, now, strict=True)
    ]
    kept = [
        [p for p in ps if p not in opt.exempt] if move else ps
        for ps, move in zip(now, moves, strict=True)
    ]
    joined = list(now)
    for _, i, j, whole in [done for done in reversed(opt.splits) if done[0] is o]:
        if j != len(joined) - 1:
            break
        joined[i] = whole
        joined.pop()
    return {
        'now': now,
        'apart': kept + [s for s, move in zip(spared, moves, strict=True) if move],
        'joined': joined,
    }


# Copying


def load_state(opt: Optimizers, state: Any) -> None:
    "Copy a state without differences into the optimizers; nothing of it is shared."
    states = by_name(opt, state)
    for name, o in opt.optimizers.items():
        groups = states[name]['param_groups']
        sizes = [len(g['params']) for g in groups]
        fit = next(how for how, ps in layouts(opt, o).items() if [*map(len, ps)] == sizes)
        if fit == 'apart':
            opt.split_groups(o)
        if fit == 'joined':
            opt.join_groups(o)
        own = o.param_groups
        pairs = zip(own, groups, strict=True)
        params = {
            i: p
            for g, saved in zip(own, groups, strict=True)
            for i, p in zip(saved['params'], g['params'], strict=True)
        }
        # torch would keep the very tensors of the state
        o.load_state_dict(
            {
                'state': {
                    i: _copied(state, params.get(i)) for i, state in states[name]['state'].items()
                },
                'param_groups': [merged(group, saved) for group, saved in pairs],
            }
        )
        for group, loaded in zip(own, o.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        o.param_groups[:] = (
            own  # who reads a group goes on reading it, also an optimizer that this one wraps
        )


def _copied(state: Any, p: Any) -> Any:
    "Return a copy of a parameter's state, cut into parts where that is."
    return map_tensors(
        state,
        lambda t: distribute_like(t, p) if is_dtensor(p) and t.shape == p.shape else t.clone(),
    )


def merged(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    "Return a saved param group, with rates in a tensor or a number as the optimizer has them."
    group = {**saved, **{n: own[n] for n in OWN if n in own}}
    for name in (n for n in OPTIONS if n in own and n in saved):
        here, there = own[name], saved[name]
        if isinstance(here, Tensor):
            group[name] = here.detach().clone().fill_(there)
        elif isinstance(here, Real) and isinstance(there, Tensor):
            group[name] = there.item()
    return group
