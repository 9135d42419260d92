"""Which parameters an optimizer has: new ones are taken in, removed ones dropped, others named."""

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

SHOWN = 5  # names in a warning


class HasOptimizer(Protocol):
    "The part of a Learner that decides what its optimizer has."

    model: nn.Module
    loss_func: Any
    splitter: Callable[[nn.Module], Any]
    train_bn: bool
    opt: Any

    def create_opt(self) -> None: ...


def note_params(learn: HasOptimizer, is_ready: bool) -> None:
    "Note what a new optimizer could have had, and what whoever made it has left out."
    opt = learn.opt
    named = name_all_params(learn.model, learn.loss_func)
    opt.seen = None if is_ready else set(named.values())
    opt.had = set(opt.parameters())
    opt.left_out, opt.warned = left_out_by(opt, named), set()


def cover_params(learn: HasOptimizer) -> None:
    """Bring the optimizer up to date with the parameters that model and loss function have now.

    New parameters, and those that require gradients only now, join the group in which the splitter
    puts them, with a fresh state; the loss function's join the last one. Parameters that are gone
    are dropped with their states. A ready optimizer stays as it is. One warning names the
    parameters that require gradients and are in no optimizer.
    """
    opt = learn.opt
    named = name_all_params(learn.model, learn.loss_func)
    if opt.seen is not None:
        own, now = set(opt.parameters()), set(named.values())
        gone = (own & opt.seen) - now
        opt.left_out |= (opt.had - own) & now  # somebody has taken them out
        new = {p for p in now - own - opt.left_out if p.requires_grad}
        if opt.needs_closure and (gone or new):  # its state may be of all parameters as one vector
            return learn.create_opt()
        if gone:
            opt.drop_params(gone)
        if new:
            take_in(learn, new, named)
        opt.seen, opt.had = now, set(opt.parameters())
    warn_of_left_out(opt, named)


def take_in(
    learn: HasOptimizer,
    new: set[nn.Parameter],
    named: Mapping[str, nn.Parameter],
) -> None:
    "Put new parameters into the groups of the splitter, where these are the optimizer's."
    opt = learn.opt
    groups = groups_with_all(learn)
    place = {p: i for i, params in enumerate(groups) for p in params}
    own = {p: i for i, params in enumerate(opt.param_lists) for p in params}
    if len(groups) != len(opt.param_lists) or any(place.get(p) != i for p, i in own.items()):
        return  # `opt_func` has groups of its own

    if opt.spares_norms:
        opt.spare_from_decay(list_norms_and_biases(learn.model, learn.loss_func))
    if learn.train_bn:
        opt.always_trained |= set(norm_bias_params(learn.model, with_bias=False))
    wanted = [[p for p in params if p in own or p in new] for params in groups]
    if not opt.set_params(wanted):
        return
    opt.begin_states(new)
    name_params(opt, named)
    fresh = new - opt.seen - opt.always_trained
    freeze_new(opt, {p for p in fresh if p in place and place[p] < opt.frozen_idx}, named)


def groups_with_all(learn: HasOptimizer) -> list[list[Any]]:
    """Return the splitter's groups as if everything in the optimizer required gradients.

    The last one also has the parameters of the loss function.
    """
    off = [p for p in learn.opt.parameters() if not p.requires_grad]
    for p in off:
        p.requires_grad_(True)
    try:
        groups = split_params(learn.model, learn.splitter)
    finally:
        for p in off:
            p.requires_grad_(False)
    are_groups = isinstance(groups[0], dict)
    lists = [list(members([g])) for g in groups] if are_groups else [list(members(groups))]
    known = {p for params in lists for p in params}
    own = name_loss_params(learn.model, learn.loss_func).values()
    lists[-1] += [p for p in own if p not in known]
    return lists


def freeze_new(
    opt: OptimWrapper,
    params: set[nn.Parameter],
    named: Mapping[str, nn.Parameter],
) -> None:
    "Freeze new parameters of frozen groups, and name them in a warning."
    if not params:
        return
    for p in params:
        p.requires_grad_(False)
    opt.frozen |= params
    warn_user(
        f'New parameters are in a frozen group, and are frozen too: {listed(named, params)}. '
        '`learn.unfreeze()`, or `freeze_to` with a lower number, trains them.'
    )


def warn_of_left_out(opt: OptimWrapper, named: Mapping[str, nn.Parameter]) -> None:
    "Name the parameters that require gradients and are in no optimizer, each once."
    left_out = left_out_by(opt, named)
    if not left_out - opt.warned:
        return
    names = listed(named, left_out - opt.warned)
    opt.left_out, opt.warned = opt.left_out | left_out, opt.warned | left_out
    warn_user(
        'These parameters require gradients and are in no optimizer, so nothing trains them: '
        f'{names}. Let the `splitter`, or whoever made the optimizer, include them, or call '
        '`requires_grad_(False)` on them.'
    )


def left_out_by(opt: OptimWrapper, named: Mapping[str, nn.Parameter]) -> set[nn.Parameter]:
    "Return the parameters that require gradients and are in no optimizer."
    own = set(opt.parameters())
    return {p for p in named.values() if p.requires_grad and p not in own}


def listed(named: Mapping[str, nn.Parameter], params: set[nn.Parameter]) -> str:
    "Return the names of parameters in the model's order, of many the first ones."
    names = [name for name, p in named.items() if p in params]
    more = f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''
    return ', '.join(names[:SHOWN]) + more
