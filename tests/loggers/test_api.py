"""Settings that callbacks log."""

import json
from pathlib import Path

import torch

from learnkit import Callback
from learnkit.loggers import CSVLogger, log_params
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
