"""Create the optimizer of a Learner, and freeze or unfreeze its parameter groups.

The Learner's `splitter` defines the groups. The parameters of a frozen group do not require
gradients, except in norm layers if `train_bn` is True. Freezing does not change the training or
evaluation mode of layers. The optimizer, created if necessary, holds all groups, and keeps the
momenta and averages of frozen parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from learnkit.core.errors import ModelError, OptimizerError
from learnkit.core.learner_type import LearnerLike
from learnkit.core.model import bare_model
from learnkit.core.validation import warn_user
from learnkit.optim.hyperparams import (
    SPLIT,
    as_groups,
    check_hyper,
    check_maker,
    is_many,
    maker_of,
    members,
    norm_bias_params,
    spread,
    trainable_params,
)
from learnkit.optim.wrapper import OptimWrapper

__all__ = ['freeze_to', 'freeze', 'unfreeze', 'make_optimizer', 'check_trained']


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
    with unfrozen(last):
        if not any(p.requires_grad for p in model.parameters()):
            raise _no_params_error(model)
        if isinstance(opt_func, (torch.optim.Optimizer, list, dict)):
            opt = opt_func
        elif callable(opt_func):
            opt = _call_opt_func(opt_func, model, lr, splitter)
        else:
            raise OptimizerError(
                f'opt_func={opt_func!r} cannot be called: give a torch.optim class or a function.'
            )
    if not isinstance(opt, OptimWrapper):
        opt = OptimWrapper(opt=opt)
    if callable(opt_func):
        add_loss(opt, model, loss_func)
    if isinstance(lr, Mapping):
        opt.set_hyper('lr', lr)
    name = getattr(maker_of(opt_func), '__name__', '')
    if name.isidentifier() and opt is not opt_func:
        opt.called = name
    excludes_norms = opt.spares_norms and callable(opt_func)
    if wd_bn_bias is not None:
        excludes_norms = not wd_bn_bias
    if excludes_norms:
        opt.spare_from_decay(list_norms_and_biases(model, loss_func))
    opt.spares_norms = excludes_norms
    opt.always_trained = set(norm_bias_params(model, with_bias=False)) if train_bn else set()
    if last is not opt:
        frozen = list_frozen(last) & set(opt.parameters())
        if frozen:
            opt.frozen, opt.frozen_idx = frozen, last.frozen_idx
    return opt


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
    check_shared(groups, model)
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
    maker = maker_of(opt_func)
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


def check_shared(groups: list[Any], model: nn.Module) -> None:
    "Raise `OptimizerError` for a parameter in two groups: torch would raise, or step twice."
    seen: set[int] = set()
    for p in members(groups):
        if id(p) in seen:
            name = next(
                (name for name, q in model.named_parameters() if q is p),
                f'of shape {tuple(p.shape)}',
            )
            raise OptimizerError(
                f'The splitter gave parameter {name} twice. Weights that layers share are one '
                'parameter: list it in one group only.'
            )
        seen.add(id(p))


def check_trained(opt: OptimWrapper, model: nn.Module) -> None:
    "Raise `ModelError` if no parameter of the optimizer requires a gradient."
    if not any(p.requires_grad for p in opt.parameters()):
        raise _no_params_error(model)


def _no_params_error(model: nn.Module) -> ModelError:
    "Return the error for a model without trainable parameters."
    return ModelError(
        f'{type(model).__name__} has no trainable parameters, or all are frozen: nothing can be learned. '
        'Call `learn.unfreeze()`, or `requires_grad_()` for parameters that you froze yourself; '
        '`validate()` and `get_preds()` work without.'
    )


@contextmanager
def unfrozen(opt: Any) -> Iterator[None]:
    "Return a context in which an optimizer's frozen parameters require gradients, for splitters that select by it."
    frozen = [p for p in list_frozen(opt) if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def list_frozen(opt: Any) -> set[nn.Parameter]:
    "Return the parameters that an optimizer has frozen."
    return opt.frozen if isinstance(opt, OptimWrapper) else set()
