"""Keep the optimizer's parameters equal to the model's: add new ones, drop removed ones, warn of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from learnkit.core.validation import warn_user
from learnkit.engine.freezing import (
    list_norms_and_biases,
    name_all_params,
    name_loss_params,
    name_params,
    split_params,
)
from learnkit.optim.hyperparams import members, norm_bias_params

if TYPE_CHECKING:
    from learnkit.optim.wrapper import OptimWrapper

__all__ = ['cover_params', 'note_params']

MAX_NAMES = 5  # in a warning


class HasOptimizer(Protocol):
    "Part of a Learner that decides which parameters the optimizer has."

    model: nn.Module
    loss_func: Any
    splitter: Callable[[nn.Module], Any]
    train_bn: bool
    opt: Any

    def create_opt(self) -> None: ...


def note_params(learn: HasOptimizer, is_ready: bool) -> None:
    """Store which parameters exist when an optimizer is created, and which of them it does not have.

    With `is_ready` (an optimizer that the user made), parameters that are new later are not added.
    """
    opt = learn.opt
    named = name_all_params(learn.model, learn.loss_func)
    opt.seen = None if is_ready else set(named.values())
    opt.had = set(opt.parameters())
    opt.left_out = find_left_out(opt, named)
    opt.warned = set()


def cover_params(learn: HasOptimizer) -> None:
    """Update the optimizer to the parameters that the model and the loss function have now.

    New parameters, and parameters that require gradients only now, join the group that the splitter
    assigns, with an empty state; parameters of the loss function join the last group. Removed
    parameters are dropped with their states. An optimizer that the user made stays as it is. One
    warning names the parameters that require gradients and are in no optimizer.
    """
    opt = learn.opt
    named = name_all_params(learn.model, learn.loss_func)
    if opt.seen is not None:
        own = set(opt.parameters())
        current = set(named.values())
        removed = (own & opt.seen) - current
        opt.left_out |= (opt.had - own) & current  # the user removed them from the optimizer
        new = {p for p in current - own - opt.left_out if p.requires_grad}
        if opt.needs_closure and (removed or new):
            # the state may hold all parameters as one vector, as LBFGS's does
            return learn.create_opt()
        if removed:
            opt.drop_params(removed)
        if new:
            add_params(learn, new, named)
        opt.seen, opt.had = current, set(opt.parameters())
    warn_of_left_out(opt, named)


def add_params(
    learn: HasOptimizer,
    new: set[nn.Parameter],
    named: Mapping[str, nn.Parameter],
) -> None:
    "Add new parameters to the splitter's groups, if the optimizer has the same groups."
    opt = learn.opt
    groups = split_all_params(learn)
    group_of = {p: i for i, params in enumerate(groups) for p in params}
    own = {p: i for i, params in enumerate(opt.param_lists) for p in params}
    if len(groups) != len(opt.param_lists) or any(group_of.get(p) != i for p, i in own.items()):
        return  # `opt_func` made other groups

    if opt.spares_norms:
        opt.spare_from_decay(list_norms_and_biases(learn.model, learn.loss_func))
    if learn.train_bn:
        opt.always_trained |= set(norm_bias_params(learn.model, with_bias=False))
    wanted = [[p for p in params if p in own or p in new] for params in groups]
    if not opt.set_params(wanted):
        return
    opt.begin_states(new)
    name_params(opt, named)
    candidates = new - opt.seen - opt.always_trained
    frozen = {p for p in candidates if p in group_of and group_of[p] < opt.frozen_idx}
    freeze_new(opt, frozen, named)


def split_all_params(learn: HasOptimizer) -> list[list[Any]]:
    """Return the splitter's groups, computed as if all of the optimizer's parameters required gradients.

    The last group also has the parameters of the loss function.
    """
    frozen = [p for p in learn.opt.parameters() if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        groups = split_params(learn.model, learn.splitter)
    finally:
        for p in frozen:
            p.requires_grad_(False)
    are_groups = isinstance(groups[0], dict)
    lists = [list(members([g])) for g in groups] if are_groups else [list(members(groups))]
    known = {p for params in lists for p in params}
    loss_params = name_loss_params(learn.model, learn.loss_func).values()
    lists[-1] += [p for p in loss_params if p not in known]
    return lists


def freeze_new(
    opt: OptimWrapper,
    params: set[nn.Parameter],
    named: Mapping[str, nn.Parameter],
) -> None:
    "Freeze new parameters of frozen groups, and warn with their names."
    if not params:
        return
    for p in params:
        p.requires_grad_(False)
    opt.frozen |= params
    warn_user(
        f'New parameters are in a frozen group, and are frozen too: {join_names(named, params)}. '
        '`learn.unfreeze()`, or `freeze_to` with a lower number, trains them.'
    )


def warn_of_left_out(opt: OptimWrapper, named: Mapping[str, nn.Parameter]) -> None:
    "Warn of the parameters that require gradients and are in no optimizer, once for each parameter."
    left_out = find_left_out(opt, named)
    new = left_out - opt.warned
    if not new:
        return
    names = join_names(named, new)
    opt.left_out |= left_out
    opt.warned |= left_out
    warn_user(
        'These parameters require gradients and are in no optimizer, so nothing trains them: '
        f'{names}. Let the `splitter`, or whoever made the optimizer, include them, or call '
        '`requires_grad_(False)` on them.'
    )


def find_left_out(opt: OptimWrapper, named: Mapping[str, nn.Parameter]) -> set[nn.Parameter]:
    "Return the parameters that require gradients and are in no optimizer."
    own = set(opt.parameters())
    return {p for p in named.values() if p.requires_grad and p not in own}


def join_names(named: Mapping[str, nn.Parameter], params: set[nn.Parameter]) -> str:
    "Return the names of parameters in the model's order, at most `MAX_NAMES` of them."
    names = [name for name, p in named.items() if p in params]
    rest = f' and {len(names) - MAX_NAMES} more' if len(names) > MAX_NAMES else ''
    return ', '.join(names[:MAX_NAMES]) + rest
