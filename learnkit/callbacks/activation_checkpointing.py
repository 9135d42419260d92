# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: activations are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from learnkit.core.errors import ModelError
from learnkit.core.model import BufferCopy, EarlierBuffers, copy_buffers
from learnkit.engine.callback import Callback

__all__ = ['ActivationCheckpointing']


class ActivationCheckpointing(Callback):
    """Keep only the inputs of modules in training, and run the modules again in the backward pass.

    That takes the memory of one module's activations at a time, for the time of another forward
    pass. Weights, losses and dropout masks equal those of training without it: the random generators
    are restored for the second run, which starts with the buffers of the first one and leaves no
    trace in them: running statistics are updated once. It works with all strategies of
    `learn.distributed`. No state.

    Raises `ModelError` for a model without such modules, and for `RReLU` in them, which torch trains wrongly there.

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
            module.forward = partial(run_twice, module, module.forward)

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
                f'{self}: {type(model).__name__} has no such modules. Pass their class, `modules=Block`.'
            )
        inside = [child for m in found for child in m.modules() if isinstance(child, nn.RReLU)]
        if inside:
            raise ModelError(
                f'{self}: {type(model).__name__} has RReLU in a checkpointed module, which torch {torch.__version__} '
                'trains with wrong gradients: use LeakyReLU, or leave the module out.'
            )
        return found


def run_twice(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module without keeping its activations, if a backward pass will follow.

    The second run has the buffers from before the first one. A compiled model needs no copies: its graph changes
    buffers once.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    copies = [] if torch.compiler.is_compiling() else copy_buffers(module)
    if not copies:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    contexts = partial(make_contexts, copies)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def make_contexts(copies: list[BufferCopy]) -> tuple[Any, Any]:
    "Return the contexts of the first and of the second run of a module."
    return nullcontext(), EarlierBuffers(copies)
