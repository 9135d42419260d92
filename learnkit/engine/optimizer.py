"""The optimizer of a Learner: create it, keep its parameters equal to the model's, freeze its groups.

The Learner's `splitter` defines the groups. The parameters of a frozen group do not require
gradients, except in norm layers if `train_bn` is True. Freezing does not change the training or
evaluation mode of layers. The optimizer, created if necessary, holds all groups, and keeps the
momenta and averages of frozen parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from learnkit.core.batch import short_repr
from learnkit.core.errors import ModelError, OptimizerError
from learnkit.core.learner_type import LearnerLike
from learnkit.core.model import bare_model, unwrap_partial
from learnkit.core.validation import warn_user
from learnkit.optim.hyperparams import (
    SPLIT,
    as_groups,
    check_hyper,
    check_maker,
    is_many,
    members,
    norm_bias_params,
    spread,
    trainable_params,
)
from learnkit.optim.wrapper import OptimWrapper

__all__ = [
    'cover_params',
    'warn_of_late_params',
    'freeze',
    'freeze_to',
    'make_optimizer',
    'no_params_error',
    'note_params',
    'unfreeze',
]

MAX_NAMES = 5  # in a warning


def make_optimizer(
    opt_func: Any,  # f(params, lr), an optimizer, or a list or dict of optimizers
    model: nn.Module,  # model to train
    lr: Any,  # rate, list by group, slice over the groups, or dict by optimizer
    splitter: Callable[[nn.Module], Any] = trainable_params,  # f(model) -> parameters or groups
    wd_bn_bias: bool | None = None,  # decay norm layers and biases; None: the optimizer's default
    train_bn: bool = True,  # whether norm layers of frozen groups are trained
    last: Any = None,  # previous optimizer; its frozen parameters remain frozen
    loss_func: Any = None,  # loss function; its parameters are trained with the last group
) -> OptimWrapper:
    """Create the optimizer of a model. If `opt_func` has a parameter `model`, the model is passed to it.

    Optimizer instances and torch's classes keep their weight decay. Optimizers with fastai's names exclude norm layers
    and biases from weight decay, as do all with `wd_bn_bias=False`.

    Raises `ModelError` if no parameter of the model requires a gradient, and `OptimizerError` if `opt_func` does not
    return an optimizer.
    """
    frozen: set[nn.Parameter] = last.frozen if isinstance(last, OptimWrapper) else set()
    with requiring_grad(frozen):
        if not any(p.requires_grad for p in model.parameters()):
            raise no_params_error(model)
        if isinstance(opt_func, (torch.optim.Optimizer, list, dict)):
            opt = opt_func
        elif callable(opt_func):
            opt = _call_opt_func(opt_func, model, lr, splitter)
        else:
            raise OptimizerError(
                f'opt_func={short_repr(opt_func)} cannot be called: '
                f'{_suggest_optimizer(opt_func) or "give a torch.optim class or a function"}.'
            )
    if not isinstance(opt, OptimWrapper):
        opt = OptimWrapper(opt=opt)
    if callable(opt_func):
        add_loss(opt, model, loss_func)
    if isinstance(lr, Mapping):
        opt.set_hyper('lr', lr)
    name = getattr(unwrap_partial(opt_func), '__name__', '')
    if name.isidentifier() and opt is not opt_func:
        opt.called = name
    excludes_norms = opt.spares_norms and callable(opt_func)
    if wd_bn_bias is not None:
        excludes_norms = not wd_bn_bias
    if excludes_norms:
        opt.spare_from_decay(list_norms_and_biases(model, loss_func))
    opt.spares_norms = excludes_norms
    opt.always_trained = set(norm_bias_params(model, with_bias=False)) if train_bn else set()
    still_frozen = frozen & set(opt.parameters())
    if last is not opt and still_frozen:
        opt.frozen, opt.frozen_idx = still_frozen, last.frozen_idx
    return opt


def _suggest_optimizer(name: Any) -> str:
    "Return how to write the torch optimizer of a name, as a part of a message, or an empty string."
    found = {cls.lower(): cls for cls in dir(torch.optim) if cls[0].isupper()}
    cls = found.get(name.lower()) if isinstance(name, str) else None
    return f'write `torch.optim.{cls}`' if cls else ''


def _call_opt_func(
    opt_func: Callable[..., Any], model: nn.Module, lr: Any, splitter: Callable[[nn.Module], Any]
) -> Any:
    "Call `opt_func` with the splitter's groups."
    check_maker(opt_func)
    groups = split_params(model, splitter)
    n = max(1, sum(isinstance(g, dict) for g in groups))
    if isinstance(lr, Mapping):
        lr = next(iter(lr.values()), None)  # `make_optimizer` sets the rate of each optimizer
    if isinstance(lr, slice):
        rates = spread(lr, n)
    else:
        rates = list(lr) if is_many(lr) else [lr]
    for rate in rates:
        check_hyper('lr', rate)
    last_rate = rates[-1].clone() if isinstance(rates[-1], torch.Tensor) else rates[-1]
    options = {'model': model} if _wants_model(opt_func, groups) else {}
    return opt_func(groups, lr=last_rate, **options)


def split_params(model: nn.Module, splitter: Callable[[nn.Module], Any]) -> list[Any]:
    """Return the splitter's groups.

    Raises `OptimizerError` for a splitter that cannot be called, or that returns a parameter twice.
    """
    if not callable(splitter):
        raise OptimizerError(f'splitter={splitter!r} cannot be called: give a function.{SPLIT}')
    groups = as_groups(splitter(model))
    seen: set[int] = set()
    for p in members(groups):
        if id(p) in seen:  # torch would raise without the name, or step twice
            names = [name for name, q in model.named_parameters() if q is p]
            name = names[0] if names else f'of shape {tuple(p.shape)}'
            raise OptimizerError(
                f'The splitter gave parameter {name} twice. Weights that layers share are one '
                'parameter: list it in one group only.'
            )
        seen.add(id(p))
    return groups


def name_all_params(model: nn.Module, loss_func: Any) -> dict[str, nn.Parameter]:
    """Return the parameters of a model, and of a loss function that is a module, by name.

    >>> sorted(name_all_params(nn.Linear(2, 1), nn.PReLU()))
    ['bias', 'loss_func.weight', 'weight']
    """
    return dict(bare_model(model).named_parameters()) | name_loss_params(model, loss_func)


def name_loss_params(model: nn.Module, loss_func: Any) -> dict[str, nn.Parameter]:
    "Return the parameters of a loss function that are not parameters of the model, by name."
    if not isinstance(loss_func, nn.Module):
        return {}
    known = set(model.parameters())
    named = loss_func.named_parameters()
    return {f'loss_func.{name}': p for name, p in named if p not in known}


def add_loss(opt: OptimWrapper, model: nn.Module, loss_func: Any) -> None:
    "Add the parameters of a loss function to the last group of a new optimizer."
    known = set(opt.parameters())
    loss_params = name_loss_params(model, loss_func).values()
    new = [p for p in loss_params if p not in known and p.requires_grad]
    if new and len(opt.optimizers) == 1:
        opt.last_group['params'].extend(new)  # extend the list, because LBFGS holds a reference
        opt.begin_states(new)
        name_params(opt, name_all_params(model, loss_func))


def name_params(opt: OptimWrapper, named: Mapping[str, nn.Parameter]) -> None:
    "Update the names in the parameter groups that keep names."
    names = {p: name for name, p in named.items()}
    for group in opt.param_groups:
        if 'param_names' in group:
            group['param_names'] = [names.get(p, '') for p in group['params']]


def list_norms_and_biases(model: nn.Module, loss_func: Any) -> list[nn.Parameter]:
    "Return the parameters of norm layers and the biases, also of a loss function that is a module."
    modules = [m for m in (model, loss_func) if isinstance(m, nn.Module)]
    return [p for m in modules for p in norm_bias_params(m)]


def _wants_model(opt_func: Callable[..., Any], groups: list[Any]) -> bool:
    "Return True if the function has a parameter `model`; raise `OptimizerError` if its signature does not fit."
    maker = unwrap_partial(opt_func)
    if maker is getattr(torch.optim, 'Muon', None) and not all(
        p.ndim == 2 for p in members(groups)
    ):
        raise OptimizerError(
            'Muon trains matrices alone, and there are other parameters: `opt_func=MuonAdamW` trains '
            'these with AdamW.'
        )
    try:
        signature = inspect.signature(opt_func)
    except (TypeError, ValueError):
        # it has no signature, or a partial has an option that the function does not take
        _check_options(opt_func, maker)
        return False
    wants_model = 'model' in signature.parameters
    try:
        signature.bind(groups, lr=0.0, **({'model': None} if wants_model else {}))
    except TypeError as e:
        name = getattr(maker, '__name__', repr(maker))
        raise OptimizerError(
            f'opt_func={name} cannot be called with the parameters and `lr=` ({e}), so it makes no '
            f'optimizer. {_suggest_opt_func(maker, name)}'
        ) from None
    return wants_model


def _check_options(opt_func: Any, maker: Any) -> None:
    "Raise `OptimizerError` for an option of a partial that its function does not take."
    try:
        parameters = inspect.signature(maker).parameters
    except (TypeError, ValueError):
        return
    for option in getattr(opt_func, 'keywords', {}):
        if option not in parameters:
            names = ', '.join(list(parameters)[1:])
            raise OptimizerError(
                f'{maker.__name__} does not take `{option}`: it takes {names}. '
                "Names are fastai's; torch's go with torch's own classes, "
                'for example `partial(torch.optim.SGD, momentum=0.9)`.'
            )


def _suggest_opt_func(maker: Any, name: str) -> str:
    if isinstance(maker, type) and issubclass(maker, OptimWrapper):
        return f'{name} goes around a ready one: `opt_func=lambda p, lr: {name}(Adam(p, lr))`.'
    return f'Metrics are given by name, `metrics={name}`; a function of your own is `lambda params, lr: ...`.'


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


def note_params(learn: LearnerLike, is_ready: bool) -> None:
    """Store which parameters exist when an optimizer is created, and which of them it does not have.

    With `is_ready` (an optimizer that the user made), parameters that are new later are not added.
    """
    opt = learn.opt
    named = name_all_params(learn.model, learn.loss_func)
    opt.seen = None if is_ready else set(named.values())
    opt.had = set(opt.parameters())
    opt.left_out = {p for p in named.values() if p.requires_grad and p not in opt.had}
    opt.warned = set()


def cover_params(learn: LearnerLike) -> None:
    """Update the optimizer to the parameters that the model and the loss function have now.

    New parameters, and parameters that require gradients only now, join the group that the splitter
    assigns, with an empty state; parameters of the loss function join the last group. Removed
    parameters are dropped with their states. An optimizer that the user made stays as it is. One
    warning names the parameters that require gradients and are in no optimizer.
    """
    opt = learn.opt
    if not isinstance(opt, OptimWrapper):
        return  # assigned by hand during a fit
    named = name_all_params(learn.model, learn.loss_func)
    if opt.seen is not None:
        own = set(opt.parameters())
        current = set(named.values())
        removed = (own & opt.seen) - current
        opt.left_out |= (opt.had - own) & current  # the user removed them from the optimizer
        new = {p for p in current - own - opt.left_out if p.requires_grad}
        if (removed or new) and opt.needs_closure:
            # the state may hold all parameters as one vector, as LBFGS's does
            return learn.create_opt()
        if removed:
            opt.drop_params(removed)
        if new:
            add_params(learn, new, named)
        opt.seen, opt.had = current, set(opt.parameters())
    own = set(opt.parameters())
    left_out = {p for p in named.values() if p.requires_grad and p not in own}
    if left_out - opt.warned:
        warn_of_left_out(opt, named, left_out)


def add_params(
    learn: LearnerLike,
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


def split_all_params(learn: LearnerLike) -> list[list[Any]]:
    """Return the splitter's groups, computed as if all of the optimizer's parameters required gradients.

    The last group also has the parameters of the loss function.
    """
    with requiring_grad(learn.opt.parameters()):
        groups = split_params(learn.model, learn.splitter)
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


def warn_of_left_out(
    opt: OptimWrapper,
    named: Mapping[str, nn.Parameter],
    left_out: set[nn.Parameter],  # parameters that require gradients and are in no optimizer
) -> None:
    "Warn of parameters that nothing trains, once for each parameter."
    names = join_names(named, left_out - opt.warned)
    opt.left_out |= left_out
    opt.warned |= left_out
    warn_user(
        'These parameters require gradients and are in no optimizer, so nothing trains them: '
        f'{names}. Let the `splitter`, or whoever made the optimizer, include them, or call '
        '`requires_grad_(False)` on them.'
    )


def warn_of_late_params(learn: LearnerLike) -> None:
    "Warn of parameters that were unfrozen or replaced within an epoch, and were not trained in the rest of it."
    opt = learn.opt
    if not isinstance(opt, OptimWrapper) or opt.seen is None:
        return
    named, own = name_all_params(learn.model, learn.loss_func), set(opt.parameters())
    late = {p for p in named.values() if p.requires_grad and p not in own}
    late -= opt.left_out | opt.warned
    if late:
        warn_user(
            'These parameters were unfrozen or replaced within the epoch, and are trained from the next epoch on: '
            f'{join_names(named, late)}. To train them at once, change them in `before_epoch` or `before_train`.'
        )


def join_names(named: Mapping[str, nn.Parameter], params: set[nn.Parameter]) -> str:
    "Return the names of parameters in the model's order, at most `MAX_NAMES` of them."
    names = [name for name, p in named.items() if p in params]
    rest = f' and {len(names) - MAX_NAMES} more' if len(names) > MAX_NAMES else ''
    return ', '.join(names[:MAX_NAMES]) + rest


# -- freezing --------------------------------------------------------------------------------------


def freeze_to(learn: LearnerLike, n: int) -> None:
    "Freeze the groups before group `n`, and train the others."
    if learn.opt is None or learn.has_foreign_opt():
        learn.create_opt()
    elif not isinstance(learn.opt, OptimWrapper):  # assigned by hand
        learn.opt = OptimWrapper(opt=learn.opt)
    norms = norm_bias_params(learn.model, with_bias=False) if learn.train_bn else ()
    learn.opt.always_trained = set(norms)
    learn.opt.freeze_to(n)


def freeze(learn: LearnerLike) -> None:
    "Freeze all parameter groups except the last one."
    learn.freeze_to(-1)
    if len(learn.opt.param_lists) == 1:
        warn_user(
            'There is one param group, so `freeze()` freezes nothing. Give the Learner a '
            '`splitter` that returns several: `lambda m: [params(m.body), params(m.head)]`.'
        )


def unfreeze(learn: LearnerLike) -> None:
    "Unfreeze all parameter groups."
    learn.freeze_to(0)
