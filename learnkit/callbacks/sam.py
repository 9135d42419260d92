"""Sharpness-aware minimisation: step with the gradient at the worst point nearby."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from learnkit.callbacks.accumulation import GradientAccumulation
from learnkit.callbacks.training import bad_option, is_count, is_number
from learnkit.core.dtensor import locals_of, total_norm
from learnkit.core.errors import OptionError
from learnkit.engine.callback import Callback
from learnkit.engine.own_loop import make_repeat_error, replaces_batch

__all__ = ['SAM']

EPS = 1e-12  # added to the norm that is divided by


class SAM(Callback):
    """Step with the gradient at `w + e`, where `e` leads `rho` far up the gradient `g` at the weights `w`.

    `e = rho * g / |g|` (Foret et al., "Sharpness-aware minimization for efficiently improving generalization", 2021,
    eq. 2); adaptive, `e = rho * w^2 g / |w g|` (Kwon et al., "ASAM", 2021, eq. 8, with `T = |w|`). Every such step
    costs a second forward and backward pass, with its events, over the same batch, in pieces under microbatches;
    dropout draws anew in it. The weights and the model's buffers (running statistics) are then exactly those of before,
    `pred` and `loss` those of the first pass, which is what is recorded and measured. Clipping acts on the second
    gradient.

    Checkpointed: the number of steps, which `interval` counts, of each optimizer that
    `optimize(only=)` names.

    Raises `OptionError` for bad options, and before training together with `GradientAccumulation`
    (the second pass would see the last batch alone) or an optimizer that needs a closure, and for a
    Learner that overrides `_do_one_batch` with passes of its own; `LossError` where `optimize` was
    not given a function.

    >>> SAM(rho=0.1).rho
    0.1
    """

    # first of all at a step: unscaling and clipping are for the second gradient
    order, run_valid = 5, False

    def __init__(
        self,
        rho: float = 0.05,  # how far to go: the norm of the perturbation
        adaptive: bool = False,  # relative to each weight (ASAM; `rho` is 10 to 40 times larger)
        interval: int = 1,  # do so at every `interval`-th step; the others are ordinary
    ) -> None:
        if not is_number(rho) or not 0 <= rho < float('inf'):
            raise bad_option(self, 'a distance, 0 or more', rho=rho)
        if not is_count(interval):
            raise bad_option(self, 'a whole number of steps, 1 or more', interval=interval)
        self.rho, self.adaptive, self.interval = float(rho), adaptive, int(interval)
        self._n: dict[str, int] = {}  # steps so far, by the optimizer whose turn it was
        self._before: list[
            tuple[Tensor, Tensor]
        ] = []  # parameters and their values, while they are perturbed
        self._buffers: list[
            tuple[Any, str, Tensor, Tensor]
        ] = []  # likewise, with module and name: it may replace them

    def before_fit(self) -> None:
        learn = self.learn
        if not learn.fitting:
            return
        if any(isinstance(cb, GradientAccumulation) for cb in learn.cbs):
            raise OptionError(
                'SAM with GradientAccumulation would perturb for the last batch alone. Use bigger '
                'batches with `Learner(microbatch=)`, which has the same gradients.'
            )
        if learn.opt.needs_closure:
            self.on_reevaluation()
        if replaces_batch(learn):
            raise OptionError(
                f'SAM computes the loss a second time, which the `_do_one_batch` of '
                f'{type(learn).__name__} does by itself. Write it as `train_batch`, with '
                '`self.optimize(f)`, where f() computes the loss.'
            )

    def on_reevaluation(self) -> None:
        "Refuse an optimizer whose steps evaluate the loss again."
        raise OptionError(
            'SAM steps once with the gradient nearby; an optimizer that evaluates the loss again (LBFGS) '
            'moves on from there. Use SGD or Adam.'
        )

    def before_step(self) -> None:
        learn = self.learn
        turn = learn.turn or ''
        n = self._n.get(turn, 0)
        self._n[turn] = n + 1
        params = [p for p in learn.step_parameters if p.grad is not None]
        if n % self.interval or not params:
            return
        if learn.run.turn is not None and learn.run.turn.compute is None:
            raise make_repeat_error('SAM')
        self._second_pass(params)

    def _second_pass(self, params: list[Any]) -> None:
        "Put the gradients at the perturbed weights in place of those at the weights."
        learn = self.learn
        recorded = {name: learn.__dict__.get(name) for name in ('pred', 'loss', 'loss_grad')}
        self._before = [(p, p.detach().clone()) for p in params]
        self._buffers = [
            (m, key, b, b.detach().clone())
            for m in learn.model.modules()
            for key, b in m._buffers.items()
            if b is not None
        ]
        try:
            self._perturb(params)
            learn.opt.zero_grad(only=learn.turn)
            learn.run.repeating = True
            learn.repeat_passes()
        finally:
            learn.run.repeating = False
            self._restore()
        learn.__dict__.update(recorded)

    @torch.no_grad()
    def _perturb(self, params: list[Any]) -> None:
        "Go `rho` far up the gradient."
        weights, grads = locals_of(params), locals_of(p.grad for p in params)
        if not self.adaptive:
            up, norm = grads, total_norm(p.grad for p in params)
        else:
            norm = total_norm(
                params, mine=list(torch._foreach_mul(torch._foreach_abs(weights), grads))
            )
            up = list(torch._foreach_mul(torch._foreach_mul(weights, weights), grads))
        torch._foreach_add_(weights, torch._foreach_mul(up, self.rho / (norm + EPS)))

    @torch.no_grad()
    def _restore(self) -> None:
        for p, value in self._before:
            p.copy_(value)
        for m, key, buffer, value in self._buffers:
            m._buffers[key] = buffer.copy_(value)
        self._before, self._buffers = [], []

    def cleanup(self) -> None:
        self._restore()

    def state_dict(self) -> dict[str, Any]:
        "Return the number of steps so far, by optimizer."
        named = {turn: n for turn, n in self._n.items() if turn}
        return {'n': self._n.get('', 0), **({'turns': named} if named else {})}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Go on counting from there."
        self._n = {'': sd['n'], **sd.get('turns', {})}
