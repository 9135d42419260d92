# SPDX-License-Identifier: Apache-2.0
"""A training step as one function for torch.compile: forward, loss, backward, update.

Everything in this module is traced. `learnkit.callbacks.step_plan` has the arguments,
`update_rules` the updates of the optimizers, and `step_parts` the functions of callbacks. Without an
update the function ends after the backward pass, and returns the gradients.

All numbers (rates, bias corrections, the decay of an average) are passed in one small tensor, so
that they can change at every step without recompilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from learnkit.callbacks.step_parts import Functions
from learnkit.callbacks.update_rules import Flags
from learnkit.core.batch import call_by_name, children_of, rebuild, tensors_in, unpack_output

Contexts = tuple[tuple[Callable[..., Any], int], ...]
# prediction, loss to minimize, loss, its parts, what callbacks have found, gradients
Outputs = tuple[
    Any, Tensor, Tensor, dict[str, Tensor] | None, list[dict[str, Any]], list[Tensor | None]
]


class NotCompiled(Exception):
    "Raised if no compiled code exists for the arguments."


class Update(NamedTuple):
    "Update of the parameters by the optimizer, and its arguments, which are lists by parameter."

    rule: Callable[..., None]  # updates one parameter
    states: list[dict[str, Tensor] | None]  # None: the parameter never had a gradient
    rows: list[slice]  # place in the tensor of numbers
    flags: list[Flags]  # terms of the rule
    counts: bool  # whether to advance the optimizer's counts of steps


class OutputLoss:
    """Base of a loss function that gets the whole output of the model, and scales the loss itself.

    A loss that functions of `after_loss` return is not used."""

    def __call__(self, output: Any) -> Tensor:
        "Return the loss."
        raise NotImplementedError

    def scale(self, loss: Tensor) -> Tensor:
        "Return the loss to minimize."
        raise NotImplementedError


def whole_step(
    model: nn.Module,
    loss_func: Callable[..., Any] | None,
    params: list[nn.Parameter],
    update: Update | None,  # None: return the gradients
    numbers: Tensor,  # all numbers of the step (number,)
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
    own = add_numbers(given, places, numbers)
    changed = [] if update is None else [params, update.states]
    before = keep_values([*changed, given, list(model.buffers())]) if may_undo else []

    pred, loss, losses = compute_loss(model, loss_func, functions, own, names, xb, yb)
    pred, minimized = change_loss(pred, loss, loss_func, functions, own)
    grads = torch.autograd.grad(minimized, params, allow_unused=True)

    with torch.no_grad():
        if update is not None:
            update_parameters(params, grads, update, numbers, functions, own)
        accepted = [values['accept'] for values in own if 'accept' in values]
        if may_undo and accepted:
            restore_unless(accepted, before)
        found = list_found(own, given, places)
        return (
            detach_tensors(pred),
            minimized.detach(),
            loss.detach().clone(),
            losses,
            detach_tensors(found),
            list(grads) if update is None else [],
        )


def add_numbers(
    given: list[dict[str, Any]], places: list[dict[str, int]], numbers: Tensor
) -> list[dict[str, Any]]:
    "Return the state of each part with its numbers."
    return [
        {**values, **{name: numbers[i] for name, i in found.items()}}
        for values, found in zip(given, places, strict=True)
    ]


def compute_loss(
    model: nn.Module,
    loss_func: Callable[..., Any] | None,
    functions: Functions,
    own: list[dict[str, Any]],  # state of each part
    names: tuple[Any, ...] | None,
    xb: tuple[Any, ...],
    yb: tuple[Any, ...],
) -> tuple[Any, Tensor, dict[str, Tensor] | None]:
    "Return prediction, loss and named parts of the loss of a batch."
    for f, i in functions['before_pred']:
        xb, yb = f(xb, yb, own[i])

    def run_model() -> tuple[Any, Any]:
        out = call_by_name(model, xb, names)
        for f, i in functions['after_pred']:
            out = f(out, own[i])
        if isinstance(loss_func, OutputLoss):
            return out, loss_func(out)
        pred, loss = unpack_output(out)
        if loss_func is None or (not yb and loss is not None):
            return pred, loss
        if not functions['loss']:
            return pred, loss_func(pred, *yb)
        ((f, i),) = functions['loss']
        return pred, f(loss_func, pred, yb, own[i])

    pred, loss = run_within(functions['forward'], own, run_model)
    if isinstance(loss, Tensor):
        return pred, loss, None
    losses = {name: part.detach() for name, part in loss.items()}
    return pred, loss['loss'] if 'loss' in loss else sum(loss.values()), losses


def change_loss(
    pred: Any,
    loss: Tensor,
    loss_func: Callable[..., Any] | None,
    functions: Functions,
    own: list[dict[str, Any]],  # state of each part
) -> tuple[Any, Tensor]:
    "Return the prediction and the loss to minimize, as callbacks change them."
    minimized = loss
    for f, i in functions['after_loss']:
        pred, minimized = f(pred, minimized, own[i])
    if isinstance(loss_func, OutputLoss):
        minimized = loss_func.scale(loss)
    for f, i in functions['before_backward']:
        minimized = f(minimized, own[i])
    return pred, minimized


def run_within(contexts: Contexts, own: list[dict[str, Any]], f: Callable[[], Any]) -> Any:
    "Run a function within the contexts of callbacks, of which the first is the outermost."
    if not contexts:
        return f()
    make, i = contexts[0]
    with make(own[i]):
        return run_within(contexts[1:], own, f)


def update_parameters(
    params: list[nn.Parameter],
    grads: tuple[Tensor | None, ...],
    update: Update,
    numbers: Tensor,
    functions: Functions,
    own: list[dict[str, Any]],
) -> None:
    "Update the parameters that have a gradient, in place, between the functions around a step."
    trained = []
    arguments = zip(params, grads, update.states, update.rows, update.flags, strict=True)
    for p, grad, state, row, terms in arguments:
        if grad is None and not state:
            continue  # the parameter is not part of the loss
        if grad is None or state is None:
            raise RuntimeError('the parameters that get a gradient change')
        trained.append((p, grad, state, numbers[row], terms))
    final = [grad for _, grad, *_ in trained]
    for f, i in functions['before_step']:
        final = f(final, own[i])
    for (p, _, state, n, terms), grad in zip(trained, final, strict=True):
        update.rule(p, grad, state, n, terms)
        if update.counts:
            state['step'].add_(1)
    for f, i in functions['after_step']:
        f([p for p, *_ in trained], own[i])


def keep_values(values: Any) -> list[tuple[Tensor, Tensor]]:
    "Return the tensors that a step changes, with copies of them."
    return [(t, t.clone()) for t in tensors_in(values)]


def restore_unless(accepted: list[Tensor], before: list[tuple[Tensor, Tensor]]) -> None:
    "Undo the step if a callback does not accept it; no branch, so that nothing waits for the device."
    holds = torch.stack(accepted).all()
    for t, value in before:
        t.copy_(torch.where(holds, t, value))


def list_found(
    own: list[dict[str, Any]], given: list[dict[str, Any]], places: list[dict[str, int]]
) -> list[dict[str, Any]]:
    "Return the entries that functions have added to the state of each part."
    return [
        {name: value for name, value in values.items() if name not in known and name not in at}
        for values, known, at in zip(own, given, places, strict=True)
    ]


def detach_tensors(b: Any) -> Any:
    "Return a nested structure with its tensors detached; torch.compile cannot compare tuples by identity."
    if isinstance(b, Tensor):
        return b.detach()
    children = children_of(b)
    return b if children is None else rebuild(b, [detach_tensors(o) for o in children])
