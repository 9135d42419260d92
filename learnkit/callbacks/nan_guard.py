"""A guard against NaN and infinity: it looks at the loss, and at gradients, before they reach the weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from fastcore.basics import noop
from torch import Tensor

from learnkit.callbacks.accumulation import GradientAccumulation
from learnkit.callbacks.mixed_precision import MixedPrecision
from learnkit.callbacks.nan_diagnosis import (
    all_finite,
    bad_gradients,
    listed_few,
    named_parameters,
    samples_told,
    why_not_finite,
)
from learnkit.callbacks.rollback import Slot, Snapshot, put_back, refilled, slots_of, take_snapshot
from learnkit.core.errors import (
    CancelBatchException,
    CancelFitException,
    CancelStepException,
    LossError,
    OptionError,
    did_you_mean,
)
from learnkit.core.time import Time, as_time
from learnkit.core.validation import warn_user
from learnkit.engine.callback import Callback
from learnkit.inference.gather import AsyncToCPU

__all__ = ['GuardNonFinite', 'TerminateOnNaNCallback', 'say']

POLICIES = ('raise', 'skip', 'rollback', 'stop')


def say(cb: Callback, text: str) -> None:
    "Print a line, above the bar where there is one; under `no_logging()` nothing."
    if cb.learn.logger is noop:
        return
    from tqdm import tqdm

    tqdm.write(text)


class GuardNonFinite(Callback):
    """Act on a loss or a gradient that is NaN or infinite, before it reaches the weights or the recorded losses.

    `policy` says how:

    - 'raise' raises a `LossError`;
    - 'skip' leaves out the batch, or the step where a gradient is at fault; `n_skipped` counts;
    - 'rollback' goes back to a copy of weights, buffers and optimizer states in memory, made anew every
      `snapshot_every`, and to the averages of `EMA`. Schedules, random numbers and data go on, so that what led there
      is left behind. `n_rollbacks` counts; more than `max_rollbacks` to one copy raise a `LossError`;
    - 'stop' ends the fit at once (as CancelFit does: after a NaN there is nothing to evaluate or to checkpoint).

    Weights are then those before the step, and the model's buffers (running statistics) those before the batch.

    The message says which batch it was and what is to blame: an input or target, with its samples by the data set's
    indices, where the loader tells them; a parameter; or else the module that returned the first such value, found by
    a second forward pass; the parameters whose gradients are at fault.

    Each loss is looked at before its backward pass, and gradients once a step, those that are about to be used: of all
    microbatches and accumulated batches, unscaled, SAM's second ones, before clipping. Those that overflow in fp16 are
    the scaler's, which skips the step and lowers its scale. On the CPU this takes microseconds, and one reading of the
    gradients. On a GPU each look waits for the device: with 'raise' and 'stop' there is one a step, at losses
    and gradients together. `grads=False` looks at losses alone; on a GPU, with 'raise' and 'stop', then when they have
    arrived, while the next batch is computed: one batch late, when the weights have it already. `every=1` looks before
    the step on any device; `every=20` looks after twenty batches, at all their losses.

    Checkpointed: `n_skipped`, `n_rollbacks`, and the copy to go back to.

    Raises `OptionError` for bad options, and with 'rollback' `LossError` for weights that are not finite to begin with.

    >>> from learnkit.testing import synth_learner
    >>> learn = synth_learner(cbs=GuardNonFinite())
    >>> _ = learn.model.b.data.fill_(float('nan'))
    >>> try:
    ...     with learn.removed_cbs(learn.progress): learn.fit(5)
    ... except LossError as e: print(e)
    The loss is nan at batch 0 of epoch 0. Not finite: parameter b.
    """

    # of a step: after SAM, accumulation and unscaling, before clipping
    order, run_valid, remove_on_find = MixedPrecision.order + 0.5, False, True

    def __init__(
        self,
        policy: str = 'raise',  # 'raise', 'skip', 'rollback' or 'stop'
        grads: bool = True,  # look at the gradients too, before each step
        every: int | None = None,  # batches from one look to the next; None: see above
        snapshot_every: str | int | Time = '100ba',  # with 'rollback': copy interval; int: batches
        max_rollbacks: int = 3,  # with 'rollback': the most times in a row to the same copy
    ) -> None:
        if policy not in POLICIES:
            raise OptionError(
                f'policy={policy!r}: give one of {POLICIES}.{did_you_mean(str(policy), POLICIES)}'
            )
        if every is not None and not _is_count(every, 1):
            raise OptionError(f'every={every!r}: give a number of batches, 1 or more, or None.')
        if every is not None and every > 1 and policy in ('skip', 'rollback'):
            raise OptionError(f'policy={policy!r} looks at every batch: leave out every={every}.')
        if not _is_count(max_rollbacks, 0):
            raise OptionError(
                f'max_rollbacks={max_rollbacks!r}: give a number of times, 0 or more.'
            )
        self.snapshot_every = as_time(snapshot_every, 'ba')
        if self.snapshot_every.unit == 'dur':
            raise OptionError(
                f"snapshot_every={snapshot_every!r}: give batches, epochs, or minutes: '5m'."
            )
        self.policy, self.grads, self.every, self.max_rollbacks = (
            policy,
            grads,
            every,
            max_rollbacks,
        )
        self.n_skipped, self.n_rollbacks = 0, 0
        self._start()

    def _start(self) -> None:
        "Forget what belongs to one fit."
        self._told = False  # of a skipped batch
        self._unseen: list[
            tuple[int, Tensor]
        ] = []  # batches, and whether their losses are finite, on their device
        self._arriving = AsyncToCPU()
        self._leaving = False  # this batch or step is being left out
        self._slots: list[Slot] = []  # of the buffers, and their values before this batch
        self._before: list[Tensor] = []
        self._good: Snapshot | None = None  # what 'rollback' goes back to
        self._made: float = 0  # when that was made
        self._since: float = 0  # when that was made, or last gone back to
        self._in_a_row = 0  # how often it was gone back to

    def before_fit(self) -> None:
        "Start anew."
        if self.learn.fitting:
            self._start()

    def before_train(self) -> None:
        "Find the buffers that a forward pass may spoil."
        keeps = self.policy != 'rollback' and (self.every or 1) == 1
        self._slots, self._before = list(slots_of(self.learn).values()) if keeps else [], []

    def before_batch(self) -> None:
        "Keep what this batch may spoil."
        if self._slots:
            self._keep_buffers()
        if self.policy == 'rollback' and self._good is None:
            self._make_snapshot()

    # -- looking -----------------------------------------------------------------------------------

    def before_backward(self) -> None:
        "Look at the loss, or note whether it is finite."
        learn = self.learn
        if learn.run.repeating and learn.opt.needs_closure:
            return  # a line search probes
        if learn.loss_grad.numel() != 1:
            return  # the loop refuses it
        # the one is recorded, the other is learned from
        value = learn.loss + learn.loss_grad.detach()
        if not self._is_late(value.device.type):
            if learn.world.any(not math.isfinite(value.item())):
                self._act_on_loss(learn.iter)
            return
        finite, unseen = value.isfinite().reshape(()), self._unseen
        if unseen and unseen[-1][0] == learn.iter:
            unseen[-1] = learn.iter, unseen[-1][1] & finite
        else:
            unseen.append((learn.iter, finite))

    def _is_late(self, device: str) -> bool:
        "Tell whether losses are looked at later than before their backward pass."
        if self.policy in ('skip', 'rollback') or (
            self.every is None and self.learn.world.size > 1
        ):
            return False
        if self.every is not None and self.every > 1:
            return True
        return device != 'cpu' and (self.grads or self.every is None)

    def before_step(self) -> None:
        "Look at the gradients, and at the losses that came with them."
        if (
            not self.grads
            or self.learn.run.repeating
            or (self._unseen and len(self._unseen) < (self.every or 1))
        ):
            return
        self._look_at_rest(in_time=True)
        is_bad = not all_finite([p.grad for p in self.learn.step_parameters if p.grad is not None])
        if not self.learn.world.any(is_bad):
            return
        self._act('' if self._told else self._why_gradients(), CancelStepException)

    def after_cancel_step(self) -> None:
        "Look at the losses of a step that was skipped, by a scaler for one."
        if self.grads and not self.every:
            self._look_at_rest(in_time=True)
        self._leave_out()

    def after_cancel_batch(self) -> None:
        self._leave_out()

    def after_batch(self) -> None:
        "Look at the losses that are due, and make a copy where one is."
        if self._unseen:
            if self.every is not None:
                due = len(self._unseen) >= self.every
            else:
                due = not self.grads
            if due and self.every is None:
                self._look(self._arriving.put(self._unseen.pop()))
            elif due:
                self._look_at_rest()
        if self._good is not None and self._now() - self._since >= self.snapshot_every.value:
            self._make_snapshot()

    def after_train(self) -> None:
        "Look at what is left."
        self._look_at_rest()

    def _look_at_rest(self, in_time: bool = False) -> None:
        unseen, self._unseen = self._unseen, []
        if unseen:
            unseen = list(
                zip(
                    [i for i, _ in unseen], torch.stack([ok for _, ok in unseen]).cpu(), strict=True
                )
            )
        self._look([*self._arriving.flush(), *unseen], in_time)

    def _look(self, batches: list[tuple[int, Tensor]], in_time: bool = False) -> None:
        for i, finite in batches:
            if self.learn.world.any(not finite):
                self._act_on_loss(i, in_time and i == self.learn.iter)

    # -- acting ------------------------------------------------------------------------------------

    def _act_on_loss(self, i: int, in_time: bool = True) -> None:
        learn = self.learn
        if not in_time:
            text = f'The loss was not finite at {self._place(i)} (seen at batch {learn.iter}).'
        elif self._told:
            text = ''  # nobody will read it
        else:
            value = learn.loss_grad if learn.loss.isfinite() else learn.loss
            text = f'The loss is {value.item()} at {self._place(i)}. {why_not_finite(learn)}'
            if value.isfinite():
                text = f'The loss of another process is not finite at {self._place(i)}.'
        self._act(text, CancelBatchException, in_time)

    def _why_gradients(self) -> str:
        blamed, at = listed_few(bad_gradients(self.learn)), self._place(self.learn.iter)
        return f'The gradient of {blamed} is not finite at {at}.{samples_told(self.learn)}'

    def _act(self, text: str, skip: type[Exception], in_time: bool = True) -> None:
        if self.policy in ('raise', 'stop') and in_time:
            self._put_buffers_back()
        if self.policy == 'raise':
            raise LossError(text)
        if self.policy == 'stop':
            say(self, f'{text} The fit ends here.')
            raise CancelFitException
        self._count(text)
        self._leaving = True
        if skip is CancelBatchException:
            if self.learn.run.repeating:
                self.learn.opt.zero_grad()  # of pieces of SAM's second pass
            del self.learn.loss_grad  # a batch without one is not recorded
        raise skip

    def _count(self, text: str) -> None:
        if self.policy == 'rollback':
            return self._count_rollback(text)
        self.n_skipped += 1
        if not self._told:
            warn_user(f'{text} It is skipped, and so are others like it in this fit.')
        self._told = True

    def _count_rollback(self, text: str) -> None:
        age = Time(self._now() - self._made, self.snapshot_every.unit)
        if self._in_a_row >= self.max_rollbacks:
            self._roll_back()
            raise LossError(
                f'{text} Weights were rolled back {self._in_a_row} times to the same copy, and it came to '
                'this again; they are there once more. Lower the learning rate, clip gradients, or see '
                "what these batches have in common: policy='raise' and `Replay()` help."
            )
        self.n_rollbacks, self._in_a_row = self.n_rollbacks + 1, self._in_a_row + 1
        warn_user(
            f'{text} Weights and optimizer go back to what they were {age} before; training goes on with the '
            'batches that follow.'
        )

    def _leave_out(self) -> None:
        "Undo what the batch has done already; whatever else it has perturbed (SAM) is back in place by now."
        if not self._leaving:
            return
        self._leaving = False
        if self.policy == 'rollback':
            self._roll_back()
        else:
            self._put_buffers_back()

    def _place(self, i: int) -> str:
        return f'batch {i} of epoch {self.learn.epoch}'

    # -- buffers, when a batch is skipped ----------------------------------------------------------

    @torch.no_grad()
    def _keep_buffers(self) -> None:
        now: Any = [store[key] for store, key in self._slots]
        before = self._before
        if len(before) == len(now) and all(
            a.shape == b.shape for a, b in zip(before, now, strict=True)
        ):
            torch._foreach_copy_(before, now)
        else:
            self._before = [b.clone() for b in now]

    @torch.no_grad()
    def _put_buffers_back(self) -> None:
        for (store, key), value in zip(self._slots, self._before, strict=True):
            store[key] = refilled(store[key], value)

    # -- going back --------------------------------------------------------------------------------

    def _now(self) -> float:
        return self.learn.finished(self.snapshot_every.unit)

    def _make_snapshot(self) -> None:
        "Copy what there is to go back to; not between batches whose gradients are added up, nor what is not finite."
        learn = self.learn
        if any(p.grad is not None for p in learn.opt.parameters()):
            return
        if not all_finite(list(learn.model.parameters())):
            if self._good is None:
                bad = [
                    name for name, p in named_parameters(learn).items() if not p.isfinite().all()
                ]
                raise LossError(
                    f'There is nothing to roll back to: not finite to begin with: {listed_few(bad)}.'
                )
            return
        self._good = None  # first, for there may be no room for both
        self._good, self._made, self._since, self._in_a_row = (
            take_snapshot(learn),
            self._now(),
            self._now(),
            0,
        )

    def _roll_back(self) -> None:
        learn = self.learn
        assert self._good is not None  # made before the first batch
        put_back(learn, self._good)
        learn.opt.zero_grad()
        for cb in learn.cbs:  # samples that wait for their step met other weights
            if isinstance(cb, GradientAccumulation):
                cb._drop()
        self._since = self._now()

    def cleanup(self) -> None:
        "Let go of losses and copies."
        self._start()

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        "Return the counts, and the copy that there is to go back to."
        return {
            'n_skipped': self.n_skipped,
            'n_rollbacks': self.n_rollbacks,
            'in_a_row': self._in_a_row,
            'made': self._made,
            'since': self._since,
            'good': self._good,
        }

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Go on counting, with the same copy to go back to."
        self.n_skipped, self.n_rollbacks, self._in_a_row = (
            sd['n_skipped'],
            sd['n_rollbacks'],
            sd['in_a_row'],
        )
        self._made, self._since, self._good = sd['made'], sd['since'], sd['good']


class TerminateOnNaNCallback(GuardNonFinite):
    """End the fit when the loss is NaN or infinite: the guard's policy 'stop'.

    >>> TerminateOnNaNCallback().policy
    'stop'
    """

    def __init__(
        self,
        grads: bool = False,  # look at the gradients too
        every: int | None = None,  # batches between looks; None: each, on a GPU one batch late
    ) -> None:
        super().__init__('stop', grads, every)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
