"""Guard against NaN and infinity: check losses and gradients before they reach the weights."""

from __future__ import annotations

from typing import Any

import torch
from fastcore.basics import noop
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from learnkit.callbacks.mixed_precision import MixedPrecision
from learnkit.callbacks.nan_diagnosis import (
    all_finite,
    describe_samples,
    explain_nonfinite,
    find_bad_gradients,
    format_few,
)
from learnkit.core.errors import (
    CancelBatchException,
    CancelFitException,
    CancelStepException,
    LossError,
    OptionError,
    did_you_mean,
)
from learnkit.core.learner_type import LearnerLike
from learnkit.core.validation import warn_user
from learnkit.engine.callback import Callback
from learnkit.inference.gather import AsyncToCPU

__all__ = ['GuardNonFinite', 'TerminateOnNaNCallback', 'print_line']

POLICIES = ('raise', 'skip', 'stop')
# dict and key of a buffer in its module, which stay valid when the buffer is replaced
Buffer = tuple[dict[str, Tensor | None], str]


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

    Each loss is checked before its backward pass. Gradients are checked once a step, as the
    optimizer would use them: of all microbatches and accumulated batches, unscaled, SAM's second
    ones, before clipping. Gradients that overflow in fp16 are handled by the scaler, which skips
    the step and lowers its scale. On the CPU a check takes microseconds, and one pass over the
    gradients. On a GPU each check waits for the device: 'raise' and 'stop' check once a step,
    losses and gradients together. `grads=False` checks losses only; with 'raise' and 'stop' on a
    GPU it checks them once they have arrived, while the next batch is computed: one batch late,
    after the weights were updated.

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
                f'policy={policy!r}: give one of {POLICIES}.{did_you_mean(str(policy), POLICIES)}'
            )
        self.policy = policy
        self.grads = grads
        self.n_skipped = 0
        self._start()

    def _start(self) -> None:
        "Reset the state of one fit."
        self._has_warned = False  # whether a skipped batch was reported
        # batch index, and whether its loss is finite as a tensor on its device
        self._pending: list[tuple[int, Tensor]] = []
        self._transfer = AsyncToCPU()
        self._is_skipping = False  # whether the current batch or step is being skipped
        self._buffers: list[Buffer] = []
        self._saved_buffers: list[Tensor] = []  # values of the buffers before this batch

    def before_fit(self) -> None:
        "Reset the guard."
        self._start()

    def before_train(self) -> None:
        "Find the buffers that a forward pass may change."
        self._buffers = find_buffers(self.learn)
        self._saved_buffers = []

    @torch.no_grad()
    def before_batch(self) -> None:
        "Copy the buffers."
        buffers: Any = [store[key] for store, key in self._buffers]
        saved = self._saved_buffers
        if not buffers:
            return
        if any(map(is_lazy, buffers)):
            self._saved_buffers = []  # a lazy model has no values yet
        elif [b.shape for b in saved] == [b.shape for b in buffers]:
            torch._foreach_copy_(saved, buffers)
        else:
            self._saved_buffers = [b.clone() for b in buffers]

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        if not self._saved_buffers:
            return
        for (store, key), value in zip(self._buffers, self._saved_buffers, strict=True):
            buffer = store[key]
            if buffer is not None and buffer.shape == value.shape:
                buffer.copy_(value)
            else:
                store[key] = value.clone()

    # -- checks ------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        "Check the loss, or record whether it is finite for a later check."
        learn = self.learn
        if learn.closure.repeating and learn.opt.needs_closure:
            return  # a line search tries steps that may be too long
        if learn.loss_grad.numel() != 1:
            return  # the loop raises an error
        # `loss` is recorded, `loss_grad` is differentiated: both have to be finite
        finite = (learn.loss.isfinite() & learn.loss_grad.isfinite()).reshape(())
        if not self._is_late(finite.device.type):
            if learn.world.any(not finite.item()):
                self._act_on_loss(learn.iter)
            return
        pending = self._pending
        if pending and pending[-1][0] == learn.iter:
            pending[-1] = learn.iter, pending[-1][1] & finite
        else:
            pending.append((learn.iter, finite))

    def _is_late(self, device: str) -> bool:
        "Return True if losses are checked later than before their backward pass."
        if self.policy == 'skip' or self.learn.world.size > 1:
            return False
        return device != 'cpu'

    def before_step(self) -> None:
        "Check the gradients, and the losses that have not been checked."
        if not self.grads or self.learn.closure.repeating:
            return
        self._check_pending(in_time=True)
        is_bad = not all_finite([p.grad for p in self.learn.step_parameters if p.grad is not None])
        if not self.learn.world.any(is_bad):
            return
        self._act('' if self._has_warned else self._explain_gradients(), CancelStepException)

    def after_cancel_step(self) -> None:
        "Check the losses of a skipped step, for example skipped by a scaler."
        if self.grads:
            self._check_pending(in_time=True)
        self._undo_skipped()

    def after_cancel_batch(self) -> None:
        self._undo_skipped()

    def after_batch(self) -> None:
        "Check the losses that have arrived."
        if self._pending and not self.grads:
            self._check_losses(self._transfer.put(self._pending.pop()))

    def after_train(self) -> None:
        "Check the remaining losses."
        self._check_pending()

    def _check_pending(self, in_time: bool = False) -> None:
        pending = self._pending
        self._pending = []
        arrived = self._transfer.flush()
        if pending:
            are_finite = torch.stack([finite for _, finite in pending]).cpu()
            arrived += zip([i for i, _ in pending], are_finite, strict=True)
        self._check_losses(arrived, in_time)

    def _check_losses(self, batches: list[tuple[int, Tensor]], in_time: bool = False) -> None:
        for i, finite in batches:
            if self.learn.world.any(not finite):
                self._act_on_loss(i, in_time and i == self.learn.iter)

    # -- actions -----------------------------------------------------------------------------------

    def _act_on_loss(self, i: int, in_time: bool = True) -> None:
        learn = self.learn
        if not in_time:
            text = (
                f'The loss was not finite at {self._format_place(i)} (seen at batch {learn.iter}).'
            )
        elif self._has_warned:
            text = ''  # only the first skipped batch is reported
        else:
            value = learn.loss_grad if learn.loss.isfinite() else learn.loss
            text = (
                f'The loss is {value.item()} at {self._format_place(i)}. {explain_nonfinite(learn)}'
            )
            if value.isfinite():
                text = f'The loss of another process is not finite at {self._format_place(i)}.'
        self._act(text, CancelBatchException, in_time)

    def _explain_gradients(self) -> str:
        names = format_few(find_bad_gradients(self.learn))
        place = self._format_place(self.learn.iter)
        return f'The gradient of {names} is not finite at {place}.{describe_samples(self.learn)}'

    def _act(self, text: str, skip: type[Exception], in_time: bool = True) -> None:
        if self.policy in ('raise', 'stop') and in_time:
            self._restore_buffers()
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
            if self.learn.closure.repeating:
                self.learn.opt.zero_grad()  # of the microbatches of SAM's second pass
            del self.learn.loss_grad  # a batch without one is not recorded
        raise skip

    def _undo_skipped(self) -> None:
        "Undo the effects of a skipped batch; SAM has restored the weights by now."
        if self._is_skipping:
            self._is_skipping = False
            self._restore_buffers()

    def _format_place(self, i: int) -> str:
        return f'batch {i} of epoch {self.learn.epoch}'

    def cleanup(self) -> None:
        "Drop losses and copies."
        self._start()

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the number of skipped batches."
        return {'n_skipped': self.n_skipped}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the number of skipped batches."
        self.n_skipped = sd['n_skipped']


def find_buffers(learn: LearnerLike) -> list[Buffer]:
    "Return the locations of the buffers of the model and of a loss function that is a module."
    roots = [m for m in (learn.model, learn.loss_func) if isinstance(m, nn.Module)]
    stores: list[Any] = [m._buffers for root in roots for m in root.modules()]
    return [(store, key) for store in stores for key, b in store.items() if b is not None]


class TerminateOnNaNCallback(GuardNonFinite):
    """End the fit when the loss is NaN or infinite: the guard's policy 'stop'.

    >>> TerminateOnNaNCallback().policy
    'stop'
    """

    def __init__(
        self,
        grads: bool = False,  # whether to check the gradients too
    ) -> None:
        super().__init__('stop', grads)
