"""When which validation loader is evaluated: at the end of epochs, or in their middle."""
from __future__ import annotations

from typing import Any

from learnkit.core.errors import TimeError
from learnkit.core.time import Time, Timestamp, crossings
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.data.evaluator import as_every
from learnkit.engine.callback import Callback
from learnkit.engine.countable import check_countable
from learnkit.engine.run import Runs

__all__ = ['Evaluations', 'EvaluateWithinEpochs']

AT_EPOCH_ENDS = ('ep', 'iter')


class Evaluations(Runs):
    "The part of the loop that knows which validation loaders are due."
    _eval_every: Time | None = None
    _evaluated: dict[str, Timestamp] = {}           # when each loader was last looked at in this fit
    _evaluated_before: dict[str, Timestamp] = {}    # the same, before it was last asked what is due
    _fit_began = Timestamp()

    @property
    def eval_every(self) -> Any:
        "When validation loaders are evaluated, unless they say so themselves; assign an interval, or None for never."
        return self._eval_every

    @eval_every.setter
    def eval_every(self, every: Any) -> None: self._eval_every = as_every(every)

    def _every(self, name: str) -> Time | None:
        evaluator = getattr(self.dls, 'evaluators', {}).get(name)
        return self.eval_every if evaluator is None or evaluator.every == 'fit' else evaluator.every

    def _due_loaders(self, at_epoch_end: bool) -> list[tuple[str, Any]]:
        """Return the validation loaders that are due now.

        At the end of the last epoch, that is every loader whose last evaluation does not hold any more."""
        now = self.time
        if at_epoch_end:  # what is counted in a moment
            share = (self.epoch + 1) / self.n_epoch if self.n_epoch else now.dur
            now = now.replace(ep=now.ep + 1, iter=now.iter + self._ends_iteration(), dur=share)
        is_last = at_epoch_end and (self._stopping or self.epoch + 1 == self.n_epoch)
        self._evaluated_before = dict(self._evaluated)
        return [(name, dl) for name, dl in evaluation_loaders(self.dls) if self._is_due(name, now, is_last)]

    def _is_due(self, name: str, now: Timestamp, is_last: bool) -> bool:
        every, last = self._every(name), self._evaluated.get(name, self._fit_began)
        if every is None: return False
        if not crossings(last, now, every) and not (is_last and last.ba != now.ba): return False
        self._evaluated[name] = now
        return True

    def _begin_evaluations(self, per_iteration: int | None) -> list[Callback]:
        "Count intervals from here; return the callback that evaluates in the middle of epochs, where one is needed."
        everys = [every for name, _ in evaluation_loaders(self.dls) if (every := self._every(name)) is not None]
        for every in everys:
            check_countable(self, every)
            if every.unit == 'iter' and per_iteration is None:
                raise TimeError(f"evaluation every {str(every)!r}: say how long one is, `fit(n, iteration='2ep')`.")
        self._evaluated, self._evaluated_before, self._fit_began = {}, {}, self.time.replace(dur=0.)
        return [EvaluateWithinEpochs()] if any(every.unit not in AT_EPOCH_ENDS for every in everys) else []

    def _evaluation_state(self, before: bool = False) -> dict[str, Any]:
        "Return when loaders were looked at, for a checkpoint; as it was before the evaluation under way, if asked for."
        evaluated = self._evaluated_before if before else self._evaluated
        return {'evaluated': {name: time.state_dict() for name, time in evaluated.items()},
                'fit_began': self._fit_began.state_dict()}

    def _load_evaluation_state(self, sd: dict[str, Any]) -> None:
        self._evaluated = {name: Timestamp.from_state_dict(time) for name, time in sd['evaluated'].items()}
        self._evaluated_before, self._fit_began = dict(self._evaluated), Timestamp.from_state_dict(sd['fit_began'])


class EvaluateWithinEpochs(Callback):
    """Evaluate the loaders that are due after a training batch; the training goes on as if nothing had been.

    `fit` adds it where an interval is not one of epochs. RNGs, each module's mode and the state of the loop are put
    back. No state.
    """
    order, run_valid, remove_on_find = 10_000, False, True  # after every other handler of the batch

    def after_batch(self) -> None:
        learn = self.learn
        if not learn.fitting or not (due := learn._due_loaders(at_epoch_end=False)): return
        with learn._put_back():
            try: learn._do_evaluation(due)
            except BaseException:
                learn._tell('_run_failed')
                raise




