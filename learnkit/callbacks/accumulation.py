"""Gradient accumulation: one optimizer step for several batches, with the gradient of one big batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from learnkit.core.denominator import check_is_mean
from learnkit.core.dtensor import local_shards
from learnkit.core.errors import BatchError, CancelStepException, OptionError, StepPutOff
from learnkit.core.validation import check_count, warn_user
from learnkit.engine.callback import Callback
from learnkit.engine.microbatch import divide
from learnkit.engine.run import Turn

__all__ = ['GradientAccumulation']


class GradientAccumulation(Callback):
    """Step once at least `n_acc` samples, or `batches` batches, were processed since the last step.

    The step has the joint gradient of those samples. `GradientAccumulation(64)` counts samples,
    `GradientAccumulation(batches=4)` batches of any size (of each process).

    The gradient is the mean over those samples, whatever the batch sizes, or over the elements that
    the loss averages over (targets that count, class weights); with `Learner(weight_func=)` the
    weighted mean; for a loss with reduction 'sum' the sum. Terms that other callbacks add to
    `loss_grad` are averaged likewise. The reported loss is each batch's own. `before_step` and
    later events of a step occur only at optimizer steps, so that clipping, mixed precision,
    schedules and averages see one big batch. A batch without a step ends with `after_cancel_batch`.

    In a user's own loop each call of `optimize` counts the batch's samples for the optimizer that
    it names: each optimizer has its own sum and its own steps. A call without a step returns False,
    and the batch continues.

    Samples left over at the end of an epoch's training get a step of their own (in `after_train`),
    unless the epoch had no other step: then they count for the next epoch. Samples left over at the
    end of the fit are dropped, with a warning if the whole fit took no step.

    Checkpointed: the numbers of samples; pending gradients are part of every checkpoint.

    Raises `OptionError` for an `n_acc` below 1, for an `n_acc` smaller than a batch (every batch
    would step), before training with an optimizer that needs a closure, and if one call of
    `optimize` names an optimizer and another none, so that their gradients would mix. Raises
    `LossError` at the first batch for a loss function that adds up without a `reduction` that says so.

    >>> GradientAccumulation(64).n_acc, GradientAccumulation(batches=4).batches
    (64, 4)
    """

    order = 6  # before mixed precision (10) unscales the gradients
    run_valid = False
    run_in = 'fit'
    runs_last = ('before_backward',)  # terms that others add to the loss are averaged too

    def __init__(
        self,
        n_acc: int = 32,  # number of samples of a step
        *,
        batches: int | None = None,  # number of batches of a step, instead of `n_acc`
    ) -> None:
        check_count('n_acc', n_acc)
        if batches is not None:
            check_count('batches', batches)
        if batches is not None and n_acc != 32:
            raise OptionError('GradientAccumulation: give n_acc (samples) or batches, not both.')
        self.n_acc = int(n_acc)
        self.batches = None if batches is None else int(batches)
        # number of samples and weight of the current batch, until it is counted
        self._batch: tuple[int, Any] | None = None
        self._in_tail = False  # whether the step is for samples left over in an epoch
        self._forget()

    def before_fit(self) -> None:
        if self.learn.opt.needs_closure:
            self.on_reevaluation()
        self._forget()

    def on_reevaluation(self) -> None:
        "Raise `OptionError`: the step of such an optimizer would evaluate the last batch only."
        raise OptionError(
            'GradientAccumulation: an optimizer that evaluates the loss again (LBFGS) would see the '
            'last batch alone. Use `Learner(microbatch=)` and bigger batches.'
        )

    def before_train(self) -> None:
        for counts in self._sums.values():
            counts['stepped'] = False

    # -- optimizers --------------------------------------------------------------------------------

    def _forget(self) -> None:
        "Reset all counts."
        self._sums: dict[str, dict[str, Any]] = {}  # counts by name of the optimizer; '': all
        self._is_checked = False  # whether the loss function of this fit was checked
        self._select_sum('')

    def _select_sum(self, turn: str) -> None:
        "Count for an optimizer from now on."
        self._turn = turn
        if turn in self._sums:
            self._sum = self._sums[turn]
            return
        # number of steps of this fit, and whether this epoch had one
        self._sum = self._sums[turn] = {'n_steps': 0, 'stepped': False}
        self._start_sum()

    def _start_sum(self) -> None:
        "Count from 0, with the divisor of the weighted sum that the gradients are."
        self._sum |= {'n_samples': 0, 'n_batches': 0, 'weight_sum': 0, 'divisor': self.n_acc}

    def _take_turn(self) -> None:
        "Switch to the counts of the current optimizer."
        turn = self.learn.turn or ''
        if turn == self._turn:
            return
        waiting = [name for name, counts in self._sums.items() if counts['n_samples']]
        if (turn and '' in waiting) or (not turn and waiting):
            raise OptionError(
                'GradientAccumulation: one call of optimize() names an optimizer, another '
                'one none, and gradients that wait would mix. Give each call its `only=`.'
            )
        self._select_sum(turn)

    # -- batches -----------------------------------------------------------------------------------

    def before_batch(self) -> None:
        self._batch = self._measure() if self.learn.microbatch else None

    def before_backward(self) -> None:
        learn = self.learn
        self._take_turn()
        if not self._is_checked:
            self._is_checked = True
            check_is_mean(learn, vars(learn).get('pred'))
        if not learn.microbatch:
            self._batch = self._measure()
        if self._batch is None or self._batch[1] is None:
            return
        n, weight = self._batch[0], widen_weight(self._batch[1], learn.loss)
        if not self._sum['n_samples']:
            self._begin_sum(n, weight)
        learn.loss_grad = learn.loss_grad * (weight / self._sum['divisor'])

    def _begin_sum(self, n: int, weight: Any) -> None:
        "Set the divisor of a step by its first batch: the expected weight of all its batches."
        if self.batches is not None:
            self._sum['divisor'] = expected_sum(weight, self.batches)
        elif isinstance(weight, Tensor) or weight != n:
            self._sum['divisor'] = expected_sum(weight, self.n_acc / n)

    def after_cancel_backward(self) -> None:
        if not self.learn.microbatch:
            self._batch = None

    def after_backward(self) -> None:
        if not self.learn.microbatch:
            self._count_batch()

    def before_step(self) -> None:
        self._take_turn()
        if self.learn.microbatch:
            self._count_microbatches()
        if not self._in_tail and not self._is_due():
            raise StepPutOff
        self._average()

    def will_step(self) -> bool:
        "Return True if the current batch ends with a step."
        return self._is_due(self.learn.strategy.count_samples(self.learn), 1)

    def _is_due(self, n_samples: int = 0, n_batches: int = 0) -> bool:
        "Return True if a step is due, after further samples and batches."
        if self.batches is None:
            return self._sum['n_samples'] + n_samples >= self.n_acc
        return self._sum['n_batches'] + n_batches >= self.batches

    def after_step(self) -> None:
        self._sum['n_steps'] += 1
        self._sum['stepped'] = True
        self._start_sum()

    def _measure(self) -> tuple[int, Any]:
        "Return number of samples and weight of the batch; the weight is None for a 'sum' loss."
        strategy = self.learn.strategy
        return strategy.count_samples(self.learn), strategy.total_weight(self.learn)

    def _count_microbatches(self) -> None:
        "Count a batch after its microbatches, and check that its size is unchanged."
        if self._batch is not None:
            n = self.learn.strategy.count_samples(self.learn)
            if self._batch[0] != n:
                raise BatchError(
                    f'GradientAccumulation: a callback of order above {self.order} made {n} samples of '
                    f'{self._batch[0]} in before_batch. Give it a lower order, or leave `microbatch` out.'
                )
        self._count_batch()

    def _count_batch(self) -> None:
        if self._batch is None:
            return
        (n, weight), self._batch = self._batch, None
        counts = self._sum
        counts['n_samples'] += n
        counts['n_batches'] += 1
        if counts['n_batches'] == 1 and not counts['n_steps']:
            self._check_unit(n)
        if weight is not None:
            widened = widen_weight(weight, self.learn.loss)
            counts['weight_sum'] = counts['weight_sum'] + widened

    def _check_unit(self, n: int) -> None:
        "Raise `OptionError` before the first step if every batch would step: `n_acc` was meant as batches."
        if self.batches is None and 1 < self.n_acc < n:
            raise OptionError(
                f'GradientAccumulation({self.n_acc}) counts samples, and a batch has {n}: every batch would '
                f'step. For {self.n_acc} batches write `GradientAccumulation(batches={self.n_acc})`, or '
                f'their samples, `GradientAccumulation({self.n_acc * n})`.'
            )

    def _average(self) -> None:
        "Scale the gradients to the mean over the samples of the step, if not exactly `n_acc`."
        total = self._sum['weight_sum']
        divisor = self._sum['divisor']
        if not isinstance(total, Tensor) and total in (0, divisor):
            return
        grads = local_shards(p.grad for p in self.learn.step_parameters if p.grad is not None)
        scale = divide(divisor, total)
        if grads:
            if isinstance(scale, Tensor):
                scale = scale.to(grads[0].device)
            torch._foreach_mul_(grads, scale)
        # gradients added later, if the step is postponed, get the same divisor
        self._sum['divisor'] = total

    # -- end of an epoch and of a fit --------------------------------------------------------------

    def after_train(self) -> None:
        "Take a step for the samples left over."
        for turn in sorted(self._sums):
            with self.learn.taking(Turn(turn or None)):
                self._step_for_rest(turn)

    def _step_for_rest(self, turn: str) -> None:
        learn = self.learn
        counts = self._sums[turn]
        if not counts['n_samples'] or not counts['stepped']:
            return
        self._in_tail = True
        try:
            learn._with_events(learn._step, 'step', CancelStepException)
        finally:
            self._in_tail = False
        learn.opt.zero_grad(only=learn.turn)

    def after_cancel_fit(self) -> None:
        self.drop_gradients()

    def after_fit(self) -> None:
        if self.learn.run.stopping:
            return
        for turn, counts in self._sums.items():
            if counts['n_steps'] or not counts['n_samples']:
                continue
            n = counts['n_samples']
            length = f'n_acc={self.n_acc}' if self.batches is None else f'batches={self.batches}'
            whose = f' for {turn}' if turn else ''
            warn_user(
                f'GradientAccumulation({length}): the fit had only {n} samples{whose}, '
                'so no step was taken and no weight has changed. Lower that number, or train for more '
                'epochs.'
            )

    def cleanup(self) -> None:
        self.drop_gradients()

    def drop_gradients(self) -> None:
        "Drop samples and gradients that no step has used."
        has_samples = any(counts['n_samples'] for counts in self._sums.values())
        if has_samples and self.learn.opt is not None:
            self.learn.opt.zero_grad()
        self._sums = {self._turn: self._sum}
        self._start_sum()

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        "Return the counts; pending gradients are in the checkpoint itself."
        others = {turn: dict(c) for turn, c in self._sums.items() if turn != self._turn}
        return {**self._sum, 'turn': self._turn, 'others': others}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the counts."
        current = {name: sd[name] for name in self._sum}
        turn = sd['turn']
        others = sd['others']
        self._sums = {turn: dict(counts) for turn, counts in {**others, turn: current}.items()}
        self._select_sum(turn)


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
