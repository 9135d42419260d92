# SPDX-License-Identifier: Apache-2.0
"""Optimizers with fastai's names and defaults, mostly on torch's classes, and Muon combined with AdamW."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from learnkit.core.errors import OptimizerError
from learnkit.core.optional import import_library
from learnkit.core.roles import NORMS, is_bias
from learnkit.optim.hyperparams import as_groups, can_fuse, iterate_params
from learnkit.optim.wrapper import OptimWrapper


def _wrap(opt: Any) -> OptimWrapper:
    "Make an OptimWrapper whose norms and biases a Learner exempts from weight decay."
    res = OptimWrapper(opt=opt)
    res.spares_norms = True
    return res


# -- optimizers of torch ---------------------------------------------------------------------------


def SGD(
    params: Any,  # parameters or groups of parameters
    lr: float = 1e-3,  # learning rate
    mom: float = 0.0,  # momentum
    wd: float = 0.0,  # weight decay
    decouple_wd: bool = True,  # decoupled weight decay; False: L2 regularization
) -> OptimWrapper:
    """Make fastai's SGD with torch's class. Other options in a Learner: `opt_func=partial(SGD, mom=0.9)`.

    >>> SGD([nn.Parameter(torch.zeros(2))], lr=0.1, mom=0.9).hypers[0]
    {'lr': 0.1, 'mom': 0.9, 'wd': 0.0}
    """
    cls = DecoupledSGD if decouple_wd else torch.optim.SGD
    return _wrap(cls(as_groups(params), lr=lr, momentum=mom, weight_decay=wd))


def RMSProp(
    params: Any,  # parameters or groups of parameters
    lr: float = 1e-3,  # learning rate
    mom: float = 0.0,  # momentum
    sqr_mom: float = 0.99,  # decay of the average squared gradient
    eps: float = 1e-8,  # added to the denominator
    wd: float = 0.0,  # weight decay
    decouple_wd: bool = True,  # decoupled weight decay; False: L2 regularization
) -> OptimWrapper:
    """Make fastai's RMSProp with torch's class.

    Without momentum, torch and fastai take the same steps, except that fastai 2.8 ignores `eps`. With momentum, torch
    accumulates steps, `b = mom * b + g / (sqrt(v) + eps)`; fastai divides accumulated gradients by the current root.

    >>> RMSProp([nn.Parameter(torch.zeros(2))], mom=0.9).hypers[0]
    {'lr': 0.001, 'mom': 0.9, 'sqr_mom': 0.99, 'wd': 0.0, 'eps': 1e-08}
    """
    cls = DecoupledRMSprop if decouple_wd else torch.optim.RMSprop
    groups = as_groups(params)
    return _wrap(cls(groups, lr=lr, momentum=mom, alpha=sqr_mom, eps=eps, weight_decay=wd))


def Adam(
    params: Any,  # parameters or groups of parameters
    lr: float = 1e-3,  # learning rate
    mom: float = 0.9,  # decay of the average gradient
    sqr_mom: float = 0.99,  # decay of the average squared gradient
    eps: float = 1e-5,  # added to the denominator
    wd: float = 0.01,  # weight decay
    decouple_wd: bool = True,  # decoupled weight decay (AdamW)
    fused: bool | None = None,  # fused kernel; None: if the device supports it
) -> OptimWrapper:
    """Make fastai's Adam with torch's class. Other options in a Learner: `opt_func=partial(Adam, wd=0.1)`.

    The fused kernel differs from torch's loop by rounding, and is three to five times as fast on a CPU.

    >>> Adam([nn.Parameter(torch.zeros(2))], wd=0.1).hypers[0]
    {'lr': 0.001, 'mom': 0.9, 'sqr_mom': 0.99, 'wd': 0.1, 'eps': 1e-05}
    """
    groups = as_groups(params)
    if fused is None:
        fused = can_fuse(iterate_params(groups))
    cls = torch.optim.AdamW if decouple_wd else torch.optim.Adam
    return _wrap(cls(groups, lr=lr, betas=(mom, sqr_mom), eps=eps, weight_decay=wd, fused=fused))


def RAdam(
    params: Any,  # parameters or groups of parameters
    lr: float = 1e-3,  # learning rate
    mom: float = 0.9,  # decay of the average gradient
    sqr_mom: float = 0.99,  # decay of the average squared gradient
    eps: float = 1e-5,  # added to the denominator
    wd: float = 0.0,  # weight decay
    beta: float = 0.0,  # must be 0: parameter of fastai's SAdam, which torch does not have
    decouple_wd: bool = True,  # decoupled weight decay
) -> OptimWrapper:
    """Make fastai's RAdam (Liu et al., 2020) with torch's class.

    torch adds `eps` to the root before its bias correction, fastai after it. `eps` therefore has a larger effect in
    the first steps with torch.

    Raises `OptimizerError` if `beta` is not 0.
    """
    if beta:
        raise OptimizerError(
            f'beta={beta!r}: torch has no SAdam. Leave `beta` at 0, which is RAdam.'
        )
    opt = torch.optim.RAdam(
        as_groups(params),
        lr=lr,
        betas=(mom, sqr_mom),
        eps=eps,
        weight_decay=wd,
        decoupled_weight_decay=decouple_wd,
    )
    return _wrap(opt)


@torch.no_grad()
def decay_and_step(
    self: DecoupledSGD | DecoupledRMSprop, closure: Callable[[], Any] | None = None
) -> Any:
    "Decay the weights that have a gradient, then step without weight decay."
    decays = [g['weight_decay'] for g in self.param_groups]
    if not any(decays):
        return self.plain_step(closure)
    try:
        for g in self.param_groups:
            for p in g['params']:
                if p.grad is not None:
                    p.mul_(1 - g['lr'] * g['weight_decay'])
            g['weight_decay'] = 0.0
        return self.plain_step(closure)
    finally:
        for g, wd in zip(self.param_groups, decays, strict=True):
            g['weight_decay'] = wd


class DecoupledSGD(torch.optim.SGD):
    "SGD with decoupled weight decay (Loshchilov and Hutter, 2019, eq. 9 without the schedule)."

    # torch's wrappers of `step` would run the step hooks a second time
    plain_step = inspect.unwrap(torch.optim.SGD.step)
    step = decay_and_step


class DecoupledRMSprop(torch.optim.RMSprop):
    "RMSprop with decoupled weight decay."

    plain_step = inspect.unwrap(torch.optim.RMSprop.step)
    step = decay_and_step


# -- Lookahead -------------------------------------------------------------------------------------


class Lookahead(OptimWrapper):
    """Step with another optimizer, and every `k` steps interpolate between slow and fast weights.

    Every `k` steps, the slow weights move by `alpha` towards the fast weights, and the fast weights are set to the slow
    weights (Zhang et al., 2019). The slow weights and the step count are in the optimizer's state dict. The slow
    weights are initialized at the first step, so weights can be loaded before.

    >>> w = nn.Parameter(torch.tensor([1.]))
    >>> opt = Lookahead(SGD([w], lr=0.1), k=2)
    >>> for _ in range(2):
    ...     w.grad = torch.ones(1)
    ...     opt.step()
    >>> w.item()  # half-way between 1 and 0.8
    0.8999...
    """

    def __init__(
        self,
        opt: torch.optim.Optimizer | OptimWrapper,  # inner optimizer, such as `Adam(params, lr)`
        k: int = 6,  # steps between updates of the slow weights
        alpha: float = 0.5,  # step size of the slow weights, 0 to 1
    ) -> None:
        if isinstance(opt, OptimWrapper):
            self.__dict__.update(vars(opt))
        else:
            super().__init__(opt=opt)
        self.k = k
        self.alpha = alpha

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None, only: str | int | None = None) -> Any:
        "Take a step; every `k` steps, update the slow weights and set the fast weights to them."
        groups = []
        new_weights = []
        for o in self._select(only):
            for g in o.param_groups:
                ps = [p for p in g['params'] if p.grad is not None]
                groups.append((o.state, g, ps))
                new_ps = [p for p in ps if 'slow_weights' not in o.state.get(p, {})]
                new_weights += [(o.state, p, p.clone()) for p in new_ps]
        with torch.enable_grad():
            loss = super().step(closure, only)
        for state, p, slow in new_weights:
            state[p]['slow_weights'] = slow

        for state, g, ps in groups:
            g['lookahead_step'] = g.get('lookahead_step', 0) + 1
            if g['lookahead_step'] % self.k or not ps:
                continue
            for p in ps:
                slow = state[p]['slow_weights'].lerp_(p, self.alpha)
                p.copy_(slow)
        return loss

    @override
    def clear_state(self, closures: bool = False) -> None:
        "Clear the optimizer states, including slow weights and the step count."
        super().clear_state(closures)
        for g in self.param_groups:
            g['lookahead_step'] = 0


def ranger(
    params: Any,  # parameters or groups of parameters
    lr: float = 1e-3,  # learning rate
    mom: float = 0.95,  # decay of the average gradient
    wd: float = 0.01,  # weight decay
    eps: float = 1e-6,  # added to the denominator
    k: int = 6,  # steps between updates of the slow weights
    alpha: float = 0.5,  # step size of the slow weights, 0 to 1
    **kwargs: Any,  # additional arguments of `RAdam`
) -> Lookahead:
    "Make fastai's ranger: `Lookahead` around `RAdam`."
    return Lookahead(RAdam(params, lr=lr, mom=mom, wd=wd, eps=eps, **kwargs), k=k, alpha=alpha)


# -- pytorch_optimizer -----------------------------------------------------------------------------


def QHAdam(
    params: Any,  # parameters or groups of parameters
    lr: float = 1e-3,  # learning rate
    mom: float = 0.999,  # decay of the average gradient
    sqr_mom: float = 0.999,  # decay of the average squared gradient
    nu_1: float = 0.7,  # weight of the average gradient; the current one gets `1 - nu_1`
    nu_2: float = 1.0,  # weight of the average squared gradient; the current one gets `1 - nu_2`
    eps: float = 1e-8,  # added to the denominator
    wd: float = 0.0,  # weight decay
    decouple_wd: bool = True,  # decoupled weight decay
) -> OptimWrapper:
    """Make fastai's QHAdam (Ma and Yarats, 2019), from the library pytorch_optimizer.

    Raises `MissingExtraError` without pytorch_optimizer.
    """
    cls = partial(_import_class('QHAdam', 'Adam'), nus=(nu_1, nu_2), weight_decouple=decouple_wd)
    return _wrap(cls(as_groups(params), lr=lr, betas=(mom, sqr_mom), eps=eps, weight_decay=wd))


def Lamb(
    params: Any,  # parameters or groups of parameters
    lr: float = 1e-3,  # learning rate
    mom: float = 0.9,  # decay of the average gradient
    sqr_mom: float = 0.99,  # decay of the average squared gradient
    eps: float = 1e-5,  # added to the denominators
    wd: float = 0.0,  # weight decay
    decouple_wd: bool = True,  # decoupled weight decay; False: added to the step before scaling
) -> OptimWrapper:
    """Make fastai's Lamb (LAMB, You et al., 2020), from the library pytorch_optimizer.

    The norm of each parameter's step is `lr` times the norm of the parameter. The averages have no bias correction;
    except for `eps`, the scaling compensates for that. The ratio of the norms is not limited to 10 as it is in fastai.

    Raises `MissingExtraError` without pytorch_optimizer.
    """
    cls = partial(_import_class('Lamb', 'Adam'), weight_decouple=decouple_wd, adam_debias=True)
    opt = cls(as_groups(params), lr=lr, betas=(mom, sqr_mom), eps=eps, weight_decay=wd)
    opt.clamp = float('inf')  # the default limits the norm of a layer to 10
    return _wrap(opt)


def _import_class(name: str, instead: str) -> Any:
    "Return a class of pytorch_optimizer; if it is not installed, the error suggests another optimizer."
    library = import_library('pytorch_optimizer', name, f'; or use `{instead}`, which needs none.')
    return getattr(library, name)


# -- Muon, with AdamW ------------------------------------------------------------------------------


def MuonAdamW(
    params: Any,  # parameters or groups of parameters
    lr: float = 1e-3,  # learning rate of Muon and AdamW
    *,
    model: nn.Module,  # model of the parameters; a Learner passes its model
    mom: float = 0.95,  # momentum of Muon
    adam_mom: float = 0.9,  # decay of AdamW's average gradient
    sqr_mom: float = 0.99,  # decay of AdamW's average squared gradient
    eps: float = 1e-5,  # added to AdamW's denominator
    wd: float = 0.01,  # weight decay of Muon and AdamW
) -> OptimWrapper:
    """Train the matrices of hidden layers with Muon, and the rest with AdamW: `Learner(..., opt_func=MuonAdamW)`.

    Muon (Jordan et al., 2024) orthogonalizes the averaged gradient of a matrix. AdamW trains all other parameters:
    embeddings, the last layer, norms, biases and convolutions (see `hidden_matrices`). The optimizers are
    `opt['adamw']` and `opt['muon']`. Each group of the splitter is one group of hyperparameters: both optimizers share
    its `lr` and `wd`, and its `mom` once it is set. For separate rates, make both optimizers yourself:
    `opt_func=[torch.optim.Muon(...), ...]`.

    Needs torch 2.9. Raises `OptimizerError` if the model has no hidden matrix.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> opt = MuonAdamW(model.parameters(), lr=1e-3, model=model)
    >>> [tuple(p.shape) for p in opt['muon'].param_groups[0]['params']]
    [(8, 4), (8, 8)]
    """
    hidden = {id(p) for p in hidden_matrices(model)}
    parts, slots = _split_hidden(as_groups(params), hidden)
    if not parts['muon']:
        raise OptimizerError(f'{type(model).__name__} has no hidden matrix to train: use `Adam`.')

    options: dict[str, Any] = {'lr': lr, 'weight_decay': wd}
    fused = can_fuse(iterate_params(parts['adamw']))
    betas = adam_mom, sqr_mom
    opt = {
        'adamw': torch.optim.AdamW(parts['adamw'], betas=betas, eps=eps, fused=fused, **options),
        # the steps are scaled to the size of AdamW's, for one `lr`
        'muon': torch.optim.Muon(
            parts['muon'], momentum=mom, adjust_lr_fn='match_rms_adamw', **options
        ),
    }
    res = _wrap(opt)
    res.positions = [[(opt[name], i) for name, i in group] for group in slots]
    return res


def _split_hidden(
    groups: list[dict[str, Any]],  # param groups
    hidden: set[int],  # ids of the parameters for Muon
) -> tuple[dict[str, list[dict[str, Any]]], list[list[tuple[str, int]]]]:
    "Split param groups by optimizer; also return, for each group, the optimizer and index of its parts."
    parts: dict[str, list[dict[str, Any]]] = {'adamw': [], 'muon': []}
    slots = []
    for group in groups:
        by_name = {
            'adamw': [p for p in group['params'] if id(p) not in hidden],
            'muon': [p for p in group['params'] if id(p) in hidden],
        }
        names = [name for name, group_params in by_name.items() if group_params]
        slots.append([(name, len(parts[name])) for name in names])
        for name in names:
            parts[name].append({**group, 'params': by_name[name]})
    return parts, slots


def _is_matrix(p: nn.Parameter) -> bool:
    "Return True for a floating-point parameter of two dimensions."
    return p.ndim == 2 and p.is_floating_point()


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices of the layers between the embeddings and the head, for which Muon is intended.

    The head is the last registered layer with a matrix. Parameters tied to embeddings or the head are excluded.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 9))
    >>> [tuple(p.shape) for p in hidden_matrices(model)]
    [(8, 4)]
    """
    hidden: dict[nn.Parameter, None] = {}
    embedded: set[nn.Parameter] = set()
    own: list[nn.Parameter] = []
    for m in model.modules():
        named = m.named_parameters(recurse=False)
        matrices = [p for name, p in named if _is_matrix(p) and not is_bias(name)]
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
            embedded.update(matrices)
        elif matrices and not isinstance(m, NORMS):
            own = matrices
            hidden |= dict.fromkeys(own)
    return [p for p in hidden if p not in embedded.union(own)]
