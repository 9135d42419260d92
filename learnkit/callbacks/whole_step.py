# SPDX-License-Identifier: Apache-2.0
"""A whole training step as one function for torch.compile, and its arguments.

The module has two parts: the function, which is traced; and its arguments (`Plan`), which are the
model's and the optimizer's own tensors, the numbers of the step, and the parts of callbacks.
`learnkit.callbacks.compile` decides when the compiled step runs, `update_rules` has the rules of the
optimizers, and `step_parts` collects what callbacks offer.

All numbers (rates, bias corrections, the decay of an average) are passed in one small tensor, so
that they can change at every step without recompilation."""

from __future__ import annotations

import struct
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from learnkit.callbacks.step_parts import Functions, Part, list_numbers, order_functions
from learnkit.callbacks.update_rules import RULES, Flags, Rule
from learnkit.core.batch import call_by_name, tensors_in, to_detach, unpack_output

if TYPE_CHECKING:
    from learnkit.learner import Learner

# prediction, loss, a copy of the loss, its parts, what callbacks have found
Outputs = tuple[Any, Tensor, Tensor, dict[str, Tensor] | None, list[dict[str, Any]]]


class NotCompiled(Exception):
    "Raised if no compiled code exists for the arguments."


def whole_step(
    model: nn.Module,
    loss_func: Callable[..., Any] | None,
    update: Callable[..., None],  # update rule of the optimizer for one parameter
    params: list[nn.Parameter],
    states: list[dict[str, Tensor] | None],  # by parameter; None: never had a gradient
    rows: list[slice],  # place in `numbers` for each parameter
    flags: list[Flags],  # terms of the update rule, by parameter
    numbers: Tensor,  # all numbers of the step (number,)
    counts: bool,  # whether to advance the optimizer's counts of steps
    functions: Functions,  # what callbacks do, by event
    given: list[dict[str, Any]],  # state of each part, without its numbers
    places: list[dict[str, int]],  # places of its numbers
    may_undo: bool,  # whether a part may refuse the step, by an entry `accept` of its state
    names: tuple[Any, ...] | None,  # keys of a single input whose entries are passed by name
    xb: tuple[Any, ...],
    yb: tuple[Any, ...],
) -> Outputs:
    "Run forward, loss, backward and update, with the parts of callbacks."
    if not torch.compiler.is_compiling():
        raise NotCompiled
    own = [
        {**values, **{name: numbers[i] for name, i in found.items()}}
        for values, found in zip(given, places, strict=True)
    ]
    before = keep_values([params, states, given, list(model.buffers())]) if may_undo else []
    for f, i in functions['before_pred']:
        xb, yb = f(xb, yb, own[i])

    def predict() -> tuple[Any, Any]:
        out = call_by_name(model, xb, names)
        for f, i in functions['after_pred']:
            out = f(out, own[i])
        pred, loss = unpack_output(out)
        if loss_func is None or (not yb and loss is not None):
            return pred, loss
        if not functions['loss']:
            return pred, loss_func(pred, *yb)
        ((f, i),) = functions['loss']
        return pred, f(loss_func, pred, yb, own[i])

    pred, loss = run_within(functions['forward'], own, predict)
    parts = None
    if not isinstance(loss, Tensor):
        parts = {name: part.detach() for name, part in loss.items()}
        loss = loss['loss'] if 'loss' in loss else sum(loss.values())
    minimized = loss
    for f, i in functions['after_loss']:
        pred, minimized = f(pred, minimized, own[i])
    grads = torch.autograd.grad(minimized, params, allow_unused=True)

    with torch.no_grad():
        trained = []
        for p, grad, state, row, terms in zip(params, grads, states, rows, flags, strict=True):
            if grad is None and not state:
                continue  # the parameter is not part of the loss
            if grad is None or state is None:
                raise RuntimeError('the parameters that get a gradient change')
            trained.append((p, grad, state, numbers[row], terms))
        final = [grad for _, grad, *_ in trained]
        for f, i in functions['before_step']:
            final = f(final, own[i])
        for (p, _, state, n, terms), grad in zip(trained, final, strict=True):
            update(p, grad, state, n, terms)
            if counts:
                state['step'].add_(1)
        for f, i in functions['after_step']:
            f([p for p, *_ in trained], own[i])
        if may_undo:
            restore_unless([values['accept'] for values in own if 'accept' in values], before)
        found = [
            {name: value for name, value in values.items() if name not in known and name not in at}
            for values, known, at in zip(own, given, places, strict=True)
        ]
        return (
            to_detach(pred, cpu=False),
            minimized.detach(),
            loss.detach().clone(),
            parts,
            to_detach(found, cpu=False),
        )


def run_within(
    contexts: tuple[tuple[Callable[..., Any], int], ...],
    own: list[dict[str, Any]],
    f: Callable[[], Any],
) -> Any:
    "Run a function within the contexts of callbacks, of which the first is the outermost."
    if not contexts:
        return f()
    make, i = contexts[0]
    with make(own[i]):
        return run_within(contexts[1:], own, f)


def keep_values(values: Any) -> list[tuple[Tensor, Tensor]]:
    "Return the tensors that a step changes, with copies of them."
    return [(t, t.clone()) for t in tensors_in(values)]


def restore_unless(accepted: list[Tensor], before: list[tuple[Tensor, Tensor]]) -> None:
    "Undo the step if a callback does not accept it; no branch, so that nothing waits for the device."
    holds = torch.stack(accepted).all()
    for t, value in before:
        t.copy_(torch.where(holds, t, value))


# ---------------------------------------------------------------------------------------- arguments


class Plan:
    """Arguments of `whole_step` from `update` to `may_undo`, as long as they are valid.

    Only the numbers are copies: all other tensors are those of the optimizer and the callbacks.
    """

    def __init__(
        self,
        learn: Learner,
        parts: list[Part],  # parts of callbacks that are on
        part_states: list[dict[str, Any]],  # their states
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

        self.parts = parts
        self.part_states = part_states
        self.keys = [state.keys() for state in part_states]
        self.rows: list[Row] = []
        params, states, rows = self._list_parameters()
        self.device = params[0].device
        width = len(self.rows[0].numbers())
        n_numbers = width * len(self.rows)
        self.names: list[tuple[str, ...]] = []  # entries of each part's state that are numbers
        places = []
        for state in part_states:
            names = list_numbers(state)
            self.names.append(names)
            places.append({name: n_numbers + i for i, name in enumerate(names)})
            n_numbers += len(names)
        self.host, self.numbers = self._make_numbers(n_numbers, params[0].dtype, last)
        code = 'd' if self.host.dtype == torch.float64 else 'f'
        self.packing = struct.Struct(f'{n_numbers}{code}')
        self.memory = self.host.numpy().data.cast('B')

        counters = [s['step'] for s in states if s and 'step' in s]
        # counters on another device are advanced outside of the compiled code
        self.counters = counters if any(c.device != self.device for c in counters) else []
        self.first_inputs = (
            self.rule.update,
            params,
            states,
            [slice(row * width, (row + 1) * width) for row in rows],
            [self.rows[row].flags for row in rows],
            self.numbers,
            bool(counters) and not self.counters,
            order_functions(parts),
        )
        self.may_undo = any(part.functions.get('undo') for part in parts)
        self.last_inputs = (places, self.may_undo)
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

    def _make_numbers(self, n: int, dtype: torch.dtype, last: Plan | None) -> tuple[Tensor, Tensor]:
        "Return the tensor that numbers are written to, and the tensor on the device (the same on CPU)."
        if last is not None and len(last.host) == n:
            return last.host, last.numbers
        host = torch.zeros(n, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
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

    def read_parts(self) -> bool:
        "Read the states of the parts for a step; return False if their entries have changed."
        states = []
        for part, keys in zip(self.parts, self.keys, strict=True):
            state = part.read_state()
            if state is None or state.keys() != keys:
                return False
            states.append(state)
        self.part_states = states
        return True

    def write_numbers(self) -> None:
        "Pack the numbers of the next step into their tensor."
        values: list[float] = []
        for row in self.rows:
            values += row.numbers()
        for state, names in zip(self.part_states, self.names, strict=True):
            values += [state[name] for name in names]
        self.packing.pack_into(self.memory, 0, *values)
        if self.numbers is not self.host:
            self.numbers.copy_(self.host, non_blocking=True)

    def list_inputs(self) -> tuple[Any, ...]:
        "Return the arguments of the step from `update` to `may_undo`."
        others = []
        for state, names in zip(self.part_states, self.names, strict=True):
            is_number = names.__contains__
            others.append({k: v for k, v in state.items() if not is_number(k)} if names else state)
        return (*self.first_inputs, others, *self.last_inputs)

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
