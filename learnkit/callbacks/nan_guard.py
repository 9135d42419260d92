# SPDX-License-Identifier: Apache-2.0
"""Guard against NaN and infinity: check losses and gradients before they reach the weights."""

from __future__ import annotations

from typing import Any

import torch
from fastcore.basics import noop
from torch import Tensor
from typing_extensions import override

from learnkit.callbacks.accumulation import GradientAccumulation
from learnkit.callbacks.mixed_precision import MixedPrecision
from learnkit.callbacks.nan_diagnosis import (
    all_finite,
    describe_samples,
    explain_nonfinite,
    find_bad_gradients,
    format_few,
)
from learnkit.callbacks.sam import SAM
from learnkit.core.errors import (
    CancelBatchException,
    CancelFitException,
    CancelStepException,
    LossError,
    OptionError,
    did_you_mean,
)
from learnkit.core.model import BufferCopy, copy_buffers, restore_buffers
from learnkit.core.validation import warn_user
from learnkit.engine.callback import Callback

POLICIES = ('raise', 'skip', 'stop')


def print_line(cb: Callback, text: str) -> None:
    "Print a line above the progress bar; print nothing under `no_logging()`."
    if cb.learn.logger is noop:
        return
    from tqdm import tqdm

    tqdm.write(text)


class GuardNonFinite(Callback):
    """Act on a loss or a gradient that is NaN or infinite, before it reaches the weights or the records.

    `policy` is one of:

    - 'raise': raise a `LossError`;
    - 'skip': skip the batch, or the step if a gradient is not finite; `n_skipped` counts;
    - 'stop': end the fit at once (like CancelFit, without evaluation or checkpoint).

    The weights are then as before the step, and the model's buffers (running statistics) as before
    the batch.

    The message names the batch and the cause: an input or target, with the data-set indices of its
    samples if the loader provides them; a parameter; otherwise the module that first returned such
    a value, found by a second forward pass; the parameters whose gradients are not finite.

    Gradients are checked once a step, as the optimizer would use them: of all microbatches and
    accumulated batches, unscaled, SAM's second ones, before clipping. Gradients that overflow in
    fp16 are handled by the scaler, which skips the step and lowers its scale. The loss is checked
    together with the gradients, so the host waits for the device once a step. It is checked before
    its backward pass, with a wait, if a step has several (accumulation, microbatches, SAM,
    closures), in fp16, after another callback has cancelled a batch or a step of the fit, and with
    `grads=False`, which checks losses only.

    Checkpointed: `n_skipped`. Raises `OptionError` for an unknown policy.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=GuardNonFinite())
    >>> _ = learn.model.b.data.fill_(float('nan'))
    >>> try:
    ...     with learn.removed_cbs(learn.progress): learn.fit(5)
    ... except LossError as e: print(e)
    The loss is nan at batch 0 of epoch 0. Not finite: parameter b.
    """

    # order within a step: after SAM, accumulation and unscaling, before clipping
    order = MixedPrecision.order + 0.5
    remove_on_find = True
    run_in = 'fit'
    run_valid = False

    def __init__(
        self,
        policy: str = 'raise',  # 'raise', 'skip' or 'stop'
        grads: bool = True,  # whether to check the gradients too, before each step
    ) -> None:
        if policy not in POLICIES:
            raise OptionError(
                f'policy={policy!r}: pass one of {POLICIES}.{did_you_mean(str(policy), POLICIES)}'
            )
        self.policy = policy
        self.grads = grads
        self.n_skipped = 0
        self._has_warned = False  # whether a skipped batch of this fit was reported
        self._is_skipping = False  # whether the current batch or step is being skipped
        self._buffers: list[BufferCopy] = []  # buffers before this batch
        self._waits_for_step = False  # whether the loss is checked together with the gradients

    def before_fit(self) -> None:
        "Report the first skipped batch of each fit."
        learn = self.learn
        self._has_warned = False
        # gradients of other batches must stay clean, and a scaler must not see such a loss
        has_several = any(isinstance(cb, (GradientAccumulation, SAM)) for cb in learn.cbs)
        is_scaled = any(isinstance(cb, MixedPrecision) and cb.scales for cb in learn.cbs)
        is_plain = learn.seams.batch is None and learn.seams.step is None
        self._waits_for_step = self.grads and is_plain and not (has_several or is_scaled)

    def before_batch(self) -> None:
        "Copy the buffers."
        self._buffers = copy_buffers(self.learn.model)

    # -- checks ------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        "Check the loss, unless it is checked at the step."
        learn = self.learn
        if learn.run.repeating and learn.opt.needs_closure:
            return  # a line search tries steps that may be too long
        if learn.loss_grad.numel() != 1:
            return  # the loop raises an error
        if not self._waits_for_step:
            self._check_loss()

    def before_step(self) -> None:
        "Check the gradients, and the loss if it was not checked."
        learn = self.learn
        if not self.grads or learn.run.repeating:
            return
        values = [p.grad for p in learn.step_parameters if p.grad is not None]
        if self._waits_for_step:
            values += [learn.loss, learn.loss_grad]
        if learn.world.any(not all_finite(values)):
            if self._waits_for_step:
                self._check_loss()
            self._act('' if self._has_warned else self._explain_gradients(), CancelStepException)

    def compiled_step(self) -> dict[str, Any] | None:
        """Return the check of a compiled step, which undoes itself; the ordinary step then reports and acts.

        None in several processes, which act together.
        """
        if self.learn.world.size > 1:
            return None
        functions = {'after_loss': accept_loss, 'undo': True}
        return functions | ({'before_step': accept_gradients} if self.grads else {})

    def _check_loss(self) -> None:
        learn = self.learn
        # `loss` is recorded, `loss_grad` is differentiated: both have to be finite
        is_bad = not (learn.loss.isfinite() & learn.loss_grad.isfinite()).item()
        if learn.world.any(is_bad):
            self._act('' if self._has_warned else self._explain_loss(is_bad), CancelBatchException)

    def after_cancel_step(self) -> None:
        self._undo_skipped()

    def after_cancel_batch(self) -> None:
        self._undo_skipped()

    # -- actions -----------------------------------------------------------------------------------

    def _explain_loss(self, is_bad: bool) -> str:
        learn = self.learn
        place = f'batch {learn.iter} of epoch {learn.epoch}'
        if not is_bad:
            return f'The loss of another process is not finite at {place}.'
        value = learn.loss_grad if learn.loss.isfinite() else learn.loss
        return f'The loss is {value.item()} at {place}. {explain_nonfinite(learn)}'

    def _explain_gradients(self) -> str:
        learn = self.learn
        names = format_few(find_bad_gradients(learn))
        place = f'batch {learn.iter} of epoch {learn.epoch}'
        return f'The gradient of {names} is not finite at {place}.{describe_samples(learn)}'

    def _act(self, text: str, skip: type[Exception]) -> None:
        if self.policy != 'skip':
            restore_buffers(self._buffers)
        if self.policy == 'raise':
            raise LossError(text)
        if self.policy == 'stop':
            print_line(self, f'{text} The fit ends here.')
            raise CancelFitException
        self.n_skipped += 1
        if not self._has_warned:
            warn_user(f'{text} It is skipped, and so are others like it in this fit.')
        self._has_warned = True
        self._is_skipping = True
        if skip is CancelBatchException:
            if self._waits_for_step or self.learn.run.repeating:
                self.learn.opt.zero_grad()  # of this batch, or of the microbatches of SAM's second pass
            del self.learn.loss_grad  # a batch without one is not recorded
        raise skip

    def _undo_skipped(self) -> None:
        "Undo the effects of a skipped batch; SAM has restored the weights by now."
        if not self._is_skipping:
            self._waits_for_step = False  # another callback cancels: it may accumulate gradients
            return
        self._is_skipping = False
        restore_buffers(self._buffers)

    def cleanup(self) -> None:
        "Drop the copies."
        self._is_skipping = False
        self._buffers = []

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the number of skipped batches."
        return {'n_skipped': self.n_skipped}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the number of skipped batches."
        self.n_skipped = sd['n_skipped']


def accept_loss(pred: Any, loss: Tensor, state: dict[str, Any]) -> tuple[Any, Tensor]:
    "Accept a compiled step if its loss is finite."
    state['accept'] = loss.isfinite().all()
    return pred, loss


def accept_gradients(grads: list[Tensor], state: dict[str, Any]) -> list[Tensor]:
    "Accept a compiled step if its gradients are finite as well."
    finite = torch.stack([grad.isfinite().all() for grad in grads]).all()
    state['accept'] = state['accept'] & finite
    return grads


class TerminateOnNaNCallback(GuardNonFinite):
    """End the fit when the loss is NaN or infinite: the guard's policy 'stop'.

    >>> TerminateOnNaNCallback().policy
    'stop'
    """

    def __init__(self) -> None:
        super().__init__('stop', grads=False)
