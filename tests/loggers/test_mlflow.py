"""What only MLflow has: images, text, configuration, runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from learnkit import Callback
from learnkit.loggers import MlflowLogger
from tests.helpers.log_services import (
    GRID,
    PIXELS,
    fail,
    mlflow_client,
    mlflow_points,
    mlflow_run,
    show,
)
from tests.helpers.logging_fits import LogHalf, learner


def test_mlflow_images_text_and_configuration(tmp_path: Path) -> None:
    image = pytest.importorskip('PIL.Image')
    learn = learner(tmp_path, MlflowLogger(run_name='mine'), Callback(after_epoch=show))
    client = mlflow_client(tmp_path)
    learn.fit(1)
    assert mlflow_run(tmp_path).info.status == 'RUNNING'
    learn.fit(2)
    learn.close()
    run = mlflow_run(tmp_path)
    assert run.info.status == 'FINISHED' and run.info.run_name == 'mine'
    found = {k: run.data.params[k] for k in ('model', 'epochs', 'fit_2/epochs')}
    assert found == {'model': 'Linear', 'epochs': '1', 'fit_2/epochs': '2'}
    images = sorted(a.path for a in client.list_artifacts(run.info.run_id, 'images'))
    assert images == [f'images/{name}-{s}-0.png' for name in ('grid', 'pic') for s in (10, 20, 30)]
    for name, expected in (('pic', PIXELS[0]), ('grid', GRID)):
        path = client.download_artifacts(run.info.run_id, f'images/{name}-10-0.png')
        assert np.array_equal(np.array(image.open(path)), expected.permute(1, 2, 0).numpy())
    found = Path(client.download_artifacts(run.info.run_id, 'texts/note-10.txt')).read_text()
    assert found == 'hello'


def test_mlflow_names_below_other_names(tmp_path: Path) -> None:
    "A folder of MLflow holds `half` as a file, and `half/more` as a file in a folder."
    pytest.importorskip('mlflow')

    def log(cb: Callback) -> None:
        for name in ('half', 'half/more', 'later/more'):
            cb.learn.log(name, cb.loss)

    learn = learner(tmp_path, MlflowLogger(every='5ba'), Callback(after_loss=log))
    learn.fit(1)
    learn.add_cb(Callback(after_step=lambda cb: cb.learn.log('later', 1.0)))
    learn.fit(1)
    learn.close()
    for name, logged in (
        ('half', 'half'),
        ('half/more', 'half.more'),
        ('later/more', 'later/more'),
        ('later', 'later.value'),
    ):
        assert mlflow_points(tmp_path, logged), name


def test_mlflow_run_that_failed(tmp_path: Path) -> None:
    pytest.importorskip('mlflow')
    learn = learner(tmp_path, LogHalf, MlflowLogger(), Callback(before_step=fail))
    with pytest.raises(RuntimeError, match='no more'):
        learn.fit(1)
    learn.close()
    assert mlflow_run(tmp_path).info.status == 'FAILED'
    assert [s for s, _ in mlflow_points(tmp_path, 'half')] == [1]
