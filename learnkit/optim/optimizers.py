"""Optimizers by fastai's names, most of them torch's own, and Muon together with AdamW."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from learnkit.core.dtensor import locals_of
from learnkit.core.errors import MissingExtraError, OptimizerError
from learnkit.optim.hyperparams import NORMS, as_groups, can_fuse, members
from learnkit.optim.wrapper import OptimWrapper

__all__ = [
    'SGD',
    'RMSProp',
    'Adam',
    'RAdam',
    'Lookahead',
    'ranger',
    'QHAdam',
    'Lamb',
    'Larc',
    'MuonAdamW',
    'hidden_matrices',
]


def _sparing(params: Any, opt: Any) -> OptimWrapper:
    "Make an optimizer by fastai's name: a Learner leaves norm layers and biases out of its weight decay."
    res = OptimWrapper(params, opt=opt)
    res.spares_norms = True
    return res


# -------------------------------------------------------------------------------------- torch's own


def SGD(
    params: Any,  # parameters or groups of them
    lr: float = 1e-3,  # learning rate
    mom: float = 0.0,  # momentum
    wd: float = 0.0,  # weight decay
    decouple_wd: bool = True,  # decay the weights themselves (False: add it to the gradient, as L2 regularisation)
) -> OptimWrapper:
    """Make fastai's SGD on torch's own; as `opt_func`, with other options: `partial(SGD, mom=0.9)`.

    >>> SGD([nn.Parameter(torch.zeros(2))], lr=0.1, mom=0.9).hypers[0]
    {'lr': 0.1, 'mom': 0.9, 'wd': 0.0}
    """
    cls = DecoupledSGD if decouple_wd else torch.optim.SGD
    return _sparing(params, opt=partial(cls, lr=lr, momentum=mom, weight_decay=wd))


def RMSProp(
    params: Any,  # parameters or groups of them
    lr: float = 1e-3,  # learning rate
    mom: float = 0.0,  # momentum
    sqr_mom: float = 0.99,  # decay of the average squared gradient
    eps: float = 1e-8,  # added to the denominator
    wd: float = 0.0,  # weight decay
    decouple_wd: bool = True,  # decay the weights themselves (False: add it to the gradient, as L2 regularisation)
) -> OptimWrapper:
    """Make fastai's RMSProp on torch's own.

    Without momentum the two are the same, but that fastai 2.8 does not look at its `eps`. With it torch sums up the
    steps, `b = mom * b + g / (sqrt(v) + eps)`, where fastai divides the summed gradients by the latest root.

    >>> RMSProp([nn.Parameter(torch.zeros(2))], mom=0.9).hypers[0]
    {'lr': 0.001, 'mom': 0.9, 'sqr_mom': 0.99, 'wd': 0.0, 'eps': 1e-08}
    """
    cls = DecoupledRMSprop if decouple_wd else torch.optim.RMSprop
    return _sparing(
        params, opt=partial(cls, lr=lr, momentum=mom, alpha=sqr_mom, eps=eps, weight_decay=wd)
    )


def Adam(
    params: Any,  # parameters or groups of them
    lr: float = 1e-3,  # learning rate
    mom: float = 0.9,  # decay of the average gradient
    sqr_mom: float = 0.99,  # decay of the average squared gradient
    eps: float = 1e-5,  # added to the denominator
    wd: float = 0.01,  # weight decay
    decouple_wd: bool = True,  # decay the weights themselves (AdamW)
    fused: bool | None = None,  # update all weights in one kernel; None: where the device has it
) -> OptimWrapper:
    """Make fastai's Adam, with its defaults, on torch's own; with others: `opt_func=partial(Adam, wd=0.1)`.

    The fused kernel differs from torch's loop by rounding, and is three to five times as fast on a CPU.

    >>> Adam([nn.Parameter(torch.zeros(2))], wd=0.1).hypers[0]
    {'lr': 0.001, 'mom': 0.9, 'sqr_mom': 0.99, 'wd': 0.1, 'eps': 1e-05}
    """
    groups = as_groups(params)
    if fused is None:
        fused = all(map(can_fuse, members(groups)))
    cls = torch.optim.AdamW if decouple_wd else torch.optim.Adam
    return _sparing(
        groups, opt=partial(cls, lr=lr, betas=(mom, sqr_mom), eps=eps, weight_decay=wd, fused=fused)
    )


def RAdam(
    params: Any,  # parameters or groups of them
    lr: float = 1e-3,  # learning rate
    mom: float = 0.9,  # decay of the average gradient
    sqr_mom: float = 0.99,  # decay of the average squared gradient
    eps: float = 1e-5,  # added to the denominator
    wd: float = 0.0,  # weight decay
    beta: float = 0.0,  # of fastai's SAdam, which torch does not have: must be 0
    decouple_wd: bool = True,  # decay the weights themselves
) -> OptimWrapper:
    """Make fastai's RAdam (Liu et al., 2020) on torch's own.

    torch adds `eps` to the root of the average before that is corrected for its start at zero, fastai after: the same
    but for `eps`, whose weight in torch is greater in the first steps.

    Raises `OptimizerError` for a `beta`.
    """
    if beta:
        raise OptimizerError(
            f'beta={beta!r}: torch has no SAdam. Leave `beta` at 0, which is RAdam.'
        )
    cls = partial(torch.optim.RAdam, decoupled_weight_decay=decouple_wd)
    return _sparing(params, opt=partial(cls, lr=lr, betas=(mom, sqr_mom), eps=eps, weight_decay=wd))


# torch's wrappers around these would run the hooks of a step a second time
_sgd_step, _rmsprop_step = (
    inspect.unwrap(torch.optim.SGD.step),
    inspect.unwrap(torch.optim.RMSprop.step),
)


class DecoupledSGD(torch.optim.SGD):
    "SGD whose weight decay shrinks the weights themselves (Loshchilov and Hutter, 2019, eq. 9 without the schedule)."

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        "Shrink the weights that have a gradient, then step without weight decay."
        return _shrink_and_step(self, _sgd_step, closure)


class DecoupledRMSprop(torch.optim.RMSprop):
    "RMSprop whose weight decay shrinks the weights themselves."

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        "Shrink the weights that have a gradient, then step without weight decay."
        return _shrink_and_step(self, _rmsprop_step, closure)


def _shrink_and_step(
    opt: torch.optim.Optimizer, step: Callable[..., Any], closure: Callable[[], Any] | None
) -> Any:
    decays = [g['weight_decay'] for g in opt.param_groups]
    if not any(decays):
        return step(opt, closure)
    try:
        for g in opt.param_groups:
            for p in g['params']:
                if p.grad is not None:
                    p.mul_(1 - g['lr'] * g['weight_decay'])
            g['weight_decay'] = 0.0
        return step(opt, closure)
    finally:
        for g, wd in zip(opt.param_groups, decays, strict=True):
            g['weight_decay'] = wd


# ---------------------------------------------------------------------------------------- Lookahead

LAYOUT = (
    '_places',
    'exempt',
    'splits',
    'always_trained',
    'frozen',
    'frozen_idx',
    'called',
    'spares_norms',
    '_closures',
    '_evaluating',
)  # of an OptimWrapper


class Lookahead(OptimWrapper):
    """Step with another optimizer, and every `k` steps go back part of the way to where those began.

    Slow weights follow the fast ones by `alpha`, and the fast ones start from there again (Zhang et al., 2019). Both
    they and the count of steps are in the optimizer's state dict. A weight's slow one begins as what the weight is at
    its first step, so weights may be loaded before that.

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
        opt: torch.optim.Optimizer
        | OptimWrapper,  # what takes the steps: `lambda p, lr: Lookahead(Adam(p, lr))`
        k: int = 6,  # steps between looking back
        alpha: float = 0.5,  # how far the slow weights go with the fast ones, 0 to 1
    ) -> None:
        if not isinstance(k, int) or k < 1:
            raise OptimizerError(f'k={k!r}: give a whole number of steps, 1 or more.')
        if not 0 <= alpha <= 1:
            raise OptimizerError(f'alpha={alpha!r}: give a share from 0 to 1.')
        super().__init__(opt=opt.opt if isinstance(opt, OptimWrapper) else opt)
        if isinstance(
            opt, OptimWrapper
        ):  # groups of several optimizers may be one, and some parameters are spared
            for name in LAYOUT:
                setattr(self, name, getattr(opt, name))
        self.k, self.alpha = k, alpha
        for g in self.param_groups:
            g.setdefault('lookahead_step', 0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, only: str | int | None = None) -> Any:
        "Take a step; after every `k`-th, move the slow weights, and the fast ones to them."
        groups = [
            (o.state, g, [p for p in g['params'] if p.grad is not None])
            for o in self._stepping(only)
            for g in o.param_groups
        ]
        new = [
            (state, p, p.clone())
            for state, _, ps in groups
            for p in ps
            if 'slow_weights' not in state.get(p, {})
        ]
        with torch.enable_grad():
            loss = super().step(closure, only)
        for state, p, slow in new:
            state[p]['slow_weights'] = slow

        for state, g, ps in groups:
            g['lookahead_step'] = g.get('lookahead_step', 0) + 1
            if g['lookahead_step'] % self.k or not ps:
                continue
            slow_ones, fast_ones = locals_of(state[p]['slow_weights'] for p in ps), locals_of(ps)
            torch._foreach_lerp_(slow_ones, fast_ones, self.alpha)
            torch._foreach_copy_(fast_ones, slow_ones)
        return loss

    def clear_state(self, closures: bool = False) -> None:
        "Forget momenta, averages and slow weights."
        super().clear_state(closures)
        for g in self.param_groups:
            g['lookahead_step'] = 0


def ranger(
    params: Any,  # parameters or groups of them
    lr: float = 1e-3,  # learning rate
    mom: float = 0.95,  # decay of the average gradient
    wd: float = 0.01,  # weight decay
    eps: float = 1e-6,  # added to the denominator
    k: int = 6,  # steps between looking back
    alpha: float = 0.5,  # how far the slow weights go with the fast ones
    **kwargs: Any,  # more for `RAdam`
) -> Lookahead:
    "Make fastai's ranger: `Lookahead` around `RAdam`."
    return Lookahead(RAdam(params, lr=lr, mom=mom, wd=wd, eps=eps, **kwargs), k=k, alpha=alpha)


# ------------------------------------------------------------------------------- of another library


def QHAdam(
    params: Any,  # parameters or groups of them
    lr: float = 1e-3,  # learning rate
    mom: float = 0.999,  # decay of the average gradient
    sqr_mom: float = 0.999,  # decay of the average squared gradient
    nu_1: float = 0.7,  # weight of the average gradient beside the latest
    nu_2: float = 1.0,  # weight of the average squared gradient beside the latest
    eps: float = 1e-8,  # added to the denominator
    wd: float = 0.0,  # weight decay
    decouple_wd: bool = True,  # decay the weights themselves
) -> OptimWrapper:
    """Make fastai's QHAdam (Ma and Yarats, 2019), from the library pytorch_optimizer.

    Raises `MissingExtraError` without `pip install learnkit[optim]`.
    """
    cls = partial(_from_library('QHAdam', 'Adam'), nus=(nu_1, nu_2), weight_decouple=decouple_wd)
    return _sparing(params, opt=partial(cls, lr=lr, betas=(mom, sqr_mom), eps=eps, weight_decay=wd))


def Lamb(
    params: Any,  # parameters or groups of them
    lr: float = 1e-3,  # learning rate
    mom: float = 0.9,  # decay of the average gradient
    sqr_mom: float = 0.99,  # decay of the average squared gradient
    eps: float = 1e-5,  # added to the denominators
    wd: float = 0.0,  # weight decay
    decouple_wd: bool = True,  # decay the weights themselves (False: add it to the step, before that is scaled)
) -> OptimWrapper:
    """Make fastai's Lamb, LAMB (You et al., 2020), from the library pytorch_optimizer.

    Each parameter's step is as long as `lr` times its norm. The averages are not corrected for their start at zero,
    which the scaling makes up for but in `eps`, and the ratio of the norms is not held below 10 as in fastai.

    Raises `MissingExtraError` without `pip install learnkit[optim]`.
    """
    cls = partial(_from_library('Lamb', 'Adam'), weight_decouple=decouple_wd, adam_debias=True)
    res = _sparing(params, opt=partial(cls, lr=lr, betas=(mom, sqr_mom), eps=eps, weight_decay=wd))
    res.opt.clamp = float('inf')  # it would take the norm of a large layer for 10
    return res


def Larc(params: Any, lr: float = 1e-3, **kwargs: Any) -> OptimWrapper:
    """Refuse: no well-kept library has LARC.

    Raises `MissingExtraError`, which says what to use.
    """
    raise MissingExtraError(
        'No well-kept library has LARC. `Lamb` scales the steps of each layer, too, `GradientClip` '
        'limits those of `SGD`, and `pytorch_optimizer.LARS` goes in as `opt_func`.'
    )


def _from_library(name: str, instead: str) -> Any:
    "Return a class of pytorch_optimizer."
    try:
        library = import_module('pytorch_optimizer')
    except ImportError as e:
        raise MissingExtraError(
            f'{name} comes from the library pytorch_optimizer: `pip install learnkit[optim]`; or '
            f'use `{instead}`, which needs none.'
        ) from e
    return getattr(library, name)


# --------------------------------------------------------------------------------- Muon, with AdamW


def MuonAdamW(
    params: Any,  # parameters or groups of them
    lr: float = 1e-3,  # learning rate, of both
    model: nn.Module | None = None,  # whose parameters they are; a Learner gives its own
    but: Any = None,  # layers, or parameters, that AdamW trains too; None: the last layer that has a matrix
    mom: float = 0.95,  # momentum of Muon
    adam_mom: float = 0.9,  # decay of AdamW's average gradient
    sqr_mom: float = 0.99,  # decay of AdamW's average squared gradient
    eps: float = 1e-5,  # added to AdamW's denominator
    wd: float = 0.01,  # weight decay, of both
    adjust_lr_fn: str
    | None = 'match_rms_adamw',  # how Muon scales its steps: so that AdamW's `lr` suits it
) -> OptimWrapper:
    """Train the matrices of hidden layers with Muon, and the rest with AdamW: `Learner(..., opt_func=MuonAdamW)`.

    Muon (Jordan et al., 2024) makes the averaged gradient of a matrix orthogonal. What is no hidden matrix is AdamW's:
    embeddings, the last layer, norms, biases and convolutions (see `hidden_matrices`). The optimizers are
    `opt['adamw']` and `opt['muon']`; each group of the splitter is one group of both, with the same `lr` and `wd`, and
    once it is set with the same `mom`. For rates of their own make both: `opt_func=[torch.optim.Muon(...), ...]`.

    Raises `OptimizerError` with a torch that has no Muon (2.9 brought it), and where there is no hidden matrix.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> opt = MuonAdamW(model.parameters(), lr=1e-3, model=model)
    >>> [tuple(p.shape) for p in opt['muon'].param_groups[0]['params']]
    [(8, 4), (8, 8)]
    """
    if not hasattr(torch.optim, 'Muon'):
        raise OptimizerError(
            f'torch {torch.__version__} has no Muon: install torch 2.9 or later, or use `Adam`.'
        )
    if model is None:
        raise OptimizerError('MuonAdamW needs the model, to tell its layers: `model=`.')
    hidden = {id(p) for p in hidden_matrices(model, but)}
    groups = as_groups(params)
    parts: dict[str, list[dict[str, Any]]] = {'adamw': [], 'muon': []}
    places: list[list[tuple[str, int]]] = []
    for group in groups if isinstance(groups[0], dict) else [{'params': groups}]:
        matrices, rest = (
            [p for p in group['params'] if (id(p) in hidden) is wanted] for wanted in (True, False)
        )
        kinds = [name for name, ps in (('adamw', rest), ('muon', matrices)) if ps] or ['adamw']
        places.append([(name, len(parts[name])) for name in kinds])
        for name in kinds:
            parts[name].append({**group, 'params': matrices if name == 'muon' else rest})
    if not parts['muon']:
        raise OptimizerError(f'{type(model).__name__} has no hidden matrix to train: use `Adam`.')

    fused = all(map(can_fuse, members(parts['adamw'])))
    make: dict[str, Callable[..., torch.optim.Optimizer]] = {
        'adamw': partial(
            torch.optim.AdamW,
            lr=lr,
            betas=(adam_mom, sqr_mom),
            eps=eps,
            weight_decay=wd,
            fused=fused,
        ),
        'muon': partial(
            torch.optim.Muon, lr=lr, momentum=mom, weight_decay=wd, adjust_lr_fn=adjust_lr_fn
        ),
    }
    res = OptimWrapper(opt={name: make[name](part) for name, part in parts.items() if part})
    res.share_groups(*places)
    res.spares_norms = True
    return res


def hidden_matrices(
    model: nn.Module,
    but: Any = None,  # layers, or parameters, to leave out; None: the last layer that has a matrix, taken for the head
) -> list[nn.Parameter]:
    """Return the matrices of the layers between the embeddings and the head: those that Muon is made for.

    The last layer is the last that the model registered. Embeddings, and what is tied to them, are never among them.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 9))
    >>> [tuple(p.shape) for p in hidden_matrices(model)]
    [(8, 4)]
    """
    layers = [
        m
        for m in model.modules()
        if not isinstance(m, NORMS) and any(map(is_matrix, own_params(m)))
    ]
    tables = [m for m in layers if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    if but is None:
        but = [m for m in layers if m not in tables][-1:]
    elif isinstance(but, (nn.Module, torch.Tensor)):
        but = [but]
    for o in but:
        if not isinstance(o, (nn.Module, torch.Tensor)):
            raise OptimizerError(
                f'but={o!r}: give layers of the model or parameters, `but=model.head` for one.'
            )
    left_out = {
        id(p)
        for o in (*tables, *but)
        for p in (o.parameters() if isinstance(o, nn.Module) else [o])
    }
    found = {
        id(p): p for m in layers for p in own_params(m) if is_matrix(p) and id(p) not in left_out
    }
    return list(found.values())


def own_params(m: nn.Module) -> list[nn.Parameter]:
    "Return the parameters of a module without those of the modules in it."
    return list(m.parameters(recurse=False))


def is_matrix(p: torch.Tensor) -> bool:
    "Tell whether Muon can train a parameter."
    return p.ndim == 2 and p.is_floating_point()
