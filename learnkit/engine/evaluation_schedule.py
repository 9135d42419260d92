# SPDX-License-Identifier: Apache-2.0
"""Schedule of evaluations: when each validation loader is evaluated, at the end of epochs or within them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from learnkit.core.errors import TimeError
from learnkit.core.random import preserved_generators, preserved_rng
from learnkit.core.time import Time, Timestamp, count_crossings
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.engine.callback import Callback
from learnkit.engine.counters import check_countable
from learnkit.engine.explain import explain_error
from learnkit.engine.positions import ends_iteration
from learnkit.engine.run import preserved_state

if TYPE_CHECKING:
    from learnkit.learner import Learner

AT_EPOCH_ENDS = ('ep', 'iter')  # units of intervals that end with an epoch


class EvaluationSchedule:
    """Interval and last evaluation, in this fit, of each validation loader. Checkpointed.

    An evaluation restores all random generators: a training with evaluations equals one without them.
    """

    is_independent = True  # False: evaluations and trainings draw from the same generators

    def __init__(self) -> None:
        self.every: Time | None = None  # interval of loaders without their own; None: never
        self.evaluated: dict[str, Timestamp] = {}  # when each loader was last due in this fit
        self.fit_began = Timestamp()
        self.running = False  # True from before_eval to after_eval
        self.is_at_end = False  # True from the end of an epoch's training to the next epoch

    @contextmanager
    def opened(self, learn: Learner) -> Iterator[None]:
        "Mark an evaluation as running within a context, and restore the global generators at its end."
        outer = self.running  # True if a callback starts this evaluation in another one
        self.running = True
        try:
            with preserved_rng() if self.is_independent else nullcontext():
                yield
        finally:
            self.running = outer

    def preserved(self, dl: Any) -> AbstractContextManager[None]:
        "Return a context that restores the generators of a loader that is evaluated at its end."
        return preserved_generators(dl) if self.is_independent else nullcontext()

    def every_of(self, learn: Learner, name: str) -> Time | None:
        "Return the interval of a loader, or None for never."
        evaluator = getattr(learn.dls, 'evaluators', {}).get(name)
        if evaluator is None or evaluator.every == 'fit':
            return self.every
        interval: Time | None = evaluator.every
        return interval

    def begin(self, learn: Learner, per_iteration: int | None) -> list[Callback]:
        """Start the intervals, and return the callback that evaluates within epochs, if one is needed.

        Raises `TimeError` for an interval that cannot be counted.
        """
        names = [name for name, _ in evaluation_loaders(learn.dls)]
        intervals = [every for name in names if (every := self.every_of(learn, name)) is not None]
        for every in intervals:
            if every.unit not in AT_EPOCH_ENDS:
                check_countable(learn, every)
            if every.unit == 'iter' and per_iteration is None:
                raise TimeError(
                    f"evaluation every {str(every)!r}: say how long one is, `fit(n, iteration='2ep')`."
                )
        self.evaluated = {}
        self.fit_began = replace(learn.time, dur=0.0)
        within_epochs = any(every.unit not in AT_EPOCH_ENDS for every in intervals)
        return [EvaluateWithinEpochs()] if within_epochs else []

    def list_due(self, learn: Learner, at_epoch_end: bool) -> list[tuple[str, Any]]:
        """Return the validation loaders that are due now, with their names.

        At the end of the last epoch, every loader is due that was not evaluated with the final weights.
        """
        self.is_at_end = self.is_at_end or at_epoch_end
        loaders = evaluation_loaders(learn.dls)
        if not loaders:
            return []
        now = learn.time
        if at_epoch_end:  # the counters do not include this epoch yet
            share = (learn.epoch + 1) / learn.n_epoch if learn.n_epoch else now.dur
            ends = ends_iteration(learn)
            now = now.replace(ep=now.ep + 1, iter=now.iter + ends, dur=share)
        is_last = at_epoch_end and (learn.run.stopping or learn.epoch + 1 == learn.n_epoch)
        return [(name, dl) for name, dl in loaders if self._is_due(learn, name, now, is_last)]

    def _is_due(self, learn: Learner, name: str, now: Timestamp, is_last: bool) -> bool:
        every = self.every_of(learn, name)
        last = self.evaluated.get(name, self.fit_began)
        if every is None:
            return False
        has_new_weights = last.ba != now.ba
        if not count_crossings(last, now, every) and not (is_last and has_new_weights):
            return False
        self.evaluated[name] = now
        return True

    def state_dict(self) -> dict[str, Any]:
        "Return when each loader was evaluated, and when the fit began."
        return {
            'evaluated': {name: time.state_dict() for name, time in self.evaluated.items()},
            'fit_began': self.fit_began.state_dict(),
        }

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the state that `state_dict` returned."
        self.evaluated = {name: Timestamp.from_state_dict(t) for name, t in sd['evaluated'].items()}
        self.fit_began = Timestamp.from_state_dict(sd['fit_began'])


class EvaluateWithinEpochs(Callback):
    """Evaluate the loaders that are due after a training batch.

    `fit` adds this callback if an interval is not in epochs or iterations. The random generators,
    the mode of each module and the loop's state are restored after the evaluation. No state is
    checkpointed.
    """

    order = 10_000  # after all other handlers of the batch
    run_in = 'fit'
    run_valid = False
    remove_on_find = True

    def after_batch(self) -> None:
        "Evaluate the loaders that are due."
        learn = self.learn
        due = learn.parts.evaluations.list_due(learn, at_epoch_end=False)
        if not due:
            return
        with preserved_state(learn, learn.parts.evaluations.is_independent):
            try:
                learn.do_evaluation(due)
            except BaseException as e:
                learn.parts.callbacks.notify('on_run_failed')
                error = explain_error(learn, e)
                if error is not e:
                    raise error from e
                raise
