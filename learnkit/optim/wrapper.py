"""One or several torch optimizers as one, with hyper-parameters by fastai's names over param groups, and freezing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from fastcore.foundation import L
from torch import nn
from torch.optim import optimizer

from learnkit.core.errors import OptimizerError, did_you_mean
from learnkit.core.validation import warn_user
from learnkit.optim.hyperparams import (
    OPTIONS,
    SPLIT,
    FusedGuard,
    Hypers,
    as_groups,
    check_hyper,
    check_maker,
    fused_of,
    is_many,
    maker_of,
    norm_bias_params,
    spread,
    torch_names,
    trainable_params,
)
from learnkit.optim.state import differences, load_state

__all__ = ['OptimWrapper', 'trainable_params', 'norm_bias_params']

NO_CONTEXT = nullcontext()

# that of every step torch annotates
_annotated = torch.optim.Optimizer.profile_hook_step(lambda opt: None).__code__


def unannotated_step(opt: torch.optim.Optimizer) -> Any:
    """Take a step, without torch's annotation for its profiler while that is off: it costs more than a small step.

    Steps with hooks, and steps that were replaced (by a scheduler, for one), are taken as they are."""
    step = type(opt).step
    plain = (
        getattr(step, '__code__', None) is _annotated
        and 'step' not in opt.__dict__
        and not (
            opt._optimizer_step_pre_hooks
            or opt._optimizer_step_post_hooks
            or optimizer._global_optimizer_pre_hooks
            or optimizer._global_optimizer_post_hooks
            or torch.autograd._profiler_enabled()
        )
    )
    # functools.wraps sets it
    return step.__wrapped__(opt) if plain else opt.step()  # type: ignore[attr-defined]


class OptimWrapper(torch.optim.Optimizer):
    """One or several torch optimizers as one, with hyper-parameters by name over param groups.

    It is a `torch.optim.Optimizer` (schedulers and scalers take it), and `opt` is the wrapped one, untouched. Groups
    are those of the learner's splitter; parameters that weight decay spares sit in a param group of their own.

    An optimizer that evaluates the loss inside its step (LBFGS, SAM) gets a closure for it.
    `needs_closure` is True where `step` requires one, or where the optimizer's class has an
    attribute `needs_closure = True`; the argument wins over both. An optimizer from outside of
    torch whose `step` takes a closure optionally gets one too. That closure evaluates nothing as
    long as the optimizer has changed neither its parameters nor their gradients, and
    `needs_closure = False` gives none. What cannot go along with a second evaluation
    (`GradientAccumulation`, fp16) is refused before training if `needs_closure` is True, and
    otherwise at the first second evaluation.

    An optimizer with methods `train` and `eval` (ScheduleFree) is switched by them: a fit trains
    between `train()` and `eval()`; evaluation, predictions and saved files see the weights of
    `eval()` (`evaluating`). Checkpoints of a running fit hold the weights that are trained.

    Raises `OptimizerError` when two optimizers share a parameter, or there is nothing to optimize.

    >>> opt = OptimWrapper([nn.Parameter(torch.zeros(2))], opt=torch.optim.Adam, lr=0.1)
    >>> opt.hypers[0]['mom'], opt.hypers[-1]['lr']
    (0.9, 0.1)
    """

    _step_supports_amp_scaling = (
        False  # a scaler would leave its scale here, where a fused optimizer does not look
    )

    def __init__(
        self,
        params: Any = None,  # parameters, lists of them, torch's dicts; None with a ready optimizer
        opt: Any = None,  # a torch optimizer class or factory, a ready one, a list or dict of them
        needs_closure: bool | None = None,  # steps evaluate the loss again; None: as the class says
        **hypers: Any,  # its options, by torch's or fastai's names
    ) -> None:
        if opt is None and params is not None:
            raise OptimizerError(
                'Parameters need `opt=`: OptimWrapper(params, opt=torch.optim.AdamW), for one.'
            )
        if callable(opt) and not isinstance(opt, torch.optim.Optimizer):
            check_maker(opt)
            if params is None:
                me, name = type(self).__name__, getattr(maker_of(opt), '__name__', repr(opt))
                use = (
                    f'partial({me}, opt={name})'
                    if me == 'OptimWrapper'
                    else f'lambda p, lr: {me}({name}(p, lr=lr))'
                )
                raise OptimizerError(
                    f'{me} got {name}, which makes an optimizer, and no parameters: `opt_func={use}`.'
                )
            opt = opt(as_groups(params), **torch_names(opt, hypers))
        elif params is not None or hypers:
            raise OptimizerError(
                'A ready optimizer has its parameters and hyper-parameters: give `opt=` alone.'
            )
        self.opt = opt
        self.optimizers = _named_optimizers(opt)
        self.n_steps = 0  # steps taken
        self.called = ''  # the name of what made it; empty: torch's own
        _unshare_rates(self.optimizers.values())
        self.exempt: set[nn.Parameter] = set()  # those that weight decay spares
        self._places = [
            [(o, i)] for o in self.optimizers.values() for i in range(len(o.param_groups))
        ]
        self.splits: list[
            tuple[torch.optim.Optimizer, int, int, list[nn.Parameter]]
        ] = []  # what `split_groups` has done
        self.always_trained: set[nn.Parameter] = set()  # those that stay trained in frozen groups
        self.frozen: set[nn.Parameter] = set()  # those that `freeze_to` has frozen
        self.frozen_idx = 0  # how many groups are frozen
        self.spares_norms = False  # by its kind, norms and biases do not decay
        self.seen: set[nn.Parameter] | None = None  # what there was to train; None: it was ready
        self.had: set[nn.Parameter] = set()  # what was in its groups at the last look
        self.left_out: set[nn.Parameter] = set()  # trainable, but in no group when it was made
        self.warned: set[nn.Parameter] = set()  # parameters that a warning has named
        self.is_training = False  # between `train()` and `eval()`
        self._switching = [o for o in self.optimizers.values() if switches(o)]
        wanted = dict.fromkeys(self.optimizers.values(), needs_closure)
        if needs_closure is None:
            wanted = {o: closure_of(o) for o in wanted}
        self._closures = {o for o, needed in wanted.items() if needed is not False}  # get one
        self._evaluating = {o for o, needed in wanted.items() if needed}  # evaluate the loss again
        seen: set[int] = set()
        for p in self.parameters():
            if id(p) in seen:
                raise OptimizerError(
                    'Two optimizers or groups share a parameter: give each its own.'
                )
            seen.add(id(p))
        self._fused = [FusedGuard(o) for o in fused_of(self.optimizers.values())]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()  # torch's leaves most out

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimWrapper:
        "Copy it with its optimizers and what these have of their own, which torch's own copies lack."
        res = memo[id(self)] = type(self).__new__(type(self))
        for o in self.optimizers.values():
            twin = vars(deepcopy(o, memo))
            # a scheduler's `step` would step the one it was made for
            for name in vars(o).keys() - twin.keys() - {'step'}:
                twin[name] = deepcopy(vars(o)[name], memo)
        res.__dict__.update(deepcopy(self.__dict__, memo))
        return res

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        "Add a group of parameters, with hyper-parameters of its own; with several optimizers, add to one: `opt[name]`."
        if len(self.optimizers) > 1:
            raise OptimizerError('There are several optimizers: add it to one, `opt[name]`.')
        self[0].add_param_group(param_group)
        self._find_new_groups()

    def _find_new_groups(self) -> None:
        "Make places for the param groups that were added to an optimizer since."
        known = {(id(o), i) for places in self._places for o, i in places}
        every = [(o, i) for o in self.optimizers.values() for i in range(len(o.param_groups))]
        if len(known) < len(every):
            self._places += [[(o, i)] for o, i in every if (id(o), i) not in known]

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

    # torch sets it as an attribute
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [g for groups in self._groups for g in groups]

    @property
    def state(self) -> Any:  # type: ignore[override]  # torch sets it as an attribute
        if len(self.optimizers) == 1:
            return self[0].state
        return {p: s for o in self.optimizers.values() for p, s in o.state.items()}

    def rename_params(self, new: Mapping[Any, Any]) -> None:
        "Take other parameters for those of its own that are keys of `new`, whose optimizers have them already."
        for name in ('exempt', 'always_trained', 'frozen', 'left_out', 'warned', 'had'):
            setattr(self, name, {new.get(p, p) for p in getattr(self, name)})
        if self.seen is not None:
            self.seen = {new.get(p, p) for p in self.seen}
        self.splits = [
            (o, i, j, [new.get(p, p) for p in params]) for o, i, j, params in self.splits
        ]
        self._fused = [FusedGuard(o) for o in fused_of(self.optimizers.values())]

    def __getattr__(self, name: str) -> Any:
        opt = self.__dict__.get('opt')
        if name.startswith('__') or not isinstance(opt, torch.optim.Optimizer):
            raise AttributeError(name)
        return getattr(opt, name)

    def __getitem__(self, key: str | int) -> torch.optim.Optimizer:
        "Return one of several optimizers, by its name or place."
        return list(self.optimizers.values())[key] if isinstance(key, int) else self.optimizers[key]

    def parameters(
        self,
        only: str | int | None = None,  # name or index of one of several optimizers; None: all
    ) -> Iterator[nn.Parameter]:
        "Yield every parameter that is optimized, or that one of several optimizers has."
        for o in self._stepping(only):
            for g in o.param_groups:
                yield from g['params']

    def name_of(
        self,
        only: str | int | None,  # a name or a place; None: all
    ) -> str | None:
        "Return the name of one of several optimizers. Raises `OptimizerError` for an unknown one."
        if only is None:
            return None
        [opt] = self._stepping(only)
        return next(name for name, o in self.optimizers.items() if o is opt)

    def evaluates_again(self, only: str | int | None = None) -> bool:
        "Return True if a step of all optimizers, or of one, evaluates the loss again (LBFGS)."
        return any(o in self._evaluating for o in self._stepping(only))

    @property
    def needs_closure(self) -> bool:
        "Return True if a step is known to evaluate the loss again."
        return bool(self._evaluating)

    @property
    def takes_closure(self) -> bool:
        "Return True if a step may evaluate the loss again."
        return bool(self._closures)

    def step(
        self,
        closure: Callable[[], Any] | None = None,  # evaluates the loss again, if that is needed
        only: str | int | None = None,  # the name or place of the one that steps; None: all do
    ) -> Any:
        """Take one step with every optimizer, or with one of several: `learn.opt.step(only='critic')`.

        Each call counts as one step (`n_steps`, `learn.time.st`): EMA moves with each, schedules of
        every batch once in a batch that had any. In a Learner `optimize(loss, only='critic')` calls
        it, with the events around backward and step. A call of `opt['critic'].step()` is torch's
        own, and is not counted.

        Raises `OptimizerError` for an optimizer that is not there.
        """
        for guard in self._fused:
            guard.prepare()
        optimizers = self.optimizers.values() if only is None else self._stepping(only)
        for o in optimizers:
            if o not in self._closures:
                res = unannotated_step(o)
            elif isinstance(closure, Closure):
                res = o.step(Evaluation(o, closure, self._evaluating))
            else:
                res = o.step(closure)
        self.n_steps += 1
        return res

    def _stepping(self, only: str | int | None) -> Iterable[torch.optim.Optimizer]:
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
        "Clear the gradients (they become None)."
        optimizers = self.optimizers.values() if only is None else self._stepping(only)
        for o in optimizers:
            if not set_to_none:
                o.zero_grad(set_to_none=False)
            elif getattr(o.zero_grad, '__func__', None) is not torch.optim.Optimizer.zero_grad:
                o.zero_grad()
            else:  # as torch does it, without the microseconds of its profiler
                for g in o.param_groups:
                    for p in g['params']:
                        p.grad = None

    @property
    def hypers(self) -> L:
        "The hyper-parameters of each group, by fastai's names; writing to them sets them."
        return L(Hypers(groups, self.exempt) for groups in self._groups)

    def set_hypers(self, **hypers: Any) -> None:
        "Set several hyper-parameters: `set_hypers(lr=0.1, wd=0.01)`."
        checked = {name: self._checked(name, value) for name, value in hypers.items()}
        for name, values in checked.items():
            self._set(name, values)

    def set_hyper(
        self,
        name: str,  # fastai's or torch's name
        value: Any,  # one value, one a group, or a slice spread over groups (see `spread`)
    ) -> None:
        """Set one hyper-parameter on every group.

        Raises `OptimizerError` for a name that the optimizer does not have, and for a wrong number of values.
        """
        self._set(name, self._checked(name, value))

    def _checked(self, name: str, value: Any) -> list[Any]:
        "Return one value a group."
        n = len(self._groups)
        if isinstance(value, Mapping):
            value = self._by_name(name, value)
        values = (
            spread(value, n)
            if isinstance(value, slice)
            else list(value)
            if is_many(value)
            else [value] * n
        )
        if len(values) != n:
            fix = f'one, {n}, or a slice' if n > 1 else 'one number'
            raise OptimizerError(
                f'{name}: {len(values)} values for {n} param group{"s" * (n > 1)}. Give {fix}.'
            )
        # plain numbers, for checkpoints
        values = [v.item() if isinstance(v, np.generic) else v for v in values]
        for v in values:
            check_hyper(name, v)
        for h in self.hypers:
            if name not in h:
                raise OptimizerError(
                    f'{name} is no hyper-parameter of {self.class_names()}: it has {", ".join(h)}.'
                    f'{did_you_mean(name, h)}'
                )
        return values

    def _by_name(self, name: str, values: Mapping[str, Any]) -> list[Any]:
        "Return one value a group of values by optimizer; one that is not named keeps its own."
        for only in values:
            if only not in self.optimizers:
                known = ', '.join(map(repr, self.optimizers))
                hint = did_you_mean(str(only), self.optimizers)
                raise OptimizerError(f'{name}={dict(values)!r}: the optimizers are {known}.{hint}')
        names = {id(o): key for key, o in self.optimizers.items()}
        owners = [names[id(places[0][0])] for places in self._places]
        return [
            values[owner] if owner in values else hypers.get(name)
            for owner, hypers in zip(owners, self.hypers, strict=True)
        ]

    def _set(self, name: str, values: list[Any]) -> None:
        if name in ('wd', 'weight_decay') and self.exempt and any(values):
            self.split_groups()
        for h, v in zip(self.hypers, values, strict=True):
            h[name] = v

    def spare_from_decay(self, params: Iterable[nn.Parameter]) -> None:
        "Leave these parameters out of weight decay, now and when it is set later."
        self.exempt.update(params)
        if any(g.get('weight_decay') for g in self.param_groups):
            self.split_groups()

    def split_groups(self, *optimizers: torch.optim.Optimizer) -> None:
        "Put the spared parameters of each group, of some optimizers or all, in one of their own without weight decay."
        for o in optimizers or self.optimizers.values():
            for i, group in enumerate(list(o.param_groups)):
                spared = [p for p in group['params'] if p in self.exempt]
                if not spared or 'weight_decay' not in group:
                    continue
                if len(spared) == len(group['params']):
                    group['weight_decay'] = 0.0
                    continue
                self.splits.append((o, i, len(o.param_groups), group['params']))
                group['params'] = [p for p in group['params'] if p not in self.exempt]
                o.add_param_group({**group, 'params': spared, 'weight_decay': 0.0})
                next(ps for ps in self._places if (o, i) in ps).append((o, len(o.param_groups) - 1))

    def join_groups(self, opt: torch.optim.Optimizer) -> None:
        "Undo what `split_groups` has done to an optimizer, unless groups were added since."
        for done in [done for done in reversed(self.splits) if done[0] is opt]:
            _, i, j, whole = done
            if j != len(opt.param_groups) - 1:
                return
            opt.param_groups.pop()
            opt.param_groups[i]['params'] = whole
            for places in self._places:
                places[:] = [place for place in places if place != (opt, j)]
            self.splits.remove(done)

    def share_groups(self, *groups: list[tuple[str, int]]) -> None:
        """Let param groups of several optimizers be one group each, with the same hyper-parameters.

        A group is a list of (name of the optimizer, number of its param group)."""
        self._places = [[(self.optimizers[name], i) for name, i in places] for places in groups]

    # -- which parameters --------------------------------------------------------------------------

    def set_params(
        self,
        groups: list[list[nn.Parameter]],  # of each group, in the order of their states in a file
    ) -> bool:
        """Let the groups have other parameters; states stay with the parameters that stay.

        Returns False, with nothing changed, where torch's param groups do not follow from these:
        with several optimizers, and where groups were added after spared parameters had been set
        apart.
        """
        if len(self.optimizers) > 1 or len(groups) != len(self._groups):
            return False
        opt = self[0]
        self.join_groups(opt)
        is_whole = all(len(places) == 1 for places in self._places)
        if is_whole:
            for (_, i), params in zip((places[0] for places in self._places), groups, strict=True):
                opt.param_groups[i]['params'] = list(params)
            self._forget_others()
        if any(g.get('weight_decay') for g in self.param_groups):
            self.split_groups()
        return is_whole

    def begin_states(self, params: Iterable[nn.Parameter]) -> None:
        "Make the states of new parameters for Adagrad, which makes its states when it is made."
        new = set(params)
        for o in self.optimizers.values():
            if not isinstance(o, torch.optim.Adagrad):
                continue
            for group in o.param_groups:
                options = {name: group[name] for name in ('lr', 'initial_accumulator_value')}
                for p in (p for p in group['params'] if p in new and p not in o.state):
                    o.state[p] = torch.optim.Adagrad([p], **options).state[p]

    def drop_params(self, gone: set[nn.Parameter]) -> None:
        "Drop parameters, with their states, from every group of every optimizer."
        kept = [[p for p in params if p not in gone] for params in self.param_lists]
        if self.set_params(kept):
            return
        for group in self.param_groups:
            group['params'] = [p for p in group['params'] if p not in gone]
        self.splits = [
            (o, i, j, [p for p in params if p not in gone]) for o, i, j, params in self.splits
        ]
        self._forget_others()

    def _forget_others(self) -> None:
        "Drop the states of parameters that are in no group."
        own = set(self.parameters())
        for o in self.optimizers.values():
            for p in [p for p in o.state if p not in own]:
                del o.state[p]
        for name in ('exempt', 'always_trained', 'frozen'):
            setattr(self, name, getattr(self, name) & own)
        self._fused = [FusedGuard(o) for o in fused_of(self.optimizers.values())]

    # -- modes -------------------------------------------------------------------------------------

    def train(self) -> None:
        "Call `train` of the optimizers that have it: parameters get the values that are trained."
        self.is_training = True
        for o in self._switching:
            o.train()  # type: ignore[attr-defined]  # it was looked up

    def eval(self) -> None:
        "Call `eval` of the optimizers that have it: parameters get the values to predict with."
        self.is_training = False
        for o in self._switching:
            o.eval()  # type: ignore[attr-defined]

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters have the values to predict with.

        Afterwards they have, to the bit, the values that they had before. `eval()` and `train()`
        alone would leave rounding errors, so that an evaluation would change what is trained after
        it. The context needs memory for a copy of the parameters.

        >>> opt = OptimWrapper(opt=torch.optim.SGD([nn.Parameter(torch.zeros(2))]))
        >>> with opt.evaluating(): pass   # of torch's optimizers, nothing changes
        """
        return self._switched() if self.is_training and self._switching else NO_CONTEXT

    @contextmanager
    def _switched(self) -> Iterator[None]:
        params = [p for o in self._switching for g in o.param_groups for p in g['params']]
        trained = [p.detach().clone() for p in params]
        self.eval()
        try:
            yield
        finally:
            self.train()
            with torch.no_grad():
                for p, value in zip(params, trained, strict=True):
                    p.copy_(value)

    # -- freezing ----------------------------------------------------------------------------------

    @property
    def param_lists(self) -> list[list[nn.Parameter]]:
        "The parameters of each group."
        return [[p for g in groups for p in g['params']] for groups in self._groups]

    def freeze_to(
        self,
        n: int,  # groups before this one are frozen; from -1 on counted from the end
    ) -> None:
        """Train only the groups from `n` on; those of `always_trained` are trained wherever they are.

        It sets `requires_grad`. Momenta and averages of what is frozen are kept for when it is trained again.
        """
        if not isinstance(n, int) or isinstance(n, bool):
            raise OptimizerError(f'freeze_to({n!r}): give the number of a group, a whole number.')
        lists = self.param_lists
        self.frozen_idx = max(0, len(lists) + n) if n < 0 else n
        if self.frozen_idx >= len(lists):
            warn_user(
                f'freeze_to({n}) freezes every one of the {len(lists)} param group{"s" * (len(lists) > 1)}: '
                'nothing but norm layers is trained, and they only if `train_bn` is set. `unfreeze()` undoes it.'
            )
        frozen = {p for params in lists[: self.frozen_idx] for p in params} - self.always_trained
        for p in (p for params in lists for p in params):
            p.requires_grad_(p not in frozen)
        for p in frozen:
            p.grad = None
        self.frozen = frozen

    def freeze(self) -> None:
        "Train only the last group."
        if len(self._groups) == 1:
            raise OptimizerError(f'There is one param group, so no other can be frozen.{SPLIT}')
        self.freeze_to(-1)

    def unfreeze(self) -> None:
        "Train every group."
        self.freeze_to(0)

    # -- state -------------------------------------------------------------------------------------

    def clear_state(self, closures: bool = False) -> None:
        "Forget momenta and averages, of all optimizers or of those that need a closure."
        for o in self._evaluating if closures else self.optimizers.values():
            o.state.clear()

    def state_dict(self) -> dict[str, Any]:
        "Return the optimizer's own state dict, or those of several by name."
        if len(self.optimizers) == 1:
            return self[0].state_dict()
        return {name: o.state_dict() for name, o in self.optimizers.items()}

    def differences(
        self,
        state: Any,  # from `state_dict`
        model: nn.Module | None = None,  # whose names of parameters are used
    ) -> list[str]:
        """Return a line for everything in a state that these optimizers cannot take; none, and it can be loaded.

        Whether the parameters that weight decay spares sit in groups of their own makes no difference.
        """
        return differences(self, state, model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, on the devices of the parameters; its tensors are copied.

        How a step is computed (`foreach`, `fused`, `capturable`) stays as it is here. Raises `OptimizerError`, with
        nothing changed, for a state with `differences`.
        """
        if lines := self.differences(state_dict):
            raise OptimizerError(
                '\n  '.join(['The saved state does not fit. Nothing was loaded.', *lines])
            )
        try:
            load_state(self, state_dict)
        finally:
            if any(g.get('weight_decay') for g in self.param_groups):
                self.split_groups()
        if self.is_training:
            self.train()
        else:
            self.eval()
        self._fused = [FusedGuard(o) for o in fused_of(self.optimizers.values())]

    def class_names(self) -> str:
        return self.called or ' and '.join(type(o).__name__ for o in self.optimizers.values())

    def __repr__(self) -> str:
        rates = list(dict.fromkeys(f'{float(h["lr"]):.3g}' for h in self.hypers if 'lr' in h))
        n, lr = len(self._groups), rates[0] if len(rates) == 1 else f'[{", ".join(rates)}]'
        return f'{type(self).__name__}({self.class_names()}, {n} group{"s" * (n > 1)}, lr={lr})'


def _unshare_rates(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    "Give each param group a tensor of its own where one rate in a tensor was given for several."
    seen: set[int] = set()
    for g in (g for o in optimizers for g in o.param_groups):
        for name in (n for n in OPTIONS if isinstance(g.get(n), torch.Tensor)):
            if id(g[name]) in seen:
                g[name] = g[name].clone()
            seen.add(id(g[name]))


class Closure:
    "Evaluate a batch again that was evaluated before: what a Learner gives to `OptimWrapper.step`."

    def __init__(
        self,
        evaluate: Callable[[], Any],  # computes the loss and its gradients again, and returns it
        first: Callable[[], Any],  # returns the loss of the evaluation whose gradients are there
    ) -> None:
        self.evaluate, self.first, self.is_repeated = evaluate, first, False

    def __call__(self) -> Any:
        self.is_repeated = True
        return self.evaluate()


class Evaluation:
    """The closure of one optimizer: it evaluates the loss again only when something has changed.

    The loop has evaluated the batch before the step. As long as the optimizer's parameters and
    their gradients are as they were when its step began, that loss is returned.
    """

    def __init__(
        self,
        opt: torch.optim.Optimizer,
        closure: Closure,
        evaluating: set[torch.optim.Optimizer],  # gets the optimizer when it evaluates again
    ) -> None:
        self.opt, self.closure, self.evaluating = opt, closure, evaluating
        self._before = self._versions()
        # a change by way of `p.data` leaves the version as it is
        known = opt in evaluating and not is_torchs(opt)
        self._values = [p.detach().clone() for p in self._params()] if known else []

    def __call__(self) -> Any:
        if self._is_unchanged():
            return self.closure.first()
        self._before = []
        self.evaluating.add(self.opt)
        return self.closure()

    def _params(self) -> list[nn.Parameter]:
        return [p for g in self.opt.param_groups for p in g['params']]

    def _versions(self) -> list[Any]:
        "Return what changes when a parameter or its gradient is written to or replaced."
        grads = [(p._version, p.grad) for p in self._params()]
        return [(n, id(grad), getattr(grad, '_version', None)) for n, grad in grads]

    def _is_unchanged(self) -> bool:
        if self.closure.is_repeated and self.opt in self.evaluating:
            return False  # another optimizer has evaluated elsewhere
        if not self._before or self._versions() != self._before:
            return False
        return not self._values or all(map(torch.equal, self._params(), self._values))


def closure_of(opt: torch.optim.Optimizer) -> bool | None:
    "Return True if `step` needs a closure, False if not, None if it may evaluate an optional one."
    closure = inspect.signature(opt.step).parameters.get('closure')
    if closure is None:
        return False
    if closure.default is inspect.Parameter.empty:
        return True
    own = getattr(opt, 'needs_closure', None)
    if isinstance(opt, OptimWrapper):
        return own or (None if opt.takes_closure else False)
    if own is not None:
        return bool(own)
    return False if is_torchs(opt) else None


def is_torchs(opt: torch.optim.Optimizer) -> bool:
    "Return True if `step` is torch's or this package's, of which only LBFGS evaluates the loss."
    return type(opt).step.__module__.startswith(('torch.optim.', 'learnkit.'))


def switches(opt: torch.optim.Optimizer) -> bool:
    "Return True if an optimizer has weights for training and others for evaluation."
    return all(callable(getattr(opt, name, None)) for name in ('train', 'eval'))


def _named_optimizers(opt: Any) -> dict[str, torch.optim.Optimizer]:
    "Return the optimizers by name; raise `OptimizerError` for anything that is none."
    named = (
        dict(opt)
        if isinstance(opt, Mapping)
        else dict(zip(map(str, range(len(opt))), opt, strict=True))
        if isinstance(opt, (list, tuple))
        else {'': opt}
    )
    for name, o in named.items():
        if not isinstance(o, torch.optim.Optimizer):
            if name and callable(o):
                raise OptimizerError(
                    f'opt_func[{name}] is {getattr(maker_of(o), "__name__", o)}, no ready optimizer. '
                    'A list holds ready ones, each of parameters of its own, '
                    '`torch.optim.SGD(model.body.parameters(), lr=0.1)` for one; what makes an '
                    'optimizer goes without a list, and metrics go as `metrics=`.'
                )
            raise OptimizerError(
                f'opt_func{f"[{name}]" if name else ""} gave {o!r}, no torch.optim.Optimizer. '
                'It is called with the parameters and `lr=`, and returns an optimizer or several.'
            )
    if not named:
        raise OptimizerError(
            f'opt_func gave {opt!r}, which has no optimizer: return one, or several by name.'
        )
    return named
