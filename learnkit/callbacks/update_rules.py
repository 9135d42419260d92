# SPDX-License-Identifier: Apache-2.0
"""Update rules of SGD and Adam for one parameter, for a compiled training step.

All scalars (rates, momenta, the bias corrections of Adam) are computed in Python as torch's
optimizers do, and passed in one small tensor, so that they can change at every step without
recompilation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from learnkit.optim.optimizers import DecoupledSGD

Flags = tuple[bool, ...]


class Rule(NamedTuple):
    "Update rule of an optimizer for one parameter."

    options: tuple[str, ...]  # keys of a param group, the arguments of `flags` and `numbers`
    state: Callable[[dict[str, Any]], tuple[str, ...]]  # a parameter's state keys, by param group
    flags: Callable[..., Flags]  # terms of the rule: other terms need other code
    numbers: Callable[..., tuple[float, ...]]  # numbers of a step, counted from 1
    update: Callable[[Tensor, Tensor, dict[str, Tensor], Tensor, Flags], None]  # in-place update


def sgd_state(group: dict[str, Any]) -> tuple[str, ...]:
    "Return the state keys of SGD."
    return ('momentum_buffer',) if group['momentum'] else ()


def sgd_flags(lr: float, mom: float, wd: float, nesterov: bool) -> Flags:
    "Return the terms of an SGD step."
    return mom != 0, wd != 0, nesterov


def sgd_numbers(step: int, lr: float, mom: float, wd: float, nesterov: bool) -> tuple[float, ...]:
    "Return the numbers of an SGD step: rate, momentum, decays."
    return lr, mom, wd, 1 - lr * wd


def sgd(p: Tensor, grad: Tensor, state: dict[str, Tensor], n: Tensor, flags: Flags) -> None:
    "Update a parameter by SGD with momentum and L2 regularization."
    with_momentum, decays, nesterov = flags
    if decays:
        grad = grad + p * n[2]
    if with_momentum:
        buffer = state['momentum_buffer'].mul_(n[1]).add_(grad)
        grad = grad + buffer * n[1] if nesterov else buffer
    p.sub_(grad * n[0])


def decoupled_sgd(
    p: Tensor, grad: Tensor, state: dict[str, Tensor], n: Tensor, flags: Flags
) -> None:
    "Update a parameter by SGD with decoupled weight decay."
    with_momentum, decays, nesterov = flags
    if decays:
        p.mul_(n[3])
    sgd(p, grad, state, n, (with_momentum, False, nesterov))


def adam_state(group: dict[str, Any]) -> tuple[str, ...]:
    "Return the state keys of Adam."
    return 'step', 'exp_avg', 'exp_avg_sq'


def adam_flags(
    lr: float, betas: tuple[float, float], wd: float, eps: float, decoupled: bool
) -> Flags:
    "Return the terms of an Adam step."
    return wd != 0, decoupled


def adam_numbers(
    step: int, lr: float, betas: tuple[float, float], wd: float, eps: float, decoupled: bool
) -> tuple[float, ...]:
    "Return the numbers of an Adam step, with its bias corrections."
    beta1, beta2 = betas
    rate = lr / (1 - beta1**step)
    correction = math.sqrt(1 - beta2**step)
    return rate, 1 - beta1, beta2, 1 - beta2, correction, eps, wd, 1 - lr * wd


def adam(p: Tensor, grad: Tensor, state: dict[str, Tensor], n: Tensor, flags: Flags) -> None:
    "Update by Adam (Kingma and Ba, 2015, algorithm 1) or AdamW (Loshchilov and Hutter, 2019, algorithm 2)."
    decays, decoupled = flags
    if decays and decoupled:
        p.mul_(n[7])
    elif decays:
        grad = grad + p * n[6]
    average = state['exp_avg'].lerp_(grad, n[1])
    squares = state['exp_avg_sq'].mul_(n[2]).add_(grad * grad * n[3])
    p.sub_(average / (squares.sqrt() / n[4] + n[5]) * n[0])


SGD_OPTIONS = ('lr', 'momentum', 'weight_decay', 'nesterov')
ADAM_OPTIONS = ('lr', 'betas', 'weight_decay', 'eps', 'decoupled_weight_decay')
ADAM = Rule(ADAM_OPTIONS, adam_state, adam_flags, adam_numbers, adam)

RULES: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.SGD: Rule(SGD_OPTIONS, sgd_state, sgd_flags, sgd_numbers, sgd),
    DecoupledSGD: Rule(SGD_OPTIONS, sgd_state, sgd_flags, sgd_numbers, decoupled_sgd),
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
}
