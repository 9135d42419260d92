# SPDX-License-Identifier: Apache-2.0
"""Callbacks that change training on batches and epochs: clipping, layouts, short epochs, frozen norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from typing_extensions import override

from learnkit.comm.dtensor import is_dtensor, local_shards, total_norm
from learnkit.core.batch import map_tensors, short_repr
from learnkit.core.errors import CancelTrainException, CancelValidException, OptionError
from learnkit.core.model import bare_model
from learnkit.core.plain import as_plain
from learnkit.core.roles import find_frozen_norms
from learnkit.core.validation import is_number, warn_user
from learnkit.engine.callback import Callback
from learnkit.engine.train_eval import SkipToEpoch

__all__ = [
    'GradientClip',
    'GradientValueClip',
    'ChannelsLast',
    'CastToTensor',
    'ShortEpochCallback',
    'BnFreeze',
    'SkipToEpoch',
    'before_batch_cb',
]

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by number of dimensions


def bad_option(
    cb: object,  # callback with the option
    need: str,  # description of valid values
    **option: object,  # the option, by its name
) -> OptionError:
    "Return the error for an invalid option of a callback."
    [(name, value)] = option.items()
    return OptionError(f'{type(cb).__name__}({name}={short_repr(value)}): pass {need}.')


# -- gradients -------------------------------------------------------------------------------------


class GradientClip(Callback):
    """Scale the gradients of each step down to a total norm of at most `max_norm`.

    The norm is computed over all gradients of the optimizer's parameters together, or over the
    parameters of the optimizer that `optimize(only=)` names, as they are at the step: of the whole
    batch under microbatches, of all batches of a step under `GradientAccumulation`, unscaled under
    mixed precision. An optimizer with a closure (LBFGS) gets clipped gradients in each evaluation of a step.
    The host does not wait for the device. `total_norm` is the norm before clipping
    at the last step, also after the fit (a 0-dim tensor). Checkpointed: `total_norm`.

    Raises `OptionError` for a norm that is not above 0.

    >>> GradientClip(0.5).max_norm, GradientClip.order
    (0.5, 11)
    """

    order = 11  # right after mixed precision (10) has unscaled the gradients

    def __init__(
        self,
        max_norm: float = 1.0,  # largest allowed norm
        norm_type: float = 2.0,  # p of the p-norm; `inf` for the largest absolute value
    ) -> None:
        if not is_number(max_norm) or max_norm <= 0:
            raise bad_option(self, 'a norm above 0', max_norm=max_norm)
        self.max_norm = float(max_norm)
        self.norm_type = float(norm_type)
        self.total_norm: Tensor | None = None

    def before_step(self) -> None:
        self.total_norm = self.clip_step_gradients()

    def clip_step_gradients(self) -> Tensor:
        "Clip the gradients as they are now, and return their norm."
        params = self.learn.step_parameters
        grads = [p.grad for p in params if p.grad is not None]
        if self.learn.world.size > 1 and any(map(is_dtensor, grads)):
            norm = total_norm(grads, self.norm_type)
            scale_down(local_shards(grads), norm, self.max_norm)
        elif are_alike(grads):
            norms = torch._foreach_norm(grads, self.norm_type)
            norm = torch.linalg.vector_norm(torch.stack(norms), self.norm_type)
            scale_down(grads, norm, self.max_norm)
        else:
            norm = clip_grad_norm_(params, self.max_norm, self.norm_type).detach()
        return norm

    def compiled_step(self) -> dict[str, Any]:
        "Return the clipping of a compiled step, and the reading of its norm."
        return {
            'state': lambda: {'max_norm': self.max_norm},
            'before_step': partial(clip_norm, norm_type=self.norm_type),
            'finish': self._keep_norm,
        }

    def _keep_norm(self, found: dict[str, Any]) -> None:
        self.total_norm = found['total_norm']

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the norm of the last step."
        return {'total_norm': self.total_norm}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the norm of the last step."
        self.total_norm = sd['total_norm']


class GradientValueClip(Callback):
    """Clip each entry of the gradients of a step to `[-max_value, max_value]`. No state.

    Raises `OptionError` for a value that is not above 0.

    >>> GradientValueClip().max_value
    1.0
    """

    order = GradientClip.order

    def __init__(
        self,
        max_value: float = 1.0,  # largest allowed absolute value
    ) -> None:
        if not is_number(max_value) or max_value <= 0:
            raise bad_option(self, 'a number above 0', max_value=max_value)
        self.max_value = float(max_value)

    def before_step(self) -> None:
        self.clip_step_gradients()

    def clip_step_gradients(self) -> None:
        "Clip the gradients as they are now."
        params = [p for p in self.learn.step_parameters if p.grad is not None]
        if not params:
            return  # the backward pass was cancelled
        if self.learn.world.size == 1:
            clip_grad_value_(params, self.max_value)
            return
        for g in local_shards(p.grad for p in params):
            g.clamp_(-self.max_value, self.max_value)

    def compiled_step(self) -> dict[str, Any]:
        "Return the clipping of a compiled step."
        return {'state': lambda: {'max_value': self.max_value}, 'before_step': clip_values}


def are_alike(grads: list[Tensor]) -> bool:
    """Return True for plain gradients of one device and dtype.

    torch's `clip_grad_norm_` groups gradients by device and dtype each time, which for a small model takes longer than
    the arithmetic. Gradients that need no groups are clipped without, to the same bits.

    >>> are_alike([torch.zeros(2), torch.zeros(3)]), are_alike([torch.zeros(2), torch.zeros(3).half()])
    (True, False)
    """
    return bool(grads) and all(
        type(grad) is Tensor
        and not grad.requires_grad
        and grad.dtype == grads[0].dtype
        and grad.device == grads[0].device
        for grad in grads
    )


def scale_down(grads: list[Tensor], norm: Tensor, max_norm: float) -> None:
    "Scale gradients of total norm `norm` in place to a norm of at most `max_norm`."
    torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def clip_norm(grads: list[Tensor], state: dict[str, Any], norm_type: float) -> list[Tensor]:
    "Scale gradients down to a total norm of at most `max_norm`, as torch's `clip_grad_norm_` does."
    norms = [torch.linalg.vector_norm(grad, norm_type) for grad in grads]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    state['total_norm'] = total
    scale = (state['max_norm'] / (total + 1e-6)).clamp(max=1.0)
    return [grad * scale for grad in grads]


def clip_values(grads: list[Tensor], state: dict[str, Any]) -> list[Tensor]:
    "Clip each entry of gradients."
    bound = state['max_value']
    return [torch.clamp(grad, -bound, bound) for grad in grads]


# -- batches ---------------------------------------------------------------------------------------


class CastToTensor(Callback):
    """Convert tensor subclasses in `xb` and `yb`, however nested, to plain tensors before mixed precision.

    Subclasses whose class implements their operations (distributed, nested, quantized tensors)
    stay. No state.

    >>> CastToTensor.order
    9
    """

    order = 9

    def before_batch(self) -> None:
        learn = self.learn
        learn.xb = map_tensors(learn.xb, as_plain)
        learn.yb = map_tensors(learn.yb, as_plain)


def before_batch_cb(
    f: Callable[[Any, tuple[Any, ...], tuple[Any, ...]], Any],  # f(callback, xb, yb) -> new xb, yb
) -> Callback:
    """Return a callback that changes batches by a function of the callback, `xb` and `yb`.

    >>> @before_batch_cb
    ... def half(cb, xb, yb): return tuple(x / 2 for x in xb), yb
    >>> half
    Callback(before_batch=half)
    """

    def before_batch(cb: Callback) -> None:
        cb.learn.xb, cb.learn.yb = f(cb, cb.learn.xb, cb.learn.yb)

    before_batch.__name__ = getattr(f, '__name__', 'before_batch')
    return Callback(before_batch=before_batch)


# -- layers ----------------------------------------------------------------------------------------


class ChannelsLast(Callback):
    """Keep the weights of convolutions in channels-last layout during a run, for faster convolutions.

    Weights of 4 and 5 dimensions are converted, with their optimizer state, and converted back when
    the run ends. Batches need no conversion: the output of a convolution has the layout of its
    weights. No state.

    >>> from torch import nn
    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(model=nn.Sequential(nn.Conv2d(3, 8, 3)), cbs=ChannelsLast)
    >>> learn('before_fit'); learn.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    True
    >>> learn('cleanup'); learn.model[0].weight.is_contiguous()
    True
    """

    order = -1  # before anything that keeps copies of the weights
    needs_whole = 'weights'

    def __init__(self) -> None:
        self._converted: list[nn.Parameter] = []

    def before_fit(self) -> None:
        for p in self.learn.model.parameters():
            layout = None if is_lazy(p) else CHANNELS_LAST.get(p.dim())
            if layout is None or p.is_contiguous(memory_format=layout):
                continue
            self._converted.append(p)
            self._set_layout(p, layout)

    def cleanup(self) -> None:
        while self._converted:
            self._set_layout(self._converted.pop(), torch.contiguous_format)

    def _set_layout(self, p: nn.Parameter, layout: torch.memory_format) -> None:
        "Convert a parameter and its optimizer state: fused steps read both in memory order."
        p.data = p.data.contiguous(memory_format=layout)
        if p.grad is not None:
            p.grad = p.grad.contiguous(memory_format=layout)
        state = self.learn.opt.state.get(p, {}) if self.learn.opt is not None else {}
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == p.shape:
                state[name] = value.contiguous(memory_format=layout)


class BnFreeze(Callback):
    """Keep frozen norm layers in evaluation mode while the rest of the model trains.

    The running statistics of frozen batch and instance norm layers then stay constant. A layer is
    frozen if it has parameters and none requires a gradient; a layer without parameters follows the
    nearest module before it in its `nn.Sequential`, or else its parent. Frozen layers are found
    before each epoch, so that layers may be frozen and unfrozen between epochs. `learn.freeze()`
    freezes norm layers with `Learner(train_bn=False)`; otherwise they are trained. A warning
    follows if parameters are frozen, and no such layer is. Checkpointed: the names of the frozen
    layers.

    >>> BnFreeze.run_after
    'TrainEvalCallback'
    """

    run_after = 'TrainEvalCallback'

    def __init__(self) -> None:
        self._frozen: list[nn.Module] = []
        self._is_checked = False  # whether norm layers were searched next to frozen parameters

    def before_train(self) -> None:
        unfrozen = self._frozen
        self._frozen = list(find_frozen_norms(self.learn.model))
        for m in unfrozen:
            m.train()
        for m in self._frozen:
            m.eval()
        self._check_found()

    def _check_found(self) -> None:
        "Warn once if parameters are frozen, and no norm layer is."
        if self._is_checked or all(p.requires_grad for p in self.learn.model.parameters()):
            return
        self._is_checked = True
        if not self._frozen:
            warn_user(
                'BnFreeze found no frozen norm layer with running statistics. `learn.freeze()` leaves norm layers '
                'trainable unless the Learner has `train_bn=False`.'
            )

    def cleanup(self) -> None:
        for m in self._frozen:
            m.train(self.learn.model.training)
        self._frozen = []

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the names of the layers in evaluation mode."
        named = bare_model(self.learn.model).named_modules() if self._frozen else ()
        frozen = {id(m) for m in self._frozen}
        return {'frozen': [name for name, m in named if id(m) in frozen]}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the frozen layers, which train again once they are unfrozen."
        if self.learn is None:
            return
        named = dict(bare_model(self.learn.model).named_modules())
        self._frozen = [named[name] for name in sd['frozen'] if name in named]


# -- epochs ----------------------------------------------------------------------------------------


class ShortEpochCallback(Callback):
    """Train on the first `pct` of each epoch and one more batch, as fastai does, for a quick trial.

    An epoch ends after the first batch whose index is at least `pct` of the number of batches: of
    10 batches, `pct=0.2` trains on 3. Unlike in fastai, all of them are recorded, measured and
    gathered, including the last one. No state.

    Raises `OptionError` for a `pct` outside 0 to 1. A loader without length is not shortened.

    >>> ShortEpochCallback(0.1).pct
    0.1
    """

    order = 1000  # after all other callbacks have seen the batch
    remove_on_find = True

    def __init__(
        self,
        pct: float = 0.01,  # share of the batches, 0 to 1
        short_valid: bool = True,  # whether evaluation is shortened too
    ) -> None:
        if not is_number(pct) or not 0 <= pct <= 1:
            raise bad_option(self, 'a share from 0 to 1', pct=pct)
        self.pct = pct
        self.short_valid = short_valid

    def after_batch(self) -> None:
        learn = self.learn
        if not learn.n_iter or learn.iter / learn.n_iter < self.pct:
            return
        if learn.training:
            raise CancelTrainException
        if self.short_valid:
            raise CancelValidException
