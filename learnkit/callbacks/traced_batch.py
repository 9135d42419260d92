# SPDX-License-Identifier: Apache-2.0
"""Training batch that a compiled step replaces: its ordinary functions, and what is traced in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from learnkit.core.batch import passed_names
from learnkit.engine.custom_batch import list_overrides
from learnkit.engine.loop import Loop
from learnkit.engine.seams import run_passes, train_whole_batch

if TYPE_CHECKING:
    from learnkit.learner import Learner

Ordinary = Callable[[Any], None]  # f(learn) trains on the batch, or runs its passes


class TracedBatch:
    """The batch of the default loop.

    A class of Learners with its own `train_batch` puts an object of a subclass at `learn.seams.traced`.
    """

    base: type[Loop] = Loop  # class whose `train_batch` runs the ordinary functions

    def find_refusals(self, learn: Learner) -> Iterator[str]:
        "Yield the permanent conditions of the batch that rule out compiled passes."
        for name in list_overrides(learn, self.base):
            if name != '_step':
                yield f'{type(learn).__name__} has its own `{name}`'

    def find_step_refusals(self, learn: Learner) -> Iterator[str]:
        "Yield the permanent conditions of the batch that rule out a compiled step of the optimizer."
        yield from ()

    def begin(self, learn: Learner) -> None:
        "Prepare a batch that compiled code may train on."

    def train(self, learn: Learner) -> None:
        "Train on the batch by the ordinary step."
        train_whole_batch(learn)

    def take_step(self, learn: Learner, run: Callable[[Ordinary], bool]) -> None:
        """Run the compiled passes, and take the ordinary step of the optimizer.

        `run` returns False if the ordinary function that it got ran instead of the compiled passes."""
        if run(self.train):
            learn._take_step()
            learn.opt.zero_grad()

    def run_passes(self, learn: Learner) -> None:
        "Run the ordinary forward and backward of the batch or microbatch."
        run = learn.parts.microbatches.run_passes if learn.microbatch else run_passes
        run(learn)

    def list_arguments(self, learn: Learner) -> tuple[Any, ...]:
        "Return model, loss function, names of inputs, inputs and targets, as `whole_step` takes them."
        names = passed_names(learn.model, learn.xb)
        return learn.model, learn.loss_func, names, learn.xb, learn.yb
