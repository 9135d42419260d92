"""What only MLflow has: images, text, configuration, runs."""

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
    assert (run.data.params['model'], run.data.params['epochs']) == ('Linear', '1')
    images = sorted(a.path for a in client.list_artifacts(run.info.run_id, 'images'))
    assert images == [f'images/{name}-{s}-0.png' for name in ('grid', 'pic') for s in (10, 20, 30)]
    for name, expected in (('pic', PIXELS[0]), ('grid', GRID)):
        path = client.download_artifacts(run.info.run_id, f'images/{name}-10-0.png')
        assert np.array_equal(np.array(image.open(path)), expected.permute(1, 2, 0).numpy())
    found = Path(client.download_artifacts(run.info.run_id, 'texts/note-10.txt')).read_text()
    assert found == 'hello'


def test_mlflow_run_that_failed(tmp_path: Path) -> None:
    pytest.importorskip('mlflow')
    learn = learner(tmp_path, LogHalf, MlflowLogger(), Callback(before_step=fail))
    with pytest.raises(RuntimeError, match='no more'):
        learn.fit(1)
    learn.close()
    assert mlflow_run(tmp_path).info.status == 'FAILED'
    assert [s for s, _ in mlflow_points(tmp_path, 'half')] == [1]
