# SPDX-License-Identifier: Apache-2.0
"""Sharpness-aware minimization: step with the gradient at the worst point nearby."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from learnkit.callbacks.accumulation import GradientAccumulation
from learnkit.callbacks.training import bad_option
from learnkit.comm.dtensor import local_shards, total_norm
from learnkit.core.autocast import drop_casts
from learnkit.core.errors import OptionError
from learnkit.core.model import BufferCopy, copy_buffers, restore_buffers
from learnkit.core.validation import is_number
from learnkit.engine.callback import Callback
from learnkit.engine.custom_batch import make_repeat_error, repeat_passes, replaces_batch

EPS = 1e-12  # added to the norm in the divisor


class SAM(Callback):
    """Step with the gradient at `w + e`, where `e` has length `rho` along the gradient `g` at weights `w`.

    `e = rho * g / |g|` (Foret et al., "Sharpness-aware minimization for efficiently improving
    generalization", 2021, eq. 2). Every step costs a second forward and backward pass over the same
    batch, with its events, in microbatches if these are used; dropout draws new masks. Afterwards
    the weights and the model's buffers (running statistics) are restored exactly, and `pred` and
    `loss`, which are recorded and measured, belong to the first pass. Clipping acts on the
    second gradient.

    No state.

    Raises `OptionError` for invalid options, and before training: with `GradientAccumulation` (the
    second pass would see the last batch only), with an optimizer that needs a closure, and for a
    Learner whose `_do_one_batch` runs its own passes. Raises `LossError` if `optimize` was not
    given a function.

    >>> SAM(rho=0.1).rho
    0.1
    """

    # first callback of a step: unscaling and clipping act on the second gradient
    order = 5
    run_valid = False
    run_in = 'fit'

    def __init__(
        self,
        rho: float = 0.05,  # norm of the perturbation
    ) -> None:
        if not is_number(rho) or not 0 <= rho < float('inf'):
            raise bad_option(self, 'a distance, 0 or more', rho=rho)
        self.rho = float(rho)
        # parameters and their values, while they are perturbed
        self._weights: list[tuple[Tensor, Tensor]] = []
        self._buffers: list[BufferCopy] = []  # buffers before the second pass

    def before_fit(self) -> None:
        learn = self.learn
        if any(isinstance(cb, GradientAccumulation) for cb in learn.cbs):
            raise OptionError(
                'SAM with GradientAccumulation would perturb for the last batch alone. Use bigger '
                'batches with `Learner(microbatch=)`, which has the same gradients.'
            )
        if learn.opt.needs_closure:
            raise OptionError(
                'SAM steps once with the gradient nearby; an optimizer that evaluates the loss again (LBFGS) '
                'moves on from there. Use SGD or Adam.'
            )
        if replaces_batch(learn):
            raise OptionError(
                f'SAM computes the loss a second time, which the `_do_one_batch` of '
                f'{type(learn).__name__} does itself. Write it as `train_batch`, with '
                '`self.optimize(f)`, where f() computes the loss.'
            )

    def before_step(self) -> None:
        learn = self.learn
        custom_batch = learn.parts.custom_batch
        params = [p for p in learn.step_parameters if p.grad is not None]
        if not params:
            return
        if custom_batch.call is not None and custom_batch.call.compute is None:
            raise make_repeat_error('SAM')
        self._repeat_passes(params)

    def _repeat_passes(self, params: list[Any]) -> None:
        "Replace the gradients at the weights by the gradients at the perturbed weights."
        learn = self.learn
        recorded = {name: learn.__dict__.get(name) for name in ('pred', 'loss', 'loss_grad')}
        self._weights = [(p, p.detach().clone()) for p in params]
        self._buffers = copy_buffers(learn.model)
        try:
            self._perturb(params)
            learn.opt.zero_grad(only=learn.turn)
            repeat_passes(learn)
        finally:
            self._restore()
        learn.__dict__.update(recorded)

    @torch.no_grad()
    def _perturb(self, params: list[Any]) -> None:
        "Move the weights by `rho` along the gradient."
        weights = local_shards(params)
        grads = local_shards(p.grad for p in params)
        norm = total_norm(p.grad for p in params)
        scale = self.rho / (norm + EPS)
        torch._foreach_add_(weights, [grad * scale for grad in grads])
        drop_casts()

    @torch.no_grad()
    def _restore(self) -> None:
        for p, value in self._weights:
            p.copy_(value)
        drop_casts()
        restore_buffers(self._buffers)
        self._weights = []
        self._buffers = []

    def cleanup(self) -> None:
        self._restore()
