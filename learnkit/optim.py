"""Optimizers: any of torch's as it is, hyper-parameters by fastai's names over param groups, several as one."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from numbers import Real
from typing import Any

import torch
from fastcore.foundation import L
from torch import nn
from torch.optim import optimizer

from learnkit.errors import ModelError, OptimizerError, did_you_mean
from learnkit.hypers import OPTIONS, Hypers, is_many, spread, torch_names

__all__ = ['OptimWrapper', 'SGD', 'Adam', 'trainable_params', 'norm_bias_params', 'make_optimizer']

NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm,
         nn.LocalResponseNorm)



def trainable_params(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients.

    >>> [tuple(p.shape) for p in trainable_params(nn.Linear(3, 2))]
    [(2, 3), (2,)]
    """
    return [p for p in model.parameters() if p.requires_grad]


def norm_bias_params(model: nn.Module, with_bias: bool = True) -> list[nn.Parameter]:
    "Return the parameters of normalisation layers and, `with_bias`, every other layer's bias."
    found = {}
    for m in model.modules():
        own = m.named_parameters(recurse=False)
        found.update({id(p): p for n, p in own if isinstance(m, NORMS) or (with_bias and n.startswith('bias'))})
    return list(found.values())


_annotated = torch.optim.Optimizer.profile_hook_step(lambda opt: None).__code__  # that of every step torch annotates


def unannotated_step(opt: torch.optim.Optimizer) -> Any:
    """Take a step, without torch's annotation for its profiler while that is off: it costs more than a small step.

    Steps with hooks, and steps that were replaced (by a scheduler, for one), are taken as they are."""
    step = type(opt).step
    plain = getattr(step, '__code__', None) is _annotated and 'step' not in opt.__dict__ and not (
        opt._optimizer_step_pre_hooks or opt._optimizer_step_post_hooks or optimizer._global_optimizer_pre_hooks
        or optimizer._global_optimizer_post_hooks or torch.autograd._profiler_enabled())
    return step.__wrapped__(opt) if plain else opt.step()  # type: ignore[attr-defined]  # functools.wraps sets it


class OptimWrapper(torch.optim.Optimizer):
    """One or several torch optimizers as one, with hyper-parameters by name over param groups.

    It is a `torch.optim.Optimizer` (schedulers and scalers take it), and `opt` is the wrapped one, untouched. Groups
    are those of the learner's splitter; parameters that weight decay spares sit in a param group of their own.

    Raises `OptimizerError` when two optimizers share a parameter, or there is nothing to optimize.

    >>> opt = OptimWrapper([nn.Parameter(torch.zeros(2))], opt=torch.optim.Adam, lr=0.1)
    >>> opt.hypers[0]['mom'], opt.hypers[-1]['lr']
    (0.9, 0.1)
    """

    _step_supports_amp_scaling = False  # a scaler would leave its scale here, where a fused optimizer does not look

    def __init__(
        self,
        params: Any = None,       # parameters, lists of them, or torch's dicts; None with a ready optimizer
        opt: Any = None,          # a torch optimizer class or factory, a ready optimizer, or a list or dict of them
        **hypers: Any,            # its options, by torch's or fastai's names
    ) -> None:
        if callable(opt) and not isinstance(opt, torch.optim.Optimizer):
            opt = opt(as_groups(params), **torch_names(opt, hypers))
        self.opt = opt
        self.optimizers = _named_optimizers(opt)
        self.n_steps = 0                                            # steps taken
        _unshare_rates(self.optimizers.values())
        self._exempt: set[nn.Parameter] = set()                     # those that weight decay spares
        self._places = [[(o, i)] for o in self.optimizers.values() for i in range(len(o.param_groups))]
        self._closures = {o for o in self.optimizers.values() if needs_closure(o)}
        self.needs_closure = bool(self._closures)                   # whether a step evaluates the loss again (LBFGS)
        seen: set[int] = set()
        for p in self.parameters():
            if id(p) in seen: raise OptimizerError('Two optimizers or groups share a parameter: give each its own.')
            seen.add(id(p))

    def __getstate__(self) -> dict[str, Any]: return self.__dict__.copy()  # torch's leaves most out
    def __setstate__(self, state: dict[str, Any]) -> None: self.__dict__.update(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        "Add a group of parameters, with hyper-parameters of its own; with several optimizers, add to one: `opt[name]`."
        if len(self.optimizers) > 1: raise OptimizerError('There are several optimizers: add it to one, `opt[name]`.')
        self[0].add_param_group(param_group)
        self._find_new_groups()

    def _find_new_groups(self) -> None:
        "Make places for the param groups that were added to an optimizer since."
        known = {(id(o), i) for places in self._places for o, i in places}
        every = [(o, i) for o in self.optimizers.values() for i in range(len(o.param_groups))]
        if len(known) < len(every): self._places += [[(o, i)] for o, i in every if (id(o), i) not in known]

    @property
    def _groups(self) -> list[list[dict[str, Any]]]:
        "For each group of the splitter, torch's param groups: loading a state replaces them, so they are looked up."
        self._find_new_groups()
        return [[o.param_groups[i] for o, i in places] for places in self._places]

    @property
    def last_group(self) -> dict[str, Any]:
        "The param group that the last group's hyper-parameters are read from."
        opt, i = self._places[-1][0]
        return opt.param_groups[i]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # torch sets it as an attribute
        return [g for groups in self._groups for g in groups]

    @property
    def state(self) -> Any:  # type: ignore[override]  # torch sets it as an attribute
        if len(self.optimizers) == 1: return self[0].state
        return {p: s for o in self.optimizers.values() for p, s in o.state.items()}

    def __getattr__(self, name: str) -> Any:
        opt = self.__dict__.get('opt')
        if name.startswith('__') or not isinstance(opt, torch.optim.Optimizer): raise AttributeError(name)
        return getattr(opt, name)

    def __getitem__(self, key: str | int) -> torch.optim.Optimizer:
        "Return one of several optimizers, by its name or place."
        return list(self.optimizers.values())[key] if isinstance(key, int) else self.optimizers[key]

    def parameters(self) -> Iterator[nn.Parameter]:
        "Yield every parameter that is optimized."
        for o in self.optimizers.values():
            for g in o.param_groups: yield from g['params']

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        "Take one step with every optimizer; the closure goes to those that need it."
        for o in self.optimizers.values(): loss = o.step(closure) if o in self._closures else unannotated_step(o)
        self.n_steps += 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        "Clear the gradients (they become None)."
        for o in self.optimizers.values():
            if not set_to_none: o.zero_grad(set_to_none=False)
            elif getattr(o.zero_grad, '__func__', None) is not torch.optim.Optimizer.zero_grad: o.zero_grad()
            else:  # as torch does it, without the microseconds of its profiler
                for g in o.param_groups:
                    for p in g['params']: p.grad = None

    @property
    def hypers(self) -> L:
        "The hyper-parameters of each group, by fastai's names; writing to them sets them."
        return L(Hypers(groups, self._exempt) for groups in self._groups)

    def set_hypers(self, **hypers: Any) -> None:
        "Set several hyper-parameters: `set_hypers(lr=0.1, wd=0.01)`."
        checked = {name: self._checked(name, value) for name, value in hypers.items()}
        for name, values in checked.items(): self._set(name, values)

    def set_hyper(
        self,
        name: str,       # fastai's or torch's name
        value: Any,      # one value, one a group, or a slice that is spread over the groups (see `spread`)
    ) -> None:
        """Set one hyper-parameter on every group.

        Raises `OptimizerError` for a name that the optimizer does not have, and for a wrong number of values.
        """
        self._set(name, self._checked(name, value))

    def _checked(self, name: str, value: Any) -> list[Any]:
        "Return one value a group."
        n = len(self._groups)
        values = spread(value, n) if isinstance(value, slice) else list(value) if is_many(value) else [value] * n
        if len(values) != n:
            fix = f'one, {n}, or a slice' if n > 1 else 'one number'
            raise OptimizerError(f'{name}: {len(values)} values for {n} param group{"s" * (n > 1)}. Give {fix}.')
        for v in values:
            if not isinstance(v, (Real, torch.Tensor)) or (name == 'lr' and not float(v) >= 0):
                raise OptimizerError(f'{name}={v!r}: give a number{", 0 or more" * (name == "lr")}.')
        for h in self.hypers:
            if name not in h:
                raise OptimizerError(f'{name} is no hyper-parameter of {self._names()}: it has {", ".join(h)}.'
                                     f'{did_you_mean(name, h)}')
        return values

    def _set(self, name: str, values: list[Any]) -> None:
        if name in ('wd', 'weight_decay') and self._exempt and any(values): self._set_apart()
        for h, v in zip(self.hypers, values, strict=True): h[name] = v

    def spare_from_decay(self, params: Iterable[nn.Parameter]) -> None:
        "Leave these parameters out of weight decay, now and when it is set later."
        self._exempt.update(params)
        if any(g.get('weight_decay') for g in self.param_groups): self._set_apart()

    def _set_apart(self) -> None:
        "Put the spared parameters of each group into a param group of their own, without weight decay."
        for o in self.optimizers.values():
            for i, group in enumerate(list(o.param_groups)):
                spared = [p for p in group['params'] if p in self._exempt]
                if not spared or 'weight_decay' not in group: continue
                if len(spared) == len(group['params']):
                    group['weight_decay'] = 0.
                    continue
                group['params'] = [p for p in group['params'] if p not in self._exempt]
                o.add_param_group({**group, 'params': spared, 'weight_decay': 0.})
                next(ps for ps in self._places if (o, i) in ps).append((o, len(o.param_groups) - 1))

    def clear_state(self, closures: bool = False) -> None:
        "Forget momenta and averages, of all optimizers or of those that need a closure."
        for o in self._closures if closures else self.optimizers.values(): o.state.clear()

    def state_dict(self) -> dict[str, Any]:
        "Return the optimizer's own state dict, or those of several by name."
        if len(self.optimizers) == 1: return self[0].state_dict()
        return {name: o.state_dict() for name, o in self.optimizers.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        "Load what `state_dict` returned."
        one = len(self.optimizers) == 1
        for name, o in self.optimizers.items(): o.load_state_dict(state_dict if one else state_dict[name])

    def _names(self) -> str: return ' and '.join(type(o).__name__ for o in self.optimizers.values())
    def __repr__(self) -> str: return f'OptimWrapper({self.opt!r})'


def as_groups(params: Any) -> list[Any]:
    "Turn parameters, lists of lists of them, or torch's dicts into what torch's optimizers take."
    groups = list(params)
    flat = not groups or isinstance(groups[0], (dict, torch.Tensor, tuple))  # a tuple is a named parameter
    return groups if flat else [{'params': list(g)} for g in groups]


def _unshare_rates(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    "Give each param group a tensor of its own where one rate in a tensor was given for several."
    seen: set[int] = set()
    for g in (g for o in optimizers for g in o.param_groups):
        for name in (n for n in OPTIONS if isinstance(g.get(n), torch.Tensor)):
            if id(g[name]) in seen: g[name] = g[name].clone()
            seen.add(id(g[name]))


def needs_closure(opt: torch.optim.Optimizer) -> bool:
    "Tell whether `step` cannot be called without a closure."
    closure = inspect.signature(opt.step).parameters.get('closure')
    return closure is not None and closure.default is inspect.Parameter.empty


def _named_optimizers(opt: Any) -> dict[str, torch.optim.Optimizer]:
    "Return the optimizers by name; raise `OptimizerError` for anything that is none."
    named = dict(opt) if isinstance(opt, Mapping) else dict(zip(map(str, range(len(opt))), opt, strict=True)) \
        if isinstance(opt, (list, tuple)) else {'': opt}
    for name, o in named.items():
        if not isinstance(o, torch.optim.Optimizer):
            raise OptimizerError(f'opt_func{f"[{name}]" if name else ""} gave {o!r}, no torch.optim.Optimizer. '
                                 'It is called with the parameters and `lr=`, and returns an optimizer or several.')
    if not named: raise OptimizerError('opt_func gave no optimizer.')
    return named


def SGD(
    params: Any,                # parameters or groups of them
    lr: float = 1e-3,           # learning rate
    mom: float = 0.,            # momentum
    wd: float = 0.,             # weight decay
    decouple_wd: bool = True,   # decay the weights themselves (False: add it to the gradient, as L2 regularisation)
) -> OptimWrapper:
    "Make fastai's SGD on torch's own; as `opt_func`, with other options: `partial(SGD, mom=0.9)`."
    cls = DecoupledSGD if decouple_wd else torch.optim.SGD
    return OptimWrapper(params, opt=partial(cls, lr=lr, momentum=mom, weight_decay=wd))


_sgd_step = inspect.unwrap(torch.optim.SGD.step)  # its wrapper would run the hooks of a step a second time


class DecoupledSGD(torch.optim.SGD):
    "SGD whose weight decay shrinks the weights themselves (Loshchilov and Hutter, 2019, eq. 9 without the schedule)."

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        "Shrink the weights that have a gradient, then step without weight decay."
        decays = [g['weight_decay'] for g in self.param_groups]
        if not any(decays): return _sgd_step(self, closure)
        try:
            for g in self.param_groups:
                for p in g['params']:
                    if p.grad is not None: p.mul_(1 - g['lr'] * g['weight_decay'])
                g['weight_decay'] = 0.
            return _sgd_step(self, closure)
        finally:
            for g, wd in zip(self.param_groups, decays, strict=True): g['weight_decay'] = wd


def Adam(
    params: Any,                # parameters or groups of them
    lr: float = 1e-3,           # learning rate
    mom: float = 0.9,           # decay of the average gradient
    sqr_mom: float = 0.99,      # decay of the average squared gradient
    eps: float = 1e-5,          # added to the denominator
    wd: float = 0.01,           # weight decay
    decouple_wd: bool = True,   # decay the weights themselves (AdamW)
) -> OptimWrapper:
    "Make fastai's Adam, with its defaults, on torch's own; with others: `opt_func=partial(Adam, wd=0.1)`."
    cls = torch.optim.AdamW if decouple_wd else torch.optim.Adam
    return OptimWrapper(params, opt=partial(cls, lr=lr, betas=(mom, sqr_mom), eps=eps, weight_decay=wd))


def make_optimizer(
    opt_func: Any,              # class or function of parameters and lr, a ready optimizer, or a list or dict of them
    model: nn.Module,
    lr: Any,                    # one rate, one a group, or a slice over the groups
    splitter: Callable[[nn.Module], Any] = trainable_params,  # gives the parameters, or a list of groups of them
    wd_bn_bias: bool = False,   # whether weight decay also acts on norm layers and biases
) -> OptimWrapper:
    """Make the optimizer of a model.

    Raises `ModelError` when nothing in the model requires a gradient and `OptimizerError` when `opt_func` gives none.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(f'{type(model).__name__} has no trainable parameters: nothing can be learned. '
                         'Unfreeze some with `requires_grad_()`; `validate()` and `get_preds()` work without.')
    if isinstance(opt_func, (torch.optim.Optimizer, list, dict)): opt = opt_func
    elif callable(opt_func):
        groups = as_groups(splitter(model))
        n = max(1, sum(isinstance(g, dict) for g in groups))
        first = spread(lr, n)[-1] if isinstance(lr, slice) else list(lr)[-1] if is_many(lr) else lr
        opt = opt_func(groups, lr=first.clone() if isinstance(first, torch.Tensor) else first)
    else: raise OptimizerError(f'opt_func={opt_func!r} cannot be called: give a torch.optim class or a function.')
    if not isinstance(opt, OptimWrapper): opt = OptimWrapper(opt=opt)
    if not wd_bn_bias: opt.spare_from_decay(norm_bias_params(model))
    return opt
