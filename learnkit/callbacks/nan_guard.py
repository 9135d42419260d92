"""Guard against NaN and infinity: check losses and gradients before they reach the weights."""

from __future__ import annotations

from typing import Any

import torch
from fastcore.basics import noop
from torch import Tensor
from torch.nn.parameter import is_lazy

from learnkit.callbacks.accumulation import GradientAccumulation
from learnkit.callbacks.mixed_precision import MixedPrecision
from learnkit.callbacks.nan_diagnosis import (
    all_finite,
    describe_samples,
    explain_nonfinite,
    find_bad_gradients,
    format_few,
    is_finite,
    named_parameters,
)
from learnkit.callbacks.rollback import (
    RollbackPoint,
    Slot,
    copy_into,
    find_buffers,
    make_rollback_point,
    roll_back,
)
from learnkit.core.errors import (
    CancelBatchException,
    CancelFitException,
    CancelStepException,
    LossError,
    OptionError,
    did_you_mean,
)
from learnkit.core.model import has_lazy_tensors
from learnkit.core.time import Time, as_time
from learnkit.core.validation import check_count, warn_user
from learnkit.engine.callback import Callback
from learnkit.inference.gather import AsyncToCPU

__all__ = ['GuardNonFinite', 'TerminateOnNaNCallback', 'print_line']

POLICIES = ('raise', 'skip', 'rollback', 'stop')


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
    - 'rollback': restore a copy of weights, buffers and optimizer states in memory, made every
      `snapshot_every`, and the averages of `EMA`. Schedules, random numbers and data continue, so
      that the batches that led there are left behind. `n_rollbacks` counts; more than
      `max_rollbacks` to one copy raise a `LossError`;
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
    losses and gradients together. `grads=False` checks losses only. With 'raise' and 'stop' on a
    GPU it checks them once they have arrived, while the next batch is computed: one batch late,
    after the weights were updated. `every=1` checks before the step on any device; `every=20`
    checks after twenty batches, all their losses.

    Checkpointed: `n_skipped`, `n_rollbacks`, and the copy of the weights.

    Raises `OptionError` for invalid options, and with 'rollback' `LossError` if the initial weights
    are not finite.

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
        policy: str = 'raise',  # 'raise', 'skip', 'rollback' or 'stop'
        grads: bool = True,  # whether to check the gradients too, before each step
        every: int | None = None,  # number of batches between checks; None: see above
        snapshot_every: str | int | Time = '100ba',  # with 'rollback': copy interval; int: batches
        max_rollbacks: int = 3,  # with 'rollback': limit of successive rollbacks to one copy
    ) -> None:
        if policy not in POLICIES:
            raise OptionError(
                f'policy={policy!r}: give one of {POLICIES}.{did_you_mean(str(policy), POLICIES)}'
            )
        if every is not None:
            check_count('every', every)
        if every is not None and every > 1 and policy in ('skip', 'rollback'):
            raise OptionError(f'policy={policy!r} checks every batch: leave out every={every}.')
        check_count('max_rollbacks', max_rollbacks, 0)
        self.snapshot_every = as_time(snapshot_every, 'ba')
        if self.snapshot_every.unit == 'dur':
            raise OptionError(
                f"snapshot_every={snapshot_every!r}: give batches, epochs, or minutes: '5m'."
            )
        self.policy = policy
        self.grads = grads
        self.every = every
        self.max_rollbacks = max_rollbacks
        self.n_skipped = 0
        self.n_rollbacks = 0
        self._start()

    def _start(self) -> None:
        "Reset the state of one fit."
        self._has_warned = False  # whether a skipped batch was reported
        # batch index, and whether its loss is finite as a tensor on its device
        self._pending: list[tuple[int, Tensor]] = []
        self._transfer = AsyncToCPU()
        self._is_skipping = False  # whether the current batch or step is being skipped
        self._slots: list[Slot] = []  # locations of the buffers
        self._saved_buffers: list[Tensor] = []  # values of the buffers before this batch
        self._snapshot: RollbackPoint | None = None  # copy that 'rollback' restores
        self._snapshot_time: float = 0  # time of the copy
        self._interval_start: float = 0  # time of the copy or of the latest rollback to it
        self._n_successive = 0  # number of rollbacks to the copy

    def before_fit(self) -> None:
        "Reset the guard."
        self._start()

    def before_train(self) -> None:
        "Find the buffers that a forward pass may change."
        keeps = self.policy != 'rollback' and (self.every or 1) == 1
        self._slots = list(find_buffers(self.learn).values()) if keeps else []
        self._saved_buffers = []

    def before_batch(self) -> None:
        "Copy the tensors that this batch may spoil."
        if self._slots:
            self._keep_buffers()
        if self.policy == 'rollback' and self._snapshot is None:
            self._make_snapshot()

    # -- checks ------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        "Check the loss, or record whether it is finite for a later check."
        learn = self.learn
        if learn.run.repeating and learn.opt.needs_closure:
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
        if self.policy in ('skip', 'rollback') or (
            self.every is None and self.learn.world.size > 1
        ):
            return False
        if self.every is not None and self.every > 1:
            return True
        return device != 'cpu' and (self.grads or self.every is None)

    def before_step(self) -> None:
        "Check the gradients, and the losses that have not been checked."
        if not self.grads or self.learn.run.repeating:
            return
        if self._pending and len(self._pending) < (self.every or 1):
            return
        self._check_pending(in_time=True)
        is_bad = not all_finite([p.grad for p in self.learn.step_parameters if p.grad is not None])
        if not self.learn.world.any(is_bad):
            return
        self._act('' if self._has_warned else self._explain_gradients(), CancelStepException)

    def after_cancel_step(self) -> None:
        "Check the losses of a skipped step, for example skipped by a scaler."
        if self.grads and not self.every:
            self._check_pending(in_time=True)
        self._undo_skipped()

    def after_cancel_batch(self) -> None:
        self._undo_skipped()

    def after_batch(self) -> None:
        "Check the losses that are due, and make a copy if one is due."
        if self._pending and self.every is None and not self.grads:
            self._check_losses(self._transfer.put(self._pending.pop()))
        elif self._pending and self.every is not None and len(self._pending) >= self.every:
            self._check_pending()
        if (
            self._snapshot is not None
            and self._read_time() - self._interval_start >= self.snapshot_every.value
        ):
            self._make_snapshot()

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
        if self.policy == 'rollback':
            self._count_rollback(text)
        else:
            self._count_skip(text)
        self._is_skipping = True
        if skip is CancelBatchException:
            if self.learn.run.repeating:
                self.learn.opt.zero_grad()  # of the microbatches of SAM's second pass
            del self.learn.loss_grad  # a batch without one is not recorded
        raise skip

    def _count_skip(self, text: str) -> None:
        "Count a skipped batch, and report the first one of the fit."
        self.n_skipped += 1
        if not self._has_warned:
            warn_user(f'{text} It is skipped, and so are others like it in this fit.')
        self._has_warned = True

    def _count_rollback(self, text: str) -> None:
        "Count and report a rollback; raise `LossError` after too many to the same copy."
        if self._snapshot is None:
            raise LossError(
                f'{text} There is nothing to roll back to: no batch was trained on before.'
            )
        age = Time(self._read_time() - self._snapshot_time, self.snapshot_every.unit)
        if self._n_successive >= self.max_rollbacks:
            self._roll_back()
            raise LossError(
                f'{text} Weights were rolled back {self._n_successive} times to the same copy, and it came to '
                'this again; they are there once more. Lower the learning rate, clip gradients, or see '
                "what these batches have in common: policy='raise' and `Replay()` help."
            )
        self.n_rollbacks += 1
        self._n_successive += 1
        warn_user(
            f'{text} Weights and optimizer go back to what they were {age} before; training continues with the '
            'batches that follow.'
        )

    def _undo_skipped(self) -> None:
        "Undo the effects of a skipped batch; SAM has restored the weights by now."
        if not self._is_skipping:
            return
        self._is_skipping = False
        if self.policy == 'rollback':
            self._roll_back()
        else:
            self._restore_buffers()

    def _format_place(self, i: int) -> str:
        return f'batch {i} of epoch {self.learn.epoch}'

    # -- buffers of a skipped batch ----------------------------------------------------------------

    @torch.no_grad()
    def _keep_buffers(self) -> None:
        buffers: Any = [store[key] for store, key in self._slots]
        saved = self._saved_buffers
        has_shapes = len(saved) == len(buffers) and all(
            a.shape == b.shape for a, b in zip(saved, buffers, strict=True)
        )
        if has_shapes:
            torch._foreach_copy_(saved, buffers)
        elif any(map(is_lazy, buffers)):
            self._saved_buffers = []  # a lazy model has no values yet
        else:
            self._saved_buffers = [b.clone() for b in buffers]

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        if not self._saved_buffers:
            return
        for (store, key), value in zip(self._slots, self._saved_buffers, strict=True):
            store[key] = copy_into(store[key], value)

    # -- rollback ----------------------------------------------------------------------------------

    def _read_time(self) -> float:
        return self.learn.finished(self.snapshot_every.unit)

    def _make_snapshot(self) -> None:
        "Copy the state for a rollback, unless gradients accumulate or weights are lazy or not finite."
        learn = self.learn
        if any(p.grad is not None for p in learn.opt.parameters()) or has_lazy_tensors(learn.model):
            return
        if not all_finite(list(learn.model.parameters())):
            if self._snapshot is not None:
                return
            bad = [name for name, p in named_parameters(learn).items() if not is_finite(p)]
            raise LossError(
                f'There is nothing to roll back to: not finite to begin with: {format_few(bad)}.'
            )
        self._snapshot = None  # free the old copy first: memory may not hold two
        self._snapshot = make_rollback_point(learn)
        self._snapshot_time = self._interval_start = self._read_time()
        self._n_successive = 0

    def _roll_back(self) -> None:
        learn = self.learn
        assert self._snapshot is not None  # checked by `_count_rollback`
        roll_back(learn, self._snapshot)
        learn.opt.zero_grad()
        for cb in learn.cbs:  # accumulated gradients are of other weights
            if isinstance(cb, GradientAccumulation):
                cb.drop_gradients()
        self._interval_start = self._read_time()

    def cleanup(self) -> None:
        "Drop losses and copies."
        self._start()

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        "Return the counts, and the copy for a rollback."
        return {
            'n_skipped': self.n_skipped,
            'n_rollbacks': self.n_rollbacks,
            'in_a_row': self._n_successive,
            'made': self._snapshot_time,
            'since': self._interval_start,
            'good': self._snapshot,
        }

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the counts, and the copy for a rollback."
        self.n_skipped = sd['n_skipped']
        self.n_rollbacks = sd['n_rollbacks']
        self._n_successive = sd['in_a_row']
        self._snapshot_time = sd['made']
        self._interval_start = sd['since']
        self._snapshot = sd['good']


class TerminateOnNaNCallback(GuardNonFinite):
    """End the fit when the loss is NaN or infinite: the guard's policy 'stop'.

    >>> TerminateOnNaNCallback().policy
    'stop'
    """

    def __init__(
        self,
        grads: bool = False,  # whether to check the gradients too
        every: int | None = None,  # batches between checks; None: each, on a GPU one batch late
    ) -> None:
        super().__init__('stop', grads, every)
