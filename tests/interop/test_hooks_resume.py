"""Callbacks of other libraries in a resumed run count, log and run as in an uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from learnkit import Learner
from learnkit.interop import from_composer, from_ksuit
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


@pytest.mark.parametrize('cls', [Periods, WithState, Batches, WithLoad])
def test_foreign_callbacks_resume_from_every_place(cls: type, tmp_path: Path) -> None:
    n, found = [0], dict[int, Any]()

    def make() -> Learner:
        n[0] += 1
        adapt = from_ksuit if issubclass(cls, Periods) else from_composer
        return learner(tmp_path / str(n[0]), adapt(cls()), JSONLinesLogger(every='1ba'))

    def fit(learn: Learner, resume: Any) -> None:
        learn.fit(2, resume=resume)
        cb = next(cb.wrapped for cb in learn.cbs if hasattr(cb, 'wrapped'))
        rows = [
            {k: v for k, v in row.items() if 'time' not in k}
            for row in read_log(learn.path / 'metrics.jsonl')
        ]
        found[n[0]] = (
            [getattr(cb, name) for name in ('due', 'firsts', 'n', 'seen') if name in vars(cb)],
            rows,
        )

    check_every_place(make, fit, lambda kept: [*kept[:6], kept[8]])
    values, rows = found[1]
    assert values and all(v == values and r == rows[-len(r) :] for v, r in found.values())
