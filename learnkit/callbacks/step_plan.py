# SPDX-License-Identifier: Apache-2.0
"""Arguments of a compiled step: the tensors of model and optimizer, the numbers, the parts of callbacks.

A plan holds the arguments of `whole_step` as long as they are valid: `PassPlan` those of forward and
backward, `StepPlan` those of the optimizer's update as well. Only the numbers are copies: all other
tensors are those of the model, the optimizer and the callbacks."""

from __future__ import annotations

import struct
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from learnkit.callbacks.step_parts import Part, list_numbers, order_functions
from learnkit.callbacks.update_rules import RULES, Rule
from learnkit.callbacks.whole_step import Update
from learnkit.core.batch import tensors_in

if TYPE_CHECKING:
    from learnkit.learner import Learner


class PassPlan:
    "Arguments of `whole_step` for forward and backward, from `params` to `may_undo`."

    takes_step = False  # whether the compiled code updates the parameters

    def __init__(
        self,
        learn: Learner,
        parts: list[Part],  # parts of callbacks that are on
        part_states: list[dict[str, Any]],  # their states
        last: PassPlan | None = None,  # previous plan; its tensor of numbers is reused if it fits
    ) -> None:
        self.model = learn.model
        self.wrapper = learn.opt
        groups = [group for opt in learn.opt.optimizers.values() for group in opt.param_groups]
        self.n_groups = [(opt, len(opt.param_groups)) for opt in learn.opt.optimizers.values()]
        self.members = [(group, group['params'], len(group['params'])) for group in groups]
        self.trained = [(p, p.requires_grad) for group in groups for p in group['params']]
        self.params: list[nn.Parameter] = [p for p, is_trained in self.trained if is_trained]
        self.device = self.params[0].device

        self.parts = parts
        self.part_states = part_states
        self.keys = [state.keys() for state in part_states]
        self.update = self._make_update()
        n_numbers = len(self._list_own_numbers())
        self.names: list[tuple[str, ...]] = []  # entries of each part's state that are numbers
        places = []
        for state in part_states:
            names = list_numbers(state)
            self.names.append(names)
            places.append({name: n_numbers + i for i, name in enumerate(names)})
            n_numbers += len(names)
        self.host, self.numbers = self._make_numbers(n_numbers, last)
        code = 'd' if self.host.dtype == torch.float64 else 'f'
        self.packing = struct.Struct(f'{n_numbers}{code}')
        self.memory = self.host.numpy().data.cast('B')

        self.may_undo = any(part.functions.get('undo') for part in parts)
        functions = order_functions(parts)
        self.first_inputs = (self.params, self.update, self.numbers, functions)
        self.last_inputs = (places, self.may_undo)
        # these tensors keep their address, so that a CUDA graph need not copy them
        if self.device.type == 'cuda':
            for t in tensors_in([self.numbers, *self._list_tensors()]):
                torch._dynamo.mark_static_address(t)

    def _make_update(self) -> Update | None:
        "Return the arguments of the optimizer's update."
        return None

    def _list_tensors(self) -> list[Any]:
        "Return the tensors that keep their address, nested in any way."
        return [*self.params]

    def _list_own_numbers(self) -> list[float]:
        "Return the numbers of the optimizer."
        return []

    def _make_numbers(self, n: int, last: PassPlan | None) -> tuple[Tensor, Tensor]:
        "Return the tensor that numbers are written to, and the tensor on the device (the same on CPU)."
        n = max(n, 1)
        if last is not None and len(last.host) == n:
            return last.host, last.numbers
        is_double = self.params[0].dtype == torch.float64
        host = torch.zeros(n, dtype=torch.float64 if is_double else torch.float32)
        return host, host.to(self.device)

    def holds(self, learn: Learner) -> bool:
        "Return True if the parameters are unchanged, apart from hooks."
        if learn.opt is not self.wrapper or learn.model is not self.model:
            return False
        for opt, n in self.n_groups:
            if len(opt.param_groups) != n:
                return False
        for group, params, n in self.members:
            if group['params'] is not params or len(params) != n:
                return False
        return self._holds_parameters()

    def _holds_parameters(self) -> bool:
        "Return True if the same parameters are trained."
        return all(p.requires_grad is is_trained for p, is_trained in self.trained)

    def is_current(self) -> bool:
        "Return True if all steps since the plan was made were counted."
        return True

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
        values = self._list_own_numbers()
        for state, names in zip(self.part_states, self.names, strict=True):
            values += [state[name] for name in names]
        self.packing.pack_into(self.memory, 0, *values)
        if self.numbers is not self.host:
            self.numbers.copy_(self.host, non_blocking=True)

    def list_inputs(self) -> tuple[Any, ...]:
        "Return the arguments of the step from `params` to `may_undo`."
        others = []
        for state, names in zip(self.part_states, self.names, strict=True):
            is_number = names.__contains__
            others.append({k: v for k, v in state.items() if not is_number(k)} if names else state)
        return (*self.first_inputs, others, *self.last_inputs)

    def end_step(self, grads: list[Tensor | None]) -> None:
        "Add the gradients to those that the parameters have."
        pending = []
        new = []
        for p, grad in zip(self.params, grads, strict=True):
            if grad is None:
                continue
            if p.grad is None:
                p.grad = grad
            else:
                pending.append(p.grad)
                new.append(grad)
        if new:
            torch._foreach_add_(pending, new)


class StepPlan(PassPlan):
    "Arguments of `whole_step` with the update of a single optimizer."

    takes_step = True
    opt: torch.optim.Optimizer

    @override
    def _make_update(self) -> Update:
        (self.opt,) = self.wrapper.optimizers.values()
        self.n_steps = self.wrapper.n_steps
        self.state = self.opt.state
        self.n_states = len(self.state)
        self.rule = RULES[type(self.opt)]
        self.rows: list[Row] = []
        states, rows = self._list_states()
        counters = [s['step'] for s in states if s and 'step' in s]
        # counters on another device are advanced outside of the compiled code
        self.counters = counters if any(c.device != self.device for c in counters) else []
        width = len(self.rows[0].numbers())
        return Update(
            self.rule.update,
            states,
            [slice(row * width, (row + 1) * width) for row in rows],
            [self.rows[row].flags for row in rows],
            bool(counters) and not self.counters,
        )

    def _list_states(self) -> tuple[list[dict[str, Any] | None], list[int]]:
        "Return the optimizer's state and the row of numbers of each trained parameter."
        states = []
        rows = []
        for group in self.opt.param_groups:
            for p in group['params']:
                if not p.requires_grad:
                    continue
                state = self._state_of(p, group)
                step = int(state['step']) if state and 'step' in state else 0
                states.append(state)
                rows.append(self._row_of(group, step))
        return states, rows

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

    @override
    def _list_tensors(self) -> list[Any]:
        assert self.update is not None
        return [*self.params, *self.update.states]

    @override
    def _list_own_numbers(self) -> list[float]:
        values: list[float] = []
        for row in self.rows:
            values += row.numbers()
        return values

    @override
    def holds(self, learn: Learner) -> bool:
        "Return True if parameters, states and terms of the update are unchanged, apart from hooks."
        opt = self.opt
        if not super().holds(learn):
            return False
        if opt.state is not self.state or len(opt.state) != self.n_states:
            return False
        return all(map(Row.holds, self.rows))

    @override
    def _holds_parameters(self) -> bool:
        "Return True if the same parameters are trained, and none has a gradient already."
        for p, is_trained in self.trained:  # noqa: SIM110 - faster than `all`
            if p.grad is not None or p.requires_grad is not is_trained:
                return False
        return True

    @override
    def is_current(self) -> bool:
        return self.n_steps == self.wrapper.n_steps

    @override
    def end_step(self, grads: list[Tensor | None]) -> None:
        "Count the step."
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
