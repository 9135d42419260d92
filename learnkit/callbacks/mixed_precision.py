# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: autocast, and gradient scaling for fp16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from learnkit.comm.dtensor import is_dtensor, local_shard, local_shards
from learnkit.core.batch import map_tensors
from learnkit.core.device import find_accelerator
from learnkit.core.errors import (
    CancelStepException,
    ModelError,
    OptimizerError,
    OptionError,
    did_you_mean,
)
from learnkit.core.model import bare_model, model_device, unwrap_partial
from learnkit.core.validation import warn_user
from learnkit.engine.callback import Callback
from learnkit.engine.checks import CROSS_ENTROPIES

if TYPE_CHECKING:
    from learnkit.learner import Learner


class AMPMode(StrEnum):
    "Half precision that autocast computes in."

    FP16 = 'fp16'
    BF16 = 'bf16'


DTYPES = {AMPMode.FP16: torch.float16, AMPMode.BF16: torch.bfloat16}


class MixedPrecision(Callback):
    """Compute the forward pass in half precision where safe; the weights stay in float32.

    The model and the loss run under `torch.autocast` on the model's device, in training, evaluation
    and prediction. Half-precision predictions are converted to float32 before the loss, also inside
    tuples and dicts: losses, metrics and callbacks of order 10 or more get float32.
    Autocast ends after the loss, also after an error.

    In training, torch's cross-entropy gets the scores in half precision and converts them while it
    reads them, which is faster and takes less memory. Callbacks get float32 from `after_loss` on.

    Autocast casts each weight once in a forward pass. Optimizer steps, `EMA`, `SAM` and `load` drop
    the casts, so a forward pass that spans several steps sees the weights after each. Code that
    changes weights itself within a forward pass calls `torch.clear_autocast_cache()`.

    Gradients in fp16 underflow, so the loss is multiplied by a scale before the backward pass
    (`loss_grad`; the reported `loss` never is) and the gradients are divided by it before they are
    clipped or used for a step (Micikevicius et al., 2018, section 3.2). If a gradient is not
    finite, the step of all its optimizers is skipped and counted in `n_skipped`, and the scale is
    lowered; after `growth_interval` good steps it is raised. The check makes the host wait for the
    device once a step. bf16 has the range of float32 and needs no scale.

    Optimizers that `optimize(only=)` steps one by one share one scale. The gradients of each
    optimizer are divided by the scale before its step, and a skip concerns its step only. The scale
    is updated after each step, and pending gradients of the other optimizers are rescaled.

    Both modes also run on a CPU: bf16 often faster than float32, fp16 many times slower. The fits of
    a model share one scale; with another model, the scale and `n_skipped` restart. Checkpointed, with
    fp16: the scaler's state, `n_skipped`, and the optimizers whose pending gradients are scaled.

    Raises `OptionError` for an unknown mode and, when a fit begins, for two callbacks of different
    modes. With fp16 a fit also raises `ModelError` for weights in fp16, and `OptimizerError` for an
    optimizer that evaluates the loss again (LBFGS).

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=MixedPrecision('bf16'))
    >>> with learn.no_bar(): learn.fit(1)
    >>> learn.mixed_precision.scales
    False
    """

    order = 10
    runs_first = ('after_loss',)  # what others add to the loss is computed in float32
    runs_last = ('before_backward',)  # terms that others add to the loss are scaled too

    def __init__(
        self,
        amp_mode: str | AMPMode | None = None,  # 'fp16' or 'bf16'; None: fp16 on a GPU, else bf16
        **scaler: Any,  # options of `torch.amp.GradScaler`: init_scale, growth_interval, ...
    ) -> None:
        super().__init__()
        on_gpu = find_accelerator() is not None
        self.amp_mode = as_mode(amp_mode or (AMPMode.FP16 if on_gpu else AMPMode.BF16))
        self._scaler_options = scaler
        self.scaler = torch.amp.GradScaler('cpu', enabled=self.scales, **scaler)
        self.n_skipped = 0  # number of skipped steps, over all fits of the model
        # model that the scale belongs to; None: the model of the next fit
        self._model: nn.Module | None = None
        self._scaled: set[str] = set()  # names of the optimizers whose gradients are scaled

    @property
    def needs_whole(self) -> str:
        "'layers' if gradients are scaled: torch's scaler does not compare the parts of a layer."
        return 'layers' if self.scales else ''

    @property
    def scales(self) -> bool:
        "Whether the loss is scaled: gradients are then final only after this `before_step`."
        return self.amp_mode is AMPMode.FP16

    def before_fit(self) -> None:
        for cb in self.learn.cbs:
            if isinstance(cb, MixedPrecision) and cb.amp_mode is not self.amp_mode:
                raise OptionError(
                    f'{self} and {cb} contradict each other. Use one: `learn.to_bf16()` and '
                    '`learn.to_fp16()` take the place of what was there.'
                )
        if not self.scales or not self.fitting:
            return
        if any(p.dtype == torch.float16 for p in self.opt.parameters()):
            raise ModelError(
                f'{type(self.learn.model).__name__} has weights in float16, too coarse for small updates. '
                'Mixed precision keeps them in float32: `learn.model.float()`.'
            )
        if self.opt.needs_closure:
            raise OptimizerError(
                f'{self.opt!r} evaluates the loss several times a step, each with its own gradients: '
                "these cannot be scaled. Use MixedPrecision('bf16')."
            )
        self._scaled = set()  # the fit has cleared the gradients
        self._begin_scaler()

    def _begin_scaler(self) -> None:
        "Make a scaler with its tensors on the model's device, with the scale of the model's earlier fits."
        model = bare_model(self.learn.model)
        is_other = self._model is not None and self._model is not model
        self._model = model
        state = self.scaler.state_dict()
        self.scaler = torch.amp.GradScaler(self._get_device().type, **self._scaler_options)
        if is_other:
            self.n_skipped = 0
        else:
            self.scaler.load_state_dict(state)

    def forward_context(self) -> torch.autocast:
        "Return a new autocast context; one that is entered twice would not be left."
        return torch.autocast(self._get_device().type, dtype=DTYPES[self.amp_mode])

    def _get_device(self) -> torch.device:
        learn = self.learn
        return learn.run.batch_device or model_device(learn.model, learn.dls)

    def after_pred(self) -> None:
        if not self._loss_converts():
            self.learn.pred = map_tensors(self.learn.pred, to_single)

    def _loss_converts(self) -> bool:
        "Return True if the predictions are the scores of torch's cross-entropy in a training batch."
        learn = self.learn
        # a custom training loop may compute any loss after `learn.forward`
        if not learn.training or learn.parts.custom_batch.calls_modules:
            return False
        return isinstance(learn.pred, Tensor) and is_cross_entropy(learn.loss_func)

    def after_loss(self) -> None:
        "Convert scores, and a loss in half precision such as a model's own, to float32."
        learn = self.learn
        values = vars(learn)  # a custom training loop may have no `pred`
        if 'pred' in values:
            learn.pred = map_tensors(learn.pred, to_single)
        # without targets there is no `loss_grad`
        if 'loss_grad' in values and learn.loss.dtype in DTYPES.values():
            learn.loss = learn.loss.float()
            learn.loss_grad = learn.loss_grad.float()

    def compiled_step(self) -> dict[str, Any]:
        """Return autocast and conversions of a compiled step.

        In fp16 the loss is scaled, and the step of the optimizer is the ordinary one, as the scaler skips some.
        """
        converts = is_cross_entropy(self.learn.loss_func)
        device = self._get_device().type
        functions = {
            'forward': partial(open_autocast, device=device, dtype=DTYPES[self.amp_mode]),
            'after_pred': partial(convert_output, loss_converts=converts),
            'after_loss': convert_results,
            'finish': self._convert_loss,
        }
        if not self.scales:
            return functions
        return functions | {
            'state': self._read_scale,
            'before_backward': scale_compiled,
            'passes_only': True,
        }

    def _convert_loss(self, found: dict[str, Any]) -> None:
        loss = self.learn.loss
        if loss.dtype in DTYPES.values():
            self.learn.loss = loss.float()

    def _read_scale(self) -> dict[str, Any]:
        "Return the scale of the loss, with which pending gradients are scaled first."
        self._scale_pending()
        return {'scale': self.scaler.scale(torch.ones((), device=self._get_device()))}

    def before_backward(self) -> None:
        if not self.scales:
            return
        loss = self.scaler.scale(self.learn.loss_grad)
        self._scale_pending()
        self.learn.loss_grad = loss

    def _scale_pending(self) -> None:
        "Scale gradients that a Cancel has kept like the new ones that are added to them."
        names = self._current_names()
        for p, grad in self._grads(names - self._scaled):
            if is_dtensor(grad):
                local_shard(grad).mul_(self.scaler.get_scale())
            else:
                p.grad = self.scaler.scale(grad)
        self._scaled |= names

    def before_step(self) -> None:
        "Divide the gradients by the scale, once; skip the step if one of them is not finite."
        if not self._scaled:
            return
        names = self._current_names() & self._scaled
        self._scaled -= names
        params = [p for p, _ in self._grads(names)]
        if not params:
            return  # every backward pass was cancelled
        check = FiniteCheck([{'params': params}])
        self.scaler.step(check)  # type: ignore[arg-type]  # has all that a scaler uses
        self._update_scale()  # now, so that a Cancel of another callback cannot prevent it
        if check.is_finite:
            return
        self.n_skipped += 1
        self._warn_of_tiny_scale()
        raise CancelStepException

    def _update_scale(self) -> None:
        "Update the scale, and rescale pending gradients of other optimizers."
        before = self.scaler.get_scale()
        self.scaler.update()
        grads = local_shards(grad for _, grad in self._grads(self._scaled))
        if grads:
            torch._foreach_mul_(grads, self.scaler.get_scale() / before)

    def cleanup(self) -> None:
        "Drop scaled gradients that no step has used."
        if self._scaled:
            self._scaled = set()
            self.learn.opt.zero_grad()

    def _current_names(self) -> set[str]:
        "Return the names of the optimizers of the current step."
        turn = self.learn.turn
        return set(self.opt.optimizers) if turn is None else {turn}

    def _grads(self, names: set[str]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        "Yield the parameters of some optimizers that have a gradient, with the gradient."
        for name in self.opt.optimizers:
            if name not in names:
                continue
            for p in self.opt.parameters(name):
                if p.grad is not None:
                    yield p, p.grad

    def _warn_of_tiny_scale(self) -> None:
        scale = self.scaler.get_scale()
        if scale < 1 <= scale / self.scaler.get_backoff_factor():  # once on the way down
            warn_user(
                f'Gradients in fp16 are not finite even with the loss scaled by {scale:g}, and steps are skipped '
                f"({self.n_skipped} so far). Is the loss finite? MixedPrecision('bf16') has a wider range."
            )

    @override
    def state_dict(self) -> dict[str, Any] | None:
        "Return the scaler's state, the skipped steps, and the optimizers with scaled gradients."
        if not self.scales:
            return None
        return {
            'scaler': self.scaler.state_dict(),
            'n_skipped': self.n_skipped,
            'is_scaled': sorted(self._scaled),
        }

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the scale; bf16 has no state."
        if not self.scales:
            return
        self.scaler.load_state_dict(sd['scaler'])
        self._model = None if self.learn is None else bare_model(self.learn.model)
        self.n_skipped = sd['n_skipped']
        self._scaled = set(sd['is_scaled'])
        # a step may come before the first scaled loss, which is when a scaler makes its tensors
        if self._scaled and self.learn is not None:
            self.scaler.scale(torch.zeros((), device=self._get_device()))


class FiniteCheck:
    "Stand-in for an optimizer, which a scaler steps only if all gradients are finite."

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups
        self.is_finite = False

    def step(self) -> None:
        "Record that all gradients are finite."
        self.is_finite = True


def to_single(t: Tensor) -> Tensor:
    "Convert a half-precision tensor to float32; return any other tensor as it is."
    return t.float() if t.dtype in DTYPES.values() else t


def is_cross_entropy(loss_func: Any) -> bool:
    "Return True for torch's cross-entropy, which converts scores in half precision while it reads them."
    loss_func = unwrap_partial(loss_func)
    return loss_func is F.cross_entropy or type(loss_func) in CROSS_ENTROPIES


def open_autocast(state: dict[str, Any], device: str, dtype: torch.dtype) -> torch.autocast:
    "Return the autocast context of a compiled step."
    return torch.autocast(device, dtype=dtype)


def scale_compiled(loss: Tensor, state: dict[str, Any]) -> Tensor:
    "Scale the loss of a compiled step."
    return loss * state['scale']


def convert_output(output: Any, state: dict[str, Any], loss_converts: bool) -> Any:
    "Convert an output in half precision to float32, except for scores that the loss converts."
    if loss_converts and isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):  # also one that torch.compile cannot copy
        return {name: map_tensors(value, to_single) for name, value in output.items()}
    return map_tensors(output, to_single)


def convert_results(pred: Any, loss: Tensor, state: dict[str, Any]) -> tuple[Any, Tensor]:
    "Convert predictions and loss in half precision to float32."
    return map_tensors(pred, to_single), to_single(loss)


def as_mode(amp_mode: Any) -> AMPMode:
    "Return the mode by its name, or raise `OptionError`."
    try:
        return AMPMode(amp_mode)
    except ValueError:
        raise OptionError(
            f"amp_mode={amp_mode!r}: pass 'fp16' or 'bf16'.{did_you_mean(str(amp_mode), AMPMode)} For "
            'float32, leave MixedPrecision out (`learn.to_fp32()`).'
        ) from None


def to_bf16(learn: Learner) -> Any:
    "Compute the forward pass in bfloat16 from now on."
    return to_fp32(learn).add_cb(MixedPrecision(AMPMode.BF16))


def to_fp16(learn: Learner, **scaler: Any) -> Any:
    "Compute the forward pass in float16 from now on, with scaled gradients."
    cb = MixedPrecision(AMPMode.FP16, **scaler)  # raises before another callback is removed
    return to_fp32(learn).add_cb(cb)


def to_fp32(learn: Learner) -> Any:
    "Compute everything in the precision of the weights."
    return learn.remove_cb(MixedPrecision)
