# SPDX-License-Identifier: Apache-2.0
"""`OptimWrapper`: one or several torch optimizers as one optimizer, with hyperparameters by name, and freezing."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from fastcore.foundation import L
from torch import nn
from torch.optim import optimizer

from learnkit.core.autocast import drop_casts
from learnkit.core.errors import OptimizerError, did_you_mean
from learnkit.core.model import unwrap_partial
from learnkit.optim.hyperparams import (
    DECAYS,
    OPTIONS,
    OWN_MODULES,
    Hypers,
    as_groups,
    check_maker,
    find_group_key,
    iterate_states,
    list_values,
    match_strides,
    torch_names,
    trainable_params,
)
from learnkit.optim.state import find_differences, load_state, read_state

__all__ = ['OptimWrapper', 'trainable_params']


def unannotated_step(opt: torch.optim.Optimizer) -> Any:
    """Take a step without torch's profiler annotation, which costs more than a small step.

    The annotation is kept while the profiler is on, for an optimizer with step hooks, and for a replaced `step` (such
    as the `step` that a scheduler sets).
    """
    is_plain = type(opt).__module__.startswith(OWN_MODULES) and 'step' not in opt.__dict__
    if (
        not is_plain
        or opt._optimizer_step_pre_hooks
        or opt._optimizer_step_post_hooks
        or optimizer._global_optimizer_pre_hooks
        or optimizer._global_optimizer_post_hooks
        or torch.autograd._profiler_enabled()
    ):
        return opt.step()
    return type(opt).step.__wrapped__(opt)  # type: ignore[attr-defined]  # set by torch


def has_own_zero_grad(opt: torch.optim.Optimizer) -> bool:
    """Return True if `zero_grad` of an optimizer is not torch's, so that it may clear more than `grad`.

    >>> has_own_zero_grad(torch.optim.SGD([nn.Parameter(torch.zeros(2))]))
    False
    """
    is_torch = type(opt).zero_grad is torch.optim.Optimizer.zero_grad
    return not is_torch or 'zero_grad' in opt.__dict__


# a param group of torch: its optimizer, and its index there
Slot = tuple[torch.optim.Optimizer, int]


class OptimWrapper(torch.optim.Optimizer):
    """One or several torch optimizers as one optimizer, with hyperparameters by name for each group of parameters.

    An OptimWrapper is a `torch.optim.Optimizer`, which schedulers and scalers accept. `opt` is the wrapped optimizer,
    unchanged. Groups come from the Learner's splitter. In each group, the parameters that are exempt from weight decay
    are in a separate param group of torch.

    An optimizer that evaluates the loss inside its step gets a closure: LBFGS, and an optimizer whose class has an
    attribute `needs_closure = True`. Others say so here: `OptimWrapper(params, SAM, needs_closure=True)`.
    `GradientAccumulation` and fp16 raise an error for them, since the
    batches before cannot be evaluated again.

    An optimizer with methods `train` and `eval` (ScheduleFree) has separate weights for training and evaluation: a fit
    trains between `train()` and `eval()`. Evaluation, predictions and saved files use the weights of `eval()` (see
    `evaluating`). Checkpoints of a running fit hold the training weights.

    Raises `OptimizerError` if two optimizers share a parameter, or if there is nothing to optimize.

    >>> opt = OptimWrapper([nn.Parameter(torch.zeros(2))], opt=torch.optim.Adam, lr=0.1)
    >>> opt.hypers[0]['mom'], opt.hypers[-1]['lr']
    (0.9, 0.1)
    """

    # a GradScaler would set its scale on the wrapper, where a fused optimizer does not read it
    _step_supports_amp_scaling = False

    def __init__(
        self,
        params: Any = None,  # parameters, lists of parameters, or torch's dicts; None: in `opt`
        opt: Any = None,  # torch optimizer class or factory, ready optimizer, or list or dict of these
        needs_closure: bool | None = None,  # whether steps evaluate the loss again; None: see below
        **hypers: Any,  # options of the optimizer by torch's or fastai's names
    ) -> None:
        opt = make_optimizer(params, opt, hypers)
        self.opt = opt
        is_single = isinstance(opt, torch.optim.Optimizer)
        self.optimizers = {'': opt} if is_single else name_optimizers(opt)
        self.n_steps = 0
        # steps that each of several optimizers took alone
        self._n_steps_alone: dict[torch.optim.Optimizer, int] = {}
        self.was_cut = False  # whether an exception has ended a step of this fit
        self.called = ''  # name of the `opt_func`; empty: the class names of the optimizers
        self.exempt: set[nn.Parameter] = set()  # parameters exempt from weight decay
        # the slots of each group of the splitter, one for each of its parts
        self.positions: list[list[Slot]] = []
        if len(self._find_groups()) > 1:
            unshare_options(self.optimizers.values())
        self.always_trained: set[nn.Parameter] = set()  # parameters that freezing skips
        self.frozen: set[nn.Parameter] = set()  # parameters frozen by `freeze_to`
        self.frozen_idx = 0  # number of frozen groups
        # whether norms and biases are exempt from weight decay by default
        self.spares_norms = False
        # the model's parameters at the last comparison; None: a ready optimizer
        self.seen: set[nn.Parameter] | None = None
        # parameters that require gradients and are in no optimizer, at the last comparison
        self.left_out: set[nn.Parameter] = set()
        # (requested `lr`, resulting rates) if the optimizer uses rates other than the Learner's `lr`
        self.own_lrs: tuple[Any, Any] = (None, None)
        self.last_lrs: list[float] = []  # rates when they were last set, or a fit ended
        self.is_training = False  # between `train()` and `eval()`
        optimizers = self.optimizers.values()
        # optimizers with separate weights for training and evaluation
        self._switching: list[Any] = [
            o for o in optimizers if callable(getattr(o, 'train', None)) and hasattr(o, 'eval')
        ]
        # optimizers that evaluate the loss again
        self._closures = {
            o for o in optimizers if getattr(o, 'needs_closure', isinstance(o, torch.optim.LBFGS))
        }
        if needs_closure is not None:
            self._closures = set(optimizers) if needs_closure else set()
        params = list(self.parameters())
        if len(set(params)) < len(params):
            raise OptimizerError('Two optimizers or groups share a parameter: give each its own.')

    @property
    def has_modes(self) -> bool:
        "True if an optimizer has separate weights for training and evaluation."
        return bool(self._switching)

    # torch's methods leave out most attributes
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        "Add a param group; with several optimizers, call `opt[name].add_param_group`."
        if len(self.optimizers) > 1:
            raise OptimizerError('There are several optimizers: add it to one, `opt[name]`.')
        self[0].add_param_group(param_group)
        self._find_groups()

    def _find_groups(self) -> list[list[dict[str, Any]]]:
        """Return torch's param groups of each group; a param group that was added later is a separate group.

        The param groups are looked up at each call because `load_state_dict` replaces them.
        """
        known = {slot for slots in self.positions for slot in slots}
        for o in self.optimizers.values():
            slots = [(o, i) for i in range(len(o.param_groups))]
            self.positions += [[slot] for slot in slots if slot not in known]
        return [[o.param_groups[i] for o, i in slots] for slots in self.positions]

    @property
    def last_group(self) -> dict[str, Any]:
        "The param group that holds the hyperparameters of the last group."
        opt, i = self.positions[-1][0]
        return opt.param_groups[i]

    # torch sets `param_groups` and `state` as attributes
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [g for groups in self._find_groups() for g in groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        if len(self.optimizers) == 1:
            return self[0].state
        return {p: s for o in self.optimizers.values() for p, s in o.state.items()}

    def __getattr__(self, name: str) -> Any:
        opt = self.__dict__.get('opt')
        if name.startswith('__') or not isinstance(opt, torch.optim.Optimizer):
            raise AttributeError(name)
        return getattr(opt, name)

    def __getitem__(self, key: str | int) -> torch.optim.Optimizer:
        "Return one of several optimizers by name or index."
        return list(self.optimizers.values())[key] if isinstance(key, int) else self.optimizers[key]

    def parameters(
        self,
        only: str | int | None = None,  # name or index of one of several optimizers; None: all
    ) -> Iterator[nn.Parameter]:
        "Iterate over every optimized parameter, or the parameters of one of several optimizers."
        groups = [g for o in self._select(only) for g in o.param_groups]
        return iter([p for g in groups for p in g['params']])

    def name_of(
        self,
        only: str | int | None,  # name or index of an optimizer; None: all
    ) -> str | None:
        "Return the name of an optimizer; raise `OptimizerError` if it does not exist."
        if only is None:
            return None
        [opt] = self._select(only)
        return next(name for name, o in self.optimizers.items() if o is opt)

    @property
    def needs_closure(self) -> bool:
        "Return True if a step evaluates the loss again."
        return bool(self._closures)

    def step(
        self,
        closure: Callable[[], Any] | None = None,  # function that evaluates the loss again
        only: str | int | None = None,  # name or index of the optimizer that steps; None: all
    ) -> Any:
        """Take one step with every optimizer, or with one of several: `learn.opt.step(only='critic')`.

        Each call counts as one step (`n_steps`, `learn.time.st`). EMA updates at each step. Batch schedules advance
        once per batch with a step. `learn.optimize(loss, only='critic')` calls this method with the events of backward
        and step. `opt['critic'].step()` is torch's method and is not counted.

        Raises `OptimizerError` for an unknown optimizer.
        """
        selected = self._select(only)
        try:
            for o in selected:
                if o not in self._closures:
                    res = unannotated_step(o)
                    continue
                if isinstance(closure, Closure):
                    closure.begin(o)
                res = o.step(closure)
        except BaseException:
            self.was_cut = True
            raise
        drop_casts()
        self.n_steps += 1
        if only is not None:
            [opt] = selected
            self._n_steps_alone[opt] = self._n_steps_alone.get(opt, 0) + 1
        return res

    def count_steps(
        self,
        only: str | int | None = None,  # name or index of one of several optimizers; None: all
    ) -> int:
        "Return the number of steps, or the number of those in which one of several optimizers took part."
        if only is None:
            return self.n_steps
        [opt] = self._select(only)
        alone = self._n_steps_alone
        return self.n_steps - sum(alone.values()) + alone.get(opt, 0)

    def _select(self, only: str | int | None) -> Iterable[torch.optim.Optimizer]:
        "Return the optimizer with a name or index, or all for None."
        if only is None:
            return self.optimizers.values()
        try:
            return [self[only]]
        except LookupError:
            raise OptimizerError(
                f'only={only!r}: the optimizers are {", ".join(map(repr, self.optimizers))}.'
                f'{did_you_mean(str(only), self.optimizers)}'
            ) from None

    def zero_grad(
        self,
        set_to_none: bool = True,
        only: str | int | None = None,  # name or index of one of several optimizers; None: all
    ) -> None:
        """Set the gradients to None, or to zero without `set_to_none`.

        An optimizer with its own `zero_grad` clears them by that method, as in a loop without a Learner.
        """
        for o in self._select(only):
            if not set_to_none:
                o.zero_grad(set_to_none=False)
                continue
            if has_own_zero_grad(o):
                o.zero_grad()
                continue
            # the loop of torch's method, without its profiler annotation
            for g in o.param_groups:
                for p in g['params']:
                    p.grad = None

    @property
    def lrs(self) -> list[float]:
        "The learning rates of the groups, as Python numbers; groups without a learning rate are left out."
        lrs = []
        for groups in self._find_groups():
            # None: the optimizer computes its rates, such as Adafactor with `relative_step`
            own_lrs = [group['lr'] for group in groups if group.get('lr') is not None]
            lrs += own_lrs[:1]
        return [float(lr) for lr in lrs]

    @property
    def hypers(self) -> L:
        "The hyperparameters of each group by fastai's names, as writable mappings."
        return self.select_hypers()

    @hypers.setter
    def hypers(self, values: Iterable[Mapping[str, Any]]) -> None:
        "Set hyperparameters by a mapping for each group."
        for own, row in zip(self.hypers, values, strict=True):
            for name, value in row.items():
                own[name] = value

    def select_hypers(
        self,
        only: str | int | None = None,  # name or index of one of several optimizers; None: all
    ) -> L:
        "Return the hyperparameters of each group, or of the groups of one of several optimizers."
        found = self._find_groups()
        return L(
            Hypers(found[i], self.exempt, partial(self._split_group, i))
            for i in self.find_indices(only)
        )

    def find_indices(
        self,
        only: str | int | None = None,  # name or index of one of several optimizers; None: all
    ) -> list[int]:
        "Return the indices of all groups, or of the groups of one of several optimizers."
        optimizers = list(self._select(only))
        self._find_groups()
        return [i for i, slots in enumerate(self.positions) if slots[0][0] in optimizers]

    def _split_group(self, i: int) -> list[dict[str, Any]]:
        "Split off exempt parameters, and return the param groups of group `i`."
        self.split_groups()
        return self._find_groups()[i]

    def set_hypers(self, **hypers: Any) -> None:
        "Set several hyperparameters: `set_hypers(lr=0.1, wd=0.01)`."
        values_by_name = {name: self.list_values(name, value) for name, value in hypers.items()}
        for name, values in values_by_name.items():
            if name in DECAYS and self.exempt and any(values):
                self.split_groups()
            for own, value in zip(self.hypers, values, strict=True):
                own.write(name, value)

    def set_hyper(
        self,
        name: str,  # fastai's or torch's name
        value: Any,  # one value, one per group, or a slice spread over the groups (see `spread`)
    ) -> None:
        """Set one hyperparameter on every group.

        Raises `OptimizerError` for an unknown hyperparameter, and for a wrong number of values.
        """
        self.set_hypers(**{name: value})

    def list_values(self, name: str, value: Any) -> list[Any]:
        "Return one value per group (see `set_hyper`). Raises `OptimizerError` for invalid values."
        groups = self._find_groups()
        if isinstance(value, Mapping):
            value = self._assign_by_optimizer(name, value)
        n = len(groups)
        values = list_values(name, value, n)
        if len(values) != n:
            fix = f'one, {n}, or a slice' if n > 1 else 'one number'
            raise OptimizerError(
                f'{name}: {len(values)} values for {n} param group{"s" * (n > 1)}. Pass {fix}.'
            )
        for own_groups in groups:
            if all(find_group_key(name, group) is None for group in own_groups):
                known = Hypers(own_groups, self.exempt)
                raise OptimizerError(
                    f'{name} is not a hyperparameter of {self.class_names()}: it has {", ".join(known)}.'
                    f'{did_you_mean(name, known)}'
                )
        return values

    def _assign_by_optimizer(self, name: str, values: Mapping[str, Any]) -> list[Any]:
        "Return one value per group from values by optimizer name; other optimizers keep their values."
        for only in values:
            self._select(only)
        names = {o: key for key, o in self.optimizers.items()}
        return [
            values.get(names[slots[0][0]], hypers.get(name))
            for slots, hypers in zip(self.positions, self.hypers, strict=True)
        ]

    def spare_from_decay(
        self,
        params: Iterable[nn.Parameter] = (),
        is_loaded: bool = False,  # as in `split_groups`
    ) -> None:
        "Exempt parameters from the current weight decay, and from weight decay that is set later."
        self.exempt.update(params)
        if self.exempt and any(g.get('weight_decay') for g in self.param_groups):
            self.split_groups(is_loaded=is_loaded)

    def split_groups(
        self,
        only: torch.optim.Optimizer | None = None,  # None: all
        is_loaded: bool = False,  # a saved state has set the decay of groups that are exempt as a whole
    ) -> None:
        "Move the exempt parameters of each group to a param group without weight decay."
        self._find_groups()
        for slots in self.positions:
            for o, i in list(slots):
                group = o.param_groups[i]
                rest = [p for p in group['params'] if p not in self.exempt]
                exempt = [p for p in group['params'] if p in self.exempt]
                if not exempt or 'weight_decay' not in group or only not in (None, o):
                    continue
                if not rest:
                    group['weight_decay'] = group['weight_decay'] if is_loaded else 0.0
                    continue
                group['params'] = rest
                o.add_param_group({**group, 'params': exempt, 'weight_decay': 0.0})
                slots.append((o, len(o.param_groups) - 1))

    # -- parameters --------------------------------------------------------------------------------

    def set_params(
        self,
        groups: list[list[nn.Parameter]],  # parameters of each group
    ) -> None:
        "Replace the parameters of the groups of a single optimizer; remaining parameters keep their states."
        for slots, params in zip(self.positions, groups, strict=True):
            parts = [params]
            if len(slots) > 1:
                rest = [p for p in params if p not in self.exempt]
                parts = [rest, [p for p in params if p in self.exempt]]
            for (o, i), part in zip(slots, parts, strict=True):
                o.param_groups[i]['params'] = part
        self._drop_orphan_states()
        self.spare_from_decay()

    def drop_params(self, dropped: set[nn.Parameter]) -> None:
        "Drop parameters and their states from every group of every optimizer."
        for group in self.param_groups:
            group['params'] = [p for p in group['params'] if p not in dropped]
        self._drop_orphan_states()

    def _drop_orphan_states(self) -> None:
        "Drop the states of parameters that are in no group."
        own = set(self.parameters())
        for o in self.optimizers.values():
            for p in [p for p, _ in iterate_states(o) if p not in own]:
                del o.state[p]
        for name in ('exempt', 'always_trained', 'frozen'):
            setattr(self, name, getattr(self, name) & own)

    # -- modes -------------------------------------------------------------------------------------

    def train(self) -> None:
        "Call `train` of optimizers that have this method: parameters get their training values."
        self.is_training = True
        for opt in self.optimizers.values():
            match_strides(opt)  # the layout of parameters may have changed since the last fit
        for o in self._switching:
            o.train()

    def eval(self) -> None:
        "Call `eval` of optimizers that have this method: parameters get their evaluation values."
        self.is_training = False
        for o in self._switching:
            o.eval()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Return a context in which the parameters have their evaluation values.

        The training values are restored bitwise afterwards: `eval()` and `train()` alone would leave rounding errors,
        and an evaluation would change the training after it. The context allocates a copy of the parameters.

        >>> opt = OptimWrapper(opt=torch.optim.SGD([nn.Parameter(torch.zeros(2))]))
        >>> with opt.evaluating(): pass   # no effect with torch's optimizers
        """
        if not (self.is_training and self._switching):
            yield
            return
        self.train()  # a callback may have called `eval` of an optimizer itself
        params = [p for o in self._switching for g in o.param_groups for p in g['params']]
        trained = [p.detach().clone() for p in params]
        self.eval()
        drop_casts()
        try:
            yield
        finally:
            self.train()
            with torch.no_grad():
                for p, value in zip(params, trained, strict=True):
                    p.copy_(value)
            drop_casts()

    # -- freezing ----------------------------------------------------------------------------------

    @property
    def param_lists(self) -> list[list[nn.Parameter]]:
        "The parameters of each group."
        lists = []
        for groups in self._find_groups():
            lists.append([p for group in groups for p in group['params']])
        return lists

    def freeze_to(
        self,
        n: int,  # index of the first trained group; negative: counted from the end
    ) -> None:
        """Freeze all groups before group `n`, except for parameters in `always_trained`.

        Freezing sets `requires_grad`. The optimizer states of frozen parameters are kept.
        """
        lists = self.param_lists
        self.frozen_idx = max(0, len(lists) + n) if n < 0 else n
        frozen = {p for params in lists[: self.frozen_idx] for p in params} - self.always_trained
        for p in (p for params in lists for p in params):
            p.requires_grad_(p not in frozen)
        for p in frozen:
            p.grad = None
        self.frozen = frozen

    def freeze(self) -> None:
        "Freeze all groups but the last."
        self.freeze_to(-1)

    def unfreeze(self) -> None:
        "Unfreeze all groups."
        self.freeze_to(0)

    # -- state -------------------------------------------------------------------------------------

    def clear_state(self, closures: bool = False) -> None:
        "Clear the states of all optimizers; with `closures`, only of the optimizers that evaluate the loss again."
        for o in self._closures if closures else self.optimizers.values():
            o.state.clear()

    def state_dict(self) -> dict[str, Any]:
        "Return the state dict of the optimizer, or a dict from names to state dicts of several optimizers."
        if len(self.optimizers) == 1:
            return read_state(self[0])
        return {name: read_state(o) for name, o in self.optimizers.items()}

    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        # parameters whose states are cast to their dtype, as torch does
        converted: Container[Any] = (),
        copy: bool = True,  # False: the optimizers may use the tensors as their own, and change them
    ) -> None:
        """Load a copy of a state dict to the devices of the parameters.

        Tensors of the state keep their saved dtype, such as the float32 averages of bf16 parameters. The options
        `foreach`, `fused` and `capturable` keep their current values, as do options that no file can hold
        (functions). Raises `OptimizerError`, with nothing changed, for a state that does not fit.
        """
        lines = find_differences(self, state_dict)
        if lines:
            raise OptimizerError(
                '\n  '.join(['The saved state does not fit. Nothing was loaded.', *lines])
            )
        load_state(self, state_dict, converted, copy)
        self.spare_from_decay(is_loaded=True)
        if self.is_training:
            self.train()
        else:
            self.eval()

    def class_names(self) -> str:
        "Return the name of the `opt_func`, or the class names of the optimizers."
        return self.called or ' and '.join(type(o).__name__ for o in self.optimizers.values())

    def __repr__(self) -> str:
        n = len(self._find_groups())
        lrs = dict.fromkeys(f'{lr:.3g}' for lr in self.lrs)
        lr = ', '.join(lrs) if len(lrs) == 1 else f'[{", ".join(lrs)}]'
        return f'{type(self).__name__}({self.class_names()}, {n} group{"s" * (n > 1)}, lr={lr})'


def unshare_options(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    "Clone option tensors (such as `lr`) that several param groups share."
    ids: set[int] = set()
    for g in (g for o in optimizers for g in o.param_groups):
        for name in (n for n in OPTIONS if isinstance(g.get(n), torch.Tensor)):
            if id(g[name]) in ids:
                g[name] = g[name].clone()
            ids.add(id(g[name]))


def evaluation_weights(learn: Any) -> AbstractContextManager[None]:
    "Return a context in which the model has the weights that its optimizer provides for evaluation."
    return learn.opt.evaluating() if isinstance(learn.opt, OptimWrapper) else nullcontext()


class Closure:
    """Closure that a Learner passes to `OptimWrapper.step`; a call evaluates the current batch again.

    The loop has evaluated the batch before the step: LBFGS's first call returns that loss.
    """

    def __init__(
        self,
        evaluate: Callable[[], Any],  # recomputes the loss, with gradients
        first: Callable[[], Any],  # returns the loss of the current gradients
    ) -> None:
        self.evaluate = evaluate
        self.first = first
        self.is_current = False  # the next call finds the weights of the loop's evaluation
        self.is_repeated = False

    def begin(self, opt: torch.optim.Optimizer) -> None:
        "Prepare for the step of an optimizer."
        self.is_current = isinstance(opt, torch.optim.LBFGS) and not self.is_repeated

    def __call__(self) -> Any:
        if self.is_current:
            self.is_current = False
            return self.first()
        self.is_repeated = True
        drop_casts()  # the optimizer has moved the weights within its step
        return self.evaluate()


def make_optimizer(
    params: Any,
    opt: Any,  # class or factory, or ready optimizers
    hypers: dict[str, Any],
) -> Any:
    "Make the wrapped optimizer, or return ready ones; raise `OptimizerError` for arguments that exclude each other."
    is_maker = callable(opt) and not isinstance(opt, torch.optim.Optimizer)
    if not is_maker and params is None and not hypers:
        return opt
    if not is_maker or params is None:
        raise OptimizerError(
            'OptimWrapper takes parameters and a class, for example OptimWrapper(params, opt=torch.optim.AdamW), or a '
            'ready optimizer: pass `opt=` alone. In a Learner: `opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)`.'
        )
    check_maker(opt)
    return opt(as_groups(params), **torch_names(opt, hypers))


def name_optimizers(opt: Any) -> dict[str, torch.optim.Optimizer]:
    "Return the optimizers by name; raise `OptimizerError` for any other object."
    if isinstance(opt, Mapping):
        named = dict(opt)
    elif isinstance(opt, (list, tuple)):
        named = {str(i): o for i, o in enumerate(opt)}
    else:
        named = {'': opt}
    for name, o in named.items():
        if not isinstance(o, torch.optim.Optimizer):
            what = f'opt_func{f"[{name}]" if name else ""} is or returned'
            raise OptimizerError(
                f'{what} {getattr(unwrap_partial(o), "__name__", repr(o))}, not a ready optimizer: pass a torch.optim '
                'class, a function of (params, lr), or a list or dict of ready optimizers.'
            )
    return named
