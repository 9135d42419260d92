"""What only W&B has: images, text, configuration, runs."""

import json
from pathlib import Path

import numpy as np
import pytest

from learnkit import Callback
from learnkit.loggers import WandbLogger
from tests.helpers.log_services import GRID, PIXELS, fail, show, wandb_points, wandb_records
from tests.helpers.logging_fits import LogHalf, learner, run_and_resume


def test_wandb_images_text_and_configuration(tmp_path: Path) -> None:
    pytest.importorskip('wandb')
    image = pytest.importorskip('PIL.Image')
    with learner(tmp_path, WandbLogger('mine', tags=['a']), Callback(after_epoch=show)) as learn:
        learn.fit(1)
    ((step, pic),) = wandb_points(tmp_path, 'pic')
    (files,) = tmp_path.glob('wandb/offline-run-*/files')
    assert step == 10
    read = np.array(image.open(files / pic['filenames'][0]))
    assert np.array_equal(read, PIXELS[0].permute(1, 2, 0).numpy())
    ((step, pic),) = wandb_points(tmp_path, 'grid')
    assert step == 10 and len(pic['filenames']) == 1
    read = np.array(image.open(files / pic['filenames'][0]))
    assert np.array_equal(read, GRID.permute(1, 2, 0).numpy())
    assert 'hello' in (files / wandb_points(tmp_path, 'note')[0][1]['path']).read_text()
    config = {
        u.key: json.loads(u.value_json) for r in wandb_records(tmp_path) for u in r.config.update
    }
    assert config['model'] == 'Linear' and config['batch_size'] == 4
    run = next(r.run for r in wandb_records(tmp_path) if r.HasField('run'))
    assert run.project == 'mine' and list(run.tags) == ['a']


def test_wandb_run_keeps_its_id_and_reports_a_failure(tmp_path: Path) -> None:
    pytest.importorskip('wandb')
    run_and_resume(tmp_path, lambda: WandbLogger(id='run7'))
    learn = learner(tmp_path, LogHalf, WandbLogger(id='run7'), Callback(before_step=fail))
    with pytest.raises(RuntimeError, match='no more'), learn:
        learn.fit(1)
    ids = {r.run.run_id for r in wandb_records(tmp_path) if r.HasField('run')}
    exits = [r.exit.exit_code for r in wandb_records(tmp_path) if r.HasField('exit')]
    assert ids == {'run7'} and exits == [0, 0, 1]
