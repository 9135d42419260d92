"""What only TensorBoard has: images, text, configuration, runs."""

import json
from pathlib import Path

import numpy as np
import pytest

from learnkit import Callback
from learnkit.loggers import TensorBoardLogger
from tests.helpers.log_services import GRID, PIXELS, show, tensorboard
from tests.helpers.logging_fits import learner


def test_tensorboard_images_text_and_configuration(tmp_path: Path) -> None:
    image = pytest.importorskip('PIL.Image')
    with learner(tmp_path, TensorBoardLogger('tb'), Callback(after_epoch=show)) as learn:
        learn.fit(1)
    read = tensorboard(tmp_path / 'tb')
    (event,) = read.Images('pic')
    (tmp_path / 'a.png').write_bytes(event.encoded_image_string)
    assert event.step == 10
    expected = PIXELS[0].permute(1, 2, 0).numpy()
    assert np.array_equal(np.array(image.open(tmp_path / 'a.png')), expected)
    (event,) = read.Images('grid')
    (tmp_path / 'b.png').write_bytes(event.encoded_image_string)
    assert np.array_equal(np.array(image.open(tmp_path / 'b.png')), GRID.permute(1, 2, 0).numpy())
    (note,) = read.Tensors('note/text_summary')
    assert note.tensor_proto.string_val[0] == b'hello' and note.step == 10
    (params,) = read.Tensors('params/text_summary')
    assert json.loads(params.tensor_proto.string_val[0])['model'] == 'Linear'


def test_tensorboard_gives_each_run_a_folder(tmp_path: Path) -> None:
    pytest.importorskip('tensorboard')
    for _ in range(2):
        with learner(tmp_path, TensorBoardLogger(every='5ba')) as learn:
            learn.fit(1)
    folders = sorted((tmp_path / 'runs').iterdir())
    assert len(folders) == 2
    assert all([e.step for e in tensorboard(f).Scalars('loss')] == [5, 10] for f in folders)
