"""Callbacks of other libraries in a resumed run count, log and run as in an uninterrupted run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learnkit import Learner
from learnkit.interop import from_composer, from_hf, from_keras, from_ksuit, from_lightning
from learnkit.loggers import JSONLinesLogger, read_log
from tests.helpers.every_callback import learner
from tests.helpers.resuming import check_every_place


class Periods:
    "Records when it runs, and logs how often."

    every_n_updates, every_n_samples, every_n_epochs = 3, 40, 2

    def __init__(self) -> None:
        self.due: list[str] = []

    def periodic_callback(self, *, interval_type: str, update_counter: Any) -> None:
        self.due.append(
            f'{interval_type or "-"} {update_counter.cur_iteration} of {update_counter.end_iteration}'
        )
        self.writer.add_scalar(f'n/{len(self.due)}', len(self.due))  # type: ignore[attr-defined]

    def track_after_update_step(self, *, update_counter: Any) -> None:
        last = self.writer.get_all_metric_values('n/1')  # type: ignore[attr-defined]
        self.firsts = len(last)


class WithState(Periods):
    "The same callback with `state_dict`."

    firsts = 0

    def state_dict(self) -> dict[str, Any]:
        return {'due': list(self.due), 'firsts': self.firsts}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self.due, self.firsts = list(sd['due']), sd['firsts']


class Batches:
    "A Composer-style callback that counts, and logs what it reads."

    def __init__(self) -> None:
        self.n, self.seen = 0, dict[str, Any]()

    def epoch_start(self, state: Any, logger: Any) -> None:
        self.in_epoch = 0

    def batch_end(self, state: Any, logger: Any) -> None:
        self.n, self.in_epoch, t = self.n + 1, self.in_epoch + 1, state.timestamp
        metrics = {
            f'last {k}': float(v)
            for values in state.eval_metrics.values()
            for k, v in values.items()
        }
        logger.log_metrics(
            {'n': self.n, 'in_epoch': self.in_epoch, 'in': int(t.batch_in_epoch), **metrics}
        )

    def epoch_end(self, state: Any, logger: Any) -> None:
        self.seen[f'{state.timestamp.epoch}'] = {
            k: float(v) for k, v in state.train_metrics.items()
        }


class WithLoad(Batches):
    "The same callback with `state_dict`."

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        vars(self).update(sd)


class OfKeras:
    "A callback of Keras that chooses its comparison, and the sign of its threshold, once."

    def __init__(self) -> None:
        self.min_delta, self.monitor_op, self.due = 0.01, None, list[float]()
        self.history: dict[str, list[float]] = {}

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.history.setdefault('loss', []).append(logs['loss'])

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if self.monitor_op is None:
            self.monitor_op, self.min_delta = np.less, -self.min_delta
        if self.monitor_op(logs['loss'] - self.min_delta, min(self.due, default=np.inf)):
            self.due.append(float(logs['loss']))
            self.model.optimizer.learning_rate *= 1 - self.min_delta  # type: ignore[attr-defined]


class OfTrainer:
    "A callback of Hugging Face's Trainer that counts, and sets flags of `control`."

    def __init__(self) -> None:
        self.due: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = state.global_step % 3 == 0
        self.due.append((state.global_step, state.epoch, len(state.log_history)))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self.due.append(sorted(metrics))


class OfLightning:
    "A callback of Lightning that counts, with its state."

    def __init__(self) -> None:
        self.due: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *place: Any) -> None:
        self.due.append((trainer.global_step, trainer.current_epoch, place[-1]))

    def state_dict(self) -> dict[str, Any]:
        return {'due': list(self.due)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.due = list(state['due'])


ADAPTERS: dict[type, Any] = {
    Periods: from_ksuit,
    WithState: from_ksuit,
    Batches: from_composer,
    WithLoad: from_composer,
    OfKeras: from_keras,
    OfTrainer: from_hf,
    OfLightning: from_lightning,
}


@pytest.mark.parametrize('cls', ADAPTERS)
def test_foreign_callbacks_resume_from_every_place(cls: type, tmp_path: Path) -> None:
    n, found = [0], dict[int, Any]()

    def make() -> Learner:
        n[0] += 1
        cb = ADAPTERS[cls](cls())
        return learner(tmp_path / str(n[0]), cb, JSONLinesLogger(every='1ba'))

    def fit(learn: Learner, resume: Any) -> None:
        learn.fit(2, resume=resume)
        cb = next(cb.wrapped for cb in learn.cbs if hasattr(cb, 'wrapped'))
        rows = [
            {k: v for k, v in row.items() if 'time' not in k}
            for row in read_log(learn.path / 'metrics.jsonl')
        ]
        found[n[0]] = (
            [
                getattr(cb, name)
                for name in ('due', 'firsts', 'n', 'seen', 'min_delta')
                if name in vars(cb)
            ],
            rows,
        )

    check_every_place(make, fit, lambda kept: [*kept[:6], kept[8]])
    values, rows = found[1]
    assert values and all(v == values and r == rows[-len(r) :] for v, r in found.values())
