"""Test-time augmentation: compared with direct computation, new draws each time, data with augmentation."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from learnkit import Callback, DataLoaders, Learner, TensorLoader
from learnkit.core.errors import LoaderError, OptionError

X, Y = torch.linspace(-1, 1, 26).view(13, 2), torch.arange(13)


class Softmax(nn.CrossEntropyLoss):
    def activation(self, out: Tensor) -> Tensor:
        return out.softmax(-1)


def make(valid: Any = None) -> Learner:
    torch.manual_seed(0)
    valid = TensorLoader(X, Y % 3, bs=4) if valid is None else valid
    dls = DataLoaders(TensorLoader(X, Y % 3, bs=4, shuffle=True, drop_last=True), valid)
    learn = Learner(dls, nn.Linear(2, 3), Softmax())
    learn.remove_cb(learn.progress)
    return learn


class Scale:
    "Scale a sample by 1 the first time, by 2 the second time, and so on."

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.n += len(x)
        return x * ((self.n - 1) // 13 + 1)


def by_hand(learn: Learner, n: int) -> tuple[Tensor, Tensor]:
    "Return the plain predictions, and the stacked predictions of each time."
    with torch.no_grad():
        return learn.model(X).softmax(-1), torch.stack(
            [learn.model(X * (i + 1)).softmax(-1) for i in range(n)]
        )


@pytest.mark.parametrize('ds_idx', [0, 1])
@pytest.mark.parametrize('n', [1, 4])
def test_mean_maximum_and_both(n: int, ds_idx: int) -> None:
    learn = make()
    plain, aug = by_hand(learn, n)
    preds, targs = learn.tta(ds_idx, n=n, augment=Scale())
    assert torch.allclose(preds, 0.75 * aug.mean(0) + 0.25 * plain, atol=1e-6)
    assert torch.equal(targs, Y % 3)
    preds, _ = learn.tta(ds_idx, n=n, beta=0.6, augment=Scale())
    assert torch.allclose(preds, 0.4 * aug.mean(0) + 0.6 * plain, atol=1e-6)
    preds, _ = learn.tta(ds_idx, n=n, use_max=True, augment=Scale())
    assert torch.allclose(preds, torch.maximum(aug.max(0)[0], plain), atol=1e-6)
    (first, second), _ = learn.tta(ds_idx, n=n, beta=None, augment=Scale())
    assert torch.allclose(first, aug.mean(0), atol=1e-6)
    assert torch.allclose(second, plain, atol=1e-6)


def test_each_time_draws_other_numbers_and_all_generators_are_restored() -> None:
    learn, drawn = make(), []

    def noise(x: Tensor) -> Tensor:
        drawn.append((float(torch.rand(1)), random.random(), np.random.rand()))
        return x

    def states() -> Any:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    before = states()
    learn.tta(n=3, dl=[(X, Y % 3)], augment=noise)
    for values in zip(*drawn, strict=True):
        assert len(set(values)) == 3
    assert states() == before and learn.model.training and learn.run.depth == 0


class Augmented(TensorDataset):
    "Adds 1 to inputs while it acts as the training set, like a data set of fastai."

    split_idx = 1

    def __getitem__(self, i: Any) -> Any:
        x, y = super().__getitem__(i)
        return x + (self.split_idx == 0), y

    @contextmanager
    def set_split_idx(self, i: int) -> Iterator[Any]:
        before, self.split_idx = self.split_idx, i
        try:
            yield self
        finally:
            self.split_idx = before


def test_data_sets_with_their_own_augmentation() -> None:
    ds = Augmented(X, Y % 3)
    learn = make(DataLoader(ds, 4))
    preds, _ = learn.tta(n=2)
    with torch.no_grad():
        expected = 0.75 * learn.model(X + 1).softmax(-1) + 0.25 * learn.model(X).softmax(-1)
    assert torch.allclose(preds, expected, atol=1e-6) and ds.split_idx == 1
    preds, _ = learn.tta(n=2, beta=0.0, augment=lambda x: 2 * x)
    assert torch.allclose(preds, learn.model(2 * (X + 1)).softmax(-1), atol=1e-6)


def test_a_missing_or_wrong_augmentation_is_reported() -> None:
    learn, events_seen = make(), []
    learn.add_cb(Callback(before_fit=lambda cb: events_seen.append(1)))
    with pytest.raises(OptionError, match='augment='):
        learn.tta()
    with pytest.raises(OptionError, match='augment='):
        learn.tta(item_tfms=abs)
    for n in (0, 2.5):
        with pytest.raises(OptionError, match='whole number'):
            learn.tta(n=n, augment=abs)
    assert events_seen == []


def test_a_loader_that_gives_other_samples_each_time_is_refused() -> None:
    dataset = TensorDataset(X, Y % 3)
    weighted = DataLoader(dataset, 4, sampler=WeightedRandomSampler(torch.ones(13), 13))
    with pytest.raises(LoaderError, match='different samples'):
        make().tta(dl=weighted, augment=abs)


# -- predictions of positions ----------------------------------------------------------------------

IMAGES = torch.rand(10, 3, 6, 6, generator=torch.Generator().manual_seed(0))
EDGES = nn.Conv2d(3, 2, 3, padding=1)


def make_dense(model: nn.Module, x: Tensor = IMAGES) -> Learner:
    with torch.no_grad():
        targets = torch.zeros_like(model(x)[0] if isinstance(model, Heads) else model(x))
    dls = DataLoaders(TensorLoader(x, targets, bs=4), TensorLoader(x, targets, bs=4))
    return Learner(dls, model, lambda pred, targ: torch.zeros(()), default_cbs=False)


class Heads(nn.Module):
    "Return the masks and a score of the whole image."

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        masks = EDGES(x)
        return masks, masks.mean((2, 3))


def flip(x: Tensor) -> Tensor:
    return x.flip(-1)


def test_undo_moves_masks_back() -> None:
    with torch.no_grad():
        plain, mirrored = EDGES(IMAGES), flip(EDGES(flip(IMAGES)))
    preds, _ = make_dense(EDGES).tta(n=2, augment=flip, undo=flip, beta=0.25)
    assert torch.allclose(preds, 0.25 * plain + 0.75 * mirrored, atol=1e-6)
    preds, _ = make_dense(EDGES).tta(n=1, augment=flip, undo=flip, use_max=True)
    assert torch.allclose(preds, torch.maximum(plain, mirrored), atol=1e-6)
    (masks, score), _ = make_dense(Heads()).tta(
        n=1, augment=flip, undo=lambda out: (flip(out[0]), out[1]), beta=0.0
    )
    assert torch.allclose(masks, mirrored, atol=1e-6)
    assert torch.allclose(score, mirrored.mean((2, 3)), atol=1e-6)


def test_undo_knows_the_draw_of_its_batch() -> None:
    class Shift:
        "Shift the images of each batch by another number of pixels."

        n = 0

        def __call__(self, x: Tensor) -> Tensor:
            self.n += 1
            return x.roll(self.n, -1)

        def undo(self, preds: Tensor) -> Tensor:
            return preds.roll(-self.n, -1)

    pointwise = nn.Conv2d(3, 1, 1)
    shift = Shift()
    preds, _ = make_dense(pointwise).tta(n=3, augment=shift, undo=shift.undo)
    assert torch.allclose(preds, pointwise(IMAGES), atol=1e-6) and shift.n == 9


@pytest.mark.parametrize(
    ('model', 'x'),
    [
        (EDGES, IMAGES),
        (nn.Sequential(EDGES, nn.MaxPool2d(2)), IMAGES),
        (nn.Sequential(nn.Conv2d(3, 1, 1), nn.Flatten(1, 2)), IMAGES),  # masks (B, H, W)
        (Heads(), IMAGES),
        (nn.Conv1d(2, 3, 3, padding=1), torch.rand(6, 2, 9)),
        (nn.Linear(2, 5), torch.rand(6, 9, 2)),  # a prediction for each time
        (nn.Conv3d(1, 2, 1), torch.rand(6, 1, 4, 4, 4)),
    ],
)
def test_predictions_of_positions_without_undo_are_reported_once(model: Any, x: Tensor) -> None:
    learn = make_dense(model, x)
    with pytest.warns(UserWarning, match='undo=f') as found:
        learn.tta(n=3, augment=torch.clone)
    assert len(found) == 1 and 'predict.py' not in found[0].filename
    learn.tta(n=1, augment=torch.clone, undo=lambda preds: preds)


def test_scores_of_whole_images_need_no_undo() -> None:
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(108, 6))
    make_dense(classifier).tta(n=1, augment=flip)
    make_dense(nn.Linear(4, 4), torch.rand(6, 4)).tta(n=1, augment=flip)
    # as many classes as each time has features
    of_sequences = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    make_dense(of_sequences, torch.rand(6, 3, 4)).tta(n=1, augment=flip)


def test_predictions_of_another_shape_are_refused() -> None:
    learn = make_dense(EDGES)
    with pytest.raises(OptionError, match=r'6, 6.*3, 6.*undo'):
        learn.tta(augment=lambda x: x[:, :, ::2], undo=lambda preds: preds)
    with pytest.raises(OptionError, match='undo'):
        learn.tta(augment=flip, undo=flip(IMAGES))  # type: ignore[arg-type]
