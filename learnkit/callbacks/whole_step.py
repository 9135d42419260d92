"""A whole training step as one function for torch.compile, and what it works on.

Three parts: the function itself, which is traced; its arguments (`Plan`), which are the model's and the optimizer's own
tensors, and the numbers of this step; and how SGD and Adam update one parameter. `learnkit.callbacks.compile`
decides when all this is used.

Everything that is a scalar (rates, momenta, the bias corrections of Adam) is computed in Python as torch's optimizers
do it, and travels in one small tensor: so it may change at every step, and needs no compiling again."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from learnkit.core.batch import call_by_name, to_detach, unpack_output
from learnkit.optim.optimizers import DecoupledSGD

__all__ = ['whole_step', 'NotCompiled', 'Plan', 'Rule', 'RULES']

Flags = tuple[bool, ...]


class NotCompiled(Exception):
    "There is no compiled code for these arguments."


def whole_step(
    model: nn.Module,
    loss_func: Callable[..., Any] | None,
    update: Callable[..., None],  # the optimizer's rule for one parameter
    params: list[nn.Parameter],
    states: list[dict[str, Tensor] | None],  # by parameter; None: it has never had a gradient
    rows: list[int],  # which of the numbers are for it
    flags: list[Flags],  # per row: which terms of the rule there are
    numbers: Tensor,  # [row, number]
    counts: bool,  # whether the optimizer's counts of steps are advanced here
    names: tuple[Any, ...] | None,  # of the single input's entries, where they are passed by name
    xb: tuple[Any, ...],
    yb: tuple[Any, ...],
) -> tuple[Any, Tensor, Tensor, dict[str, Tensor] | None]:
    "Run forward, loss, backward and update; return the prediction, the loss twice, and its parts where it has some."
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
                continue  # it plays no part in the loss
            if grad is None or state is None:
                raise RuntimeError('the parameters that get a gradient change')
            update(p, grad, state, numbers[row], flags[row])
            if counts:
                state['step'].add_(1)
        return to_detach(pred, cpu=False), loss.detach(), loss.detach().clone(), parts


# --------------------------------------------------------------------------------- what it works on


class Plan:
    """The arguments of `whole_step` from `update` to `counts`, for as long as they stay what they are.

    Only the numbers are copies: parameters and states are the optimizer's own, updated in place.
    """

    def __init__(
        self,
        learn: Any,
        last: Plan | None = None,  # the plan before; its tensor of numbers is reused where it fits
    ) -> None:
        self.model, self.wrapper, self.n_steps, self.n_hooks = (
            learn.model,
            learn.opt,
            learn.opt.n_steps,
            n_hooks(),
        )
        (self.opt,) = learn.opt.optimizers.values()
        self.state, self.n_states, groups = (
            self.opt.state,
            len(self.opt.state),
            self.opt.param_groups,
        )
        self.rule, self.n_groups = RULES[type(self.opt)], len(groups)
        self.members = [(group, group['params'], len(group['params'])) for group in groups]
        self.trained = [(p, p.requires_grad) for group in groups for p in group['params']]

        self.rows: list[Row] = []
        params, states, rows = [], [], []
        for group in groups:
            for p in (p for p in group['params'] if p.requires_grad):
                state = self._state_of(p, group)
                params.append(p)
                states.append(state)
                rows.append(
                    self._row_of(group, int(state['step']) if state and 'step' in state else 0)
                )
        self.device = params[0].device
        self.host, self.numbers = self._make_numbers(params[0].dtype, last)
        self.memory = self.host.numpy().data.cast('B')
        self.packing = struct.Struct(
            f'{self.host.shape[1]}{"d" if self.host.dtype == torch.float64 else "f"}'
        )

        counters = [s['step'] for s in states if s and 'step' in s]
        # advanced out of the graph
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
        # these tensors stay where they are: a CUDA graph need not copy them
        if self.device.type == 'cuda':
            for t in (
                self.numbers,
                *params,
                *(t for s in states if s for t in s.values() if isinstance(t, Tensor)),
            ):
                torch._dynamo.mark_static_address(t)

    def _state_of(self, p: nn.Parameter, group: dict[str, Any]) -> dict[str, Any] | None:
        "Return the optimizer's state of a parameter, None where it has none yet and needs one."
        state = self.opt.state.get(p, {})
        return (
            state
            if all(isinstance(state.get(name), Tensor) for name in self.rule.state(group))
            else None
        )

    def _row_of(self, group: dict[str, Any], step: int) -> int:
        for i, row in enumerate(self.rows):
            if row.group is group and row.step == step:
                return i
        self.rows.append(Row(self.rule, group, step))
        return len(self.rows) - 1

    def _make_numbers(self, dtype: torch.dtype, last: Plan | None) -> tuple[Tensor, Tensor]:
        "Return the tensor that numbers are written to, and the one on the device, mostly the same."
        shape = len(self.rows), len(self.rows[0].numbers())
        if last is not None and last.host.shape == shape:
            return last.host, last.numbers
        host = torch.zeros(shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        return host, host.to(self.device)

    def holds(self, learn: Any) -> bool:
        "Tell whether parameters, states and the kind of update are still those; hooks are another question."
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
        "Tell whether a hook was registered, on anything, since this was last asked."
        before, self.n_hooks = self.n_hooks, n_hooks()
        return before != self.n_hooks

    def write_numbers(self) -> None:
        "Pack the numbers of the coming step into their tensor."
        size = self.packing.size
        for i, row in enumerate(self.rows):
            self.packing.pack_into(self.memory, i * size, *row.numbers())
        if self.numbers is not self.host:
            self.numbers.copy_(self.host, non_blocking=True)

    def count(self) -> None:
        "Count a step that was taken."
        if self.counters:
            torch._foreach_add_(self.counters, 1)
        for row in self.rows:
            row.step += 1
        self.wrapper.n_steps += 1
        self.n_steps = self.wrapper.n_steps


class Row:
    "The numbers for those parameters that share a param group and a count of steps."

    def __init__(self, rule: Rule, group: dict[str, Any], step: int) -> None:
        self.rule, self.group, self.step, self.read = rule, group, step, itemgetter(*rule.options)
        self.values = self.read(group)
        self.flags = rule.flags(*self.values)

    def holds(self) -> bool:
        "Read the param group; False where more than numbers has changed."
        values = self.read(self.group)
        if values == self.values:
            return True
        self.values = values
        return not has_tensor(values) and self.rule.flags(*values) == self.flags

    def numbers(self) -> tuple[float, ...]:
        return self.rule.numbers(self.step + 1, *self.values)


def has_tensor(values: Any) -> bool:
    "Tell whether a tensor is among the values, or in a pair of them."
    return any(isinstance(v, Tensor) or (isinstance(v, tuple) and has_tensor(v)) for v in values)


def n_hooks() -> int:
    "Return how many hooks were ever registered on anything: while it stays the same, none was added."
    return RemovableHandle.next_id


# ------------------------------------------------------------------------ how the optimizers update


class Rule(NamedTuple):
    "How an optimizer updates one parameter."

    options: tuple[str, ...]  # of a param group: what `flags` and `numbers` are called with
    state: Callable[[dict[str, Any]], tuple[str, ...]]  # a parameter's state keys, by param group
    flags: Callable[..., Flags]  # which terms there are: other ones mean other code
    numbers: Callable[..., tuple[float, ...]]  # the numbers of a step, counted from 1
    update: Callable[[Tensor, Tensor, dict[str, Tensor], Tensor, Flags], None]  # updates in place


def sgd_state(group: dict[str, Any]) -> tuple[str, ...]:
    "Name what SGD keeps of a parameter."
    return ('momentum_buffer',) if group['momentum'] else ()


def sgd_flags(lr: float, mom: float, wd: float, dampening: float, *kinds: bool) -> Flags:
    "Return which terms an SGD step has."
    return (mom != 0, wd != 0, *kinds)


def sgd_numbers(
    step: int, lr: float, mom: float, wd: float, dampening: float, *kinds: bool
) -> tuple[float, ...]:
    "Return the numbers of an SGD step: rate, momentum, share of the gradient, decays."
    return lr, mom, 1 - dampening, wd, 1 - lr * wd


def sgd(p: Tensor, grad: Tensor, state: dict[str, Tensor], n: Tensor, flags: Flags) -> None:
    "Update by SGD with momentum and L2 regularisation."
    with_momentum, decays, nesterov, maximize = flags
    if maximize:
        grad = -grad
    if decays:
        grad = grad + p * n[3]
    if with_momentum:
        buffer = state['momentum_buffer'].mul_(n[1]).add_(grad * n[2])
        grad = grad + buffer * n[1] if nesterov else buffer
    p.sub_(grad * n[0])


def decoupled_sgd(
    p: Tensor, grad: Tensor, state: dict[str, Tensor], n: Tensor, flags: Flags
) -> None:
    "Update by SGD with a weight decay that shrinks the weights themselves."
    with_momentum, decays, *kinds = flags
    if decays:
        p.mul_(n[4])
    sgd(p, grad, state, n, (with_momentum, False, *kinds))


def adam_state(group: dict[str, Any]) -> tuple[str, ...]:
    "Name what Adam keeps of a parameter."
    return ('step', 'exp_avg', 'exp_avg_sq', *(['max_exp_avg_sq'] if group['amsgrad'] else []))


def adam_flags(lr: float, betas: tuple[float, float], wd: float, eps: float, *kinds: bool) -> Flags:
    "Return which terms an Adam step has."
    return (wd != 0, *kinds)


def adam_numbers(
    step: int,
    lr: float,
    betas: tuple[float, float],
    wd: float,
    eps: float,
    *kinds: bool,
) -> tuple[float, ...]:
    "Return the numbers of an Adam step, with its bias corrections."
    beta1, beta2 = betas
    return (
        lr / (1 - beta1**step),
        1 - beta1,
        beta2,
        1 - beta2,
        math.sqrt(1 - beta2**step),
        eps,
        wd,
        1 - lr * wd,
    )


def adam(p: Tensor, grad: Tensor, state: dict[str, Tensor], n: Tensor, flags: Flags) -> None:
    "Update by Adam or AdamW (Kingma and Ba, 2015, algorithm 1; Loshchilov and Hutter, 2019, algorithm 2)."
    decays, decoupled, amsgrad, maximize = flags
    if maximize:
        grad = -grad
    if decays and decoupled:
        p.mul_(n[7])
    elif decays:
        grad = grad + p * n[6]
    average = state['exp_avg'].lerp_(grad, n[1])
    squares = state['exp_avg_sq'].mul_(n[2]).add_(grad * grad * n[3])
    if amsgrad:
        squares = state['max_exp_avg_sq'].copy_(torch.maximum(state['max_exp_avg_sq'], squares))
    p.sub_(average / (squares.sqrt() / n[4] + n[5]) * n[0])


SGD_OPTIONS = ('lr', 'momentum', 'weight_decay', 'dampening', 'nesterov', 'maximize')
ADAM_OPTIONS = (
    'lr',
    'betas',
    'weight_decay',
    'eps',
    'decoupled_weight_decay',
    'amsgrad',
    'maximize',
)
ADAM = Rule(ADAM_OPTIONS, adam_state, adam_flags, adam_numbers, adam)

RULES: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.SGD: Rule(SGD_OPTIONS, sgd_state, sgd_flags, sgd_numbers, sgd),
    DecoupledSGD: Rule(SGD_OPTIONS, sgd_state, sgd_flags, sgd_numbers, decoupled_sgd),
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
}
