# SPDX-License-Identifier: Apache-2.0
"""A whole training step as one function for torch.compile, and its arguments.

The module has three parts: the function, which is traced; its arguments (`Plan`), which are the
model's and the optimizer's own tensors and the numbers of the step; and the update rules of SGD and
Adam for one parameter. `learnkit.callbacks.compile` decides when the compiled step runs.

All scalars (rates, momenta, the bias corrections of Adam) are computed in Python as torch's
optimizers do, and passed in one small tensor, so that they can change at every step without
recompilation."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from learnkit.core.batch import call_by_name, tensors_in, to_detach, unpack_output
from learnkit.optim.optimizers import DecoupledSGD

if TYPE_CHECKING:
    from learnkit.learner import Learner

Flags = tuple[bool, ...]


class NotCompiled(Exception):
    "Raised if no compiled code exists for the arguments."


def whole_step(
    model: nn.Module,
    loss_func: Callable[..., Any] | None,
    update: Callable[..., None],  # update rule of the optimizer for one parameter
    params: list[nn.Parameter],
    states: list[dict[str, Tensor] | None],  # by parameter; None: never had a gradient
    rows: list[int],  # row of `numbers` for each parameter
    flags: list[Flags],  # terms of the update rule, by row
    numbers: Tensor,  # scalars (rows, numbers)
    counts: bool,  # whether to advance the optimizer's counts of steps
    names: tuple[Any, ...] | None,  # keys of a single input whose entries are passed by name
    xb: tuple[Any, ...],
    yb: tuple[Any, ...],
) -> tuple[Any, Tensor, Tensor, dict[str, Tensor] | None]:
    "Run forward, loss, backward and update; return prediction, loss, a copy of the loss, its parts."
    if not torch.compiler.is_compiling():
        raise NotCompiled
    pred, loss = unpack_output(call_by_name(model, xb, names))
    if loss_func is not None and (yb or loss is None):
        loss = loss_func(pred, *yb)
    parts = None
    if not isinstance(loss, Tensor):
        parts = {name: part.detach() for name, part in loss.items()}
        loss = loss['loss'] if 'loss' in loss else sum(loss.values())
    grads = torch.autograd.grad(loss, params, allow_unused=True)

    with torch.no_grad():
        for p, grad, state, row in zip(params, grads, states, rows, strict=True):
            if grad is None and not state:
                continue  # the parameter is not part of the loss
            if grad is None or state is None:
                raise RuntimeError('the parameters that get a gradient change')
            update(p, grad, state, numbers[row], flags[row])
            if counts:
                state['step'].add_(1)
        return to_detach(pred, cpu=False), loss.detach(), loss.detach().clone(), parts


# ---------------------------------------------------------------------------------------- arguments


class Plan:
    """Arguments of `whole_step` from `update` to `counts`, as long as they are valid.

    Only the numbers are copies: parameters and states are the optimizer's own tensors.
    """

    def __init__(
        self,
        learn: Learner,
        last: Plan | None = None,  # previous plan; its tensor of numbers is reused if it fits
    ) -> None:
        self.model = learn.model
        self.wrapper = learn.opt
        self.n_steps = learn.opt.n_steps
        self.n_hooks = RemovableHandle.next_id
        (self.opt,) = learn.opt.optimizers.values()
        groups = self.opt.param_groups
        self.state = self.opt.state
        self.n_states = len(self.opt.state)
        self.rule = RULES[type(self.opt)]
        self.n_groups = len(groups)
        self.members = [(group, group['params'], len(group['params'])) for group in groups]
        self.trained = [(p, p.requires_grad) for group in groups for p in group['params']]

        self.rows: list[Row] = []
        params, states, rows = self._list_parameters()
        self.device = params[0].device
        self.host, self.numbers = self._make_numbers(params[0].dtype, last)
        self.memory = self.host.numpy().data.cast('B')
        code = 'd' if self.host.dtype == torch.float64 else 'f'
        self.packing = struct.Struct(f'{self.host.shape[1]}{code}')

        counters = [s['step'] for s in states if s and 'step' in s]
        # counters on another device are advanced outside of the compiled code
        self.counters = counters if any(c.device != self.device for c in counters) else []
        self.inputs = (
            self.rule.update,
            params,
            states,
            rows,
            [row.flags for row in self.rows],
            self.numbers,
            bool(counters) and not self.counters,
        )
        # these tensors keep their address, so that a CUDA graph need not copy them
        if self.device.type == 'cuda':
            for t in tensors_in([self.numbers, *params, *states]):
                torch._dynamo.mark_static_address(t)

    def _list_parameters(
        self,
    ) -> tuple[list[nn.Parameter], list[dict[str, Any] | None], list[int]]:
        "Return the trained parameters, and the state and the row of numbers of each."
        params = []
        states = []
        rows = []
        for group in self.opt.param_groups:
            for p in group['params']:
                if not p.requires_grad:
                    continue
                state = self._state_of(p, group)
                step = int(state['step']) if state and 'step' in state else 0
                params.append(p)
                states.append(state)
                rows.append(self._row_of(group, step))
        return params, states, rows

    def _state_of(self, p: nn.Parameter, group: dict[str, Any]) -> dict[str, Any] | None:
        "Return the optimizer's state of a parameter, None if it is not complete yet."
        state = self.opt.state.get(p, {})
        is_complete = all(isinstance(state.get(name), Tensor) for name in self.rule.state(group))
        return state if is_complete else None

    def _row_of(self, group: dict[str, Any], step: int) -> int:
        "Return the index of the row of a param group and a count of steps; add it if it is new."
        for i, row in enumerate(self.rows):
            if row.group is group and row.step == step:
                return i
        self.rows.append(Row(self.rule, group, step))
        return len(self.rows) - 1

    def _make_numbers(self, dtype: torch.dtype, last: Plan | None) -> tuple[Tensor, Tensor]:
        "Return the tensor that numbers are written to, and the tensor on the device (the same on CPU)."
        shape = len(self.rows), len(self.rows[0].numbers())
        if last is not None and last.host.shape == shape:
            return last.host, last.numbers
        host = torch.zeros(shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        return host, host.to(self.device)

    def holds(self, learn: Learner) -> bool:
        "Return True if parameters, states and terms of the update are unchanged, apart from hooks."
        opt = self.opt
        if (
            learn.opt is not self.wrapper
            or learn.model is not self.model
            or opt.state is not self.state
        ):
            return False
        if len(opt.state) != self.n_states or len(opt.param_groups) != self.n_groups:
            return False
        for group, params, n in self.members:
            if group['params'] is not params or len(params) != n:
                return False
        for p, trained in self.trained:
            if p.grad is not None or p.requires_grad is not trained:
                return False
        return all(map(Row.holds, self.rows))

    def has_new_hooks(self) -> bool:
        "Return True if any hook was registered in torch since the last call: each has a new id."
        before = self.n_hooks
        self.n_hooks = RemovableHandle.next_id
        return before != self.n_hooks

    def write_numbers(self) -> None:
        "Pack the numbers of the next step into their tensor."
        size = self.packing.size
        for i, row in enumerate(self.rows):
            self.packing.pack_into(self.memory, i * size, *row.numbers())
        if self.numbers is not self.host:
            self.numbers.copy_(self.host, non_blocking=True)

    def count(self) -> None:
        "Count a finished step."
        if self.counters:
            torch._foreach_add_(self.counters, 1)
        for row in self.rows:
            row.step += 1
        self.wrapper.n_steps += 1
        self.n_steps = self.wrapper.n_steps


class Row:
    "Numbers for the parameters that share a param group and a count of steps."

    def __init__(self, rule: Rule, group: dict[str, Any], step: int) -> None:
        self.rule = rule
        self.group = group
        self.step = step
        self.read = itemgetter(*rule.options)
        self.values = self.read(group)
        self.flags = rule.flags(*self.values)

    def holds(self) -> bool:
        "Read the param group; return False if anything but numbers has changed."
        values = self.read(self.group)
        if values == self.values:
            return True
        self.values = values
        return not has_tensor(values) and self.rule.flags(*values) == self.flags

    def numbers(self) -> tuple[float, ...]:
        return self.rule.numbers(self.step + 1, *self.values)


def has_tensor(values: Any) -> bool:
    "Return True if the values contain a tensor, also in a pair of values."
    return any(isinstance(v, Tensor) or (isinstance(v, tuple) and has_tensor(v)) for v in values)


# ------------------------------------------------------------------------------------- update rules


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
