"""The guard at the end of a step: with SAM, a scaler, accumulation, microbatches and losses that arrive late."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from learnkit import Callback, Learner
from learnkit.callbacks.accumulation import GradientAccumulation
from learnkit.callbacks.nan_guard import GuardNonFinite
from learnkit.callbacks.sam import SAM
from learnkit.core.errors import CancelBatchException
from tests.helpers.learners import quiet_learner


def learner(*cbs: Any, **kwargs: Any) -> Learner:
    gen = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(4, 3, generator=gen), torch.randn(4, 2, generator=gen)) for _ in range(8)
    ]
    torch.manual_seed(4)
    model = nn.Linear(3, 2)
    return quiet_learner(
        batches,
        model,
        F.mse_loss,
        opt_func=torch.optim.SGD,
        lr=0.1,
        cbs=cbs,
        has_bar=False,
        **kwargs,
    )


def spoil_loss(cb: Any) -> None:
    "Make the loss of SAM's second pass not finite."
    if cb.learn.run.repeating and cb.iter == 3:
        cb.learn.loss_grad = cb.learn.loss_grad * math.nan


def spoil_gradient(cb: Any) -> None:
    if cb.learn.run.repeating and cb.iter == 3:
        cb.learn.model.weight.grad[0, 0] = math.nan


@pytest.mark.parametrize('event', ['after_loss', 'after_backward'])
@pytest.mark.parametrize('microbatch', [None, 3])
def test_nothing_of_sams_second_pass_reaches_the_weights(
    event: str, microbatch: int | None
) -> None:
    spoil = spoil_loss if event == 'after_loss' else spoil_gradient
    guard = GuardNonFinite('skip', grads=event == 'after_backward')
    learn = learner(SAM(), guard, Callback(**{event: spoil}), microbatch=microbatch)
    with pytest.warns(UserWarning, match='at batch 3'):
        learn.fit(1)
    assert guard.n_skipped == 1 and learn.opt.n_steps == 7 and learn.model.weight.isfinite().all()
    assert learn.recorder.losses[-1].isfinite()


def test_a_line_search_may_probe() -> None:
    def spoil(cb: Any) -> None:
        if cb.learn.run.repeating and cb.iter == 3:
            cb.learn.loss_grad = cb.learn.loss_grad * math.inf

    guard = GuardNonFinite('raise', grads=True)
    gen = torch.Generator().manual_seed(1)
    dls = [(torch.randn(4, 3, generator=gen), torch.randn(4, 2, generator=gen)) for _ in range(4)]
    cbs = [guard, Callback(after_loss=spoil)]
    learn = Learner(dls, nn.Linear(3, 2), F.mse_loss, opt_func=torch.optim.LBFGS, lr=0.1, cbs=cbs)
    learn.remove_cb(learn.progress)
    learn.fit(1)


def test_a_gradient_that_overflows_in_fp16_is_the_scalers() -> None:
    guard = GuardNonFinite('skip', grads=True)
    learn = learner(guard).to_fp16(init_scale=2.0**120)
    learn.fit(4)
    scaler = learn.mixed_precision
    assert guard.n_skipped == 0 and scaler.n_skipped > 8 and scaler.scaler.get_scale() < 2.0**112


def test_gradients_are_looked_at_once_a_step() -> None:
    looks: list[int] = []

    class Counting(GuardNonFinite):
        def before_step(self) -> None:
            looks.append(self.learn.iter)
            super().before_step()

    learner(GradientAccumulation(16), Counting(grads=True)).fit(1)
    assert looks == [3, 7]


def test_a_callback_that_accumulates_by_itself_keeps_the_gradients_of_other_batches() -> None:
    "As fastai's callback does: it cancels the batches before the step."

    def accumulate(cb: Any) -> None:
        if cb.iter % 4 != 3:
            raise CancelBatchException

    def spoil(cb: Any) -> None:
        if cb.iter == 5:
            cb.learn.loss_grad = cb.learn.loss_grad * math.nan

    guard = GuardNonFinite('skip')
    accumulation = Callback(before_step=accumulate, order=guard.order - 1)
    learn = learner(accumulation, guard, Callback(after_loss=spoil))
    with pytest.warns(UserWarning, match='at batch 5'):
        learn.fit(1)
    assert guard.n_skipped == 1 and learn.opt.n_steps == 2
