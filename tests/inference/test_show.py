"""Displayed results: titles, marks and legends."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from learnkit import ClassificationInterpretation, DataLoaders, Learner
from learnkit.core.plotting import WRONG
from learnkit.data.show import as_pictures, class_colors
from learnkit.losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat


def loaders(x: Any, y: Any, vocab: Any = None, bs: int = 4, **kwargs: Any) -> DataLoaders:
    dls = DataLoaders.from_tensors((x, y), (x, y), bs=bs, **{'shuffle': False, **kwargs})
    if vocab is not None:
        dls.vocab = vocab
    return dls


def titles(axs: Any) -> list[str]:
    return [ax.get_title() for ax in axs]


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
