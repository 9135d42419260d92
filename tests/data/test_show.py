"""Displayed samples: pixels and titles, the loader and the batch, and the data set's own method."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from learnkit import DataLoaders
from learnkit.core.errors import OptionError
from learnkit.data.show import class_colors


def loaders(x: Any, y: Any, vocab: Any = None, bs: int = 4, **kwargs: Any) -> DataLoaders:
    dls = DataLoaders.from_tensors((x, y), (x, y), bs=bs, **{'shuffle': False, **kwargs})
    if vocab is not None:
        dls.vocab = vocab
    return dls


def titles(axs: Any) -> list[str]:
    return [ax.get_title() for ax in axs]


@pytest.mark.parametrize('shape', [(6, 1, 5, 4), (6, 5, 4)])
def test_images_of_one_channel_with_the_names_of_their_classes(shape: tuple[int, ...]) -> None:
    pytest.importorskip('matplotlib')
    x, y = torch.rand(shape), torch.tensor([0, 1, 1, 0, 1, 0])
    axs = loaders(x, y, ['cat', 'dog'], bs=6).show_batch(max_n=5)
    assert titles(axs) == ['cat', 'dog', 'dog', 'cat', 'dog'] and len(axs.figure.axes) == 5
    for ax, image in zip(axs, x, strict=False):
        assert np.array_equal(ax.images[0].get_array(), image.reshape(5, 4).numpy())
        assert ax.images[0].get_clim() == (0, 1) and ax.images[0].get_cmap().name == 'gray'
        assert not any(spine.get_visible() for spine in ax.spines.values())
        assert not len(ax.get_xticks())


@pytest.mark.parametrize('last', [False, True])
def test_bytes_and_floats_in_color(last: bool) -> None:
    pytest.importorskip('matplotlib')
    x = torch.randint(256, (3, 3, 6, 5), dtype=torch.uint8)
    axs = loaders(x.permute(0, 2, 3, 1) if last else x, torch.zeros(3)).show_batch(figsize=(4, 2))
    assert np.array_equal(axs[1].images[0].get_array(), (x[1].permute(1, 2, 0) / 255).numpy())
    assert axs.figure.get_size_inches().tolist() == [4, 2]


def test_masks_are_next_to_their_images() -> None:
    pytest.importorskip('matplotlib')
    x, mask = torch.rand(4, 3, 6, 5), torch.randint(3, (4, 6, 5))
    axs = loaders(x, mask).show_batch()
    expected = class_colors(mask)[2].permute(1, 2, 0).numpy()
    assert np.array_equal(axs[5].images[0].get_array(), expected)
    assert titles(axs) == ['', 'target'] * 4


def test_which_loader_and_which_batch() -> None:
    x = torch.arange(12.0)
    train = (x, x)
    dls = DataLoaders.from_tensors(train, {'a': (x + 20, x), 'b': (x + 50, x)}, bs=4, shuffle=False)
    assert dls.show_batch().columns['x'] == [0, 1, 2, 3]
    assert dls.show_batch(ds_idx=1).columns['x'] == [20, 21, 22, 23]
    assert dls.show_batch(ds_idx='b', max_n=1).columns['x'] == [50]
    assert dls.show_batch((x[:2] - 1, x[:2])).columns['x'] == [-1, 0]


def test_bad_questions_are_reported() -> None:
    dls = loaders(torch.rand(3, 2), torch.zeros(3))
    for bad in (0, -1, 2.5, True, None):
        with pytest.raises(OptionError, match='max_n='):
            dls.show_batch(max_n=bad)  # type: ignore[arg-type]
    once = DataLoaders(iter([(torch.zeros(2), torch.zeros(2))]))
    with pytest.raises(OptionError, match='is an iterator'):
        once.show_batch()
    assert len(list(once.train)) == 1


class Shows(list[Any]):
    "A loader with `show_batch`."

    def show_batch(self, b: Any = None, max_n: int = 9, **kwargs: Any) -> Any:
        return b, max_n, kwargs


class ShowsItself(Dataset[Any]):
    "A data set with `show`."

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        return torch.zeros(2), 0

    def show_batch(self, max_n: int = 9) -> Any:
        return 'itself', max_n


def test_the_datas_own_method_comes_first() -> None:
    dls = DataLoaders(Shows([(torch.zeros(2), torch.zeros(2))]), DataLoader(ShowsItself()))
    assert dls.show_batch(max_n=3, more=1) == (None, 3, {'more': 1})
    assert dls.show_batch('b') == ('b', 9, {})
    assert dls.show_batch(ds_idx=1) == ('itself', 9)
