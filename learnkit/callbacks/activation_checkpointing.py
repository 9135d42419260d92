# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: activations are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from learnkit.core.errors import ModelError
from learnkit.engine.callback import Callback

__all__ = ['ActivationCheckpointing']


class ActivationCheckpointing(Callback):
    """Keep only the inputs of modules in training, and run the modules again in the backward pass.

    That takes the memory of one module's activations at a time, for the time of another forward
    pass. Weights, losses and dropout masks are those of training without it: the random generators
    are restored for the second run. It works with all strategies of `learn.distributed`. No state.

    Raises `ModelError` for a model without such modules, and for modules with running statistics,
    which the second run would update again.

    Source: Chen et al., 2016, by `torch.utils.checkpoint`.

    >>> from learnkit.testing import synth_learner
    >>> blocks = nn.Sequential(*[nn.Sequential(nn.Linear(1, 1), nn.Tanh()) for _ in range(3)])
    >>> learn = synth_learner(model=blocks, cbs=ActivationCheckpointing(nn.Tanh))
    >>> with learn.no_bar(): learn.fit(1)
    """

    needs_events = False

    def __init__(
        self,
        modules: type | tuple[type, ...] | Callable[[nn.Module], bool],  # class(es), or a function
    ) -> None:
        self.modules = modules
        self._wrapped: list[tuple[nn.Module, Any]] = []  # modules, and their own `forward` before

    def before_fit(self) -> None:
        if not self.learn.fitting or self._wrapped:
            return
        for module in self._select():
            self._wrapped.append((module, vars(module).get('forward')))
            module.forward = partial(run_twice, module.forward)

    def cleanup(self) -> None:
        while self._wrapped:
            module, forward = self._wrapped.pop()
            del module.forward
            if forward is not None:
                module.forward = forward

    def _select(self) -> list[nn.Module]:
        "Return the modules, of nested ones the outer."
        model, which = self.learn.model, self.modules
        if isinstance(which, (type, tuple)):
            found = [m for m in model.modules() if isinstance(m, which)]
        else:
            found = [m for m in model.modules() if which(m)]
        inner = {id(child) for m in found for child in m.modules() if child is not m}
        found = [m for m in found if id(m) not in inner]
        if not found:
            raise ModelError(
                f'{self}: {type(model).__name__} has no such modules. Give their class, `modules=Block`.'
            )
        for m in found:
            for child in m.modules():
                if getattr(child, 'track_running_stats', False):
                    raise ModelError(
                        f'{self}: {type(m).__name__} has running statistics ({type(child).__name__}), which '
                        'the second run would update again. Select modules without.'
                    )
        return found


def run_twice(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    "Run a module without keeping its activations, if a backward pass will follow."
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
