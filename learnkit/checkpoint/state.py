# SPDX-License-Identifier: Apache-2.0
"""Collect the complete training state of a Learner. `checkpoint/resume.py` restores it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from learnkit.checkpoint.buffers import collect_loose_buffers, list_persistent
from learnkit.checkpoint.host import copy_to_host
from learnkit.checkpoint.optimizer_state import encode_optimizer
from learnkit.checkpoint.weights import collect_module_state
from learnkit.comm.dtensor import gather_full_state
from learnkit.core.errors import CheckpointError
from learnkit.core.model import bare_model
from learnkit.core.plain import as_plain
from learnkit.core.random import capture_own, capture_rng
from learnkit.data.position import describe_drawn
from learnkit.engine.callback_state import collect_nondeterministic_state
from learnkit.engine.fields import SAVED
from learnkit.engine.resumed_run import SAVE_POINTS, checkpoint_point
from learnkit.engine.traits import trait_of

if TYPE_CHECKING:
    from learnkit.learner import Learner


def checkpoint_state(learn: Learner) -> dict[str, Any]:
    "Return the complete training state, copied to host memory, as plain values and tensors."
    if learn.run.depth and not checkpoint_point(learn):
        raise CheckpointError(
            'checkpoint_state() in the middle of a run: no run could resume from there. Call it at '
            'batch_checkpoint, epoch_checkpoint or iteration_checkpoint.'
        )
    return copy_to_host(gather_full_state(collect_state(learn, checkpoint_point(learn))))


def collect_state(learn: Learner, point: str) -> dict[str, Any]:
    "Return the state of a checkpoint at a point of the loop. Its tensors are not copied."
    opt = learn.opt
    params = [] if opt is None else list(opt.parameters())
    within_epoch = SAVE_POINTS.get(point) == 'batch'
    state = {
        **collect_trained(learn),
        'buffers': collect_loose_buffers(learn.model),
        'persistent': list_persistent(learn.model),
        'loss_buffers': collect_loose_buffers(learn.loss_func),
        'generators': {name: capture_own(owner) for name, owner in list_owners(learn)},
        'grads': {str(i): p.grad for i, p in enumerate(params) if p.grad is not None},
        'frozen': collect_frozen(learn, params),
        'loop': _collect_loop_state(learn, point),
        'rng': capture_rng(),
        'position': learn.parts.positions.state_dict(learn, within_epoch) if point else None,
        'callbacks': learn.callback_states(),
        'nondeterministic_state': collect_nondeterministic_state(learn),
    }
    full_state: dict[str, Any] = learn.parts.processes.add_own_state(learn, state)
    return full_state


def collect_trained(learn: Learner) -> dict[str, Any]:
    "Return the states of the model, the loss function and the optimizer."
    opt = learn.opt
    loss_func = learn.loss_func
    return {
        'model': collect_module_state(learn.model),
        'loss_func': collect_module_state(loss_func) if isinstance(loss_func, nn.Module) else None,
        'optimizer': None if opt is None else encode_optimizer(opt.state_dict()),
    }


def collect_frozen(learn: Learner, optimized: list[Tensor]) -> dict[str, Any]:
    "Return the names of parameters that are frozen, or that require gradients and are in no optimizer yet."
    known = set(optimized)
    named = [*bare_model(learn.model).named_parameters()]
    return {
        'names': [name for name, p in named if not p.requires_grad],
        'left_out': [name for name, p in named if p.requires_grad and p not in known],
        'frozen_idx': getattr(learn.opt, 'frozen_idx', 0),
    }


def _collect_loop_state(learn: Learner, point: str) -> dict[str, Any]:
    "Return the counters of the loop; `point` names the point of the loop, as in `SAVE_POINTS`."
    lengths = learn.parts.lengths
    loss = getattr(learn, 'loss', None)
    n_drawn = learn.iter + 1 if SAVE_POINTS.get(point) == 'batch' else learn.parts.positions.n_drawn
    return {
        **{name: getattr(learn, name) for name in SAVED},
        'point': point,
        'n_drawn': n_drawn,
        'step': samples_per_step(learn) if point else None,
        'stage': learn.stage,
        'n_iter': learn.n_iter,
        'length': lengths.correction(learn.dls.train),
        'usual_length': lengths.usual,
        'n_epoch': learn.n_epoch,
        'stopping': learn.run.stopping,
        'done': learn.parts.counters.by_unit(),
        'n_steps': getattr(learn.opt, 'n_steps', 0),
        'seconds': learn.finished('sec'),
        'loss': as_plain(loss.detach()) if isinstance(loss, Tensor) else None,
        'fitting_size': learn.parts.microbatches.fitting_size,
        'evaluations': learn.parts.evaluations.state_dict(),
    }


def samples_per_step(learn: Learner) -> int | None:
    "Return the number of samples of an optimizer step over all ranks, or None if it is unknown."
    bs: int | None = describe_drawn(learn.dls.train)['batch size']
    for cb in learn.cbs:
        count = trait_of(cb, 'samples_per_step')
        if bs is not None and count is not None:
            bs = count(bs)
    return bs


def list_owners(learn: Learner) -> list[tuple[str, Any]]:
    "Return the model, the loss function and the optimizers, which may have generators, with their names in a state."
    optimizers = getattr(learn.opt, 'optimizers', {})
    return [
        ('model', bare_model(learn.model)),
        ('loss_func', learn.loss_func),
        *((f'optimizer {name}'.rstrip(), opt) for name, opt in optimizers.items()),
    ]
