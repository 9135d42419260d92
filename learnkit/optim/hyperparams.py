"""Param groups: what is in them, the hyper-parameters by fastai's names, and what fused kernels take for granted."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import nn

from learnkit.core.dtensor import local
from learnkit.core.errors import OptimizerError, did_you_mean

__all__ = [
    'HYPERS',
    'OPTIONS',
    'Hypers',
    'place_of',
    'torch_names',
    'spread',
    'is_many',
    'check_hyper',
    'bound_of',
    'as_groups',
    'check_maker',
    'members',
    'can_fuse',
    'fused_of',
    'FusedGuard',
    'trainable_params',
    'params',
    'norm_bias_params',
]

# fastai's name of a hyper-parameter, and where torch's param groups keep it: the first that is there counts, a pair
# stands for an element of a tuple
HYPERS: dict[str, tuple[str | tuple[str, int], ...]] = {
    'lr': ('lr',),
    'mom': ('momentum', ('betas', 0)),
    'sqr_mom': ('alpha', ('betas', 1)),
    'wd': ('weight_decay',),
    'eps': ('eps',),
}
# torch's names of all of them
OPTIONS = ('lr', 'momentum', 'betas', 'alpha', 'weight_decay', 'eps')
SHARES = ('mom', 'sqr_mom', 'momentum', 'alpha')  # what of an average is kept: below 1


def place_of(name: str, group: Mapping[str, Any]) -> str | tuple[str, int] | None:
    "Return where a param group keeps a hyper-parameter, None where it has none of that name."
    for where in HYPERS.get(name, (name,)):
        if (where if isinstance(where, str) else where[0]) in group:
            return where
    return None


def check_hyper(name: str, value: Any) -> None:
    """Raise `OptimizerError` for a value that no optimizer can use.

    >>> check_hyper('lr', -0.1)
    Traceback (most recent call last):
    learnkit.core.errors.OptimizerError: lr=-0.1: give a number, 0 or more.
    """
    if not isinstance(value, (Real, torch.Tensor)):
        raise OptimizerError(f'{name}={value!r}: give a number, or one for each param group.')
    is_known = name in HYPERS or name in OPTIONS  # of others one cannot say
    if is_known and not 0 <= float(value) < bound_of(name):
        raise OptimizerError(
            f'{name}={value!r}: give a number, 0 or more{" and below 1" * (name in SHARES)}.'
        )


def bound_of(name: str) -> float:
    "Return what the values of a hyper-parameter stay below."
    return 1.0 if name in SHARES else float('inf')


class Hypers(MutableMapping[str, Any]):
    """The hyper-parameters of one group by fastai's names (and torch's), read from and written to torch's param groups.

    A name is read from the first of them that has it, and written to each that has it. Param groups that weight decay
    spares keep theirs at 0.
    """

    def __init__(self, groups: list[dict[str, Any]], exempt: set[nn.Parameter]) -> None:
        self._groups, self._exempt = groups, exempt

    def _found(self, name: str) -> list[tuple[dict[str, Any], str | tuple[str, int]]]:
        "Return the param groups that have this, with its place there; for weight decay those that it acts on."
        found = [(g, where) for g in self._groups if (where := place_of(name, g)) is not None]
        if not found:
            raise KeyError(name)
        return [
            (g, where) for g, where in found if where != 'weight_decay' or not self.is_exempt(g)
        ] or found[:1]

    def __getitem__(self, name: str) -> Any:
        group, where = self._found(name)[0]
        return group[where] if isinstance(where, str) else group[where[0]][where[1]]

    def __setitem__(self, name: str, value: Any) -> None:
        for group, where in self._found(name):
            if where == 'weight_decay' and self.is_exempt(group):
                continue
            if isinstance(where, str):
                _put(group, where, value)
            else:
                group[where[0]] = tuple(
                    value if i == where[1] else v for i, v in enumerate(group[where[0]])
                )

    def is_exempt(self, group: dict[str, Any]) -> bool:
        return bool(group['params']) and all(p in self._exempt for p in group['params'])

    def __delitem__(self, name: str) -> None:
        raise TypeError(f'{name} cannot be deleted: an optimizer needs it.')

    def __iter__(self) -> Iterator[str]:
        return (n for n in HYPERS if n in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __contains__(self, name: object) -> bool:
        return any(place_of(str(name), g) is not None for g in self._groups)


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    "Set one option; a rate that lives in a tensor is filled, so that compiled steps see it."
    if isinstance(group[name], torch.Tensor):
        group[name].fill_(value)
    else:
        # never the caller's own
        group[name] = value.clone() if isinstance(value, torch.Tensor) else value


def torch_names(opt: Any, hypers: Mapping[str, Any]) -> dict[str, Any]:
    """Translate fastai's names of hyper-parameters into those that `opt` takes.

    Raises `OptimizerError` for what it does not take under any name.

    >>> torch_names(torch.optim.Adam, {'mom': 0.8, 'wd': 0.1})
    {'betas': (0.8, 0.999), 'weight_decay': 0.1}
    """
    try:
        takes = inspect.signature(opt).parameters
    except (TypeError, ValueError):
        return dict(hypers)
    res: dict[str, Any] = {}
    for name, value in hypers.items():
        key, at = next(
            (where for where in map(_as_pair, HYPERS.get(name, ())) if where[0] in takes),
            (name, None),
        )
        if name in takes or at is None:
            res[name if name in takes else key] = value
        else:
            res[key] = tuple(
                value if i == at else v for i, v in enumerate(res.get(key, takes[key].default))
            )
    if any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        return res
    for name in res:
        if name in takes:
            continue
        maker = getattr(maker_of(opt), '__name__', opt)
        raise OptimizerError(
            f'{maker} does not take `{name}`.{did_you_mean(name, [*takes, *HYPERS])}'
        )
    return res


def _as_pair(where: str | tuple[str, int]) -> tuple[str, int | None]:
    return (where, None) if isinstance(where, str) else where


def maker_of(opt: Any) -> Any:
    "Return the class or function that makes an optimizer, without the partials around it."
    while isinstance(opt, partial):
        opt = opt.func
    return opt


def spread(values: slice, n: int) -> list[float]:
    """Spread a slice of rates over `n` groups: evenly on a log scale, or `slice(hi)`: a tenth of it but for the last.

    >>> spread(slice(1e-4, 1e-2), 3), spread(slice(1e-2), 2)
    ([0.0001, 0.001, 0.01], [0.001, 0.01])
    """
    lo, hi = values.start, values.stop
    if not all(isinstance(v, (int, float)) and v >= 0 for v in (lo or 0, hi)) or not hi:
        raise OptimizerError(
            f'{values!r}: give slice(lowest, highest) or slice(highest), of numbers above 0.'
        )
    if not lo:
        return [hi / 10] * (n - 1) + [hi]
    return [lo * (hi / lo) ** (i / (n - 1)) for i in range(n)] if n > 1 else [hi]


def is_many(value: Any) -> bool:
    "Tell several values from one."
    if isinstance(value, str):
        return False
    return isinstance(value, Sequence) or (hasattr(value, 'shape') and len(value.shape) > 0)


# --------------------------------------------------------------------------------------- parameters

NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
SPLIT = ' Groups come from the `splitter`: `lambda m: [params(m.body), params(m.head)]`.'


def trainable_params(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients.

    >>> [tuple(p.shape) for p in trainable_params(nn.Linear(3, 2))]
    [(2, 3), (2,)]
    """
    return [p for p in model.parameters() if p.requires_grad]


def params(m: nn.Module) -> list[nn.Parameter]:
    """Return all parameters of a module: `splitter=lambda m: [params(m.body), params(m.head)]`.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    >>> [len(params(layer)) for layer in model], len(params(model))
    ([2, 2], 4)
    """
    return list(m.parameters())


def norm_bias_params(model: nn.Module, with_bias: bool = True) -> list[nn.Parameter]:
    "Return the parameters of normalisation layers and, `with_bias`, every other layer's bias."
    found = {}
    for m in model.modules():
        own = m.named_parameters(recurse=False)
        found.update(
            {
                id(p): p
                for n, p in own
                if isinstance(m, NORMS) or (with_bias and n.startswith('bias'))
            }
        )
    return list(found.values())


def as_groups(params: Any) -> list[Any]:
    "Turn parameters, lists of lists of them, or torch's dicts into what torch's optimizers take."
    if not isinstance(params, Iterable):
        raise OptimizerError(f'{params!r} is no list of parameters or groups.{SPLIT}')
    groups: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
    if not groups:
        raise OptimizerError(f'There are no parameters to optimize.{SPLIT}')
    first = groups[0]
    is_named = isinstance(first, tuple) and bool(first) and isinstance(first[0], str)
    if not isinstance(first, (dict, torch.Tensor)) and not is_named:
        groups = [{'params': g} for g in groups]
    if not isinstance(groups[0], dict):
        return groups
    return [{**g, 'params': _listed(g['params'])} for g in groups]


def _listed(params: Any) -> list[Any]:
    "Return the parameters of a group; raise `OptimizerError` for anything that is none, a module for one."
    res = (
        [params]
        if isinstance(params, torch.Tensor)
        else list(params)
        if isinstance(params, Iterable)
        else params
    )
    for p in res if isinstance(res, list) else [res]:
        if isinstance(p, (torch.Tensor, tuple)):
            continue
        raise OptimizerError(
            f'A param group has a {type(p).__name__}, which is no parameter.{SPLIT}'
        )
    return list(res)


def check_maker(opt: Any) -> None:
    "Raise `OptimizerError` for a class that makes no optimizers."
    cls = maker_of(opt)
    if isinstance(cls, type) and not issubclass(cls, torch.optim.Optimizer):
        raise OptimizerError(
            f'{cls.__name__} is no torch.optim.Optimizer: give one of their classes, or a function of '
            '(params, lr) that returns one.'
        )


def members(groups: list[Any]) -> Iterator[torch.Tensor]:
    "Yield the parameters in what `as_groups` returned."
    for o in (o for g in groups for o in (g['params'] if isinstance(g, dict) else [g])):
        yield o[1] if isinstance(o, tuple) else o


# --------------------------------------------------------------------------------- fused optimizers


def fused_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    "Return those that update all parameters of a group in one kernel."
    return [o for o in optimizers if any(g.get('fused') for g in o.param_groups)]


class Known(NamedTuple):
    "What a param group was like when all of it was looked at."

    state: Any  # the very objects: loading a state, or setting parameters apart, puts others there
    params: list[Any]
    sizes: tuple[Any, ...]  # what else tells that states or parameters came
    watched: list[Any]  # parameters on the CPU
    tall: list[Any]  # those elsewhere that can lie channels last
    lie: Any  # how both lay


class FusedGuard:
    """Keep what a fused optimizer takes for granted: gradients and states that lie in memory as their parameter.

    torch's kernels for the CPU run over memory as it lies: a state from before
    `model.to(memory_format=torch.channels_last)` would silently meet the wrong weights. Those for CUDA stop with an
    error. States are looked at when a load, a new state or another layout may have changed them, parameters and
    gradients on the CPU at each step. A state whose tensors were replaced by hand is not seen."""

    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self.opt = opt
        self._known: dict[int, Known] = {}

    def prepare(self) -> None:
        "Lay gradients and states as they must be, or fuse a group no more where that cannot be."
        for i, group in enumerate(self.opt.param_groups):
            if not group.get('fused') or not group['params'] or self._is_as_known(i, group):
                continue
            self._known.pop(i, None)
            if self._mend(group):
                self._know(i, group)
            else:
                group['fused'] = False

    def _sizes(self, group: dict[str, Any]) -> tuple[Any, ...]:
        params = group['params']
        return len(self.opt.state), len(params), params[0].is_cuda, bool(group.get('momentum'))

    def _is_as_known(self, i: int, group: dict[str, Any]) -> bool:
        known = self._known.get(i)
        if (
            known is None
            or known.state is not self.opt.state
            or known.params is not group['params']
        ):
            return False
        return known.sizes == self._sizes(group) and known.lie == lie_of(known.watched, known.tall)

    def _know(self, i: int, group: dict[str, Any]) -> None:
        params, state = group['params'], self.opt.state
        # a parameter without a momentum that the others have may get its first gradient at any step
        if group.get('momentum') and any(
            state.get(p, {}).get('momentum_buffer') is None for p in params
        ):
            return
        watched = [p for p in params if p.device.type == 'cpu']
        tall = [p for p in params if p.device.type != 'cpu' and p.dim() > 3]
        if (lie := lie_of(watched, tall)) is not None:
            self._known[i] = Known(state, params, self._sizes(group), watched, tall, lie)

    def _mend(self, group: dict[str, Any]) -> bool:
        "Lay what lies otherwise as its parameter; tell whether the group can be fused."
        momentum = bool(group.get('momentum')) and bool(self.opt.state)
        for p in group['params']:
            state, grad = self.opt.state.get(p, {}), p.grad
            if grad is not None and momentum and state.get('momentum_buffer') is None:
                return False
            tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
            if grad is not None and not (
                p.is_contiguous() and grad.layout == torch.strided and grad.is_contiguous()
            ):
                if not can_fuse(p):
                    return False
                if not lie_alike(p, grad):
                    p.grad = torch.empty_like(p).copy_(grad)
            for key, value in tensors.items():
                if value.shape == p.shape and not lie_alike(p, value):
                    state[key] = torch.empty_like(p).copy_(value)
        return True


def lie_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    "Tell whether two tensors of a shape have their elements in the same order."
    return a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous())


def lie_of(watched: list[Any], tall: list[Any]) -> Any:
    "Return how parameters lie; None if a gradient of those watched lies otherwise than its parameter."
    by_rows = torch.Tensor.is_contiguous
    try:
        if all(map(by_rows, watched)) and all(
            map(by_rows, [g for p in watched if (g := p.grad) is not None])
        ):
            return [by_rows(p) for p in tall]
        if not all(lie_alike(p, g) for p in watched if (g := p.grad) is not None):
            return None
    except RuntimeError:
        return None  # a sparse gradient has no strides
    return [p.stride() for p in watched], [by_rows(p) for p in tall]


def can_fuse(p: torch.Tensor) -> bool:
    "Tell whether torch's fused kernels can update a parameter: plain, real, without holes, its gradient dense."
    p = local(p)
    return (
        type(p) in (torch.Tensor, nn.Parameter)
        and p.is_floating_point()
        and p.device.type in ('cpu', 'cuda')
        and (p.is_contiguous() or torch.empty_like(p).stride() == p.stride())
        and (p.grad is None or not p.grad.is_sparse)
    )
