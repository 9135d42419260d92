"""Steps that evaluate the loss of the batch again: LBFGS, SAM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from learnkit.core.errors import CancelBackwardException
from learnkit.core.learner_type import LearnerLike
from learnkit.engine.run import clear_pass
from learnkit.optim.wrapper import Closure

__all__ = ['ClosureStep']


class ClosureStep:
    """Step of an optimizer that evaluates the batch again; the loop has evaluated it once already.

    Takes the seam `step` in a fit whose optimizer needs a closure.
    """

    def __init__(self) -> None:
        self.repeating = False  # True while the batch is evaluated again

    def __call__(self, learn: LearnerLike) -> None:
        "Take the step with a closure. What is recorded is the evaluation before the step."

        def evaluate() -> Tensor:
            learn.opt.zero_grad(only=learn.turn)
            with self.repeated():
                self.repeat(learn)
            return learn.strategy.batch_loss(learn)

        closure = Closure(evaluate, lambda: learn.strategy.batch_loss(learn))
        before = {name: learn.__dict__.get(name) for name in ('pred', 'loss', 'loss_grad')}
        try:
            learn.opt.step(closure, only=learn.turn)
        except BaseException:
            learn.opt.clear_state(closures=True)  # an unfinished line search cannot be continued
            raise
        learn.__dict__.update(before)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        "Mark the passes within a context as a repetition, which callbacks do not record."
        self.repeating = True
        try:
            yield
        finally:
            self.repeating = False

    def repeat(self, learn: LearnerLike) -> None:
        "Run the forward and backward passes of the batch again, without the step."
        if learn.own_loop.call is not None:
            learn.own_loop.repeat(learn)
        elif learn.microbatch:
            learn.microbatches.run(learn, learn.microbatch)
        else:
            clear_pass(learn)
            learn._do_pred_loss()
            learn._with_events(learn._backward, 'backward', CancelBackwardException)
