"""The optimizer of a Learner: how it is made, and which of its param groups are trained.

The groups come from the Learner's `splitter`. The parameters of a frozen group require no gradient;
its norm layers are trained all the same unless `train_bn` is False. Freezing does not change
whether layers are in training or evaluation mode. The optimizer is made where there is none yet,
has all groups, and keeps the momenta and averages of frozen ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from learnkit.core.errors import ModelError, OptimizerError
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


def freeze_to(learn: Any, n: int) -> None:
    "Freeze the groups before group `n`, and train the others."
    if learn.opt is None or learn._has_foreign_opt():
        learn.create_opt()
    elif not isinstance(learn.opt, OptimWrapper):  # assigned by hand
        learn.opt = OptimWrapper(opt=learn.opt)
    norms = norm_bias_params(learn.model, with_bias=False) if learn.train_bn else ()
    learn.opt.always_trained = set(norms)
    learn.opt.freeze_to(n)


def freeze(learn: Any) -> None:
    "Freeze all groups but the last."
    learn.freeze_to(-1)
    if len(learn.opt.param_lists) == 1:
        warn_user(
            'There is one param group, so `freeze()` freezes nothing. Give the Learner a '
            '`splitter` that returns several: `lambda m: [params(m.body), params(m.head)]`.'
        )


def unfreeze(learn: Any) -> None:
    "Train all groups."
    learn.freeze_to(0)


def make_optimizer(
    opt_func: Any,  # f(params, lr), a ready optimizer, or a list or dict of them
    model: nn.Module,
    lr: Any,  # one rate, one a group, a slice over the groups, or a dict by optimizer
    splitter: Callable[[nn.Module], Any] = trainable_params,  # gives parameters, or groups of them
    wd_bn_bias: bool | None = None,  # decay norm layers and biases; None: as the optimizer does
    train_bn: bool = True,  # whether norm layers of frozen groups are trained
    last: Any = None,  # the previous optimizer: its frozen parameters stay, and stay frozen
    loss_func: Any = None,  # parameters of one that is a module are trained with the last group
) -> OptimWrapper:
    """Make the optimizer of a model. A function that has a parameter `model` is given the model, too.

    A ready optimizer, and what torch's classes make, stays as it is. Those by fastai's names leave norm layers and
    biases out of weight decay, and so do all with `wd_bn_bias=False`.

    Raises `ModelError` when nothing in the model requires a gradient and `OptimizerError` when `opt_func` gives none.
    """
    with thawed(last):
        if not any(p.requires_grad for p in model.parameters()):
            raise all_frozen(model)
        if isinstance(opt_func, (torch.optim.Optimizer, list, dict)):
            opt = opt_func
        elif callable(opt_func):
            opt = _call(opt_func, model, lr, splitter)
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
    if (name := getattr(maker_of(opt_func), '__name__', '')).isidentifier() and opt is not opt_func:
        opt.called = name
    spares = opt.spares_norms and callable(opt_func) if wd_bn_bias is None else not wd_bn_bias
    if spares:
        opt.spare_from_decay(norms_and_biases(model, loss_func))
    opt.spares_norms = spares
    opt.always_trained = set(norm_bias_params(model, with_bias=False)) if train_bn else set()
    if last is not opt and (frozen := frozen_by(last) & set(opt.parameters())):
        opt.frozen, opt.frozen_idx = frozen, last.frozen_idx
    return opt


def _call(
    opt_func: Callable[..., Any], model: nn.Module, lr: Any, splitter: Callable[[nn.Module], Any]
) -> Any:
    "Make the optimizer of the splitter's groups."
    check_maker(opt_func)
    groups = groups_of(model, splitter)
    n = max(1, sum(isinstance(g, dict) for g in groups))
    if isinstance(lr, Mapping):
        lr = next(iter(lr.values()), None)  # each optimizer is given its own once they are made
    rates = spread(lr, n) if isinstance(lr, slice) else list(lr) if is_many(lr) else [lr]
    for rate in rates:
        check_hyper('lr', rate)
    first = rates[-1].clone() if isinstance(rates[-1], torch.Tensor) else rates[-1]
    return opt_func(
        groups, lr=first, **({'model': model} if _wants_model(opt_func, groups) else {})
    )


def groups_of(model: nn.Module, splitter: Callable[[nn.Module], Any]) -> list[Any]:
    """Return the splitter's groups.

    Raises `OptimizerError` for a splitter that is no function, or gives a parameter twice.
    """
    if not callable(splitter):
        raise OptimizerError(f'splitter={splitter!r} cannot be called: give a function.{SPLIT}')
    groups = as_groups(splitter(model))
    check_shared(groups, model)
    return groups


def trained_by_name(model: nn.Module, loss_func: Any) -> dict[str, nn.Parameter]:
    """Return the parameters of a model, and of a loss function that is a module, by name.

    >>> sorted(trained_by_name(nn.Linear(2, 1), nn.PReLU()))
    ['bias', 'loss_func.weight', 'weight']
    """
    return dict(bare_model(model).named_parameters()) | params_of_loss(model, loss_func)


def params_of_loss(model: nn.Module, loss_func: Any) -> dict[str, nn.Parameter]:
    "Return the parameters that a loss function has and the model has not, by name."
    if not isinstance(loss_func, nn.Module):
        return {}
    known = set(model.parameters())
    named = loss_func.named_parameters()
    return {f'loss_func.{name}': p for name, p in named if p not in known}


def add_loss(opt: OptimWrapper, model: nn.Module, loss_func: Any) -> None:
    "Put the parameters of a loss function into the last group of a new optimizer."
    known = set(opt.parameters())
    own = {n: p for n, p in params_of_loss(model, loss_func).items() if p not in known}
    own = {n: p for n, p in own.items() if p.requires_grad}
    if own and len(opt.optimizers) == 1:
        opt.last_group['params'].extend(own.values())  # the list itself: LBFGS keeps it
        opt.begin_states(own.values())
        name_params(opt, trained_by_name(model, loss_func))


def name_params(opt: OptimWrapper, named: Mapping[str, nn.Parameter]) -> None:
    "Write the names into the param groups that keep names."
    names = {p: name for name, p in named.items()}
    for group in opt.param_groups:
        if 'param_names' in group:
            group['param_names'] = [names.get(p, '') for p in group['params']]


def norms_and_biases(model: nn.Module, loss_func: Any) -> list[nn.Parameter]:
    "Return the parameters of norm layers and the biases, also of a loss function that is a module."
    modules = [m for m in (model, loss_func) if isinstance(m, nn.Module)]
    return [p for m in modules for p in norm_bias_params(m)]


def _wants_model(opt_func: Callable[..., Any], groups: list[Any]) -> bool:
    "Tell whether the function has a parameter `model`; raise `OptimizerError` where it cannot make an optimizer."
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
        # it has none, or a partial brings what the function does not take
        _check_options(opt_func, maker)
        return False
    wants_model = 'model' in signature.parameters
    try:
        signature.bind(groups, lr=0.0, **({'model': None} if wants_model else {}))
    except TypeError as e:
        name = getattr(maker, '__name__', repr(maker))
        raise OptimizerError(
            f'opt_func={name} cannot be called with the parameters and `lr=` ({e}), so it makes no '
            f'optimizer. {_instead(maker, name)}'
        ) from None
    return wants_model


def _check_options(opt_func: Any, maker: Any) -> None:
    "Raise `OptimizerError` for an option of a partial that its function does not take; calling it tells of all else."
    try:
        takes = inspect.signature(maker).parameters
    except (TypeError, ValueError):
        return
    for option in getattr(opt_func, 'keywords', {}):
        if option not in takes:
            raise OptimizerError(
                f'{maker.__name__} does not take `{option}`: it takes {", ".join(list(takes)[1:])}. '
                "Names are fastai's; torch's go with torch's own classes, "
                '`partial(torch.optim.SGD, momentum=0.9)` for one.'
            )


def _instead(maker: Any, name: str) -> str:
    if isinstance(maker, type) and issubclass(maker, OptimWrapper):
        return f'{name} goes around a ready one: `opt_func=lambda p, lr: {name}(Adam(p, lr))`.'
    return f'Metrics are given by name, `metrics={name}`; a function of your own is `lambda params, lr: ...`.'


def check_shared(groups: list[Any], model: nn.Module) -> None:
    "Raise `OptimizerError` for a parameter that is listed twice: torch would refuse it, or step twice."
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
    "Raise `ModelError` when the optimizer has nothing to train."
    if not any(p.requires_grad for p in opt.parameters()):
        raise all_frozen(model)


def all_frozen(model: nn.Module) -> ModelError:
    "Make the error for a model of which nothing is trained."
    return ModelError(
        f'{type(model).__name__} has no trainable parameters, or all are frozen: nothing can be learned. '
        'Call `learn.unfreeze()`, or `requires_grad_()` for parameters that you froze yourself; '
        '`validate()` and `get_preds()` work without.'
    )


@contextmanager
def thawed(opt: Any) -> Iterator[None]:
    "Let what an optimizer has frozen require gradients for the length of a context, so that splitters see it."
    frozen = [p for p in frozen_by(opt) if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def frozen_by(opt: Any) -> set[nn.Parameter]:
    "Return the parameters that an optimizer has frozen."
    return opt.frozen if isinstance(opt, OptimWrapper) else set()
