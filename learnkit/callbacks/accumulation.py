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
from learnkit.engine.own_loop import OptimizeCall

__all__ = ['GradientAccumulation']


class GradientAccumulation(Callback):
    """Step once at least `n_acc` samples, or `batches` batches, were processed since the last step.

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
    would step), before training with an optimizer that needs a closure, and if one call of
    `optimize` names an optimizer and another none, so that their gradients would mix. Raises
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
            raise OptionError('GradientAccumulation: give n_acc (samples) or batches, not both.')
        # number of samples and weight of the current batch, until it is counted
        self._batch: tuple[int, Any] | None = None
        self._in_tail = False  # whether the step is for samples left over in an epoch
        # the counts are plain attributes, so that `Replay` can restore them before a batch
        self._n_steps = 0  # number of steps of this fit
        self._stepped = False  # whether this epoch had a step
        self._is_checked = False  # whether the loss function of this fit was checked
        self._turn = ''  # name of the optimizer that is counted for; empty: all of them
        self._others: dict[str, dict[str, Any]] = {}  # counts of the other optimizers, by name
        self._start_sum()

    def _start_sum(self) -> None:
        self._n_samples = 0
        self._n_batches = 0
        self._weight_sum = 0
        self._divisor: Any = self.n_acc  # divisor of the weighted sum in the gradients

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
        self._stepped = False
        for counts in self._others.values():
            counts['stepped'] = False

    # -- optimizers --------------------------------------------------------------------------------

    def _forget(self) -> None:
        "Reset all counts."
        self._turn = ''
        self._others = {}
        self._n_steps = 0
        self._stepped = False
        self._is_checked = False
        self._start_sum()

    def _counts(self) -> dict[str, Any]:
        return {
            'n_samples': self._n_samples,
            'n_batches': self._n_batches,
            'weight_sum': self._weight_sum,
            'divisor': self._divisor,
            'n_steps': self._n_steps,
            'stepped': self._stepped,
        }

    def _set_counts(self, counts: dict[str, Any]) -> None:
        self._n_samples = counts['n_samples']
        self._weight_sum = counts['weight_sum']
        self._n_batches = counts['n_batches']
        self._divisor = counts['divisor']
        self._n_steps = counts['n_steps']
        self._stepped = counts['stepped']

    def _take_turn(self) -> None:
        "Switch to the counts of the current optimizer."
        turn = self.learn.turn or ''
        if turn == self._turn:
            return
        self._others[self._turn] = self._counts()
        waiting = [name for name, counts in self._others.items() if counts['n_samples']]
        if (turn and '' in waiting) or (not turn and waiting):
            self._others.pop(self._turn)
            raise OptionError(
                'GradientAccumulation: one call of optimize() names an optimizer, another '
                'one none, and gradients that wait would mix. Give each call its `only=`.'
            )
        self._turn = turn
        if turn in self._others:
            return self._set_counts(self._others.pop(turn))
        self._n_steps = 0
        self._stepped = False
        self._start_sum()

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
        n = self._batch[0]
        weight = widen_weight(self._batch[1], learn.loss)
        if not self._n_samples:
            self._begin_sum(n, weight)
        learn.loss_grad = learn.loss_grad * (weight / self._divisor)

    def _begin_sum(self, n: int, weight: Any) -> None:
        "Set the divisor of a step by its first batch: the expected weight of all its batches."
        if self.batches is not None:
            self._divisor = expected_sum(weight, self.batches)
        elif isinstance(weight, Tensor) or weight != n:
            self._divisor = expected_sum(weight, self.n_acc / n)

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
        if not self._in_tail and not self._is_due(self._n_samples, self._n_batches):
            raise StepPutOff
        self._average()

    def will_step(self) -> bool:
        "Return True if the current batch ends with a step."
        n = self.learn.strategy.count_samples(self.learn)
        return self._is_due(self._n_samples + n, self._n_batches + 1)

    def _is_due(self, n_samples: int, n_batches: int) -> bool:
        return n_samples >= self.n_acc if self.batches is None else n_batches >= self.batches

    def after_step(self) -> None:
        self._n_steps = self._n_steps + 1
        self._stepped = True
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
        n, weight = self._batch
        self._batch = None
        self._n_samples += n
        self._n_batches += 1
        if self._n_batches == 1 and not self._n_steps:
            self._check_unit(n)
        if weight is not None:
            self._weight_sum = self._weight_sum + widen_weight(weight, self.learn.loss)

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
        total = self._weight_sum
        if not isinstance(total, Tensor) and total in (0, self._divisor):
            return
        grads = local_shards(p.grad for p in self.learn.step_parameters if p.grad is not None)
        scale = divide(self._divisor, total)
        if grads:
            if isinstance(scale, Tensor):
                scale = scale.to(grads[0].device)
            torch._foreach_mul_(grads, scale)
        # gradients added later, if the step is postponed, get the same divisor
        self._divisor = total

    # -- end of an epoch and of a fit --------------------------------------------------------------

    def after_train(self) -> None:
        "Take a step for the samples left over."
        for turn in sorted({self._turn, *self._others}):
            with self.learn.own_loop.opened(self.learn, OptimizeCall(turn or None)):
                self._step_for_rest(turn)

    def _step_for_rest(self, turn: str) -> None:
        learn = self.learn
        counts = self._others.get(turn) or self._counts()
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
        for turn, counts in {**self._others, self._turn: self._counts()}.items():
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
        n_samples = self._n_samples + sum(counts['n_samples'] for counts in self._others.values())
        if n_samples and self.learn.opt is not None:
            self.learn.opt.zero_grad()
        self._others = {}
        self._start_sum()

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        "Return the counts; pending gradients are in the checkpoint itself."
        others = {turn: dict(counts) for turn, counts in self._others.items()}
        return {**self._counts(), 'turn': self._turn, 'others': others}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the counts."
        self._set_counts(sd)
        self._turn = sd['turn']
        self._others = {turn: dict(counts) for turn, counts in sd['others'].items()}


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
