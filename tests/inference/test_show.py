"""Displayed samples: pixels, titles and cells, the method that displays them, and an unchanged Learner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from learnkit import Callback, ClassificationInterpretation, DataLoaders, Learner, TensorLoader
from learnkit.core.batch import are_equal
from learnkit.core.errors import OptionError
from learnkit.core.plotting import WRONG
from learnkit.core.random import capture_own, capture_rng
from learnkit.data.show import as_pictures, class_colors
from learnkit.losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat


def loaders(x: Any, y: Any, vocab: Any = None, bs: int = 4, **kwargs: Any) -> DataLoaders:
    dls = DataLoaders.from_tensors((x, y), (x, y), bs=bs, **{'shuffle': False, **kwargs})
    if vocab is not None:
        dls.vocab = vocab
    return dls


def titles(axs: Any) -> list[str]:
    return [ax.get_title() for ax in axs]


# ------------------------------------------------------------------------------- show_batch: images


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


# ------------------------------------------------------------------------------- show_batch: tables


def test_vectors_are_a_table() -> None:
    x, y = torch.arange(6.0).view(3, 2) / 3, torch.tensor([1, 0, 1])
    table = loaders(x, y, ['no', 'yes']).show_batch(max_n=2)
    expected = {'x[0]': x[:2, 0].tolist(), 'x[1]': x[:2, 1].tolist(), 'target': ['yes', 'no']}
    assert table.columns == expected
    assert repr(table).splitlines() == [
        '  x[0]    x[1]  target',
        '     0  0.3333     yes',
        '0.6667       1      no',
    ]
    assert len(table) == 2


def test_long_vectors_signals_words_and_dicts() -> None:
    long = loaders(torch.rand(3, 30), torch.zeros(3)).show_batch()
    assert list(long.columns) == [*[f'x[{i}]' for i in range(8)], '...', 'target']
    assert long.columns['...'] == ['22 more'] * 3
    signals = torch.rand(3, 1, 30)
    expected = signals[:, 0, 3].tolist()
    assert loaders(signals, torch.zeros(3)).show_batch().columns['x[3]'] == expected
    words = DataLoaders([(['some words', 'others'], torch.tensor([1, 0]))]).show_batch(max_n=1)
    assert words.columns == {'x': ['some words'], 'target': [1]}
    batch = {
        'ids': torch.tensor([[1, 2], [3, 4]]),
        'age': torch.tensor([5, 6]),
        'labels': torch.tensor([0, 1]),
    }
    expected = {'ids[0]': [1, 3], 'ids[1]': [2, 4], 'age': [5, 6], 'target': [0, 1]}
    assert DataLoaders([batch]).show_batch().columns == expected
    videos = loaders(torch.rand(3, 2, 3, 4, 5), torch.zeros(3)).show_batch()
    assert videos.columns['x'] == ['Tensor[2, 3, 4, 5] float32'] * 3


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


# ----------------------------------------------------------------------------- nothing is disturbed


class Counting(Sampler[int]):
    "Draws the order of each epoch from a count of epochs."

    epoch = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(
            torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        )


class Noisy(Dataset[Any]):
    "Samples with noise from their own generator and from the global generators."

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([i + self.rng.random(), np.random.rand(), torch.rand(()).item()]), i % 2


def kinds() -> dict[str, Any]:
    return {
        'tensors': lambda: TensorLoader(
            torch.rand(12, 3), torch.arange(12) % 2, bs=4, shuffle=True
        ),
        'shuffled': lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
        'seeded': lambda: DataLoader(
            Noisy(), batch_size=4, shuffle=True, generator=torch.Generator()
        ),
        'counting': lambda: DataLoader(Noisy(), batch_size=4, sampler=Counting()),
    }


@pytest.mark.parametrize('kind', kinds())
@pytest.mark.parametrize('when', ['before', 'in the middle'])
def test_training_continues_as_without_a_display(kind: str, when: str) -> None:
    def trained(look: bool) -> tuple[Tensor, Any]:
        torch.manual_seed(0)
        np.random.seed(0)
        dl = kinds()[kind]()
        dls = DataLoaders(dl, dl)
        learn = Learner(dls, nn.Linear(3, 2), nn.CrossEntropyLoss(), lr=0.1, default_cbs=False)

        def looks(*_: Any) -> None:
            learn.dls.show_batch()
            if learn.training or not learn.run.depth:
                learn.show_results(ds_idx=0)

        if look and when == 'before':
            looks()
        learn.fit(2, cbs=Callback(after_batch=looks) if look and when != 'before' else None)
        return learn.model.weight.detach(), (capture_rng(), capture_own(dl))

    (a, before), (b, after) = trained(False), trained(True)
    assert (
        torch.equal(a, b) and are_equal(before[0], after[0]) and repr(before[1]) == repr(after[1])
    )


# ------------------------------------------------------------------------------------- show_results


def test_results_of_images_show_target_and_prediction_and_mark_the_wrong_ones() -> None:
    pytest.importorskip('matplotlib')
    from matplotlib.colors import to_rgba

    x, y = torch.rand(5, 1, 1, 2), torch.tensor([0, 1, 1, 0, 1])
    dls = loaders(x.expand(5, 1, 2, 2), y, ['cat', 'dog'], bs=5)
    learn = Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), nn.CrossEntropyLoss())
    classes = learn.get_preds()[0].argmax(1).tolist()
    axs = learn.show_results(max_n=4, figsize=(3, 3))
    names = [(dls.vocab[t], dls.vocab[p]) for t, p in zip(y[:4], classes, strict=False)]
    assert titles(axs) == [f'target {t}\npredicted {p}' for t, p in names]
    for ax, t, p in zip(axs, y.tolist(), classes, strict=False):
        assert (ax.title.get_fontweight() == 'bold') == ax.spines['top'].get_visible() == (t != p)
        if t != p:
            assert (
                to_rgba(ax.title.get_color()) == to_rgba(WRONG) == ax.spines['top'].get_edgecolor()
            )


def test_results_of_vectors_are_a_table() -> None:
    x, y = torch.tensor([[2.0, 1], [0, 1], [3, 0]]), torch.tensor([0, 0, 1])
    table = Learner(
        loaders(x, y, ['no', 'yes']), nn.Identity(), CrossEntropyLossFlat()
    ).show_results()
    assert table.columns['predicted'] == ['no', 'yes', 'no'] and table.wrong == [1, 2]
    x, y = torch.tensor([-1.0, 2, 3]), torch.tensor([0.0, 0, 1])
    for loss in (nn.BCEWithLogitsLoss(), BCEWithLogitsLossFlat()):
        table = Learner(loaders(x, y), nn.Identity(), loss).show_results()
        assert table.columns['predicted'] == [0, 1, 1] and table.wrong == [1]
    table = Learner(loaders(x, y + 0.5), nn.Identity(), nn.MSELoss()).show_results()
    assert table.columns['predicted'] == [-1, 2, 3] and table.wrong == []
    table = Learner(DataLoaders([(x,)]), nn.Identity(), nn.MSELoss()).show_results(ds_idx=0)
    assert table.columns == {'x': [-1, 2, 3], 'predicted': [-1, 2, 3]}


def test_results_of_masks_are_next_to_their_images_with_one_legend() -> None:
    pytest.importorskip('matplotlib')
    x, mask = torch.rand(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    mask[1, 0] = -100
    model = nn.Conv2d(3, 3, 1)
    learn = Learner(loaders(x, mask, ['road', 'a $x_{$', 'tree']), model, nn.CrossEntropyLoss())
    axs = learn.show_results()
    pred = model(x).argmax(1)
    assert titles(axs) == ['', 'target', 'predicted'] * 2
    pictures = [as_pictures(x), class_colors(mask), class_colors(pred)]
    for i, ax in enumerate(axs):
        expected = pictures[i % 3][i // 3].permute(1, 2, 0).numpy()
        assert np.array_equal(ax.images[0].get_array(), expected) and len(ax.images) == 1
    (legend,) = axs.figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    found = sorted({*mask.unique().tolist(), *pred.unique().tolist()} - {-100})
    assert names == ['ignored', *(['road', 'a $x_{$', 'tree'][k] for k in found)]
    axs.figure.canvas.draw()
    # no part of the legend lies over the pictures
    box = legend.get_window_extent()
    assert all(ax.get_window_extent().x1 <= box.x0 for ax in axs)


def test_binary_masks_of_floats_and_the_largest_losses() -> None:
    pytest.importorskip('matplotlib')
    x = torch.rand(5, 1, 4, 4)
    mask = (x > 0.5).float()
    model = nn.Conv2d(1, 1, 1)
    with torch.no_grad():
        model.weight.fill_(10.0), model.bias.fill_(-4.0)
    learn = Learner(loaders(x, mask, bs=5), model, nn.BCEWithLogitsLoss())
    axs = learn.show_results(max_n=4)
    assert len(axs) == 12 and axs.figure.get_axes()[0].get_gridspec().ncols == 6
    expected = class_colors((x[1, 0] > 0.4)[None].long())[0].permute(1, 2, 0).numpy()
    assert np.array_equal(axs[5].images[0].get_array(), expected)
    interp = ClassificationInterpretation.from_learner(learn)
    axs = interp.plot_top_losses(2)
    worst = interp.top_losses(2)[1].tolist()
    assert titles(axs)[::3] == [f'loss {interp.losses[i]:.4g}' for i in worst]
    for ax, i in zip(axs[1::3], worst, strict=True):
        expected = class_colors(mask[i].long())[0].permute(1, 2, 0).numpy()
        assert np.array_equal(ax.images[0].get_array(), expected)
    # pixels that are no mask: floats other than 0 and 1
    other = Learner(loaders(x, x), nn.Identity(), nn.MSELoss()).show_results()
    assert len(other) == 4
