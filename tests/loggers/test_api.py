"""Settings that callbacks log."""

import json
from pathlib import Path

import torch

from learnkit import Callback
from learnkit.loggers import CSVLogger, log_params, log_text, read_log
from tests.helpers.logging_fits import learner


def test_params_come_with_the_configuration(tmp_path: Path) -> None:
    learn = learner(tmp_path, CSVLogger)
    log_params(learn, {'depth': 3, 'lr': 'mine'})  # nothing is open yet
    learn.fit(1)
    file = tmp_path / 'metrics.csv.params.json'
    assert json.loads(file.read_text())['depth'] == 3
    assert json.loads(file.read_text())['model'] == 'Linear'

    class Late(Callback):
        def after_train(self) -> None:
            log_params(self.learn, {'width': torch.tensor(7)})

    learn.fit(1, cbs=Late())
    params = json.loads(file.read_text())
    assert params['depth'] == 3
    assert params['width'] == 7
    assert params['lr'] == 'mine'
    assert params['model'] == 'Linear'


def test_a_block_of_the_learner_logs_before_its_first_fit(tmp_path: Path) -> None:
    with learner(tmp_path, CSVLogger) as learn:
        log_params(learn, {'depth': 3})
        log_text(learn, 'note', 'hello')
        learn.fit(1)
        learn.validate()
        log_params(learn, {'width': 5})
    params = json.loads((tmp_path / 'metrics.csv.params.json').read_text())
    assert (params['depth'], params['width'], params['model']) == (3, 5, 'Linear')
    assert (tmp_path / 'metrics.csv.texts' / 'note-0.txt').read_text() == 'hello'
    [first, *_] = read_log(tmp_path / 'metrics.csv')
    assert first['step'] == 10
