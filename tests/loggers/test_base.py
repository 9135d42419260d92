"""Values that loggers receive, their times and their steps, read from a JSON lines file."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from learnkit import Callback, OptionError
from learnkit.loggers import (
    ConsoleLogger,
    CSVLogger,
    JSONLinesLogger,
    MlflowLogger,
    TensorBoardLogger,
    WandbLogger,
    read_log,
)
from tests.helpers.logging_fits import LogHalf, learner, plain_losses


def logged(path: Path, name: str) -> dict[int, Any]:
    "Return a value's steps and numbers."
    rows = read_log(path / 'metrics.jsonl')
    return {row['step']: row[name] for row in rows if name in row}


def test_losses_match_a_plain_loop(tmp_path: Path) -> None:
    train, valid = plain_losses(3)
    learner(tmp_path, JSONLinesLogger(every='4ba')).fit(3)
    losses, evaluated = logged(tmp_path, 'loss'), logged(tmp_path, 'valid_loss')
    assert losses == pytest.approx({s: train[s - 1] for s in (4, 8, 12, 16, 20, 24, 28)}, rel=1e-6)
    assert evaluated == pytest.approx({10: valid[0], 20: valid[1], 30: valid[2]}, rel=1e-6)


def test_hypers_match_the_step(tmp_path: Path) -> None:
    learn = learner(tmp_path, JSONLinesLogger(every='1ba'))
    learn.fit_one_cycle(2, lr_max=0.1)
    assert list(logged(tmp_path, 'lr').values()) == pytest.approx(learn.recorder.lrs)
    assert list(logged(tmp_path, 'mom').values()) == pytest.approx(learn.recorder.hps['mom'])


@pytest.mark.parametrize(
    ('every', 'steps'), [('5ba', [5, 10]), ('12sp', [3, 6, 9]), ('4st', [4, 8]), (4, [4, 8])]
)
def test_every_takes_any_unit_of_a_step(tmp_path: Path, every: Any, steps: list[int]) -> None:
    learner(tmp_path, JSONLinesLogger(every=every)).fit(1)
    assert list(logged(tmp_path, 'loss')) == steps


def test_epoch_rows_match_the_history(tmp_path: Path) -> None:
    learn = learner(tmp_path, LogHalf, JSONLinesLogger)
    learn.fit(2)
    for column in ('epoch', 'train_loss', 'half', 'time'):
        expected = [row[column] for row in learn.history]
        assert list(logged(tmp_path, f'epoch/{column}').values()) == expected
    assert not logged(tmp_path, 'epoch/valid_loss') and not logged(tmp_path, 'epoch/valid_half')


def test_evaluation_logs_the_mean_over_itself(tmp_path: Path) -> None:
    class Count(Callback):
        def before_validate(self) -> None:
            self._n = 0

        def after_loss(self) -> None:
            if self.training:
                return
            self._n += 1
            self.learn.log('n', self._n, weight=self._n)

    learner(tmp_path, Count, JSONLinesLogger).fit(2)
    # (1*1 + 2*2)/(1 + 2)
    assert logged(tmp_path, 'valid_n') == {10: pytest.approx(5 / 3), 20: pytest.approx(5 / 3)}


def test_microbatches_are_averaged_by_weight(tmp_path: Path) -> None:
    class Pieces(Callback):
        run_valid = False

        def after_loss(self) -> None:
            self.learn.log('size', len(self.x), weight=len(self.x))

    learner(tmp_path, Pieces, JSONLinesLogger, microbatch=3).fit(1)
    assert set(logged(tmp_path, 'size').values()) == {(3 * 3 + 1 * 1) / 4}


@pytest.mark.parametrize('name', ['step', '', 'a\nb'])
def test_names_that_no_log_can_have(tmp_path: Path, name: str) -> None:
    learn = learner(
        tmp_path, Callback(before_step=lambda cb: cb.learn.log(name, 1.0)), JSONLinesLogger
    )
    with pytest.raises(OptionError, match='cannot be logged'):
        learn.fit(1)


def test_only_fits_are_logged(tmp_path: Path) -> None:
    learn = learner(tmp_path, LogHalf, JSONLinesLogger)
    learn.lr_find(num_it=5, show_plot=False)
    learn.validate()
    learn.get_preds()
    assert not (tmp_path / 'metrics.jsonl').exists()
    learn.fit(1)
    before = (tmp_path / 'metrics.jsonl').read_text()
    learn.validate()
    learn.lr_find(num_it=5, show_plot=False)
    assert (tmp_path / 'metrics.jsonl').read_text() == before
    learn.fit(1)
    assert [row['step'] for row in read_log(tmp_path / 'metrics.jsonl')] == list(range(1, 21))


def test_logging_changes_no_number(tmp_path: Path) -> None:
    def trained(*loggers: Any) -> list[Any]:
        learn = learner(tmp_path, LogHalf, *loggers)
        random.seed(0)
        np.random.seed(0)
        learn.model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        learn.fit_one_cycle(2)
        learn.close()
        rows = [{k: v for k, v in row.items() if k != 'time'} for row in learn.history]
        weights = [p.tolist() for p in learn.model.parameters()]
        return [
            weights,
            rows,
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
        ]

    for module in ('tensorboard', 'wandb', 'mlflow'):
        pytest.importorskip(module)
    kinds: list[Any] = [CSVLogger, JSONLinesLogger, TensorBoardLogger, WandbLogger, MlflowLogger]
    every = [cls(every='1ba') for cls in kinds]
    assert trained() == trained(*every, ConsoleLogger(out=lambda line: None))


def test_no_graph_is_held(tmp_path: Path) -> None:
    logger = JSONLinesLogger(every='1000ba')

    def look(cb: Callback) -> None:
        for _, row in logger._rows:
            for value in row.values():
                parts = [value.total, value.count] if hasattr(value, 'total') else [value]
                for v in parts:
                    assert not (torch.is_tensor(v) and (v.requires_grad or v.grad_fn is not None))

    learn = learner(
        tmp_path,
        logger,
        Callback(after_loss=lambda cb: cb.learn.log('g', cb.learn.loss_grad)),
        Callback(after_batch=look),
    )
    learn.fit(1)
    assert len(logged(tmp_path, 'g')) == 10


def test_configuration_is_logged_at_each_fit(tmp_path: Path) -> None:
    learn = learner(tmp_path, JSONLinesLogger, LogHalf)
    learn.fit(1)
    learn.fit(2)
    lines = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    params = [line['params'] for line in lines if 'params' in line]
    assert [p['epochs'] for p in params] == [1, 2]
    expected = {'model': 'Linear', 'parameters': 4, 'loss': 'MSELoss', 'batch_size': 4, 'lr': 0.1}
    assert {k: params[0][k] for k in expected} == expected
    assert params[0]['callbacks'].endswith('JSONLinesLogger, LogHalf')
    assert params[0]['callback/json_lines_logger/every'] == '10ba'


@pytest.mark.cuda
def test_no_wait_for_the_device(tmp_path: Path) -> None:
    import warnings

    def waits(*loggers: Any) -> int:
        learn = learner(tmp_path, LogHalf, *loggers)
        learn.dls.to('cuda')
        learn.fit(1)
        torch.cuda.set_sync_debug_mode('warn')
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter('always')
                learn.fit(3)
        finally:
            torch.cuda.set_sync_debug_mode('default')
        return len([w for w in caught if 'synchroniz' in str(w.message)])

    # a transfer when an epoch begins, and at the end
    assert waits(JSONLinesLogger(every='10ba')) <= waits() + 2 * 3
