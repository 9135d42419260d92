# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a Learner: create it, keep its parameters equal to the model's, freeze its groups.

The Learner's `splitter` defines the groups. The parameters of a frozen group do not require
gradients, except in norm layers if `train_bn` is True. Freezing does not change the training or
evaluation mode of layers. The optimizer, created if necessary, holds all groups, and keeps the
momenta and averages of frozen parameters.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from learnkit.core.batch import short_repr
from learnkit.core.errors import ModelError, OptimizerError
from learnkit.core.kinds import OPTIMIZER, explain_kind, find_kind
from learnkit.core.model import bare_model, unwrap_partial
from learnkit.core.roles import norm_bias_params
from learnkit.core.validation import warn_user
from learnkit.optim.hyperparams import (
    SPLIT,
    as_groups,
    check_maker,
    iterate_params,
    list_values,
)
from learnkit.optim.wrapper import OptimWrapper

if TYPE_CHECKING:
    from learnkit.learner import Learner

MAX_NAMES = 5  # number of parameters that a warning names


def prepare_opt(
    learn: Learner,
    lr: Any,  # learning rate of the fit; None: the Learner's
    wd: float | None,  # weight decay of the fit; None: the Learner's
    reset_opt: bool,  # create a new optimizer
) -> None:
    """Create or update the optimizer for a fit, and set its rates and weight decay.

    Raises `ModelError` if nothing is trainable.
    """
    is_new = reset_opt or learn.opt is None or has_foreign_opt(learn)
    if is_new:
        learn.create_opt()
    else:
        wrap_opt(learn)
        cover_params(learn)
    if not any(p.requires_grad for p in learn.opt.parameters()):
        raise no_params_error(learn.model)
    wd = learn.wd if wd is None else wd
    # a new optimizer has the Learner's rate if that is a number; a list or slice is set below
    if lr is None and not (is_new and isinstance(learn.lr, (int, float))):
        lr = find_initial_lrs(learn)
    hypers = {'lr': lr, 'wd': wd}
    learn.opt.set_hypers(**{name: value for name, value in hypers.items() if value is not None})
    learn.opt.last_lrs = learn.opt.lrs
    learn.opt.zero_grad()


def has_foreign_opt(learn: Learner) -> bool:
    "Return True if no parameter of `model` is in the optimizer, as after `model` was replaced."
    optimized = {p for group in learn.opt.param_groups for p in group['params']}
    return optimized.isdisjoint(learn.model.parameters())


def wrap_opt(learn: Learner) -> None:
    "Wrap an optimizer of torch that was assigned to `learn.opt`."
    if not isinstance(learn.opt, OptimWrapper):
        learn.opt = OptimWrapper(opt=learn.opt)


def find_initial_lrs(learn: Learner) -> Any:
    """Return the initial rates of a fit that was called without `lr`.

    These are the Learner's `lr` or the optimizer's own rates, followed by the rates of groups
    added later. Rates that the user has changed since the last fit are kept; the final rates of
    a schedule are not.
    """
    requested_lr, own_lrs = learn.opt.own_lrs
    current_lrs = learn.opt.lrs
    if not current_lrs:
        return None
    if not own_lrs or requested_lr is not learn.lr:
        return learn.lr
    n = len(own_lrs)
    if not callable(learn.opt_func) and current_lrs[:n] != learn.opt.last_lrs[:n]:
        own_lrs = current_lrs[:n]
    learn.opt.own_lrs = requested_lr, own_lrs
    return [*own_lrs, *current_lrs[n:]]


@contextmanager
def training_weights(learn: Learner) -> Iterator[None]:
    "Switch the optimizer to training weights for the outermost fit, then to evaluation weights."
    if learn.run.depth:
        yield
        return
    learn.opt.train()
    try:
        yield
    finally:
        learn.opt.eval()
        learn.opt.last_lrs = learn.opt.lrs


def create_opt(learn: Learner) -> None:
    """Create the optimizer. Rates that `opt_func` defines override `lr` until `lr` is set again.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner()
    >>> learn.create_opt()
    >>> learn.opt, len(learn.step_parameters)
    (OptimWrapper(SGD, 1 group, lr=0.001), 2)
    """
    if isinstance(learn.opt_func, partial) and 'lr' in learn.opt_func.keywords:
        learn.lr = learn.opt_func.keywords['lr']
    last = learn.opt
    opt = make_optimizer(learn)
    is_instance = not callable(learn.opt_func)
    if last is not None and opt is not last:
        learn.parts.counters.steps += getattr(last, 'n_steps', 0)
    if last is not None and is_instance:
        opt.clear_state()  # `opt_func` is an instance and returns the same optimizer
    learn.opt = opt
    lrs = learn.opt.last_lrs = opt.lrs
    ignores_lr = isinstance(learn.lr, (int, float)) and any(lr != learn.lr for lr in lrs)
    if ignores_lr and is_instance:
        learn.lr = lrs[0] if len(set(lrs)) == 1 else lrs
    has_own_lrs = ignores_lr or (is_instance and lrs)
    learn.opt.own_lrs = (learn.lr, lrs) if has_own_lrs else (None, None)


def make_optimizer(learn: Learner) -> OptimWrapper:
    """Create the optimizer of a Learner. If `opt_func` has a parameter `model`, the model is passed to it.

    Optimizer instances and torch's classes keep their weight decay. Optimizers with fastai's names exclude norm layers
    and biases from weight decay, as do all with `wd_bn_bias=False`. Parameters that are frozen in the previous
    optimizer remain frozen. Parameters of the loss function are trained with the last group.

    Raises `ModelError` if no parameter of the model requires a gradient, and `OptimizerError` if `opt_func` does not
    return an optimizer, or one without the model's parameters.
    """
    model = learn.model
    opt_func = learn.opt_func
    last = learn.opt
    is_ready = isinstance(opt_func, (torch.optim.Optimizer, list, dict))
    frozen: set[nn.Parameter] = last.frozen if isinstance(last, OptimWrapper) else set()
    with requiring_grad(frozen):
        if not any(p.requires_grad for p in model.parameters()):
            raise no_params_error(model)
        opt = opt_func if is_ready else call_opt_func(learn)
    if not isinstance(opt, OptimWrapper):
        opt = OptimWrapper(opt=opt)
    if not is_ready:
        add_loss_params(learn, opt)
    if isinstance(learn.lr, Mapping):
        opt.set_hyper('lr', learn.lr)
    name = getattr(unwrap_partial(opt_func), '__name__', '')
    if name.isidentifier():
        opt.called = name

    set_exemptions(learn, opt, is_ready)
    own = set(opt.parameters())
    if own.isdisjoint(model.parameters()):
        raise OptimizerError(
            f'No parameter of this {type(model).__name__} is in the optimizer, which would learn '
            'nothing. Make it of `learn.model.parameters()`, or pass its class.'
        )
    if last is not opt and frozen & own:
        opt.frozen = frozen & own
        opt.frozen_idx = last.frozen_idx
    current = list_all_params(learn)
    opt.seen = None if is_ready else current
    note_left_out(learn, opt, list_left_out(opt, current))
    return opt


def set_exemptions(
    learn: Learner,
    opt: OptimWrapper,  # new optimizer of the Learner
    is_ready: bool,  # True if the user has made the optimizer
) -> None:
    "Exempt norm layers and biases from weight decay, and norm layers from freezing, as the Learner's options say."
    opt.spares_norms = opt.spares_norms and not is_ready
    if learn.wd_bn_bias is not None:
        opt.spares_norms = not learn.wd_bn_bias
    if opt.spares_norms:
        opt.spare_from_decay(p for m in list_modules(learn) for p in norm_bias_params(m))
    norms = norm_bias_params(learn.model, with_bias=False) if learn.train_bn else []
    opt.always_trained = set(norms)


def find_default_lr(opt_func: Any, fallback: float) -> float:
    "Return the default learning rate of an optimizer class; `fallback` for functions and ready optimizers."
    maker = unwrap_partial(opt_func)
    if not isinstance(maker, type) or not issubclass(maker, torch.optim.Optimizer):
        return fallback
    default = inspect.signature(maker).parameters.get('lr')
    return default.default if default and isinstance(default.default, (int, float)) else fallback


def call_opt_func(learn: Learner) -> Any:
    "Call `opt_func` with the splitter's groups."
    opt_func = learn.opt_func
    lr = learn.lr
    if not isinstance(opt_func, type) and find_kind(opt_func) not in (None, OPTIMIZER):
        raise OptimizerError(explain_kind(opt_func, 'an optimizer'))
    if not callable(opt_func):
        raise OptimizerError(
            f'opt_func={short_repr(opt_func)} cannot be called: pass a torch.optim class, '
            'such as `torch.optim.Adam`, or a function.'
        )
    groups = split_params(learn)
    if isinstance(lr, Mapping):
        lr = next(iter(lr.values()), None)  # `make_optimizer` sets the rate of each optimizer
    rates = list_values('lr', lr, len(groups))
    are_numbers = all(isinstance(rate, (int, float)) for rate in rates)
    if are_numbers and len(set(rates)) > 1 and len(rates) == len(groups):
        # some optimizers keep the rates that they are made with
        groups = [{'lr': rate, **group} for rate, group in zip(rates, groups, strict=True)]
    rate = rates[-1]
    if isinstance(rate, torch.Tensor):
        rate = rate.clone()
    has_only_params = len(groups) == 1 and len(groups[0]) == 1
    params = groups[0]['params'] if has_only_params else groups
    check_maker(opt_func)
    options = {'model': learn.model} if takes_model(opt_func) else {}
    return opt_func(params, lr=rate, **options)


@lru_cache(maxsize=8)
def takes_model(opt_func: Callable[..., Any]) -> bool:
    "Return True if a function that makes an optimizer has a parameter `model`."
    try:
        return 'model' in inspect.signature(opt_func).parameters
    except (TypeError, ValueError):
        return False


def split_params(learn: Learner) -> list[dict[str, Any]]:
    """Return the splitter's groups.

    Raises `OptimizerError` for a splitter that cannot be called, or that returns a parameter twice.
    """
    if not callable(learn.splitter):
        raise OptimizerError(
            f'splitter={learn.splitter!r} cannot be called: pass a function.{SPLIT}'
        )
    groups = as_groups(learn.splitter(learn.model))
    counts = Counter(iterate_params(groups))
    if len(counts) < counts.total():  # torch would raise without the name, or step twice
        [(p, _)] = counts.most_common(1)
        names: dict[Any, str] = {q: name for name, q in learn.model.named_parameters()}
        name = names.get(p) or f'of shape {tuple(p.shape)}'
        raise OptimizerError(
            f'The splitter returned parameter {name} twice. Weights that layers share are one '
            'parameter: list it in one group only.'
        )
    return groups


def list_modules(learn: Learner) -> list[nn.Module]:
    "Return the modules that are trained: the model, and a loss function that has parameters."
    loss_func = learn.loss_func
    is_trained = isinstance(loss_func, nn.Module) and any(True for _ in loss_func.parameters())
    return [learn.model, loss_func] if is_trained else [learn.model]


def list_all_params(learn: Learner) -> set[nn.Parameter]:
    "Return the parameters of the model and of the loss function."
    return {p for m in list_modules(learn) for p in m.parameters()}


def add_loss_params(learn: Learner, opt: OptimWrapper) -> None:
    "Add the parameters of a loss function to the last group of a new optimizer."
    loss_params = [p for m in list_modules(learn)[1:] for p in m.parameters() if p.requires_grad]
    if not loss_params:
        return
    own = {*opt.parameters(), *learn.model.parameters()}
    new = [p for p in loss_params if p not in own]
    if new and len(opt.optimizers) == 1:
        opt.last_group['params'].extend(new)  # extend the list, because LBFGS holds a reference


def no_params_error(model: nn.Module) -> ModelError:
    "Return the error for a model without trainable parameters."
    return ModelError(
        f'{type(model).__name__} has no trainable parameters, or all are frozen: nothing can be learned. '
        'Call `learn.unfreeze()`, or `requires_grad_()` for parameters that you froze yourself; '
        '`validate()` and `get_preds()` work without.'
    )


@contextmanager
def requiring_grad(params: Iterable[nn.Parameter]) -> Iterator[None]:
    "Return a context in which all of these parameters require gradients, for splitters that select by it."
    changed = [p for p in params if not p.requires_grad]
    for p in changed:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in changed:
            p.requires_grad_(False)


# -- parameters that are added, removed or left out ------------------------------------------------


def cover_params(learn: Learner) -> None:
    """Update the optimizer to the parameters that the model and the loss function have now.

    New parameters, and parameters that require gradients only now, join the group that the splitter
    assigns, with an empty state; parameters of the loss function join the last group. Removed
    parameters are dropped with their states. An optimizer that the user made stays as it is. One
    warning names the parameters that require gradients and are in no optimizer.
    """
    opt = learn.opt
    if not isinstance(opt, OptimWrapper):
        return  # assigned by hand during a fit
    current = list_all_params(learn)
    left_out = list_left_out(opt, current)
    if opt.seen is not None and (opt.seen != current or left_out != opt.left_out):
        update_groups(learn, current, left_out - opt.left_out)
        left_out = list_left_out(learn.opt, current)
    note_left_out(learn, learn.opt, left_out)


def update_groups(learn: Learner, current: set[nn.Parameter], new: set[nn.Parameter]) -> None:
    "Drop parameters that are no longer in `current` from the optimizer, and add new ones."
    opt = learn.opt
    removed = (opt.seen - current).intersection(opt.parameters())
    if (removed or new) and opt.needs_closure:
        # the state may hold all parameters as one vector, as LBFGS's does
        return learn.create_opt()
    if removed:
        opt.drop_params(removed)
    if new:
        add_params(learn, new)
    opt.seen = current


def add_params(learn: Learner, new: set[nn.Parameter]) -> None:
    "Add new parameters to the splitter's groups, if the optimizer is one with the same groups."
    opt = learn.opt
    wanted = new.union(opt.parameters())
    with requiring_grad(opt.parameters()):
        groups = split_params(learn)
    lists = [[p for p in iterate_params([group]) if p in wanted] for group in groups]
    known = {p for params in lists for p in params}
    loss_params = [p for m in list_modules(learn)[1:] for p in m.parameters()]
    lists[-1] += [p for p in loss_params if p in wanted and p not in known]
    if len(opt.optimizers) > 1 or len(lists) != len(opt.param_lists):
        return
    if all(set(own) <= set(ps) for own, ps in zip(opt.param_lists, lists, strict=True)):
        set_exemptions(learn, opt, is_ready=False)
        opt.set_params(lists)


def list_left_out(opt: OptimWrapper, current: set[nn.Parameter]) -> set[nn.Parameter]:
    "Return the parameters that require gradients and are in no optimizer."
    return {p for p in current.difference(opt.parameters()) if p.requires_grad}


def note_left_out(learn: Learner, opt: OptimWrapper, left_out: set[nn.Parameter]) -> None:
    "Warn of parameters that nothing trains, when they are new. At most `MAX_NAMES` are named."
    new = left_out - opt.left_out
    opt.left_out = left_out
    if not new:
        return
    warn_user(
        'These parameters require gradients and are in no optimizer, so nothing trains them: '
        f'{join_names(learn, new)}. Let the `splitter`, or whoever made the '
        'optimizer, include them, or call `requires_grad_(False)` on them.'
    )


def warn_of_late_params(learn: Learner) -> None:
    "Warn of parameters that were unfrozen or replaced within an epoch, and were not trained in the rest of it."
    opt = learn.opt
    if not isinstance(opt, OptimWrapper) or opt.seen is None:
        return
    late = list_left_out(opt, list_all_params(learn)) - opt.left_out
    if late:
        warn_user(
            'These parameters were unfrozen or replaced within the epoch, and are trained from the next epoch on: '
            f'{join_names(learn, late)}. To train them at once, change them in `before_epoch`.'
        )


def join_names(learn: Learner, params: set[nn.Parameter]) -> str:
    "Return the names of parameters in the model's order, at most `MAX_NAMES` of them."
    named = [*bare_model(learn.model).named_parameters()]
    for loss_func in list_modules(learn)[1:]:
        named += [(f'loss_func.{name}', p) for name, p in loss_func.named_parameters()]
    names = [name for name, p in named if p in params]
    rest = f' and {len(names) - MAX_NAMES} more' if len(names) > MAX_NAMES else ''
    return ', '.join(names[:MAX_NAMES]) + rest


# -- freezing --------------------------------------------------------------------------------------


def freeze_to(
    learn: Learner,
    n: int,  # index of the first trained group; negative: counted from the end
) -> None:
    """Freeze the parameter groups before group `n`, and train the others.

    The Learner's `splitter` defines the groups. The parameters of a frozen group do not require
    gradients, except in norm layers if `train_bn` is True.

    >>> from learnkit import params
    >>> from learnkit.testing import synth_learner
    >>> model = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))
    >>> learn = synth_learner(model=model, splitter=lambda m: [params(m[0]), params(m[1])])
    >>> learn.freeze_to(1)
    >>> [p.requires_grad for p in model.parameters()]
    [False, False, True, True]
    """
    if learn.opt is None or has_foreign_opt(learn):
        learn.create_opt()
    wrap_opt(learn)
    norms = norm_bias_params(learn.model, with_bias=False) if learn.train_bn else ()
    learn.opt.always_trained = set(norms)
    learn.opt.freeze_to(n)


def freeze(learn: Learner) -> None:
    """Freeze all parameter groups except the last one.

    With a single group nothing is frozen, as in fastai, and a warning is issued.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(splitter=lambda m: [[m.a], [m.b]])
    >>> learn.freeze()
    >>> learn.model.a.requires_grad, learn.model.b.requires_grad
    (False, True)
    """
    learn.freeze_to(-1)
    if len(learn.opt.param_lists) == 1:
        warn_user(
            'There is one param group, so `freeze()` freezes nothing. Pass the Learner a '
            '`splitter` that returns several: `lambda m: [params(m.body), params(m.head)]`.'
        )


def unfreeze(learn: Learner) -> None:
    """Unfreeze all parameter groups.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(splitter=lambda m: [[m.a], [m.b]])
    >>> learn.freeze(); learn.unfreeze()
    >>> all(p.requires_grad for p in learn.model.parameters())
    True
    """
    learn.freeze_to(0)
