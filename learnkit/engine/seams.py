# SPDX-License-Identifier: Apache-2.0
"""Seams of the loop: five places where a feature runs its own function in place of the loop's.

| seam | the function of the loop |
|---|---|
| `source` | `range`, `iter` |
| `model` | `model(*xb)` |
| `loss` | `loss_func(pred, *yb)` |
| `batch` | forward, loss, backward, step |
| `step` | `opt.step()` |

A function at `batch` that runs forward and backward several times, such as microbatches, asks for a
further function, `passes`, which runs them once.

`SEAMS` says what each function does. Each function is called with the Learner; the function of `loss`
also gets the output of the model. `source` is an object with the methods of `Source`. A feature is an
object with a name, `holder`, and a method `seams(learn)`, which returns its functions in a fit by seam,
or None. It is one of `learn.parts` or of `learn.seams.features`. A fit takes the seams for its features,
and returns them at its end. Two features that want the same seam are refused before the first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from learnkit.core.errors import CancelBackwardException, FitError
from learnkit.engine.composer_model import HOLDER
from learnkit.engine.loss import call_model, compute_batch_loss
from learnkit.engine.positions import Source

if TYPE_CHECKING:
    from learnkit.learner import Learner

# what the function at each seam does
SEAMS = {
    'source': 'yields the epochs, and the batches of a loader',
    'model': 'calls the model on the batch',
    'loss': 'computes the loss of the output',
    'batch': 'trains on the batch',
    'step': 'takes the step of the optimizer',
}


class Seams:
    """Functions of a loop at its seams, and the features that hold them.

    >>> from learnkit.testing import synth_learner
    >>> def double(learn): return 2 * learn.model(*learn.xb)
    >>> learn = synth_learner()
    >>> with learn.seams.taken('Double', model=double): learn.seams.holders
    {'model': 'Double'}
    """

    def __init__(self) -> None:
        self.source: Source = Source()
        self.model: Callable[[Any], Any] = call_model
        self.loss: Callable[[Any, Any], Any] = compute_batch_loss
        self.batch: Callable[[Any], None] | None = None  # None: `_do_pred_loss`, `_do_grad_opt`
        self.step: Callable[[Any], None] | None = None  # None: `opt.step()`
        self.passes: Callable[[Any], None] | None = (
            None  # None: forward and backward with their events
        )
        self.holders: dict[str, str] = {}  # seam to the feature that holds it
        self.wrapper: nn.Module | None = (
            None  # module that is called in training in place of the model
        )
        # what a compiled step traces for a class with its own `train_batch`, a `TracedBatch`
        self.traced: Any = None
        self.features: list[Any] = []  # further features; the first are the parts of the engine

    def take(
        self,
        holder: str,  # name of the feature, for messages
        **functions: Any,  # function by the name of its seam
    ) -> dict[str, Any]:
        """Put functions at seams, and return the functions that were there.

        Raises `FitError` if another feature holds one of the seams; then nothing has changed.
        """
        for name in functions:
            other = self.holders.get(name, holder)
            if other != holder:
                raise FitError(
                    f'{holder} and {other} both take the seam `{name}` of the loop: leave one out.'
                )
        before = {name: getattr(self, name) for name in functions}
        self.__dict__.update(functions)
        self.holders.update(dict.fromkeys(functions, holder))
        return before

    def take_free(self, holder: str, **functions: Any) -> dict[str, Any]:
        "Put functions at the seams that no feature holds, and return the functions that were there."
        return self.take(holder, **{n: f for n, f in functions.items() if n not in self.holders})

    def wrap_model(self, wrapper: nn.Module) -> None:
        """Call a module in training in place of the model.

        Raises `FitError` if a feature that calls the model itself holds the seam `model`.
        """
        holder = self.holders.get('model', HOLDER)
        if holder != HOLDER:
            raise FitError(
                f'{holder} and {type(wrapper).__name__} both take the seam `model` of the loop: leave one out.'
            )
        self.wrapper = wrapper

    def give_back(
        self,
        before: dict[str, Any],  # result of `take`
    ) -> None:
        "Restore the functions that `take` has replaced."
        self.__dict__.update(before)
        for name in before:
            self.holders.pop(name, None)

    @contextmanager
    def taken(self, holder: str, **functions: Any) -> Iterator[None]:
        "Hold seams within a context."
        before = self.take(holder, **functions)
        try:
            yield
        finally:
            self.give_back(before)


def train_whole_batch(learn: Learner) -> None:
    "Run forward, loss, backward and step on the current batch."
    learn._do_pred_loss()
    learn._do_grad_opt()


def run_passes(learn: Learner) -> None:
    "Run forward, loss and backward on the current batch."
    learn._do_pred_loss()
    learn._with_events(learn._backward, 'backward', CancelBackwardException)


@contextmanager
def fit_seams(learn: Learner) -> Iterator[None]:
    "Let the features of a Learner take their seams for a fit."
    seams = learn.seams
    before: dict[str, Any] = {}
    try:
        for feature in (*learn.parts.list_features(), *seams.features):
            functions = feature.seams(learn)
            if functions:
                before |= seams.take(feature.holder, **functions)
        learn.parts.begin_fit(learn)
        yield
    finally:
        seams.give_back(before)
