"""Mixed precision: autocast, and the scaler that fp16 needs."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from learnkit.core.batch import map_tensors
from learnkit.core.dtensor import is_dtensor, local, locals_of, total_norm
from learnkit.core.errors import (
    CancelStepException,
    ModelError,
    OptimizerError,
    OptionError,
    did_you_mean,
)
from learnkit.core.model import model_device
from learnkit.core.validation import warn_user
from learnkit.engine.callback import Callback

__all__ = ['AMPMode', 'MixedPrecision', 'to_bf16', 'to_fp16', 'to_fp32']


class AMPMode(StrEnum):
    "The half precision that autocast computes in."

    FP16 = 'fp16'
    BF16 = 'bf16'


DTYPES = {AMPMode.FP16: torch.float16, AMPMode.BF16: torch.bfloat16}


class MixedPrecision(Callback):
    """Compute the forward pass in half precision where that is safe; the weights stay in float32.

    The model and the loss run under `torch.autocast` on the model's device, in training, evaluation and prediction.
    In between, half-precision predictions become float32, also inside tuples, dicts and dataclasses: losses, metrics
    and callbacks of order 10 or more see float32. Autocast is on for that time alone, and is left whatever happens.

    Gradients in fp16 underflow, so the loss is multiplied by a scale before the backward pass
    (`loss_grad`; the reported `loss` never is) and the gradients are divided by it before they are
    clipped or used for a step (Micikevicius et al., 2018, section 3.2). A step with a gradient that
    is not finite is skipped and counted in `n_skipped`, for all optimizers that step in it, and the
    scale is lowered; after `growth_interval` good steps it is raised. To know whether to skip, the
    host waits for the device once a step. bf16 has the range of float32 and needs none of that.

    Optimizers that `optimize(only=)` lets step one by one share one scale: the gradients of each
    are divided by it before its step, and its step alone is skipped. The scale is updated after
    each step, and gradients of the others that wait are scaled with the new one.

    Both kinds also run on a CPU: bf16 often faster than float32, fp16 many times slower. Several fits share one scale.
    Checkpointed, with fp16: the scaler's state, `n_skipped`, and whether pending gradients are scaled.

    Raises `OptionError` for options that make no scaler and, when a fit begins, for two of different kind; with fp16
    then also `ModelError` for weights in fp16 and `OptimizerError` for an optimizer that evaluates the loss again
    (LBFGS).

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=MixedPrecision('bf16'))
    >>> with learn.no_bar(): learn.fit(1)
    >>> learn.mixed_precision.scales
    False
    """

    order, runs_last = 10, ('before_backward',)  # what others add to the loss is scaled too

    def __init__(
        self,
        amp_mode: str
        | AMPMode
        | None = None,  # 'fp16' or 'bf16'; None: fp16 where there is a GPU, else bf16
        init_scale: float = 2.0
        ** 16,  # what the loss is multiplied by at first; this and the rest: fp16 only
        growth_factor: float = 2.0,  # what the scale is multiplied by after `growth_interval` steps
        backoff_factor: float = 0.5,  # what it is multiplied by after a gradient that is not finite
        growth_interval: int = 2000,  # steps
    ) -> None:
        super().__init__()
        on_gpu = torch.cuda.is_available()  # on a CPU fp16 is many times slower than float32
        self.amp_mode = as_mode(amp_mode or (AMPMode.FP16 if on_gpu else AMPMode.BF16))
        check_option('init_scale', init_scale, 0)
        check_option('growth_factor', growth_factor, 1)
        check_option('backoff_factor', backoff_factor, 0, 1)
        check_option('growth_interval', growth_interval, 0, whole=True)
        self.scaler = torch.amp.GradScaler(
            'cpu', init_scale, growth_factor, backoff_factor, growth_interval, enabled=self.scales
        )
        self.n_skipped = 0  # steps that were skipped, over all fits
        self._scaled: set[str] = set()  # the optimizers whose gradients are multiplied by the scale

    @property
    def scales(self) -> bool:
        "Whether the loss is scaled: gradients are then finished only after this callback's `before_step`."
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
            self.on_reevaluation()
        self._scaled, state = set(), self.scaler.state_dict()  # fit has cleared the gradients
        self.scaler = torch.amp.GradScaler(
            self._device_type()
        )  # its numbers live where the model is now
        self.scaler.load_state_dict(state)

    def on_reevaluation(self) -> None:
        "Refuse an optimizer whose steps evaluate the loss again, where the loss is scaled."
        if not self.scales:
            return
        raise OptimizerError(
            f'{self.opt!r} evaluates the loss several times a step, each with gradients of its own: '
            "these cannot be scaled. Use MixedPrecision('bf16')."
        )

    def forward_context(self) -> torch.autocast:
        "Return autocast: a new one each time, since one that is entered twice does not leave."
        return torch.autocast(self._device_type(), dtype=DTYPES[self.amp_mode])

    def _device_type(self) -> str:
        return model_device(self.learn.model, self.learn.dls).type

    def after_pred(self) -> None:
        self.learn.pred = map_tensors(self.learn.pred, not_half)

    def after_loss(self) -> None:
        "Report in float32 a loss that came out in half precision: a model's own, for one."
        learn = self.learn  # without targets there is no loss
        if 'loss_grad' in learn.__dict__ and learn.loss.dtype in DTYPES.values():
            learn.loss, learn.loss_grad = learn.loss.float(), learn.loss_grad.float()

    def before_backward(self) -> None:
        if not self.scales:
            return
        loss, stepping = self.scaler.scale(self.learn.loss_grad), self._stepping()
        for p, grad in self._grads(
            stepping - self._scaled
        ):  # kept by a Cancel: the new ones add to them
            if is_dtensor(grad):
                local(grad).mul_(self.scaler.get_scale())
            else:
                p.grad = self.scaler.scale(grad)
        self._scaled |= stepping
        self.learn.loss_grad = loss

    def before_step(self) -> None:
        "Divide the gradients by the scale, once; skip the step when one of them is not finite."
        stepping = self._stepping() & self._scaled
        self._scaled -= stepping
        params = [p for p, _ in self._grads(stepping)]
        if not params:
            return  # every backward pass was cancelled
        check = FiniteCheck([{'params': params}])
        self.scaler.step(check)  # type: ignore[arg-type]  # it has what a scaler asks of an optimizer
        self._update_scale()  # at once, so that the scaler is ready whatever the others cancel
        if check.is_finite:
            return
        self.n_skipped += 1
        self._warn_of_tiny_scale()
        raise CancelStepException

    def _update_scale(self) -> None:
        "Update the scale, and with it gradients of other optimizers that wait for their step."
        if not self._scaled:
            return self.scaler.update()
        before = self.scaler.get_scale()
        self.scaler.update()
        if (now := self.scaler.get_scale()) == before:
            return
        grads = locals_of(grad for _, grad in self._grads(self._scaled))
        if grads:
            torch._foreach_mul_(grads, now / before)

    def cleanup(self) -> None:
        "Leave gradients as they are without a scale: the fit may go on without this callback."
        if not self._scaled:
            return
        grads = [grad for _, grad in self._grads(self._scaled)]
        self._scaled, scale, learn = set(), self.scaler.get_scale(), self.learn
        if 'loss_grad' in learn.__dict__:
            learn.loss_grad = learn.loss_grad / scale
        if not grads:
            return
        if total_norm(grads, float('inf')).isfinite():
            torch._foreach_div_(locals_of(grads), scale)
        else:  # it is the scale that was too high: this step is skipped like any other one
            learn.opt.zero_grad()
            self.n_skipped += 1

    def _stepping(self) -> set[str]:
        "Return the names of the optimizers that the step at hand is for."
        turn = self.learn.turn
        return set(self.opt.optimizers) if turn is None else {turn}

    def _grads(self, names: set[str]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        "Yield the parameters of some optimizers that have a gradient, with it."
        return (
            (p, p.grad)
            for name in self.opt.optimizers
            if name in names
            for p in self.opt.parameters(name)
            if p.grad is not None
        )

    def _warn_of_tiny_scale(self) -> None:
        scale = self.scaler.get_scale()
        if scale < 1 <= scale / self.scaler.get_backoff_factor():  # once on the way down
            warn_user(
                f'Gradients in fp16 are not finite even with the loss scaled by {scale:g}, and steps are skipped '
                f"({self.n_skipped} so far). Is the loss finite? MixedPrecision('bf16') has a wider range."
            )

    def state_dict(self) -> dict[str, Any] | None:
        "Return the scaler's state, the skipped steps, and whose pending gradients are scaled."
        if not self.scales:
            return None
        return {
            'scaler': self.scaler.state_dict(),
            'n_skipped': self.n_skipped,
            'is_scaled': sorted(self._scaled),
        }

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Go on with the scale that was reached; bf16 has none."
        if not self.scales:
            return
        self.scaler.load_state_dict(sd['scaler'])
        self.n_skipped = sd['n_skipped']
        names = sd['is_scaled']
        if isinstance(names, bool):  # of a checkpoint from before there were names
            names = (self.opt.optimizers if self.learn is not None else ['']) if names else []
        self._scaled = set(names)
        # a step of gradients that wait may come before any loss is scaled, which is when a scaler makes its tensors
        if self._scaled and self.learn is not None:
            self.scaler.scale(
                torch.zeros((), device=model_device(self.learn.model, self.learn.dls))
            )


class FiniteCheck:
    "Stands for the optimizer when the scaler is asked to step it: that happens when all gradients are finite."

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups, self.is_finite = param_groups, False

    def step(self) -> None:
        "Hear that all gradients are finite."
        self.is_finite = True


def not_half(t: Tensor) -> Tensor:
    "Return a tensor in half precision as float32, any other as it is."
    return t.float() if t.dtype in DTYPES.values() else t


def as_mode(amp_mode: Any) -> AMPMode:
    "Return the mode of that name, or raise `OptionError`."
    try:
        return AMPMode(amp_mode)
    except ValueError:
        raise OptionError(
            f"amp_mode={amp_mode!r}: give 'fp16' or 'bf16'.{did_you_mean(str(amp_mode), AMPMode)} For "
            'float32, leave MixedPrecision out (`learn.to_fp32()`).'
        ) from None


def check_option(
    name: str, value: Any, above: float, below: float = float('inf'), whole: bool = False
) -> None:
    "Raise `OptionError` for what is no number between two others."
    if isinstance(value, int if whole else (int, float)) and above < value < below:
        return
    raise OptionError(
        f'{name}={value!r}: give a {"whole " * whole}number above {above}'
        f'{f" and below {below}" * (below < float("inf"))}.'
    )


def to_bf16(learn: Any) -> Any:
    "Compute the forward pass in bfloat16 from now on."
    return _set_precision(learn, MixedPrecision(AMPMode.BF16))


def to_fp16(learn: Any, **scaler: Any) -> Any:
    "Compute the forward pass in float16 from now on, with scaled gradients."
    return _set_precision(learn, MixedPrecision(AMPMode.FP16, **scaler))


def to_fp32(learn: Any) -> Any:
    "Compute everything in the precision of the weights."
    return learn.remove_cb(MixedPrecision)


def _set_precision(learn: Any, cb: MixedPrecision) -> Any:
    return learn.to_fp32().add_cb(cb)
