# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: one optimizer step for several batches, with the gradient of one big batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from learnkit.comm.dtensor import local_shards
from learnkit.core.errors import OptionError, StepPutOff
from learnkit.core.validation import check_count, warn_user
from learnkit.engine.callback import Callback
from learnkit.engine.custom_batch import OptimizeCall
from learnkit.engine.loss_weights import check_is_mean
from learnkit.engine.microbatch import divide, scale_loss


@dataclass
class StepSum:
    "Batches since the last step of an optimizer."

    n_samples: int = 0
    n_batches: int = 0
    weight: Any = 0  # sum of the weights of the batches
    divisor: Any = None  # divisor of the weighted sum in the gradients; None: there is no gradient
    n_steps: int = 0  # number of steps of this fit
    stepped: bool = False  # whether this epoch had a step


class GradientAccumulation(Callback):
    """Take a step once at least `n_acc` samples, or `batches` batches, have been processed since the last one.

    The step has the joint gradient of those samples. `GradientAccumulation(64)` counts samples,
    `GradientAccumulation(batches=4)` batches of any size (of each process).

    The gradient is the mean over those samples, whatever the batch sizes, or over the elements that
    the loss averages over (targets that count, class weights); with `Learner(weight_func=)` the
    weighted mean; for a loss with reduction 'sum' the sum. Terms that other callbacks add to
    `loss_grad` are averaged likewise. The reported loss is each batch's own. All other callbacks,
    of any order, get `before_step` and later events only where a step is due, with its gradients.
    A batch without a step ends with `after_cancel_batch`.

    In a user's own loop each call of `optimize` counts the batch's samples for the optimizer that
    it names: each optimizer has its own sum and its own steps. A call without a step returns False,
    and the batch continues.

    Samples left over at the end of an epoch's training get a separate step (in `after_train`),
    unless the epoch had no other step: then they count for the next epoch. Samples left over at the
    end of the fit are dropped, with a warning if the whole fit took no step.

    Checkpointed: the numbers of samples; pending gradients are part of every checkpoint.

    Raises `OptionError` for an `n_acc` below 1, for an `n_acc` smaller than a batch (every batch
    would step), and before training with an optimizer that needs a closure. Raises
    `LossError` at the first batch for a loss function that returns a sum and has no `reduction='sum'`.

    >>> GradientAccumulation(64).n_acc, GradientAccumulation(batches=4).batches
    (64, 4)
    """

    order = 6  # before mixed precision (10) unscales the gradients
    run_valid = False
    run_in = 'fit'
    runs_first = ('before_step',)  # others see no step that is put off, and no partial sum
    runs_last = ('before_backward',)  # terms that others add to the loss are averaged too

    def __init__(
        self,
        n_acc: int = 32,  # number of samples of a step
        *,
        batches: int | None = None,  # number of batches of a step, instead of `n_acc`
    ) -> None:
        self.n_acc = check_count('n_acc', n_acc)
        self.batches = None if batches is None else check_count('batches', batches)
        if batches is not None and n_acc != 32:
            raise OptionError('GradientAccumulation: pass n_acc (samples) or batches, not both.')
        # number of samples and weight of the current batch, until it is counted
        self._batch: tuple[int, Any] | None = None
        self._in_tail = False  # whether the step is for samples left over in an epoch
        self._is_checked = False  # whether the loss function of this fit was checked
        # whether the backward pass of the current batch, or call of `optimize`, is over
        self._is_counted = False
        self._sums: dict[str, StepSum] = {}  # by name of the optimizer; '': all of them

    def before_fit(self) -> None:
        if self.learn.opt.needs_closure:
            raise OptionError(
                'GradientAccumulation: an optimizer that evaluates the loss again (LBFGS) would see the '
                'last batch alone. Use `Learner(microbatch=)` and bigger batches.'
            )
        self._is_checked = False
        self._sums = {}

    def before_train(self) -> None:
        for total in self._sums.values():
            total.stepped = False

    def _find_sum(self) -> StepSum:
        "Return the sum of the current optimizer, or of all."
        return self._sums.setdefault(self.learn.turn or '', StepSum())

    # -- batches -----------------------------------------------------------------------------------

    def before_batch(self) -> None:
        self._is_counted = False
        self._batch = self._measure() if self.learn.microbatch else None

    def before_backward(self) -> None:
        learn = self.learn
        if not self._is_checked:
            self._is_checked = True
            check_is_mean(learn, vars(learn).get('pred'))
        share = self._find_share()
        if share is not None:
            learn.loss_grad = learn.loss_grad * share

    def _find_share(self) -> Any:
        "Return the share of the batch in the gradient of its step; None for a 'sum' loss."
        learn = self.learn
        total = self._find_sum()
        if not learn.microbatch:
            self._is_counted = False
            self._batch = self._measure()
        if self._batch is None or self._batch[1] is None:
            return None
        n = self._batch[0]
        weight = widen_weight(self._batch[1], learn.loss)
        if total.divisor is None:
            total.divisor = self._expect_divisor(n, weight)
        return weight / total.divisor

    def compiled_step(self) -> dict[str, Any]:
        "Return the weighting of the loss in compiled passes; the step of the optimizer is the ordinary one."
        return {
            'state': self._read_state,
            'before_backward': scale_loss,
            'finish': lambda found: self.after_backward(),
        }

    def _read_state(self) -> dict[str, Any] | None:
        "Return the share of the batch; None for the first batch, whose loss is checked."
        if not self._is_checked:
            return None
        share = self._find_share()
        return {} if share is None else {'share': share}

    def _expect_divisor(self, n: int, weight: Any) -> Any:
        "Return the expected weight of all batches of a step, from its first batch."
        if self.batches is not None:
            return expected_sum(weight, self.batches)
        if isinstance(weight, Tensor) or weight != n:
            return expected_sum(weight, self.n_acc / n)
        return self.n_acc

    def after_cancel_backward(self) -> None:
        if not self.learn.microbatch:
            self._batch = None

    def after_backward(self) -> None:
        if not self.learn.microbatch or self.learn.parts.microbatches.is_last:
            self._count_batch(self._find_sum())

    def before_step(self) -> None:
        total = self._find_sum()
        # the loop has asked `will_step`, but an override of `_do_grad_opt` may not have
        if not self._in_tail and not self._is_due(total.n_samples, total.n_batches):
            raise StepPutOff
        self._average(total)

    def will_step(self) -> bool:
        "Return True if the current batch ends with a step. The loop calls it before the step, DDP before the forward."
        total = self._find_sum()
        if self._in_tail:
            return True
        if self._is_counted:
            return self._is_due(total.n_samples, total.n_batches)
        n = self.learn.parts.processes.batch.count_samples(self.learn)
        return self._is_due(total.n_samples + n, total.n_batches + 1)

    def samples_per_step(self, bs: int) -> int:
        "Return the number of samples of a step, of batches of `bs` samples."
        return bs * (self.batches or -(-self.n_acc // bs))

    def _is_due(self, n_samples: int, n_batches: int) -> bool:
        return n_samples >= self.n_acc if self.batches is None else n_batches >= self.batches

    def after_step(self) -> None:
        total = self._find_sum()
        self._sums[self.learn.turn or ''] = StepSum(n_steps=total.n_steps + 1, stepped=True)

    def _measure(self) -> tuple[int, Any]:
        "Return number of samples and weight of the batch; the weight is None for a 'sum' loss."
        batch = self.learn.parts.processes.batch
        return batch.count_samples(self.learn), batch.total_weight(self.learn)

    def _count_batch(self, total: StepSum) -> None:
        self._is_counted = True
        if self._batch is None:
            return
        n, weight = self._batch
        self._batch = None
        total.n_samples += n
        total.n_batches += 1
        if total.n_batches == 1 and not total.n_steps:
            self._check_unit(n)
        if weight is not None:
            total.weight = total.weight + widen_weight(weight, self.learn.loss)

    def _check_unit(self, n: int) -> None:
        "Raise `OptionError` before the first step if every batch would step: `n_acc` was meant as batches."
        if self.batches is None and 1 < self.n_acc < n:
            raise OptionError(
                f'GradientAccumulation({self.n_acc}) counts samples, and a batch has {n}: every batch would '
                f'step. For {self.n_acc} batches write `GradientAccumulation(batches={self.n_acc})`, or '
                f'their samples, `GradientAccumulation({self.n_acc * n})`.'
            )

    def _average(self, total: StepSum) -> None:
        "Scale the gradients to the mean over the samples of the step, if not exactly `n_acc`."
        is_exact = not isinstance(total.weight, Tensor) and total.weight in (0, total.divisor)
        if is_exact or total.divisor is None:
            return
        grads = local_shards(p.grad for p in self.learn.step_parameters if p.grad is not None)
        scale = divide(total.divisor, total.weight)
        if grads:
            if isinstance(scale, Tensor):
                scale = scale.to(grads[0].device)
            torch._foreach_mul_(grads, scale)
        # gradients added later, if the step is postponed, get the same divisor
        total.divisor = total.weight

    # -- end of an epoch and of a fit --------------------------------------------------------------

    def after_train(self) -> None:
        "Take a step for the samples left over."
        for turn, total in sorted(self._sums.items()):
            if total.n_samples and total.stepped:
                with self.learn.parts.custom_batch.opened(self.learn, OptimizeCall(turn or None)):
                    self._step_for_rest()

    def _step_for_rest(self) -> None:
        learn = self.learn
        self._in_tail = True
        try:
            learn._take_step()
        except StepPutOff:  # by another callback: the samples count for the next epoch
            return
        finally:
            self._in_tail = False
        learn.opt.zero_grad(only=learn.turn)

    def after_fit(self) -> None:
        if self.learn.run.stopping:
            return
        for total in self._sums.values():
            if total.n_steps or not total.n_samples:
                continue
            length = f'n_acc={self.n_acc}' if self.batches is None else f'batches={self.batches}'
            warn_user(
                f'GradientAccumulation({length}): the fit had only {total.n_samples} samples, so no step '
                'was taken and no weight has changed. Lower that number, or train for more epochs.'
            )

    def cleanup(self) -> None:
        "Drop samples and gradients that no step has used."
        if any(total.n_samples for total in self._sums.values()) and self.learn.opt is not None:
            self.learn.opt.zero_grad()
        self._sums = {}

    after_cancel_fit = cleanup

    # -- checkpoints -------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the sums; pending gradients are in the checkpoint itself."
        return {'sums': {turn: dict(vars(total)) for turn, total in self._sums.items()}}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the sums."
        self._sums = {turn: StepSum(**values) for turn, values in sd['sums'].items()}


def expected_sum(weight: Any, times: float) -> Any:
    "Return the expected weight of a step, or 1 for 0, so that gradients have their final magnitude."
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 1.0, weight * times)
    return weight * times or 1.0


def widen_weight(weight: Any, loss: Tensor) -> Any:
    "Convert a weight to the precision of the loss, at least float32."
    if not isinstance(weight, Tensor):
        return weight
    return weight.to(torch.promote_types(loss.dtype, torch.float32))
