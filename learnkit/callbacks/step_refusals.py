# SPDX-License-Identifier: Apache-2.0
"""Reasons why a training step, or the optimizer's part of it, cannot be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from learnkit.callbacks.step_plan import has_tensor
from learnkit.callbacks.update_rules import RULES
from learnkit.engine.custom_batch import list_overrides
from learnkit.optim.wrapper import OptimWrapper

if TYPE_CHECKING:
    from learnkit.learner import Learner

RARE = ('amsgrad', 'dampening', 'differentiable', 'maximize')  # unsupported options
# attributes of modules and parameters, and of optimizers
HOOKS = (
    '_forward_pre_hooks _forward_hooks _backward_pre_hooks _backward_hooks '
    '_post_accumulate_grad_hooks'
).split()
OPTIMIZER_HOOKS = ('_optimizer_step_pre_hooks', '_optimizer_step_post_hooks')


def find_refusals(learn: Learner) -> Iterator[str]:
    "Yield the permanent conditions that rule out compiled passes, and with them a compiled step."
    for seam, holder in learn.seams.holders.items():
        if seam in ('model', 'loss', 'step'):
            yield f'{holder} holds the seam `{seam}` of the loop'
    if learn.seams.wrapper is not None:
        yield f'{type(learn.seams.wrapper).__name__} is called in place of the model'
    if isinstance(learn.model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        yield f'the model is a {type(learn.model).__name__}'
    devices = {str(p.device) for p in learn.opt.parameters() if p.requires_grad}
    if len(devices) != 1 or not devices.pop().startswith(('cpu', 'cuda')):
        yield 'what is trained is not all on one CPU or CUDA device'
    yield from find_hooks(learn)


def find_step_refusals(learn: Learner) -> Iterator[str]:
    "Yield the permanent conditions that rule out a compiled step of the optimizer."
    if '_step' in list_overrides(learn):
        yield f'{type(learn).__name__} has its own `_step`'
    if type(learn.opt).step is not OptimWrapper.step:
        yield f'{type(learn.opt).__name__} has its own `step`'
    if len(learn.opt.optimizers) > 1:
        yield f'there are {len(learn.opt.optimizers)} optimizers'
    for opt in learn.opt.optimizers.values():
        name = type(opt).__name__
        if any(getattr(opt, hooks, None) for hooks in OPTIMIZER_HOOKS):
            yield f'{name} has hooks'
        if type(opt) not in RULES:
            yield f'{name} is none of {", ".join(c.__name__ for c in RULES)}'
        else:
            yield from find_options(opt)


def find_options(opt: torch.optim.Optimizer) -> Iterator[str]:
    "Yield the options of an optimizer that a compiled step does not support."
    for group in opt.param_groups:
        yield from (f'{name} of {type(opt).__name__} is set' for name in RARE if group.get(name))
        if has_tensor(group[o] for o in RULES[type(opt)].options):
            yield f'a hyperparameter of {type(opt).__name__} is a tensor'


def find_hooks(learn: Learner) -> Iterator[str]:
    "Yield hooks and special parameters, which compiled passes would skip."
    hooked: list[tuple[str, Any]] = []
    for root in (m for m in (learn.model, learn.loss_func) if isinstance(m, nn.Module)):
        hooked += [(f'module {name or type(m).__name__}', m) for name, m in root.named_modules()]
    for name, p in learn.model.named_parameters():
        hooked.append((f'parameter {name}', p))
        if type(p) is not nn.Parameter or p.is_complex():
            yield f'parameter {name} is a {type(p).__name__} of {p.dtype}'
    for name, o in hooked:
        if any(getattr(o, hooks, None) for hooks in HOOKS):
            yield f'{name} has hooks'
