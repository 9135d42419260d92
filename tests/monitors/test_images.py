"""Images of inputs, outputs and segmentations."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learnkit import Callback, DataLoaders, Learner
from learnkit.core.errors import BatchError
from learnkit.loggers import Logger
from learnkit.monitors.images import ImageVisualizer, class_colors
from learnkit.testing import synth_learner
from tests.helpers.learners import quiet_learner


class Taker(Callback):
    "An object that takes images and is not a logger of the package."

    def __init__(self) -> None:
        self.taken: list[tuple[int, str, Tensor]] = []

    def log_images(self, step: int, name: str, images: Tensor) -> None:
        self.taken.append((step, name, images))


class Segmenter(nn.Module):
    def __init__(self, n_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, n_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


def learner(*cbs: Any, n_out: int = 3, seed: int = 0, **kwargs: Any) -> Learner:
    torch.manual_seed(seed)
    x, y = torch.rand(24, 1, 6, 5), torch.randint(3, (24, 6, 5))
    y[:, 0] = -100
    targ, loss = (x, nn.MSELoss()) if n_out == 1 else (y, nn.CrossEntropyLoss())
    valid = {'day': (x[:8], targ[:8]), 'night': (x[8:], targ[8:])}
    dls = DataLoaders.from_tensors((x, targ), valid, bs=4, shuffle=False)
    return quiet_learner(dls, Segmenter(n_out), loss, lr=0.1, cbs=[*cbs], **kwargs)


def test_inputs_are_shown_first_and_after_each_interval_and_in_each_evaluation() -> None:
    learn = learner(ImageVisualizer('4ba', n=2), Taker())
    learn.fit(2)  # 6 batches an epoch
    x = learn.dls.train.tensors[0]
    assert [(step, name) for step, name, _ in learn.taker.taken] == [
        (1, 'images/train/input'),
        (5, 'images/train/input'),
        (6, 'images/day/input'),
        (6, 'images/night/input'),
        (9, 'images/train/input'),
        (12, 'images/day/input'),
        (12, 'images/night/input'),
    ]
    first, second, day, night = [images for _, _, images in learn.taker.taken[:4]]
    for got, at in ((first, 0), (second, 16), (day, 0), (night, 8)):
        assert torch.equal(got, x[at : at + 2])
    assert torch.equal(learn.image_visualizer.images['images/night/input'], x[8:10])
    learn.validate()
    learn.get_preds()
    assert len(learn.taker.taken) == 7


def test_segmentations_have_the_colors_of_their_classes() -> None:
    learn = learner(ImageVisualizer(n=4, mode='segment'))
    learn.fit(1, lr=0.0)
    images, (x, y) = learn.image_visualizer.images, next(iter(learn.dls.train))
    with torch.no_grad():
        predicted = learn.model(x).argmax(1)
    palette = class_colors(torch.arange(3)[None, None])[0, :, 0].T
    for name, classes in (('prediction', predicted), ('target', y)):
        colors = images[f'images/train/{name}'].permute(0, 2, 3, 1)
        assert colors.shape == (4, 6, 5, 3)
        for k in range(3):
            assert torch.equal(colors[classes == k], palette[k].expand((classes == k).sum(), 3))
    assert (images['images/train/target'][:, :, 0] == 0.5).all()  # what is ignored
    assert torch.equal(images['images/train/input'], x)
    assert (torch.pdist(class_colors(torch.arange(20)[None, None])[0, :, 0].T) > 0.05).all()


def test_loggers_get_bytes_at_their_steps() -> None:
    class Kept(Logger):
        got: list[Any] = []

        def log_images(self, step: int, name: str, images: Any) -> None:
            self.got.append((step, name, images))

    learn = learner(ImageVisualizer('4ba', n=2), Kept())
    learn.fit(1)
    expected = [(1, 'images/train/input'), (5, 'images/train/input')]
    assert [got[:2] for got in learn.kept.got[:2]] == expected
    image = learn.kept.got[0][2]
    assert image.shape == (1, 6, 5 + 2 + 5, 1) and image.dtype == 'uint8'
    expected = (learn.dls.train.tensors[0][:2, 0] * 255).round().numpy()
    assert (image[0, :, :5, 0] == expected[0]).all() and (image[0, :, 7:, 0] == expected[1]).all()


def test_data_without_images_are_reported_at_the_first_batch() -> None:
    learn = synth_learner(cbs=ImageVisualizer())
    with pytest.raises(BatchError, match='no images'):
        learn.fit(1)
