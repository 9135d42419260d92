"""Logs of evaluations within epochs, of loaders with their own intervals and metrics."""

from pathlib import Path
from typing import Any

import pytest

from learnkit import (
    Callback,
    CancelEpochException,
    CancelTrainException,
    CancelValidException,
    DataLoaders,
    Evaluator,
    mae,
    mse,
)
from learnkit.loggers import CSVLogger, JSONLinesLogger, read_log
from tests.helpers.learners import quiet_synth_learner
from tests.helpers.logging_fits import LogHalf, data, learner


def logged(path: Path, name: str) -> dict[int, Any]:
    return {row['step']: row[name] for row in read_log(path / 'metrics.jsonl') if name in row}


def test_each_evaluation_has_its_step(tmp_path: Path) -> None:
    learn = learner(tmp_path, LogHalf, JSONLinesLogger, eval_every='4ba', metrics=[mae])
    learn.fit(2)
    evaluations = learn.recorder.evaluations
    assert [row['ba'] for row in evaluations] == [4, 8, 12, 16, 20]
    for name in ('valid_loss', 'mae'):
        assert logged(tmp_path, name) == {row['ba']: row[name] for row in evaluations}
    assert not logged(tmp_path, 'epoch/valid_loss') and not logged(tmp_path, 'epoch/mae')


def test_loaders_with_their_own_interval_and_metrics(tmp_path: Path) -> None:
    _, _, vx, vy = data()
    learn = learner(tmp_path, JSONLinesLogger, eval_every='5ba', metrics=[mae])
    valid = {'day': [(vx, vy)], 'night': Evaluator([(vx, -vy)], '2ba', metrics=[mse])}
    learn.dls = DataLoaders(learn.dls.train, valid)
    learn.fit(1)
    rows = learn.recorder.evaluations
    assert [row['ba'] for row in rows if 'night/mse' in row] == [2, 4, 6, 8, 10]
    for name in ('day/loss', 'day/mae', 'night/loss', 'night/mse'):
        assert logged(tmp_path, name) == {row['ba']: row[name] for row in rows if name in row}
    assert not logged(tmp_path, 'night/mae')


def test_what_is_in_the_log_is_kept_with_its_state(tmp_path: Path) -> None:
    class Hidden(Callback):
        def after_batch(self) -> None:
            if self.training:
                self.learn.log('hidden', 1.0, shown=False)

    learn = learner(tmp_path, Hidden, JSONLinesLogger, eval_every='4ba')
    saved: dict[str, Any] = {}

    class Keep(Callback):
        def batch_checkpoint(self) -> None:
            if self.learn.time.ba == 6:
                saved.update(self.learn.json_lines_logger.state_dict())

    learn.fit(1, cbs=Keep())
    assert {'hidden', 'valid_loss'} <= set(saved['in_log'])
    assert not logged(tmp_path, 'epoch/hidden')


@pytest.mark.parametrize(
    'cancel', [CancelTrainException, CancelEpochException, CancelValidException]
)
def test_no_step_is_lost_after_an_evaluation_that_was_cancelled(
    tmp_path: Path, cancel: type[Exception]
) -> None:
    def cut(cb: Any) -> None:
        if cb.learn.time.ba == 3:
            raise cancel

    cbs = [Callback(before_validate=cut), CSVLogger(tmp_path / 'm.csv', every='1ba')]
    learn = quiet_synth_learner(n_train=6, eval_every='3ba', path=tmp_path, cbs=cbs)
    learn.fit(2)
    learn.close()
    steps = [row['step'] for row in read_log(tmp_path / 'm.csv') if row.get('loss') is not None]
    assert steps == list(range(1, learn.time.ba + 1))
